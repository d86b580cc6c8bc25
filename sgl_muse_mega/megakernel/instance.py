"""One instantiation of the kernels: model sizes, SM count, row capacity and the tile shapes that follow from them.

Everything a kernel knows at compile time is a field or a property here and reaches the device code through the header
that `Instance.header` generates.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from sgl_muse_mega.config import TargetConfig
from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel import protocol
from sgl_muse_mega.megakernel.tiling import (
    BLOCK_ROWS,
    PACKET_BYTES,
    PACKET_COLUMNS,
    WARP,
    Dense,
    Tiles,
    largest,
    mail_offsets,
    padded_rows,
    round_up,
    uneven_sizes,
)

ROW_CAPS = (8, 16)  # rows of a step that kernels are built for
MAX_ROWS = ROW_CAPS[-1]
HOPPER_SMS = 132
STAGED_SPLIT = 128  # keys of a split from which on staging pays (bench layer at 12,288 to 131,072 keys)
HOPPER_SHARED_BYTES = 232448  # opt-in shared memory of one CTA
LOG2_E = 1.4426950408889634


def row_cap_of(rows: int) -> int:
    """What the kernels are built for that run steps of `rows` rows."""
    return next(cap for cap in ROW_CAPS if rows <= cap)


@dataclass(frozen=True, slots=True)
class Instance:
    """Sizes of one rank: `heads`, `kv_heads`, `local_experts` of `experts` and `vocab` rows of embedding and head live
    here. `row_cap` is 8 or 16 rows per step."""

    source: ClassVar[str] = "step.cu"
    kernels: ClassVar[tuple[str, ...]] = ("embed_kernel", "layer_kernel", "head_kernel")

    hidden: int
    heads: int
    kv_heads: int
    experts: int
    local_experts: int
    top_k: int
    moe_hidden: int
    moe_inter: int
    vocab: int
    nvfp4: bool
    fp8_cache: bool
    row_cap: int
    sms: int
    rms_eps: float
    post_eps: float
    routed_scaling: float
    output_multiplier: float
    softcap: float
    attention_scale: float
    math_warps: int = 8
    min_split: int = 32  # keys of a split of attention while there are at most splits_cap of them
    splits_cap: int = 128
    staged_split: int = 0  # smallest split, in keys, that passes through shared memory; 0: none does
    head_dim: int = 64
    ranks: int = 1
    trace: bool = False
    separate_phases: bool = False  # the control of `separate`: phases as kernels of their own
    gate_up_width: int = 2  # n64 tiles of a task on NVFP4 experts, half of them gate
    down_width: int = 1
    field_order: bool = False  # NVFP4 words in csrc/decode/field_order.cuh's order instead of Marlin's

    @classmethod
    def for_config(
        cls,
        config: TargetConfig,
        *,
        nvfp4: bool,
        fp8_cache: bool,
        row_cap: int,
        sms: int,
        local_experts: int | None = None,
        ranks: int = 1,
        **tuning: Any,
    ) -> "Instance":
        """The instance of one of `ranks` ranks with `local_experts` of the experts (None: all; with several ranks, its
        share).

        tuning: fields that do not follow from the model (`math_warps`, `trace`, ...).
        Raises UserError, listing every size that the kernels cannot take.
        """
        parts = ("num_attention_heads", "num_local_experts", "vocab_size")
        uneven = uneven_sizes(config, parts, ranks)
        if uneven:
            raise UserError(f"The model does not divide among {ranks} ranks: {', '.join(uneven)}; use another number.")
        if local_experts is None:
            local_experts = config.num_local_experts // ranks
        instance = cls(
            hidden=config.hidden_size,
            heads=config.num_attention_heads // ranks,
            kv_heads=max(1, config.num_key_value_heads // ranks),
            experts=config.num_local_experts,
            local_experts=local_experts,
            top_k=config.num_experts_per_tok,
            moe_hidden=config.moe_hidden_size,
            moe_inter=config.moe_intermediate_size,
            vocab=config.vocab_size // ranks,
            nvfp4=nvfp4,
            fp8_cache=fp8_cache,
            row_cap=row_cap,
            sms=sms,
            rms_eps=config.rms_norm_eps,
            post_eps=config.post_norm_eps,
            routed_scaling=config.routed_scaling_factor,
            output_multiplier=config.output_multiplier,
            softcap=config.final_logit_softcapping,
            attention_scale=config.attention_scale,
            head_dim=config.head_dim,
            ranks=ranks,
            **tuning,
        )
        instance.check()
        staged = replace(instance, staged_split=STAGED_SPLIT)
        return staged if "staged_split" not in tuning and staged.has_room_to_stage else instance

    def check(self) -> None:
        """Raises UserError with all reasons why the kernels cannot be built for these sizes."""
        wrong = [
            (self.head_dim != 64, f"head_dim is {self.head_dim}, the kernels are written for 64"),
            (self.row_cap not in ROW_CAPS, f"the row capacity is {self.row_cap}, it can be 8 or 16"),
            (self.heads % self.kv_heads != 0, f"{self.heads} heads do not share {self.kv_heads} KV heads evenly"),
            (self.hidden % 64 != 0, f"hidden_size {self.hidden} is no multiple of 64"),
            (self.moe_hidden % 64 != 0, f"moe_hidden_size {self.moe_hidden} is no multiple of 64"),
            (self.moe_inter % 64 != 0, f"moe_intermediate_size {self.moe_inter} is no multiple of 64"),
            (self.hidden > 16384, f"hidden_size {self.hidden} is above 16384"),
            (self.experts % 4 != 0, f"{self.experts} experts are no multiple of 4"),
            (self.experts > 1024, f"{self.experts} experts are more than 1024"),
            (self.top_k > 32, f"{self.top_k} experts per token are more than 32"),
            (self.ranks not in (1, 2, 4, 8), f"{self.ranks} ranks were asked for, there can be 1, 2, 4 or 8"),
            (self.hidden % (4 * self.ranks) != 0, f"hidden_size {self.hidden} is no multiple of {4 * self.ranks}"),
            (
                self.moe_hidden % (4 * self.ranks) != 0,
                f"moe_hidden_size {self.moe_hidden} is no multiple of {4 * self.ranks}",
            ),
            (
                self.staged_split != 0
                and (self.staged_split < self.min_split or self.staged_split & (self.staged_split - 1) != 0),
                f"staged_split is {self.staged_split}, it can be 0 or a power of two from {self.min_split} on",
            ),
            (
                self.staged_split != 0 and self.math_warps != 8,
                f"staged_split is set and there are {self.math_warps} math warps, it needs 8",
            ),
        ]
        reasons = [text for bad, text in wrong if bad]
        if not reasons and self.stages - self.lent_stages < (2 if self.lent_stages else 3):
            reasons.append(f"only {self.stages} ring stages fit into shared memory")
        if reasons:
            raise UserError("The layer kernel cannot serve this model: " + "; ".join(reasons) + ".")

    # ---- dense products ----

    def _dense(self, n: int, k: int, *, element_bytes: int = 2, whole_k: bool = False) -> Dense:
        chunk = largest((256, 128, 64) if element_bytes == 2 else (128, 64), k)
        if chunk is None:
            raise UserError(f"The layer kernel needs inputs in multiples of 64, this matrix is {n} x {k}.")
        return Dense(n, k, chunk, self.sms, element_bytes, whole_k)

    @property
    def o_proj(self) -> Dense:
        return self._dense(self.hidden, self.heads * self.head_dim, whole_k=self.ranks > 1)

    @property
    def router(self) -> Dense:
        return self._dense(self.experts, self.hidden, element_bytes=4)

    @property
    def pre_proj(self) -> Dense:
        return self._dense(self.moe_hidden // self.ranks, self.hidden)

    @property
    def post_proj(self) -> Dense:
        return self._dense(self.hidden // self.ranks, self.moe_hidden)

    @property
    def qkv_proj(self) -> Dense:
        return self._dense(2 * (self.heads + self.kv_heads) * self.head_dim, self.hidden)

    @property
    def lm_head(self) -> Dense:
        return self._dense(self.vocab, self.hidden, whole_k=True)

    # ---- experts ----

    def _tiles(self, tiles: int, k: int) -> Tiles:
        """A task of this width, with as many warps behind each other as K takes and stages of up to 64 tiles.

        Narrow tasks divide best among the SMs, wide ones take fewer token bytes. The order of sums follows from
        `k_parts` alone, so that may not depend on the row capacity or on what fits a stage.
        """
        steps = k // 16
        k_parts = next(p for p in (8, 4, 2) if tiles * p <= self.math_warps and steps % (2 * p) == 0)
        most = 64 // (2 * k_parts * tiles)
        boxes = next(b for b in (4, 2, 1) if b <= most and steps % (2 * k_parts * b) == 0)
        return Tiles(tiles, 2 * k_parts, k_parts, boxes)

    @property
    def gate_up_tiles(self) -> Tiles:
        return self._tiles(self.gate_up_width, self.moe_hidden)

    @property
    def down_tiles(self) -> Tiles:
        return self._tiles(self.down_width, self.moe_inter)

    @property
    def gate_up_blocks(self) -> int:
        """Gate/up tasks, and activation flags, of one expert."""
        rows = self.gate_up_tiles.tiles * 64 if self.nvfp4 else BLOCK_ROWS
        return 2 * self.moe_inter // rows

    # ---- shared memory ----

    @property
    def math_threads(self) -> int:
        return self.math_warps * WARP

    @property
    def threads(self) -> int:
        return self.math_threads + 3 * WARP

    @property
    def dense_products(self) -> tuple[Dense, ...]:
        return (self.o_proj, self.router, self.pre_proj, self.post_proj, self.qkv_proj, self.lm_head)

    @property
    def _expert_chunks(self) -> tuple[int, int]:
        return self._dense(1, self.moe_hidden).chunk, self._dense(1, self.moe_inter).chunk

    @property
    def stage_weight_bytes(self) -> int:
        if self.nvfp4:
            experts = max(t.boxes * t.box_bytes for t in (self.gate_up_tiles, self.down_tiles))
        else:
            experts = max(padded_rows(BLOCK_ROWS, chunk * 2) for chunk in self._expert_chunks)
        return round_up(max(experts, *(d.stage_bytes for d in self.dense_products)), 128)

    @property
    def stage_token_bytes(self) -> int:
        chunks = [d.chunk for d in self.dense_products]
        chunks += [t.steps * 16 for t in (self.gate_up_tiles, self.down_tiles)] if self.nvfp4 else self._expert_chunks
        return round_up(max(padded_rows(self.row_cap, chunk * 2) for chunk in chunks), 128)

    @property
    def stage_bytes(self) -> int:
        return self.stage_weight_bytes + self.stage_token_bytes

    @property
    def reduce_bytes(self) -> int:
        rows = self.math_warps // (BLOCK_ROWS // 16) * BLOCK_ROWS
        if self.nvfp4:
            rows = max(rows, *(64 * t.tiles * t.k_parts for t in (self.gate_up_tiles, self.down_tiles)))
        combining = 3 * self.top_k * 4
        return round_up(max(rows * (self.row_cap + 1) * 4, combining, self.merge_bytes, self.hidden * 2), 128)

    @property
    def merge_bytes(self) -> int:
        """Of the merge of attention's splits (output_gate.cuh): chains of half a warp, two turns."""
        return 2 * 2 * self.math_warps * (self.head_dim + 4) * 4

    @property
    def route_bytes(self) -> int:
        return round_up((2 * self.experts + self.top_k) * 4, 128)

    @property
    def barrier_bytes(self) -> int:
        """Barriers, epoch, row sums, and with a trace the lengths of the logs."""
        return 512 + 128 * self.trace

    @property
    def table_bytes(self) -> int:
        return round_up(4 * self.local_experts * 4 + 4, 128)

    @property
    def stages(self) -> int:
        fixed = self.barrier_bytes + self.table_bytes + self.route_bytes + self.reduce_bytes
        # A CTA of a separate phase shares its SM with one that has no ring; each takes 1 KiB on top of its own.
        neighbour = fixed + 1024 if self.separate_phases else 0
        return min(24, (HOPPER_SHARED_BYTES - fixed - neighbour) // self.stage_bytes)

    @property
    def lent_stages(self) -> int:
        """Stages at the end of the ring that attention over long splits has first: 72 KiB (staged.cuh)."""
        return -(-73728 // self.stage_bytes) if self.staged_split and not self.separate_phases else 0

    @property
    def has_room_to_stage(self) -> bool:
        """Whether attention can borrow its stages: two must be left, and its teams are parts of eight warps."""
        return self.math_warps == 8 and self.stages - self.lent_stages >= 2

    @property
    def shared_offsets(self) -> dict[str, int]:
        """Byte offsets in the CTA's shared memory; barriers, small tables, reduction buffer, ring."""
        tables = self.barrier_bytes
        route = tables + self.table_bytes
        reduce = route + self.route_bytes
        ring = reduce + self.reduce_bytes
        return {
            "BARRIERS_AT": 0,  # full and empty barriers of each stage
            "ROUTING_BARRIER_AT": 2 * 24 * 8,
            "EPOCH_AT": 2 * 24 * 8 + 8,
            "SUMS_PARKED_AT": 2 * 24 * 8 + 16,
            "SUMS_TAKEN_AT": 2 * 24 * 8 + 24,
            "ROW_SUM_AT": 2 * 24 * 8 + 32,
            "LENT_BACK_AT": 2 * 24 * 8 + 96,
            "TRACE_AT": 512,  # length of each warp's log; nothing without a trace
            "TABLES_AT": tables,
            "ROUTE_AT": route,
            "REDUCE_AT": reduce,
            "RING_AT": ring,
            "LENT_AT": ring + (self.stages - self.lent_stages) * self.stage_bytes,
            "SHARED_BYTES": ring + self.stages * self.stage_bytes,
        }

    # ---- mailboxes (mailbox.cuh) ----

    @property
    def mail_columns(self) -> dict[str, int]:
        """Columns of a row that one rank sends, for each exchange point."""
        return {
            "O_PROJ": self.hidden,
            "PRE_PROJ": self.moe_hidden // self.ranks,
            "EXPERT": self.moe_hidden,
            "POST_PROJ": self.hidden // self.ranks,
            "EMBEDDING": self.hidden,
            "BEST_TOKEN": PACKET_COLUMNS,
        }

    @property
    def mail_offsets(self) -> dict[str, int]:
        """First packet of each exchange point in what one source fills of a half of a mailbox, and their number."""
        return mail_offsets(
            {name: self.row_cap * columns // PACKET_COLUMNS for name, columns in self.mail_columns.items()}
        )

    @property
    def mail_bytes(self) -> int:
        """Bytes of one half of a mailbox that one source fills; 0 without other ranks."""
        return self.mail_offsets["MAIL_PACKETS"] * PACKET_BYTES if self.ranks > 1 else 0

    # ---- the header ----

    def header(self) -> str:
        """Text of instance.h, the only file the kernels take sizes from."""
        integers = {
            "SMS": self.sms, "ROW_CAP": self.row_cap, "MATH_WARPS": self.math_warps, "MATH_THREADS": self.math_threads,
            "THREADS": self.threads, "HIDDEN": self.hidden, "HEADS": self.heads, "KV_HEADS": self.kv_heads,
            "HEAD_DIM": self.head_dim, "EXPERTS": self.experts, "LOCAL_EXPERTS": self.local_experts,
            "TOP_K": self.top_k, "MOE_HIDDEN": self.moe_hidden, "MOE_INTER": self.moe_inter, "VOCAB": self.vocab,
            "MIN_SPLIT": self.min_split, "SPLITS_CAP": self.splits_cap, "STAGES": self.stages, "RANKS": self.ranks,
            "STAGED_SPLIT": self.staged_split, "LENT_STAGES": self.lent_stages,
        }  # fmt: skip
        integers |= self.mail_offsets
        for name in ("o_proj", "router", "pre_proj", "post_proj", "qkv_proj", "lm_head"):
            dense: Dense = getattr(self, name)
            integers[f"{name.upper()}_CHUNK"] = dense.chunk
            integers[f"{name.upper()}_PARTS"] = dense.parts
        gate_up, down = self.gate_up_tiles, self.down_tiles
        integers |= {
            "GATE_UP_TILES": gate_up.tiles, "GATE_UP_K_PARTS": gate_up.k_parts, "GATE_UP_BOXES": gate_up.boxes,
            "DOWN_TILES": down.tiles, "DOWN_K_PARTS": down.k_parts, "DOWN_BOXES": down.boxes,
            "GATE_UP_CHUNK": self._expert_chunks[0], "DOWN_CHUNK": self._expert_chunks[1],
        }  # fmt: skip
        offsets = self.shared_offsets | {
            "STAGE_WEIGHT_BYTES": self.stage_weight_bytes, "STAGE_TOKEN_BYTES": self.stage_token_bytes,
            "STAGE_BYTES": self.stage_bytes, "MERGE_BYTES": self.merge_bytes, "REDUCE_BYTES": self.reduce_bytes,
        }  # fmt: skip
        floats = {
            "RMS_EPS": self.rms_eps, "POST_EPS": self.post_eps, "ROUTED_SCALING": self.routed_scaling,
            "OUTPUT_MULTIPLIER": self.output_multiplier, "SOFTCAP": self.softcap,
            "SCORE_SCALE_LOG2": self.attention_scale * LOG2_E,
        }  # fmt: skip
        lines = [f"constexpr int {name} = {value};" for name, value in integers.items()]
        lines += [f"constexpr uint32_t {name} = {value};" for name, value in offsets.items()]
        lines += [f"constexpr float {name} = {value!r}f;" for name, value in floats.items()]
        flags = {"NVFP4": self.nvfp4, "FP8_CACHE": self.fp8_cache, "TRACE": self.trace,
                 "SEPARATE": self.separate_phases, "FIELD_ORDER": self.field_order}  # fmt: skip
        lines += [f"constexpr bool {name} = {str(value).lower()};" for name, value in flags.items()]
        return (
            "// Generated by sgl_muse_mega.megakernel.instance; do not edit.\n#pragma once\n"
            '#include <cstdint>\n\n#include "instr/core.cuh"\n\n'
            "namespace cfg {\n" + "\n".join(lines) + "\n}  // namespace cfg\n\n"
        ) + protocol.header()

    def describe(self) -> str:
        """One line for logs and cache entries."""
        return ", ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))

    @property
    def max_splits(self) -> int:
        """Most splits of one size that a step can touch: those of one row, an edge, and the step's own rows."""
        return self.splits_cap + 2
