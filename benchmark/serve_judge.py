"""The reference as third opinion where two servers' texts part: which of the two tokens is its own first choice?

Beyond what the bundled pair was trained on, the smallest rounding moves its logits by whole nats
(docs/sglang-plugin.md): two right implementations part there, and stock's own gap does not say who is right.
"""

from dataclasses import asdict, dataclass
from typing import Any

from sgl_muse_mega.checkpoint import tiny
from sgl_muse_mega.checkpoint.target import load_target
from sgl_muse_mega.config import load_target_config
from sgl_muse_mega.reference.backend import ReferenceBackend

STOCK, OURS, ANOTHER = "stock's", "ours", "another"


@dataclass(frozen=True)
class Opinion:
    """Of one place; `behind` in nats below the reference's first choice."""

    first: str  # STOCK, OURS or ANOTHER
    stock_behind: float
    ours_behind: float


class Judge:
    """The bundled target as the reference computes it, over a cache like the servers'."""

    def __init__(self) -> None:
        self._backends: dict[str, ReferenceBackend] = {}

    def opinion(self, context: list[int], stock: int, ours: int, banned: int | None, cache: str) -> Opinion:
        """What follows `context`; banned: a token that the request rules out. cache: "bf16" or "fp8"."""
        if cache not in self._backends:
            config = load_target_config(tiny.target_directory())
            weights = load_target(tiny.target_directory(), config)
            self._backends[cache] = ReferenceBackend(config, weights, max_context=1024, kv_dtype=cache)
        scores = self._backends[cache].prefill(context).double()
        if banned is not None:
            scores[banned] = float("-inf")
        best = int(scores.argmax())
        first = {stock: STOCK, ours: OURS}.get(best, ANOTHER)
        return Opinion(first, *(float(scores[best] - scores[token]) for token in (stock, ours)))

    def fill(self, differing: list[dict[str, Any]], cache: str) -> str:
        """Adds its opinion to every text that parts at a token (`place`); a few words about all of them."""
        opinions = []
        for text in differing:
            if text["place"] is None or not text["plain"]:
                continue
            place = text["place"]
            candidates = text["stock"][place], text["ours"][place]
            found = self.opinion(text["prompt"] + text["stock"][:place], *candidates, text["banned"], cache)
            text["reference"] = asdict(found)
            opinions.append(found)
        if not opinions:
            return ""
        counts = [f"{name} {sum(o.first == name for o in opinions)}" for name in (OURS, STOCK, ANOTHER)]
        return f"reference's first choice: {', '.join(counts)}, ours behind {max(o.ours_behind for o in opinions):.3f}"
