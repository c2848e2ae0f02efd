"""Node histories, and which nodes a processor is called at: filler may hold anything, and users' code sees only what can be decoded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processor_cases import EOS, assert_same, committed_rows, node_history, prepared, random_logits, random_prompts, random_tree
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from foretoken.histories import NodeHistories
from foretoken.processors import Pipeline, process, row_pipelines
from foretoken.tree import TokenTree


@settings(max_examples=150, deadline=None)
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


def test_users_code_is_not_called_at_filler():
    seen = []

    def record(input_ids, scores):
        seen.extend(map(tuple, input_ids.tolist()))
        return scores

    committed, tokens = torch.tensor([[2, 3], [4, 0]]), torch.tensor([[3, 5, 6], [4, 7, -1]])
    tree = TokenTree.from_chain(tokens, valid=torch.tensor([[True, True, True], [True, True, False]]))
    pipelines = row_pipelines([record], prompt_lengths=[2, 1], padded_length=2)
    process(pipelines, random_logits(tree), NodeHistories(committed, [2, 1], tree))
    assert sorted(seen) == [(2, 3), (2, 3, 5), (2, 3, 5, 6), (4,), (4, 7)]


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


def test_arguments_that_disagree():
    tree = TokenTree.root(torch.tensor([2]))
    with pytest.raises(ValueError, match="disagree"):
        NodeHistories(torch.tensor([[2], [3]]), [1, 1], tree)
    for length in (0, 2):
        with pytest.raises(ValueError, match="between 1 and 1"):
            NodeHistories(torch.tensor([[2]]), [length], tree)
