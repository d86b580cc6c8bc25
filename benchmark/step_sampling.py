"""Chi-square tests of the accept kernel: many seeds over given logits and a given proposal, one graph of launches.

Each trial is a sequence of its own: two drafts, drawn from the proposal with the trial's DRAFT uniforms as the walk
does, and three rows of logits. Whatever the proposal is, the token at the first position must follow the target's
distribution there; so must the second among the trials that kept the first draft, and the third among those that kept
both. The bound was set before the first run: with 39 tests a correct kernel fails one in 2,500 times.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from sgl_muse_mega.megakernel.accept_step import AcceptStep
from sgl_muse_mega.megakernel.decode_request import request_words, state_words
from sgl_muse_mega.megakernel.draft_protocol import OUTPUT, OUTPUT_SLOTS, OUTPUT_WORDS, REQUEST
from sgl_muse_mega.megakernel.draft_scratch import DecodeState, DraftActivations
from sgl_muse_mega.megakernel.machine import Machine
from sgl_muse_mega.megakernel.random_step import VOCABULARY
from sgl_muse_mega.megakernel.scratch import StepInputs
from sgl_muse_mega.speculative.accept import accept_sampled
from sgl_muse_mega.speculative.backend import DraftBlock
from sgl_muse_mega.speculative.philox import Purpose, uniform
from sgl_muse_mega.speculative.sampling import SamplingParams, target_distribution

P_BOUND = 1e-5
CONTROL_BOUND = 1e-9  # a biased procedure must be this unlikely
ROWS, ROW_CAP, CONTEXT = 3, 8, 64
EXPECTED = 20.0  # least expected count of a bin
SOFTCAP = 20.0


@dataclass(frozen=True)
class Case:
    name: str
    params: SamplingParams
    logits: Tensor  # f32 [ROWS, V]
    candidates: Tensor  # int64 [ROWS - 1, k], distinct per slot
    q: Tensor  # f32 [ROWS - 1, k]


def uniforms(seeds: np.ndarray, position: int, purpose: Purpose) -> np.ndarray:
    """`speculative.philox.uniform` of many seeds (uint64) at once: float64."""
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    k0, k1 = seeds & mask, seeds >> half
    c0 = np.full_like(seeds, position)
    c1, c2, c3 = np.zeros_like(seeds), np.full_like(seeds, int(purpose)), np.zeros_like(seeds)
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (b >> half) ^ c1 ^ k0, b & mask, (a >> half) ^ c3 ^ k1, a & mask
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & mask, (k1 + np.uint64(0xBB67AE85)) & mask
    drawn: np.ndarray = (c0 >> np.uint64(8)).astype(np.float64) * 2.0**-24
    return drawn


class Trials:
    """`count` sequences over the same logits and proposal; their launches are one graph on a GPU."""

    def __init__(self, machine: Machine, vocab: int, k: int, count: int, threads: int = 384) -> None:
        """k: candidates of a slot; threads: of a CTA."""
        device = machine.device
        self.machine, self.count = machine, count
        self.logits = torch.zeros(ROW_CAP, vocab, device=device)
        self.greedy_ids = torch.zeros(ROW_CAP, dtype=torch.int64, device=device)
        empty = {f.name: torch.empty(0, device=device) for f in fields(DraftActivations)}
        candidates = torch.zeros(ROW_CAP, k, dtype=torch.int64, device=device)
        probabilities = torch.zeros(ROW_CAP, k, device=device)
        self.draft = DraftActivations(**{**empty, "candidates": candidates, "probabilities": probabilities})

        def each(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(count, *shape, dtype=dtype, device=device)

        rows = {name: each(ROW_CAP) for name in ("token_ids", "positions", "full_slots", "sliding_slots")}
        self.token_ids, self.length = rows["token_ids"], each(1, dtype=torch.int32)
        self.request, self.state = each(len(request_words_of(SamplingParams(1.0)))), each(len(state_words()))
        self.outputs, verdicts = each(OUTPUT_SLOTS, OUTPUT_WORDS), each(ROW_CAP, 2)
        pages = torch.arange(CONTEXT + ROW_CAP, dtype=torch.int32, device=device)
        ancestors = torch.zeros(ROW_CAP, dtype=torch.int32, device=device)
        live = torch.full((1,), ROW_CAP, dtype=torch.int32, device=device)
        plan = DecodeState.allocate(ROW_CAP, device)
        self.sequences = [
            (
                StepInputs(
                    ancestors=ancestors, live=live, length=self.length[i], full_pages=pages, sliding_pages=pages,
                    **{name: tensor[i] for name, tensor in rows.items()},
                ),
                replace(
                    plan, request=self.request[i], state=self.state[i], verdicts=verdicts[i], outputs=self.outputs[i]
                ),
            )
            for i in range(count)
        ]  # fmt: skip
        inputs, state = self.sequences[0]
        self.accept = AcceptStep(
            machine, inputs, self.logits, self.greedy_ids, state, self.draft, softcap=SOFTCAP,
            threads=threads,
        )  # fmt: skip
        shared = {**rows, "length": self.length, "verdicts": verdicts, "outputs": self.outputs, "state": self.state}
        constant = {
            "request": self.request, "logits": self.logits, "greedy_ids": self.greedy_ids, "candidates": candidates,
            "probabilities": probabilities, "pages": pages, "live": live,
        }  # fmt: skip
        own = [m for m in self.accept.memory() if m[0].startswith("accept.")]
        self._memory = [(name, tensor, False, True) for name, tensor in shared.items()]
        self._memory += [(name, tensor, True, True) for name, tensor in constant.items()]
        self._memory += [*own, ("fault_record", machine.fault_record, False, True)]
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self.request.copy_(torch.tensor(request_words_of(SamplingParams(1.0))))
            self._launch()  # loads what is loaded lazily
            machine.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._launch()

    def _launch(self) -> None:
        for inputs, state in self.sequences:
            self.accept.inputs, self.accept.state = inputs, state
            self.accept.launch(ROWS)

    def set(self, case: Case) -> None:
        self.logits[:ROWS].copy_(case.logits)
        self.greedy_ids[:ROWS].copy_(torch.from_numpy(case.logits.numpy().argmax(axis=1)))
        self.draft.candidates[: ROWS - 1].copy_(case.candidates)
        self.draft.probabilities[: ROWS - 1].copy_(case.q)
        self.request.copy_(torch.tensor(request_words_of(case.params)))

    def run(self, seeds: np.ndarray, drafts: Tensor, length: int) -> Tensor:
        """int64 [count, ROWS]: the tokens of each trial, -1 behind its last. drafts int64 [count, ROWS - 1]."""
        self.request[:, REQUEST.index("SEED")].copy_(torch.from_numpy(seeds.astype(np.int64)))
        self.token_ids[:, 1:ROWS].copy_(drafts)
        self.length.fill_(length)
        self.state.copy_(torch.tensor(state_words(emitted=1)))
        self.outputs.zero_()
        if self._graph is not None:
            self._graph.replay()
        else:
            self.machine.declare(self._memory)
            self._launch()
        self.machine.synchronize()
        slot = self.outputs[:, 1 % OUTPUT_SLOTS].cpu()
        counts = slot[:, OUTPUT.index("COUNT"), None]
        tokens = slot[:, len(OUTPUT) : len(OUTPUT) + ROWS]
        return torch.where(torch.arange(ROWS) < counts, tokens, -1)


def request_words_of(params: SamplingParams) -> list[int]:
    return request_words(params, max_new_tokens=CONTEXT, max_context=CONTEXT)


def draw_drafts(case: Case, seeds: np.ndarray, first: int, purpose: Purpose = Purpose.DRAFT) -> Tensor:
    """int64 [seeds, ROWS - 1]: the walk's inverse transform on q at positions first .."""
    slots = []
    for slot, (ids, q) in enumerate(zip(case.candidates, case.q, strict=True)):
        running = torch.cumsum(q, dim=0).numpy()
        picks = np.searchsorted(running, uniforms(seeds, first + slot, purpose).astype(np.float32), side="right")
        slots.append(ids[torch.from_numpy(picks.clip(max=len(ids) - 1))])
    return torch.stack(slots, dim=1)


