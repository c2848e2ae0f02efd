"""The suffix drafter: automaton and store against brute force, files that survive crashes and other processes, and what is gained."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cover import covered
from drafting import Row, request
from helpers import alone, forked, generate, padded, repetitive, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.prompts import PYTHON
from foredraft import ConfigurationError, Speculator, zoo
from foredraft.drafters import copy_strategies as module
from foredraft.drafters import suffix_files
from foredraft.drafters.copy_strategies import LONGEST, SHORT, CopyStrategies, OwnText
from foredraft.drafters.prompt_lookup import PromptLookup
from foredraft.drafters.suffix import PastTexts, Suffix
from foredraft.drafters.suffix_automaton import ROOT, SuffixAutomaton
from foredraft.drafters.suffix_store import END, SuffixStore
from foredraft.loading import fingerprint
from foredraft.shapes import TreeShape

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)
STEPS = st.lists(st.integers(1, 7), max_size=8)


def ends(text, context) -> list[int]:
    """Where ``context`` ends in ``text``."""
    return [end for end in range(len(context), len(text) + 1) if text[end - len(context) : end] == context]


def read(text, counted, steps=()) -> SuffixAutomaton:
    automaton = SuffixAutomaton(counted)
    for step in (*steps, len(text)):
        automaton.extend(text[automaton.size : automaton.size + step])
    return automaton


def drafted(tree, vocabulary=128) -> list[list[int]]:
    """The chains of ``tree``."""
    assert tree.chain
    tree.check(vocabulary)
    return [[token for token, real in zip(line, keep) if real][1:] for line, keep in zip(tree.tokens.tolist(), _real(tree))]


def _real(tree) -> list[list[bool]]:
    return [[True] * tree.nodes] * tree.rows if tree.valid is None else tree.valid.tolist()


# -- the automaton ------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(text=TEXTS, steps=STEPS, counted=st.integers(1, 6))
def test_every_substring_is_counted(text, steps, counted):
    automaton = read(text, counted, steps)
    seen = {tuple(text[begin:end]) for begin in range(len(text)) for end in range(begin + 1, len(text) + 1)}
    for substring in seen:
        state = ROOT
        for token in substring:
            state = automaton.edges[state][token]
        assert automaton.length[state] >= len(substring)
        if len(substring) <= counted:
            places = ends(text, list(substring))
            assert (automaton.count[state], automaton.recent[state]) == (len(places), places[-1])
    assert len(automaton.edges) <= max(2, 2 * len(text)), "it is the smallest graph"


def naive_match(text, most) -> list[int]:
    """The longest suffix of at most ``most`` tokens that also ends before the end."""
    return next((text[-size:] for size in range(min(most, len(text)), 0, -1) if len(ends(text, text[-size:])) > 1), [])


@settings(deadline=None)
@given(text=TEXTS, steps=STEPS, most=st.integers(1, 6))
def test_the_longest_match(text, steps, most):
    own = OwnText(read(text, most + 1, steps), most)
    assert own.length == len(naive_match(text, most))


def naive_chain(text, most, depth, first=None, recent=float("inf")) -> list[int]:
    context, draft = naive_match(text, first or most), []
    while len(draft) < depth:
        while context and ends(text[:-1], context) == []:
            context = context[1:]
        if not context:
            break
        followed = [(text[end], end) for end in ends(text[:-1], context)]
        latest = followed[-1][0]
        score = {}
        for token, end in followed:  # the end last written is the most recent
            count, _ = score.get(token, (recent * (token == latest) if token == latest else 0, 0))
            score[token] = (count + 1, end)
        token = max(score, key=score.__getitem__)
        draft.append(token)
        context = [*context, token][-most:]
    return draft


WEIGHTS = st.sampled_from([0.0, module.RECENT, float("inf")])


@settings(deadline=None, max_examples=150)
@given(text=TEXTS, steps=STEPS, most=st.integers(1, 6), first=st.integers(1, 6), recent=WEIGHTS, depth=st.integers(1, 8))
def test_a_chain_goes_the_way_that_the_text_went(text, steps, most, first, recent, depth):
    first = min(first, most)
    draft, expected = OwnText(read(text, most + 1, steps), most, first=first, recent=recent).chain(depth)
    assert draft == naive_chain(text, most, depth, first, recent)
    assert 0 <= expected <= len(draft)


@settings(deadline=None)
@given(text=TEXTS, most=st.integers(1, 6))
def test_probabilities_come_from_counts(text, most):
    own = OwnText(read(text, most + 1), most)
    context = naive_match(text, most)
    after = [text[end] for end in ends(text[:-1], context)]
    scale = len(after) + 1 + module.K * len(set(after)) / max(1, len(context))
    wanted = {token: (after.count(token) + (token == after[-1])) / scale for token in after} if context else {}
    found = own.children(own.begin, 0.0)
    assert {token: p for p, token, _ in found} == pytest.approx(wanted)
    recency = [max(place for place, token in enumerate(after) if token == each) for _, each, _ in found]
    assert recency == sorted(recency, reverse=True)
    some = own.children(own.begin, 0.3)
    assert [token for _, token, _ in some] == [token for p, token, _ in found if p >= 0.3]


def test_counting_is_bounded_in_a_text_that_repeats_itself():
    """Its suffix links are as many as the text is long; a token must not walk them all."""

    class Counted(list):
        writes = 0

        def __setitem__(self, index, value):
            Counted.writes += 1
            super().__setitem__(index, value)

    automaton = SuffixAutomaton(20)
    automaton.recent = Counted(automaton.recent)
    automaton.extend([7] * 2000)
    assert 0 < Counted.writes <= 20 * 2000
    assert len(automaton.edges) == 2001


# -- who drafts ---------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(
    text=st.lists(st.integers(0, 2), min_size=3, max_size=60),
    prompt=st.integers(1, 30),
    steps=st.lists(st.integers(1, 5), max_size=20),
    most=st.integers(1, 10),
    short=st.integers(1, 5),
    memory=st.sampled_from([0.5, 1.0]),
)
def test_copy_strategies_and_their_records(text, prompt, steps, most, short, memory):
    """Both strategies propose what brute force proposes, and every token tests what they would have proposed."""
    strategies, short = CopyStrategies(most, short, memory), min(short, most)
    ways = {LONGEST: (most, float("inf")), SHORT: (short, module.RECENT)}
    right, known = [0.0, 0.0], min(prompt, len(text))
    strategies.read(text[:known])
    for step in (*steps, len(text)):
        ids = text[:known]
        found = strategies.sources(1)
        said = {LONGEST if each.recent == float("inf") else SHORT: each.chain(4)[0] for each, _ in found}
        assert said == {which: naive_chain(ids, most, 4, *way) for which, way in ways.items() if naive_match(ids, way[0])}
        order = sorted(said, key=lambda which: (-right[which], which))
        assert list(said) == order
        shares = [module.BRANCH * (right[which] + 1) / (right[order[0]] + 1) for which in order]
        assert [trust for _, trust in found] == pytest.approx([1.0, *shares[1:]] if order else [])
        for token in text[known : known + step]:
            guesses = [(naive_chain(text[:known], most, 1, *ways[which]) or [None])[0] for which in (LONGEST, SHORT)]
            if guesses[LONGEST] != guesses[SHORT]:
                right = [memory * share + (guess == token) for share, guess in zip(right, guesses)]
            known += 1
        strategies.read(text[:known])
        assert strategies.right == pytest.approx(right)
        if known == len(text):
            break


class Topic:
    """A question of six tokens that was answered in one way when it was asked, and in another way since, behind its last four tokens."""

    def __init__(self, number: int):
        begin = 20 * number
        self.question, self.stale, self.later = ([*range(begin + at, begin + at + size)] for at, size in ((0, 6), (6, 4), (10, 4)))

    @property
    def history(self) -> list[int]:
        return [*self.question, *self.stale, 119, *self.question[2:], *self.later, 119, *self.question[2:], *self.later, 119]


TOPICS = [Topic(number) for number in range(5)]


def asked(drafter, row, topic, answer=()) -> list[int]:
    """What is drafted behind the question of ``topic``; then ``row`` goes on with ``answer``."""
    row.ids += [119, *topic.question]
    (draft,) = drafted(drafter.draft(request([row], depth=3)))
    row.ids += answer
    drafter.draft(request([row]))
    return draft


def conversation(slot=0) -> Row:
    return Row([token for topic in TOPICS for token in topic.history], slot=slot)


def test_who_drafts_follows_who_was_right_of_late():
    drafter, row = Suffix(), conversation()
    drafter.begin([row])
    one, two, three, four, five = TOPICS
    assert asked(drafter, row, one, one.later) == one.stale[:3], "without a record it is the longest match"
    assert asked(drafter, row, two, two.stale) == two.later[:3], "which was stale, so the short match drafts"
    assert asked(drafter, row, three, three.stale) == three.stale[:3], "which was wrong later than the longest one"
    assert asked(drafter, row, four, four.later) == four.stale[:3]
    assert asked(drafter, row, five) == five.later[:3], "what was right last counts for more than what was right before"
    fair, row = Suffix(memory=1.0), conversation()
    for topic, answer in ((one, one.later), (two, two.stale), (three, three.stale), (four, four.later)):
        asked(fair, row, topic, answer)
    assert asked(fair, row, five) == five.stale[:3], "two of two"
    alike, row = Suffix(short_match=6), conversation()
    assert asked(alike, row, one, one.later) == one.stale[:3]
    assert asked(alike, row, two) == two.stale[:3], "a short match that is as long has nothing else to say"


def test_the_longest_match_stays_where_it_is_right():
    drafter, row = Suffix(), conversation()
    for topic in TOPICS:
        assert asked(drafter, row, topic, topic.stale) == topic.stale[:3]


def test_records_are_of_one_row():
    drafter, rows = Suffix(learn=True), [conversation(0), conversation(1)]
    one, two, three, *_ = TOPICS
    drafter.begin(rows)
    asked(drafter, rows[0], one, one.later)
    drafter.forget()
    assert asked(drafter, rows[0], two, two.later) == two.later[:3], "what is known of rows that live stays"
    assert asked(drafter, rows[1], two) == two.stale[:3], "it was another row"
    drafter.end(rows[:1])
    drafter.forget()
    rows[0] = conversation(0)
    drafter.begin(rows[:1])
    assert asked(drafter, rows[0], one, one.later) == one.stale[:3], "nothing is left of the row that had its slot"
    drafter.reset()
    rows[0] = conversation(0)
    assert asked(drafter, rows[0], three) == three.stale[:3]


def test_a_tree_begins_with_who_was_right():
    drafter, row = Suffix(), conversation()
    one, two, *_ = TOPICS
    asked(drafter, row, one, one.later)
    asked(drafter, row, two)
    tree = drafter.draft(request([row], shape="product(2,1,1)"))
    assert tree.tokens[0, 1] == two.later[0] and two.stale[0] in tree.tokens[0].tolist(), "and the others branch off"


# -- the store ----------------------------------------------------------------------------------------------------------


def naive_find(sequences, ids, most, least, depth):
    for size in range(min(most, len(ids)), least - 1, -1):
        after = [
            list(sequence[end : end + depth])
            for sequence in reversed(sequences)
            for end in reversed(ends(list(sequence[:-1]), ids[-size:]))
        ]
        if after:
            return size, after
    return None


@settings(deadline=None, max_examples=100)
@given(
    sequences=st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=30), max_size=12),
    ids=TEXTS,
    most=st.integers(1, 9),
    least=st.integers(1, 3),
    depth=st.integers(1, 4),
    at_once=st.booleans(),
)
def test_the_store_finds_what_a_search_finds(sequences, ids, most, least, depth, at_once):
    store = SuffixStore(10_000)
    if at_once:
        store.fill([np.array(each, np.uint32) for each in sequences])
    else:
        for each in sequences:
            store.add(each)
    kept = [list(each) for each in dict.fromkeys(map(tuple, sequences))]
    assert [each.tolist() for each in store.sequences()] == kept and len(store) == len(kept)
    found = store.find(ids, most=max(most, least), least=least, depth=depth, samples=10_000)
    wanted = naive_find(kept, ids, max(most, least), least, depth)
    got = found and (found.length, [line[: line.index(END)] if END in line else line for line in found.after])
    assert got == wanted


@settings(deadline=None)
@given(lengths=st.lists(st.integers(2, 60), min_size=1, max_size=30), capacity=st.integers(40, 200), seed=st.integers(0, 99))
def test_the_oldest_are_evicted(lengths, capacity, seed):
    random = np.random.default_rng(seed)
    store, given_ = SuffixStore(capacity), []
    for length in lengths:
        given_.append(random.integers(0, 50, length).tolist())
        store.add(given_[-1])
        held = [each.tolist() for each in store.sequences()]
        assert store.size == sum(len(each) + 1 for each in held) <= capacity
        wanted = [each[-(capacity - 1) :] for each in given_]
        assert held == wanted[-len(held) :] and held[-1] == wanted[-1], "the latest are kept"
        ids = wanted[-1][:5]
        found = store.find(ids, most=8, least=1, depth=3, samples=10_000)
        expected = naive_find(held, ids, 8, 1, 3)
        got = found and (found.length, [line[: line.index(END)] if END in line else line for line in found.after])
        assert got == expected


def test_memory_stays_bounded_over_many_tokens():
    random = np.random.default_rng(0)
    drafter = Suffix(learn=True, capacity=60_000)
    store = drafter.store
    tokens, most_segments = 0, 0
    while tokens < 400_000:
        row = Row(random.integers(0, 4000, 5000).tolist(), slot=tokens, prompt_length=1000)
        drafter.begin([row])
        drafter.end([row])
        tokens += len(row.ids)
        held = sum(len(segment.text) for segment in store._segments)
        assert store.size <= 60_000 and held <= store.size + len(store._segments)
        assert sum(len(segment.order) for segment in store._segments) <= store.size
        most_segments = max(most_segments, len(store._segments))
    assert len(store._known) == len(store) == sum(1 for _ in store.sequences())
    assert most_segments <= 8 and not drafter._texts
    new = Row(row.ids[1500:1510], slot=-1)
    drafter.begin([new])
    assert drafted(drafter.draft(request([new], depth=4, vocabulary=4000)), 4000) == [row.ids[1510:1514]]


def test_many_occurrences_are_sampled():
    store = SuffixStore(10_000)
    store.add([1, 2] * 1000 + [1, 3] * 1000)
    found = store.find([9, 1], most=8, least=1, depth=1, samples=50)
    after = [line[0] for line in found.after]
    assert 40 <= len(after) <= 50 and 15 <= after.count(2) <= 35 and set(after) == {2, 3}


# -- drafts -------------------------------------------------------------------------------------------------------------


def test_rows_come_and_go():
    drafter = Suffix(max_match=2)
    rows = [Row([1, 2, 3, 1, 2], slot=0), Row([5, 6, 7], slot=1), Row([4, 4, 4, 4], slot=2)]
    drafter.begin(rows)
    assert drafted(drafter.draft(request(rows))) == [[3, 1, 2, 3, 1], [], [4] * 5]
    assert drafted(drafter.draft(request(rows, limits=[2, 1, 0]))) == [[3, 1], [], []]
    drafter.end(rows[:1])
    rows[1].ids += [5, 6]
    assert drafted(drafter.draft(request(rows[1:]))) == [[7, 5, 6, 7, 5], [4] * 5]
    drafter.reset()
    assert drafted(drafter.draft(request([Row([8, 8], slot=1)]))) == [[8] * 5], "a row that it was not told of is read at once"


def test_a_tree_holds_what_is_likely():
    text = [1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 4, 8, 1, 2]
    row = Row(text)
    tree = Suffix().draft(request([row], shape="product(2,2,1)"))
    tree.check(128)
    paths = {()}
    for node in range(1, tree.nodes):
        path, at = [], node
        while at:
            path.insert(0, int(tree.tokens[0, at]))
            at = int(tree.parents[0, at])
        paths.add(tuple(path))
    assert len(paths) == tree.nodes, "no two nodes say the same"
    assert {(4,), (3,), (4, 8), (4, 9)} <= paths
    assert tree.nodes - 1 <= TreeShape.parse("product(2,2,1)").nodes
    assert tree.tokens[0, 1] == 4, "the most frequent and most recent first"
    few = Suffix(min_probability=0.4).draft(request([row], shape="product(2,2,1)"))
    assert few.tokens[0].tolist()[:2] == [2, 4] and few.nodes < tree.nodes
    assert Suffix(factor=0, offset=2).draft(request([row], shape="product(2,2,1)")).nodes == 3
    shallow = Suffix(factor=0, offset=2).draft(request([row], shape="product(2,2,1)", limits=[1]))
    assert shallow.tokens[0].tolist() == [2, 4, 3], "no node is spent where there is no room"
    pruned = Suffix().draft(request([row], shape="opt(total=6,depth=3,delta=0,floor=0.4)"))
    assert pruned.nodes == few.nodes


@settings(deadline=None)
@given(ids=TEXTS, depth=st.integers(1, 6))
def test_a_tree_begins_with_what_a_chain_would_be(ids, depth):
    drafter, row = Suffix(), Row(list(ids))
    (chain,) = drafted(drafter.draft(request([row], depth=depth)))
    tree = drafter.draft(request([row], shape=f"opt(total=12,depth={depth},delta=0)"))
    assert tree.tokens[0, 1 : 1 + len(chain)].tolist() == chain
    assert tree.parents[0, 1 : 1 + len(chain)].tolist() == list(range(len(chain)))


def test_a_budget_bounds_a_chain():
    drafter, row = Suffix(factor=1, offset=1, max_match=3), Row([1, 2, 3, 4, 5, 6, 7, 1, 2])
    assert drafted(drafter.draft(request([row], depth=9))) == [[3, 4, 5]]
    assert drafted(Suffix(min_match=3).draft(request([row]))) == [[]]


@settings(deadline=None)
@given(rows=st.lists(TEXTS, min_size=1, max_size=3), past=st.lists(TEXTS, max_size=4), limit=st.integers(0, 4))
def test_trees_are_trees(rows, past, limit):
    drafter = Suffix(min_probability=0.0)
    for each in past:
        drafter.store.add(each)
    live = [Row(list(ids), slot=index) for index, ids in enumerate(rows)]
    drafter.begin(live)
    made = drafter.draft(request(live, shape="dynamic(depth=4,k=3,total=9)", limits=[limit, *[4] * (len(live) - 1)]))
    made.check(128)
    assert made.nodes <= 10 and made.depths.max() <= 4
    valid = made.valid[0] if made.valid is not None else np.ones(made.nodes, bool)
    assert all(depth <= limit for depth, real in zip(made.depths[0].tolist(), valid) if real)
    for line in range(len(live)):
        named = [
            (int(parent), int(token))
            for node, (parent, token) in enumerate(zip(made.parents[line], made.tokens[line]))
            if node and (made.valid is None or made.valid[line, node])
        ]
        assert len(named) == len(set(named)), "no siblings are alike"


def test_the_source_that_promises_more_is_followed():
    drafter = Suffix()
    drafter.store.add([1, 2, 3, 4, 5, 6, 7, 8])
    weak = Row([9, 5, 77, 50, 1, 2, 3, 4, 5])  # one token of its own text, five of the past
    assert drafted(drafter.draft(request([weak], depth=3))) == [[6, 7, 8]]
    strong = Row([1, 2, 3, 4, 99, 98, 97, 1, 2, 3, 4], slot=1)
    assert drafted(drafter.draft(request([strong], depth=3))) == [[99, 98, 97]]
    both = drafter.draft(request([strong], shape="product(2,1,1)"))
    assert {99, 5} <= set(both.tokens[0].tolist())


def test_past_texts_go_the_way_of_most():
    past = PastTexts(2, [[5, 1, END], [6, 2, 2], [6, 3, 3], [6, 3, 3], [6, 3, END]])
    assert past.chain(3)[0] == [6, 3, 3]
    assert past.chain(9)[0] == [6, 3, 3], "nothing is known behind"
    assert [token for _, token, _ in past.children(past.begin, 0.0)] == [5, 6], "the latest first"


def test_what_rows_said_is_learned():
    model, rows = tiny(), repetitive((30, 12))
    speculator = Speculator(model, drafter=Suffix(learn=True), draft_length=5)
    options = {**padded(rows), "max_new_tokens": 20, "pad_token_id": 0}
    first, second = speculator.generate(**options), speculator.generate(**options)
    assert first.sequences.tolist() == second.sequences.tolist()
    assert second.stats.accepted == second.stats.drafted > first.stats.accepted, "the same prompt is answered alike"
    assert second.stats.target_passes < first.stats.target_passes and len(speculator.drafter.store) == 2
    deaf = Speculator(model, drafter="suffix", draft_length=5)
    deaf.generate(**options)
    assert len(deaf.drafter.store) == 0


@pytest.mark.parametrize(
    ("family", "shape"),
    covered(["llama", "gemma3_text", "gpt2"], ["chain(6)", "product(3,2,1,1)", "dynamic(depth=6,k=3,total=12)"], ways=1),
)
def test_texts_are_those_of_the_target(family, shape):
    """Greedy as transformers does it, sampled as plain decoding does it, in ragged batches, from the own text and from past ones."""
    model, rows = tiny(family), repetitive()
    plain = Speculator(model, drafter="none")
    speculator = Speculator(model, drafter=Suffix(learn=True), shape=shape)
    sampled = {"do_sample": True, "temperature": 0.9, "top_p": 0.9, "max_new_tokens": 18}
    accepted, greedy = 0, [alone(model, row, max_new_tokens=18) for row in rows]
    expected = {seed: [generate(plain, [row], seed=[(seed, index)], **sampled)[0] for index, row in enumerate(rows)] for seed in (0, 7)}
    for seed in (0, 0, 7):  # the second time it knows the text
        assert generate(speculator, rows, seed=seed, **sampled) == expected[seed]
        out = speculator.generate(**padded(rows), max_new_tokens=18, pad_token_id=0)
        assert [row[-18:] for row in out.sequences.tolist()] == greedy
        accepted += out.stats.accepted
    assert accepted > 0


def copied(drafter, text, begin, length) -> float:
    """Acceptance length of chains of ``length`` where ``text`` from ``begin`` on is what the target says."""
    row, rounds = Row(list(text[:begin])), 0
    order = replace(request([Row([1])], depth=length, vocabulary=5000), rows=[row])
    drafter.begin([row])
    while len(row.ids) < len(text):
        (draft,) = drafted(drafter.draft(order), 5000)
        kept = 0
        rest = text[len(row.ids) :]
        while kept < min(len(draft), len(rest) - 1) and draft[kept] == rest[kept]:
            kept += 1
        row.ids += rest[: kept + 1]
        rounds += 1
    drafter.end([row])
    return (len(text) - begin) / rounds


def test_at_least_what_prompt_lookup_accepts_and_more_in_edits():
    tokenizer = zoo.load_tokenizer("python-8m")
    source = "".join(PYTHON)
    lines = source.splitlines(keepends=True)
    edited = "".join(line.replace("self", "this") for index, line in enumerate(lines) if index % 17)
    prompt = tokenizer.encode(source)
    edit = prompt + tokenizer.encode(edited)
    for text, begin, more in ((edit, len(prompt), True), (prompt, len(prompt) // 3, False)):
        best = max(copied(PromptLookup(max_ngram=size), text, begin, 10) for size in (2, 3, 5, 10))
        suffix = copied(Suffix(), text, begin, 10)
        assert suffix > best if more else suffix >= 0.995 * best


# -- files --------------------------------------------------------------------------------------------------------------


def stored(*sequences, **options) -> SuffixStore:
    store = SuffixStore(**options)
    for each in sequences:
        store.add(each)
    return store


def held(path) -> list[list[int]]:
    return [each.tolist() for each in suffix_files.read(path).sequences]


def test_a_store_is_saved_and_loaded(tmp_path):
    model, rows, path = tiny(), repetitive((30, 12)), tmp_path / "past.safetensors"
    drafter = Suffix(learn=True)
    text = generate(Speculator(model, drafter=drafter), rows, max_new_tokens=15)
    drafter.save(path)
    loaded = Speculator(model, drafter=f"suffix:{path}", draft_length=4)
    assert held(path) == [each.tolist() for each in loaded.drafter.store.sequences()] and len(loaded.drafter.store) == 2
    out = loaded.generate(**padded(rows), max_new_tokens=15, pad_token_id=0)
    assert [row[-15:] for row in out.sequences.tolist()] == text
    assert out.stats.accepted == out.stats.drafted > 0
    small = Suffix(source=path, capacity=50)
    assert held(path)[-1:] == [each.tolist() for each in small.store.sequences()], "the latest that there is room for"
    length = len(held(path)[-1])
    with pytest.raises(ConfigurationError, match=rf"has {length} tokens and the store room for {length}; pass capacity={2 * length}"):
        Suffix(source=path, capacity=length)
    assert len(Suffix(source=path, capacity=length + 1).store) == 1


def test_saving_keeps_what_others_saved(tmp_path):
    path = tmp_path / "past.safetensors"
    stored([1, 2, 3], [4, 5, 6]).save(path)
    stored([7, 8, 9], [1, 2, 3]).save(path)
    assert held(path) == [[4, 5, 6], [7, 8, 9], [1, 2, 3]]
    stored([3, 3, 3], capacity=10).save(path)
    assert held(path) == [[1, 2, 3], [3, 3, 3]], "the latest, within the capacity of who saves"


def crash(path):
    store = SuffixStore()
    store.add([9] * 1000)
    os.replace = lambda *names: os._exit(9)  # killed when all is written but the name
    store.save(path)


def test_a_crash_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "past.safetensors"
    stored([1, 2, 3]).save(path)
    before = path.read_bytes()

    def fail(*_):
        raise OSError("the disk is full")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as broken:
            broken.setattr(os, name, fail)
            with pytest.raises(OSError, match="disk is full"):
                stored([4, 5, 6]).save(path)
        assert path.read_bytes() == before
        assert not list(tmp_path.glob(".*.tmp"))
    crashing = forked(crash, path)
    crashing.join()
    assert crashing.exitcode == 9
    assert path.read_bytes() == before and len(list(tmp_path.glob(".*.tmp"))) == 1
    stored([4, 5, 6]).save(path)  # the lock was given back
    assert held(path) == [[1, 2, 3], [4, 5, 6]]
    assert not list(tmp_path.glob(".*.tmp")), "what the killed one left is cleared away"


def write(path, number):
    for turn in range(25):
        store = SuffixStore()
        store.add([number, turn, 5] * 40)
        store.save(path)


def test_two_processes_lose_nothing(tmp_path):
    path = tmp_path / "past.safetensors"
    writers = [forked(write, path, number) for number in range(3)]
    assert [(writer.join(), writer.exitcode)[1] for writer in writers] == [0, 0, 0]
    assert sorted(each[:2] for each in held(path)) == [[number, turn] for number in range(3) for turn in range(25)]


def test_a_store_for_another_vocabulary_is_refused(tmp_path):
    path = tmp_path / "past.safetensors"
    stored([1, 2, 3], vocab_size=77).save(path)
    with pytest.raises(ConfigurationError, match="77 tokens, the target has 128"):
        Speculator(tiny(), drafter=f"suffix:{path}")
    with pytest.raises(ConfigurationError, match="token 300"):
        Speculator(tiny(), drafter=Suffix(source=stored([1, 2, 300])))
    with pytest.raises(ConfigurationError, match=r"vocabulary of 77 tokens.*another file"):
        stored([1, 2, 3], vocab_size=128).save(path)
    drafter = Suffix(learn=True)
    Speculator(tiny(), drafter=drafter)
    drafter.save(tmp_path / "own.safetensors")
    assert suffix_files.read(tmp_path / "own.safetensors").vocab_size == 128


def test_a_store_made_with_another_tokenizer_is_refused(tmp_path):
    one, path = zoo.load_tokenizer("python-8m"), tmp_path / "past.safetensors"

    class Other:
        def get_vocab(self):
            return {token: (number + 1) % len(one) for token, number in one.get_vocab().items()}

        def encode(self, text):
            return [1, 2, 3]

    text = tmp_path / "text.py"
    text.write_text(PYTHON[0], encoding="utf-8")
    Suffix(source=text, tokenizer=one).save(path)
    assert Suffix(source=path, tokenizer=one).store.size > 0
    assert Suffix(source=path).store.tokenizer == fingerprint(one)
    with pytest.raises(ConfigurationError, match="another tokenizer"):
        Suffix(source=path, tokenizer=Other())
    with pytest.raises(ConfigurationError, match=r"another tokenizer.*another file"):
        Suffix(source=text, tokenizer=Other()).save(path)
    resized = stored([1, 2, 3], vocab_size=77, tokenizer=fingerprint(one))
    Suffix(source=resized, tokenizer=one).bind(tiny_target())  # known to be the same, so the size of the head does not matter


def tiny_target():
    return Speculator(tiny(), drafter="none").target


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.write_bytes(b"no store"), "not a safetensors file"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"foredraft-suffix-store", b"foredraft-suffix-stove")), "not written by"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b'"version":"1"', b'"version":"9"')), "format version 9"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "is not a store"),
        (lambda path: path.unlink(), "no store of past texts at"),
    ],
)
def test_what_is_no_store(tmp_path, change, message):
    path = tmp_path / "past.safetensors"
    stored([1, 2, 3]).save(path)
    change(path)
    with pytest.raises(ConfigurationError, match=message):
        Suffix(source=path)


def test_lengths_that_do_not_add_up(tmp_path):
    from safetensors.numpy import save_file

    path = tmp_path / "past.safetensors"
    metadata = {"format": suffix_files.FILE.format, "version": suffix_files.FILE.version}
    save_file({"tokens": np.arange(5, dtype=np.uint32), "lengths": np.array([3, 3])}, str(path), metadata)
    with pytest.raises(ConfigurationError, match="damaged"):
        Suffix(source=path)


def test_a_text_as_the_source(tmp_path):
    tokenizer = zoo.load_tokenizer("python-8m")
    text = tmp_path / "text.py"
    text.write_text("for i in range(10):\n    print(i)\n" * 3, encoding="utf-8")
    for given_tokenizer in (tokenizer, tokenizer.encode):
        drafter = Suffix(source=text, tokenizer=given_tokenizer)
        row = Row(tokenizer.encode("for i in range("))
        (draft,) = drafted(drafter.draft(request([row], depth=4, vocabulary=5000)), 5000)
        assert tokenizer.decode(row.ids + draft).startswith("for i in range(10):")
    with pytest.raises(ConfigurationError, match="tokenizer"):
        Suffix(source=text)
    with pytest.raises(ConfigurationError, match="capacity="):
        Suffix(source=text, tokenizer=tokenizer, capacity=10)
    with pytest.raises(ConfigurationError, match="there is no file"):
        Suffix(source=Path("nowhere.py"), tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_match": 0}, "min_match"),
        ({"min_match": 5, "max_match": 4}, "min_match"),
        ({"max_match": 1000}, "max_match <= 64"),
        ({"short_match": 0}, "short_match"),
        ({"short_match": 65}, "short_match"),
        ({"memory": 0}, "memory"),
        ({"memory": 1.1}, "memory"),
        ({"factor": -1}, "factor"),
        ({"factor": 0, "offset": 0.5}, "one must be positive"),
        ({"min_probability": 1}, "min_probability"),
        ({"min_probability": -0.1}, "min_probability"),
        ({"capacity": 0}, "capacity"),
        ({"capacity": 2**40}, "capacity"),
        ({"capacity": 9, "source": SuffixStore()}, "leave capacity out"),
    ],
)
def test_options(options, message):
    with pytest.raises(ConfigurationError, match=message):
        Suffix(**options)


def test_a_text_that_is_set_aside_is_stored_when_it_is_over():
    drafter = Suffix(learn=True)
    row = Row([1, 2, 3, 4], slot=0, prompt_length=1)
    for reason in (None, "eos"):
        row.stats = SimpleNamespace(finish_reason=reason)  # type: ignore[attr-defined]
        drafter.end([row])
        assert bool(len(drafter.store)) == (reason is not None)
