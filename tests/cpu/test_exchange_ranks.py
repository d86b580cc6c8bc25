"""Several ranks in one process: the tiny pair's verify step against the reference, schedules, sessions, failures."""

import functools
import re

import pytest
import torch
from rank_case import RankCase
from torch import Tensor

from sgl_muse_mega.checkpoint import tiny
from sgl_muse_mega.checkpoint.target import load_target
from sgl_muse_mega.commands.text import Text
from sgl_muse_mega.config import load_target_config
from sgl_muse_mega.emulator.machine import EmulatorFault, Injection, Schedule, racing
from sgl_muse_mega.emulator.stepper import EmulatedRanks
from sgl_muse_mega.megakernel import protocol
from sgl_muse_mega.megakernel.scratch import Control
from sgl_muse_mega.megakernel.step import Step
from sgl_muse_mega.megakernel.weights import prepare
from sgl_muse_mega.reference.cache import KVCache
from sgl_muse_mega.reference.numerics import Numerics
from sgl_muse_mega.reference.target import ReferenceTarget, Rows

PROBLEM = (
    "A bus leaves the bakery with 27 people. At the first stop 12 people get off and 4 people get on. "
    "Tara is the guard. How many people are on the bus now? After people get off there are 15 people."
)
MAX_CONTEXT, ROW_CAP = 48, 16


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class TinyRanks:
    """The bundled target, every rank's share read from disk, over caches of its own heads."""

    def __init__(self, ranks: int, schedule: Schedule) -> None:
        self.config = load_target_config(tiny.target_directory())
        self.ranks = EmulatedRanks(ranks, sms=3, schedule=schedule)
        self.steps, self.caches = [], []
        for rank, machine in enumerate(self.ranks.machines):
            weights = prepare(self.config, load_target(tiny.target_directory(), self.config, rank=rank, ranks=ranks))
            step = Step(
                self.config, weights, machine, row_cap=ROW_CAP, max_context=MAX_CONTEXT,
                mail=self.ranks.mail(rank) if ranks > 1 else None,
            )  # fmt: skip
            shape = (MAX_CONTEXT + ROW_CAP + 1, step.instance.kv_heads, self.config.head_dim)
            caches = [
                (torch.zeros(shape, dtype=torch.bfloat16), torch.zeros(shape, dtype=torch.bfloat16))
                for _ in weights.layers
            ]
            step.use_caches(caches)
            slots = torch.arange(1, len(step.inputs.full_pages) + 1, dtype=torch.int32)
            step.inputs.full_pages.copy_(slots)
            step.inputs.sliding_pages.copy_(slots)
            self.steps.append(step)
            self.caches.append(caches)

    def run(self, ids: list[int], length: int) -> Tensor:
        """Logits [T, V] of `ids` at positions length, length + 1, ..."""
        rows = len(ids)
        positions = torch.arange(length, length + rows)
        for step in self.steps:
            inputs = step.inputs
            inputs.token_ids[:rows].copy_(torch.tensor(ids))
            inputs.positions[:rows].copy_(positions)
            inputs.full_slots[:rows].copy_(positions + 1)
            inputs.sliding_slots[:rows].copy_(positions + 1)
            inputs.length.fill_(length)
            step.activations.poison()
        self.ranks.attach(self.steps, self.caches)
        for step in self.steps:
            step.launch(rows)
        self.ranks.synchronize()
        for step in self.steps:
            assert torch.equal(step.activations.stream[:rows], self.steps[0].activations.stream[:rows])
            assert torch.equal(step.activations.greedy_ids[:rows], self.steps[0].activations.greedy_ids[:rows])
        return torch.cat([step.activations.logits[:rows] for step in self.steps], dim=1)


@functools.cache
def reference(ids: tuple[int, ...], *, exact: bool) -> Tensor:
    """Logits [n, V] of the whole sequence in one pass, rounded as the kernels round or in float64."""
    config = load_target_config(tiny.target_directory())
    count = len(ids)
    dtype = torch.float64 if exact else torch.bfloat16
    caches = [
        KVCache(count + 1, config.num_key_value_heads, config.head_dim, dtype, torch.device("cpu"))
        for _ in range(config.num_hidden_layers)
    ]
    slots, nothing = torch.arange(1, count + 1), torch.zeros(0, dtype=torch.int64)
    rows = Rows(torch.arange(count), slots, slots, nothing, nothing)
    target = ReferenceTarget(config, load_target(tiny.target_directory(), config), Numerics(exact=exact))
    return target.forward(torch.tensor(ids), rows, caches).logits


def distance(a: Tensor, b: Tensor) -> float:
    """Relative root mean square."""
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_tiny_pairs_verify_step_is_as_exact_as_the_reference(ranks: int) -> None:
    """After a context of 16 tokens: 1, 3, 8 and 16 rows."""
    ids = Text(tiny.target_directory()).encode(PROBLEM, raw=True)[:32]
    assert len(ids) == 32
    exact, rounded = reference(tuple(ids), exact=True), reference(tuple(ids), exact=False)
    own_worst = max(distance(a, b) for a, b in zip(rounded, exact, strict=True))  # of the reference's rows
    pair = TinyRanks(ranks, racing(ranks))
    first = pair.run(ids[:16], 0)
    assert distance(first, exact[:16]) <= 2 * distance(rounded[:16], exact[:16])
    for rows in (1, 3, 8, 16):
        part = slice(16, 16 + rows)
        ours = pair.run(ids[part], 16)
        assert distance(ours, exact[part]) <= 2 * own_worst
        clear = exact[part].topk(2).values.diff().abs().squeeze(1) > 0.5  # no near tie
        assert torch.equal(ours.argmax(1)[clear], exact[part].argmax(1)[clear])
        assert torch.equal(pair.steps[0].activations.greedy_ids[:rows], ours.argmax(1))


