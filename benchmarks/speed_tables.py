"""What is said of calls in turns: comparisons of methods, tables and notes, for the speed suite and the drafters suite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

from benchmarks.figures import Figure, best
from benchmarks.peer_process import FOREDRAFT
from benchmarks.report import Table
from benchmarks.speed_calls import Calls
from benchmarks.speed_plan import TEXT
from benchmarks.speed_runner import PeerSuite
from foredraft.estimates import Estimate

PARTS = ("prefill", "draft", "target", "overhead")
PLAIN_OF_OURS = f"{FOREDRAFT} plain"
BUSY = 0.05  # CPU seconds of the sleepers per second of a call, from which on a note says so
OURS = (FOREDRAFT,)


class Comparison:
    """One target in one dtype of a finished run."""

    def __init__(self, run: PeerSuite[Any], target: str, dtype: str):
        self.run, self.target, self.dtype = run, target, dtype
        self.mine = [each for each in run.measurements if (each.target, each.dtype) == (target, dtype)]
        several = len(run.settings.targets) > 1
        self.label = f"{target} {dtype}" if several else dtype
        self.where = f"{target}, {dtype}" if several else dtype
        self.methods = run.by_name

    def calls(self, category: str | None = None, *, scenario: str = TEXT, batch: int = 1) -> Calls:
        """Of one category, or of all together."""
        wanted = [each for each in self.mine if (each.scenario, each.batch) == (scenario, batch)]
        return Calls([each for each in wanted if category in (None, each.category)])

    def names(self, mode: str, sides: Sequence[str], *, length: int | None = None) -> list[str]:
        """Methods of a mode that keep what they learn as they come, of one draft length or of any."""
        return [
            name
            for name, each in self.methods.items()
            if each.mode == mode and each.side in sides and not each.hopeless and not each.fresh and length in (None, each.length)
        ]

    def figure(self, name: str, low: float, value: Estimate | None, high: float | None = None, how: str = "", more: bool = False) -> Figure:
        return Figure(f"{self.label}: {name}", None if value is None else value.spread, low, high, how, more)

    def over(
        self,
        name: str,
        low: float,
        ours: Sequence[str],
        theirs: Sequence[str],
        value: Callable[[str], Estimate | None],
        *,
        more: bool = False,
        digits: int = 2,
    ) -> Figure:
        """The best ``value`` of ``ours`` over the best of ``theirs``."""
        mine, other = best(ours, value), best(theirs, value)
        if mine is None or other is None:
            return self.figure(name, low, None, how="" if other else "nothing to compare with", more=more)
        how = f"{mine[0]} {mine[1].value:.{digits}f}, {other[0]} {other[1].value:.{digits}f}"
        return self.figure(name, low, mine[1] / other[1], how=how, more=more)


def comparisons(run: PeerSuite[Any]) -> list[Comparison]:
    return [Comparison(run, target, dtype) for target in run.settings.targets for dtype in run.settings.dtypes]


def ratio(above: Estimate | None, below: Estimate | None) -> Estimate | None:
    return None if above is None or below is None else above / below


def over_plain(calls: Calls, name: str) -> Estimate | None:
    """Tokens per second over those of the same side's plain decoding, the faster one where it has two."""
    plain = best([other for other in calls.by_method if other.startswith(f"{name.split()[0]} plain")], calls.rate)
    return None if plain is None else ratio(calls.rate(name), plain[1])


# -- tables ---------------------------------------------------------------------------------------------------------------


def figures(found: Iterable[Figure]) -> Table:
    rows = [(each.name, each.bound, "—" if each.spread is None else each.spread.text(), each.verdict, each.how) for each in found]
    return Table("Figures to reach", ("figure", "at least", "measured", "verdict", "from"), rows)


