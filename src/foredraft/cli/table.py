"""``foredraft table``: acceptance, costs and speed-up of drafts on tasks, measured beside what theory predicts, in the form of papers.

Plain decoding and every draft with every γ take turns on the prompts of a task. α comes from the rounds: a round that keeps k tokens out of
the γ it asked for has k successes, and one failure unless k = γ. A token that the drafter did not propose is a failure, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from rich.console import Group, RenderableType
from torch import nn

from foredraft import theory, verification
from foredraft.auditing.prompts import default_prompts
from foredraft.choices import choose_rule
from foredraft.cli.alpha import between, chain_costs, measured
from foredraft.cli.generation import load_speculator, make_drafter
from foredraft.cli.progress import Progress
from foredraft.cli.settings import Contest, Decoding, parse_options
from foredraft.cli.tables import add_row, in_markdown, new_table
from foredraft.cli.tune import after_prefill
from foredraft.drafters.base import Drafter
from foredraft.errors import ConfigurationError
from foredraft.estimates import quotient, turned
from foredraft.loading import load_tokenizer
from foredraft.planning import CostModel, FixedPlanner, Round, search
from foredraft.planning.costs import timed_beforehand
from foredraft.planning.teacher_forced import Share
from foredraft.shapes import TreeShape
from foredraft.speculator import Speculator
from foredraft.stats import Stats
from foredraft.text import encode, padded

BIGRAM = "bigram"
PAPERS = "rejection"  # the rule of the paper
STAR = "★"


@dataclass(frozen=True)
class Setting:
    """The options of the same names; ``tasks`` are prompts by name, none for the built-in ones."""

    contest: Contest
    targets: Sequence[str]
    tasks: Mapping[str, Sequence[str]]
    temperatures: Sequence[float]
    gammas: Sequence[int]
    rule: str | None
    tokens: int
    repeats: int


class Recording(FixedPlanner):
    """Always the same chain; keeps what rounds asked for and what came of it."""

    learns = True

    def __init__(self, gamma: int, drafter: Drafter):
        super().__init__(TreeShape.chain(gamma), exits=drafter.info.exits)
        self.rounds: list[Round] = []

    def passes_over(self, rows: int, passes: int) -> bool:
        return False

    def observe(self, rows: Sequence[Any], done: Round) -> None:
        super().observe(rows, done)
        self.rounds.append(done)


@dataclass
class Way:
    """A draft with one γ, or plain decoding, whose γ is 0; and its runs, ``[prompt, repeat]``."""

    draft: str
    gamma: int
    speculator: Any
    seconds: list[list[float]] = field(default_factory=list)
    rounds: list[list[Round]] = field(default_factory=list)  # by prompt
    stats: list[Stats] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.planner = Recording(self.gamma, self.speculator.drafter)


@dataclass(frozen=True)
class Cell:
    """One line of the table.

    Attributes:
        c: seconds of a draft of γ tokens, over γ passes of the target.
        c_operations: ĉ, by weights; c where the target's own layers draft.
        tokens_per_pass, speedup, operations: measured; speed-up and operations are against plain decoding.
        predicted: of the speed-up, by the formula with c.
        predicted_by_costs: the same by what passes over so many tokens and whole drafts were measured to take.
        best: the fastest of its target, task and temperature, and faster than plain decoding.
    """

    target: str
    draft: str
    task: str
    temperature: float
    gamma: int
    rule: str
    alpha: Share
    c: float
    c_operations: float
    tokens_per_pass: float
    speedup: Share
    predicted: float
    predicted_by_costs: float
    operations: float
    predicted_operations: float
    best: bool = False


def run(setting: Setting, progress: Progress) -> Iterator[list[Cell]]:
    """All cells, those of a target, a task and a temperature together."""
    for target in setting.targets:
        yield from on_target(replace(setting.contest, target=target), setting, progress)


def on_target(contest: Contest, setting: Setting, progress: Progress) -> Iterator[list[Cell]]:
    progress.show(f"loading {contest.target}")
    tokenizer = load_tokenizer(contest.target)
    tasks = setting.tasks or {"built-in": default_prompts(contest.target)}
    rows = {name: [encode(tokenizer, each, contest.target) for each in prompts] for name, prompts in tasks.items()}
    # unknown names before any weights are read
    drafters = {name: make_drafter(name, own, tokenizer) for name, own in contest.options.items()}
    drafters[BIGRAM] = make_drafter("ngram", {"order": 2}, tokenizer)
    plain = load_speculator(contest.plain, tokenizer, reuse_prefix=False)
    longest = max(setting.gammas)
    shape, speculators = TreeShape.chain(longest), {}
    for name, drafter in drafters.items():  # "eager" leaves the model as it is, packed where the Speculator that loaded it packed it
        speculators[name] = made = Speculator(plain.model, drafter, shape=shape, reuse_prefix=False, execution="eager")
        made.rule, made.proposal = choose_rule(rule_of(setting, drafter, longest), drafter, shape)  # what it offers depends on the target
    costs = {}
    for name, speculator in speculators.items():
        progress.show(f"{contest.target}: measuring the costs of {name}")
        costs[name] = measured(speculator, longest)
    for task, prompts in rows.items():
        given = [padded(plain.model, [row], tokenizer) for row in prompts]
        for temperature in setting.temperatures:
            progress.show(f"{contest.target}: {task}, temperature {temperature:g}")
            ways = [Way(name, gamma, each) for name, each in speculators.items() for gamma in setting.gammas]
            way = Way("plain", 0, plain)
            take_turns([way, *ways], given, setting, temperature)
            yield starred([cell_of(each, way, costs[each.draft], contest.target, task, temperature) for each in ways])


def rule_of(setting: Setting, drafter: Drafter, gamma: int) -> str:
    """As asked for, else the paper's, where it fits what the drafter proposes; the best one otherwise, which is match for drafts that are
    not drawn from q. Greedy decoding has one rule in any case."""
    rule, offered = setting.rule or PAPERS, drafter.proposals_for(TreeShape.chain(gamma))
    return rule if rule == "auto" or {*verification.describe(rule).proposals} & {*offered} else "auto"


# -- measuring --------------------------------------------------------------------------------------------------------------


def take_turns(ways: list[Way], prompts: Sequence[Mapping[str, Any]], setting: Setting, temperature: float) -> None:
    """Every way on every prompt, ``repeats`` times after a warm-up, in an order that changes from repeat to repeat. What drafters learn
    from a text, they forget before the next turn, in which the same text may come again."""
    sampling = {**Decoding(temperature=temperature, top_k=0).sampling(), "num_beams": 1}
    for each in ways:
        each.seconds, each.rounds = [[] for _ in prompts], [[] for _ in prompts]
    for repeat in range(setting.repeats + 1):
        for way in turned(ways, repeat):
            way.speculator.planner = way.planner
            way.speculator.drafter.forget()
            for number, prompt in enumerate(prompts):
                way.planner.rounds = []
                stats = way.speculator.generate(**prompt, **sampling, max_new_tokens=setting.tokens, seed=repeat, repeatable=False).stats
                if repeat:  # the first is the warm-up
                    way.seconds[number].append(after_prefill(stats, 1))
                    way.rounds[number] += way.planner.rounds
                    way.stats.append(stats)


def cell_of(way: Way, plain: Way, costs: CostModel, target: str, task: str, temperature: float) -> Cell:
    """Raises:
    ConfigurationError: every text was over before there was room for a draft.
    """
    if not any(each.asked[0] for own in way.rounds for each in own):
        raise ConfigurationError(f"{target} ends every text of task {task!r} at once; give other prompts")
    drafter, gamma = way.speculator.drafter, way.gamma
    rounds = [each for own in way.rounds for each in own if each.asked[0]]
    complete(costs, drafter, [each for own in plain.rounds for each in own], rounds)
    alpha = acceptance(way.rounds)
    kept, passes, drafted = (sum(getattr(each, name) for each in way.stats) for name in ("kept", "row_passes", "drafted"))
    c = costs.draft_seconds(1, (1,) * gamma) / (gamma * costs.pass_seconds(1, 1, context_of(rounds)))
    of_draft = c if drafter.info.shares_target else drafted_weights(drafter.info) / weights_of(way.speculator.model)
    below = theory.below_one(alpha.value)
    return Cell(
        target=target,
        draft=way.draft,
        task=task,
        temperature=temperature,
        gamma=gamma,
        rule=way.stats[0].rule,
        alpha=alpha,
        c=c,
        c_operations=of_draft,
        tokens_per_pass=kept / passes,
        speedup=gain(plain.seconds, way.seconds),
        predicted=theory.speedup(below, gamma, c),
        predicted_by_costs=by_costs(below, gamma, rounds, costs),
        operations=(passes + drafted * (1 + of_draft)) / kept,
        predicted_operations=theory.operations(below, gamma, of_draft),
    )


def gain(plain: Sequence[Sequence[float]], drafted: Sequence[Sequence[float]]) -> Share:
    """The speed-up from seconds ``[prompt, repeat]``; a single run has no interval."""
    found = quotient(np.array(plain), np.array(drafted)).spread
    return Share(found.median, None, None) if np.size(drafted) == 1 else Share(*astuple(found))


def complete(costs: CostModel, drafter: Drafter, plain: Sequence[Round], drafting: Sequence[Round]) -> None:
    """Add what is not timed beforehand: the rest of a round, and drafts that only look something up."""
    for rounds in (plain, drafting):
        costs.rest.measured(1, round(median(each.nodes for each in rounds)), median(each.rest for each in rounds))
    if not (timed_beforehand(drafter) or drafter.info.shares_target):
        costs.level.measured(1, 1, median(each.draft / each.asked[0] for each in drafting))


def context_of(rounds: Sequence[Round]) -> float:
    return mean(each.context for each in rounds)


def acceptance(by_prompt: Sequence[Sequence[Round]]) -> Share:
    """α, with an interval over prompts. Rounds without room for a draft do not count."""
    tried = [[each for each in rounds if each.asked[0]] for rounds in by_prompt]
    hits = [float(sum(each.accepted[0] for each in rounds)) for rounds in tried]
    misses = [sum(each.accepted[0] < each.asked[0] for each in rounds) for rounds in tried]
    return Share.of(hits, [hit + miss for hit, miss in zip(hits, misses)], most=1.0)


def by_costs(alpha: float, gamma: int, rounds: Sequence[Round], costs: CostModel) -> float:
    """The speed-up of a chain that keeps as many tokens as the formula says, in rounds that take what they were measured to take."""
    drafted = sum(any(each.drafted[0]) for each in rounds) / len(rounds)  # the other rounds had no draft and cost less
    if not drafted:
        return 1.0
    priced = chain_costs(costs, gamma, context_of(rounds), drafted)
    accepted = (theory.expected_tokens(alpha, gamma) - 1) / drafted
    return search.priced(search.chain(gamma), accepted, (1,) * gamma, priced).rate / search.plain(priced).rate


def drafted_weights(info: Any) -> int:
    """Of the draft model, or of the head."""
    modules = [info.draft_model and info.draft_model.model, info.head]
    return sum(weights_of(each) for each in modules if isinstance(each, nn.Module))


def weights_of(model: nn.Module) -> int:
    """Weights that a token is multiplied with; of an embedding it reads one line, and nothing of an encoder."""
    config = getattr(model, "config", None)
    apart = set(model.get_encoder().modules()) if getattr(config, "is_encoder_decoder", False) else set()  # type: ignore[operator]
    multiplied = [each for each in model.modules() if each not in apart and not isinstance(each, nn.Embedding)]
    return sum(weight.numel() for module in multiplied for weight in module.parameters(recurse=False))


def starred(cells: Sequence[Cell]) -> list[Cell]:
    """With the fastest marked, if it is faster than plain decoding."""
    fastest = max(cells, key=lambda cell: cell.speedup.value)
    return [replace(cell, best=cell is fastest and cell.speedup.value > 1) for cell in cells]


# -- what is shown ----------------------------------------------------------------------------------------------------------

NAMES = ("target", "draft", "task")
FIGURES = ("T", "γ", "α", "95 %", "c", "speed-up", "95 %", "formula", "costs", "tokens/pass", "operations")
LATEX = {
    "γ": r"$\gamma$", "α": r"$\alpha$", "×": r"$\times$", STAR: r"$\star$", "%": r"\%", "_": r"\_", "&": r"\&", "#": r"\#", "–": "--",
    "$": r"\$", "{": r"\{", "}": r"\}", "\\": r"$\backslash$", "~": r"$\sim$", "^": r"\^{}", "<": "$<$", ">": "$>$", "|": "$|$",
}  # fmt: skip


def lines(cells: Sequence[Cell]) -> list[list[str]]:
    """The cells as text, under ``NAMES`` and ``FIGURES``."""
    return [
        [
            *(each.target, each.draft, each.task, f"{each.temperature:g}", str(each.gamma)),
            *(f"{each.alpha.value:.3f}", between(each.alpha, 3), f"{each.c:.3f}"),
            *(f"{each.speedup.value:.2f}×" + (f" {STAR}" if each.best else ""), between(each.speedup, 2)),
            *(f"{each.predicted:.2f}×", f"{each.predicted_by_costs:.2f}×", f"{each.tokens_per_pass:.2f}", f"{each.operations:.2f}"),
        ]
        for each in cells
    ]


def report(cells: Sequence[Cell]) -> RenderableType:
    """For a terminal: a table per target. Names wrap where there is no room, figures do not."""
    tables = []
    for target in dict.fromkeys(each.target for each in cells):
        table = new_table(*NAMES[1:], *(f">{each}" for each in FIGURES))
        table.title, table.title_justify = target, "left"
        for column in table.columns[: len(NAMES) - 1]:
            column.no_wrap, column.overflow = False, "fold"
        for line in lines([each for each in cells if each.target == target]):
            add_row(table, *line[1:])
        tables.append(table)
    return Group(*tables)


def document(setting: Setting, cells: Sequence[Cell], *, complete: bool = True) -> dict[str, Any]:
    """Everything, for JSON; ``foredraft theory --with`` reads it. A run that was interrupted or failed is not ``complete``."""
    own = {
        "dtype": setting.contest.dtype,
        "drafter_options": parse_options(setting.contest.drafter_option or ()),
        "threads": torch.get_num_threads(),
        "tokens": setting.tokens,
        "repeats": setting.repeats,
    }
    when = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    return {"schema": 1, "report": "table", **own, **when, "complete": complete, "cells": [asdict(each) for each in cells]}


def markdown(cells: Sequence[Cell]) -> str:
    return in_markdown([*NAMES, *(f">{each}" for each in FIGURES)], lines(cells))


def latex(cells: Sequence[Cell]) -> str:
    """A ``tabular`` that needs no package."""
    escape = str.maketrans(LATEX)
    kinds = "l" * len(NAMES) + "r" * len(FIGURES)
    head, *body = [" & ".join(cell.translate(escape) for cell in row) + r" \\" for row in [[*NAMES, *FIGURES], *lines(cells)]]
    return "\n".join([rf"\begin{{tabular}}{{{kinds}}}", r"\hline", head, r"\hline", *body, r"\hline", r"\end{tabular}"]) + "\n"
