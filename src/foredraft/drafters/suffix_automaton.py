"""A suffix automaton of a growing text, which counts occurrences as it reads. Plain Python.

The automaton (Blumer et al. 1985) is the smallest graph in which every path from the root spells a substring of the text. A
state stands for all the substrings that end at the same places; the suffix link of a state leads to the longest of its suffixes that
ends at more places. A token is appended in amortised constant time, and the state after it says at once what the longest
suffix is that occurred before.

Every state also knows how often and where last its substrings ended, and that makes it the frequency tree of SuffixDecoding
(Oliaro et al. 2024): the children of a context are the edges of its state, their counts those of the states they lead to. Counting
walks up the suffix links, which in a text that repeats itself are as many as the text is long, so substrings of more than
``counted`` tokens are not counted; then a token costs what its longest repeated suffixes are, five to ten states in ordinary text.
"""

from __future__ import annotations

from collections.abc import Sequence

ROOT = 0


class SuffixAutomaton:
    """All substrings of the tokens read so far; those of up to ``counted`` tokens with their counts.

    Attributes, by state:
        edges: where each next token leads.
        length: of its longest substring.
        link: of its longest suffix that ends at more places; -1 for the root.
        count: how often its substrings end in the text, the very end included.
        recent: tokens up to the last place where they end.
    """

    def __init__(self, counted: int):
        self.counted = counted
        self.size = 0
        self.edges: list[dict[int, int]] = [{}]
        self.length, self.link, self.count, self.recent = [0], [-1], [0], [0]
        self._whole = ROOT  # the state of the whole text
        self._end = ROOT  # that of its last ``counted`` tokens

    def extend(self, tokens: Sequence[int]) -> None:
        """Read more of the text."""
        edges, length, link, count, recent = self.edges, self.length, self.link, self.count, self.recent
        whole, end, size, counted = self._whole, self._end, self.size, self.counted
        for token in tokens:
            new, above = len(edges), whole
            edges.append({})
            length.append(length[whole] + 1)
            count.append(0)
            recent.append(0)
            while above >= 0 and token not in edges[above]:
                edges[above][token] = new
                above = link[above]
            if above < 0:
                link.append(ROOT)
            else:
                below = edges[above][token]
                if length[below] == length[above] + 1:
                    link.append(below)
                else:  # its longer substrings do not end here: they stay, the others get a state of their own
                    copy = new + 1
                    link.append(copy)
                    edges.append(edges[below].copy())
                    length.append(length[above] + 1)
                    link.append(link[below])
                    count.append(count[below])
                    recent.append(recent[below])
                    link[below] = copy
                    while above >= 0 and edges[above].get(token) == below:
                        edges[above][token] = copy
                        above = link[above]
            whole = new
            end = edges[end][token]  # also if it has just been divided: both parts go on alike
            size += 1
            while length[link[end]] >= counted:
                end = link[end]
            state = end
            while state:
                count[state] += 1
                recent[state] = size
                state = link[state]
        self._whole, self._end, self.size = whole, end, size

    def matched(self, most: int, within: int | None = None) -> int:
        """The state of the longest suffix, of ``most`` < ``counted`` tokens at most, that also occurs before; ROOT if none does.
        ``within`` is that of a longer one, if it is known."""
        state, length, link, count = self._end if within is None else within, self.length, self.link, self.count
        while state and (count[state] < 2 or length[link[state]] >= most):
            state = link[state]
        return state
