"""Keyed noise: what it is a function of, that it is uniform and independent, and that choices made with it follow p.

The statistics run on fixed seeds, so a test either always passes or never does. Each p-value must exceed 1e-4.
"""

from __future__ import annotations

import pytest
import torch
from cover import by_turns
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from foredraft.backends import native
from foredraft.logits import noise as keyed_noise
from foredraft.logits.noise import ALONE, Noise, Purpose, _computed, _unit, row_key, row_seeds

needs_kernels = pytest.mark.skipif(native.refusal(torch.float32) is not None, reason="no native kernels here")
ALPHA = 1e-4
BINS = 16
FRESH = [Purpose.DRAFT, Purpose.RESIDUAL]


def noise_for(seeds: list[tuple[int, int]], positions: list[int]) -> Noise:
    return Noise(torch.tensor([row_key(seed) for seed in seeds]), torch.tensor(positions))


def noise_of_rows(rows: int, *, seed: int = 7, position: int = 40) -> Noise:
    """As for a batch: one seed, rows counted, all at one position."""
    return noise_for([(seed, row) for row in range(rows)], [position] * rows)


def distributions(*shape: int, seed: int = 0) -> Tensor:
    return torch.softmax(2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), -1)


def fits(counts: Tensor, probabilities: Tensor) -> None:
    """Chi-square of ``counts`` against ``probabilities``, cells in any shape."""
    expected = probabilities.double() / probabilities.double().sum() * counts.sum()
    assert stats.chisquare(counts.double().flatten(), expected.flatten()).pvalue > ALPHA


def fits_independence(first: Tensor, second: Tensor, cells: int) -> None:
    """Chi-square of the pairs of two cell numbers of the same length against the product of the uniform law."""
    fits(torch.bincount(first.flatten() * cells + second.flatten(), minlength=cells * cells), torch.ones(cells * cells))


def uniforms(exponentials: Tensor) -> Tensor:
    return -torch.expm1(-exponentials)


def binned(exponentials: Tensor, cells: int = BINS) -> Tensor:
    return (uniforms(exponentials) * cells).long().clamp(max=cells - 1)


# -- what noise is a function of -----------------------------------------------------------------------------------------

rows_of_noise = st.lists(st.tuples(st.integers(-(2**70), 2**70), st.integers(0, 5000), st.integers(0, 2**31)), min_size=1, max_size=5)


@settings(max_examples=50, deadline=None)
@given(rows_of_noise, st.data())
def test_a_row_draws_the_same_in_any_batch(rows: list[tuple[int, int, int]], data: st.DataObject):
    """Every draw of a row of the batch equals the row's own, alone: seed, position, purpose and node decide, nothing else."""
    vocab, nodes, node = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 4)), data.draw(st.integers(0, 70))
    p = distributions(len(rows), nodes, vocab, seed=data.draw(st.integers(0, 100)))
    depths = torch.tensor([data.draw(st.lists(st.integers(0, 6), min_size=nodes, max_size=nodes)) for _ in rows])
    batch = noise_for([row[:2] for row in rows], [row[2] for row in rows])
    for index, row in enumerate(rows):
        alone, one = noise_for([row[:2]], [row[2]]), slice(index, index + 1)
        assert torch.equal(batch.race(p, depths)[one], alone.race(p[one], depths[one]))
        assert torch.equal(batch.accept(p[..., 0], node)[one], alone.accept(p[one, :, 0], node))
        for purpose in FRESH:
            assert torch.equal(batch.draw(p[:, 0], purpose, node)[one], alone.draw(p[one, 0], purpose, node))


def test_a_vocabulary_that_races_one_by_one_draws_the_same(monkeypatch: pytest.MonkeyPatch):
    """On a CPU races over a large vocabulary run one at a time, which must not show."""
    noise, p, depths = noise_of_rows(3), distributions(3, 4, 300), torch.tensor([[0, 1, 1, 4], [2, 0, 1, 1], [0, 0, 0, 0]])
    results = []
    for alone in (1, 1 << 30):
        monkeypatch.setattr(keyed_noise, "ALONE", alone)
        results.append([noise.race(p, depths), noise.race(p.double(), depths), noise.draw(p[:, 2], Purpose.DRAFT, 1)])
    for one_by_one, together in zip(*results):
        assert torch.equal(one_by_one, together)


