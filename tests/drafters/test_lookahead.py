"""Lookahead against a slow reference, place by place; its window where it ends, stands still, and in the planner's accounts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, build
from cover import covered
from helpers import alone, generate, padded, plainly, prompts, repetitive, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft import ConfigurationError, RowParameters, Session, Speculator
from foredraft.drafters.base import DraftRequest, Feedback, Row
from foredraft.drafters.lookahead import Lookahead, Pool
from foredraft.planning import AUTO, CostModel, FixedPlanner
from foredraft.planning.forecasts import Forecaster
from foredraft.planning.largest import largest_shape
from foredraft.shapes import TreeShape
from foredraft.testing import ProbabilityTable, TableTarget, read
from foredraft.tree import TokenTree
from foredraft.verification.match import Match

SHAPE = "opt(total=12,depth=4,k=4)"
Text = tuple[int, ...]


class ScoringTarget(TableTarget):
    """Filler is scored like everything else."""

    def score(self, tree: TokenTree, *, first: int = 0) -> torch.Tensor:
        self.passes += 1
        self._tree = tree
        return read(self.table, self.cached, replace(tree, valid=None))[:, first:]


class Watched(Lookahead):
    """Keeps the trees that it drafted: per round and slot the texts that were proposed, and those of the window."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.rounds: list[dict[int, tuple[set[Text], list[Text]]]] = []
        self.trees: list[TokenTree] = []
        self.lengths: list[list[int]] = []

    def draft(self, request: DraftRequest) -> TokenTree:
        tree = super().draft(request)
        tree.check(request.vocab_size)
        self.trees.append(tree)
        self.lengths.append([len(row.ids) for row in request.rows])
        seen = {}
        for index, row in enumerate(request.rows):
            texts = [tuple(tree.tokens[index, tree.path(index, node)].tolist()) for node in range(tree.nodes)]
            real = [True] * tree.nodes if tree.valid is None else tree.valid[index].tolist()
            proposed = {text for text, kept in zip(texts[1:], real[1:]) if kept}
            first = tree.nodes - tree.extra
            ends = 1 + max((end for ends in self._places[index : index + 1] for end in ends), default=0)
            seen[row.slot] = proposed, texts[first : max(ends, first)]
        self.rounds.append(seen)
        return tree


