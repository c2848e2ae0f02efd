"""Counts and times of a call. They are always collected."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from foredraft.describing import Described
from foredraft.speedup import Speedup


@dataclass(repr=False)
class RowStats(Described):
    """Counts of one row. ``finish_reason`` is eos, stop, length, context or removed; None while the row runs. ``reused``: the tokens of its
    prompt whose keys and values the cache held already, so that they were not computed again; None before the prompt was read."""

    passes: int = 0
    tokens: int = 0
    kept: int = 0
    drafted: int = 0
    accepted: int = 0
    finish_reason: str | None = None
    token_times: list[float] = field(default_factory=list)
    reused: int | None = None

    def facts(self, *, all: bool = False) -> dict[str, Any]:
        names = ("tokens", "passes", "kept", "drafted", "accepted", "reused", "finish_reason")
        return {name: getattr(self, name) for name in (names if all else ("tokens", "passes", "finish_reason"))}

    @property
    def acceptance_length(self) -> float:
        """Tokens kept per pass of this row; 1 for plain decoding, NaN before the first pass."""
        return self.kept / self.passes if self.passes else float("nan")


@dataclass(frozen=True)
class CacheMemory:
    """What the target's cache holds, in pages of 64 tokens; of a model that can only verify chains, in bytes.

    Attributes:
        limit: most pages; None without a limit.
        page_bytes: of one page, all layers together that see the whole text; 1 where bytes are counted.
        held: pages of rows.
        shared: of these, the pages that two or more rows hold.
        cached: pages of texts that are over, kept for later texts that begin alike, as long as nobody needs them.
        evicted: how many of those were given up for other texts so far.
        set_aside: how many times a row was set aside because pages ran out.
        windows: the same for layers that see a sliding window of the text: one for each kind of window.
        sources: the same for what is kept of the sources of a model with an encoder; None for other models.
    """

    limit: int | None
    page_bytes: int
    held: int
    shared: int
    cached: int
    evicted: int
    set_aside: int
    windows: tuple[CacheMemory, ...] = ()
    sources: CacheMemory | None = None


@dataclass(repr=False)
class Stats(Described):
    """Counts and times of one call.

    A *row-pass* is one live row in one target pass after the prefill. The prefill and the token it yields are left out of
    ``row_passes``, ``kept`` and ``acceptance_length``; rounds without a draft count; tokens cut by a stop or a limit do not.

    Attributes:
        target_passes: forward passes of the target, prefill included.
        row_passes: row-passes after the prefill.
        prompt_tokens: tokens of the prompts; ``reused`` those whose keys and values the cache held already.
        new_tokens: tokens returned, over all rows, the prefill's included.
        kept: tokens returned out of row-passes.
        drafted: proposed tokens; ``drafted_by_depth[d]`` those at depth d + 1.
        accepted: proposed tokens returned; ``accepted_by_depth[d]`` those at depth d + 1.
        seconds: ``prefill``, ``draft``, ``target``, ``overhead`` and their sum ``total``. Your own logits processors count as
            overhead, also during a draft or the prefill. ``planning`` is the time
            that the planner took to measure the machine before its first round, if it did.
        time_to_first_token: seconds from the call to the first token of any row, None if there was none.
        layer_tokens: per decoder layer of the target, the tokens that were led through it: prompts and draft nodes, in drafts as in
            verification, filler of ragged rows included.
        seed: the seed, as given or as drawn.
        reproducible: the same call with this seed repeats the text, apart from rounding. True for greedy decoding, for the rule ``match``,
            and for a rule that was given by name together with a fixed shape.
        rule, drafter, shape, lossless: the configuration in use; a ``shape`` of "auto" was chosen anew in every round.
        shapes: number of rounds per shape; chain(0) is a pass without a draft, of which a round may make several.
        speedup: over plain decoding (:class:`~foredraft.speedup.Speedup`); :meth:`summary` says it in words.
        learning: of a drafter that learns (docs/online.md), since it was built: its version, steps, swaps, seconds, and α over the
            tokens served; of several that learn, such a dictionary for each, by its name. None for others.
        memory: what the target's cache held when a row was over last (:class:`CacheMemory`); None where it has no pages.
        rows: one :class:`RowStats` per row; in a :class:`~foredraft.session.Session`, of the rows that are not over.
    """

    target_passes: int = 0
    row_passes: int = 0
    prompt_tokens: int = 0
    reused: int = 0
    new_tokens: int = 0
    kept: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    layer_tokens: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("prefill", "draft", "target", "overhead", "total"), 0.0))
    time_to_first_token: float | None = None
    seed: Any = None
    reproducible: bool = True
    rule: str = ""
    drafter: str = ""
    shape: str = ""
    lossless: bool = True
    shapes: dict[str, int] = field(default_factory=dict)
    speedup: Speedup = field(default_factory=Speedup)
    learning: dict[str, Any] | None = None
    memory: CacheMemory | None = None
    rows: list[RowStats] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter, repr=False)

    def facts(self, *, all: bool = False) -> dict[str, Any]:
        if all:
            return {"summary": self.summary(), **self.to_dict()}
        return {name: getattr(self, name) for name in ("new_tokens", "target_passes", "drafter", "rule")} | {"summary": self.summary()}

    @property
    def acceptance_length(self) -> float:
        """Tokens kept per row-pass, summed over rows, then divided."""
        return self.kept / self.row_passes if self.row_passes else float("nan")

    @property
    def acceptance_rate(self) -> float:
        """Share of proposed tokens that were returned."""
        return self.accepted / self.drafted if self.drafted else float("nan")

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.seconds["total"] if self.seconds["total"] else float("nan")

    @property
    def inter_token_times(self) -> list[list[float]]:
        """Per row, seconds between one returned token and the next; tokens of one round arrive together."""
        return [[after - before for before, after in zip(row.token_times, row.token_times[1:])] for row in self.rows]

    @contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - begin

    def clock(self) -> float:
        """Seconds since the call began; updates the total and what it leaves for overhead."""
        now = time.perf_counter() - self.started
        self.seconds["total"] = now
        known = self.seconds["prefill"] + self.seconds["draft"] + self.seconds["target"] + self.seconds.get("planning", 0.0)
        self.seconds["overhead"] = now - known
        return now

    def count_prompt(self, row: RowStats, tokens: int, reused: int) -> None:
        """Add a row's prompt, once: it may be read in pieces, and again after the row was set aside."""
        if row.reused is None:
            row.reused = reused
            self.prompt_tokens += tokens
            self.reused += reused

    def count(self, row: RowStats, *, kept: int, drafted: Sequence[int], accepted: int, passes: int) -> None:
        """Add what a row gained: ``kept`` tokens, of which ``accepted`` were among those ``drafted`` at each depth. So many row-``passes``
        count: none of a prefill."""
        self.new_tokens += kept
        row.tokens += kept
        if not passes:
            return
        for each in (self, row):
            each.kept += kept
            each.drafted += sum(drafted)
            each.accepted += accepted
        self.row_passes += passes
        row.passes += passes
        if drafted:
            self.count_depths(drafted, accepted)

    def drop(self, rows: Sequence[RowStats]) -> None:
        """These are over; what they counted stays in the sums."""
        over = set(map(id, rows))
        for index in reversed(range(len(self.rows))):  # in place: another thread may be adding one
            if id(self.rows[index]) in over:
                del self.rows[index]

    def count_depths(self, drafted: Sequence[int], accepted: int) -> None:
        """Add one row's round: how many tokens were ``drafted`` at each depth, and how many were ``accepted`` down its path."""
        deepest = max((depth for depth, count in enumerate(drafted, 1) if count), default=0)
        for counts, levels in ((self.drafted_by_depth, drafted[:deepest]), (self.accepted_by_depth, [1] * accepted)):
            counts.extend([0] * (len(levels) - len(counts)))
            for level, count in enumerate(levels):
                counts[level] += count

    def summary(self) -> str:
        """Whether the call was faster than plain decoding, and by how much: ``1.6× plain decoding (measured)``, or
        ``drafting does not pay here: decoded plainly, nothing lost``."""
        said = "plain decoding, as asked" if self.drafter == "none" else self.speedup.sentence()
        measuring = self.seconds.get("planning", 0.0)
        return said if measuring < 0.05 else f"{said}; before that, measuring the machine took {measuring:.1f} s, once"

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON; None where a figure has no meaning yet."""
        plain = asdict(self)
        del plain["started"]
        plain["speedup"] = self.speedup.to_dict()
        plain["acceptance_length"] = self.acceptance_length if self.row_passes else None
        for row, values in zip(self.rows, plain["rows"]):
            values["acceptance_length"] = row.acceptance_length if row.passes else None
        return plain


def by_drafter(learning: dict[str, Any] | None, name: str) -> dict[str, dict[str, Any]]:
    """What each drafter says of its ``learning``, by its name; ``name`` is that of the only one."""
    return {name: learning} if learning is not None and "version" in learning else learning or {}
