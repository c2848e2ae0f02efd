"""The cache holds what a fresh prefill would, whatever was drafted and rejected; trees, chunks, reuse, long contexts."""

from __future__ import annotations

import pytest
import torch
from architectures import build
from cover import covered
from helpers import PAD, Oracle, added, alone, clone, generate, make_drafter, padded, prompts, repetitive, tiny, watched
from hypothesis import given, settings
from hypothesis import strategies as st
from paging import stored
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft import RowParameters, Speculator, TokenTree
from foredraft.models.cache import BLOCK, TreeCache, Window
from foredraft.target import Target

TOLERANCE = 1e-5  # largest difference, relative to the largest entry of the layer
FAMILIES = ["llama", "gemma3_text", "deepseek_v3"]
TREES = [*FAMILIES, "gpt2", "llama4_text", "gemma3n_text", "falcon", "opt"]


def assert_cached(target, texts):
    """Row by row and layer by layer, the cache of ``target`` is that of a fresh prefill of ``texts``."""
    assert target.lengths == [len(text) for text in texts]
    for row, text in enumerate(texts):
        fresh = Target(target.model, test=False, reuse_prefix=False)
        fresh.open([text])
        with torch.inference_mode():
            fresh.prefill([text], first=0)
        found, expected = stored(target.cache, row, len(text)), stored(fresh.cache, 0, len(text))
        assert len(found) == len(expected) > 0
        for got, wanted in zip(found, expected):
            assert (got - wanted).abs().max() <= TOLERANCE * wanted.abs().max()


def open_target(model, texts, **options):
    target = Target(model, test=False, **options)
    target.open(texts)
    with torch.inference_mode():
        logits = target.prefill(texts, first=0)
    return target, logits


@torch.inference_mode()
def plain_logits(model, tokens):
    """``[L, V]`` of one pass with no cache at all."""
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


def assert_close(got, wanted):
    assert (got - wanted).abs().max() <= 3e-5 * wanted.abs().max()


# -- what is committed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "drafter"), covered(FAMILIES, ["oracle", "draft-model", "ngram"], ways=1))
def test_after_every_round_the_cache_is_that_of_a_fresh_prefill(family, drafter):
    model, rows = tiny(family), repetitive((33, 20, 41))
    texts = [alone(model, row, max_new_tokens=16) for row in rows]
    oracle = Oracle([row + text for row, text in zip(rows, texts)])
    speculator = Speculator(model, drafter=oracle if drafter == "oracle" else make_drafter(drafter, family), shape="chain(5)")
    session = speculator.session()
    for index, row in enumerate(rows):
        session.add(row, RowParameters(max_new_tokens=(16, 5, 12)[index]))
    rounds = 0
    while session.live:
        session.step()
        rounds += 1
        if session.rows and rounds % 2:
            assert_cached(speculator.target, [row.ids[:-1] for row in session.rows])
    if drafter == "oracle":
        assert session.stats.drafted > session.stats.accepted > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_the_draft_models_own_cache_too(family):
    drafter = make_drafter("draft-model", family)
    speculator = Speculator(tiny(family), drafter=drafter, shape="chain(5)")
    session = speculator.session()
    rows = repetitive((33, 20))
    for row in rows:
        session.add(row, RowParameters(max_new_tokens=15))
    for _ in range(5):
        session.step()
    held = drafter.model.lengths
    assert all(0 < length < len(row.ids) for length, row in zip(held, session.rows))
    assert_cached(drafter.model, [row.ids[:length] for length, row in zip(held, session.rows)])
    session.close()


# -- trees --------------------------------------------------------------------------------------------------------------


def random_tree(rows: int, nodes: int, seed: int, vocabulary: int = 128) -> TokenTree:
    generator = torch.Generator().manual_seed(seed)
    parents = torch.tensor([[-1] + [int(torch.randint(0, node, (), generator=generator)) for node in range(1, nodes)] for _ in range(rows)])
    return TokenTree(torch.randint(3, vocabulary, (rows, nodes), generator=generator), parents)