@dataclass
class Reference:
    """Lookahead of one row, written down place by place: ``guess[level, column]`` is the token for the place ``column + level``."""

    table: ProbabilityTable
    ids: list[int]
    window: int
    ngram: int
    guesses: int
    shift: str
    text: bool
    capacity: int
    prompt_length: int = 0
    random: random.Random = field(default_factory=lambda: random.Random(0))
    guess: dict[tuple[int, int], int] = field(default_factory=dict)
    age: dict[int, int] = field(default_factory=dict)
    pool: list[Text] = field(default_factory=list)  # the most recent last

    def __post_init__(self) -> None:
        self.prompt_length = len(self.ids)
        self.at = len(self.ids)  # length of the text that the window stands at
        self.read = 0

    def remember(self, gram: Text) -> None:
        self.pool = [each for each in self.pool if each != gram] + [gram]
        alike = [each for each in self.pool if each[0] == gram[0]]
        if len(alike) > self.guesses:
            self.pool.remove(alike[0])

    def proposals(self, depth: int, nodes: int) -> set[Text]:
        if self.text:
            while self.read + self.ngram <= len(self.ids):
                self.remember(tuple(self.ids[self.read : self.read + self.ngram]))
                self.read += 1
        found: list[Text] = []
        for gram in reversed([each for each in self.pool if each[0] == self.ids[-1]]):
            for length in range(2, 2 + min(depth, self.ngram - 1)):
                if gram[:length] not in found and len(found) < nodes:
                    found.append(gram[:length])
                elif gram[:length] not in found:
                    return set(found)
        return set(found)

    def lay(self) -> list[Text]:
        """Move to the end of the text; the texts of the window's nodes behind the root, in order."""
        levels, moved = self.ngram - 1, len(self.ids) - self.at if self.shift == "align" else 0
        self.guess = {(level, column - moved): token for (level, column), token in self.guess.items() if column >= moved}
        self.age = {column - moved: age for column, age in self.age.items() if column >= moved}
        room = self.capacity - 1 - (len(self.ids) - 1) - (self.ngram - 2)  # places behind the root that column 0 may leave to others
        self.width = max(0, min(self.window, 1 + room))
        for column in range(self.width):
            if column not in self.age:
                for level in range(levels):
                    self.guess[level, column] = self.ids[self.random.randrange(self.prompt_length)]
                self.age[column] = 0
        self.guess = {place: token for place, token in self.guess.items() if place[1] < self.width}
        self.age = {column: age for column, age in self.age.items() if column < self.width}
        self.at = len(self.ids)
        first = [self.beginning(column) for column in range(1, self.width)]
        return first + [self.along(column, level) for column in range(self.width) for level in range(1, levels)]

    def beginning(self, column: int) -> Text:
        return (self.ids[-1], *(self.guess[0, each] for each in range(1, column + 1)))

    def along(self, column: int, level: int) -> Text:
        return self.beginning(column) + tuple(self.guess[each, column] for each in range(1, level + 1))

    def iterate(self, before: Sequence[int]) -> None:
        """After a pass behind the text ``before``."""
        levels, said = self.ngram - 1, {}
        for column in range(self.width):
            text = [*before[:-1], *self.along_from(before[-1], column, levels - 1)]
            said[column] = int(self.table(text).argmax())
            if self.age[column] >= self.ngram - 2:
                key = before[-1] if column == 0 else self.guess[0, column]
                self.remember((key, *(self.guess[level, column] for level in range(1, levels)), said[column]))
        for column in range(self.width):
            for level in range(levels - 1):
                self.guess[level, column] = self.guess[level + 1, column]
            self.guess[levels - 1, column] = said[column]
            self.age[column] += 1
        self.at += 1

    def along_from(self, root: int, column: int, level: int) -> Text:
        return (root, *(self.guess[0, each] for each in range(1, column + 1)), *(self.guess[each, column] for each in range(1, level + 1)))


SETTINGS = [(5, 4, 5, "stay", True), (5, 4, 5, "align", True), (3, 3, 2, "align", False), (4, 2, 3, "stay", False), (1, 3, 2, "stay", True)]


