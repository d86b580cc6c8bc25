"""Every block that the draft's kernels propose in a text, beside what the reference draft proposes in its place.

The reference gets the same context: the taps of the rows that the kernels committed. Two comparisons per block: the
reference's head over the kernels' own last rows, which must choose the same candidates and the same path, and the whole
reference draft. Scores are bf16, so candidates may change places where the reference's own scores tie or nearly tie;
the bounds were set before the first run on a GPU. Some blocks, and most rows behind the block size that the draft was
trained with, amplify every rounding: there the kernels are judged by their distance to a float64 run, in units of the
reference's own.
"""

import statistics
from dataclasses import dataclass, field
from typing import Any

import torch
from step_pair import Pair
from torch import Tensor

from sgl_muse_mega.megakernel.backend import to_device
from sgl_muse_mega.megakernel.decode_loop import DecodeLoop
from sgl_muse_mega.megakernel.decode_request import read_report, request_words
from sgl_muse_mega.reference.cache import KVCache
from sgl_muse_mega.reference.draft import ReferenceDraft
from sgl_muse_mega.reference.numerics import Numerics, linear, norm_absolute
from sgl_muse_mega.reference.selector import walk_greedy
from sgl_muse_mega.speculative.sampling import SamplingParams

HEAD_BOUND = 2.0**-7  # of a score: one step of bf16, as the kernels add in fp32 and the reference in fp64
DRAFT_BOUND = 0.02  # of the slot's largest score: what bf16 rows of three layers may differ by
RATIO_BOUND = 1.3  # of the median ratio of distances over all slots, as in distance_check.py
SLOT_BOUND = 1.6  # of the median of a single slot
EXACT_BLOCKS = 100  # of a width; the float64 run is slow


class Shadow:
    """The reference draft over the context of one sequence; position i lies in slot i + 1."""

    def __init__(self, pair: Pair, positions: int) -> None:
        device = pair.machine.device
        target, weights = to_device(pair.weights, device), to_device(pair.draft_weights, device)
        config = self.config = pair.draft_config
        self.draft, self.exact = (
            ReferenceDraft(
                config, weights, target.embed_tokens, target.lm_head, pair.config.rms_norm_eps, Numerics(exact=exact)
            )
            for exact in (False, True)
        )
        self.device = device
        self.caches = [
            KVCache(positions + 1, config.num_key_value_heads, config.head_dim, torch.bfloat16, device)
            for _ in range(config.num_hidden_layers)
        ]

    def extend(self, taps: Tensor, start: int) -> None:
        """The context of rows at positions start ..; taps bf16 [rows, n_taps, H]."""
        positions = torch.arange(start, start + len(taps), device=self.device)
        context = self.draft.context(taps.transpose(0, 1).float())
        self.draft.write_context(context, positions, positions + 1, self.caches)

    def block(self, draft: ReferenceDraft, anchor: int, length: int, width: int) -> Tensor:
        """Last rows of the block behind `anchor` at position `length`: [width, H]."""
        start = max(0, length + 1 - self.config.sliding_window)
        ids = torch.full((width,), self.config.mask_token_id, device=self.device)
        ids[0] = anchor
        slots = torch.arange(start, length, device=self.device) + 1
        return draft.block(ids, length, slots, start, self.caches)

    def scores(self, draft: ReferenceDraft, rows: Tensor) -> Tensor:
        """z of the rows behind the anchor: [width - 1, V]."""
        hf = draft.num.bf(norm_absolute(rows[1:], draft.weights.norm, self.config.rms_norm_eps))
        return draft.num.bf(linear(hf, draft.lm_head))

    def distances(self, ours: Tensor, reference: Tensor, exact: Tensor) -> list[float]:
        """Per slot: how far the kernels' rows are from the float64 run, over how far the reference's are, in scores
        without rounding."""
        target, *found = (self.scores(self.exact, rows.double()) for rows in (exact, ours, reference))
        far, near = ((z - target).norm(dim=1) for z in found)
        return [float(value) for value in far / near]


@dataclass
class Comparison:
    """Counts over all blocks of one kind of comparison."""

    blocks: int = 0
    equal: int = 0  # same candidates in the same order, and the same path
    same_path: int = 0
    same_ids: int = 0  # every slot has the same candidates, in any order
    near: int = 0  # different, and every difference is within the bounds
    far: list[dict[str, Any]] = field(default_factory=list)  # "ratio": of its distances to float64, median over slots

    def add(self, shadow: Shadow, rows: Tensor, anchor: int, chosen: Tensor, tokens: Tensor, bound: float) -> Tensor:
        """chosen int64 [S, k] and tokens [S]: the kernels'; rows: what the reference's head starts from. Returns the
        reference's tokens."""
        head = shadow.draft.candidates(rows, anchor)
        path = walk_greedy(head.lattice)
        expected = head.candidates.gather(1, path[:, None])[:, 0]
        same_candidates = torch.equal(head.candidates, chosen)
        same_path = torch.equal(expected, tokens)
        self.blocks += 1
        self.same_path += same_path
        self.same_ids += torch.equal(head.candidates.sort(dim=1).values, chosen.sort(dim=1).values)
        if same_candidates and same_path:
            self.equal += 1
            return expected
        z = shadow.scores(shadow.draft, rows).float()
        ours, theirs = z.gather(1, chosen), z.gather(1, head.candidates)
        largest = theirs.abs().amax(dim=1, keepdim=True)
        allowed = bound * (theirs.abs() if bound == HEAD_BOUND else largest)
        misplaced = float(((ours - theirs).abs() - allowed).max())
        # two scores that are off by the bound may change places, and the lattice has their multiples
        gap = 0.0 if same_path else _path_gap(head.lattice, head.candidates, path, expected, tokens)
        if misplaced <= 0 and gap <= 2 * bound * shadow.config.output_multiplier * float(largest.max()):
            self.near += 1
        else:
            self.far.append({"anchor": anchor, "beyond_score_bound": misplaced, "path_gap": gap})
        return expected

    def unexcused(self) -> int:
        """Far blocks that are not as near to float64 as the reference's own."""
        return sum(not block.get("ratio", float("inf")) < SLOT_BOUND for block in self.far)

    def record(self) -> dict[str, Any]:
        return {
            "blocks": self.blocks, "equal": self.equal, "same_path": self.same_path, "same_ids": self.same_ids,
            "near_ties": self.near,
            "far": self.far,
        }  # fmt: skip


