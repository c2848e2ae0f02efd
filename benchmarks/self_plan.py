"""What the suite of self-speculation runs: settings, methods, and the texts that they meet on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import speed_plan
from benchmarks.peer_process import FOREDRAFT, TRANSFORMERS
from benchmarks.self_models import WIDER
from benchmarks.speed_plan import AUTO, EARLY_EXIT, LAYER_SKIP, PLAIN, RANDOM, TEXT, WILD, Cell, Method
from benchmarks.suite import option
from foredraft.errors import ConfigurationError

DEEP, WIDE, FROZEN, UNTRAINED = "python-deep", "python-deep-100m", "python-8m", "python-deep without the recipe"
SHALLOW = f"{FROZEN} × {WIDER}"
DRAFT_VERIFY, SEARCHED, GREEDILY = "draft-verify", "searched set", "greedy elimination"
SEARCHING, LATER = "searching", "searching, later"
PARTS = ("exits", LAYER_SKIP, "transformers", DRAFT_VERIFY, "auto-search", "frozen", "nothing")
SAMPLED, LOST = "sampled", "random prompt"
RANDOM_TEXTS, PROMPT = 3, 64  # texts of each kind, and tokens of a prompt
LONG, PLAIN_EVERY = 500, 5  # tokens of a text that is searched beside, and texts for one that plain decoding writes too


@dataclass(frozen=True)
class Settings(speed_plan.Settings):
    """What is run, besides what the speed suite's settings say."""

    targets: tuple[str, ...] = (WIDE, SHALLOW)
    draft: str = ""
    dtypes: tuple[str, ...] = option(("bfloat16",), "bfloat16, float32.", flag="--dtype")
    batches: tuple[int, ...] = (1,)
    rules: tuple[str, ...] = (AUTO,)
    modes: tuple[str, ...] = ()
    drafters: tuple[str, ...] = ()
    peers: tuple[str, ...] = (TRANSFORMERS,)
    shapes: tuple[str, ...] = (AUTO,)
    ngram: int = 3
    prompts: tuple[str, ...] = ()
    chat: bool = False
    temperature: float = 0.0
    worst: bool = True
    deep: str = option(f"zoo:{DEEP}", "The model that was trained to exit early: a folder or zoo:NAME.")
    deep_plain: str = option("", "Folder of the same model trained without the recipe.", place=True)
    frozen: str = option(f"zoo:{FROZEN}", "The model that exits are trained beside.")
    parts: str = option(",".join(PARTS), "Of the suite.", metavar="NAME,NAME")
    corpus: Path | None = option(None, "Folder of python -m recipes.zoo corpus; collected into --work unless given.", place=True)
    exit: str = option(AUTO, "Where layer-skip leaves the target with shape auto: a layer, or auto.")
    exits: tuple[int, ...] = option((4, 8), "Exits of the chains that are compared with transformers'.", least=1, flag="--fixed-exit")
    lengths: tuple[int, ...] = option((3, 5), "γ of these chains.", least=1, flag="--gamma")
    limit: int | None = option(8, "Held-out prompts whose continuation is timed.", least=1)
    documents: int = option(16, "Held-out files that exits are judged on.", least=2)
    answered: int = option(64, "Held-out prompts that trained exits are judged on.", least=2)
    searching: int = option(25_000, "Tokens that draft-verify:auto writes; the last fifth is compared.", least=5 * LONG)
    trials: int = option(200, "Trials of the search for sublayers to leave out.", least=1)
    texts: int = option(1200, "Texts that exits are trained on.", least=2)
    steps: int = option(250, "Steps of their training.", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = [each for each in self.chosen if each not in PARTS]
        if unknown or not self.chosen:
            raise ConfigurationError(f"unknown parts {', '.join(unknown)}; choose from {', '.join(PARTS)}")
        if not (self.exit == AUTO or self.exit.isdecimal()):
            raise ConfigurationError(f"--exit is the number of a layer or auto, got {self.exit!r}")

    @property
    def chosen(self) -> list[str]:
        return [each for each in self.parts.split(",") if each]

    def includes(self, *parts: str) -> bool:
        return any(each in self.chosen for each in parts)


def skipping(setting: str, exit: object, length: int = 0, *, hopeless: bool = False) -> Method:
    """``layer-skip`` here; chains of ``length``, or what the planner chooses."""
    shape = (("shape", f"chain({length})"),) if length else ()
    return Method(FOREDRAFT, LAYER_SKIP, setting, length, (("drafter", f"{LAYER_SKIP};exit={exit}"), *shape), hopeless, fresh=hopeless)


def methods(settings: Settings, target: str) -> list[Method]:
    """Everyone who meets on ``target``; plain ones first, and those for text that cannot be guessed last."""
    plain, planned = Method(FOREDRAFT, PLAIN), skipping(AUTO, settings.exit)
    if target == SHALLOW:
        spread = Method(FOREDRAFT, DRAFT_VERIFY, AUTO, 0, (("drafter", DRAFT_VERIFY),))
        return [plain, planned, *([spread] if settings.includes(DRAFT_VERIFY) else [])] if settings.includes("nothing") else []
    found = [plain, planned] if settings.includes(LAYER_SKIP, "transformers") else []
    if settings.includes("transformers"):
        found.append(Method(TRANSFORMERS, PLAIN))
        for exit in settings.exits:
            for length in settings.lengths:
                found.append(skipping(pair(exit, length), exit, length))
                found.append(Method(TRANSFORMERS, EARLY_EXIT, pair(exit, length), length, (("exit", exit),)))
    if settings.includes(DRAFT_VERIFY, "auto-search"):
        found += [Method(FOREDRAFT, DRAFT_VERIFY, f"{AUTO}, {each}") for each in (SEARCHED, GREEDILY)]
    if settings.includes("auto-search"):
        found.append(Method(FOREDRAFT, DRAFT_VERIFY, f"{AUTO}, {SEARCHING}", 0, (("drafter", f"{DRAFT_VERIFY}:auto"),), hopeless=True))
    if settings.includes("nothing"):
        found += [skipping(f"{AUTO}, {each}", settings.exit, hopeless=True) for each in (RANDOM, LOST)]
    return found if plain in found or not found else [plain, *found]


def repeats(settings: Settings, target: str) -> int:
    """Measured calls of each method with each prompt; more where nothing pays, to tell 0.98 from 1."""
    return settings.repeats * (6 if target == SHALLOW else 1)


def pair(exit: int, length: int) -> str:
    return f"exit {exit}, γ={length}"


def cells(settings: Settings, texts: Sequence[tuple[str, Sequence[int]]], everyone: Sequence[Method], vocabulary: int) -> list[Cell]:
    """Every prompt greedily for everyone and at temperature 1 for the planner, then text that cannot be guessed: every token drawn
    uniformly, and random prompts that are continued greedily."""
    found, plain, tokens = list[Cell](), f"{FOREDRAFT} {PLAIN}", settings.tokens
    main = [each.name for each in everyone if not each.hopeless]
    planned = [each.name for each in everyone if each.mode == LAYER_SKIP and each.automatic and not each.hopeless]
    for index, (category, ids) in enumerate(texts):
        if len(main) > 1:
            found.append(Cell(TEXT, index, category, (tuple(ids),), tokens, 0.0, tuple(main)))
        if settings.includes(LAYER_SKIP, "nothing") and planned:
            found.append(Cell(SAMPLED, index, category, (tuple(ids),), tokens, 1.0, (plain, *planned)))
    generator = random.Random(0)
    for scenario, temperature in ((RANDOM, WILD), (LOST, 0.0)):
        lost = [each.name for each in everyone if each.hopeless and each.setting.endswith(scenario)]
        for index in range(RANDOM_TEXTS if lost else 0):
            row = tuple(generator.randrange(vocabulary) for _ in range(PROMPT))
            found.append(Cell(scenario, index, scenario, (row,), tokens, temperature, (plain, *lost)))
    return found


def long_cells(prompts: Sequence[Sequence[int]]) -> list[Cell]:
    """Long texts one after the other for ``draft-verify:auto``; the searched set writes the last fifth of them too, and plain decoding
    those and some of the others."""
    plain, searching, searched = (
        f"{FOREDRAFT} {each}" for each in (PLAIN, *(f"{DRAFT_VERIFY}, {AUTO}, {each}" for each in (SEARCHING, SEARCHED)))
    )
    found = []
    for index, ids in enumerate(prompts):
        later = 5 * index >= 4 * len(prompts)
        who = (plain, searching, searched) if later else (plain, searching) if index % PLAIN_EVERY == 0 else (searching,)
        found.append(Cell(LATER if later else SEARCHING, index, "held-out", (tuple(ids),), LONG, 0.0, who))
    return found