@pytest.mark.parametrize(("window", "ngram", "guesses", "shift", "text"), SETTINGS)
def test_every_round_against_the_reference(window, ngram, guesses, shift, text):
    """Two rows of different lengths, one of which joins late: what is proposed, the window's nodes and what the pool remembers."""
    table = ProbabilityTable.random(7, seed=3, order=2)
    drafter = Watched(window=window, ngram=ngram, guesses=guesses, shift=shift, text=text)
    target = ScoringTarget(table)
    drafter.bind(target)
    session = Session(target, drafter, Match(), proposal="deterministic", planner=FixedPlanner(SHAPE))
    given = [([1, 2, 3, 4, 5], 40), ([6, 5, 1], 23)]
    references: dict[int, Reference] = {}
    for step in range(100):
        if step in (0, 3):
            prompt, count = given[step // 3]
            slot = session.add(prompt, RowParameters(max_new_tokens=count))
            references[slot] = Reference(table, list(prompt), window, ngram, guesses, shift, text, len(prompt) + count)
        if not session.live:
            break
        waiting, drafts = bool(session.waiting), len(drafter.rounds)
        live = {row.slot: list(row.ids) for row in session.rows}
        commits = {commit.slot: commit for commit in session.step()}
        if len(drafter.rounds) > drafts:
            for slot, (proposed, nodes) in drafter.rounds[-1].items():
                reference = references[slot]
                assert reference.ids == live[slot]
                limit = min(4, reference.capacity - len(reference.ids) - 1)
                assert proposed == reference.proposals(limit, 12), step
                if limit < 1:
                    assert not nodes
                    continue
                assert nodes == reference.lay(), step
                reference.iterate(reference.ids)
        assert waiting or len(drafter.rounds) > drafts or all(len(live[s]) + 1 >= references[s].capacity for s in live)
        for slot, commit in commits.items():
            references[slot].ids += commit.tokens
            if slot in drafter._rows:
                held = {(key, *rest) for key, grams in drafter._rows[slot].pool.grams.items() for rest in grams}
                assert held == set(references[slot].pool) or text  # the text is read with the next draft
    assert session.stats.accepted > 5 and session.stats.new_tokens == 63
    assert len(drafter.rounds) > 10


@settings(deadline=None)
@given(
    grams=st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), max_size=12),
    guesses=st.integers(1, 4),
    asked=st.integers(1, 4),
    depth=st.integers(0, 4),
    nodes=st.integers(0, 8),
)
def test_a_pool_holds_the_latest_and_shares_beginnings(grams, guesses, asked, depth, nodes):
    pool, held = Pool(4, guesses), list[Text]()
    for gram in map(tuple, grams):
        pool.add(gram[0], gram[1:])
        held = [each for each in held if each != gram] + [gram]
        alike = [each for each in held if each[0] == gram[0]]
        held = [each for each in held if each not in alike[:-guesses]]
    trie = pool.trie(1, asked, depth, nodes)
    expected: list[Text] = []
    for gram in [each for each in reversed(held) if each[0] == 1][:asked]:
        expected += [gram[1 : 1 + length] for length in range(1, min(depth, 3) + 1) if gram[1 : 1 + length] not in expected]
    found: list[Text] = [()]
    for token, parent in zip(trie.tokens, trie.parents):
        found.append((*found[parent], token))
    assert found[1:] == expected[:nodes]


def test_the_text_is_read_once_as_it_grows():
    pool, ids = Pool(3, 2), [1, 2]
    pool.read(ids)
    assert pool.grams == {}
    ids += [3, 1, 2, 4]
    pool.read(ids)
    assert {key: list(grams) for key, grams in pool.grams.items()} == {1: [(2, 3), (2, 4)], 2: [(3, 1)], 3: [(1, 2)]}
    ids += [1, 2, 5]
    pool.read(ids)
    assert list(pool.grams[1]) == [(2, 4), (2, 5)] and list(pool.grams[4]) == [(1, 2)]


# -- the text -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "options"),
    covered(
        ["chain(3)", "product(3,2,1)", SHAPE],
        [{}, {"do_sample": True, "temperature": 1.1, "top_p": 0.95, "repetition_penalty": 1.2, "seed": 4}],
        ways=1,
    ),
)
def test_the_text_is_that_of_plain_decoding(shape, options):
    model, rows = tiny("gemma3_text"), repetitive((52, 41, 44, 1))
    expected = plainly(model, rows, max_new_tokens=20, **options)
    for more in ({}, {"text": False, "window": 9, "shift": "align"}):
        speculator = Speculator(model, drafter="lookahead", drafter_options=more, shape=shape)
        assert speculator.rule.name == "match"
        out = speculator.generate(**padded(rows), max_new_tokens=20, pad_token_id=0, **options)
        assert out.sequences[:, 52:].tolist() == expected
        assert out.stats.drafted > out.stats.accepted
        if not options:
            assert expected == [alone(model, row, max_new_tokens=20) for row in rows]


