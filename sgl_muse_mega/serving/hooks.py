"""The methods of SGLang that the plugin wraps: each is known by its parameters and checked before anything is built."""

import functools
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_WORKER = "sglang.srt.speculative.dflash_worker_v2:DFlashWorkerV2"


@dataclass(frozen=True, slots=True)
class Target:
    """A method of a class: `module:Class.method` with its parameters as SGLang 0.5.23 has them."""

    path: str
    parameters: tuple[str, ...]

    def problem(self) -> str | None:
        """Why this is not the method that the plugin was written for, or None."""
        try:
            method = pkgutil.resolve_name(self.path)
        except (ImportError, AttributeError) as error:
            return f"SGLang has no {self.path} ({error})"
        found = tuple(inspect.signature(method).parameters)
        if found != self.parameters:
            return f"{self.path} takes ({', '.join(found)}), not ({', '.join(self.parameters)})"
        return None


FORWARD = Target(
    "sglang.srt.model_executor.model_runner:ModelRunner.forward",
    (
        "self", "forward_batch", "skip_attn_backend_init", "pp_proxy_tensors", "reinit_attn_backend",
        "split_forward_count",
    ),
)  # fmt: skip
REPACK = Target(
    "sglang.srt.layers.muse_spark.muse_spark_nvfp4_moe:MuseSparkNvFp4FusedMoEMethod.process_weights_after_loading",
    ("self", "layer"),
)
VERIFIED = Target(f"{_WORKER}.on_verify_complete_cpu", ("self", "num_correct_drafts_per_req", "batch_size"))
STEP = Target(
    f"{_WORKER}.forward_batch_generation", ("self", "batch", "on_publish", "grammar_barrier", "pp_proxy_tensors")
)
GRAPHS = Target(f"{_WORKER}.init_cuda_graphs", ("self",))
GREEDY = Target(f"{_WORKER}._can_skip_verify_logits", ("self", "batch", "sampling_info"))
NEXT_INPUT = Target(f"{_WORKER}._make_next_draft_input_decode", ("self", "bonus_tokens", "new_seq_lens"))

SERVER = (FORWARD, REPACK)
SPECULATION = (VERIFIED, STEP, GRAPHS, GREEDY, NEXT_INPUT)


def problems(targets: tuple[Target, ...]) -> Iterator[str]:
    """One clause per target that is missing or changed."""
    for target in targets:
        problem = target.problem()
        if problem:
            yield f"{problem}; the plugin is written for SGLang 0.5.23, install that version"


def wrap(target: Target, around: Callable[..., Any]) -> None:
    """Calls `around(original, self, *args, **kwargs)` in place of the method from now on, in this process; an earlier
    wrapper of ours goes."""
    unwrap(target)
    owner, name = _place(target)
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    wrapper.muse_mega_original = original  # type: ignore[attr-defined]
    setattr(owner, name, wrapper)


def unwrap(target: Target) -> None:
    """Puts the original method back, if it was wrapped."""
    owner, name = _place(target)
    original = getattr(getattr(owner, name), "muse_mega_original", None)
    if original is not None:
        setattr(owner, name, original)


def _place(target: Target) -> tuple[Any, str]:
    owner, name = target.path.rsplit(".", 1)
    return pkgutil.resolve_name(owner), name
