"""What a row's own text proposes: two ways to copy from it, and a record of which one was right of late.

The earlier place that a text continues like is a guess. In edited code the longest match is the better guess. In a conversation that
repeats itself the longest match may lie in the question as it was first asked, and the most recent occurrence of a short match is better.

``LONGEST``
    continues as the most recent occurrence of the longest match did.
``SHORT``
    continues as the matches of a few tokens did; the most recent occurrence counts for several.

Every new token tests what both strategies would have proposed there, where they disagree, whether that was verified or not. A
count of right guesses that is forgotten exponentially says which strategy drafts next (prediction with expert advice: Littlestone
and Warmuth 1994; Herbster and Warmuth 1998). Ties go to the longest match.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, Protocol

from foredraft.drafters.suffix_automaton import ROOT, SuffixAutomaton

K = 2.0  # of the escape in a row's own text
RECENT = 4.0  # occurrences of a short match that the most recent one counts for in a chain
BRANCH = 0.5  # share of the other strategy's probabilities that counts in a tree: it is mostly right where the first one is
LONGEST, SHORT = range(2)

Place = Any  # of a source: where in it a draft stands


class Source(Protocol):
    """Continuations of a suffix of ``length`` tokens."""

    length: int
    begin: Place

    def chain(self, depth: int) -> tuple[list[int], float]:
        """Up to ``depth`` tokens, and how many of them are expected to be right."""

    def children(self, place: Place, least: float) -> list[tuple[float, int, Place]]:
        """The next tokens with at least that probability, the most recent first: probability, token, the place after it."""


class OwnText:
    """What an automaton has read, after the longest match of at most ``first`` tokens. A place is a state and how many tokens of context
    it stands for; contexts are cut to ``most`` tokens, because longer ones are not counted. ``recent`` is how many occurrences the
    most recent one counts for in a chain."""

    def __init__(self, automaton: SuffixAutomaton, most: int, *, first: int | None = None, recent: float = inf):
        self.automaton, self.most, self.recent = automaton, most, recent
        first = most if first is None else min(first, most)
        state = automaton.matched(first)
        self.length = min(automaton.length[state], first)
        self.begin: Place = state, self.length

    def chain(self, depth: int) -> tuple[list[int], float]:
        """As the most recent occurrence went on, or most of them did; where the text ends, as a shorter suffix did."""
        automaton, (state, length) = self.automaton, self.begin
        count, edges = automaton.count, automaton.edges
        draft: list[int] = []
        p, expected = 1.0, 0.0
        while len(draft) < depth:
            state, length = self._going_on(state, length)
            if state == ROOT:
                break
            token = favourite(automaton, state, self.recent)
            below = edges[state][token]
            p *= (count[below] + 1) / self._scale(state, length)
            expected += p
            draft.append(token)
            state, length = self._cut(below), length + 1
        return draft, expected

    def children(self, place: Place, least: float) -> list[tuple[float, int, Place]]:
        automaton, (state, length) = self.automaton, self._going_on(*place)
        if state == ROOT:
            return []
        recent, count, edges = automaton.recent, automaton.count, automaton.edges[state]
        scale = self._scale(state, length)
        latest, enough = max(recent[below] for below in edges.values()), least * scale
        likely = [(token, below) for token, below in edges.items() if count[below] + (recent[below] == latest) >= enough]
        likely.sort(key=lambda edge: -recent[edge[1]])
        return [((count[below] + (recent[below] == latest)) / scale, token, (self._cut(below), length + 1)) for token, below in likely]

    def _going_on(self, state: int, length: int) -> tuple[int, int]:
        """The longest suffix of the context that is not only the end of the text."""
        automaton = self.automaton
        while not automaton.edges[state] and state != ROOT:
            state = automaton.link[state]
            length = automaton.length[state]
        return state, min(length, automaton.length[state], self.most)

    def _scale(self, state: int, length: int) -> float:
        automaton = self.automaton
        seen = automaton.count[state] - (automaton.recent[state] == automaton.size)  # the end of the text is followed by nothing
        return seen + 1 + K * len(automaton.edges[state]) / length

    def _cut(self, state: int) -> int:
        link, length = self.automaton.link, self.automaton.length
        while length[link[state]] >= self.most:
            state = link[state]
        return state


def favourite(automaton: SuffixAutomaton, state: int, weight: float) -> int:
    """The token after ``state``, which has some, that followed most often, if the most recent occurrence counts for ``weight`` others."""
    edges = automaton.edges[state]
    if len(edges) == 1:
        return next(iter(edges))
    recent = automaton.recent
    latest = max(edges, key=lambda token: recent[edges[token]])
    if weight == inf:
        return latest
    count = automaton.count
    return max(edges, key=lambda token: (count[edges[token]] + (weight if token == latest else 0.0), recent[edges[token]]))


class CopyStrategies:
    """One row's text as it grows, with the records of both strategies.

    Args:
        most, short: tokens of the longest match, and of the short one, at most.
        memory: the share of earlier evidence that a disagreement leaves.
    """

    def __init__(self, most: int, short: int, memory: float):
        self.most, self.short, self.memory = most, min(short, most), memory
        self.automaton = SuffixAutomaton(most + 1)
        self.right = [0.0, 0.0]  # guesses, where they disagreed

    def read(self, ids: Sequence[int]) -> None:
        """The row's whole text. New tokens test both strategies, except the first time."""
        automaton = self.automaton
        if not automaton.size:
            automaton.extend(ids)
            return
        for token in ids[automaton.size :]:
            self._test(token)
            automaton.extend((token,))

    def sources(self, least: int) -> list[tuple[Source, float]]:
        """What both strategies propose after the text that was read, the better one first, each with the share of its
        probabilities that counts in a tree; matches have ``least`` tokens or more."""
        longest = OwnText(self.automaton, self.most)
        if longest.length < least:
            return []
        short = OwnText(self.automaton, self.most, first=self.short, recent=RECENT)
        if short.length < least:
            return [(longest, 1.0)]
        better, worse = (SHORT, LONGEST) if self.right[SHORT] > self.right[LONGEST] else (LONGEST, SHORT)
        found = longest, short
        return [(found[better], 1.0), (found[worse], BRANCH * (self.right[worse] + 1.0) / (self.right[better] + 1.0))]

    def _test(self, token: int) -> None:
        """Whether either strategy would have proposed ``token``, the next one."""
        automaton = self.automaton
        state = automaton.matched(self.most)
        near = automaton.matched(self.short, state)
        if state == near and len(automaton.edges[state]) == 1:
            return
        guesses = self._guess(state, inf), self._guess(near, RECENT)
        if guesses[LONGEST] != guesses[SHORT]:
            self.right = [self.memory * share + (guess == token) for share, guess in zip(self.right, guesses)]

    def _guess(self, state: int, weight: float) -> int | None:
        automaton = self.automaton
        while state != ROOT and not automaton.edges[state]:
            state = automaton.link[state]
        return None if state == ROOT else favourite(automaton, state, weight)
