"""The hand-offs inside a launch and the launch parameters, as data that generates what the kernels include.

A hand-off is a counter in global memory that only grows (modulo 2^32). Launch number e of a kernel (e = 0, 1, ...; the
epoch, a word in device memory) adds `arrivals` to each of the kernel's counters and waits for (e + 1) * arrivals. How
often a counter grows depends on the instance alone, never on rows, lengths or routing, so a graph can be replayed for
ever without a reset, and the host can recompute every expected value. Gate/up tasks instead set a
flag word to 2 e + 1, which is never the 0 of a flag that nobody wrote. Each kernel of an instance (embed, layer,
head) has its own epoch, counters and flags.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

COUNTER_STRIDE = 32  # words: one 128-byte line per counter, so that a poll never meets another counter's arrivals
RECORD_WORDS = 8
RECORD_COMPLETE = 0x6C61796572


class Arrivals(Enum):
    """How many arrivals a launch makes at a counter."""

    EVERY_CTA = "cfg::SMS"
    EVERY_ROW = "cfg::ROW_CAP"


@dataclass(frozen=True, slots=True)
class HandOff:
    """A counter: who arrives, and what a reader may do once all have."""

    name: str
    arrivals: Arrivals
    sentence: str  # ends "a CTA waited for ..." in a fault message


COUNTERS: tuple[HandOff, ...] = (
    HandOff("ATTENTION", Arrivals.EVERY_CTA, "the attention partials of all CTAs"),
    HandOff("GATED", Arrivals.EVERY_CTA, "the gated attention rows"),
    HandOff("O_PROJ", Arrivals.EVERY_CTA, "the parts of o_proj"),
    HandOff("AFTER_ATTENTION", Arrivals.EVERY_ROW, "the rows after the attention boundary"),
    HandOff("ROUTER", Arrivals.EVERY_CTA, "the parts of the router logits"),
    HandOff("PRE_PROJ", Arrivals.EVERY_CTA, "the parts of pre_expert_proj"),
    HandOff("EXPERT_INPUT", Arrivals.EVERY_ROW, "the normed expert rows"),
    HandOff("ROUTED", Arrivals.EVERY_ROW, "the selected experts of all rows"),
    HandOff("EXPERT_OUTPUT", Arrivals.EVERY_CTA, "the outputs of the experts"),
    HandOff("COMBINED", Arrivals.EVERY_ROW, "the combined expert rows"),
    HandOff("POST_PROJ", Arrivals.EVERY_CTA, "the parts of post_expert_proj"),
    HandOff("AFTER_EXPERTS", Arrivals.EVERY_ROW, "the rows after the expert boundary"),
    HandOff("QKV_PROJ", Arrivals.EVERY_CTA, "the parts of the next q, k, v and gate"),
    HandOff("LOGITS", Arrivals.EVERY_CTA, "the best scores of all CTAs"),
)

# Waits that are no counters; numbered after them in fault records.
SITES: tuple[tuple[str, str], ...] = (
    ("RING_EMPTY", "a free stage of its own ring"),
    ("RING_FULL", "a loaded stage of its own ring"),
    ("ROUTING_TABLE", "its own table of active experts"),
    ("EXPERT_ACTIVATION", "the activations of an expert"),
    ("O_PROJ_MAIL", "the part of o_proj"),
    ("PRE_PROJ_MAIL", "the columns of pre_expert_proj"),
    ("EXPERT_MAIL", "the combined experts"),
    ("POST_PROJ_MAIL", "the columns of post_expert_proj"),
    ("EMBEDDING_MAIL", "the embedding of a token"),
    ("BEST_TOKEN_MAIL", "the best token"),
    ("SUMS_PARKED", "the sums of its own expert task"),
    ("SUMS_TAKEN", "its own reduction buffer"),
    ("LENT_BACK", "the stages that it lent to attention"),
)
MAX_RANKS = 8
PEER_SHIFT = 16  # a fault's site word: the site, and above it 1 + the rank whose packet is missing

# Points of a layer launch's timeline (trace.cuh): each ends the phase of its name on the warps that pass it.
POINTS: tuple[str, ...] = (
    "START", "INPUTS_READY", "ATTENTION", "GATED", "O_PROJ", "AFTER_ATTENTION", "ROUTER", "PRE_PROJ",
    "ROUTED", "TABLE", "GATE_UP", "DOWN", "COMBINED", "POST_PROJ", "AFTER_EXPERTS", "QKV_PROJ", "END",
)  # fmt: skip

# Points that any kernel's warps pass: begin and end of a wait (value: counter or site), a stage's loads are issued
# (value: bytes of weights / 16), a stage is there and taken up, an expert task is done (value: its number).
LOG_POINTS: tuple[str, ...] = ("WAIT", "GO", "ISSUED", "TAKEN", "TASK")
LOG_WORDS = 2048  # of one warp in one launch

KERNELS: Mapping[str, tuple[str, ...]] = {
    "embed": ("AFTER_EXPERTS", "QKV_PROJ"),
    "layer": tuple(c.name for c in COUNTERS if c.name != "LOGITS"),
    "head": ("AFTER_EXPERTS", "LOGITS"),
}
"""Which counters a launch of each kernel advances."""

# What readers of other ranks' packets wait for instead of the counter, where there are other ranks.
REPLACED_BY_MAIL: Mapping[str, tuple[str, ...]] = {"layer": ("O_PROJ",)}


def kernel_counters(kernel: str, ranks: int = 1) -> tuple[str, ...]:
    """Which counters a launch of `kernel` advances on one of `ranks` ranks."""
    replaced = REPLACED_BY_MAIL.get(kernel, ()) if ranks > 1 else ()
    return tuple(name for name in KERNELS[kernel] if name not in replaced)


def expected(counter: HandOff, epoch: int, *, sms: int, row_cap: int) -> int:
    """What a waiter of launch `epoch` expects at `counter` (modulo 2^32)."""
    arrivals = sms if counter.arrivals is Arrivals.EVERY_CTA else row_cap
    return (epoch + 1) * arrivals % 2**32


# Launch parameters, in order: (name, C type). Shapes are in `tensors.py` and `step.py`.
PARAMETERS: tuple[tuple[str, str], ...] = (
    ("counters", "uint32_t*"), ("epoch", "uint32_t*"), ("flags", "uint32_t*"), ("fault_record", "uint64_t*"),
    ("deadline_ns", "uint64_t"),
    # inputs of the step
    ("token_ids", "const int64_t*"), ("positions", "const int64_t*"), ("ancestors", "const uint32_t*"),
    ("live", "const int32_t*"), ("page_table", "const int32_t*"), ("length", "const int32_t*"),
    ("slots", "const int64_t*"), ("next_page_table", "const int32_t*"), ("next_slots", "const int64_t*"),
    # caches of this layer and of the next
    ("key_cache", "const void*"), ("value_cache", "const void*"),
    ("next_key_cache", "void*"), ("next_value_cache", "void*"),
    # activations
    ("query", "uint16_t*"), ("gate", "uint16_t*"), ("attention_sums", "float*"), ("attention_state", "float*"),
    ("gated", "uint16_t*"), ("o_partial", "float*"), ("stream", "float*"), ("router_input", "uint16_t*"),
    ("router_partial", "float*"), ("router_logits", "float*"), ("pre_partial", "float*"),
    ("expert_input", "uint16_t*"), ("route_ids", "int32_t*"), ("route_weights", "float*"),
    ("activated", "uint16_t*"), ("expert_output", "float*"), ("combined", "uint16_t*"), ("post_partial", "float*"),
    ("next_input", "uint16_t*"), ("qkv_partial", "float*"), ("tap", "uint16_t*"),
    # weights
    ("o_proj", "const void*"), ("attention_alpha", "const float*"), ("attention_beta", "const float*"),
    ("pre_feedforward_norm", "const uint16_t*"), ("router", "const float*"), ("router_bias", "const float*"),
    ("pre_expert_proj", "const void*"), ("pre_expert_norm", "const uint16_t*"),
    ("gate_up", "const void*"), ("gate_scale", "const float*"), ("up_scale", "const float*"),
    ("down", "const void*"), ("down_scale", "const float*"), ("expert_boxes", "const uint8_t*"),
    ("post_expert_norm", "const uint16_t*"), ("post_expert_proj", "const void*"),
    ("post_feedforward_norm", "const uint16_t*"), ("feedforward_alpha", "const float*"),
    ("feedforward_beta", "const float*"), ("next_norm", "const uint16_t*"), ("next_qkv", "const void*"),
    ("next_rope", "const float*"),
    # both ends
    ("embedding", "const uint16_t*"), ("lm_head", "const void*"), ("logits", "float*"),
    ("best_scores", "float*"), ("best_ids", "int32_t*"), ("greedy_ids", "int64_t*"),
    ("trace", "uint64_t*"),
    # where this rank reaches the mailbox of every rank (mailbox.cuh)
    ("mailboxes", "char*"),
    # numbers
    ("tap_stride", "int64_t"), ("rows", "int32_t"), ("first_expert", "int32_t"), ("window", "int32_t"),
    ("has_next", "int32_t"), ("max_splits", "int32_t"), ("rank", "int32_t"), ("launch", "int32_t"),
    ("session", "int32_t"), ("next_window", "int32_t"), ("reserved", "int32_t"),
    ("greedy_logits", "float*"),
)  # fmt: skip

_C_TYPES = {"uint64_t": ctypes.c_uint64, "int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32}
_COUNTS = {"mailboxes": MAX_RANKS}  # parameters that are arrays


def ctype(c_type: str, count: int = 1) -> Any:
    """A parameter's type for ctypes: a pointer, an integer, or an array of them."""
    single: Any = ctypes.c_void_p if c_type.endswith("*") else _C_TYPES[c_type]
    return single if count == 1 else single * count


