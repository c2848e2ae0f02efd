"""Stop strings: never shown, found by the text alone."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from foredraft.serving.stops import StopStrings

LETTERS = st.text("ab", max_size=12)


def reference(text: str, stops: list[str]) -> str:
    """Letter by letter, with nothing held back: the text before the first stop string that is complete."""
    for end in range(len(text) + 1):
        found = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: min(found)]
    return text


@given(LETTERS, st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.lists(st.integers(0, 12), max_size=6))
def test_pieces_add_up_to_the_text_before_the_first_stop(text: str, stops: list[str], cuts: list[int]):
    looking, shown = StopStrings(stops), ""
    places = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    for begin, end in pairwise(places):
        shown += looking.feed(text[begin:end])
        assert reference(text, stops).startswith(shown)
    if looking.hit is None:
        shown += looking.flush()
    assert shown == reference(text, stops)
    assert (looking.hit is None) == (not any(stop in text for stop in stops))
