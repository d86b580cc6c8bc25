"""Device memory of the draft's launches that is neither weights nor cache."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from sgl_muse_mega.megakernel import draft_protocol, protocol
from sgl_muse_mega.megakernel.draft_instance import DraftInstance
from sgl_muse_mega.megakernel.protocol import HandOff
from sgl_muse_mega.megakernel.scratch import on_own_lines
from sgl_muse_mega.speculative.calibration import default_prior


@dataclass(frozen=True, slots=True)
class DraftActivations:
    """Every element that is read has been written in the same step, so all of it may start as anything: NaN."""

    residual: Tensor  # bf16 [row_cap, H]
    input: Tensor  # bf16 [H / 32, row_cap, 32]: B1 of the next layer, or the final norm of the rows behind the anchor
    attention_taps: Tensor  # f32 parts of B2
    output_taps: Tensor  # f32 [row_cap, 2 taps, groups]: D of the output side, of the sublayer under way
    convolved: Tensor  # bf16 [H / 32, row_cap, 32]
    qkv_partial: Tensor
    query: Tensor  # bf16 [row_cap, heads, d]
    block_keys: Tensor  # bf16 [row_cap, kv_heads, d]
    block_values: Tensor
    attention_sums: Tensor  # f32 [row_cap, heads, splits, d]
    attention_state: Tensor  # f32 [row_cap, heads, splits, 2]: maximum (base 2) and sum
    attended: Tensor  # bf16 [heads d / 32, row_cap, 32]
    output_partial: Tensor
    row_squares: Tensor  # f32 [row_cap, shares]: each CTA's part of a row's sum of squares
    mlp_input: Tensor  # bf16 [H / 32, row_cap, 32]: B9
    mlp_taps: Tensor
    gate_up_partial: Tensor
    activated: Tensor  # bf16 [F / 32, row_cap, 32]
    down_partial: Tensor
    selector_partial: Tensor
    list_scores: Tensor  # f32 [row_cap, 2 sms, k]: each warp's best, in order
    list_ids: Tensor  # int32
    candidates: Tensor  # int64 [row_cap, k]; slot s belongs to row s + 1 of the block
    candidate_scores: Tensor  # f32 [row_cap, k]: U
    lattice: Tensor  # f32 [row_cap, k, k]
    probabilities: Tensor  # f32 [row_cap, k]: q
    fusion_partial: Tensor
    context: Tensor  # bf16 [H / 32, row_cap, 32]: c of section 7.1
    context_partial: Tensor  # f32 [layers, ...]

    @classmethod
    def allocate(cls, instance: DraftInstance, device: torch.device) -> "DraftActivations":
        i, t, k = instance, instance.row_cap, instance.selector_k
        bf16, f32 = torch.bfloat16, torch.float32
        partial = {name: dense.partial_shape(t) for name, dense in i.products.items()}

        def operand(k: int) -> tuple[int, ...]:
            """Rows of k inputs as csrc/draft/tokens.cuh keeps them."""
            return (k // 32, t, 32)

        shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "residual": (bf16, (t, i.hidden)),
            "input": (bf16, operand(i.hidden)),
            "attention_taps": (f32, partial["CONV_TAPS"]),
            "output_taps": (f32, (t, 2, i.hidden // i.conv_group)),
            "convolved": (bf16, operand(i.hidden)),
            "qkv_partial": (f32, partial["QKV"]),
            "query": (bf16, (t, i.heads, i.head_dim)),
            "block_keys": (bf16, (t, i.kv_heads, i.head_dim)),
            "block_values": (bf16, (t, i.kv_heads, i.head_dim)),
            "attention_sums": (f32, (t, i.heads, i.max_splits, i.head_dim)),
            "attention_state": (f32, (t, i.heads, i.max_splits, 2)),
            "attended": (bf16, operand(i.heads * i.head_dim)),
            "output_partial": (f32, partial["OUTPUT"]),
            "row_squares": (f32, (t, i.row_shares)),
            "mlp_input": (bf16, operand(i.hidden)),
            "mlp_taps": (f32, partial["CONV_TAPS"]),
            "gate_up_partial": (f32, partial["GATE_UP"]),
            "activated": (bf16, operand(i.inter)),
            "down_partial": (f32, partial["DOWN"]),
            "selector_partial": (f32, partial["SELECTOR"]),
            "list_scores": (f32, (t, 2 * i.sms, k)),
            "list_ids": (torch.int32, (t, 2 * i.sms, k)),
            "candidates": (torch.int64, (t, k)),
            "candidate_scores": (f32, (t, k)),
            "lattice": (f32, (t, k, k)),
            "probabilities": (f32, (t, k)),
            "fusion_partial": (f32, partial["FUSION"]),
            "context": (bf16, operand(i.hidden)),
            "context_partial": (f32, (i.layers, *partial["CONTEXT_KV"])),
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
class KernelControl:
    """Counters and epoch of one kernel; zero at the start, never reset."""

    counters: Tensor  # int32 [counters * COUNTER_STRIDE]
    epoch: Tensor  # int32 [1]

    @classmethod
    def allocate(
        cls, hand_offs: tuple[HandOff, ...], sms: int, row_cap: int, device: torch.device, epoch: int = 0
    ) -> "KernelControl":
        """epoch: launches to pretend have happened (tests of the wrap-around)."""
        counters = torch.zeros(len(hand_offs), protocol.COUNTER_STRIDE, dtype=torch.int64)
        for index, counter in enumerate(hand_offs):
            counters[index, 0] = protocol.expected(counter, epoch - 1, sms=sms, row_cap=row_cap)
        return cls(on_own_lines(counters, device), on_own_lines(torch.tensor([epoch]), device))


@dataclass(frozen=True, slots=True)
class DecodeState:
    """What a sequence asks for, where it stands, what its steps plan, and what they report; words are named in
    `draft_protocol`, the plan in `speculative.tree`."""

    request: Tensor  # int64 [request words + MAX_STOPS], read by the steps
    state: Tensor  # int64 [state words]
    verdicts: Tensor  # int64 [row_cap, 2]: whether the draft after the row is kept, and the token if it is not
    outputs: Tensor  # int64 [OUTPUT_SLOTS, OUTPUT_WORDS] in host memory; step n writes slot n % OUTPUT_SLOTS
    parents: Tensor  # int32 [row_cap], a tree's; -1 for the anchor
    depths: Tensor  # int32 [row_cap], a tree's
    conditionals: Tensor  # f32 [row_cap]: q of a tree's row behind its parent, of a chain's row its slot's largest q
    path: Tensor  # int32 [row_cap]: the tree's rows that the last step committed
    calibration: Tensor  # int32 [groups, bins, 2] of `speculative.calibration`
    costs: Tensor  # f32 [row_cap + 1]: ms of a step by the rows that count

    @classmethod
    def allocate(cls, row_cap: int, device: torch.device) -> "DecodeState":
        p = draft_protocol
        host = torch.zeros(p.OUTPUT_SLOTS, p.OUTPUT_WORDS, dtype=torch.int64, pin_memory=device.type == "cuda")

        def words(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            words(len(p.REQUEST) + p.MAX_STOPS, dtype=torch.int64),
            words(len(p.STATE), dtype=torch.int64),
            words(row_cap, 2, dtype=torch.int64),
            host,
            words(row_cap),
            words(row_cap),
            words(row_cap, dtype=torch.float32),
            words(row_cap),
            torch.from_numpy(default_prior()).to(device),
            words(row_cap + 1, dtype=torch.float32),
        )