def _path_gap(lattice: Tensor, candidates: Tensor, path: Tensor, expected: Tensor, tokens: Tensor) -> float:
    """By how much the reference prefers its own token at the first slot where the paths part."""
    slot = int((expected != tokens).nonzero()[0, 0])
    row = lattice[slot, int(path[slot - 1]) if slot else 0]
    place = (candidates[slot] == tokens[slot]).nonzero()
    if not len(place):
        return float("inf")
    return float(row[path[slot]] - row[int(place[0, 0])])


@dataclass
class Blocks:
    """What all texts together showed."""

    head: Comparison = field(default_factory=Comparison)
    draft: Comparison = field(default_factory=Comparison)
    kept: int = 0  # drafts of the kernels that the target kept
    reference_kept: int = 0  # drafts of the reference that it would have kept in the same places
    ratios: list[list[float]] = field(default_factory=list)  # per block looked at, `Shadow.distances`

    def ratio(self) -> float:
        """Median over slots and blocks."""
        return statistics.median(value for block in self.ratios for value in block)

    def worst_ratio(self) -> float:
        """Largest median of a slot."""
        return max(statistics.median(slot) for slot in zip(*self.ratios, strict=True))

    def record(self) -> dict[str, Any]:
        return {
            "head": self.head.record(), "draft": self.draft.record(), "kept": self.kept,
            "reference_kept": self.reference_kept, "ratios": self.ratios,
        }  # fmt: skip


def compare_text(pair: Pair, shadow: Shadow, blocks: Blocks, ids: list[int], text: list[int], width: int) -> None:
    """Greedy steps through one prompt; text: the tokens that follow it."""
    loop = pair.loop(width)
    decode = loop.decode
    assert decode.draft is not None
    _prefill(loop, shadow, ids)
    words = request_words(SamplingParams(), max_new_tokens=len(text), max_context=loop.max_context)
    decode.begin(text[0], len(ids), words)
    done, steps = 1, 0
    while done < len(text):
        length, anchor = len(ids) + done - 1, text[done - 1]
        steps += 1
        loop.replay("step", width, decode.launch)
        decode.step.machine.synchronize()
        report = read_report(decode.state, steps)
        assert report is not None
        activations = decode.draft.activations
        chosen, tokens = activations.candidates[: width - 1], decode.step.inputs.token_ids[1:width]
        with torch.inference_mode():
            own = activations.residual[:width].float()
            blocks.head.add(shadow, own, anchor, chosen, tokens, HEAD_BOUND)
            rows = shadow.block(shadow.draft, anchor, length, width)
            far = len(blocks.draft.far)
            expected = blocks.draft.add(shadow, rows, anchor, chosen, tokens, DRAFT_BOUND)
            unlike = blocks.draft.far[far:]
            if unlike or len(blocks.ratios) < EXACT_BLOCKS:
                exact = shadow.block(shadow.exact, anchor, length, width)
                ratios = shadow.distances(own, rows, exact)
                for block in unlike:
                    block["ratio"] = statistics.median(ratios)
                if len(blocks.ratios) < EXACT_BLOCKS:
                    blocks.ratios.append(ratios)
            shadow.extend(decode.step.taps[: len(report.tokens)], length)
        following = text[done : done + width - 1]
        blocks.kept += _common(tokens.tolist(), following)
        blocks.reference_kept += _common(expected.tolist(), following)
        done += len(report.tokens)


def _prefill(loop: DecodeLoop, shadow: Shadow, ids: list[int]) -> None:
    decode = loop.decode
    decode.declare(loop.caches)
    taps = []
    for start in range(0, len(ids), loop.width_limit):
        chunk = ids[start : start + loop.width_limit]
        decode.seek(chunk, start)
        loop.replay("prompt", len(chunk), decode.launch_prompt)
        decode.step.machine.synchronize()
        taps.append(decode.step.taps[: len(chunk)].clone())
    with torch.inference_mode():
        shadow.extend(torch.cat(taps), 0)


def _common(drafts: list[int], text: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(drafts, text, strict=False)) if a != b), min(len(drafts), len(text)))