class Params(ctypes.Structure):
    """The parameter block of every kernel; pointers are device addresses (None: null)."""

    _fields_ = tuple((name, ctype(c_type, _COUNTS.get(name, 1))) for name, c_type in PARAMETERS)


def header() -> str:
    """C++ text of the parameter struct, the counters and the sites; `cfg` must be defined before it."""
    fields = "\n".join(
        f"    {c_type} {name}{f'[{_COUNTS[name]}]' if name in _COUNTS else ''};" for name, c_type in PARAMETERS
    )
    return f"""\
struct Params {{
{fields}
}};

namespace protocol {{
{names_text(COUNTERS, SITES, POINTS)}
{arrivals_text(COUNTERS)}
}}  // namespace protocol
"""


def names_text(counters: Sequence[HandOff], sites: Sequence[tuple[str, str]], points: Sequence[str]) -> str:
    """C++ text of the numbers that counters, other sites and a log's points have."""
    numbered = ", ".join(f"{name} = {len(counters) + i}" for i, (name, _) in enumerate(sites))
    return f"""\
enum class Counter : uint32_t {{ {", ".join(c.name for c in counters)} }};
enum class Site : uint32_t {{ {numbered} }};
enum class Point : int {{ {", ".join(("NOTHING", *points, *LOG_POINTS))} }};
constexpr uint32_t LOG_WORDS = {LOG_WORDS};"""


