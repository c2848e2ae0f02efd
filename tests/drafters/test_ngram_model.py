"""The n-gram model against a reference that is nothing but dictionaries of tuples."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
from drafting import request
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from foredraft.drafters.ngram import NGram
from foredraft.drafters.ngram_model import NGramModel
from foredraft.planning.costs import StandIn


class Reference:
    """Every context as a tuple, every answer by definition."""

    def __init__(self, order: int):
        self.order = order
        self.counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)

    def update(self, sequence: list[int], start: int) -> None:
        for position in range(start, len(sequence)):
            for length in range(min(self.order - 1, position) + 1):
                self.counts[tuple(sequence[position - length : position])][sequence[position]] += 1

    def contexts(self, context: list[int]) -> list[tuple[int, ...]]:
        """Those seen, longest first."""
        suffixes = (tuple(context[len(context) - n :]) for n in range(min(self.order - 1, len(context)), -1, -1))
        return [suffix for suffix in suffixes if suffix in self.counts]

    def predict(self, context: list[int]) -> int | None:
        return next((token for seen in self.contexts(context) for token in ranked(self.counts[seen])), None)

    def prune(self, min_count: int, successors: int | None) -> None:
        for context in [context for context in self.counts if context]:
            kept = [token for token in ranked(self.counts[context])[:successors] if self.counts[context][token] >= min_count]
            self.counts[context] = Counter({token: self.counts[context][token] for token in kept})
            if not kept:
                del self.counts[context]

    def probability(self, context: tuple[int, ...], token: int, vocab_size: int) -> float:
        below = self.probability(context[1:], token, vocab_size) if context else 1 / vocab_size
        counts = self.counts.get(context)
        if not counts:
            return below
        return (counts[token] + len(counts) * below) / (counts.total() + len(counts))


def ranked(counts: Counter[int]) -> list[int]:
    return sorted(counts, key=lambda token: (-counts[token], token))


ORDERS = st.integers(2, 5)
SEQUENCES = st.lists(st.lists(st.integers(0, 3), max_size=25), max_size=5)
CONTEXTS = st.lists(st.lists(st.integers(0, 4), max_size=7), min_size=1, max_size=12)


def both(order: int, bulk: list[list[int]], online: list[list[int]]) -> tuple[NGramModel, Reference]:
    """A model with a counted table and online growth on top of it, and the reference for the two together."""
    model = NGramModel.from_tokens(bulk, order, vocab_size=5)
    reference = Reference(order)
    for sequence in online:
        model.count(sequence)
    for sequence in bulk + online:
        reference.update(sequence, 0)
    return model, reference


def assert_same_answers(model: NGramModel, reference: Reference, contexts: list[list[int]]) -> None:
    for context in contexts:
        assert model.predict(context) == reference.predict(context)
        assert model.matched(context) == max(map(len, reference.contexts(context)), default=0)


@settings(deadline=None)
@given(order=ORDERS, bulk=SEQUENCES, online=SEQUENCES, contexts=CONTEXTS)
def test_answers_match_the_reference_in_both_layers(order, bulk, online, contexts):
    model, reference = both(order, bulk, online)
    assert_same_answers(model, reference, contexts)
    model.compact()
    assert_same_answers(model, reference, contexts)
    assert model.contexts == max(len(reference.counts), 1)
    assert model.ngrams == sum(map(len, reference.counts.values()))


@settings(deadline=None)
@given(order=ORDERS, sequence=st.lists(st.integers(0, 3), max_size=40), cuts=st.lists(st.integers(0, 40), max_size=6), contexts=CONTEXTS)
def test_counting_in_pieces_equals_counting_at_once(order, sequence, cuts, contexts):
    model, reference = NGramModel(order), Reference(order)
    reference.update(sequence, 0)
    edges = [0, *sorted(min(cut, len(sequence)) for cut in cuts), len(sequence)]
    for start, end in itertools.pairwise(edges):
        model.update(sequence[:end], start)
    assert_same_answers(model, reference, contexts)


@settings(deadline=None)
@given(order=ORDERS, bulk=SEQUENCES, online=SEQUENCES, contexts=CONTEXTS, more=SEQUENCES, vocab_size=st.integers(2, 7))
def test_the_distribution_is_witten_bell_at_any_time(order, bulk, online, contexts, more, vocab_size):
    """In both layers, while counting goes on, and for another vocabulary."""
    model, reference = both(order, bulk, online)
    for sequence in ([], *more):
        model.count(sequence)
        reference.update(sequence, 0)
        for context in contexts:
            seen = tuple(context[max(0, len(context) - order + 1) :])
            expected = [reference.probability(seen, token, 5) for token in range(5)]
            np.testing.assert_allclose(model.distribution(context), expected, rtol=1e-5)
            other = model.distribution(context, vocab_size)
            assert other.shape == (vocab_size,) and other.min() > 0 and other.sum(dtype=np.float64) == pytest.approx(1.0, abs=1e-6)


@settings(deadline=None)
@given(order=ORDERS, bulk=SEQUENCES, online=SEQUENCES, contexts=CONTEXTS, k=st.integers(1, 5))
def test_the_likeliest_are_witten_bell_without_single_tokens(order, bulk, online, contexts, k):
    model, reference = both(order, bulk, online)
    for context in contexts:
        chain = reference.contexts(context)
        longer = [seen for seen in chain if seen] or chain
        expected: Counter[int] = Counter()
        left = 1.0
        for seen in longer:
            counts = reference.counts[seen]
            for token in ranked(counts)[:k]:
                expected[token] += left * counts[token] / (counts.total() + len(counts))
            left *= len(counts) / (counts.total() + len(counts))
            if left < 0.02:
                break
        best = sorted(expected.items(), key=lambda pair: (-pair[1], pair[0]))[:k]
        found = model.likeliest(context, k)
        assert [share for _, share in found] == pytest.approx([share for _, share in best])
        assert all(share == pytest.approx(expected[token]) for token, share in found)


@settings(deadline=None)
@given(order=ORDERS, bulk=SEQUENCES, online=SEQUENCES, most=st.integers(1, 40))
def test_size_is_never_too_small_and_shrinking_bounds_it(order, bulk, online, most):
    model, reference = both(order, bulk, online)
    pairs = sum(map(len, reference.counts.values()))
    assert pairs <= model.size <= pairs + sum(len(sequence) * order for sequence in online)
    model.shrink(most)
    assert model.size <= max(most // 2, len(reference.counts[()]))


@settings(deadline=None)
@given(
    order=ORDERS, bulk=SEQUENCES, online=SEQUENCES, later=SEQUENCES, contexts=CONTEXTS,
    min_count=st.integers(1, 4), successors=st.none() | st.integers(1, 3),
)  # fmt: skip
def test_pruning_forgets_what_it_says_and_counting_goes_on(order, bulk, online, later, contexts, min_count, successors):
    model, reference = both(order, bulk, online)
    model.prune(min_count=min_count, successors=successors)
    reference.prune(min_count, successors)
    assert_same_answers(model, reference, contexts)
    for sequence in later:
        model.count(sequence)
        reference.update(sequence, 0)
    assert_same_answers(model, reference, contexts)


@settings(deadline=None, max_examples=25)
@given(order=ORDERS, bulk=SEQUENCES, online=SEQUENCES, contexts=CONTEXTS)
def test_a_saved_model_answers_the_same(tmp_path_factory, order, bulk, online, contexts):
    model, reference = both(order, bulk, online)
    path = tmp_path_factory.mktemp("ngram") / "model.safetensors"
    model.save(path)
    loaded = NGramModel.load(path)
    assert (loaded.order, loaded.vocab_size, loaded.ngrams, loaded.fingerprint) == (order, 5, model.ngrams, "")
    assert_same_answers(loaded, reference, contexts)


def test_large_vocabularies_do_not_collide():
    """Ids near 2**32 in contexts of six: any packing by vocabulary size would overflow 64 bits."""
    top = 2**32 - 1
    model = NGramModel.from_tokens([[top, top - 1, top, top - 2, top, 5, 7]], order=7)
    model.count([0, top - 1, top, top - 2, top, 5, 8])
    assert model.predict([top, top - 1, top, top - 2, top, 5]) == 7
    assert model.predict([0, top - 1, top, top - 2, top, 5]) == 8
    assert model.predict([1, top - 1, top, top - 2, top, 5]) == 7  # the tie goes to the smaller id


def test_min_count_in_bulk_is_pruning():
    sequences = [[1, 2, 3, 1, 2, 4, 1, 2, 3]]
    once, pruned = NGramModel.from_tokens(sequences, 3), NGramModel.from_tokens(sequences, 3)
    pruned.prune(min_count=2)
    assert (once.predict([3, 1]), pruned.predict([3, 1])) == (2, 2)
    assert (once.matched([3, 1]), pruned.matched([3, 1])) == (2, 1)


def test_an_empty_model_predicts_nothing():
    model = NGramModel()
    assert model.predict([1, 2]) is None and model.likeliest([], 3) == [] and model.ngrams == 0
    assert NGramModel.from_tokens([[], []]).predict([]) is None


def test_bad_input_is_named(tmp_path):
    with pytest.raises(ValueError, match="at least 2"):
        NGramModel(1)
    with pytest.raises(ValueError, match="token id 9 is outside the vocabulary of 5"):
        NGramModel(2, vocab_size=5).count([1, 9])
    with pytest.raises(ValueError, match="token id -1"):
        NGramModel(2).count([-1])
    with pytest.raises(ValueError, match="one sequence"):
        NGramModel(2).count([[1, 2]])
    with pytest.raises(ValueError, match="vocab_size"):
        NGramModel(2).distribution([1])
    with pytest.raises(ValueError, match="start"):
        NGramModel(2).update([1], -1)
    with pytest.raises(ValueError, match="min_count"):
        NGramModel(2).prune(min_count=0)


def test_files_of_another_kind_are_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    with pytest.raises(FileNotFoundError, match="no n-gram model at"):
        NGramModel.load(path)
    path.write_text("no tensors here")
    with pytest.raises(ValueError, match="not a safetensors file"):
        NGramModel.load(path)
    save_file({"weight": np.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"not written by NGramModel\.save"):
        NGramModel.load(path)
    save_file({"weight": np.zeros(1)}, path, {"format": "foredraft-ngram", "version": "99"})
    with pytest.raises(ValueError, match="version 99"):
        NGramModel.load(path)


def test_learning_keeps_the_source_and_takes_tokens_that_it_does_not_know():
    """The source has more n-grams than learning may add, and fewer tokens than the target."""
    text = [(7 * index * index + index) % 50 for index in range(3000)]
    source = NGramModel.from_tokens([text], 3, vocab_size=50)
    drafter = NGram(source=source, learn=True, most=200)
    drafter.bind(SimpleNamespace(vocab_size=64, model=None))
    given = source.ngrams
    row = StandIn(0, [60, 61, 62, 60, 61], 100)
    drafter.draft(request([row], depth=2, vocabulary=64))
    assert source.ngrams > given and drafter.draft(request([row], depth=1, vocabulary=64)).tokens[0, 1] == 62
