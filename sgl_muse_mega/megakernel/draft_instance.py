"""One instantiation of the draft's kernels: sizes, SM count, row capacity and what follows from them."""

import math
from dataclasses import dataclass, fields
from typing import ClassVar

from sgl_muse_mega.config import DraftConfig, TargetConfig
from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel import draft_protocol
from sgl_muse_mega.megakernel.instance import HOPPER_SHARED_BYTES, LOG2_E, ROW_CAPS
from sgl_muse_mega.megakernel.tiling import (
    BLOCK_ROWS,
    PACKET_BYTES,
    PACKET_COLUMNS,
    WARP,
    Dense,
    mail_offsets,
    padded_rows,
    round_up,
    uneven_sizes,
)

LARGEST_CHUNK = 256  # inputs


def chunk_of(k: int, largest: int) -> int:
    """Inputs of a weight chunk of a matrix with k inputs; 0 where none divides."""
    return next((c for c in (256, 128, 64) if c <= largest and k % c == 0), 0)


@dataclass(frozen=True, slots=True)
class TargetEnds:
    """What the draft's kernels need to know of the target's embedding and head."""

    eps: float  # of the embedding's and of the final norm
    output_multiplier: float
    softcap: float

    @classmethod
    def of(cls, config: TargetConfig) -> "TargetEnds":
        return cls(config.rms_norm_eps, config.output_multiplier, config.final_logit_softcapping)


