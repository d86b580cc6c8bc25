"""A sequence's request and its steps' reports as words in memory (named in `draft_protocol`)."""

import struct
from collections.abc import Collection
from dataclasses import dataclass

from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel.draft_protocol import MAX_STOPS, OUTPUT, OUTPUT_SLOTS, REASONS, REQUEST, STATE
from sgl_muse_mega.megakernel.draft_scratch import DecodeState
from sgl_muse_mega.speculative.sampling import SamplingParams

Words = list[int]


def _double_bits(value: float) -> int:
    (word,) = struct.unpack("<q", struct.pack("<d", value))
    return int(word)


def request_words(
    params: SamplingParams, *, max_new_tokens: int, max_context: int, stop_ids: Collection[int] = ()
) -> Words:
    """The request buffer's content. Raises UserError for more than MAX_STOPS stop ids."""
    if len(stop_ids) > MAX_STOPS:
        raise UserError(f"There are {len(stop_ids)} stop tokens and the kernels take {MAX_STOPS}; give fewer.")
    values = {
        "GREEDY": int(params.greedy),
        "TEMPERATURE": _double_bits(params.temperature),
        "TOP_P": _double_bits(params.top_p),
        "MIN_P": _double_bits(params.min_p),
        "TOP_K": params.top_k,
        "SEED": params.seed - 2**64 if params.seed >= 2**63 else params.seed,
        "MAX_NEW_TOKENS": max_new_tokens,
        "MAX_CONTEXT": max_context,
        "STOP_COUNT": len(stop_ids),
    }
    stops = sorted(stop_ids)
    return [values[name] for name in REQUEST] + stops + [0] * (MAX_STOPS - len(stops))


def state_words(*, emitted: int = 0, start: int = 0, committed: int = 0) -> Words:
    """The state buffer's content: `emitted` new tokens so far; committed rows from position `start` on."""
    values = {"STEPS": 0, "EMITTED": emitted, "REASON": 0, "CONTEXT_START": start, "COMMITTED": committed}
    return [values[name] for name in STATE]


@dataclass(frozen=True, slots=True)
class Report:
    """What a step did. reason: None, or one of `speculative.generate.FinishReason`."""

    step: int
    tokens: tuple[int, ...]
    accepted: int
    reason: str | None
    length: int  # committed rows after it
    rows: int  # rows that were verified for their own sake


def read_report(state: DecodeState, step: int) -> Report | None:
    """The report of step number `step` (from 1), or None while it is not there.

    Raises UserError when a row of logits had no maximum.
    """
    words = state.outputs[step % OUTPUT_SLOTS]
    if int(words[OUTPUT.index("STEP")]) != step:
        return None
    values = words.tolist()
    names = ("COUNT", "ACCEPTED", "REASON", "LENGTH", "ROWS")
    count, accepted, reason, length, rows = (values[OUTPUT.index(name)] for name in names)
    name = REASONS[reason]
    if name == "BROKEN_LOGITS":
        raise UserError(
            "A row of the target's logits has no finite maximum, so no token can be chosen; "
            "the weights or the kernels that ran them are broken."
        )
    tokens = tuple(values[len(OUTPUT) : len(OUTPUT) + count])
    return Report(step, tokens, accepted, None if name == "NONE" else name.lower(), length, rows)
