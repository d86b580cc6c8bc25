"""Hand-offs and launch parameters of the draft's kernels and of the accept kernel; see `protocol` for the discipline.

They share one parameter block. The draft's kernels are compiled with the counters of `DRAFT_COUNTERS`, the accept
kernel with those of `ACCEPT_COUNTERS`; each kernel has its own epoch and counters.
"""

import ctypes
from collections.abc import Mapping, Sequence

from sgl_muse_mega.megakernel.protocol import MAX_RANKS, Arrivals, HandOff, arrivals_text, ctype, names_text

MAX_LAYERS = 8
FIRST_LAUNCH = 1000  # launches of these kernels are numbered from here on in fault records; the target's from 0
ACCEPT_LAUNCH = 2000

DRAFT_COUNTERS: tuple[HandOff, ...] = (
    HandOff("EMBEDDED", Arrivals.EVERY_ROW, "the embedded rows of the draft's block"),
    HandOff("ATTENTION_TAPS", Arrivals.EVERY_CTA, "the parts of the draft's attention taps"),
    HandOff("CONVOLVED", Arrivals.EVERY_CTA, "the convolved attention input of the draft"),
    HandOff("QKV", Arrivals.EVERY_CTA, "the parts of the draft's q, k and v"),
    HandOff("HEADS_READY", Arrivals.EVERY_CTA, "the draft's rotated heads"),
    HandOff("ATTENTION", Arrivals.EVERY_CTA, "the draft's attention partials"),
    HandOff("ATTENDED", Arrivals.EVERY_CTA, "the draft's attention rows"),
    HandOff("OUTPUT", Arrivals.EVERY_CTA, "the parts of the draft's o_proj"),
    HandOff("ATTENTION_SQUARES", Arrivals.EVERY_CTA, "the sums of squares of the draft's rows after attention"),
    HandOff("AFTER_ATTENTION", Arrivals.EVERY_CTA, "the draft's rows after attention"),
    HandOff("MLP_TAPS", Arrivals.EVERY_CTA, "the parts of the draft's MLP taps"),
    HandOff("MLP_CONVOLVED", Arrivals.EVERY_CTA, "the convolved MLP input of the draft"),
    HandOff("GATE_UP", Arrivals.EVERY_CTA, "the parts of the draft's gate and up"),
    HandOff("ACTIVATED", Arrivals.EVERY_CTA, "the draft's activations"),
    HandOff("DOWN", Arrivals.EVERY_CTA, "the parts of the draft's down_proj"),
    HandOff("MLP_SQUARES", Arrivals.EVERY_CTA, "the sums of squares of the draft's rows after the MLP"),
    HandOff("AFTER_MLP", Arrivals.EVERY_CTA, "the draft's rows after the MLP"),
    HandOff("SELECTOR_STATE", Arrivals.EVERY_CTA, "the parts of the selector's state"),
    HandOff("SCORES", Arrivals.EVERY_CTA, "the best draft scores of all CTAs"),
    HandOff("CHOSEN", Arrivals.EVERY_ROW, "the candidates of all slots"),
    HandOff("LATTICE", Arrivals.EVERY_ROW, "the lattice of all slots"),
    HandOff("NORMED", Arrivals.EVERY_ROW, "the verify rows' final norm"),
    HandOff("FUSION", Arrivals.EVERY_CTA, "the parts of the draft's fc"),
    HandOff("CONTEXT", Arrivals.EVERY_ROW, "the draft's context rows"),
    HandOff("CONTEXT_KV", Arrivals.EVERY_CTA, "the parts of the draft's context keys and values"),
)

_AFTER_MLP = [c.name for c in DRAFT_COUNTERS].index("AFTER_MLP")  # the last of the block's own

ACCEPT_COUNTERS: tuple[HandOff, ...] = (
    HandOff("VERDICTS", Arrivals.EVERY_CTA, "the accept rule's verdict on every row"),
)

# Which counters a launch of each kernel advances; the draft's block once per layer.
KERNELS: Mapping[str, tuple[str, ...]] = {
    "draft_block_kernel": tuple(c.name for c in DRAFT_COUNTERS[: _AFTER_MLP + 1]),
    "draft_head_kernel": ("SELECTOR_STATE", "SCORES", "CHOSEN", "LATTICE"),
    "verify_head_kernel": ("NORMED", "SCORES"),
    "draft_context_kernel": ("FUSION", "CONTEXT", "CONTEXT_KV"),
    "accept_kernel": ("VERDICTS",),
}

# What readers of other ranks' packets wait for instead of the counter, where there are other ranks.
REPLACED_BY_MAIL: tuple[str, ...] = ("OUTPUT", "DOWN")


