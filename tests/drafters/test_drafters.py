"""Drafters against what their definition says: prompt lookup, the n-gram model online and its q, a draft model that falls behind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from drafting import Row, drafted, request
from helpers import alone, generate, make_drafter, padded, perturbed, plainly, prompts, repetitive, tiny, watched
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import law_of
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft import ConfigurationError, Speculator, drafters, zoo
from foredraft.drafters.draft_model import DraftModel
from foredraft.drafters.ngram import NGram
from foredraft.drafters.ngram_model import NGramModel
from foredraft.drafters.prompt_lookup import PromptLookup, SuffixIndex, merge_copies
from foredraft.drafters.tries import Trie
from foredraft.testing import ProbabilityTable, distance, plain_law

# -- prompt lookup ------------------------------------------------------------------------------------------------------


def naive_lookup(ids, sizes, count):
    """What followed the most recent earlier occurrence of the longest suffix that occurs earlier, the copy included in the text."""
    for size in sizes:
        for end in range(len(ids) - 1, size - 1, -1):
            if len(ids) > size and ids[end - size : end] == ids[-size:]:
                text = list(ids)
                for offset in range(count):
                    text.append(text[end + offset])
                return text[len(ids) :]
    return []


TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@settings(deadline=None)
@given(text=TEXTS, longest=st.integers(1, 4), shortest=st.integers(1, 4), count=st.integers(0, 6))
def test_a_lookup_is_the_naive_search(text, longest, shortest, count):
    sizes = range(max(longest, shortest), min(longest, shortest) - 1, -1)
    assert list(SuffixIndex(sizes).lookup(text, count)) == naive_lookup(text, sizes, count)


@settings(deadline=None)
@given(text=TEXTS, steps=st.lists(st.integers(1, 6), max_size=12))
def test_an_incremental_index_answers_like_a_fresh_one(text, steps):
    sizes, index, length = range(3, 0, -1), SuffixIndex(range(3, 0, -1)), 1
    for step in (0, *steps):
        length = min(length + step, len(text))
        assert list(index.lookup(text[:length], 5)) == list(SuffixIndex(sizes).lookup(text[:length], 5))


def test_prompt_lookup_drafts_for_rows_that_come_and_go():
    drafter = PromptLookup(max_ngram=2)
    rows = [Row([1, 2, 3, 1, 2], slot=0), Row([5, 6, 7], slot=1), Row([4, 4, 4, 4], slot=2)]
    drafter.begin(rows)
    assert drafted(drafter.draft(request(rows))) == [[3, 1, 2, 3, 1], [], [4] * 5]
    assert drafted(drafter.draft(request(rows, limits=[2, 1, 0]))) == [[3, 1], [], []]
    drafter.end(rows[:1])
    rows[1].ids += [5, 6]
    assert drafted(drafter.draft(request(rows[1:]))) == [[7, 5, 6, 7, 5], [4] * 5]
    drafter.reset()
    drafter.begin([Row([8, 8], slot=1)])
    assert drafted(drafter.draft(request([Row([8, 8], slot=1)]))) == [[8] * 5]


def said_by(trie: Trie) -> list[tuple[int, ...]]:
    """The text down to every node below the root."""
    said: list[tuple[int, ...]] = [()]
    for token, parent in zip(trie.tokens, trie.parents):
        said.append((*said[parent], token))
    return said[1:]


@settings(deadline=None)
@given(text=TEXTS, most=st.integers(1, 5), steps=st.lists(st.integers(1, 6), max_size=5))
def test_occurrences_are_the_naive_search(text, most, steps):
    index = SuffixIndex(range(3, 0, -1))
    for length in sorted({len(text), *(min(sum(steps[:count]) + 1, len(text)) for count in range(len(steps)))}):
        ids = text[:length]
        expected: dict[int, None] = {}
        for size in (3, 2, 1):
            ends = [end for end in range(len(ids) - 1, size - 1, -1) if len(ids) > size and ids[end - size : end] == ids[-size:]]
            expected.update(dict.fromkeys(ends[:most]))
        assert index.occurrences(ids, most) == list(expected)


@settings(deadline=None)
@given(text=TEXTS, depth=st.integers(1, 5), budget=st.integers(1, 12))
def test_a_tree_of_copies_begins_with_the_chain(text, depth, budget):
    drafter, row = PromptLookup(occurrences=3), Row(text)
    drafter.begin([row])
    trie = drafter._trie(drafter._indices[row.slot], row.ids, depth, budget)
    said = said_by(trie)
    chain = list(SuffixIndex(range(3, 0, -1)).lookup(text, min(depth, budget)))
    assert [list(each) for each in said[: len(chain)]] == [chain[:count] for count in range(1, len(chain) + 1)]
    assert len(said) <= budget and len(set(said)) == len(said)
    copies = [naive_copy(text, end, depth) for end in SuffixIndex(range(3, 0, -1)).occurrences(text, 3)]
    everything = {tuple(copy[:count]) for copy in copies for count in range(1, len(copy) + 1)}
    assert set(said) <= everything and len(said) == min(budget, len(everything))


def naive_copy(ids, end, count):
    text = list(ids)
    for offset in range(count):
        text.append(text[end + offset])
    return text[len(ids) :]


def test_other_occurrences_branch_off_by_turns():
    trie = Trie()
    merge_copies(trie, [[1, 2, 3], [1, 4, 5], [6, 7, 8], [1, 2, 9]], 9)
    assert said_by(trie) == [(1,), (1, 2), (1, 2, 3), (6,), (1, 4), (6, 7), (1, 4, 5), (6, 7, 8), (1, 2, 9)]


@pytest.mark.parametrize("name", ["prompt-lookup", "ngram"])
def test_trees_say_what_plain_decoding_says(name):
    rows = repetitive()
    for options in ({}, {"do_sample": True, "temperature": 0.9, "top_p": 0.9, "seed": 2}):
        plain = plainly(tiny(), rows, max_new_tokens=20, **options)
        for shape in ("product(3,2,1)", "dynamic(depth=4,k=3,total=9)"):
            speculator = Speculator(tiny(), drafter=name, shape=shape, rule="match")
            out = speculator.generate(**padded(rows), max_new_tokens=20, pad_token_id=0, **options)
            assert [row[-20:] for row in out.sequences.tolist()] == plain
            assert out.stats.accepted > 0


@pytest.mark.parametrize("options", [{"max_ngram": 0}, {"min_ngram": 0}, {"max_ngram": 2, "min_ngram": 3}, {"occurrences": 0}])
def test_prompt_lookup_options(options):
    with pytest.raises(ConfigurationError, match=r"ngram|occurrences"):
        PromptLookup(**options)


def test_prompt_lookup_copies_a_repetition_in_one_pass_per_draft():
    """On a text that the target repeats for ever, everything that is drafted is accepted."""
    config = LlamaConfig(vocab_size=128, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    config.eos_token_id = None
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    with torch.no_grad():  # the head looks up the token after the one that was read: 3, 4, …, 8, 3, 4, …
        model.lm_head.weight.copy_(model.model.embed_tokens.weight.roll(1, 0))
        model.lm_head.weight[3] = model.model.embed_tokens.weight[8]
        model.lm_head.weight[9] = 0
    row = [*range(3, 9), *range(3, 9), 3, 4]
    out = Speculator(model, drafter="prompt-lookup", shape="chain(5)").generate(**padded([row]), max_new_tokens=24)
    assert out.sequences[0, 14:].tolist() == [*range(5, 9), *range(3, 9), *range(3, 9), *range(3, 9), 3, 4]
    assert out.stats.accepted == out.stats.drafted and out.stats.target_passes == 5


# -- n-grams ------------------------------------------------------------------------------------------------------------


def test_ngram_learns_online():
    model, rows = tiny(), prompts((30, 12))
    drafter = NGram(order=3)
    speculator = Speculator(model, drafter=drafter, shape="chain(5)")
    options = {**padded(rows), "max_new_tokens": 20, "pad_token_id": 0}
    first, second = speculator.generate(**options), speculator.generate(**options)
    assert first.sequences.tolist() == second.sequences.tolist()
    assert second.stats.accepted > first.stats.accepted
    assert second.stats.target_passes < first.stats.target_passes


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(TEXTS, min_size=1, max_size=3), growth=st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=5))
def test_ngram_counts_every_committed_token_once(rows, growth):
    drafter = NGram(order=3)
    live = [Row(list(ids), slot=index) for index, ids in enumerate(rows)]
    drafter.begin(live)
    for more in growth:
        for row in live:
            row.ids += more
        if len(more) % 2:  # what is committed in rounds without a draft is counted by the next one, or at the end
            drafter.draft(request(live))
        drafter.observe(live, None)
    drafter.end(live)
    reference = NGramModel.from_tokens([row.ids for row in live], 3)
    for context in ([], [0], [1, 2], [3, 3], [0, 1, 2]):
        assert drafter.model.likeliest(context, 9) == reference.likeliest(context, 9)
    assert drafter.model.ngrams == reference.ngrams


def test_ngram_drafts_the_most_frequent_successors():
    model = NGramModel.from_tokens([[1, 2, 3, 4, 1, 2, 3, 5, 9, 2, 3, 4]], 3)
    drafter = NGram(source=model, learn=False)
    rows = [Row([1, 2]), Row([7, 7, 2], slot=1), Row([77], slot=2)]
    drafter.begin(rows)
    before = model.ngrams
    assert drafted(drafter.draft(request(rows, depth=3))) == [[3, 4, 1], [3, 4, 1], []]
    safe = NGram(source=model, learn=False, min_context=2)
    assert drafted(safe.draft(request(rows, depth=3))) == [[3, 4, 1], [], []]
    assert model.ngrams == before
    assert drafted(NGram(source=model, learn=False, min_context=0).draft(request(rows[2:], depth=1)))[0]
    assert drafted(drafter.draft(request(rows[:1], depth=3, vocabulary=4))) == [[3]], "ids past the target's vocabulary end a draft"


def test_ngram_is_saved_and_loaded(tmp_path):
    model, rows = tiny(), prompts((30, 12))
    drafter = NGram(order=4)
    speculator = Speculator(model, drafter=drafter)
    text = generate(speculator, rows, max_new_tokens=15)
    drafter.save(tmp_path / "counts.safetensors")
    loaded = Speculator(model, drafter=f"ngram:{tmp_path}/counts.safetensors", shape="chain(3)")
    assert loaded.drafter.model.order == 4 and not loaded.drafter.learn
    out = loaded.generate(**padded(rows), max_new_tokens=15, pad_token_id=0)
    assert [row[: len(new)] for row, new in zip(out.sequences[:, 30:].tolist(), text)] == text
    assert out.stats.accepted > 0
    with pytest.raises(ConfigurationError, match="order 4"):
        NGram(source=tmp_path / "counts.safetensors", order=3)


def test_ngram_from_a_text(tmp_path):
    tokenizer = zoo.load_tokenizer("python-8m")
    text = tmp_path / "text.py"
    text.write_text("for i in range(10):\n    print(i)\n" * 3, encoding="utf-8")
    for given_tokenizer in (tokenizer, tokenizer.encode):
        drafter = drafters.create(f"ngram:{text}", {"tokenizer": given_tokenizer, "order": 5})
        ids = tokenizer.encode("for i in range(")
        tree = drafter.draft(request([Row(ids)], depth=4, vocabulary=5000))
        assert tokenizer.decode(ids + tree.tokens[0, 1:].tolist()).startswith("for i in range(10):")
    with pytest.raises(ConfigurationError, match="tokenizer"):
        NGram(source=text)
    with pytest.raises(ConfigurationError, match="there is no file"):
        drafters.create("ngram:nowhere.safetensors")
    with pytest.raises(ConfigurationError, match="min_context"):
        NGram(min_context=-1)


def test_ngram_of_another_vocabulary():
    with pytest.raises(ConfigurationError, match="token ids"):
        Speculator(tiny(), drafter=NGram(source=NGramModel.from_tokens([[1, 2, 300]], 2, vocab_size=301)))
    unknown = NGram(source=NGramModel.from_tokens([[1, 2, 300, 1, 2, 300]], 2))
    row = [5, 1, 2]
    assert generate(Speculator(tiny(), drafter=unknown), [row], max_new_tokens=6) == [alone(tiny(), row, max_new_tokens=6)]


def test_ngram_trees_hold_the_likeliest_texts():
    model = NGramModel.from_tokens([[1, 2, 3, 4, 1, 2, 3, 5, 9, 2, 3, 4, 1, 2, 6]], 3)
    drafter = NGram(source=model, learn=False)
    trie = drafter._trie(Row([1, 2]), 3, 6, 128)
    said = said_by(trie)
    assert said[:2] == [(3,), (3, 4)] and (6,) in said and (3, 4, 1) in said and len(said) == 6
    chance = {(): 1.0}
    for text in said:
        shares = dict(model.likeliest([1, 2, *text[:-1]][-2:], 4))
        chance[text] = chance[text[:-1]] * shares[text[-1]]
    assert [chance[text] for text in said] == sorted((chance[text] for text in said), reverse=True)
    assert all(token < 5 for text in said_by(drafter._trie(Row([1, 2]), 3, 20, 5)) for token in text)
    assert not drafter._trie(Row([77]), 3, 6, 128).tokens and not drafter._trie(Row([1, 2]), 0, 6, 128).tokens
    tree = drafter.draft(request([Row([1, 2]), Row([8, 8], slot=1)], shape="product(2,2,1)", limits=[2, 3], depth=3))
    tree.check(128)
    assert max(max(row) for row in tree.truncate([2, 3]).depth_lists) <= 3 and tree.proposal == "deterministic"


def test_ngram_learning_is_bounded():
    drafter = NGram(order=3, most=200)
    row = Row([1])
    drafter.begin([row])
    generator = torch.Generator().manual_seed(0)
    sizes = []
    for _ in range(29):
        row.ids += torch.randint(0, 40, (20,), generator=generator).tolist()
        drafter.draft(request([row]))
        sizes.append(drafter.model.size)
    assert max(sizes) <= 200 and drafter.model.ngrams >= 40, "single tokens stay"
    unbounded = NGram(order=3)
    unbounded.end([Row(list(row.ids))])
    assert unbounded.model.ngrams > 700


COUNTED = [[0, 1, 2, 0, 1, 1, 2, 0, 0, 1, 2, 2, 1, 0]]


class Liar(NGram):
    """Says that its tokens came from another q."""

    def draft(self, request):
        tree = super().draft(request)
        return tree if tree.q is None else replace(tree, q=0.7 * tree.q + 0.1)


def ngram_law(drafter: NGram, rule: str, shape: str):
    table = ProbabilityTable.random(3, seed=1)
    return law_of(table, drafter, rule, shape, prompt=[0]), plain_law(table, [0], 3)


@pytest.mark.parametrize(
    ("siblings", "rule", "shape"),
    [
        ("iid", "rejection", "chain(2)"),
        ("iid", "block", "chain(2)"),
        ("iid", "multi-candidate", "product(2,1)"),
        ("iid", "traversal", "product(2,1)"),
        ("without-replacement", "multi-candidate", "product(2,1)"),
        ("without-replacement", "traversal", "product(2,1)"),
        ("keyed", "match", "chain(2)"),
        ("top-k", "match", "product(2,1)"),
    ],
)
@pytest.mark.parametrize("min_context", [0, 2])
def test_the_law_is_the_targets_whatever_the_ngrams_q(siblings, rule, shape, min_context):
    model = NGramModel.from_tokens(COUNTED, 3)
    drafter = NGram(source=model, learn=False, siblings=siblings, min_context=min_context)
    law, expected = ngram_law(drafter, rule, shape)
    assert distance(law, expected) < 1e-6  # its q is float32


@pytest.mark.parametrize(
    ("siblings", "rule", "shape"), [("iid", "block", "chain(2)"), ("without-replacement", "traversal", "product(2,1)")]
)
def test_a_q_that_tokens_were_not_drawn_from_is_seen(siblings, rule, shape):
    model = NGramModel.from_tokens(COUNTED, 3)
    law, expected = ngram_law(Liar(source=model, learn=False, siblings=siblings), rule, shape)
    assert distance(law, expected) > 0.005


def test_a_sampled_chain_ends_where_nothing_was_seen():
    model = NGramModel.from_tokens([[1, 2, 3, 1, 2, 3]], 3)
    drafter = NGram(source=model, learn=False, siblings="iid", min_context=2)
    rows = [Row([1, 2]), Row([9, 9], slot=1)]
    tree = drafter.draft(request(rows, proposal="iid", needs_q=True, limits=[3, 3], depth=3))
    tree.check(128)
    assert tree.proposal == "iid" and tree.q.shape[2] == 128
    assert not tree.valid[1, 1:].any() and tree.valid[0, 1]
    assert drafter.draft(request(rows[1:], proposal="iid", needs_q=True)).nodes == 1


def test_ngram_draws_from_q_where_that_does_not_cost_too_much():
    for shape, proposal in (("chain(5)", "deterministic"), ("product(2,1)", "keyed")):
        assert Speculator(tiny(), drafter="ngram", shape=shape).proposal == proposal
    model = NGramModel.from_tokens([[1, 2, 3, 1, 2, 3, 1, 2, 4]], 3)
    row = Row([1, 2])
    for siblings, vocabulary, proposal in (
        ("auto", 128, "keyed"),
        ("auto", 50_000, "deterministic"),
        ("keyed", 50_000, "keyed"),
    ):
        drafter = NGram(source=model, learn=False, siblings=siblings)
        tree = drafter.draft(request([row], depth=2, vocabulary=vocabulary, proposal="keyed"))
        assert tree.proposal == proposal and tree.nodes == 3
    exact = NGram(source=model, learn=False).draft(request([row], depth=2, vocabulary=50_000, proposal="iid", needs_q=True))
    assert exact.q.shape == (1, 2, 50_000)


def test_an_ngram_file_of_another_tokenizer_is_refused(tmp_path):
    text = tmp_path / "text.py"
    text.write_text("for i in range(10):\n    print(i)\n", encoding="utf-8")
    counted = NGram(source=text, tokenizer=zoo.load_tokenizer("python-8m"))
    counted.save(tmp_path / "a.safetensors")
    Speculator("zoo:python-8m", drafter=f"ngram:{tmp_path}/a.safetensors", dtype="float32")
    learnt = NGram()
    speculator = Speculator("zoo:python-8m", drafter=learnt, dtype="float32")
    speculator.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4)
    learnt.save(tmp_path / "b.safetensors")
    assert NGramModel.load(tmp_path / "b.safetensors").fingerprint == counted.model.fingerprint != ""
    counted.model.fingerprint = "0" * 32
    counted.save(tmp_path / "c.safetensors")
    with pytest.raises(ConfigurationError, match="another tokenizer"):
        Speculator("zoo:python-8m", drafter=f"ngram:{tmp_path}/c.safetensors", dtype="float32")


@pytest.mark.parametrize("options", [{"siblings": "best"}, {"most": 0}])
def test_ngram_options(options):
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        NGram(**options)


# -- draft models -------------------------------------------------------------------------------------------------------


class Sometimes(DraftModel):
    """Drafts in every third round only, so that its cache falls behind by several tokens."""

    def draft(self, request):
        self.rounds = getattr(self, "rounds", 0) + 1
        if self.rounds % 3:
            from foredraft import TokenTree

            return TokenTree.root(request.roots())
        return super().draft(request)


def test_a_draft_model_catches_up_after_rounds_without_a_draft():
    rows = repetitive()
    expected = [alone(tiny(), row, max_new_tokens=20) for row in rows]
    drafter = Sometimes(perturbed())
    out = Speculator(tiny(), drafter=drafter, shape="chain(5)").generate(**padded(rows), max_new_tokens=20, pad_token_id=0)
    assert [row[-20:] for row in out.sequences.tolist()] == expected
    assert out.stats.accepted > 0
    same = Sometimes(tiny())
    stats = Speculator(tiny(), drafter=same, shape="chain(5)").generate(**padded(rows[:1]), max_new_tokens=20, pad_token_id=0).stats
    assert stats.accepted == stats.drafted > 0, "a draft model that is the target is always right, also after a pause"


def test_a_draft_that_is_the_target_is_always_right():
    rows = repetitive()
    for options in ({}, {"do_sample": True, "seed": 1, "temperature": 1.3, "repetition_penalty": 1.2, "top_p": 0.9}):
        for rule in ("match", "rejection"):
            out = Speculator(tiny(), drafter=DraftModel(tiny()), rule=rule, draft_length=4).generate(
                **padded(rows), max_new_tokens=21, pad_token_id=0, **options
            )
            assert out.stats.accepted == out.stats.drafted
            assert out.stats.target_passes == 5
            assert out.stats.acceptance_length == 5


def test_a_draft_model_feeds_only_what_it_has_not_seen():
    """One token a step, after the prompt; a rejected draft costs no second prefill."""
    row, shapes = repetitive()[0], []
    drafter = make_drafter("draft-model")
    speculator = Speculator(tiny(), drafter=drafter, draft_length=4)
    with watched(drafter.model.model, lambda kwargs: shapes.append(kwargs["input_ids"].shape[1])):
        out = speculator.generate(**padded([row]), max_new_tokens=20)
    assert shapes[0] == len(row) + 1
    assert max(shapes[1:]) <= 2 and out.stats.accepted < out.stats.drafted


def test_top_k_siblings_draft_the_most_likely_token():
    out = Speculator(tiny(), drafter=make_drafter("draft-model", siblings="top-k"), shape="chain(5)").generate(
        **padded(repetitive()), max_new_tokens=12, do_sample=True, seed=0, temperature=0.5, pad_token_id=0
    )
    assert out.stats.rule == "match" and out.stats.accepted > 0
    with pytest.raises(ConfigurationError, match="siblings"):
        DraftModel(tiny(), siblings="best")


def test_a_draft_model_that_belongs_to_no_speculator_says_so():
    with pytest.raises(ConfigurationError, match="Speculator"):
        DraftModel(tiny()).model  # noqa: B018


# -- the registry -------------------------------------------------------------------------------------------------------


def test_every_registered_drafter_can_be_made_by_name_and_lists_its_options():
    for name in drafters.names():
        found = drafters.find(name)
        assert found.name == name and found.summary
        assert found.info.proposals
        assert set(drafters.options(name)) >= ({"source"} if name == "draft-model" else set())


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("promt-lookup", {}, "prompt-lookup"),
        ("prompt-lookup:x", {}, "source is on, .*got 'x'"),
        ("prompt-lookup", {"max_ngrams": 3}, "max_ngrams.*max_ngram"),
        ("draft-model", {}, "draft-model:SOURCE"),
        ("none", {"order": 3}, "no option 'order'.*none"),
    ],
)
def test_what_a_drafter_does_not_take_is_refused_by_name(spec, options, message):
    with pytest.raises(ConfigurationError, match=message):
        drafters.create(spec, options)