def test_a_window_makes_what_the_text_does_not_hold():
    """A text that counts up, after a prompt that counts down: nothing can be copied, and the window drafts what was never there."""
    table = ProbabilityTable(lambda text: [float(token == text[-1] + 1) * 0.99 + 0.0001 for token in range(100)], 100, order=1)
    lengths = {}
    for name, options in {"window": {}, "none": {"window": 1, "ngram": 2}}.items():
        drafter, target = Lookahead(**options), ScoringTarget(table)
        drafter.bind(target)
        session = Session(target, drafter, Match(), proposal="deterministic", planner=FixedPlanner("chain(3)"))
        session.add([*range(60, 0, -1)], RowParameters(max_new_tokens=60))
        while session.live:
            session.step()
        lengths[name] = session.stats.acceptance_length
    assert lengths["none"] < 1.2 and lengths["window"] > 1.5


def test_a_window_that_is_off_by_one_drafts_worse_and_writes_the_same(monkeypatch):
    """What tells a wrong window from a right one is acceptance, nothing else."""
    from foredraft.drafters import lookahead

    table = ProbabilityTable.random(40, seed=8, order=2, spread=3.0)

    def run() -> tuple[list[int], float]:
        drafter, target = Lookahead(text=False, window=8), ScoringTarget(table)
        drafter.bind(target)
        session = Session(target, drafter, Match(), proposal="deterministic", planner=FixedPlanner(SHAPE))
        session.add([1, 2, 3, 4], RowParameters(max_new_tokens=120, do_sample=True, seed=(1, 2)))
        text: list[int] = []
        while session.live:
            text += session.step()[0].tokens
        return text, session.stats.acceptance_length

    text, length = run()
    right = lookahead.RowState.advance
    monkeypatch.setattr(lookahead.RowState, "advance", lambda self, said: right(self, [*said[1:], said[0]]))
    assert run()[0] == text
    assert run()[1] < length


# -- the window ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"window": 9, "ngram": 3}, {"window": 2, "ngram": 6}])
def test_the_window_ends_where_the_row_does(options):
    drafter, rows = Watched(**options), repetitive((30, 17, 3))
    speculator = Speculator(tiny(), drafter=drafter, shape="chain(2)")
    generate(speculator, rows, max_new_tokens=25)
    ends = sorted(len(row) + 25 for row in rows)
    extras = []
    for tree, lengths in zip(drafter.trees, drafter.lengths):
        first = tree.nodes - tree.extra
        for index, length in enumerate(lengths):
            deepest = int(tree.depths[index, first:].max()) if tree.extra else 0
            assert length - 1 + deepest < max(ends)
            extras.append(tree.extra)
            capacity = next(len(row) + 25 for row in rows if len(row) <= length <= len(row) + 25)
            places = drafter.rounds[drafter.trees.index(tree)]
            assert all(length + len(text) - 1 <= capacity for _, window in list(places.values())[index : index + 1] for text in window)
    assert max(extras) == drafter.info.extra_nodes and min(extras) < drafter.info.extra_nodes


def test_at_the_end_of_the_models_context():
    model = build("gpt2", "sdpa")
    context = model.config.n_positions
    row = prompts((context - 12,))[0]
    expected = plainly(model, [row], max_new_tokens=40)
    drafter = Watched(window=12)
    assert generate(Speculator(model, drafter=drafter, shape="chain(3)"), [row], max_new_tokens=40) == expected
    assert len(expected[0]) == 12 and any(tree.extra for tree in drafter.trees)
    huge = Watched(window=context)
    assert generate(Speculator(model, drafter=huge, shape="chain(3)"), [row], max_new_tokens=40) == expected
    assert not any(tree.extra for tree in huge.trees), "a window that the context cannot hold is left out"


