"""The draft's kernels on the emulated machine against the reference draft."""

import pytest
import torch
from draft_case import DraftCase, draft_config

from sgl_muse_mega.emulator.machine import PLAIN, racing
from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel.draft_instance import DraftInstance, TargetEnds
from sgl_muse_mega.megakernel.draft_protocol import STATE
from sgl_muse_mega.megakernel.draft_weights import fragment_order
from sgl_muse_mega.reference.selector import walk_greedy, walk_sampled
from sgl_muse_mega.speculative.philox import Purpose, uniform


@pytest.fixture(scope="module")
def case() -> DraftCase:
    return DraftCase(draft_config())


@pytest.fixture(scope="module")
def causal_case() -> DraftCase:
    """Sixteen rows, three layers, raw embedding, more heads per KV head, counters about to wrap."""
    config = draft_config(is_causal=True, num_hidden_layers=3, num_attention_heads=6, normed_embedding=False)
    return DraftCase(config, row_cap=16, sms=2, seed=2, first_epoch=2**32 - 2)


def distance(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return float((ours.double() - reference.double()).norm() / reference.double().norm())


def propose(case: DraftCase, length: int, rows: int, anchor: int, schedule=PLAIN) -> torch.Tensor:
    """Runs a block and returns the residual it ends with."""
    case.fill(length, anchor)
    case.declare()
    case.step.launch(rows)
    case.run(schedule)
    return case.step.activations.residual[:rows].float()


@pytest.mark.parametrize(("length", "rows"), [(0, 5), (20, 2), (89, 8), (90, 8), (330, 3)])
def test_block(case: DraftCase, length: int, rows: int) -> None:
    case.request()
    ours = propose(case, length, rows, anchor=11)
    assert distance(ours, case.reference_block(11, length, rows)) < 0.015  # bf16 roundings of two layers


@pytest.mark.parametrize(("length", "rows"), [(40, 16), (200, 9)])
def test_causal_block(causal_case: DraftCase, length: int, rows: int) -> None:
    causal_case.request()
    ours = propose(causal_case, length, rows, anchor=3)
    assert distance(ours, causal_case.reference_block(3, length, rows)) < 0.02


@pytest.mark.parametrize("temperature", [0.0, 0.6, 3.0])
def test_head_and_walk(case: DraftCase, temperature: float) -> None:
    seed, length, rows = 2**63 + 17, 75, 8
    case.request(temperature=temperature, seed=seed)
    ours = propose(case, length, rows, anchor=19)
    activations, slots = case.step.activations, rows - 1
    expected = case.reference.candidates(ours, 19)
    assert torch.equal(activations.candidates[:slots], expected.candidates)
    lattice = activations.lattice[:slots]
    assert torch.allclose(lattice, expected.lattice, atol=1e-5)
    if temperature:
        uniforms = [uniform(seed, length + 1 + slot, Purpose.DRAFT) for slot in range(slots)]
        path, probabilities = walk_sampled(lattice, temperature, uniforms)
    else:
        path = walk_greedy(lattice)
        probabilities = torch.nn.functional.one_hot(path, lattice.shape[1]).float()
    tokens = expected.candidates.gather(1, path[:, None])[:, 0]
    assert torch.equal(case.inputs.token_ids[1:rows], tokens)
    assert torch.allclose(activations.probabilities[:slots], probabilities, atol=1e-6)


def test_ties_go_to_the_lower_id(case: DraftCase) -> None:
    head, reference = case.step.weights.lm_head, case.reference.lm_head
    kept = head.clone()
    try:
        head[2:4] = head[:2]  # blocks of 64 ids: every score of the first 128 occurs twice
        case.reference.lm_head = torch.cat((reference[:128], reference[:128], reference[256:]))
        case.request()
        ours = propose(case, 30, 8, anchor=2)
        expected = case.reference.candidates(ours, 2)
        assert torch.equal(case.step.activations.candidates[:7], expected.candidates)
    finally:
        head.copy_(kept)
        case.reference.lm_head = reference


@pytest.mark.parametrize("committed", [0, 1, 8])
def test_context(case: DraftCase, committed: int) -> None:
    length, rows = 60, 8
    case.fill(length, 5)
    case.state.state[STATE.index("CONTEXT_START")] = length
    case.state.state[STATE.index("COMMITTED")] = committed
    expected = case.reference_caches()
    case.declare()
    case.step.launch_context(rows)
    case.run()
    positions = torch.arange(length, length + committed)
    context = case.reference.context(case.taps.float().transpose(0, 1)[:, :committed])
    case.reference.write_context(context, positions, case.slots[positions], expected)
    own, beyond = case.slots[positions], case.slots[length + committed : length + rows]
    for (keys, values), reference in zip(case.caches, expected, strict=True):
        for ours, theirs in zip((keys, values), reference.read(own, torch.float32), strict=True):
            assert torch.allclose(ours[own].float(), theirs, atol=0.04, rtol=0.01)
            assert ours[beyond].isnan().all()


def test_any_schedule_gives_the_same_bits(case: DraftCase) -> None:
    case.request(temperature=0.8, seed=5)
    case.generator.manual_seed(3)
    propose(case, 120, 5, anchor=9)
    expected = case.inputs.token_ids[1:5].clone(), case.step.activations.lattice[:4].clone()
    for seed in range(1, 9):
        case.generator.manual_seed(3)
        propose(case, 120, 5, anchor=9, schedule=racing(seed))
        assert torch.equal(case.inputs.token_ids[1:5], expected[0])
        assert torch.equal(case.step.activations.lattice[:4], expected[1])


def test_fragment_order() -> None:
    """Every element where product.cuh looks for it, element by element."""
    rows, k = 70, 512
    weight = torch.arange(rows * k, dtype=torch.float64).view(rows, k)
    packed = fragment_order(weight).view(2, 2, 4, 8, 2, 32, 8)  # block, chunk, tile, step, half, lane, input
    for row, column in [(0, 0), (69, 511), (17, 300), (63, 31), (64, 256), (9, 77)]:
        block, local = divmod(row, 64)
        tile, in_tile = divmod(local, 16)
        half, g = divmod(in_tile, 8)
        chunk, inside = divmod(column, 256)
        step, in_step = divmod(inside, 32)
        t, place = divmod(in_step, 8)
        assert packed[block, chunk, tile, step, half, 4 * g + t, place] == weight[row, column]
    assert int((packed != 0).sum()) == rows * k - 1


def test_sizes_that_do_not_fit_are_refused() -> None:
    config = draft_config(head_dim=64, vocab_size=321)
    ends = TargetEnds(1e-5, 0.5, 20.0)
    with pytest.raises(UserError, match=r"head_dim is 64.*vocab_size 321"):
        DraftInstance.for_config(config, ends, row_cap=8, sms=4)
