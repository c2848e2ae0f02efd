"""What a row's own text proposes: several ways to copy from it, and which of them was right of late.

Which earlier place a text goes on like is a guess. The longest match is the best one in code that is edited; in a conversation that goes
round, the longest match may be with the question as it was first asked, and a short one's most recent occurrence the better guess; and
where something new was put into a copy, no match tells as much as the place where the copy was left. So there are three experts:

``LONGEST``
    goes on as the most recent occurrence of the longest match did.
``SHORT``
    goes on as the matches of a few tokens did, the most recent occurrence counting for several.
``SAME``
    goes on from where the last firm copy has come to, whatever has been put in or left out since.

Every new token judges what each of them would have said there, wherever they disagree, be it verified or not; a share of right
guesses that forgets exponentially says who drafts next (prediction with expert advice: Littlestone and Warmuth 1994; Herbster
and Warmuth 1998). At first, and wherever they are equally good, it is the longest match.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, Protocol

from foredraft.drafters.suffix_automaton import ROOT, SuffixAutomaton

K = 2.0  # of the escape in a row's own text
RECENT = 4.0  # occurrences of a short match that the most recent one counts for in a chain
FIRM = 8  # tokens of a match that make a copy worth going on with
AHEAD = 16  # tokens of the source that may be left out of a copy at once
LEAD = 1.0  # right guesses that the same source must be ahead by, which is no match
WORTH = 0.25  # share of right guesses that it must have at least: that of a match of one token
FOUND = 0.9  # each further token of a copy that has found its way back is right: as after a match of twelve
BRANCH = 0.5  # of what another expert promises counts in a tree: it is mostly right where the best one is
LONGEST, SHORT, SAME = range(3)

Place = Any  # of a source: where in it a draft stands


class Source(Protocol):
    """Continuations of a suffix of ``length`` tokens."""

    length: int
    begin: Place

    def chain(self, depth: int) -> tuple[list[int], float]:
        """Up to ``depth`` tokens, and how many of them are to be expected to be right."""

    def children(self, place: Place, least: float) -> list[tuple[float, int, Place]]:
        """What comes next with at least that probability, the most recent first: its probability, its token, the place after it."""


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


class SameSource:
    """A copy of ``ids`` from the place ``begin`` on, which may run into itself. Its first token is right with the probability ``p``, and
    whether it has found its way back is known then."""

    def __init__(self, ids: Sequence[int], begin: int, p: float):
        self.ids, self.begin, self.p = ids, begin, p
        self.length = FIRM

    def chain(self, depth: int) -> tuple[list[int], float]:
        tokens = list(self.ids[self.begin : self.begin + depth])
        for source in range(depth - len(tokens)):
            tokens.append(tokens[source])
        return tokens, sum(self.p * FOUND**further for further in range(depth))

    def children(self, place: Place, least: float) -> list[tuple[float, int, Place]]:
        token = self.ids[self.begin + (place - self.begin) % (len(self.ids) - self.begin)]
        p = self.p if place == self.begin else FOUND
        return [(p, token, place + 1)] if p >= least else []


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


class Experts:
    """One row's text as it grows, with the experts' records.

    Args:
        most, short: tokens of the longest match, and of the short one, at most.
        memory: what a disagreement leaves of the weight of those before it.
    """

    def __init__(self, most: int, short: int, memory: float):
        self.most, self.short, self.memory = most, min(short, most), memory
        self.automaton = SuffixAutomaton(most + 1)
        self.right = [0.0, 0.0, 0.0]  # guesses, where they disagreed
        self.judged = 0.0
        self.source: int | None = None  # the place that SAME would copy next

    def read(self, ids: Sequence[int]) -> None:
        """The row's whole text, of which what is new judges the experts; the first time, nothing is judged."""
        automaton = self.automaton
        if not automaton.size:
            automaton.extend(ids)
            return
        for place in range(automaton.size, len(ids)):
            token = ids[place]
            self._judge(ids, token)
            self._follow(ids, place, token)
            automaton.extend((token,))

    def sources(self, ids: Sequence[int], least: int) -> list[tuple[Source, float]]:
        """The experts that have something to say after ``ids``, all of which was read, best first, each with what its
        probabilities count for in a tree, at most 1; matches have ``least`` tokens."""
        automaton, right = self.automaton, self.right
        found: dict[int, Source] = {}
        longest = OwnText(automaton, self.most)
        if longest.length >= least:
            found[LONGEST] = longest
            short = OwnText(automaton, self.most, first=self.short, recent=RECENT)
            if short.length >= least:
                found[SHORT] = short
        same = (right[SAME] + 1.0) / (self.judged + 2.0)
        if self.source is not None and same >= WORTH:
            found[SAME] = SameSource(ids, self.source, same)
        standing = {expert: right[expert] - (LEAD if expert == SAME else 0.0) for expert in found}
        order = sorted(found, key=lambda expert: -standing[expert])
        if order and order[0] != SAME:
            self._hold(found[order[0]])
        trust = [1.0] + [BRANCH * min(1.0, (right[expert] + 1.0) / (right[order[0]] + 1.0)) for expert in order[1:]]
        return [(found[expert], share) for expert, share in zip(order, trust)]

    def _judge(self, ids: Sequence[int], token: int) -> None:
        """Who would have said ``token``, the next one?"""
        automaton = self.automaton
        state = automaton.matched(self.most)
        near = automaton.matched(self.short, state)
        longest = self._guess(state, inf)
        if state == near and len(automaton.edges[state]) == 1:
            short = longest
        else:
            short = self._guess(near, RECENT)
        same = longest if self.source is None else ids[self.source]
        if longest == short == same:
            return
        self.judged = self.memory * self.judged + 1.0
        self.right = [self.memory * share + (said == token) for share, said in zip(self.right, (longest, short, same))]

    def _guess(self, state: int, weight: float) -> int | None:
        automaton = self.automaton
        while state != ROOT and not automaton.edges[state]:
            state = automaton.link[state]
        return None if state == ROOT else favourite(automaton, state, weight)

    def _follow(self, ids: Sequence[int], place: int, token: int) -> None:
        """Behind the next ``token`` of the source, if that is near; else it was put in, and the source stays where it is."""
        if self.source is None:
            return
        for near in range(self.source, min(self.source + AHEAD, place)):
            if ids[near] == token:
                self.source = near + 1
                return

    def _hold(self, source: Source) -> None:
        """Remember where a firm match copies from."""
        if not isinstance(source, OwnText) or source.length < min(FIRM, self.most):
            return
        automaton, (state, length) = self.automaton, source.begin
        while state != ROOT and not automaton.edges[state]:
            state = automaton.link[state]
            length = automaton.length[state]
        if state != ROOT and length >= min(FIRM, self.most):
            below = automaton.edges[state][favourite(automaton, state, source.recent)]
            self.source = automaton.recent[below] - 1
