"""Whole decode steps as graph replays: what `speculative.generate` runs with `--backend cuda`."""

import time
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from sgl_muse_mega.checkpoint.weights import DraftWeights, TargetWeights
from sgl_muse_mega.config import DraftConfig, TargetConfig, check_pair
from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel.accept_step import AcceptStep
from sgl_muse_mega.megakernel.backend import ROW_CAPS, to_device
from sgl_muse_mega.megakernel.build import Progress, quiet
from sgl_muse_mega.megakernel.decode_request import Report, read_report, request_words
from sgl_muse_mega.megakernel.decode_step import DecodeStep
from sgl_muse_mega.megakernel.draft_scratch import DecodeState
from sgl_muse_mega.megakernel.draft_step import DraftStep
from sgl_muse_mega.megakernel.draft_weights import prepare_draft
from sgl_muse_mega.megakernel.machine import Machine
from sgl_muse_mega.megakernel.step import CACHE_DTYPES, Step
from sgl_muse_mega.megakernel.weights import prepare
from sgl_muse_mega.speculative.sampling import SamplingParams

AHEAD = 2
"""Steps in flight: while one runs, the next is already enqueued, and the host reads the one before."""


class DecodeBackend:
    """Implements `speculative.backend.StepBackend`. Position i lives in slot i + 1 of every cache."""

    def __init__(
        self,
        target_config: TargetConfig,
        target_weights: TargetWeights,
        draft_config: DraftConfig | None = None,
        draft_weights: DraftWeights | None = None,
        *,
        machine: Machine,
        width: int,
        max_context: int | None = None,
        kv_dtype: str = "bf16",
        progress: Progress = quiet,
    ) -> None:
        """width: of the widest step. Moves the weights to the machine.

        Raises UserError when the models do not fit each other or the kernels.
        """
        limit = target_config.max_position_embeddings
        self.max_context = limit if max_context is None else min(max_context, limit)
        self.vocab_size = target_config.vocab_size
        self.has_draft = draft_config is not None
        self.width_limit = row_cap = next(cap for cap in ROW_CAPS if width <= cap)
        self.length = 0
        self._machine, device = machine, machine.device
        target_weights = to_device(target_weights, device)
        taps = tuple(draft_config.target_layer_ids) if draft_config else ()
        step = Step(
            target_config, prepare(target_config, target_weights), machine, row_cap=row_cap,
            max_context=self.max_context, kv_dtype=kv_dtype, taps=taps, progress=progress,
        )  # fmt: skip
        slots = torch.arange(1, len(step.inputs.full_pages) + 1, dtype=torch.int32)
        step.inputs.full_pages.copy_(slots)
        step.inputs.sliding_pages.copy_(slots)
        heads = (target_config.num_key_value_heads, target_config.head_dim)
        self._caches = _caches(len(step.weights.layers), (len(slots) + 1, *heads), CACHE_DTYPES[kv_dtype], device)
        step.use_caches(self._caches)

        state = DecodeState.allocate(row_cap, device)
        draft = None
        if draft_config is not None and draft_weights is not None:
            check_pair(target_config, draft_config)
            weights = prepare_draft(
                draft_config, to_device(draft_weights, device), target_weights.embed_tokens, target_weights.lm_head
            )
            draft = DraftStep(
                draft_config, weights, machine, step.inputs, step.taps, state,
                embedding_eps=target_config.rms_norm_eps, progress=progress,
            )  # fmt: skip
            heads = (draft_config.num_key_value_heads, draft_config.head_dim)
            draft.use_caches(_caches(len(weights.layers), (len(slots) + 1, *heads), torch.bfloat16, device))
            draft.pages.copy_(slots)
        accept = AcceptStep(
            machine, step.inputs, step.activations.logits, step.activations.greedy_ids, state,
            draft.activations if draft else None, softcap=target_config.final_logit_softcapping, progress=progress,
        )  # fmt: skip
        self.decode = DecodeStep(step, draft, accept, state)
        self._graphs: dict[tuple[str, int], torch.cuda.CUDAGraph] = {}
        self._width = 1
        self._launched = self._read = 0

    def prefill(self, ids: Sequence[int]) -> Tensor:
        """Starts a sequence, in steps of up to `width_limit` rows; float32 logits [V] of the last prompt row.

        Raises UserError on an empty or long prompt.
        """
        if not ids:
            raise UserError("The prompt is empty; at least one token is needed.")
        if len(ids) > self.max_context:
            raise UserError(f"The prompt has {len(ids)} tokens, but the context holds {self.max_context}.")
        self._drain()
        self.decode.declare(self._caches)
        self.length = 0
        for start in range(0, len(ids), self.width_limit):
            chunk = ids[start : start + self.width_limit]
            self.decode.seek(chunk, start)
            self._run("prompt", len(chunk), self.decode.launch_prompt)
            self._machine.synchronize()
            self.length += len(chunk)
        return self.decode.step.activations.logits[len(chunk) - 1].cpu().clone()

    def begin(
        self, anchor: int, params: SamplingParams, *, width: int, max_new_tokens: int, stop_ids: Collection[int]
    ) -> None:
        """Decoding starts behind `anchor`, the first new token; steps have `width` rows where the context allows it."""
        words = request_words(params, max_new_tokens=max_new_tokens, max_context=self.max_context, stop_ids=stop_ids)
        self._drain()
        self.decode.begin(anchor, self.length, words)
        self._width = width
        self._launched = self._read = 0

    def next_step(self) -> Report:
        """The report of the next step. Further steps are enqueued before it is waited for."""
        while self._launched - self._read < AHEAD:
            # Steps in flight move the sequence on by an unknown number of rows; near the end of the context the next
            # width depends on it.
            moved = (self._launched - self._read) * self._width
            room = self.max_context - 1 - self.length - moved
            if moved and room < self._width:
                break
            width = min(self._width, room)
            if width < 1:
                break
            self._run("step", width, self.decode.launch)
            self._launched += 1
        report = self._wait(self._read + 1)
        self._read += 1
        self.length = report.length
        return report

    def _wait(self, step: int) -> Report:
        if self._machine.device.type != "cuda":
            self._machine.synchronize()
        deadline = time.monotonic() + self._machine.deadline_ns * 1e-9
        while (report := read_report(self.decode.state, step)) is None:
            if time.monotonic() > deadline:
                self._machine.synchronize()  # raises when a kernel gave up
                deadline = time.monotonic() + 1
        return report

    def _drain(self) -> None:
        """Steps that were enqueued ahead of the end of a sequence must not meet the next one's inputs."""
        self._machine.synchronize()
        self._launched = self._read

    def _run(self, kind: str, rows: int, launch: Callable[[int], None]) -> None:
        if self._machine.device.type != "cuda":
            launch(rows)
            return
        if (kind, rows) not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                launch(rows)
            self._graphs[kind, rows] = graph
        self._graphs[kind, rows].replay()


def _caches(
    layers: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    return [
        (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
        for _ in range(layers)
    ]