@dataclass(frozen=True, slots=True)
class DraftInstance:
    """Sizes of one rank's draft: `heads`, `kv_heads`, `inter` columns of the MLP and `vocab` rows of embedding and head
    live here. `row_cap` is 8 or 16 rows per block."""

    source: ClassVar[str] = "draft.cu"
    kernels: ClassVar[tuple[str, ...]] = (
        "draft_block_kernel", "draft_head_kernel", "verify_head_kernel", "draft_context_kernel"
    )  # fmt: skip

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inter: int
    layers: int
    taps: int
    vocab: int
    rank: int
    selector_k: int
    conv_group: int
    window: int
    causal: bool
    mask_token: int
    normed_embedding: bool
    embedding_scale: float
    target: TargetEnds
    rms_eps: float
    output_multiplier: float
    softcap: float
    row_cap: int
    sms: int
    math_warps: int = 8
    kv_split: int = 64  # keys of a stage of the ring
    ranks: int = 1
    trace: bool = False

    @classmethod
    def for_config(
        cls, config: DraftConfig, target: TargetEnds, *, row_cap: int, sms: int, ranks: int = 1
    ) -> "DraftInstance":
        """The instance of one of `ranks` ranks. Raises UserError, listing every size that does not fit."""
        parts = ("num_attention_heads", "intermediate_size", "vocab_size")
        uneven = uneven_sizes(config, parts, ranks)
        if uneven:
            raise UserError(f"The draft does not divide among {ranks} ranks: {', '.join(uneven)}; use another number.")
        instance = cls(
            hidden=config.hidden_size,
            heads=config.num_attention_heads // ranks,
            kv_heads=max(1, config.num_key_value_heads // ranks),
            head_dim=config.head_dim,
            inter=config.intermediate_size // ranks,
            layers=config.num_hidden_layers,
            taps=len(config.target_layer_ids),
            vocab=config.vocab_size // ranks,
            rank=config.selector_rank,
            selector_k=config.selector_top_k,
            conv_group=config.conv_group_size,
            window=config.sliding_window,
            causal=config.is_causal,
            mask_token=config.mask_token_id,
            normed_embedding=config.normed_embedding,
            embedding_scale=config.input_embedding_scale,
            target=target,
            rms_eps=config.rms_norm_eps,
            output_multiplier=config.output_multiplier,
            softcap=config.final_logit_softcapping,
            row_cap=row_cap,
            sms=sms,
            ranks=ranks,
        )
        instance.check()
        return instance

    def check(self) -> None:
        """Raises UserError with all reasons why the kernels cannot be built for these sizes."""
        wrong = [
            (self.head_dim != 128, f"head_dim is {self.head_dim}, the kernels are written for 128"),
            (self.row_cap not in ROW_CAPS, f"the row capacity is {self.row_cap}, it can be 8 or 16"),
            (self.hidden % 64 != 0, f"hidden_size {self.hidden} is no multiple of 64"),
            (self.hidden > 16384, f"hidden_size {self.hidden} is above 16384"),
            (self.inter % 64 != 0, f"intermediate_size {self.inter} is no multiple of 64"),
            (self.conv_group % 4 != 0, f"conv_group_size {self.conv_group} is no multiple of 4"),
            (self.vocab % 4 != 0, f"vocab_size {self.vocab} of a rank is no multiple of 4"),
            (self.heads % self.kv_heads != 0, f"{self.heads} heads do not share {self.kv_heads} KV heads evenly"),
            (self.ranks not in (1, 2, 4, 8), f"{self.ranks} ranks were asked for, there can be 1, 2, 4 or 8"),
            (self.hidden % (4 * self.ranks) != 0, f"hidden_size {self.hidden} is no multiple of {4 * self.ranks}"),
            (self.rank % 4 != 0, f"selector_rank {self.rank} is no multiple of 4"),
            (not 2 <= self.selector_k <= WARP, f"selector_top_k {self.selector_k} is not between 2 and {WARP}"),
            (self.layers > draft_protocol.MAX_LAYERS, f"{self.layers} layers are above {draft_protocol.MAX_LAYERS}"),
        ]
        reasons = [text for bad, text in wrong if bad]
        if not reasons and self.stages < 3:
            reasons.append(f"only {self.stages} ring stages fit into shared memory")
        if reasons:
            raise UserError("The draft kernels cannot serve this draft: " + "; ".join(reasons) + ".")

    # ---- dense products, by the names that csrc/draft/products.cuh takes from cfg ----

    @property
    def products(self) -> dict[str, Dense]:
        width, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = {
            "CONV_TAPS": (4 * (self.hidden // self.conv_group), self.hidden),
            "QKV": (width + 2 * kv, self.hidden),
            "OUTPUT": (self.hidden, width),
            "GATE_UP": (2 * self.inter, self.hidden),
            "DOWN": (self.hidden, self.inter),
            "FUSION": (self.hidden // self.ranks, self.taps * self.hidden),
            "CONTEXT_KV": (2 * kv, self.hidden),
            "SELECTOR": (self.rank, self.hidden),
            "LM_HEAD": (self.vocab, self.hidden),
        }
        whole_k = ("LM_HEAD", "OUTPUT", "DOWN") if self.ranks > 1 else ("LM_HEAD",)
        return {
            name: Dense(n, k, chunk_of(k, LARGEST_CHUNK), self.sms, whole_k=name in whole_k)
            for name, (n, k) in shapes.items()
        }

    @property
    def max_splits(self) -> int:
        """Most key splits a block can touch: the window, not aligned to a split, and the block's own rows."""
        return math.ceil(self.window / self.kv_split) + 2

    @property
    def row_shares(self) -> int:
        """CTAs that share a row's residual and norm."""
        return next(shares for shares in (8, 4, 2, 1) if self.hidden % (64 * shares) == 0)

    # ---- shared memory ----

    @property
    def math_threads(self) -> int:
        return self.math_warps * WARP

    @property
    def threads(self) -> int:
        return self.math_threads + 2 * WARP

    @property
    def barrier_bytes(self) -> int:
        """Barriers, epoch, row sums, and with a trace the lengths of the logs."""
        return 512 + 128 * self.trace

    @property
    def stage_weight_bytes(self) -> int:
        return max(BLOCK_ROWS * d.chunk * 2 for d in self.products.values())

    @property
    def stage_bytes(self) -> int:
        tokens = max(padded_rows(self.row_cap, d.chunk * 2) for d in self.products.values())
        keys_and_values = 2 * padded_rows(self.kv_split, self.head_dim * 2)
        return max(self.stage_weight_bytes + round_up(tokens, 128), keys_and_values)

    @property
    def reduce_bytes(self) -> int:
        lists = self.math_warps * WARP * 8
        return round_up(max(self.math_warps // 4 * 64 * (self.row_cap + 1) * 4, lists, self.rank * 4), 128)

    @property
    def stages(self) -> int:
        return min(24, (HOPPER_SHARED_BYTES - self.barrier_bytes - self.reduce_bytes) // self.stage_bytes)

    @property
    def shared_offsets(self) -> dict[str, int]:
        """Byte offsets in the CTA's shared memory."""
        ring = self.barrier_bytes + self.reduce_bytes
        return {
            "BARRIERS_AT": 0,  # full and empty barriers of each stage
            "EPOCH_AT": 2 * 24 * 8 + 8,
            "ROW_SUM_AT": 2 * 24 * 8 + 16,
            "TRACE_AT": 512,  # length of each warp's log; nothing without a trace
            "REDUCE_AT": self.barrier_bytes,
            "RING_AT": ring,
            "SHARED_BYTES": ring + self.stages * self.stage_bytes,
        }

    # ---- mailboxes (layer/mailbox.cuh) ----

    @property
    def mail_offsets(self) -> dict[str, int]:
        """First packet of each exchange point in what one source fills of a half of a mailbox, and their number."""
        row = self.hidden // PACKET_COLUMNS
        return mail_offsets(
            {
                "ANCHOR": row,
                "DRAFT_OUTPUT": self.row_cap * row,
                "DRAFT_DOWN": self.row_cap * row,
                "FUSION": self.row_cap * row // self.ranks,
                "CANDIDATE": self.row_cap * self.selector_k,
                "BEST_TOKEN": self.row_cap,
            }
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
            "HEAD_DIM": self.head_dim, "INTER": self.inter, "LAYERS": self.layers, "TAPS": self.taps,
            "VOCAB": self.vocab, "RANK": self.rank, "SELECTOR_K": self.selector_k, "CONV_GROUP": self.conv_group,
            "WINDOW": self.window, "MASK_TOKEN": self.mask_token, "KV_SPLIT": self.kv_split,
            "MAX_SPLITS": self.max_splits, "ROW_SHARES": self.row_shares, "STAGES": self.stages,
            "RANKS": self.ranks,
        }  # fmt: skip
        integers |= self.mail_offsets
        for name, dense in self.products.items():
            integers[f"{name}_CHUNK"] = dense.chunk
            integers[f"{name}_PARTS"] = dense.parts
        offsets = self.shared_offsets | {"STAGE_WEIGHT_BYTES": self.stage_weight_bytes, "STAGE_BYTES": self.stage_bytes}
        floats = {
            "RMS_EPS": self.rms_eps, "TARGET_EPS": self.target.eps, "EMBEDDING_SCALE": self.embedding_scale,
            "OUTPUT_MULTIPLIER": self.output_multiplier, "SOFTCAP": self.softcap,
            "SCORE_SCALE_LOG2": self.head_dim**-0.5 * LOG2_E, "TARGET_SOFTCAP": self.target.softcap,
            "TARGET_MULTIPLIER": self.target.output_multiplier,
        }  # fmt: skip
        flags = {"CAUSAL": self.causal, "NORMED_EMBEDDING": self.normed_embedding, "TRACE": self.trace}
        return draft_protocol.header(
            draft_protocol.DRAFT_COUNTERS, {"int": integers, "uint32_t": offsets, "float": floats, "bool": flags}
        )

    def describe(self) -> str:
        """One line for logs and cache entries."""
        return ", ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))