def test_nothing_touches_the_global_generator():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    noise, p = noise_of_rows(4), distributions(4, 2, 9)
    first = noise.race(p, torch.tensor([[0, 1]]))
    noise.draw(p[:, 0], Purpose.DRAFT), noise.accept(p[..., 0])
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    assert torch.equal(noise.race(p, torch.tensor([[0, 1]])), first)


def test_the_race_is_keyed_by_the_position_of_the_token_alone():
    """The same position reached from any root, at any node: the same noise."""
    p = distributions(1, 1, 1000)
    expected = noise_for([(1, 2)], [10]).race(p, torch.tensor([[0]]))
    for root, depth in [(9, 1), (8, 2), (3, 7)]:
        nodes = p.expand(1, 4, -1)
        depths = torch.tensor([[0, depth, 5, depth]])
        choices = noise_for([(1, 2)], [root]).race(nodes, depths)[0].tolist()
        assert choices[1] == choices[3] == int(expected)
        assert choices[0] != choices[1]


@pytest.mark.parametrize("change", ["seed", "row", "position", "purpose", "node"])
def test_each_part_of_the_key_changes_the_noise(change: str):
    key = {"seed": 5, "row": 6, "position": 70, "purpose": int(Purpose.DRAFT), "node": 2}

    def words(seed: int, row: int, position: int, purpose: int, node: int) -> Tensor:
        return noise_for([(seed, row)], [position]).words(Purpose(purpose), 0, node)

    values = [words(**{**key, change: key[change] + step}) for step in range(2 if change == "purpose" else 60)]
    exponentials = torch.cat([Noise.exponentials(noise_of_rows(1), value, 64)[0] for value in values])
    assert len(set(map(int, values))) == len(values)
    assert exponentials[0].ne(exponentials[1:]).float().mean() > 0.99


def test_no_two_keys_share_a_word():
    """All purposes at 200 nodes and 50 positions of 4 rows: no (purpose, node) runs into another one's."""
    noise, offsets = noise_of_rows(4), torch.arange(50)[None]
    words = torch.stack([noise.words(purpose, offsets, node) for purpose in Purpose for node in range(200)])
    assert len(words.unique()) == words.numel() == len(Purpose) * 200 * 50 * 4


def test_a_token_keeps_its_noise_when_the_vocabulary_grows():
    noise = noise_of_rows(3)
    words = noise.words(Purpose.MATCH, torch.arange(4)[None])
    largest = noise.exponentials(words, 5000)
    for vocab in (1, 2, 7, 512, 4999):
        assert torch.equal(noise.exponentials(words, vocab), largest[..., :vocab])


def test_the_noise_of_a_key_never_changes():
    """Pinned: the same seed gives the same text in every release, or the change is deliberate."""
    seeds = [(0, 0), (7, 3), (-1, 0), (2**64, 0)]
    assert [row_key(seed) for seed in seeds] == [2391539541053276776, 8655894791565660796, -4894250672519873954, -3332620815255975113]
    noise = noise_for([(7, 3)], [100])
    words = noise.words(Purpose.MATCH, 1)
    assert words.tolist() == [[7245662823533070011]]
    assert noise.exponentials(words, 4)[0, 0].tolist() == pytest.approx([1.1671, 0.2789, 0.6667, 0.3017], abs=1e-4)


@pytest.mark.parametrize("vocab_size", [50_257, 262_144])
def test_no_two_tokens_share_a_word(vocab_size: int):
    """They would share all their noise, and the less likely of the two would never be drawn."""
    assert len(keyed_noise._token_hashes(vocab_size, torch.device("cpu")).unique()) == vocab_size


# -- uniform and independent ---------------------------------------------------------------------------------------------


