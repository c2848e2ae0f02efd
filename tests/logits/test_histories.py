"""Node histories, and which nodes a processor is called at: filler may hold anything, and users' code sees only what can be decoded."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processor_cases import EOS, assert_same, committed_rows, node_history, prepared, random_logits, random_prompts, random_tree, reached
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

from foredraft.logits.histories import NodeHistories
from foredraft.logits.processors import Pipeline, process, row_pipelines
from foredraft.logits.sampler import Sampler
from foredraft.tree import TokenTree


@settings(max_examples=75, deadline=None)
@given(data=st.data())
def test_history_of_any_node_of_any_tree(data):
    rows, nodes = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 8))
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=rows, max_size=rows))
    capacity = max(lengths) + data.draw(st.integers(0, 3))
    committed = torch.arange(rows * capacity).reshape(rows, capacity)
    tokens = 1000 + torch.arange(rows * nodes).reshape(rows, nodes)
    if data.draw(st.booleans()):
        tree = TokenTree.from_chain(tokens)
    else:
        parents = [[-1, *(data.draw(st.integers(0, node - 1)) for node in range(1, nodes))] for _ in range(rows)]
        tree = TokenTree(tokens, torch.tensor(parents))
    histories = NodeHistories(committed, lengths, tree)
    cells = data.draw(st.lists(st.integers(0, rows * nodes - 1), min_size=1, unique=True).map(sorted))
    groups = histories.by_length(cells)
    assert sorted(cell for group in groups.values() for cell in group) == cells
    for length, group in groups.items():
        gathered = histories.gather(group, length)
        assert gathered.shape == (len(group), length)
        for cell, ids in zip(group, gathered):
            assert torch.equal(ids, node_history(committed, lengths, tree, *divmod(cell, nodes)))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_filler_may_hold_anything(data):
    """Tokens, parents and logits of filler are rubbish; the real nodes are untouched by it and nothing raises."""
    rows, nodes = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 6))
    chain = data.draw(st.booleans())
    counts = data.draw(st.lists(st.integers(1, nodes), min_size=rows, max_size=rows))
    valid = torch.arange(nodes)[None] < torch.tensor(counts)[:, None]
    prompts = random_prompts(data.draw(st.lists(st.integers(1, 5), min_size=rows, max_size=rows)))
    committed, lengths = committed_rows(prompts, [0] * rows)
    parents = torch.tensor([[-1, *(data.draw(st.integers(0, node - 1)) for node in range(1, nodes))] for _ in range(rows)])
    clean = random_tree(committed, lengths, None if chain else parents, nodes=nodes)
    rubbish = data.draw(st.sampled_from([-1, 10**6]))
    tree = TokenTree(
        clean.tokens.masked_fill(~valid, rubbish), clean.parents if chain else parents.masked_fill(~valid, rubbish), valid, chain=chain
    )
    logits = random_logits(tree)
    spoiled = logits.masked_fill(~valid[..., None], float("nan"))
    processors = LogitsProcessorList(
        [
            hf.RepetitionPenaltyLogitsProcessor(1.3),
            hf.NoRepeatNGramLogitsProcessor(2),
            hf.NoBadWordsLogitsProcessor([[3], [4, 5]]),
            hf.MinLengthLogitsProcessor(4, EOS),
            data.draw(st.sampled_from([hf.EtaLogitsWarper(0.2), hf.TopHLogitsWarper(0.9)])),  # both raise on NaN
        ]
    )
    pipelines = [Pipeline.alone(processors, prompt_length=len(prompt)) for prompt in prompts]
    scores = process(pipelines, spoiled, NodeHistories(committed, lengths, tree))
    reference = process(pipelines, logits, NodeHistories(committed, lengths, clean))
    assert_same(scores, reference, valid)


class Ban(LogitsProcessor):
    """A user's processor: after a history of odd sum no even token may follow, and the other way round every third."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.extend(map(tuple, input_ids.tolist()))
        odd = (input_ids.sum(1, keepdim=True) % 2).bool()  # [G, 1]
        tokens = torch.arange(scores.shape[1])
        return scores.masked_fill(torch.where(odd, tokens % 2 == 0, tokens % 3 == 2), -torch.inf)


def sampler_of(pipelines, committed, lengths):
    return Sampler(pipelines, [True] * len(lengths), lengths, None, lambda: committed)


