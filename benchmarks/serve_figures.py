"""Figures and tables of the suite ``serve``, from its records alone."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.figures import Figure
from benchmarks.report import Table
from benchmarks.serve_plan import Run
from foredraft.estimates import Spread

MODES = {0.0: "greedy", 1.0: "temperature 1"}
Side = tuple[str, str]  # a side and its mode


def figures(suite: Any) -> list[Figure]:
    """All of them; what was not measured says so."""
    found = [
        over_best(suite, clients, temperature, low)
        for clients, low in ((1, 1.4), (4, 1.2), (16, 1.0))
        for temperature in MODES
    ]  # fmt: skip
    found += [
        ratio(suite, "session", clients, temperature, ("ours", "draft"), ("session", "draft"), low, "tokens/s over the Session alone")
        for clients, low in ((1, 0.95), (16, 0.97))
        for temperature in MODES
    ]
    found += [
        ratio(suite, "speculation", clients, temperature, ("ours", "draft"), ("ours", "plain"), low, "tokens/s, speculation on over off")
        for clients, low in ((1, 1.5), (4, 0.98), (16, 0.98), (64, 0.98))
        for temperature in MODES
    ]
    for name, what in (("first", "p99 to the first token"), ("between", "p99 per token after the first")):
        peers = sorted({each.peer for each in suite.rates}) or ["the best peer"]
        found += [Figure(f"{what}, over {peer} at 0.75 of its capacity", latency(suite, peer, name), high=1) for peer in peers]
    found += [
        Figure("p99 between chunks while a long prompt joins, over without", numbers(suite, "join"), high=3),
        Figure("10× overload: tokens/s over capacity", numbers(suite, "overload rate"), low=0.95),
        Figure("10× overload: requests neither finished as alone nor refused", numbers(suite, "overload neither"), high=0),
        Figure("10× overload: growth of memory", numbers(suite, "overload memory"), high=0.02),
    ]
    fast = ("ours", "fastest")
    found += [
        ratio(suite, "deterministic", each, 0.0, ("ours", "draft"), fast, 0.95, "tokens/s over the fastest layout") for each in (1, 16)
    ]
    return found


def rates(suite: Any, cell: str, clients: int, temperature: float) -> dict[Side, dict[int, float]]:
    """Tokens/s of each side and mode, by turn."""
    found: dict[Side, dict[int, float]] = {}
    if cell == "speculation" and not any((each.cell, each.clients) == (cell, clients) for each in suite.runs):
        cell = "throughput"
    for each in suite.runs:
        if (each.cell, each.clients, each.temperature) == (cell, clients, temperature):
            found.setdefault((each.side, each.mode), {})[each.turn] = each.tokens / each.seconds
    return found


def ratio(suite: Any, cell: str, clients: int, temperature: float, ours: Side, other: Side, low: float, what: str) -> Figure:
    found = rates(suite, cell, clients, temperature)
    return Figure(f"{what}, {who(clients)}, {MODES[temperature]}", quotient(found.get(ours), found.get(other)), low=low)


def over_best(suite: Any, clients: int, temperature: float, low: float) -> Figure:
    """Ours as it comes, which drafts where that pays, over the best mode of the best peer."""
    found = rates(suite, "throughput", clients, temperature)
    peers = {side: median(values.values()) for side, values in found.items() if side[0] != "ours"}
    name = f"tokens/s over the best peer, {who(clients)}, {MODES[temperature]}"
    if not peers:
        return Figure(name, None, low=low)
    best = max(peers, key=lambda side: peers[side])
    return Figure(name, quotient(found.get(("ours", "draft")), found[best]), low=low, how=f"{best[0]}, {best[1]}")


def who(clients: int) -> str:
    return f"{clients} client{'s' * (clients > 1)}"


def quotient(ours: dict[int, float] | None, others: dict[int, float] | None) -> Spread | None:
    """Turn by turn."""
    both = sorted({*(ours or {})} & {*(others or {})})
    return Spread.of([ours[turn] / others[turn] for turn in both]) if ours and others and both else None


def latency(suite: Any, peer: str, name: str) -> Spread | None:
    found = {(each.side, each.turn): float(getattr(each, name)) for each in suite.rates if each.peer == peer}
    return quotient(*({turn: value for (which, turn), value in found.items() if which == side} for side in ("ours", peer)))


def numbers(suite: Any, cell: str) -> Spread | None:
    values = [each.value for each in suite.numbers if each.cell == cell]
    return Spread.of(values) if values else None


def tables(suite: Any) -> list[Table]:
    found = [
        [each.name, each.bound, "–" if each.spread is None else each.spread.text(3), each.verdict, each.how] for each in figures(suite)
    ]
    open_loops = [
        [
            f"{each.peer}, turn {each.turn}",
            each.side,
            f"{each.rate:.3f}",
            f"{each.first:.3f}",
            f"{each.between:.4f}",
            str(each.refused),
        ]
        for each in suite.rates
    ]
    others = [[each.cell, str(each.turn), f"{each.value:.4g}", each.how] for each in suite.numbers]
    failures = [[each.method, each.stage, each.message] for each in suite.failures]
    every = [
        Table("Figures", ["figure", "bound", "median (lowest–highest)", "verdict", "peer"], found),
        Table("Tokens per second, medians", ["cell", "side", "tokens/s", "requests", "load tool, cores"], speeds(suite.runs)),
        Table("At a rate", ["beside", "side", "requests/s", "p99 first, s", "p99 per token, s", "refused"], open_loops),
        Table("Other cells", ["cell", "turn", "value", "from"], others),
        Table("Failures", ["server", "stage", "why"], failures),
    ]
    return [table for table in every if table.rows]


def speeds(runs: Sequence[Run]) -> list[list[str]]:
    cells: dict[tuple[str, str], list[Run]] = {}
    for each in runs:
        cell = f"{each.cell}, {who(each.clients)}, {MODES[each.temperature]}"
        cells.setdefault((cell, f"{each.side}: {each.mode}"), []).append(each)
    return [
        [
            *names,
            Spread.of([each.tokens / each.seconds for each in group]).text(1),
            str(group[0].requests),
            f"{max(each.share for each in group):.2f}",
        ]
        for names, group in cells.items()
    ]
