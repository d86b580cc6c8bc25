"""The draft's launches over fixed buffers: block, head with selector, and context."""

from dataclasses import fields, replace

import torch
from torch import Tensor

from sgl_muse_mega.config import DraftConfig
from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel import draft_protocol, protocol
from sgl_muse_mega.megakernel.build import Progress, quiet
from sgl_muse_mega.megakernel.draft_instance import DraftInstance, TargetEnds
from sgl_muse_mega.megakernel.draft_protocol import FIRST_LAUNCH, DraftParams
from sgl_muse_mega.megakernel.draft_scratch import DecodeState, DraftActivations, KernelControl
from sgl_muse_mega.megakernel.draft_weights import KernelDraft, KernelDraftLayer, check_draft
from sgl_muse_mega.megakernel.machine import Machine
from sgl_muse_mega.megakernel.mailbox import Mail, NoMail, session_word
from sgl_muse_mega.megakernel.scratch import StepInputs
from sgl_muse_mega.megakernel.step import Step
from sgl_muse_mega.megakernel.tensors import Spec, check
from sgl_muse_mega.megakernel.tiling import BLOCK_ROWS
from sgl_muse_mega.megakernel.weights import rope_table


class DraftStep:
    """Proposes blocks after the anchor `inputs.token_ids[0]` at position `inputs.length`, and writes the context of
    committed rows.

    `inputs` and `taps` belong to the target's step: the walk writes its tokens to inputs.token_ids[1:].
    """

    def __init__(
        self,
        config: DraftConfig,
        weights: KernelDraft,
        machine: Machine,
        inputs: StepInputs,
        taps: Tensor,
        state: DecodeState,
        *,
        target: TargetEnds,
        progress: Progress = quiet,
        first_epoch: int = 0,
        trace: bool = False,
        mail: Mail | None = None,
    ) -> None:
        """taps bf16 [row_cap, n_taps, H]. mail: this rank's place among others (None: it is alone); `config` is of the
        whole draft, `weights` are the rank's share. Raises UserError when sizes or tensors do not fit the kernels."""
        self.config, self.weights, self.machine = config, weights, machine
        self.inputs, self.taps, self.state = inputs, taps, state
        row_cap, positions = len(inputs.token_ids), len(inputs.full_pages)
        self.mail: Mail = mail or NoMail()
        instance = DraftInstance.for_config(config, target, row_cap=row_cap, sms=machine.sms, ranks=self.mail.ranks)
        self.instance = replace(instance, trace=trace)
        device = machine.device
        check_draft(instance, weights, device)
        taps_shape = (row_cap, len(config.target_layer_ids), config.hidden_size)
        check([(Spec("taps", taps_shape, torch.bfloat16), taps)], device, "the taps")
        # Logs of the last launch, int64 [CTAs, warps, LOG_WORDS] (csrc/layer/trace.cuh).
        shape = (machine.sms, self.instance.threads // 32, protocol.LOG_WORDS) if self.instance.trace else (0,)
        self.trace = torch.zeros(shape, dtype=torch.int64, device=device)
        self.module = machine.load(self.instance, progress)
        self.control = {
            kernel: KernelControl.allocate(draft_protocol.DRAFT_COUNTERS, machine.sms, row_cap, device, first_epoch)
            for kernel in DraftInstance.kernels
        }
        self.activations = DraftActivations.allocate(self.instance, device)
        self.rope = rope_table(config.rope_theta, positions, config.head_dim, device)
        self.pages = torch.zeros(positions, dtype=torch.int32, device=device)
        self.caches: list[tuple[Tensor, Tensor]] = []
        self.mailbox, self._mailboxes = self.mail.take(self.instance.mail_bytes, device)

    def use_caches(self, caches: list[tuple[Tensor, Tensor]]) -> None:
        """Binds (keys, values) per layer, bf16 [slots, kv_heads, head_dim]; `pages` says where each position lies.

        Raises UserError when they are not what the kernels read.
        """
        c = self.config
        if len(caches) != c.num_hidden_layers:
            raise UserError(f"There are {len(caches)} caches for {c.num_hidden_layers} draft layers.")
        shape = (caches[0][0].shape[0], self.instance.kv_heads, c.head_dim)
        pairs = [
            (Spec(f"layers.{i}.{name}", shape, torch.bfloat16), tensor)
            for i, pair in enumerate(caches)
            for name, tensor in zip(("key_cache", "value_cache"), pair, strict=True)
        ]
        check(pairs, self.machine.device, "the draft's cache")
        self.caches = caches

    def launch(self, rows: int, *, nodes: int = 0, auto: bool = False) -> None:
        """Enqueues the proposal of rows - 1 tokens, or of a tree of `nodes` rows that deep; auto: and of how many rows
        count."""
        self.launch_block(rows)
        self.launch_head(rows, nodes=nodes, auto=auto)

    def launch_block(self, rows: int) -> None:
        """B1-B11 of all layers, from the embedding to the final norm's rows."""
        layers = self.weights.layers
        params = self._params("draft_block_kernel", rows, 0)
        for index, layer in enumerate(layers):
            for name in KernelDraftLayer.__slots__:
                if name != "input_norm":
                    getattr(params, name)[index] = getattr(layer, name).data_ptr()
            last = index + 1 == len(layers)
            params.next_norm[index] = (self.weights.norm if last else layers[index + 1].input_norm).data_ptr()
        self._set_caches(params)
        params.input_norm = layers[0].input_norm.data_ptr()
        params.embedding = self.weights.embedding.data_ptr()
        params.mask_embedding = self.weights.mask_embedding.data_ptr()
        self.module.launch("draft_block_kernel", params)

    def launch_head(self, rows: int, *, nodes: int = 0, auto: bool = False) -> None:
        """Candidates, lattice, and walk or tree of the rows after the anchor."""
        params = self._params("draft_head_kernel", rows, 1)
        params.rows, params.nodes = rows - 1, nodes
        for name in ("ancestors", "live"):
            setattr(params, name, getattr(self.inputs, name).data_ptr())
        for name in ("parents", "depths", "conditionals", "calibration"):
            setattr(params, name, getattr(self.state, name).data_ptr())
        if auto:
            params.costs = self.state.costs.data_ptr()
        for name in ("hidden_projection", "lm_head", "predecessors", "successors"):
            setattr(params, name, getattr(self.weights, name).data_ptr())
        self.module.launch("draft_head_kernel", params)

    def launch_verify_head(self, rows: int, step: Step) -> None:
        """The target's logits and greedy tokens of `step`'s stream, in place of its own head launch."""
        params = self._params("verify_head_kernel", rows, 3)
        params.lm_head = self.weights.lm_head.data_ptr()
        params.final_norm = step.weights.final_norm.data_ptr()
        for name in ("stream", "logits", "greedy_ids", "greedy_logits"):
            setattr(params, name, getattr(step.activations, name).data_ptr())
        self.module.launch("verify_head_kernel", params)

    def launch_context(self, rows: int, *, nodes: int = 0) -> None:
        """K and V of the state's committed rows among the first `rows` rows of the taps, which are a tree's if there
        are nodes."""
        params = self._params("draft_context_kernel", rows, 2)
        params.nodes, params.path = nodes, self.state.path.data_ptr()
        params.fusion, params.hidden_norm = self.weights.fusion.data_ptr(), self.weights.hidden_norm.data_ptr()
        params.taps = self.taps.data_ptr()
        queries = self.instance.heads * self.instance.head_dim  # rows of q before those of k and v
        for index, layer in enumerate(self.weights.layers):
            params.context_kv[index] = layer.qkv[queries // BLOCK_ROWS :].data_ptr()
            params.key_norm[index] = layer.key_norm.data_ptr()
        self._set_caches(params)
        self.module.launch("draft_context_kernel", params)

    def memory(self) -> list[tuple[str, Tensor, bool, bool]]:
        """What `Machine.declare` wants to know of this object's own memory."""
        found: list[tuple[str, Tensor, bool, bool]] = [
            (f"draft.{f.name}", getattr(self.activations, f.name), False, False) for f in fields(self.activations)
        ]
        for kernel, control in self.control.items():
            found += [(f"{kernel}.{f.name}", getattr(control, f.name), False, True) for f in fields(control)]
        for index, pair in enumerate(self.caches):
            found += [
                (f"draft.{index}.{name}", tensor, False, True)
                for name, tensor in zip(("keys", "values"), pair, strict=True)
            ]
        for index, layer in enumerate(self.weights.layers):
            found += [(f"draft.{index}.{f.name}", getattr(layer, f.name), True, True) for f in fields(layer)]
        whole = {f.name: getattr(self.weights, f.name) for f in fields(self.weights) if f.name != "layers"}
        found += [(f"draft.{name}", tensor, True, True) for name, tensor in whole.items()]
        if self.mailbox.numel():
            found.append(("draft.mailbox", self.mailbox, False, True))
        return [*found, ("draft.rope", self.rope, True, True), ("draft.pages", self.pages, True, True)]

    def _set_caches(self, params: DraftParams) -> None:
        for index, pair in enumerate(self.caches):
            params.key_cache[index], params.value_cache[index] = (cache.data_ptr() for cache in pair)

    def _params(self, kernel: str, rows: int, launch: int) -> DraftParams:
        row_cap = self.instance.row_cap
        if not 1 <= rows <= row_cap:
            raise UserError(f"A block of {rows} rows was asked of kernels built for 1 to {row_cap}.")
        params = DraftParams()
        params.counters = self.control[kernel].counters.data_ptr()
        params.epoch = self.control[kernel].epoch.data_ptr()
        for name in DraftActivations.__slots__:
            setattr(params, name, getattr(self.activations, name).data_ptr())
        for name in ("token_ids", "positions", "length"):
            setattr(params, name, getattr(self.inputs, name).data_ptr())
        params.request, params.state = self.state.request.data_ptr(), self.state.state.data_ptr()
        params.page_table, params.rope = self.pages.data_ptr(), self.rope.data_ptr()
        params.fault_record = self.machine.fault_record.data_ptr()
        params.deadline_ns = self.machine.deadline_ns
        params.trace = self.trace.data_ptr() or None
        params.rows, params.launch = rows, FIRST_LAUNCH + launch
        params.rank, params.session = self.mail.rank, session_word(self.mail.session)
        for rank, address in enumerate(self._mailboxes):
            params.mailboxes[rank] = address
        return params
