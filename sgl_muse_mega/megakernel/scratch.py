"""Device memory of a step that is neither weights nor cache: inputs, activations and the counters."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from sgl_muse_mega.megakernel import protocol
from sgl_muse_mega.megakernel.instance import Instance
from sgl_muse_mega.megakernel.tiling import round_up


def chain_ancestors(rows: int) -> Tensor:
    """`StepInputs.ancestors` of rows that follow each other."""
    return torch.tensor([(2 << row) - 1 for row in range(rows)], dtype=torch.int32)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a replayed step reads anew each time. T <= row_cap rows; key index i < length is position i."""

    token_ids: Tensor  # int64 [row_cap]
    positions: Tensor  # int64 [row_cap]
    ancestors: Tensor  # int32 [row_cap], bit j of row i: row i sees row j of the step
    live: Tensor  # int32 [1], rows from here on are computed without experts and never kept; row_cap: there are none
    length: Tensor  # int32 [1], committed positions
    full_slots: Tensor  # int64 [row_cap], where full layers keep the rows' K and V
    sliding_slots: Tensor  # int64 [row_cap]
    full_pages: Tensor  # int32 [max_context], slot of each committed position
    sliding_pages: Tensor  # int32 [max_context]; only the window is read

    @classmethod
    def allocate(cls, row_cap: int, max_context: int, device: torch.device) -> "StepInputs":
        def rows(dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(row_cap, dtype=dtype, device=device)

        chain = chain_ancestors(row_cap).to(device)
        pages = [torch.zeros(max_context, dtype=torch.int32, device=device) for _ in range(2)]
        live = torch.full((1,), row_cap, dtype=torch.int32, device=device)
        length = torch.zeros(1, dtype=torch.int32, device=device)
        return cls(rows(), rows(), chain, live, length, rows(), rows(), *pages)


@dataclass(frozen=True, slots=True)
class Activations:
    """What one launch leaves for the next, and what the phases of a launch leave for each other.

    Every element that is read has been written in the same step, so all of it may start as anything; it starts as NaN.
    """

    query: Tensor  # bf16 [row_cap, heads, 64], normed and rotated
    gate: Tensor  # bf16 [row_cap, heads, 64]
    attention_sums: Tensor  # f32 [row_cap, heads, max_splits, 64]
    attention_state: Tensor  # f32 [row_cap, heads, max_splits, 2]: maximum (base 2) and sum
    gated: Tensor  # bf16 [row_cap, heads * 64]: A7
    o_partial: Tensor  # f32 [blocks, parts, row_cap, 64]
    stream: Tensor  # f32 [row_cap, H]
    router_input: Tensor  # bf16 [row_cap, H]: F1
    router_partial: Tensor
    router_logits: Tensor  # f32 [row_cap, E]: F2
    pre_partial: Tensor
    expert_input: Tensor  # bf16 [row_cap, M]: F7, in the experts' input order
    route_ids: Tensor  # int32 [row_cap, K]
    route_weights: Tensor  # f32 [row_cap, K]
    activated: Tensor  # bf16 [row_cap * K, I]: F9, one line per (row, local expert), in the experts' input order
    expert_output: Tensor  # f32 [row_cap * K, M]: F10
    combined: Tensor  # bf16 [row_cap, M]: F12
    post_partial: Tensor
    next_input: Tensor  # bf16 [row_cap, H]: A1 of the next layer, or O1
    qkv_partial: Tensor
    logits: Tensor  # f32 [row_cap, V]
    best_scores: Tensor  # f32 [row_cap, sms, 2]
    best_ids: Tensor  # int32 [row_cap, sms, 2]
    greedy_ids: Tensor  # int64 [row_cap]
    greedy_logits: Tensor  # f32 [row_cap]; of several ranks alone, where not every rank has the logits of all ids

    @classmethod
    def allocate(cls, instance: Instance, device: torch.device) -> "Activations":
        i, t, max_splits = instance, instance.row_cap, instance.max_splits
        bf16, f32, i32 = torch.bfloat16, torch.float32, torch.int32
        lines = t * i.top_k
        shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "query": (bf16, (t, i.heads, i.head_dim)),
            "gate": (bf16, (t, i.heads, i.head_dim)),
            "attention_sums": (f32, (t, i.heads, max_splits, i.head_dim)),
            "attention_state": (f32, (t, i.heads, max_splits, 2)),
            "gated": (bf16, (t, i.heads * i.head_dim)),
            "o_partial": (f32, i.o_proj.partial_shape(t)),
            "stream": (f32, (t, i.hidden)),
            "router_input": (bf16, (t, i.hidden)),
            "router_partial": (f32, i.router.partial_shape(t)),
            "router_logits": (f32, (t, i.experts)),
            "pre_partial": (f32, i.pre_proj.partial_shape(t)),
            "expert_input": (bf16, (t, i.moe_hidden)),
            "route_ids": (i32, (t, i.top_k)),
            "route_weights": (f32, (t, i.top_k)),
            "activated": (bf16, (lines, i.moe_inter)),
            "expert_output": (f32, (lines, i.moe_hidden)),
            "combined": (bf16, (t, i.moe_hidden)),
            "post_partial": (f32, i.post_proj.partial_shape(t)),
            "next_input": (bf16, (t, i.hidden)),
            "qkv_partial": (f32, i.qkv_proj.partial_shape(t)),
            "logits": (f32, (t, i.vocab)),
            "best_scores": (f32, (t, i.sms, 2)),
            "best_ids": (i32, (t, i.sms, 2)),
            "greedy_ids": (torch.int64, (t,)),
            "greedy_logits": (f32, (t,)),
        }
        tensors = {name: torch.empty(shape, dtype=dtype, device=device) for name, (dtype, shape) in shapes.items()}
        activations = cls(**tensors)
        activations.poison()
        return activations

    def poison(self) -> None:
        """Fills everything with bytes that are NaN as a float and -1 as an integer."""
        for field in fields(self):
            getattr(self, field.name).view(torch.uint8).fill_(0xFF)