def test_uniforms_lie_in_the_open_interval():
    """Whatever the bits: u is float32, above 0 and below 1, so that no exponential is 0 or infinite."""
    ends = [0, 1, -1, 2**31 - 1, 2**31 - 2, -(2**31), -(2**31) + 1, *(2**31 - 1 - 2**shift for shift in range(31))]
    u = -_unit(torch.tensor(ends, dtype=torch.int32))
    assert u.dtype == torch.float32 and float(u.min()) > 0 and float(u.max()) < 1
    assert float(u.min()) < 1e-9  # fine where a race is won
    e = -torch.log1p(-u)
    assert float(e.min()) > 0 and bool(e.isfinite().all())


def test_exponentials_are_uniform_over_tokens_rows_positions_and_nodes():
    noise = noise_of_rows(200)
    by_position = noise.exponentials(noise.words(Purpose.MATCH, torch.arange(20)[None]), 100)
    by_node = noise.exponentials(noise.words(Purpose.DRAFT, 0, torch.arange(20)[None]), 100)
    for exponentials in (by_position, by_node, by_position[:1], by_position[:, :1], by_position[..., :1], by_node[..., 7:8]):
        fits(torch.bincount(binned(exponentials, 64).flatten(), minlength=64), torch.ones(64))
    assert stats.kstest(uniforms(by_position[:, 0]).flatten().numpy(), "uniform").pvalue > ALPHA


def test_noise_of_neighbouring_keys_is_independent():
    """Pairs of cells of neighbours in each part of the key, token by token, are uniform on the square."""
    rows = 400

    def exponentials(seed: int = 7, position: int = 40, purpose: Purpose = Purpose.DRAFT, node: int = 3, row: int = 0) -> Tensor:
        noise = noise_for([(seed, row + index) for index in range(rows)], [position] * rows)
        return noise.exponentials(noise.words(purpose, 0, node), 250)

    here = exponentials()
    neighbours = {
        "seed": exponentials(seed=8),
        "row": exponentials(row=1),
        "position": exponentials(position=41),
        "node": exponentials(node=4),
        "node and position": exponentials(position=41, node=2),
        **{purpose.name: exponentials(purpose=purpose) for purpose in Purpose if purpose is not Purpose.DRAFT},
    }
    for other in neighbours.values():
        fits_independence(binned(here), binned(other), BINS)
    for shift in (1, 2, 64):
        fits_independence(binned(here[..., shift:]), binned(here[..., :-shift]), BINS)


def test_no_two_streams_are_correlated():
    """The largest correlation among 500 streams is no larger than among independent ones (Bonferroni over all pairs)."""
    noise = noise_of_rows(10)
    tokens = 1000
    streams = uniforms(noise.exponentials(noise.words(Purpose.MATCH, torch.arange(50)[None]), tokens)).reshape(-1, tokens).double()
    correlation = torch.corrcoef(streams).fill_diagonal_(0)
    pairs = len(streams) * (len(streams) - 1) / 2
    assert float(correlation.abs().max()) * tokens**0.5 < stats.norm.isf(ALPHA / 2 / pairs)


@pytest.mark.parametrize("bit", by_turns(range(32), 0, always={1, 31}))
def test_tokens_whose_words_differ_in_one_bit_are_independent(bit: int, monkeypatch: pytest.MonkeyPatch):
    """A large vocabulary has such pairs for every bit."""
    for word in (0x2545F491, -0x61C88647):
        other = word ^ (1 << bit if bit < 31 else -(1 << 31))
        monkeypatch.setattr(keyed_noise, "_token_hashes", lambda *_, pair=(word, other): torch.tensor(pair, dtype=torch.int32))
        noise = noise_of_rows(20_000)
        pair = noise.exponentials(noise.words(Purpose.MATCH, 1), 2)[:, 0]
        fits_independence(binned(pair[:, 0]), binned(pair[:, 1]), BINS)