@pytest.mark.parametrize(("family", "implementation"), covered(TREES, ["sdpa", "eager"], ways=1))
def test_a_branching_tree_scores_like_its_paths(family, implementation):
    model, texts = build(family, implementation), prompts((30, 17, 22))
    target, _ = open_target(model, texts)
    texts = [list(text) for text in texts]
    for seed in (1, 2, 3):
        tree = random_tree(3, 9, seed)
        with torch.inference_mode():
            logits = target.score(tree)
        ends = []
        for row, text in enumerate(texts):
            tokens = tree.tokens[row].tolist()
            leaves = set(range(tree.nodes)) - set(tree.parents[row].tolist())
            for leaf in leaves:
                path = tree.path(row, leaf)
                wanted = plain_logits(model, text + [tokens[node] for node in path])[-len(path) :]
                assert_close(logits[row, path], wanted)
            ends.append(tree.path(row, min(max(leaves), 8 - row)))
        width = max(map(len, ends))
        kept = [len(path) - (row == 1 and len(path) > 1) for row, path in enumerate(ends)]
        with torch.inference_mode():
            target.commit(torch.tensor([path + [0] * (width - len(path)) for path in ends]), kept)
        for row, (path, count) in enumerate(zip(ends, kept)):
            texts[row] += [int(tree.tokens[row, node]) for node in path[:count]]
        assert_cached(target, texts)


def grown(tree: TokenTree, nodes: int) -> TokenTree:
    """The first ``nodes`` nodes of ``tree``, as it was when it had no more."""
    return TokenTree(tree.tokens[:, :nodes], tree.parents[:, :nodes])


@torch.inference_mode()
@pytest.mark.parametrize("levels", [(0, 1, 4, 9), (0, 5), (1, 3, 6)])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "opt", "bloom"])
def test_a_tree_scored_level_by_level_is_scored_at_once(family, levels):
    model, texts = build(family, "eager" if family == "bloom" else "sdpa"), prompts((30, 17, 22))
    at_once, _ = open_target(model, texts)
    target, _ = open_target(model, texts)
    texts = [list(text) for text in texts]
    for seed in (1, 2):
        tree = random_tree(3, 12, seed)
        wanted = at_once.score(tree)
        if levels[0]:  # the root is in the cache already, written by a pass of its own
            target.advance(tree.tokens[:, 0])
            target.rewind([len(text) for text in texts])
        for first, end in zip(levels, [*levels[1:], 12]):
            assert_close(target.score(grown(tree, end), first=first), wanted[:, first:end])
        ends = [tree.path(row, 11 - row) for row in range(3)]
        width = max(map(len, ends))
        path, kept = torch.tensor([each + [0] * (width - len(each)) for each in ends]), [len(each) for each in ends]
        for each in (target, at_once):
            each.commit(path, kept)
        for row, nodes in enumerate(ends):
            texts[row] += tree.tokens[row, nodes].tolist()
        assert_cached(target, texts)


@torch.inference_mode()
@pytest.mark.parametrize("lengths", [(20, 20), (20, 13)])
def test_a_chain_scored_token_by_token(lengths):
    model, texts = tiny("gemma3_text"), prompts(lengths)
    target, _ = open_target(model, texts)
    chain = TokenTree.from_chain(random_tree(2, 6, 1).tokens)
    wanted = target.score(chain)
    for first, end in ((0, 2), (2, 3), (3, 6)):
        assert_close(target.score(TokenTree.from_chain(chain.tokens[:, :end]), first=first), wanted[:, first:end])
    target.commit(None, [5, 2])
    assert_cached(target, [text + chain.tokens[row, :count].tolist() for row, (text, count) in enumerate(zip(texts, (5, 2)))])


def test_a_tree_that_can_not_be_scored_is_refused():
    target, _ = open_target(tiny("gpt2"), prompts((5,)))
    tree = random_tree(1, tiny("gpt2").config.max_position_embeddings + 1, 0)
    with pytest.raises(ValueError, match="513 nodes per row, but the model's context holds only 512"):
        target.score(tree)
    with pytest.raises(ValueError, match="one of the 3 nodes of the tree, got 3"):
        target.score(random_tree(1, 3, 0), first=3)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(1, 14), st.integers(1, 3))