def part(tree, first, end):
    valid = None if tree.valid is None else tree.valid[:, :end]
    layout = tree.static_parents and tree.static_parents[:end]
    return TokenTree(tree.tokens[:, :end], tree.parents[:, :end], valid, chain=tree.chain, static_parents=layout), slice(first, end)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_level_by_level_equals_at_once(data):
    """Cut anywhere: built-in and users' processors see the same histories whether the tree is there or grows."""
    rows, nodes = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 9))
    prompts = random_prompts(data.draw(st.lists(st.integers(1, 5), min_size=rows, max_size=rows)))
    chain = data.draw(st.booleans())
    parents = [[-1, *(node - 1 if chain else data.draw(st.integers(0, node - 1)) for node in range(1, nodes))] for _ in range(rows)]
    shared = data.draw(st.booleans())  # the host knows the layout
    parents = parents[:1] * rows if shared else parents
    committed, lengths = committed_rows(prompts, [0] * rows)
    tree = random_tree(committed, lengths, torch.tensor(parents))
    guards = [Ban() if data.draw(st.booleans()) else None for _ in prompts]
    own = [hf.RepetitionPenaltyLogitsProcessor(1.3), hf.NoRepeatNGramLogitsProcessor(2), hf.MinLengthLogitsProcessor(5, EOS)]
    lists = [LogitsProcessorList([*own, guard] if guard else own) for guard in guards]
    logits = random_logits(tree)
    valid = reached(lists, logits, committed, lengths, tree)  # as a drafter that draws from q would have it
    tree = TokenTree(
        tree.tokens.masked_fill(~valid, -1),
        tree.parents,
        valid,
        chain=chain and bool(valid.all()),
        static_parents=tuple(parents[0]) if shared else None,
    )
    sampler = sampler_of([Pipeline.alone(own, prompt_length=1) for own in lists], committed, lengths)
    for guard in filter(None, guards):
        guard.seen.clear()
    whole = sampler.scores(logits, tree)
    seen = [sorted(guard.seen) if guard else None for guard in guards]
    for guard in filter(None, guards):
        guard.seen.clear()
    cuts = sorted({0, nodes, *data.draw(st.lists(st.integers(1, nodes - 1)))})
    parts = []
    for first, end in pairwise(cuts):
        grown_so_far, fresh = part(tree, first, end)
        parts.append(sampler.scores(logits[:, fresh], grown_so_far, first))
        assert parts[-1].shape == (rows, end - first, logits.shape[-1])
    assert_same(torch.cat(parts, 1), whole, valid)
    assert [sorted(guard.seen) if guard else None for guard in guards] == seen


def test_a_level_asks_users_code_about_valid_nodes_only():
    """A token that q gave no probability is filler, and so is what hangs below it: decoding cannot get there."""
    guard = Ban()
    tree = TokenTree(torch.tensor([[2, 3, 4, 5, 6]]), torch.tensor([[-1, 0, 0, 1, 2]]), torch.tensor([[True, True, False, True, False]]))
    sampler = sampler_of([Pipeline.alone([guard], prompt_length=1)], torch.tensor([[2]]), [1])
    sampler.scores(random_logits(tree)[:, 1:3], part(tree, 1, 3)[0], 1)
    assert guard.seen == [(2, 3)]
    sampler.scores(random_logits(tree)[:, 3:], tree, 3)
    assert guard.seen == [(2, 3), (2, 3, 5)]


@pytest.mark.parametrize("first", [0, 1, 3])
def test_users_code_is_not_asked_what_follows_the_end(first):
    """Plain decoding stops there. An end token in the prompt, or that of another row, ends nothing."""
    tree = TokenTree(torch.tensor([[EOS, 3, EOS, 4, 5, 6]] * 2), torch.tensor([[-1, 0, 0, 2, 1, 4]] * 2))
    seen, logits = [], torch.zeros(2, 6, 12)

    def guard(input_ids, scores):
        seen.extend(map(tuple, input_ids.tolist()))
        return scores

    ends = [frozenset({EOS}), frozenset({9})]
    pipelines = [Pipeline.alone([guard], prompt_length=1)] * 2
    Sampler(pipelines, [True] * 2, [1, 2], None, lambda: torch.tensor([[EOS, 0], [2, EOS]]), ends).scores(logits[:, first:], tree, first)
    ended = {0: (EOS,), 1: (EOS, 3), 4: (EOS, 3, 5), 5: (EOS, 3, 5, 6)}
    other = [(2, EOS), (2, EOS, 3), (2, EOS, EOS), (2, EOS, EOS, 4), (2, EOS, 3, 5), (2, EOS, 3, 5, 6)]
    assert sorted(seen) == sorted([history for node, history in ended.items() if node >= first] + other[first:])


