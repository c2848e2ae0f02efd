"""``foredraft theory``: what the arithmetic of speculative decoding promises, as tables and curves, with measured points on them; and, by
enumeration, which ways of verifying a draft keep the target's distribution."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from math import inf
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from rich.console import RenderableType
from rich.text import Text

from foredraft import theory as formulas
from foredraft.cli.checks import check_extra, check_output
from foredraft.cli.failures import write_json, writing
from foredraft.cli.options import OUTPUT, JsonFile, grouped, panel
from foredraft.cli.plots import Curve, Plot, Points, draw, text_of
from foredraft.cli.tables import console, filled
from foredraft.errors import ConfigurationError
from foredraft.files import read_json

NUMBERS = panel("Numbers")
DEFAULT: Any = {"alpha": (0.2, 0.6, 0.7, 0.8, 0.9), "gamma": (2, 3, 5, 10), "c": (0.0, 0.02, 0.05, 0.1, 0.2)}
ALPHAS = [each / 100 for each in range(100)]  # of curves
STEEP = 0.95  # α from which on the best γ leaves the picture
STEPS = 72  # lengths of a curve
P, Q = (1 / 3, 2 / 3), (2 / 3, 1 / 3)  # the example of a rule that is not exact
DIGITS = 2  # of the c and ĉ of curves on which measured points lie
UNIFORM = (0.01,) * 100
HOW = {"iid": "independently", "keyed": "with the target's noise"}


@dataclass(frozen=True)
class Setting:
    """The options of the same names."""

    alpha: Annotated[list[float], NUMBERS(help="Acceptance rate; repeat for more.")] = DEFAULT["alpha"]
    gamma: Annotated[list[int], NUMBERS(help="Drafted tokens per round; repeat for more.")] = DEFAULT["gamma"]
    c: Annotated[list[float], NUMBERS(help="Time of a drafted token over that of a pass of the target; repeat for more.")] = DEFAULT["c"]
    operations: Annotated[float, NUMBERS(metavar="Ĉ", help="Operations of a drafted token over those of a token of the target.")] = 0.0
    prompt: Annotated[int, NUMBERS(metavar="N", help="Tokens of the prompt.")] = 1000
    tokens: Annotated[int, NUMBERS(metavar="K", help="New tokens.")] = 1000
    pass_ms: Annotated[float, NUMBERS(min=0.0, help="Milliseconds that a pass of the target takes to read its weights.")] = 10.0
    token_ms: Annotated[float, NUMBERS(min=0.0, help="Milliseconds more for each token that the pass reads.")] = 0.05

    def work(self, alpha: float, gamma: int, cached: bool, tokens: int | None = None) -> formulas.Work:
        return formulas.work(alpha, gamma, prompt=self.prompt, tokens=tokens or self.tokens, cached=cached)

    def seconds(self, work: formulas.Work) -> float:
        return work.seconds(self.pass_ms / 1e3, self.token_ms / 1e3, middle(self.c))


@dataclass(frozen=True)
class Measured:
    """A cell of a report of ``foredraft table``; ``c_operations`` is ĉ."""

    draft: str
    task: str
    alpha: float
    gamma: int
    c: float
    c_operations: float
    tokens_per_pass: float
    speedup: float
    operations: float

    def check(self) -> None:
        """Raises ValueError or TypeError for what no measurement gives."""
        for name in ("alpha", "gamma", "c", "c_operations", "tokens_per_pass", "speedup", "operations"):
            value, least = getattr(self, name), 0 if name in ("alpha", "gamma", "c", "c_operations") else 1e-9
            if not least <= value < inf or (name == "alpha" and value > 1):
                raise ValueError(f"{name} is {value!r}")

    @property
    def predicted(self) -> dict[str, float]:
        alpha = formulas.below_one(self.alpha)
        return {
            "tokens_per_pass": formulas.expected_tokens(alpha, self.gamma),
            "speedup": formulas.speedup(alpha, self.gamma, self.c),
            "operations": formulas.operations(alpha, self.gamma, self.c_operations),
        }


@grouped
def theory(
    *,
    setting: Setting,
    reports: Annotated[
        list[Path] | None,
        OUTPUT("--with", metavar="REPORT", help="Put the cells of a report of foredraft table --json on the curves.", show_default=False),
    ] = None,
    plots: Annotated[
        Path | None, OUTPUT(metavar="FOLDER", help="Write the curves as PNG files into it (needs matplotlib).", show_default=False)
    ] = None,
    as_json: JsonFile = None,
) -> None:
    """Show what speculative decoding promises: tokens per pass, speed-up, operations and the best γ, and which rules are exact.

    The formulas are those of Leviathan, Kalman and Matias (2023). Rules are run on small distributions, over every outcome of every draw.
    """
    check_output(as_json)
    if not 0 < setting.pass_ms + setting.token_ms < inf:
        raise ConfigurationError("--pass-ms and --token-ms must be numbers, and not both 0")
    if plots is not None:
        check_extra("matplotlib", "plot", "--plots")
        with writing(plots):
            plots.mkdir(exist_ok=True)
    once: dict[str, Any] = {name: [*dict.fromkeys(getattr(setting, name))] for name in DEFAULT}
    setting = replace(setting, **once)
    measured = [each for path in reports or () for each in read_cells(path)]
    numbers, curves = document(setting, measured), figures(setting, measured)
    if as_json is not None:
        write_json(as_json, numbers)
    if plots is not None:
        for each in curves:
            draw(each, plots)
    out = console()
    for title, content in sections(setting, numbers, curves):
        out.print(f"[bold]{title}[/bold]", content, "", sep="\n", soft_wrap=True)


def read_cells(path: Path) -> list[Measured]:
    """Raises:
    ConfigurationError: ``path`` is no report of ``foredraft table``, or has no cell.
    """
    found = read_json(path)
    if found.get("report") != "table":
        raise ConfigurationError(f"{path} is not a report of foredraft table; make one with: foredraft table … --json FILE")
    if not found.get("cells"):
        raise ConfigurationError(f"{path} has no cells")
    try:
        cells = [
            Measured(
                draft=f"{each['target']}, {each['draft']}",
                task=f"{each['task']}, temperature {each['temperature']:g}",
                alpha=each["alpha"]["value"],
                speedup=each["speedup"]["value"],
                **{name: each[name] for name in ("gamma", "c", "c_operations", "tokens_per_pass", "operations")},
            )
            for each in found["cells"]
        ]
        for cell in cells:
            cell.check()
    except KeyError as error:
        raise ConfigurationError(f"{path} is not a report of foredraft table: it lacks {error}") from error
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{path} is not a report of foredraft table: {error}") from error
    return cells


# -- numbers --------------------------------------------------------------------------------------------------------------


def document(setting: Setting, measured: Sequence[Measured]) -> dict[str, Any]:
    """All numbers, for JSON."""
    return {
        "schema": 1,
        "report": "theory",
        "chains": [
            {
                "alpha": alpha,
                "gamma": gamma,
                "tokens_per_pass": formulas.expected_tokens(alpha, gamma),
                "calls": formulas.calls(alpha, gamma, setting.tokens),
                "operations": formulas.operations(alpha, gamma, setting.operations),
                "speedups": {f"{c:g}": formulas.speedup(alpha, gamma, c) for c in setting.c},
            }
            for alpha in setting.alpha
            for gamma in setting.gamma
        ],
        "best": [best(alpha, c) for alpha in setting.alpha for c in setting.c if c > 0],
        "cache": [
            {"alpha": alpha, "gamma": gamma, "cached": cached, **asdict(work), "seconds": setting.seconds(work)}
            for alpha, gamma in [(0.0, 0), *((alpha, middle(setting.gamma)) for alpha in setting.alpha)]
            for cached in (False, True)
            for work in [setting.work(alpha, gamma, cached)]
        ],
        "rules": rules(),
        "measured": [{**asdict(each), "predicted": each.predicted} for each in measured],
    }


def best(alpha: float, c: float) -> dict[str, Any]:
    gamma = formulas.best_gamma(alpha, c)
    return {"alpha": alpha, "c": c, "gamma": gamma, "speedup": formulas.speedup(alpha, gamma, c)}


def rules() -> list[dict[str, Any]]:
    """What becomes of one token drawn from q; ``first`` is how likely token 0 comes first, p(0) where the rule is exact."""
    from foredraft.auditing.one_token import DrawAnew, exact_rules, one_token

    found = []
    for rule, proposal in [(DrawAnew(), "iid"), *exact_rules()]:
        small = one_token(rule, proposal, P, Q)
        same = None if rule.name == DrawAnew.name else one_token(rule, proposal, UNIFORM, UNIFORM).accepted
        found.append(
            {
                "rule": rule.name,
                "drawn": proposal,
                "first": small.chances[0],
                "exact": abs(small.chances[0] - P[0]) < 1e-9,
                "accepted": small.accepted,
                "accepted_uniform": same,
            }
        )
    return found


# -- curves ---------------------------------------------------------------------------------------------------------------


def figures(setting: Setting, measured: Sequence[Measured]) -> list[Plot]:
    """All curves. Measured points lie on those of their γ, and where it matters of the c or ĉ that their draft has in the median."""
    gammas = sorted({each.gamma for each in measured} or set(setting.gamma))

    def points(name: str, gamma: int, drafts: Iterable[str]) -> Points:
        return [(each.alpha, getattr(each, name)) for each in measured if each.gamma == gamma and each.draft in drafts]

    def curves(name: str, formula: Callable[..., float], symbol: str, own: dict[str, float], default: float) -> list[Curve]:
        return [
            line(
                f"γ {gamma}, {symbol} {c:g}",
                partial(formula, gamma=gamma, c=c),
                points(name, gamma, [draft for draft, each in own.items() if each == c]),
            )
            for gamma in gammas
            for c in sorted({*own.values()} or {default})
        ]

    c, of_operations = by_draft(measured, "c"), by_draft(measured, "c_operations")
    tokens = [line(f"γ {gamma}", partial(formulas.expected_tokens, gamma=gamma), points("tokens_per_pass", gamma, c)) for gamma in gammas]
    speedups = curves("speedup", formulas.speedup, "c", c, middle(setting.c))
    operations = curves("operations", formulas.operations, "ĉ", of_operations, setting.operations)
    calls = [
        Curve(each.label, *([(alpha, setting.tokens / per_pass) for alpha, per_pass in own] for own in (each.points, each.measured)))
        for each in tokens
    ]
    bests = [line(f"c {c:g}", partial(formulas.best_gamma, c=c), most=STEEP) for c in setting.c if c > 0]
    passes = f"Passes of the target for {setting.tokens:,} tokens"
    found = [
        Plot("tokens", "Expected tokens per pass", "α", "tokens per pass", tokens),
        Plot("speedup", "Speed-up over plain decoding", "α", "speed-up", speedups),
        Plot("operations", "Arithmetic operations against plain decoding", "α", "operations", operations),
        Plot("calls", passes, "α", "passes", calls),
    ]
    return [*found, *([Plot("best-gamma", "Best length of a draft", "α", "best γ", bests)] if bests else []), *caches(setting)]


def by_draft(measured: Sequence[Measured], name: str) -> dict[str, float]:
    """The median of each draft's values, rounded."""
    values: dict[str, list[float]] = {}
    for each in measured:
        values.setdefault(each.draft, []).append(getattr(each, name))
    return {draft: round(median(own), DIGITS) for draft, own in values.items()}