@functools.cache
def case(ranks: int, nvfp4: bool = True) -> RankCase:
    return RankCase(ranks, nvfp4=nvfp4)


@pytest.mark.parametrize(("ranks", "nvfp4", "seeds"), [(2, True, 12), (2, False, 6), (4, True, 5), (8, True, 1)])
def test_every_schedule_of_all_ranks_gives_the_same_bits(ranks: int, nvfp4: bool, seeds: int) -> None:
    """Packets arrive late and in any order, and launches of different ranks drift apart."""
    kernels = case(ranks, nvfp4)
    expected = kernels.run(rows=3)
    for seed in range(1, seeds + 1):
        assert torch.equal(kernels.run(racing(seed), rows=3, steps=1 + seed % 3), expected), seed


@pytest.mark.parametrize("rows", [1, 5, 8])
def test_a_row_is_the_same_bits_in_any_company(rows: int) -> None:
    whole = case(2).run(rows=8)
    assert torch.equal(case(2).run(rows=rows), whole[:rows])


@pytest.mark.parametrize("epoch", [1, 2**31 - 2, 2**32 - 2])
def test_tags_wrap(epoch: int) -> None:
    """Steps during which the tag (twice the epoch), or the epoch itself, wraps."""
    kernels = RankCase(2)
    expected = kernels.run(rows=2)
    kernels.reset()
    for step in kernels.steps:
        for variant in step.variants.values():
            for control in variant.control.values():
                begun = Control.allocate(variant.instance, step.machine.device, epoch)
                for name in ("counters", "epoch", "flags"):
                    getattr(control, name).copy_(getattr(begun, name))
    for _ in range(2):
        assert torch.equal(kernels.run(rows=2), expected)


def test_mail_of_an_earlier_session_is_never_taken() -> None:
    """Epochs begin anew over mailboxes that are full of packets with the same epochs."""
    kernels = case(2)
    kernels.reset()
    expected = kernels.run(rows=3, content=1)
    for seed in range(1, 7):
        kernels.reset()
        kernels.run(rows=3, content=2)
        kernels.begin_session(seed + 1)
        assert torch.equal(kernels.run(racing(seed), rows=3, content=1), expected), seed


def test_a_rank_that_stops_stops_the_others() -> None:
    """A CTA of rank 1 never starts: both ranks stop, and the report lists who waits for packets. Emulated time jumps,
    so any thread that waits may be the first to say so."""
    kernels = case(2)
    with pytest.raises(EmulatorFault) as fault:
        kernels.run(racing(3, injection=Injection.EARLY_EXIT, injection_address=1 << 32), rows=3)
    assert "past the deadline for " in fault.value.text
    assert re.search(r"waiting for rank 0 nvfp4\.mailbox\+\d+ .* at mailbox\.cuh:\d+: .*rank 0 CTA", fault.value.text)


def test_a_rank_one_step_ahead_stops_both() -> None:
    kernels = case(2)
    kernels.reset()
    kernels.ahead(1)
    with pytest.raises(EmulatorFault) as fault:
        kernels.run(racing(1), rows=3)
    assert re.search(r"waiting for rank [01] nvfp4\.mailbox\+\d+", fault.value.text)


def test_a_record_names_the_rank_whose_packet_is_missing() -> None:
    site = len(protocol.COUNTERS) + [name for name, _ in protocol.SITES].index("EXPERT_MAIL")
    words = [0, 0, 5, site + (4 << protocol.PEER_SHIFT), 77, 75, 9, protocol.RECORD_COMPLETE]
    record = protocol.FaultRecord.read(words)
    assert record is not None
    assert record.peer == 3
    assert "on rank 0, CTA 5 of launch 9" in record.sentence()
    assert "for the combined experts of rank 3 (EXPERT_MAIL: expected 77, saw 75)" in record.sentence()


@pytest.mark.parametrize(
    ("point", "joined", "parted"),
    [("O_PROJ_MAIL_AT", "router_input", "combined"), ("EXPERT_MAIL_AT", "combined", "router_input")],
)
def test_one_exchange_point_alone_can_reach_the_peers(point: str, joined: str, parted: str) -> None:
    """As exchange_check.py measures it: behind that point both ranks have the same row, behind the others their own."""
    case = RankCase(2, layers=1, defines=(f"PEERS_ONLY={point}",))
    case.prepare(40, content=1)
    for step in case.steps:
        step.launch(3)
    case.ranks.synchronize()
    rows = {name: [getattr(step.activations, name)[:3] for step in case.steps] for name in (joined, parted)}
    assert torch.equal(*rows[joined])
    assert not torch.equal(*rows[parted])