def test_trees_of_any_shape(seed, nodes, rows):
    model, texts = tiny("gemma3_text"), prompts((19, 25, 14)[:rows], seed=seed % 100)
    target, _ = open_target(model, texts)
    tree = random_tree(rows, nodes, seed)
    with torch.inference_mode():
        logits = target.score(tree)
    for row, text in enumerate(texts):
        path = tree.path(row, nodes - 1)
        assert_close(logits[row, path], plain_logits(model, text + tree.tokens[row, path].tolist())[-len(path) :])


# -- prefill --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "chunk"), covered(["llama", "gemma3_text", "llama4_text", "gpt2", "deepseek_v3"], [1, 7, 16], ways=1))
def test_chunks_equal_one_pass(family, chunk):
    model, texts = tiny(family), prompts((40, 3, 29))
    whole, expected = open_target(model, texts)
    target, logits = open_target(model, texts, prefill_chunk=chunk)
    assert_close(logits, expected)
    for row, text in enumerate(texts):
        assert_close(logits[row], plain_logits(model, text)[-1])
    assert_cached(target, texts)
    assert target.passes >= 40 // chunk > whole.passes or chunk > 40


def test_a_chunked_prompt_writes_the_same_text():
    model, rows = tiny("gemma3_text"), repetitive()
    expected = [alone(model, row, max_new_tokens=10) for row in rows]
    assert generate(Speculator(model, drafter="prompt-lookup", prefill_chunk=8), rows, max_new_tokens=10) == expected


# -- reuse across calls -----------------------------------------------------------------------------------------------


def prefilled(speculator, rows, **options):
    """New tokens, and how many prompt tokens went through the model before the first of them."""
    sizes, backend = [], speculator.target.backend
    forward = backend.forward  # a hook on the model would be a change to it
    backend.forward = lambda given: sizes.append(given.tokens.numel()) or forward(given)
    out = speculator.generate(**padded(rows), max_new_tokens=6, pad_token_id=PAD, **options)
    del backend.forward
    return added(out, max(map(len, rows))), sum(sizes[: len(sizes) - (out.stats.target_passes - 1)])


@pytest.mark.parametrize("drafter", ["none", "prompt-lookup", "draft-model"])
def test_a_prompt_that_begins_alike_reuses_the_cache(drafter):
    model, row = tiny(), prompts((60,))[0]
    speculator = Speculator(model, drafter=make_drafter(drafter), shape="chain(5)")
    first, cost = prefilled(speculator, [row])
    assert first == [alone(model, row, max_new_tokens=6)] and cost == 60
    follow_up = row + first[0] + prompts((5,), seed=9)[0]
    text, cost = prefilled(speculator, [follow_up])
    assert text == [alone(model, follow_up, max_new_tokens=6)]
    assert cost <= 8, "only what is new, the last tokens of the answer among it"
    again, cost = prefilled(speculator, [follow_up])
    assert again == text and cost == 1
    other = prompts((50,), seed=5)[0]
    text, cost = prefilled(speculator, [other])
    assert text == [alone(model, other, max_new_tokens=6)] and cost == 50
    half = other[:30] + prompts((30,), seed=6)[0]
    text, cost = prefilled(speculator, [half])
    assert text == [alone(model, half, max_new_tokens=6)] and cost == 30


def test_rows_of_a_batch_take_what_earlier_rows_left():
    model, rows = tiny(), prompts((40, 50, 30))
    expected = [alone(model, row, max_new_tokens=6) for row in rows]
    together = Speculator(model, drafter="none")  # rows that end in the same round all stay where they are
    assert prefilled(together, rows) == (expected, 150)
    text, cost = prefilled(together, [rows[2], rows[0], rows[1]])
    assert (text, cost) == ([expected[2], expected[0], expected[1]], 3)
    speculator = Speculator(model, drafter="ngram", shape="chain(5)")
    for subset in ([0, 1, 2], [1], [0, 2], [2, 2, 0], [0, 1, 2]):
        assert prefilled(speculator, [rows[index] for index in subset])[0] == [expected[index] for index in subset]


def test_nothing_is_reused_once_the_weights_changed():
    model, row = clone(tiny()), prompts((60,))[0]
    speculator = Speculator(model, drafter="none")
    before = prefilled(speculator, [row])[0]
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    text, cost = prefilled(speculator, [row])
    assert cost == 60 and text == [alone(model, row, max_new_tokens=6)]
    model.load_state_dict(tiny().state_dict())
    text, cost = prefilled(speculator, [row])
    assert cost == 60 and text == before


