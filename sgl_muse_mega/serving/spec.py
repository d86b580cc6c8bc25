"""The plugin's contract with SGLang: what it needs, what it accepts, and how it is built. SGLang imports `SPEC` by name
and only with --enable-nvidia-megakernel."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.kernels.plugin_kernels.nvidia.spec import (
    MEGAKERNEL_API_VERSION,
    Feature,
    MegakernelSpec,
    Numerics,
    NumericsKind,
    Requirements,
)
from torch import Tensor

from sgl_muse_mega.megakernel.cuda import CudaMachine
from sgl_muse_mega.megakernel.instance import MAX_ROWS, row_cap_of
from sgl_muse_mega.megakernel.machine import Machine
from sgl_muse_mega.megakernel.mailbox import NoMail
from sgl_muse_mega.megakernel.peers import ARENA_BYTES, DECODE_ARENA_BYTES, PeerMemory
from sgl_muse_mega.megakernel.place import Place
from sgl_muse_mega.megakernel.step import Step
from sgl_muse_mega.serving import hooks, switches, tables, worker
from sgl_muse_mega.serving.coverage import Coverage, Monitor
from sgl_muse_mega.serving.model_config import target_config
from sgl_muse_mega.serving.ranks import connect
from sgl_muse_mega.serving.ranks import place as rank_and_ranks
from sgl_muse_mega.serving.reasons import KV_DTYPES, config_disable_reasons, model_disable_reasons
from sgl_muse_mega.serving.target import TargetMegakernel
from sgl_muse_mega.serving.weights import kernel_weights

logger = logging.getLogger(__name__)

_KEPT: list[PeerMemory] = []  # mailboxes stay as long as the process
TARGETS = {(9, 0): "sm_90a", (10, 3): "sm_103a"}


def build(model: Any, hf_config: Any, context: Any) -> TargetMegakernel:
    """Called on every rank after the weights are there and before the KV cache is sized.

    Raises UserError when the kernels cannot be compiled or do not fit the GPU.
    """
    machine = CudaMachine(deadline_seconds=context.deadline_s, targets=TARGETS)
    before = torch.cuda.memory_allocated()
    rank, ranks = rank_and_ranks()
    place: Place | None = None
    for experiment in experiments(ranks):
        logger.warning("Muse megakernel: %s; compare the text with SGLang's own.", experiment)
    if ranks > 1:
        peers, place = connect(rank, ranks, DECODE_ARENA_BYTES if switches.step() == "full" else ARENA_BYTES)
        _KEPT.append(peers)
    built = build_on(machine, model, hf_config, rows=context.tokens_per_request, place=place)
    used = (torch.cuda.memory_allocated() - before) / 2**20
    logger.info("Muse megakernel: %.0f MiB beyond SGLang's weights, which it reads where they are.", used)
    Monitor(built.coverage, machine.fault_record).start()
    return built


def experiments(ranks: int) -> list[str]:
    """What of this server no hardware has run yet: it must have been asked for, and every log says so."""
    found = []
    if ranks > 1:
        found.append(f"the plugin has never run on {ranks} GPUs ({switches.EXPERIMENTAL_TP})")
    if torch.cuda.get_device_capability() != (9, 0):
        found.append(f"the kernels have never run on a GPU of this kind ({switches.EXPERIMENTAL_SM103})")
    return found


def build_on(
    machine: Machine, model: Any, hf_config: Any, *, rows: int, place: Place | None = None
) -> TargetMegakernel:
    """The same on any machine; `rows` of one request per step. place: this rank's among several."""
    from sglang.srt.runtime_context import attention_backends, get_model, get_schedule, get_spec, process_model_config

    _, backend = attention_backends()
    config, mail = target_config(hf_config), place.mail if place else NoMail()
    if rows == 1 and backend in tables.PACKED:
        # SGLang's Triton backend gives a decoding row the last window - 1 keys, itself included; its tables hold no
        # more, and the text should be the one that the server gives without the plugin.
        config = config.model_copy(update={"sliding_window": config.sliding_window - 1})
    row_cap = row_cap_of(rows)
    step = Step(
        config,
        kernel_weights(model, config, mail.rank, mail.ranks),
        machine,
        row_cap=row_cap,
        max_context=int(process_model_config().context_len) + 2 * row_cap,
        kv_dtype=KV_DTYPES[get_model().kv_cache_dtype],
        mail=mail if mail.ranks > 1 else None,
        progress=logger.info,
    )
    built = TargetMegakernel(
        step,
        rows=rows,
        page_size=int(get_schedule().page_size),
        layers_to_capture=lambda: model.model.language_model.layers_to_capture,
        coverage=Coverage(mail.rank),
        place=place,
        head=split_head(model) if mail.ranks > 1 else None,
        note=f", step={switches.step()}" + (f", rank {mail.rank} of {mail.ranks}" if mail.ranks > 1 else ""),
    )
    speculative = get_spec().speculative_algorithm is not None
    observe(built, model, speculative=speculative)
    if speculative and switches.step() == "full":
        worker.install(built)
    return built


def split_head(model: Any) -> Callable[[Tensor, Tensor, Any], Any]:
    """SGLang's own final norm and head: a rank's part of the logits, or all of them, as the batch wants."""

    def head(input_ids: Tensor, stream: Tensor, forward_batch: Any) -> Any:
        hidden = model.model.language_model.norm(stream.to(torch.bfloat16)).to(torch.bfloat16)
        return model.logits_processor(input_ids, hidden, model.lm_head, forward_batch)

    return head


def observe(built: TargetMegakernel, model: Any, *, speculative: bool) -> None:
    """Counts every forward of `model`, replayed graphs included, and what verify steps accept."""
    coverage = built.coverage

    def forward(original: Any, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if runner.model is model:
            reason = built.declines(forward_batch)
            if reason is None:
                coverage.ran(f"{built.mode.replace('_', ' ')} steps")
            else:
                coverage.declined(reason)
        return original(runner, forward_batch, *args, **kwargs)

    def verified(original: Any, owner: Any, num_correct_drafts_per_req: list[int], *args: Any, **kwargs: Any) -> Any:
        coverage.accepted(num_correct_drafts_per_req)
        return original(owner, num_correct_drafts_per_req, *args, **kwargs)

    hooks.wrap(hooks.FORWARD, forward)
    if speculative:
        hooks.wrap(hooks.VERIFIED, verified)


SPEC = MegakernelSpec(
    name="sgl-muse-mega",
    api_version=MEGAKERNEL_API_VERSION,
    requires=Requirements(
        isas=frozenset({"sm_90", "sm_103"}),
        tp_sizes=frozenset(),  # `reasons` says what of several GPUs is served, and how to ask for it
        dtypes=frozenset({"bfloat16"}),
        decode_graph_backends=frozenset({"full", "disabled"}),
    ),
    features=frozenset({Feature.SPECULATIVE_DECODING, Feature.EXPERT_PARALLEL}),
    numerics=Numerics(
        kind=NumericsKind.TOLERANCE,
        # Relative RMS difference of a row's logits from SGLang's own forward: q is not rounded to FP8 here, the
        # router is fp32 for every number of rows, and the experts' global scales are not rounded to bf16.
        tolerances={"logits": 0.05},
    ),
    max_rows=MAX_ROWS,
    build=build,
    model_disable_reasons=model_disable_reasons,
    config_disable_reasons=config_disable_reasons,
)
