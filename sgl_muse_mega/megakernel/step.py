"""One verify step: embedding, every layer, head, as launches of the kernels over fixed buffers."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sgl_muse_mega.config import TargetConfig
from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel import protocol, tensors
from sgl_muse_mega.megakernel.boxes import expert_boxes
from sgl_muse_mega.megakernel.build import Progress, quiet
from sgl_muse_mega.megakernel.instance import Instance
from sgl_muse_mega.megakernel.machine import Machine, Module
from sgl_muse_mega.megakernel.mailbox import Mail, NoMail, session_word
from sgl_muse_mega.megakernel.protocol import Params
from sgl_muse_mega.megakernel.scratch import Activations, Control, StepInputs
from sgl_muse_mega.megakernel.separate import SeparatePhases
from sgl_muse_mega.megakernel.weights import KernelWeights, rope_table

CACHE_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
NO_WINDOW = 2**31 - 1


class Variant:
    """A compiled instance with the control words of its kernels and the mailbox of its layers."""

    def __init__(self, instance: Instance, machine: Machine, mail: Mail, progress: Progress, epoch: int) -> None:
        self.instance = instance
        self._phases: SeparatePhases | None = None
        whole = instance
        if instance.separate_phases:
            self._phases = SeparatePhases(machine, instance, progress)
            whole = replace(instance, separate_phases=False)
        self.module: Module = machine.load(whole, progress)
        self.control = {name: Control.allocate(instance, machine.device, epoch) for name in protocol.KERNELS}
        self.mailbox, self.mailboxes = mail.take(instance.mail_bytes, machine.device)

    def launch_layer(self, params: Params) -> None:
        if self._phases:
            self._phases.launch(params)
        else:
            self.module.launch("layer_kernel", params)


class Step:
    """The target's forward pass over T <= row_cap rows of one sequence.

    Fill `inputs`, call `launch(rows)`, read `activations.logits`, `activations.greedy_ids` and `taps`. All buffers stay
    where they are, so the launches can be captured into a graph. The K and V caches, [slots, kv_heads, 64] per layer,
    belong to the caller.
    """

    def __init__(
        self,
        config: TargetConfig,
        weights: KernelWeights,
        machine: Machine,
        *,
        row_cap: int,
        max_context: int,
        kv_dtype: str = "bf16",
        taps: tuple[int, ...] = (),
        mail: Mail | None = None,
        progress: Progress = quiet,
        first_epoch: int = 0,
        tuning: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """mail: this rank's place among others (None: it is alone); `config` is of the whole model, `weights` are the
        rank's share. tuning: fields of `Instance` to change, for kernels under test.

        Raises UserError when the model's sizes or the tensors do not fit the kernels.
        """
        self.config = config
        self.weights = weights
        self.machine = machine
        self.mail: Mail = mail or NoMail()
        self.first_token = self.mail.rank * config.vocab_size // self.mail.ranks  # of this rank's rows of the head
        device = machine.device
        local = weights.layers[0].down.shape[0]
        self.variants: dict[bool, Variant] = {}
        field_orders = {layer.field_order for layer in weights.layers if layer.nvfp4}
        if len(field_orders) > 1:
            raise UserError("Some layers have their NVFP4 words in field order and others not; prepare all alike.")
        for nvfp4 in sorted({layer.nvfp4 for layer in weights.layers}):
            instance = Instance.for_config(
                config,
                nvfp4=nvfp4,
                fp8_cache=kv_dtype == "fp8",
                row_cap=row_cap,
                sms=machine.sms,
                local_experts=local,
                ranks=self.mail.ranks,
                field_order=nvfp4 and True in field_orders,
                **tuning,
            )
            self.variants[nvfp4] = Variant(instance, machine, self.mail, progress, first_epoch)
        self.instance = next(iter(self.variants.values())).instance
        for index, layer in enumerate(weights.layers):
            tensors.check_layer(self.variants[layer.nvfp4].instance, index, layer, device)
        tensors.check_ends(self.instance, weights, device)

        self.expert_boxes = [
            expert_boxes(self.variants[layer.nvfp4].instance, layer, machine) for layer in weights.layers
        ]
        # Each launch's logs, int64 [launches, CTAs, warps, LOG_WORDS] (csrc/layer/trace.cuh); empty without a trace.
        launches = len(weights.layers) + 2 if self.instance.trace else 0
        logs = (launches, machine.sms, self.instance.threads // 32, protocol.LOG_WORDS)
        self.trace = torch.zeros(logs, dtype=torch.int64, device=device)
        self.max_context = max_context
        self.inputs = StepInputs.allocate(row_cap, max_context + row_cap, device)
        self.activations = Activations.allocate(self.instance, device)
        self.use_taps(taps)
        thetas = {config.rope_theta(i) for i in range(len(weights.layers))} - {0.0}
        self._rope = {theta: rope_table(theta, max_context + row_cap, config.head_dim, device) for theta in thetas}
        self._caches: list[tuple[Tensor, Tensor]] = []
        self._kv_dtype = CACHE_DTYPES[kv_dtype]

    def use_taps(self, layers: tuple[int, ...]) -> None:
        """Streams after these layers are kept, bf16 [row_cap, layers, H]."""
        self.taps_after = layers
        shape = (self.instance.row_cap, max(1, len(layers)), self.config.hidden_size)
        self.taps = torch.zeros(shape, dtype=torch.bfloat16, device=self.machine.device)

    def use_caches(self, caches: list[tuple[Tensor, Tensor]]) -> None:
        """Binds (keys, values) per layer. Raises UserError when they are not what the kernels read."""
        i = self.instance
        if len(caches) != len(self.weights.layers):
            raise UserError(f"There are {len(caches)} caches for {len(self.weights.layers)} layers.")
        for index, pair in enumerate(caches):
            specs = [
                tensors.Spec(f"layers.{index}.{name}", (pair[0].shape[0], i.kv_heads, i.head_dim), self._kv_dtype)
                for name in ("key_cache", "value_cache")
            ]
            tensors.check(zip(specs, pair, strict=True), self.machine.device, f"the cache of layer {index}")
        self._caches = caches

    def launch(self, rows: int) -> None:
        """Enqueues the whole step for the first `rows` rows of the inputs."""
        self.launch_embed(rows)
        for index in range(len(self.weights.layers)):
            self.launch_layer(index, rows)
        self.launch_head(rows)

    def launch_embed(self, rows: int) -> None:
        """Stream, q, k, v and gate of layer 0; K and V go to layer 0's cache."""
        variant = self._ends_variant()
        params = self._params(variant, "embed", rows, launch=0)
        params.embedding = self.weights.embedding.data_ptr()
        self._set_next(params, 0)
        variant.module.launch("embed_kernel", params)

    def launch_layer(self, index: int, rows: int) -> None:
        """From q, k, v, gate of layer `index` to those of the next layer; the last layer ends with the stream."""
        layer = self.weights.layers[index]
        variant = self.variants[layer.nvfp4]
        params = self._params(variant, "layer", rows, launch=index + 1)
        for name in (
            "o_proj", "attention_alpha", "attention_beta", "pre_feedforward_norm", "router", "router_bias",
            "pre_expert_proj", "pre_expert_norm", "gate_up", "gate_scale", "up_scale", "down", "down_scale",
            "post_expert_norm", "post_expert_proj", "post_feedforward_norm",
            "feedforward_alpha", "feedforward_beta",
        ):  # fmt: skip
            tensor = getattr(layer, name)
            setattr(params, name, None if tensor is None else tensor.data_ptr())
        boxes = self.expert_boxes[index]
        params.expert_boxes = None if boxes is None else boxes.data_ptr()
        full = self.config.is_full(index)
        window = self.config.window(index)
        params.window = NO_WINDOW if window is None else window
        params.page_table = (self.inputs.full_pages if full else self.inputs.sliding_pages).data_ptr()
        params.slots = (self.inputs.full_slots if full else self.inputs.sliding_slots).data_ptr()
        params.key_cache, params.value_cache = (cache.data_ptr() for cache in self._caches[index])
        params.first_expert = layer.first_expert
        if index in self.taps_after:
            params.tap = self.taps[:, self.taps_after.index(index)].data_ptr()
            params.tap_stride = self.taps.stride(0)
        if index + 1 < len(self.weights.layers):
            params.has_next = 1
            self._set_next(params, index + 1)
        variant.launch_layer(params)

    def launch_head(self, rows: int) -> None:
        """Logits and greedy tokens of the stream."""
        variant = self._ends_variant()
        params = self._params(variant, "head", rows, launch=len(self.weights.layers) + 1)
        params.next_norm = self.weights.final_norm.data_ptr()
        params.lm_head = self.weights.lm_head.data_ptr()
        variant.module.launch("head_kernel", params)

    def _ends_variant(self) -> Variant:
        """Embedding and head do not depend on the experts: any instance will do."""
        return next(iter(self.variants.values()))

    def _params(self, variant: Variant, kernel: str, rows: int, launch: int) -> Params:
        if not 1 <= rows <= self.instance.row_cap:
            raise UserError(f"A step of {rows} rows was asked of kernels built for 1 to {self.instance.row_cap}.")
        params = Params()
        control = variant.control[kernel]
        for name in ("counters", "epoch", "flags"):
            setattr(params, name, getattr(control, name).data_ptr())
        for source, names in (
            (self.inputs, ("token_ids", "positions", "ancestors", "live", "length")),
            (self.activations, Activations.__slots__),
        ):
            for name in names:
                setattr(params, name, getattr(source, name).data_ptr())
        params.fault_record = self.machine.fault_record.data_ptr()
        params.deadline_ns = self.machine.deadline_ns
        params.max_splits = self.instance.max_splits
        params.trace = self.trace[launch].data_ptr() if self.instance.trace else None
        for rank, address in enumerate(variant.mailboxes):
            params.mailboxes[rank] = address
        params.session = session_word(self.mail.session)
        params.rows, params.rank, params.launch = rows, self.mail.rank, launch
        return params

    def _set_next(self, params: Params, index: int) -> None:
        layer = self.weights.layers[index]
        theta = self.config.rope_theta(index)
        full = self.config.is_full(index)
        params.next_norm, params.next_qkv = layer.input_norm.data_ptr(), layer.qkv.data_ptr()
        params.next_rope = self._rope[theta].data_ptr() if theta else None
        window = self.config.window(index)
        params.next_window = NO_WINDOW if window is None else window
        params.next_page_table = (self.inputs.full_pages if full else self.inputs.sliding_pages).data_ptr()
        params.next_slots = (self.inputs.full_slots if full else self.inputs.sliding_slots).data_ptr()
        params.next_key_cache, params.next_value_cache = (cache.data_ptr() for cache in self._caches[index])
        params.has_next = 1