def test_acceptance_is_uniform_and_independent_of_the_draws():
    noise, rows = noise_of_rows(20_000), 20_000
    steps = torch.arange(1, BINS, dtype=torch.float32) / BINS

    def cell(node: int) -> Tensor:
        """Which sixteenth the uniform at a node falls into: how many thresholds refuse it."""
        return sum((~noise.accept(torch.full((rows, 1), float(step)), node)[:, 0]).long() for step in steps)

    cells = [cell(node) for node in range(3)]
    for each in cells:
        fits(torch.bincount(each, minlength=BINS), torch.ones(BINS))
    fits_independence(cells[0], cells[1], BINS)
    both = noise.accept(torch.full((rows, 3), 0.5))
    assert both[:, 2].equal(noise.accept(torch.full((rows, 1), 0.5), node=2)[:, 0])
    for purpose in FRESH:
        drawn = noise.exponentials(noise.words(purpose, 0, 0), 3)[:, 0]
        for token in range(3):
            fits_independence(cells[0], binned(drawn[:, token]), BINS)


# -- choices -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_choices_follow_p_at_each_node_and_are_independent_between_positions(dtype: torch.dtype):
    rows, vocab = 40_000, 5
    p = distributions(3, vocab).to(dtype)
    p[1, 2] = 0
    p = p / p.sum(-1, keepdim=True)
    noise = noise_of_rows(rows)
    tokens = noise.race(p.expand(rows, -1, -1), torch.arange(3)[None])
    joint = p[0, :, None, None] * p[1, None, :, None] * p[2, None, None, :]
    counts = torch.bincount((tokens * torch.tensor([25, 5, 1])).sum(1), minlength=125).view(5, 5, 5)
    assert int(counts[:, 2].sum()) == 0
    possible = [0, 1, 3, 4]
    fits(counts[:, possible], joint[:, possible])
    for purpose in FRESH:  # unnormalised weights will do
        fits(torch.bincount(noise.draw(7 * p[:1].expand(rows, -1), purpose, 2), minlength=vocab), p[0])


def test_races_with_shared_noise_agree_as_often_as_the_theory_says():
    """Pr[x = y] = Σ_j 1 / Σ_i max(p_i/p_j, q_i/q_j) for argmin E/p and argmin E/q (Daliri et al. 2024)."""
    rows = 40_000
    p, q = distributions(2, 5, seed=1)
    expected = sum(1 / float(torch.maximum(p / p[j], q / q[j]).sum()) for j in range(5))
    overlap = float(torch.minimum(p, q).sum())
    assert overlap / (2 - overlap) <= expected <= overlap
    noise, depth = noise_of_rows(rows), torch.zeros(1, 1, dtype=torch.long)
    same = noise.race(p.expand(rows, 1, 5), depth) == noise.race(q.expand(rows, 1, 5), depth)
    assert stats.binomtest(int(same.sum()), rows, expected).pvalue > ALPHA