def arrivals_text(counters: Sequence[HandOff]) -> str:
    """C++ text of where counters lie, how they grow, and what completes a fault record."""
    cases = "".join(f"\n        case Counter::{c.name}: return {c.arrivals.value};" for c in counters)
    return f"""\
constexpr int COUNTER_STRIDE = {COUNTER_STRIDE};
constexpr uint64_t RECORD_COMPLETE = {RECORD_COMPLETE:#x}ull;
DEVICE constexpr uint32_t arrivals(Counter counter) {{
    switch (counter) {{{cases}
    }}
    return 0;
}}"""


@dataclass(frozen=True, slots=True)
class FaultRecord:
    """What the first thread that missed its deadline left in host memory."""

    rank: int
    cta: int
    site: int
    expected: int
    seen: int
    launch: int
    peer: int | None = None  # whose packet is missing

    @classmethod
    def read(cls, words: list[int]) -> "FaultRecord | None":
        """words: the RECORD_WORDS 64-bit words; None while no complete record is there."""
        if words[7] != RECORD_COMPLETE:
            return None
        rank, cta, site, expected, seen, launch = words[1:7]
        late, site = divmod(site, 1 << PEER_SHIFT)
        return cls(rank, cta, site, expected, seen, launch, late - 1 if late else None)

    def sentence(self) -> str:
        from sgl_muse_mega.megakernel import draft_protocol  # it builds on this module

        names = [(c.name, c.sentence) for c in COUNTERS] + list(SITES)
        name, what = names[self.site] if self.site < len(names) else ("?", "something unknown")
        if self.launch >= draft_protocol.FIRST_LAUNCH:
            name, what = draft_protocol.fault_site(self.launch, self.site)
        if self.peer is not None:
            what += f" of rank {self.peer}"
        return (
            f"The layer kernel stopped: on rank {self.rank}, CTA {self.cta} of launch {self.launch} of the step waited "
            f"past the deadline for {what} ({name}: expected {self.expected}, saw {self.seen}); restart the process "
            "and report this line."
        )