def cells(calls: Calls, name: str) -> dict[str, str]:
    """What tables say of a method, by column."""
    rate, later, over, kept = calls.rate(name), calls.decoding_rate(name), over_plain(calls, name), calls.acceptance(name)
    passes = [each.passes for each in calls.by_method.get(name, ()) if each.passes is not None]
    equal, compared, _ = calls.equal(name)
    return {
        "tokens/s": "failed" if rate is None else rate.spread.text(1),
        "after the first token": "—" if later is None else f"{later.value:.1f}",
        "over own plain": "—" if over is None else over.spread.text(),
        "acceptance length": "—" if kept is None else f"{kept.value:.2f}",
        "passes per call": f"{sum(passes) / len(passes):.1f}" if passes else "—",
        "equal to plain": f"{equal}/{compared}" if compared else "—",
    }


def speed(title: str, calls: Calls) -> Table:
    rows = {name: cells(calls, name) for name in calls.by_method}
    columns = next(iter(rows.values()), {})
    return Table(title, ("method", *columns), [(name, *each.values()) for name, each in rows.items()])


def split(title: str, calls: Calls) -> Table:
    rows = []
    for name in calls.by_method:
        shares = [calls.share(name, part) for part in PARTS]
        if any(share is not None for share in shares):
            rows.append((name, *("—" if share is None else f"{share.value:.1%}" for share in shares)))
    return Table(title, ("method", *PARTS), rows)


def equality(run: PeerSuite[Any], calls: Calls, where: str) -> Table:
    rows = []
    for name in calls.by_method:
        said = []
        for reference in (False, True):
            equal, compared, first = calls.equal(name, reference)
            said += [f"{equal} of {compared}" if compared else "—", "—" if first is None else str(first)]
        rows.append((name, *said))
    columns = ("method", "equal to own plain", "first difference at", f"equal to {run.reference or 'nobody'}", "first difference at")
    return Table(f"Equality of texts, {where}", columns, rows)


def failed(run: PeerSuite[Any]) -> list[Table]:
    """What is installed and failed; what is not is one line of :func:`missing`."""
    several = len(run.settings.targets) > 1
    rows = [(each.target, each.method, each.dtype, each.stage, each.message)[not several :] for each in run.failed()]
    return [Table("Failed", ("target", "method", "dtype", "stage", "reason")[not several :], rows)] if rows else []


# -- notes ----------------------------------------------------------------------------------------------------------------


def sides(run: PeerSuite[Any]) -> str:
    return "; ".join(
        f"{name} ({', '.join(f'{package} {version}' for package, version in found.items())})" for name, found in run.versions.items()
    )


def missing(run: PeerSuite[Any]) -> str:
    started = {each.method.split()[0] for each in run.measurements}
    reasons: dict[str, dict[str, None]] = {}
    for each in run.failures:
        if each not in run.failed():
            peer = each.method.split()[0]
            reasons.setdefault(each.message.partition("not installed: ")[2], {})[each.method if peer in started else peer] = None
    said = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in reasons.items())
    return f"Not installed, and not measured: {said}." if said else ""


def unusual(run: PeerSuite[Any]) -> str:
    """What peers said of how they run."""
    said = "; ".join(f"{name}: {note}" for name, note in run.method_notes.items() if not name.startswith(FOREDRAFT))
    return f"Not as usual: {said}." if said else ""


def memory(run: PeerSuite[Any]) -> str:
    said = []
    for target in run.settings.targets:
        for dtype in run.settings.dtypes:
            rates = [each.rate / 1e9 for each in run.reads if (each.target, each.dtype) == (target, dtype)]
            if rates:
                said.append(f"{dtype} {median(rates):.1f} GB/s ({min(rates):.1f}–{max(rates):.1f}, {len(rates)} reads)")
    what = "a sum over 400 MB by as many threads" if run.settings.device == "cpu" else "a copy of 400 MB, read and written"
    return f"Memory, {what}, beside plain calls: {'; '.join(said)}." if said else ""


def quiet(run: PeerSuite[Any]) -> str:
    busy = [each.others for each in run.measurements if each.others is not None]
    if not busy:
        return ""
    worst = sorted(busy)[int(0.99 * (len(busy) - 1))]
    warning = " That is too much: a method was not stopped." if worst > BUSY else ""
    return f"While one method computed, all others together used {worst:.1%} of a CPU at most (99th percentile).{warning}"
