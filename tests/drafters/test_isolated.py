"""What a text of one isolation teaches never shows up in a draft for another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cover import covered
from drafting import request
from helpers import prompts, tiny

from foredraft import RowParameters, Speculator
from foredraft.drafters.isolated import STORES, Isolated
from foredraft.drafters.ngram import NGram
from foredraft.drafters.suffix import Suffix
from foredraft.drafters.suffix_store import SuffixStore
from foredraft.planning.costs import StandIn

LEARNERS: dict[str, dict[str, Any]] = {
    "ngram": {},
    "token-recycling": {},
    "suffix": {"learn": True},
    "several": {"source": [("suffix", {"learn": True}), "token-recycling", "ngram"]},
}
(PROMPT,) = prompts((33,))


def accepted(session, isolation, **options) -> int:
    slot = session.add(PROMPT, RowParameters(24, isolation=isolation, **options))
    found = 0
    while any(row.slot == slot for row in (*session.rows, *session.waiting)):
        found += sum(commit.accepted for commit in session.step() if commit.slot == slot)
    return found


@pytest.mark.parametrize(("name", "shape"), covered(list(LEARNERS), ["chain(4)", "product(3,2,1)"], ways=1))
def test_a_text_helps_rows_of_its_own_isolation_alone(name: str, shape: str):
    speculator = Speculator(tiny(), drafter=name, drafter_options=LEARNERS[name] or None, shape=shape)
    session = speculator.session()
    for isolation in (None, "a", "b"):  # each of them as if nobody had written the text before
        first = accepted(session, isolation)
        assert accepted(session, isolation) > first + 2, "it has learnt nothing, so this tests nothing"
        assert accepted(session, f"not {isolation}") == first
    sampled = accepted(session, "c", do_sample=True), accepted(session, "d", do_sample=True)
    assert sampled[0] == sampled[1]
    speculator.close()


def test_rows_of_one_batch_are_kept_apart():
    """Rows of two users at a time, in one tree."""
    speculator = Speculator(tiny(), drafter="token-recycling", shape="product(3,2,1)")
    session = speculator.session()
    accepted(session, "a")
    alone, together = Speculator(tiny(), drafter="token-recycling", shape="product(3,2,1)").session(), {}
    expected = accepted(alone, "b")
    slots = [session.add(PROMPT, RowParameters(24, isolation=each)) for each in ("a", "b")]
    while session.live:
        for commit in session.step():
            together[commit.slot] = together.get(commit.slot, 0) + commit.accepted
    assert together[slots[1]] == expected < together[slots[0]]
    speculator.close()


@pytest.mark.parametrize("shape", ["chain(2)", "product(2,1)"])
def test_the_rows_of_a_batch_are_drawn_for_from_their_own_models(shape: str):
    """What one user wrote goes on with 2, what the other one wrote with 3."""
    rows = [StandIn(slot, [1, after, 1, after, 1], 100, isolation=str(slot)) for slot, after in enumerate((2, 3))]
    tree = NGram(order=3, siblings="iid").draft(request(rows, depth=2, vocabulary=5, shape=shape, proposal="iid", needs_q=True))
    assert tree.q is not None and tree.q[:, 0].argmax(-1).tolist() == [2, 3]
    torch.testing.assert_close(tree.q[0, 0, [2, 3]], tree.q[1, 0, [3, 2]])


def test_what_was_given_is_for_everybody_and_what_is_learnt_for_its_isolation():
    store = SuffixStore(1000)
    store.add([1, 2, 3, 4, 5, 6])
    drafter = Suffix(source=store, learn=True)
    isolated = drafter._isolated
    assert isolated is not None
    mine = isolated.make()
    mine.add([7, 8, 9])
    assert len(store) == len(isolated.make()) == 1 and len(mine) == 2
    store.add([10, 11, 12])
    assert len(mine) == 2 and len(isolated.make()) == 1
    assert mine.find([2, 3, 4], most=8, least=1, depth=2) is not None


def test_what_is_learnt_counts_where_it_has_taken_the_place_of_what_was_given():
    given = SuffixStore(100)
    given.add(range(90))
    isolated = Suffix(source=given, learn=True)._isolated
    assert isolated is not None
    mine = isolated.make()
    assert isolated.size(mine) == 0
    for first in range(100, 300, 40):
        mine.add(list(range(first, first + 40)))
    assert isolated.size(mine) == mine.size == 82


class Row:
    def __init__(self, isolation):
        self.isolation = isolation


def test_stores_are_bounded():
    stores: Isolated[list[int]] = Isolated(list, len, most=10)
    shared: list[int] = []
    assert stores.of(Row(None), shared) is shared and not stores.stores
    for number in range(STORES + 5):
        stores.of(Row(str(number)), shared)
    assert len(stores.stores) == STORES and "4" not in stores.stores and "5" in stores.stores
    stores.of(Row("5"), shared).extend(range(6))
    stores.of(Row("6"), shared).extend(range(6))
    kept = stores.of(Row("5"), shared)
    assert list(stores.stores) == ["5"] and len(kept) == 6, "the least recently used went, and the others with nothing before it"


def test_no_store_of_a_row_that_lives_is_dropped():
    """Rows take turns, so each would find its own gone; there are more than may be kept."""
    isolated: Isolated[list[int]] = Isolated(list, len, 3)
    rows = [StandIn(slot, [1], 9, isolation=str(slot)) for slot in range(STORES + 5)]
    isolated.keep(rows)
    for number in range(3):
        for row in rows:
            store = isolated.of(row, [])
            assert store == list(range(number)), "it has forgotten what its row has taught it"
            store.append(number)
    isolated.keep(rows[:1])
    isolated.of(rows[0], [])
    assert list(isolated.stores) == ["0"]