def p_value(tokens: Tensor, p: Tensor) -> float:
    """Chi-square of drawn tokens [n] under p f64 [V]; rare ids share bins. 0 if an impossible id was drawn."""
    counts = torch.bincount(tokens, minlength=len(p)).double()
    if float(counts[p == 0].sum()) > 0:
        return 0.0
    order = torch.argsort(p, descending=True)
    order = order[p[order] > 0]
    expected = p[order] * len(tokens)
    before = torch.cumsum(expected, dim=0) - expected
    bins = torch.unique(torch.floor(before / EXPECTED), return_inverse=True)[1]
    last = bins == bins.max()
    if float(expected[last].sum()) < EXPECTED and not bool(last.all()):
        bins[last] -= 1
    width = int(bins.max()) + 1
    if width == 1:
        return 1.0
    pooled = torch.zeros(width, dtype=torch.float64).index_add_(0, bins, expected)
    seen = torch.zeros(width, dtype=torch.float64).index_add_(0, bins, counts[order])
    return float(stats.chisquare(seen.numpy(), (pooled * (seen.sum() / pooled.sum())).numpy()).pvalue)


def cases(seed: int) -> dict[int, list[Case]]:
    """By vocabulary: the parameters of the host rule's tests on eight ids, and more on a vocabulary of real size."""
    g = torch.Generator().manual_seed(seed)
    row = torch.tensor([1.1, 0.4, 1.1, -0.6, 0.9, -2.0, 0.0, -4.0])
    small_logits = torch.stack([row, row.flip(0), row.roll(3)])

    def small(name: str, params: SamplingParams, q: list[float], ids: list[int]) -> Case:
        rest = [i for i in range(8) if i not in ids][: 4 - len(ids)]
        slot = torch.tensor([*ids, *rest])
        weights = torch.tensor([*q, *[0.0] * len(rest)])
        return Case(name, params, small_logits, torch.stack([slot, slot.flip(0)]), torch.stack([weights, weights]))

    fresh_q = torch.rand(4, generator=g)
    few = [
        small("temperature 1", SamplingParams(1.0), [0.25, 0.25, 0.25, 0.25], [3, 0, 5, 1]),
        small("top-k 3", SamplingParams(0.7, top_k=3), [0.1, 0.2, 0.7], [0, 2, 3]),
        small("top-p 0.6, overconfident draft", SamplingParams(1.3, top_p=0.6), [0.02, 0.98], [4, 0]),
        small("min-p 0.4, one-hot draft", SamplingParams(1.0, min_p=0.4), [1.0], [2]),
        small("all filters", SamplingParams(2.0, top_p=0.9, top_k=5, min_p=0.1), [0.6, 0.3, 0.1], [1, 2, 4]),
        small("two tied ids", SamplingParams(1.0, top_k=2), [0.5, 0.5], [0, 2]),
        small("fresh", SamplingParams(0.3 + 2 * float(torch.rand(1, generator=g)), top_p=0.95),
              (fresh_q / fresh_q.sum()).tolist(), torch.randperm(8, generator=g)[:4].tolist()),
    ]  # fmt: skip

    vocab, k = VOCABULARY, 16
    peaked = torch.randn(ROWS, vocab, generator=g)
    for r in range(ROWS):
        peaked[r, torch.randperm(vocab, generator=g)[:60]] += 9 + 3 * torch.rand(60, generator=g)
    flat = torch.randn(ROWS, vocab, generator=g) * 0.3

    def large(name: str, params: SamplingParams, base: Tensor, noise: float) -> Case:
        logits = SOFTCAP * torch.tanh(base / SOFTCAP)
        guess = logits[: ROWS - 1] + noise * torch.randn(ROWS - 1, vocab, generator=g)
        ids = guess.topk(k, dim=1).indices
        return Case(name, params, logits, ids, torch.softmax(guess.gather(1, ids), dim=1))

    many = [
        large("202,048 ids, temperature 0.8", SamplingParams(0.8), peaked, 0.5),
        large("202,048 ids, top-k 40", SamplingParams(1.0, top_k=40), peaked, 1.0),
        large("202,048 ids, top-p 0.9", SamplingParams(1.2, top_p=0.9), peaked, 1.0),
        large("202,048 ids, min-p 0.05", SamplingParams(1.0, min_p=0.05), peaked, 0.3),
        large("202,048 ids, all filters", SamplingParams(1.1, top_p=0.95, top_k=50, min_p=0.02), peaked, 0.5),
        large("202,048 flat ids, top-p 0.95", SamplingParams(1.0, top_p=0.95), flat, 0.1),
    ]
    return {8: few, vocab: many}