def test_choices_follow_p_far_into_the_tail_of_a_large_vocabulary():
    """Half of the mass on one token and half spread over 149,999: a coarse or rounded u would favour some of these."""
    rows, vocab, parts = 300, 150_000, 5
    p = torch.full((vocab,), 0.5 / (vocab - 1))
    p[vocab // 3] = 0.5
    tokens, smallest = [], []
    for first in range(0, rows, 30):
        noise = noise_for([(1, row) for row in range(first, first + 30)], [12] * 30)
        exponentials = noise.exponentials(noise.words(Purpose.MATCH, 1), vocab)[:, 0]
        smallest.append(exponentials.amin(-1))
        assert bool(exponentials.isfinite().all())
        tokens.append((p / exponentials).argmax(-1))
        assert torch.equal(noise.race(p.expand(30, 1, -1), torch.zeros(1, 1, dtype=torch.long))[:, 0], tokens[-1])
    least = torch.cat(smallest)
    assert float(least.min()) > 0
    assert stats.kstest((least * vocab).numpy(), "expon").pvalue > ALPHA
    token = torch.cat(tokens)
    head = token == vocab // 3
    fits(torch.bincount(torch.where(head, parts, token * parts // vocab), minlength=parts + 1), torch.tensor([0.1] * parts + [0.5]))


def test_acceptance_never_passes_0_and_always_passes_1():
    noise = noise_of_rows(1000)
    for node in range(0, 3000, 1000):
        assert not bool(noise.accept(torch.zeros(1000, 1000), node).any())
        assert bool(noise.accept(torch.ones(1000, 1000), node).all())
        assert bool(noise.accept(torch.full((1000, 1000), 1.5), node).all())


def test_acceptance_is_strict():
    """A token is accepted iff u < p/q, so that no rounding of u lets one pass whose p is 0."""
    noise, nodes = noise_of_rows(50), torch.arange(6)[None]
    u = -_unit(noise.words(Purpose.ACCEPT, 0, nodes).to(torch.int32))
    assert not bool(noise.accept(u).any())
    assert bool(noise.accept(torch.nextafter(u, torch.ones(()))).all())


def test_a_token_of_probability_0_never_wins():
    noise = noise_of_rows(2000)
    p = torch.zeros(2000, 1, 50)
    p[..., 17] = 1e-30
    assert bool((noise.race(p, torch.zeros(1, 1, dtype=torch.long)) == 17).all())
    assert bool((noise.draw(p[:, 0], Purpose.RESIDUAL) == 17).all())


# -- seeds ---------------------------------------------------------------------------------------------------------------


def test_an_int_counts_the_rows():
    assert row_seeds(7, 3) == ([(7, 0), (7, 1), (7, 2)], 7)
    assert row_seeds(-5, 1) == ([(-5, 0)], -5)


def test_a_list_has_one_entry_per_row_and_an_int_alone_stands_for_row_0():
    pairs, reported = row_seeds([4, (7, 3), [8, 9]], 3)
    assert pairs == [(4, 0), (7, 3), (8, 9)]
    assert reported == [4, (7, 3), [8, 9]]
    assert row_seeds([7], 1)[0] == row_seeds(7, 1)[0]


def test_a_row_of_a_batch_can_be_run_alone_with_its_pair():
    pairs, _ = row_seeds(7, 4)
    assert [row_seeds([pair], 1)[0] for pair in pairs] == [[pair] for pair in pairs]


def test_none_draws_from_torchs_generator_and_reports_what_it_drew():
    torch.manual_seed(11)
    pairs, reported = row_seeds(None, 2)
    again, other = row_seeds(None, 2)
    assert isinstance(reported, int) and row_seeds(reported, 2) == (pairs, reported)
    assert other != reported and again != pairs
    torch.manual_seed(11)
    assert row_seeds(None, 2) == (pairs, reported)


@pytest.mark.parametrize(
    ("seed", "message"),
    [
        ([1, 2], "seed has 2 entries for 3 rows"),
        ([], "seed has 0 entries for 3 rows"),
        ([1, 2, (3,)], "must be an int or a pair of ints; got (3,)"),
        ([1, 2, (3, 4, 5)], "must be an int or a pair"),
        ([1, 2, "3"], "must be an int or a pair of ints; got '3'"),
        ([1, 2, (3, 0.5)], "must be an int or a pair"),
        ([1, 2, None], "must be an int or a pair"),
        ([1, 2, True], "must be an int or a pair"),
        ([1, 2, (3, True)], "must be an int or a pair"),
        (1.5, "seed must be an int, a list"),
        (True, "seed must be an int, a list"),
        ("abc", "seed must be an int, a list"),
        ({1: 2}, "seed must be an int, a list"),
    ],
)
def test_other_seeds_are_refused(seed, message: str):
    with pytest.raises(ValueError) as error:
        row_seeds(seed, 3)
    assert message in str(error.value)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(-(2**80), 2**80), st.integers(-(2**80), 2**80)), min_size=2, max_size=20, unique=True))
def test_seeds_of_any_size_have_keys_of_their_own(seeds: list[tuple[int, int]]):
    keys = [row_key(seed) for seed in seeds]
    assert len(set(keys)) == len(keys)
    assert torch.tensor(keys).tolist() == keys


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_gpu_draws_the_same():
    here, p = noise_of_rows(64), distributions(64, 4, 50_000)
    there = Noise(here.keys.cuda(), here.positions.cuda())
    for purpose in Purpose:
        assert torch.equal(here.words(purpose, 3, 5), there.words(purpose, 3, 5).cpu())
    words = here.words(Purpose.MATCH, torch.arange(4)[None])
    torch.testing.assert_close(there.exponentials(words.cuda(), 50_000).cpu(), here.exponentials(words, 50_000), rtol=1e-6, atol=0)
    depths = torch.arange(4)[None]
    assert torch.equal(there.race(p.cuda(), depths.cuda()).cpu(), here.race(p, depths))
    assert torch.equal(there.draw(p[:, 0].cuda(), Purpose.DRAFT, 2).cpu(), here.draw(p[:, 0], Purpose.DRAFT, 2))
    assert torch.equal(there.accept(p[..., 0].cuda() * 9).cpu(), here.accept(p[..., 0] * 9))


def test_every_node_has_noise_of_its_own_however_it_is_asked_for():
    noise = Noise(torch.tensor([3, 4]), torch.tensor([7, 9]))
    chance, nodes = torch.full((2, 40), 0.5), torch.tensor([2, 2])
    assert torch.equal(noise.accept(chance, nodes), noise.accept(chance, 2))
    weights = torch.ones(2, 3, 50)
    together = noise.rank(weights, 4, Purpose.DRAFT, torch.arange(3))
    assert len({tuple(line) for line in together[0].tolist()}) == 3
    for node in range(3):
        assert torch.equal(noise.rank(weights[:, :1], 4, Purpose.DRAFT, torch.tensor([node]))[:, 0], together[:, node])


# -- races run by the kernels ---------------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 1000, ALONE + 5])
@pytest.mark.parametrize("share", [0.0, 0.9, 1.0], ids=["all", "a tenth", "none"])
def test_the_kernel_finds_the_winners_that_tensor_operations_find(vocab_size: int, share: float):
    noise, depths = noise_for([(3, row) for row in range(4)], [5, 9, 5, 800]), torch.arange(6)[None]
    weights = distributions(4, 6, vocab_size, seed=vocab_size)
    weights[torch.rand(weights.shape, generator=torch.Generator().manual_seed(1)) < share] = 0.0
    words = noise.words(Purpose.MATCH, depths + 1)
    found = native.race(
        native.library(torch.float32), weights.flatten(0, 1), words.flatten(), keyed_noise._token_hashes(vocab_size, weights.device)
    )
    expected = _computed(weights, words)
    assert bool(((found == expected.flatten()) | (found < 0)).all())
    if share == 0.0 or (share == 0.9 and vocab_size >= 1000):  # of few tokens, all may have weight 0
        assert bool((found >= 0).all())
    if share == 1.0 and vocab_size > 1:
        assert bool((found < 0).all())
    assert torch.equal(noise.race(weights, depths), expected)


@needs_kernels
def test_the_kernel_leaves_a_race_out_where_rounding_decides():
    """Two tokens at the same quotient, but for a few units in the last place, in the same lane and in others."""
    noise, depths, vocab_size = noise_of_rows(1), torch.zeros(1, 1, dtype=torch.long), 100
    words = noise.words(Purpose.MATCH, depths + 1)
    hashes, exponentials = keyed_noise._token_hashes(vocab_size, words.device), noise.exponentials(words, vocab_size)[0, 0]
    for first, second in ((3, 4), (3, 19), (40, 2), (99, 0)):
        for apart in (-1e-5, -4, -1, 0, 1, 4, 1e-5):
            weights = torch.full((vocab_size,), 1e-3) * exponentials
            weights[[first, second]] = exponentials[[first, second]]
            weights[second] *= 1 + (apart * 2.0**-23 if abs(apart) >= 1 else apart)
            found = native.race(native.library(torch.float32), weights[None], words.flatten(), hashes)
            assert found.tolist() == [-1 if abs(apart) >= 1 or not apart else second if apart > 0 else first]
            assert torch.equal(noise.race(weights[None, None], depths), _computed(weights[None, None], words))


@needs_kernels
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_the_kernel_leaves_out_what_is_no_distribution(wrong: float):
    noise, weights = noise_of_rows(1), distributions(1, 1, 40)
    weights[0, 0, 7] = wrong
    words = noise.words(Purpose.MATCH, 1)
    found = native.race(native.library(torch.float32), weights[0], words.flatten(), keyed_noise._token_hashes(40, words.device))
    assert found.tolist() == [-1]
    assert torch.equal(noise.race(weights, torch.zeros(1, 1, dtype=torch.long)), _computed(weights, words))


@needs_kernels
@pytest.mark.parametrize("scale", [0.0, 1e-38, 1e-42])
def test_the_kernel_leaves_out_weights_that_are_almost_nothing(scale: float):
    """Their quotients have few digits, if any, so that distances between them say nothing."""
    noise, weights = noise_of_rows(3), scale * distributions(3, 1, 40)
    words = noise.words(Purpose.MATCH, 1)
    found = native.race(native.library(torch.float32), weights[:, 0], words.flatten(), keyed_noise._token_hashes(40, words.device))
    assert found.tolist() == [-1] * 3
    assert torch.equal(noise.race(weights, torch.zeros(1, 1, dtype=torch.long)), _computed(weights, words))


@needs_kernels
def test_the_kernels_results_are_on_the_cpu_whatever_the_default_device_is():
    kernels, noise, weights = native.library(torch.float32), noise_of_rows(2), distributions(2, 3, 40)
    words, hashes = noise.words(Purpose.MATCH, torch.arange(3)[None] + 1).flatten(), keyed_noise._token_hashes(40, weights.device)
    expected = native.race(kernels, weights.flatten(0, 1), words, hashes), native.largest(weights[0], 2)
    with torch.device("meta"):
        found = native.race(kernels, weights.flatten(0, 1), words, hashes), native.largest(weights[0], 2)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("vocab_size", [40, ALONE])
@pytest.mark.parametrize("by", ["kernels", "tensor operations"])
def test_nodes_at_one_depth_share_a_word(by: str, vocab_size: int, monkeypatch: pytest.MonkeyPatch):
    if by == "tensor operations":
        monkeypatch.setattr(keyed_noise, "kernel", None)
    elif native.refusal(torch.float32) is not None:
        pytest.skip("no native kernels here")
    noise, weights, depth = noise_of_rows(2), distributions(2, 3, vocab_size), torch.full((1, 1), 4)
    assert torch.equal(noise.race(weights, depth), noise.race(weights, depth.expand(2, 3)))


def test_no_kernels_are_compiled_for_a_race(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(keyed_noise, "kernel", None)
    monkeypatch.setattr(native, "library", lambda dtype: pytest.fail("kernels were asked for"))
    noise, weights, depths = noise_of_rows(2), distributions(2, 3, 40), torch.arange(3)[None]
    assert torch.equal(noise.race(weights, depths), _computed(weights, noise.words(Purpose.MATCH, depths + 1)))


def test_words_are_the_same_by_numpy_and_by_torch():
    noise = noise_for([(1, 2), (-5, 1 << 70), (0, 0)], [0, 7, 1 << 40])
    spread = torch.tensor([[0, 1, 5], [7, 7, 2], [9, 0, 1 << 50]])
    for purpose in Purpose:
        for offsets in (0, 3, torch.arange(3)[None], spread):
            for node in (0, 7, torch.arange(3)[None], spread):
                positions = noise.positions[:, None] + offsets
                word = keyed_noise._mix(noise.keys[:, None] + positions * keyed_noise._signed(keyed_noise.GOLDEN))
                apart = keyed_noise._signed(int(purpose) * 0xD1B54A32D192ED03 & keyed_noise.MASK64)
                assert torch.equal(noise.words(purpose, offsets, node), keyed_noise._mix(word + apart + keyed_noise._spread(node)))