def kernel_counters(kernel: str, ranks: int = 1) -> tuple[str, ...]:
    """Which counters a launch of `kernel` advances on one of `ranks` ranks."""
    return tuple(name for name in KERNELS[kernel] if ranks == 1 or name not in REPLACED_BY_MAIL)


SITES: tuple[tuple[str, str], ...] = (
    ("RING_EMPTY", "a free stage of its own ring"),
    ("RING_FULL", "a loaded stage of its own ring"),
    ("ROW_SUM", "the other CTAs of its row in the accept rule"),
    ("ANCHOR_MAIL", "the embedding of the anchor"),
    ("DRAFT_OUTPUT_MAIL", "the part of the draft's o_proj"),
    ("DRAFT_DOWN_MAIL", "the part of the draft's down_proj"),
    ("FUSION_MAIL", "the columns of the draft's fc"),
    ("CANDIDATE_MAIL", "the best draft scores"),
    ("BEST_TOKEN_MAIL", "the best token"),
    ("LOGITS_MAIL", "the logits"),
)
ROW_SUMS = 160  # most sums over the CTAs of a row in one accept launch; its counter grows by so many per CTA

# Points of a draft layer's timeline (csrc/layer/trace.cuh).
POINTS: tuple[str, ...] = (
    "START", "INPUTS_READY", "ATTENTION_TAPS", "CONVOLVED", "QKV", "HEADS_READY", "ATTENTION", "ATTENDED", "OUTPUT",
    "AFTER_ATTENTION", "MLP_TAPS", "MLP_CONVOLVED", "GATE_UP", "ACTIVATED", "DOWN", "AFTER_MLP",
)  # fmt: skip

# Words of `request`, int64: what one sequence asks for. Floats are the bits of a float32.
REQUEST: tuple[str, ...] = (
    "GREEDY", "TEMPERATURE", "TOP_P", "MIN_P", "TOP_K", "SEED", "MAX_NEW_TOKENS", "MAX_CONTEXT", "STOP_COUNT",
)  # fmt: skip
MAX_STOPS = 16  # stop ids follow the words above

# Words of `state`, int64: what a step leaves for the next, and for the context launch.
STATE: tuple[str, ...] = ("STEPS", "EMITTED", "REASON", "CONTEXT_START", "COMMITTED")

# Words of an output slot, int64, followed by the step's tokens. STEP is written last.
OUTPUT: tuple[str, ...] = ("STEP", "COUNT", "ACCEPTED", "REASON", "LENGTH", "ROWS")
OUTPUT_SLOTS = 2
OUTPUT_WORDS = 32

# Why a sequence ended; the first four are those of `speculative.generate`.
REASONS: tuple[str, ...] = ("NONE", "STOP", "LENGTH", "CONTEXT", "BROKEN_LOGITS")