def check(machine: Machine, draws: int, per_graph: int, by_vocab: dict[int, list[Case]], seed: int) -> dict[str, Any]:
    """All cases; per case the p-values of the three positions, and how many trials differ from the host's rule."""
    record: dict[str, Any] = {"draws": draws, "seed": seed, "bound": P_BOUND, "cases": [], "controls": {}}
    first_seed = seed << 32
    for vocab, group in by_vocab.items():
        draws = record["draws"] if vocab < 1000 else record["draws"] // 2
        trials = Trials(machine, vocab, group[0].candidates.shape[1], per_graph)
        for index, case in enumerate(group):
            length = 4 + index
            trials.set(case)
            targets = [target_distribution(row, case.params) for row in case.logits]
            tokens, seeds, drafts = _draw(trials, case, draws, first_seed, length, draw_drafts)
            first_seed += draws
            values = [p_value(tokens[tokens[:, r] >= 0, r], targets[r]) for r in range(ROWS)]
            compared = 200 if vocab < 1000 else 6
            differ = sum(
                _by_rule(case, drafts[i], int(seeds[i]), length) != [t for t in tokens[i].tolist() if t >= 0]
                for i in range(min(compared, draws))
            )
            drawn = [int((tokens[:, r] >= 0).sum()) for r in range(ROWS)]
            record["cases"].append(
                {"name": case.name, "p_values": values, "drawn": drawn, "compared_with_rule": compared,
                 "differ_from_rule": differ}
            )  # fmt: skip
        if vocab < 1000:
            record["controls"] = _controls(trials, group[0], draws, first_seed)
            first_seed += 2 * draws
    return record


