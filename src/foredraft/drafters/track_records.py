"""What is known of several drafters: how often each one's tokens were accepted, and whether one that runs a model is worth asking.

Everything is learnt from rounds that are past: from the text that came to be, which judges whatever was proposed, whether it was
verified or not, and from clocks. Old rounds are forgotten exponentially.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foredraft.drafters.draft_seconds import DraftSeconds

MEMORY = 0.97  # of what was known that another observation leaves
BY_MATCH = (
    0.5,
    0.3,
    0.45,
    0.65,
    0.8,
    0.9,
)  # acceptance to expect of a first child, untold and after a match of 1, 2.., 4.., 8.., 16.. tokens
GOING_ON = (0.6, 0.6, 0.7, 0.8, 0.88, 0.92)  # the same of a first child below one that was accepted, by the match as it is there
LATER = (0.12, 0.05, 0.03)  # the same of the second, third and any further child
PRIOR_WEIGHT = 2.0  # observations that these count for
DEEPEST, LONGEST = 16, 16  # depths, and lengths of a match, that are told apart


class Share:
    """Hits among trials, forgotten exponentially."""

    __slots__ = ("hits", "trials")

    def __init__(self) -> None:
        self.hits = self.trials = 0.0

    def add(self, hit: bool) -> None:
        self.hits = MEMORY * self.hits + hit
        self.trials = MEMORY * self.trials + 1.0

    def rate(self, prior: float, weight: float) -> float:
        return (self.hits + prior * weight) / (self.trials + weight)


class Mean:
    """An average, forgotten exponentially; single values far above it count for a multiple of it only, unless they are ``rare``: mostly
    nothing, and then much."""

    def __init__(self, memory: float = 0.95, *, rare: bool = False):
        self.memory, self.rare, self.total, self.weight = memory, rare, 0.0, 0.0

    def add(self, value: float) -> None:
        if self.weight >= 3.0 and not self.rare:
            value = min(value, 4.0 * self.value + 1e-9)
        self.total = self.memory * self.total + value
        self.weight = self.memory * self.weight + 1.0

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else 0.0


class Record:
    """How often one drafter's children are accepted, given that their parent was: later siblings by their rank, first ones by the length
    of the match that they copy from, as far as the drafter tells (0 for one that tells none). A match has grown by a token with every node
    that was accepted, and a copy that goes on is surer than one of the same length that begins."""

    def __init__(self) -> None:
        self._first = [Share() for _ in BY_MATCH]
        self._going_on = [Share() for _ in BY_MATCH]
        self._later = [Share() for _ in LATER]
        self._tables: dict[int, list[tuple[float, ...]]] = {}

    def rates(self, matched: int, depth: int = DEEPEST) -> list[tuple[float, ...]]:
        """``[depth][rank]`` as far as ``depth`` and ``DEEPEST``, the last ones standing for all further."""
        matched = min(max(matched, 0), LONGEST)
        known = self._tables.get(matched, [])
        if len(known) < min(depth, DEEPEST):
            later = tuple(share.rate(prior, PRIOR_WEIGHT) for share, prior in zip(self._later, LATER))
            usual = [(share.rate(prior, PRIOR_WEIGHT), *later) for share, prior in zip(self._going_on, GOING_ON)]
            kind = kind_of(matched)
            known = [(self._first[kind].rate(BY_MATCH[kind], PRIOR_WEIGHT), *later)]
            known += [usual[kind_of(matched + further)] for further in range(1, min(depth, DEEPEST))]
            self._tables[matched] = known
        return known

    def expected(self, matched: int, depth: int) -> float:
        """Accepted tokens to expect of a chain so long."""
        reach, total = 1.0, 0.0
        for level in self.rates(matched, depth)[:depth]:
            reach *= level[0]
            total += reach
        return total

    def observe(self, matched: int, steps: Sequence[tuple[int, int]]) -> None:
        """``steps`` down a tree along the text that came: how many children there were, and which of them it was, that number if none."""
        for depth, (children, rank) in enumerate(steps):
            if not children:
                break
            (self._going_on if depth else self._first)[kind_of(matched + depth)].add(rank == 0)
            for later in range(1, min(children, len(LATER) + 1)):
                self._later[later - 1].add(rank == later)
        self._tables.clear()


def kind_of(matched: int) -> int:
    """0, 1, 2, 4, 8 or 16 tokens and more."""
    return min(max(matched, 0).bit_length(), len(BY_MATCH) - 1)


KNOWN = 3.0  # observations before it is judged
PAUSE, LONGEST_PAUSE = 8, 64  # rounds until it is asked where that does not pay; every such round that adds nothing doubles them
TELLING = 2.0  # observations of one length of match that all together count for


class Credit:
    """What a drafter that runs no model adds to a better one, by how long the match is that this one copies from; whether that is worth
    the seconds that it takes. Where the better one copies a long match, it hardly ever is."""

    def __init__(self, seconds: Mean | None = None) -> None:
        self.seconds = Mean(0.9) if seconds is None else seconds
        self._added = [Mean(MEMORY, rare=True) for _ in BY_MATCH]
        self._overall = Mean(MEMORY, rare=True)
        self._left = self._pause = PAUSE

    def pays(self, matched: Sequence[int], rate: float) -> bool:
        """For rows whose texts are copied after such matches, at a pace of so many tokens per second."""
        if self._overall.weight < KNOWN:
            return True
        usual = self._overall.value
        added = [self._added[kind_of(each)] for each in matched]
        if sum((mean.total + TELLING * usual) / (mean.weight + TELLING) for mean in added) >= rate * self.seconds.value:
            return True
        self._left -= 1
        return self._left <= 0

    def was_asked(self, matched: Sequence[int], added: Sequence[int], seconds: float) -> None:
        """A round is over: the accepted tokens of each row that it alone proposed, and what it took."""
        self.seconds.add(seconds)
        if any(added):
            self._left = self._pause = PAUSE
        elif self._left <= 0:
            self._left = self._pause = min(2 * self._pause, LONGEST_PAUSE)
        for each, more in zip(matched, added):
            self._added[kind_of(each)].add(more)
            self._overall.add(more)


HOPES = (0.25, 0.75, 1.5, 3.0, 5.0)  # accepted tokens without asking, between which situations are told apart
CAUTION = 3.0  # observations of a situation that the drafter's record as a whole counts for
SHARE = 0.01  # of all seconds that may go into tries
LAST = 9  # rounds whose median says what a round takes
HORIZON = 16  # rounds that reading what was missed is spread over


class Pace:
    """Tokens that all rows gained, over the seconds of their rounds."""

    def __init__(self) -> None:
        self.tokens, self.seconds = Mean(0.98), Mean(0.98)

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens.add(tokens)
        self.seconds.add(seconds)

    @property
    def rate(self) -> float:
        """Tokens per second; 0 as long as nothing is known."""
        return self.tokens.value / self.seconds.value if self.seconds.total else 0.0


class Worth:
    """Whether to ask a drafter that takes time.

    The best rate of tokens in the long run is had by asking wherever the tokens that this adds are more than what the seconds that it
    takes bring elsewhere (the marginal value theorem). What it adds is learnt by situation, which is how much the drafters that take
    no time promise: a long copy leaves little to add. What it takes was ``timed`` beforehand, and is corrected by what it took since;
    without that it is asked always. Where it does not pay it is tried again as often as a hundredth of all seconds allows.
    """

    def __init__(self, timed: DraftSeconds | None = None) -> None:
        self.timed = timed
        self._added = [Mean() for _ in range(len(HOPES) + 1)]
        self._usual = Mean()  # tokens that all rows might hope for
        self._slower: deque[float] = deque([1.0], maxlen=LAST)  # seconds that it took over those that it should have
        self._outside: dict[bool, deque[float]] = {True: deque(maxlen=LAST), False: deque(maxlen=LAST)}  # of the round, asked and not
        self._account, self._is_try = 0.0, False  # seconds that may go into tries

    def seconds(self, depth: int, missed: int = 0) -> float:
        """That a draft so deep takes where so many tokens were missed, and what the nodes that it adds take."""
        if self.timed is None:
            return 0.0
        asked, alone = self._outside[True], self._outside[False]
        nodes = max(0.0, median(asked) - median(alone)) if len(asked) >= 3 and len(alone) >= 3 else 0.0
        return median(self._slower) * self.timed.of(depth, missed) + nodes

    def added(self, hope: float, alone: float) -> float:
        """Tokens that asking adds for a row that may ``hope`` for so many otherwise, where the drafter ``alone`` has so many accepted."""
        mean = self._added[situation(hope)]
        return (mean.total + CAUTION * max(0.0, alone - hope)) / (mean.weight + CAUTION)

    def pays(self, hopes: Sequence[float], alone: float, rate: float, *, depth: int, missed: int = 0) -> bool:
        """Whether to ask for a draft so deep for rows that may hope for so many tokens otherwise; ``rate`` is the pace in tokens per
        second, 0 as long as it is not known; ``missed`` are the tokens that it has not read."""
        self._is_try = False
        if self.timed is None:
            return True
        hope = sum(hopes)
        self._usual.add(hope)
        rate = rate or (len(hopes) + hope) / max(self.timed.plain, 1e-9)
        seconds = self.seconds(depth, math.ceil(missed / HORIZON))
        if sum(self.added(each, alone) for each in hopes) > rate * seconds:
            return True
        self._is_try = self._account >= self.seconds(depth, missed) and hope <= self._usual.value
        return self._is_try

    def was_asked(self, hopes: Sequence[float], added: Sequence[int], own: float, outside: float, *, depth: int, missed: int = 0) -> None:
        """A round is over in which it was asked: what it added for rows that might hope for so many tokens otherwise, the seconds that it
        took, and those of the round outside the draft."""
        for hope, more in zip(hopes, added):
            self._added[situation(hope)].add(max(more, 0))
        if self.timed is not None and self.timed.of(depth, missed) > 0:
            self._slower.append(own / self.timed.of(depth, missed))
        self._outside[True].append(outside)
        self._account += SHARE * outside - (own if self._is_try else 0.0)

    def was_not_asked(self, outside: float) -> None:
        """A round is over in which it was considered, and not asked."""
        self._outside[False].append(outside)
        self._account += SHARE * outside


def situation(hope: float) -> int:
    return sum(hope >= bound for bound in HOPES)
