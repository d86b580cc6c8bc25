"""How far texts of two right implementations part, on a CPU: the reference beside itself with stock SGLang's roundings.

    python benchmark/rounding_check.py --cache fp8

Stock's Triton attention multiplies in the cache's type: q and the probabilities are rounded to it for keys before the
step, to bf16 for the step's own rows, which it reads before they are rounded to the cache's type. Its experts round as
Marlin does. Prompts run so on both sides; steps on one. Prints the greedy cases of serve_texts.py, then how far the two
best tokens move against each other: by stock's roundings, and by noise of 2^-14 in the products of the projections.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from serve_texts import CONTEXT, Texts
from torch import Tensor

from sgl_muse_mega.checkpoint import tiny
from sgl_muse_mega.checkpoint.draft import load_draft
from sgl_muse_mega.checkpoint.target import load_target
from sgl_muse_mega.config import load_draft_config, load_target_config
from sgl_muse_mega.reference import attention, backend, cache, experts
from sgl_muse_mega.reference.numerics import Numerics
from sgl_muse_mega.speculative.generate import generate
from sgl_muse_mega.speculative.sampling import SamplingParams

TILE, WIDTH = 64, 8
NOISE = 2.0**-14
MODELLED = ("T03", "T04 bias", "T09", "T10", "T11")
plain_attention, plain_linear = attention.a6_attention, attention.linear
stocks_roundings = False  # of the forward that runs
noise: torch.Generator | None = None


class OwnRows(cache.KVCache):
    """A cache that gives a step its own rows back as they were written, when stock's roundings apply."""

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        super().write(slots, keys, values)
        self.own = keys, values

    def read(self, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        stored = super().read(slots, dtype)
        if not stocks_roundings:
            return stored
        return tuple(torch.cat((s[: len(s) - len(o)], o.to(dtype))) for s, o in zip(stored, self.own, strict=True))  # type: ignore[return-value]


def stock_attention(
    cached: torch.dtype, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, num: Numerics
) -> Tensor:
    """A6 in tiles of keys with a running maximum; q and exp(score - maximum) rounded, their sum not."""
    rows, kv_heads, dim = len(q), keys.shape[1], q.shape[2]
    before, grouped = len(keys) - rows, q.double().unflatten(1, (kv_heads, -1))
    shape = (kv_heads, grouped.shape[2], rows)
    out, total, highest = (
        torch.zeros(*shape, dim).double(),
        torch.zeros(shape).double(),
        torch.full(shape, -1e20).double(),
    )
    for start, end, kind in ((0, before, cached), (before, len(keys), torch.bfloat16)):
        for first in range(start, end, TILE):
            part = slice(first, min(first + TILE, end))
            score = torch.einsum("tkgd,nkd->kgtn", grouped.to(kind).double(), keys[part].double()) * scale
            score = score.masked_fill(~mask[None, None, :, part], float("-inf"))
            higher = torch.maximum(highest, score.amax(-1).clamp(min=-1e20))
            weight, kept = torch.exp(score - higher[..., None]), torch.exp(highest - higher)
            total = total * kept + weight.sum(-1)
            added = torch.einsum("kgtn,nkd->kgtd", weight.to(kind).double(), values[part].double())
            out, highest = out * kept[..., None] + added, higher
    return num.bf((out / total[..., None]).permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype))


def noisy_linear(x: Tensor, weight: Tensor) -> Tensor:
    y = plain_linear(x, weight)
    return y if noise is None else y * (1 + NOISE * torch.randn(y.shape, generator=noise).to(y.dtype))