def _draw(
    trials: Trials, case: Case, draws: int, first_seed: int, length: int,
    propose: Callable[[Case, np.ndarray, int], Tensor],
) -> tuple[Tensor, np.ndarray, Tensor]:  # fmt: skip
    tokens, all_seeds, all_drafts = [], [], []
    for start in range(0, draws, trials.count):
        seeds = np.arange(first_seed + start, first_seed + start + trials.count, dtype=np.uint64)
        drafts = propose(case, seeds, length + 1)
        tokens.append(trials.run(seeds, drafts, length))
        all_seeds.append(seeds)
        all_drafts.append(drafts)
    return torch.cat(tokens), np.concatenate(all_seeds), torch.cat(all_drafts)


def _by_rule(case: Case, drafts: Tensor, seed: int, length: int) -> list[int]:
    accepted = accept_sampled(
        case.logits, DraftBlock(drafts, case.candidates, case.q), case.params, length + 1, partial(uniform, seed)
    )
    return [*drafts[: accepted.drafts].tolist(), accepted.token]


def _controls(trials: Trials, case: Case, draws: int, first_seed: int) -> dict[str, float]:
    """p-values of the first position under two faults that must show."""
    trials.set(case)
    target = target_distribution(case.logits[0], case.params)
    shared, _, _ = _draw(trials, case, draws, first_seed, 4, partial(draw_drafts, purpose=Purpose.ACCEPT))
    trials.draft.probabilities[: ROWS - 1].copy_(torch.tensor([0.55, 0.25, 0.15, 0.05]))
    wrong, _, _ = _draw(trials, case, draws, first_seed + draws, 4, draw_drafts)
    return {"one uniform drafts and accepts": p_value(shared[:, 0], target),
            "another proposal than reported": p_value(wrong[:, 0], target)}  # fmt: skip


def passed(record: dict[str, Any]) -> bool:
    fair = all(v > P_BOUND for c in record["cases"] for v in c["p_values"])
    same = all(c["differ_from_rule"] == 0 for c in record["cases"])
    return fair and same and all(v < CONTROL_BOUND for v in record["controls"].values())