def line(label: str, value: Callable[[float], float], measured: Points = (), most: float = 1.0) -> Curve:
    return Curve(label, [(alpha, value(alpha)) for alpha in ALPHAS if alpha <= most], measured)


def caches(setting: Setting) -> list[Plot]:
    """Tokens read and seconds, against new tokens, for plain decoding and the middle α and γ."""
    alpha, gamma = middle(setting.alpha), middle(setting.gamma)
    lengths = [max(1, setting.tokens * step // STEPS) for step in range(1, STEPS + 1)]
    ways = {"plain": (0.0, 0), f"α {alpha:g}, γ {gamma}": (alpha, gamma)}
    works = {
        f"{name}, {'with' if cached else 'no'} cache": [(length, setting.work(*way, cached, length)) for length in lengths]
        for name, way in ways.items()
        for cached in (False, True)
    }
    read = [Curve(name, [(length, work.target_tokens) for length, work in own]) for name, own in works.items()]
    spent = [Curve(name, [(length, setting.seconds(work)) for length, work in own]) for name, own in works.items()]
    behind = f"new tokens behind {setting.prompt:,}"
    return [
        Plot("tokens-read", "Tokens that the target reads", behind, "tokens read", read, log=True),
        Plot("seconds", "Seconds with and without a cache", behind, "seconds", spent, log=True),
    ]


def middle(values: Sequence[Any]) -> Any:
    return sorted(values)[len(values) // 2]


# -- what is shown --------------------------------------------------------------------------------------------------------


def sections(setting: Setting, numbers: dict[str, Any], curves: Sequence[Plot]) -> list[tuple[str, RenderableType]]:
    """Title and content, in order."""
    shown = {each.name: (each.title, Text(text_of(each))) for each in curves}
    title = f"Chains: calls for {setting.tokens:,} tokens, operations at ĉ {setting.operations:g}, and speed-up at several c"
    parts = [(title, chains(setting, numbers["chains"])), shown["tokens"], shown["speedup"], shown["operations"], shown["calls"]]
    parts += [("Best γ and its speed-up", bests(setting, numbers["best"])), shown["best-gamma"]] if numbers["best"] else []
    read = f"{setting.tokens:,} tokens behind {setting.prompt:,}, c {middle(setting.c):g}: a pass takes {setting.pass_ms:g} ms"
    parts += [(f"{read}, and {setting.token_ms:g} ms per token", cache(numbers["cache"])), shown["tokens-read"], shown["seconds"]]
    parts.append(("One token drawn from q = (2/3, 1/3), verified against p = (1/3, 2/3), by enumeration", verified(numbers["rules"])))
    if numbers["measured"]:
        parts.append(("Measured, and by the formula", compared(numbers["measured"])))
    return parts


def chains(setting: Setting, lines: Sequence[dict[str, Any]]) -> RenderableType:
    columns = [f">c {c:g}" for c in setting.c]
    cells = (
        [f"{each['alpha']:g}", str(each["gamma"]), f"{each['tokens_per_pass']:.3f}", f"{each['calls']:,.0f}", f"{each['operations']:.2f}"]
        + [f"{value:.2f}" for value in each["speedups"].values()]
        for each in lines
    )
    return filled([">α", ">γ", ">tokens per pass", ">calls", ">operations", *columns], cells)


def bests(setting: Setting, lines: Sequence[dict[str, Any]]) -> RenderableType:
    by_alpha = {alpha: [each for each in lines if each["alpha"] == alpha] for alpha in setting.alpha}
    cells = ([f"{alpha:g}", *(f"{each['gamma']}: {each['speedup']:.2f}" for each in own)] for alpha, own in by_alpha.items())
    return filled([">α", *(f">c {c:g}" for c in setting.c if c > 0)], cells)


def cache(lines: Sequence[dict[str, Any]]) -> RenderableType:
    cells = (
        [f"α {each['alpha']:g}, γ {each['gamma']}" if each["gamma"] else "plain", "yes" if each["cached"] else "no"]
        + [f"{each[name]:,.0f}" for name in ("target_passes", "target_tokens", "draft_tokens")]
        + [f"{each['seconds']:,.2f}"]
        for each in lines
    )
    return filled(["", "cache", ">passes", ">tokens read by the target", ">by the draft", ">seconds"], cells)


def verified(lines: Sequence[dict[str, Any]]) -> RenderableType:
    cells = (
        [
            each["rule"],
            HOW[each["drawn"]],
            fraction(each["first"]),
            "yes" if each["exact"] else "NO",
            fraction(each["accepted"]),
            "–" if each["accepted_uniform"] is None else f"{each['accepted_uniform']:.0%}",
        ]
        for each in lines
    )
    return filled(["rule", "draft drawn", ">token 0 comes first", "exact", ">accepted", ">accepted, p = q uniform over 100"], cells)


def compared(lines: Sequence[dict[str, Any]]) -> RenderableType:
    cells = (
        [each["draft"], each["task"], str(each["gamma"]), f"{each['alpha']:.3f}", f"{each['c']:.3f}"]
        + [f"{each[name]:.2f} / {each['predicted'][name]:.2f}" for name in ("tokens_per_pass", "speedup", "operations")]
        for each in lines
    )
    return filled(["draft", "task", ">γ", ">α", ">c", ">tokens per pass", ">speed-up", ">operations"], cells)


def fraction(value: float) -> str:
    simple = Fraction(value).limit_denominator(100)
    return f"{simple} = {value:.4f}" if abs(simple - value) < 1e-9 else f"{value:.4f}"