class Served(backend.ReferenceBackend):
    """One server: its prompts by SGLang, the last token behind a cached prefix."""

    def __init__(self, kv: str, stock: bool) -> None:
        target, draft = load_target_config(tiny.target_directory()), load_draft_config(tiny.draft_directory())
        super().__init__(
            target, load_target(tiny.target_directory(), target), draft, load_draft(tiny.draft_directory(), draft),
            max_context=540, page_size=1, kv_dtype=kv, numerics=Numerics(w4a16="marlin" if stock else "normative"),
        )  # fmt: skip
        self.stock, self.banned = stock, -1

    def prefill(self, ids: Any) -> Tensor:
        if len(ids) > 1:
            self._rounding(True, lambda: super(Served, self).prefill(ids[:-1]))
            self._pending = self._rounding(True, lambda: self._forward(ids[-1:], logit_rows=1))
            logits = self._pending.logits[-1]
            self.commit(1)
        else:
            logits = self._rounding(True, lambda: super(Served, self).prefill(ids))
        return self._allowed(logits)

    def verify(self, tokens: Any) -> Tensor:
        return self._allowed(self._rounding(self.stock, lambda: super(Served, self).verify(tokens)))

    def _rounding(self, stock: bool, run: Any) -> Any:
        global stocks_roundings
        stocks_roundings = stock
        try:
            return run()
        finally:
            stocks_roundings = False

    def _allowed(self, logits: Tensor) -> Tensor:
        return logits if self.banned < 0 else logits.index_fill(-1, torch.tensor([self.banned]), -100.0)

    def answer(self, prompt: list[int], sampling: dict[str, Any]) -> list[int]:
        self.banned = int(next(iter(sampling.get("logit_bias", {-1: 0}))))
        done = generate(
            self, prompt, SamplingParams(), width=WIDTH, stop_ids=sampling["stop_token_ids"],
            max_new_tokens=min(sampling["max_new_tokens"], CONTEXT - len(prompt)),
            ignore_eos=sampling.get("ignore_eos", False),
        )  # fmt: skip
        return [token for event in done for token in event.tokens]

    def scores(self, prompt: list[int], text: list[int]) -> Tensor:
        """Log-probabilities [len(text), V] of every token of a text."""
        self.banned, rows = -1, [self.prefill(prompt)[None]]
        for start in range(0, len(text) - 1, WIDTH):
            rows.append(self.verify(text[start : min(start + WIDTH, len(text) - 1)]))
            self.commit(len(rows[-1]))
        return torch.cat(rows).double().log_softmax(-1)


def moved(ours: Served, other: Served, prompt: list[int], text: list[int], seed: int | None = None) -> Tensor:
    """|change of the distance between ours' two best| of every token, nats."""
    global noise
    best = ours.scores(prompt, text)
    noise = None if seed is None else torch.Generator().manual_seed(seed)
    values = other.scores(prompt, text)
    noise = None
    two = best.topk(2, -1)
    return ((values.gather(1, two.indices) - two.values) * torch.tensor([1.0, -1.0])).sum(-1).abs()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", choices=("bf16", "fp8"), default="fp8")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    backend.KVCache, backend.PREFILL_ROWS = OwnRows, 512  # type: ignore[misc]
    cached = backend.KV_DTYPES[options.cache]
    attention.a6_attention = lambda *a: stock_attention(cached, *a) if stocks_roundings else plain_attention(*a)
    attention.linear = experts.linear = noisy_linear
    ours, stock, texts = Served(options.cache, False), Served(options.cache, True), Texts(12)
    record: dict[str, Any] = {"cases": [], "moved": {}}
    answers = [ours.answer(prompt, texts.sampling()) for prompt in texts.prompts]
    cases = texts.cases([{"ids": answer} for answer in answers])
    every = [("texts", texts.prompts, [texts.sampling()] * 12, True), *(c for c in cases if c[0].startswith(MODELLED))]
    for name, prompts, sampling, _ in every:
        gaps = []
        for prompt, params in zip(prompts, sampling, strict=True):
            left, right = stock.answer(prompt, params), ours.answer(prompt, params)
            place = next((i for i, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), None)
            if place is not None:
                scores = stock.scores(prompt + left[:place], [0])[0]
                gaps.append(abs(float(scores[left[place]] - scores[right[place]])))
        record["cases"].append({"case": name, "texts": len(prompts), "gaps": gaps})
        print(
            f"{name:<24}{len(prompts) - len(gaps):>3} of {len(prompts)} equal  {[round(g, 3) for g in gaps]}",
            flush=True,
        )
    long = texts.prompts[0] * 20
    groups: dict[str, list[tuple[Tensor, Tensor]]] = {"answers": [], "behind their ends": [], "400 tokens and more": []}
    for prompt in texts.prompts:
        text = ours.answer(prompt, texts.sampling(max_new_tokens=90, ignore_eos=True))
        end = next((i + 1 for i, token in enumerate(text) if token in texts.stops), len(text))
        found = moved(ours, stock, prompt, text), moved(ours, ours, prompt, text, 1)
        groups["answers"].append((found[0][:end], found[1][:end]))
        groups["behind their ends"].append((found[0][end:], found[1][end:]))
    for count in (400, 472, 495):
        text = ours.answer(long[:count], texts.sampling(max_new_tokens=16, ignore_eos=True))
        groups["400 tokens and more"].append(
            (moved(ours, stock, long[:count], text), moved(ours, ours, long[:count], text, 1))
        )
    for name, pieces in groups.items():
        for kind, values in zip(("stock's roundings", "noise"), zip(*pieces, strict=True), strict=True):
            three = [float(torch.cat(values).quantile(q)) for q in (0.5, 0.95, 1.0)]
            record["moved"][f"{name}, {kind}"] = three
            print(f"{name:<22}{kind:<20}nats moved: median {three[0]:.3f}, 95 % {three[1]:.3f}, most {three[2]:.3f}")
    if options.json:
        options.json.write_text(json.dumps(record))


if __name__ == "__main__":
    main()