def test_reuse_can_be_switched_off():
    speculator, row = Speculator(tiny(), drafter="none", reuse_prefix=False), prompts((60,))[0]
    assert prefilled(speculator, [row]) == prefilled(speculator, [row])
    assert prefilled(speculator, [row])[1] == 60


# -- capacity -----------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_the_cache_grows_and_keeps_what_it_holds():
    model, texts = tiny(), prompts((5, 70), seed=2)
    target = Target(model, test=False)
    target.backend.cache = TreeCache(reserve=1)
    target.open(texts[:1])
    with torch.inference_mode():
        target.prefill(texts[:1], first=0)
    small = target.cache.capacity
    texts = [list(text) for text in texts]
    for step in range(30):
        if step == 10:
            target.open(texts[1:])
            with torch.inference_mode():
                target.prefill(texts[1:], first=1)
        rows = len(target.lengths)
        tree = TokenTree.from_chain(torch.full((rows, 4), 7 + step))
        with torch.inference_mode():
            target.score(tree)
            target.commit(None, [3, 2][:rows])
        for text, count in zip(texts[:rows], (3, 2)):
            text += [7 + step] * count
    assert target.cache.capacity > small
    assert_cached(target, texts)
    target.compact([1])
    assert_cached(target, texts[1:])
    target.rewind([40])
    assert_cached(target, [texts[1][:40]])
    target.release()
    assert target.cache.bytes == 0 and target.lengths == []


def test_the_cache_on_its_own():
    cache = TreeCache(reserve=1)
    assert cache.capacity == BLOCK and cache.bytes == 0
    cache.open([0, 0])
    generator = torch.Generator().manual_seed(0)
    held = [torch.zeros(2, 0, 4), torch.zeros(2, 0, 4)]
    for step in range(40):
        nodes, kept = 3 + step % 3, [1 + step % 3, 2]
        cache.enter(Window(0, 2, tuple(cache.lengths), nodes))
        new = torch.randn(2, 2, nodes, 4, generator=generator)
        keys, values = cache.update(new, -new, 0)
        assert keys.shape[2] == max(cache.lengths) + nodes and torch.equal(keys, -values)
        path = torch.stack([torch.randperm(nodes, generator=generator).sort().values for _ in range(2)])
        cache.commit(path if step % 2 else None, kept)
        held = [torch.cat([old, row[:, path[index][:count] if step % 2 else slice(0, count)]], 1)
                for index, (old, row, count) in enumerate(zip(held, new, kept))]  # fmt: skip
        for row, wanted in enumerate(held):
            assert cache.lengths[row] == wanted.shape[1]
            assert torch.equal(cache.written[0].keys[row, :, : cache.lengths[row]], wanted)
    assert cache.capacity >= max(cache.lengths) and cache.capacity % BLOCK == 0
    with pytest.raises(RuntimeError, match="Target"):
        cache.update(new, new, 0)


@pytest.mark.parametrize("length", [10_000, pytest.param(32_000, marks=pytest.mark.nightly)])
def test_a_long_context(length):
    """A long prompt: chunked, equal to transformers, and no logits but the last token's are ever made."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        max_position_embeddings=40_000, rope_theta=1e6, initializer_range=0.4, tie_word_embeddings=False, eos_token_id=None,
        bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    row = (prompts((97,), vocabulary=64)[0] * 400)[:length]
    expected = alone(model, row, max_new_tokens=8)
    speculator = Speculator(model, drafter="prompt-lookup", shape="chain(5)")
    lengths, chunks = [], []
    handle = model.lm_head.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    with watched(model, lambda kwargs: chunks.append(kwargs["input_ids"].shape[1])):
        out = speculator.generate(**padded([row]), max_new_tokens=8, pad_token_id=PAD)
    handle.remove()
    assert out.sequences[0, length:].tolist() == expected
    assert sum(chunks) >= length and max(chunks) == speculator.target.prefill_chunk
    assert max(lengths) <= 6 and out.stats.drafted > 0