PARAMETERS: tuple[tuple[str, str, int], ...] = tuple(
    (name, kind, count[0] if count else 1)
    for name, kind, *count in (
        ("counters", "uint32_t*"), ("epoch", "uint32_t*"), ("fault_record", "uint64_t*"), ("deadline_ns", "uint64_t"),
        # the sequence
        ("token_ids", "int64_t*"), ("positions", "int64_t*"), ("length", "int32_t*"), ("page_table", "const int32_t*"),
        ("request", "const int64_t*"), ("state", "int64_t*"),
        # the draft's layers
        ("embedding", "const uint16_t*"), ("mask_embedding", "const uint16_t*"), ("rope", "const float*"),
        ("input_norm", "const uint16_t*"), ("attention_projection", "const void*", MAX_LAYERS),
        ("attention_base", "const uint16_t*", MAX_LAYERS), ("qkv", "const void*", MAX_LAYERS),
        ("query_norm", "const uint16_t*", MAX_LAYERS), ("key_norm", "const uint16_t*", MAX_LAYERS),
        ("output", "const void*", MAX_LAYERS), ("post_attention_norm", "const uint16_t*", MAX_LAYERS),
        ("mlp_projection", "const void*", MAX_LAYERS), ("mlp_base", "const uint16_t*", MAX_LAYERS),
        ("gate_up", "const void*", MAX_LAYERS), ("down", "const void*", MAX_LAYERS),
        ("next_norm", "const uint16_t*", MAX_LAYERS), ("key_cache", "uint16_t*", MAX_LAYERS),
        ("value_cache", "uint16_t*", MAX_LAYERS),
        ("residual", "uint16_t*"), ("input", "uint16_t*"), ("attention_taps", "float*"),
        ("output_taps", "float*"), ("convolved", "uint16_t*"),
        ("qkv_partial", "float*"), ("query", "uint16_t*"), ("block_keys", "uint16_t*"), ("block_values", "uint16_t*"),
        ("attention_sums", "float*"), ("attention_state", "float*"), ("attended", "uint16_t*"),
        ("output_partial", "float*"), ("row_squares", "float*"), ("mlp_input", "uint16_t*"), ("mlp_taps", "float*"),
        ("gate_up_partial", "float*"), ("activated", "uint16_t*"), ("down_partial", "float*"),
        # head and selector
        ("hidden_projection", "const void*"), ("lm_head", "const void*"), ("predecessors", "const uint16_t*"),
        ("successors", "const uint16_t*"), ("selector_partial", "float*"), ("list_scores", "float*"),
        ("list_ids", "int32_t*"), ("candidates", "int64_t*"), ("candidate_scores", "float*"), ("lattice", "float*"),
        ("probabilities", "float*"),
        # context
        ("fusion", "const void*"), ("hidden_norm", "const uint16_t*"), ("context_kv", "const void*", MAX_LAYERS),
        ("taps", "const uint16_t*"), ("fusion_partial", "float*"),
        ("context", "uint16_t*"), ("context_partial", "float*"),
        # verify head and accept
        ("stream", "const float*"), ("final_norm", "const uint16_t*"), ("logits", "float*"), ("greedy_ids", "int64_t*"),
        ("full_slots", "int64_t*"),
        ("sliding_slots", "int64_t*"), ("full_pages", "const int32_t*"), ("sliding_pages", "const int32_t*"),
        ("verdicts", "int64_t*"), ("outputs", "uint64_t*"), ("row_counters", "uint32_t*"), ("row_sums", "uint64_t*"),
        ("segment_sums", "uint64_t*"), ("trace", "uint64_t*"),
        # trees and chosen widths (step_plan.py); cache_lines: [target's layers, keys, values and page table]
        ("ancestors", "uint32_t*"), ("live", "int32_t*"), ("parents", "int32_t*"), ("depths", "int32_t*"),
        ("conditionals", "float*"), ("path", "int32_t*"), ("calibration", "int32_t*"), ("costs", "const float*"),
        ("cache_lines", "const uint64_t*"),
        # numbers
        ("rows", "int32_t"), ("rank", "int32_t"), ("launch", "int32_t"), ("nodes", "int32_t"),
        ("line_bytes", "int32_t"), ("cache_layers", "int32_t"), ("session", "int32_t"),
        # several ranks: where this one reaches everybody's mailbox, and what it has of whole rows
        ("mailboxes", "char*", MAX_RANKS), ("whole_logits", "float*"), ("greedy_logits", "float*"),
    )
)  # fmt: skip


class DraftParams(ctypes.Structure):
    """The parameter block; pointers are device addresses (None: null)."""

    _fields_ = tuple((name, ctype(kind, count)) for name, kind, count in PARAMETERS)


def header(counters: Sequence[HandOff], constants: Mapping[str, Mapping[str, int | float | bool]]) -> str:
    """Text of instance.h. constants: C++ type -> name -> value, for namespace cfg."""
    lines = [
        f"constexpr {kind} {name} = {_literal(value)};"
        for kind, group in constants.items()
        for name, value in group.items()
    ]
    fields = "\n".join(f"    {kind} {name}{f'[{count}]' if count > 1 else ''};" for name, kind, count in PARAMETERS)
    return f"""\
// Generated by sgl_muse_mega.megakernel.draft_protocol; do not edit.
#pragma once
#include <cstdint>

#include "instr/core.cuh"

namespace cfg {{
{chr(10).join(lines)}
constexpr bool SEPARATE = false;
}}  // namespace cfg

struct Params {{
{fields}
}};

namespace protocol {{
{names_text(counters, SITES, POINTS)}
enum class Request : int {{ {", ".join(REQUEST)}, STOPS }};
enum State : int {{ {", ".join(STATE)} }};
enum class Output : int {{ {", ".join(OUTPUT)}, TOKENS }};
enum class Reason : int64_t {{ {", ".join(REASONS)} }};
constexpr int ROW_SUMS = {ROW_SUMS};
constexpr int OUTPUT_SLOTS = {OUTPUT_SLOTS}, OUTPUT_WORDS = {OUTPUT_WORDS};
{arrivals_text(counters)}
}}  // namespace protocol
"""


def _literal(value: int | float | bool) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value!r}f" if isinstance(value, float) else str(value)


def fault_site(launch: int, site: int) -> tuple[str, str]:
    """Name and sentence of the site of a fault record that one of these kernels wrote."""
    counters = ACCEPT_COUNTERS if launch >= ACCEPT_LAUNCH else DRAFT_COUNTERS
    names = [(c.name, c.sentence) for c in counters] + list(SITES)
    return names[site] if site < len(names) else ("?", "something unknown")