def test_a_chain_token_by_token_is_not_asked_what_follows_the_end():
    seen = []

    def guard(input_ids, scores):
        seen.extend(map(tuple, input_ids.tolist()))
        return scores

    sampler = Sampler(
        [Pipeline.alone([guard], prompt_length=1)] * 2, [True] * 2, [1, 1], None, lambda: torch.tensor([[2], [3]]), [frozenset({EOS})] * 2
    )
    drafted = []
    for tokens in ([4, EOS], [EOS, 5], [6, 6]):
        sampler.scores_below(torch.zeros(2, 12), drafted, [5, 5])
        drafted.append(torch.tensor(tokens))
    assert sorted(seen) == [(2,), (2, 4), (3,)]


def test_distribution_of_a_level():
    sampler = Sampler([Pipeline()] * 2, [True, False], [1, 1], None, lambda: torch.zeros(2, 1, dtype=torch.long))
    scores = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    q = sampler.distribution(scores)
    assert torch.equal(q[0], scores[0].softmax(-1))
    assert torch.equal(q[1], torch.nn.functional.one_hot(scores[1].argmax(-1), 7).float())
    assert torch.equal(q[:, 1], sampler.distribution(scores[:, 1]))


def test_users_code_is_not_called_at_filler():
    seen = []

    def record(input_ids, scores):
        seen.extend(map(tuple, input_ids.tolist()))
        return scores

    committed, tokens = torch.tensor([[2, 3], [4, 0]]), torch.tensor([[3, 5, 6], [4, 7, -1]])
    tree = TokenTree.from_chain(tokens, valid=torch.tensor([[True, True, True], [True, True, False]]))
    pipelines = row_pipelines([record], prompt_lengths=[2, 1], padded_length=2, paddings=[[], [9]])
    process(pipelines, random_logits(tree), NodeHistories(committed, [2, 1], tree))
    assert sorted(seen) == [(2, 3), (2, 3, 5), (2, 3, 5, 6), (9, 4), (9, 4, 7)]


@pytest.mark.parametrize("remove", [False, True], ids=["as masked", "made finite"])
def test_prefix_function_is_only_asked_about_what_it_allowed(remove):
    """A function that walks a trie returns nothing for a draft that left it: plain decoding would never ask."""
    trie = {(2,): [3, 4], (2, 3): [5], (2, 4): [6], (2, 3, 5): [EOS], (2, 4, 6): [EOS]}

    def walk(_, sentence):
        return trie.get(tuple(sentence.tolist()), [])

    prompt, options = torch.tensor([2]), {"prefix_allowed_tokens_fn": walk, "remove_invalid_values": remove}
    processors, _ = prepared(prompt[None], torch.ones(1, 1, dtype=torch.long), **options)
    tree = TokenTree(torch.tensor([[2, 3, 4, 9, 5, 6, 8, 7]]), torch.tensor([[-1, 0, 0, 0, 1, 2, 2, 3]]))
    logits = random_logits(tree)
    histories = NodeHistories(prompt[None], [1], tree)
    scores = process([Pipeline.alone(processors, prompt_length=1)], logits, histories)
    for node in (0, 1, 2, 4, 5):
        ids = torch.tensor(node_history(prompt[None], [1], tree, 0, node).tolist())
        assert torch.equal(scores[0, node], processors(ids[None], logits[0, node][None])[0])
    assert torch.equal(scores[0, [3, 6, 7]], logits[0, [3, 6, 7]])


def test_an_unsatisfiable_prefix_names_the_row():
    processor = hf.PrefixConstrainedLogitsProcessor(lambda row, _: [2] if row == 0 else [], 1)
    pipelines = row_pipelines([processor], prompt_lengths=[1, 1], padded_length=1)
    tree = TokenTree.root(torch.tensor([2, 2]))
    with pytest.raises(ValueError, match="batch ID 1"):
        process(pipelines, random_logits(tree), NodeHistories(torch.tensor([[2], [2]]), [1, 1], tree))