def test_without_a_draft_the_window_stands_still():
    drafter = Lookahead(shift="stay")
    drafter.bind(SimpleNamespace(device=torch.device("cpu"), chains_only=None, trained=None))
    row: Any = SimpleNamespace(slot=4, ids=[1, 2, 3], prompt_length=3, capacity=99)
    drafter.begin([row])
    asked = asking([row])
    tree = drafter.draft(asked)
    columns = [list(column) for column in drafter._rows[4].columns]
    drafter.observe([row], Feedback(tree, [0], None, None))  # nobody said what the target found
    assert drafter._rows[4].columns == columns
    drafter.observe([row], Feedback(TokenTree.root(torch.tensor([3])), [0], None, torch.zeros(1, 1, 9)))
    assert drafter._rows[4].columns == columns
    tree = drafter.draft(asked)
    drafter.observe([row], Feedback(tree, [0], None, torch.eye(9)[[5] * tree.nodes][None]))
    assert [column[:-1] for column in drafter._rows[4].columns] == [column[1:] for column in columns]
    assert [column[-1] for column in drafter._rows[4].columns] == [5] * 5
    assert drafter.draft(asking([row], limit=0)).nodes == 1
    drafter.end([row])
    assert not drafter._rows


def asking(rows: Sequence[Row], limit: int = 3) -> DraftRequest:
    shape = TreeShape.chain(3)
    sampler: Any = None
    return DraftRequest(rows, shape, 3, [limit] * len(rows), "deterministic", False, 9, torch.device("cpu"), sampler)


def test_rows_are_independent_of_their_neighbours():
    """Every row has a generator of its own, so that what it drafts does not depend on the company it keeps."""
    model, rows = tiny(), repetitive()
    together = Speculator(model, drafter="lookahead", shape=SHAPE)
    state = random.getstate()
    out = together.generate(**padded(rows), max_new_tokens=20, pad_token_id=0)
    assert random.getstate() == state
    for row, stats in zip(rows, out.stats.rows):
        single = Speculator(model, drafter="lookahead", shape=SHAPE).generate(torch.tensor([row]), max_new_tokens=20, pad_token_id=0)
        assert (single.stats.drafted, single.stats.accepted) == (stats.drafted, stats.accepted)


def test_a_target_that_verifies_chains_only():
    name = next(name for name, entry in ARCHITECTURES.items() if entry.support == "chain")
    model, rows = build(name, ARCHITECTURES[name].implementations[0]), repetitive((20, 14))
    expected = plainly(model, rows, max_new_tokens=8)
    speculator = Speculator(model, drafter="lookahead")
    assert speculator.shape.is_chain and speculator.drafter.info.extra_nodes == 0
    assert generate(speculator, rows, max_new_tokens=8) == expected
    assert generate(Speculator(model, drafter="lookahead", draft_length=2), rows, max_new_tokens=8) == expected
    with pytest.raises(ConfigurationError, match="text=False"):
        Speculator(model, drafter="lookahead", drafter_options={"text": False})


def test_beside_another_drafter():
    model, rows = tiny(), repetitive((30, 17))
    expected = plainly(model, rows, max_new_tokens=16)
    speculator = Speculator(model, drafter="several:lookahead,prompt-lookup", shape="product(2,2,1)")
    assert generate(speculator, rows, max_new_tokens=16) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window must be a whole number of at least 1"),
        ({"ngram": 1}, "ngram must be a whole number of at least 2"),
        ({"guesses": 0}, "guesses must be a whole number of at least 1"),
        ({"window": 2.5}, "window"),
        ({"shift": "left"}, "align, stay"),
    ],
)
def test_options_that_make_no_window(options, message):
    with pytest.raises(ConfigurationError, match=message):
        Lookahead(**options)


# -- what others see of the window --------------------------------------------------------------------------------------


