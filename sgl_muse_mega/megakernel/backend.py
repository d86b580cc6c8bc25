"""The kernels as a backend of the step loop, on a GPU or in the emulator."""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from sgl_muse_mega.checkpoint.weights import DraftWeights, TargetWeights
from sgl_muse_mega.config import DraftConfig, TargetConfig, check_pair
from sgl_muse_mega.megakernel.graph import StepGraphs
from sgl_muse_mega.megakernel.instance import MAX_ROWS, row_cap_of
from sgl_muse_mega.megakernel.machine import Machine
from sgl_muse_mega.megakernel.step import CACHE_DTYPES, Step
from sgl_muse_mega.megakernel.torch_draft import TorchDraft
from sgl_muse_mega.megakernel.weights import prepare
from sgl_muse_mega.speculative.backend import DraftBlock, check_prompt, check_rows

Container = TypeVar("Container", bound=TargetWeights | DraftWeights)


class KernelBackend:
    """Implements `speculative.backend.Backend`; on a GPU every forward is a replay of one CUDA graph.

    Position i lives in slot i + 1 of every layer's cache; slot 0 stays unused, as in the server.
    """

    def __init__(
        self,
        target_config: TargetConfig,
        target_weights: TargetWeights,
        draft_config: DraftConfig | None = None,
        draft_weights: DraftWeights | None = None,
        *,
        machine: Machine,
        max_context: int | None = None,
        kv_dtype: str = "bf16",
    ) -> None:
        """Moves the weights to the machine. Raises UserError when the models do not fit each other or the kernels."""
        limit = target_config.max_position_embeddings
        self._max_context = limit if max_context is None else min(max_context, limit)
        self._config = target_config
        self._machine = machine
        self._kv_dtype = kv_dtype
        device = machine.device
        target_weights = to_device(target_weights, device)
        self._weights = prepare(target_config, target_weights)
        self._taps = tuple(draft_config.target_layer_ids) if draft_config else ()
        shape = (self._max_context + MAX_ROWS + 1, target_config.num_key_value_heads, target_config.head_dim)
        storage = CACHE_DTYPES[kv_dtype]
        self._caches = [
            (torch.zeros(shape, dtype=storage, device=device), torch.zeros(shape, dtype=storage, device=device))
            for _ in self._weights.layers
        ]
        self._steps: dict[int, Step] = {}
        self._graphs: dict[int, StepGraphs] = {}
        self._draft: TorchDraft | None = None
        if draft_config is not None and draft_weights is not None:
            check_pair(target_config, draft_config)
            self._draft = TorchDraft(
                draft_config, to_device(draft_weights, device), target_weights, target_config.rms_norm_eps, MAX_ROWS
            )
        self._length = 0
        self._pending_taps: Tensor | None = None

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    @property
    def max_context(self) -> int:
        return self._max_context

    @property
    def has_draft(self) -> bool:
        return self._draft is not None

    @property
    def width_limit(self) -> int:
        return MAX_ROWS

    @property
    def length(self) -> int:
        return self._length

    def prefill(self, ids: Sequence[int]) -> Tensor:
        """Starts a sequence, in steps of up to MAX_ROWS rows; float32 logits [V] of the last prompt row.

        Raises UserError on an empty or long prompt.
        """
        check_prompt(ids, self._max_context)
        self._length = 0
        if self._draft:
            self._draft.reset()
        for start in range(0, len(ids), MAX_ROWS):
            chunk = ids[start : start + MAX_ROWS]
            logits = self.verify(chunk)[-1]
            self.commit(len(chunk))
        return logits

    def draft(self, anchor: int, width: int, temperature: float, uniforms: Sequence[float]) -> DraftBlock:
        """Proposes width - 1 tokens after `anchor`; temperature 0 walks greedily."""
        assert self._draft is not None, "draft() needs a draft model"
        with torch.inference_mode():
            return self._draft.propose(anchor, self._length, width, temperature, uniforms)

    def verify(self, tokens: Sequence[int]) -> Tensor:
        """Float32 logits [T, V] of the rows at positions length .. length + T - 1."""
        rows, end = len(tokens), self._length + len(tokens)
        check_rows(end, self._max_context)
        step = self._step(rows)
        inputs = step.inputs
        positions = torch.arange(self._length, end)
        inputs.token_ids[:rows].copy_(torch.tensor(list(tokens)))
        inputs.positions[:rows].copy_(positions)
        inputs.full_slots[:rows].copy_(positions + 1)
        inputs.sliding_slots[:rows].copy_(positions + 1)
        inputs.length.fill_(self._length)
        self._machine.attach(step, self._caches)
        if self._machine.device.type == "cuda":
            self._graphs[step.instance.row_cap].replay(rows)
        else:
            step.launch(rows)
        self._machine.synchronize()
        self._pending_taps = step.taps[:rows].transpose(0, 1)
        return step.activations.logits[:rows].cpu().clone()

    def commit(self, rows: int) -> None:
        """Makes the first `rows` of the last forward part of the sequence and writes their draft context."""
        assert self._pending_taps is not None, "commit() needs a verify before it"
        if self._draft and rows:
            with torch.inference_mode():
                self._draft.extend(self._pending_taps[:, :rows], self._length)
        self._length += rows
        self._pending_taps = None

    def _step(self, rows: int) -> Step:
        cap = row_cap_of(rows)
        if cap not in self._steps:
            step = Step(
                self._config, self._weights, self._machine, row_cap=cap, max_context=self._max_context,
                kv_dtype=self._kv_dtype, taps=self._taps,
            )  # fmt: skip
            step.use_caches(self._caches)
            slots = torch.arange(1, len(step.inputs.full_pages) + 1, dtype=torch.int32)
            step.inputs.full_pages.copy_(slots)
            step.inputs.sliding_pages.copy_(slots)
            self._steps[cap], self._graphs[cap] = step, StepGraphs(step)
        return self._steps[cap]


def to_device(weights: Container, device: torch.device) -> Container:
    """A weight container with every tensor in it, however deep, on `device`."""
    moved: Container = _moved(weights, device)
    return moved


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(_moved(item, device) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _moved(getattr(value, f.name), device) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value