@dataclass(frozen=True, slots=True)
class Control:
    """Counters, epoch and flags of one kernel of one instance; zero at the start, never reset."""

    counters: Tensor  # int32 [counters * COUNTER_STRIDE]
    epoch: Tensor  # int32 [1]
    flags: Tensor  # int32 [local_experts * gate_up_blocks]

    @classmethod
    def allocate(cls, instance: Instance, device: torch.device, epoch: int = 0) -> "Control":
        """epoch: launches to pretend have happened (tests of the wrap-around)."""
        counters = torch.zeros(len(protocol.COUNTERS), protocol.COUNTER_STRIDE, dtype=torch.int64)
        for index, counter in enumerate(protocol.COUNTERS):
            counters[index, 0] = protocol.expected(counter, epoch - 1, sms=instance.sms, row_cap=instance.row_cap)
        flags = torch.zeros(instance.local_experts * instance.gate_up_blocks, dtype=torch.int64)
        return cls(*(on_own_lines(words, device) for words in (counters, torch.tensor([epoch]), flags)))


def on_own_lines(words: Tensor, device: torch.device) -> Tensor:
    """Unsigned 32-bit values held in int64 -> the same bits in int32, flat, in 128-byte lines that hold nothing else.

    So no poll of one array's word meets arrivals at another's. A GPU's memory comes so; a CPU's, the emulator's, by
    half lines.
    """
    line, count = protocol.COUNTER_STRIDE, words.numel()
    room = torch.zeros(round_up(count, line) + line, dtype=torch.int32, device=device)
    skip = -(room.data_ptr() // room.element_size()) % line
    own = room[skip : skip + count]
    own.copy_(torch.where(words >= 2**31, words - 2**32, words).flatten())
    return own
