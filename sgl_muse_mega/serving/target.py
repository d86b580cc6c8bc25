"""The target's forward of one request, in place of SGLang's: what the spec builds and SGLang dispatches to."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sgl_muse_mega.megakernel.place import Place
from sgl_muse_mega.megakernel.step import Step
from sgl_muse_mega.serving.coverage import Coverage
from sgl_muse_mega.serving.tables import AttentionTables

DECODE, VERIFY = "decode", "target_verify"


class TargetMegakernel:
    """Implements SGLang's BuiltMegakernel over a `Step`. `rows`: of one request's decode or verify step."""

    draft_sampler = None

    def __init__(
        self,
        step: Step,
        *,
        rows: int,
        page_size: int,
        layers_to_capture: Callable[[], list[int]],
        coverage: Coverage,
        place: Place | None = None,
        head: Callable[[Tensor, Tensor, Any], Any] | None = None,
        note: str = "",
    ) -> None:
        """layers_to_capture: the layers whose streams the draft wants, which SGLang decides after the build.

        place: this rank's among several. head: what makes SGLang's output from ids, streams float32 [rows, H] and the
        batch, where the vocabulary is split among them and SGLang gathers logits as the batch wants them; None: the
        kernels' own head.
        """
        self.step = step
        self.rows = rows
        self.mode = VERIFY if rows > 1 else DECODE
        self.widths = (rows,)
        self.coverage = coverage
        window = step.config.sliding_window
        self._tables = AttentionTables(step.machine, step.inputs, window=window, page_size=page_size)
        self._layers_to_capture = layers_to_capture
        self.place = place
        self._head = head
        self._note = note
        self._pool: Any = None
        self._caches: list[tuple[Tensor, Tensor]] = []

    def summary(self) -> str:
        """For the line that says the megakernel is active."""
        layers = self.step.weights.layers
        nvfp4 = sum(layer.nvfp4 for layer in layers)
        return (
            f"{len(layers)} layers ({nvfp4} with NVFP4 experts), one request of {self.rows} "
            f"row{'s' if self.rows > 1 else ''} per step, contexts up to {self.step.max_context}{self._note}"
        )

    def declines(self, forward_batch: Any) -> str | None:
        """Why SGLang's own forward must run this batch, or None; from host state alone."""
        mode = forward_batch.forward_mode
        if not (mode.is_target_verify() if self.mode == VERIFY else mode.is_decode()):
            return f"{mode.name.lower().replace('_', ' ')} steps"
        if forward_batch.batch_size != 1:
            return "steps of more than one request"
        if forward_batch.input_ids is None or len(forward_batch.input_ids) != self.rows:
            return f"steps of another width than {self.rows}"
        if self.mode == DECODE and forward_batch.capture_hidden_mode.need_capture():
            return "decode steps that return hidden states"
        if forward_batch.lora_ids is not None and any(name is not None for name in forward_batch.lora_ids):
            return "steps with LoRA adapters"
        return None

    def plan(self, input_ids: Tensor | None, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """SGLang's Step when the kernels run this batch, else None."""
        from sglang.kernels.plugin_kernels.nvidia.spec import Step as PlannedStep

        if input_ids is None or self.declines(forward_batch) is not None:
            return None
        return PlannedStep(mode=self.mode, rows=self.rows)

    def forward(
        self,
        step: Any,
        original: Callable[..., Any],
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """SGLang's LogitsProcessorOutput: float32 logits [rows, V] and, for a draft, its taps bf16 [rows, taps H].

        Both are the step's own buffers, as they are a graph's in SGLang: the next step overwrites them.
        """
        self.launch(step.view, input_ids, positions, forward_batch)
        return self.output(input_ids, forward_batch)

    def launch(self, view: Any, input_ids: Tensor, positions: Tensor, forward_batch: Any) -> None:
        """Enqueues a step over SGLang's caches and tables (view: its ForwardView)."""
        self.bind(view.kv_pool.pool)
        rows = self.rows
        self._tables.launch(input_ids, positions, forward_batch.out_cache_loc, view.metadata)
        self.step.machine.attach(self.step, self._caches)
        if self._head is None:
            self.step.launch(rows)
            return
        self.step.launch_embed(rows)
        for index in range(len(self.step.weights.layers)):
            self.step.launch_layer(index, rows)

    def output(self, input_ids: Tensor, forward_batch: Any) -> Any:
        """What SGLang's forward returns, of the step that was enqueued last."""
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput

        rows, activations = self.rows, self.step.activations
        taps = self.step.taps[:rows].flatten(1) if self.step.taps_after else None
        if self._head is None:
            return LogitsProcessorOutput(next_token_logits=activations.logits[:rows], hidden_states=taps)
        result = self._head(input_ids, activations.stream[:rows], forward_batch)
        result.hidden_states = taps
        return result

    @property
    def caches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values per layer, of the pool that is bound."""
        return self._caches

    def bind(self, pool: Any) -> None:
        """Takes the caches of SGLang's pool and the draft's taps, both of which exist only now.

        Raises UserError when the caches are not what the kernels read.
        """
        if pool is self._pool:
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("The KV pool changed inside a graph capture.")
        self.step.use_taps(tuple(sorted(set(self._layers_to_capture()))))
        layers = range(len(self.step.weights.layers))
        self._caches = [(pool.get_key_buffer(i), pool.get_value_buffer(i)) for i in layers]
        self.step.use_caches(self._caches)
        self._pool = pool