def test_extra_nodes_are_no_part_of_a_verdict():
    """Neither their scores nor their tokens matter to anybody but the drafter."""

    class Odd(Lookahead):
        def draft(self, request: DraftRequest) -> TokenTree:
            tree = super().draft(request)
            tokens = tree.tokens.clone()
            if tree.extra:
                tokens[:, -1] = 10**6
            return replace(tree, tokens=tokens)

    class Broken(ScoringTarget):
        def score(self, tree: TokenTree, *, first: int = 0) -> torch.Tensor:
            logits = super().score(replace(tree, tokens=tree.tokens.clamp(max=6)))
            logits[:, tree.nodes - tree.extra :] = float("nan")
            return logits

    table = ProbabilityTable.random(7, seed=3, order=2)
    texts = []
    for target, drafter in ((Broken(table), Odd()), (ScoringTarget(table), Lookahead())):
        drafter.bind(target)
        for sampled in (False, True):
            session = Session(target, drafter, Match(), proposal="deterministic", planner=FixedPlanner(SHAPE))
            session.add([1, 2, 3], RowParameters(max_new_tokens=20, do_sample=sampled, seed=(3, 4)))
            texts.append([token for _ in range(30) if session.live for commit in session.step() for token in commit.tokens])
    assert texts[:2] == texts[2:] and all(len(text) == 20 for text in texts)


def test_a_tree_without_its_extra_nodes():
    parents = torch.tensor([[-1, 0, 0, 0, 3]])
    tree = TokenTree(torch.arange(5)[None], parents, torch.tensor([[True, True, False, False, False]]), extra=2)
    tree.check(9)
    assert tree.proposed.tokens.tolist() == [[0, 1, 2]] and tree.proposed.extra == 0
    assert tree.proposed.valid.tolist() == [[True, True, False]]
    assert tree.truncate([1]) is tree and tree.truncate([0]).drafted.tolist() == [0] and tree.truncate([0]).extra == 2
    whole = TokenTree(torch.arange(5)[None], parents)
    assert whole.proposed is whole
    for wrong in (replace(tree, extra=5), replace(tree, extra=-1), replace(whole, extra=1), replace(tree, chain=True)):
        with pytest.raises(ValueError, match="extra must say"):
            wrong.check_shapes(9)


def test_the_planner_is_told_of_every_node_that_was_scored():
    class Planner(FixedPlanner):
        learns = True

        def observe(self, rows, done):
            rounds.append(done)

    rounds: list[Any] = []
    drafter, target = Lookahead(), ScoringTarget(ProbabilityTable.random(7, seed=3, order=2))
    drafter.bind(target)
    session = Session(target, drafter, Match(), proposal="deterministic", planner=Planner(TreeShape.chain(3)))
    session.add([1, 2, 3], RowParameters(max_new_tokens=40))
    while session.live:
        session.step()
    assert drafter.info.extra_nodes == 14
    assert [done.nodes for done in rounds[:-8]] == [15 + sum(done.drafted[0]) for done in rounds[:-8]]
    assert all(len(done.drafted[0]) <= 3 for done in rounds)


def test_a_forecast_pays_for_the_window():
    largest = largest_shape(branches=True)
    rows: list[Any] = [SimpleNamespace(slot=0, ids=[1] * 20, prompt_length=20, capacity=200)]
    costs = CostModel()
    plain, with_window = (Forecaster(largest, costs, catches_up=False) for _ in range(2))
    plain.begin(own=True, catches_up=False)
    with_window.begin(own=True, catches_up=False, filler=14)
    ours, theirs = (each.compare(1, context=20) for each in (with_window, plain))
    assert ours[0].seconds == theirs[0].seconds, "zero drafting has no window"
    assert ours[1].seconds == pytest.approx(costs.verify(1, (16,), 20)[0] + costs.draft_seconds(1, (1,)))
    assert ours[1].seconds > theirs[1].seconds
    assert not with_window.own and plain.own
    assert with_window.forecast(rows, greedy=True, together=True).plain.seconds == theirs[0].seconds


def test_the_planner_measures_passes_with_a_window():
    speculator = Speculator(tiny(), drafter="lookahead", shape=AUTO)
    generate(speculator, repetitive((20,)), max_new_tokens=12)
    assert max(speculator.planner.costs.target.points[1]) == speculator.shape.nodes + 1 + speculator.drafter.info.extra_nodes
