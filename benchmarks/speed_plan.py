"""What the speed suite runs: settings, methods, and the scenarios that they meet in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peer_process import FOREDRAFT, TRANSFORMERS, PeerSettings
from benchmarks.suite import option
from foredraft.errors import ConfigurationError

PLAIN, DRAFT, LOOKUP, COMPILED = "plain", "draft", "lookup", "compiled"
LAYER_SKIP, EARLY_EXIT = "layer-skip", "early-exit"
MODES = (PLAIN, DRAFT, LOOKUP)
PEERS = (TRANSFORMERS, "vllm", "llamacpp", "openvino")
ON_CUDA = (TRANSFORMERS,)  # peers that are measured on a GPU
AUTO = "auto"
TEXT, BATCH, HOPELESS, RANDOM = "text", "batch", "hopeless draft", "random text"
WILD = 100.0  # temperature at which every token is as likely as any other


@dataclass(frozen=True)
class Settings(PeerSettings):
    targets: tuple[str, ...] = option(("zoo:python-300m",), "A checkpoint folder or zoo:NAME.", flag="--target")
    draft: str = option("zoo:python-1m", "The draft model, with the target's tokenizer.")
    dtypes: tuple[str, ...] = option(("bfloat16", "float32"), "bfloat16, float32, float16.", flag="--dtype")
    batches: tuple[int, ...] = option((1, 4, 16), "Rows.", least=1, flag="--batch")
    rules: tuple[str, ...] = option((AUTO,), "Of Foredraft's, where it samples.", flag="--rule")
    modes: tuple[str, ...] = option(MODES, "plain, draft, lookup, compiled.", flag="--mode")
    drafters: tuple[str, ...] = option((), "Further drafters of Foredraft's.", flag="--drafter", metavar="NAME[:SOURCE][;KEY=VALUE]")
    peers: tuple[str, ...] = option(PEERS, "Who else takes part.", flag="--peer")
    lengths: tuple[int, ...] = option((5,), "γ of the peers' drafts; the best counts.", least=1, flag="--gamma")
    shapes: tuple[str, ...] = option((AUTO, "chain(5)"), "Of Foredraft's drafts, auto for the planner.", flag="--shape")
    ngram: int = option(3, "Longest match of prompt lookup, on all sides that can set it.", least=1)
    prompts: tuple[str, ...] = option(("embedded",), "embedded, or a file in any format of benchmarks.datasets.", metavar="FILE")
    limit: int | None = option(3, "Prompts of each category, at most.", least=1)
    chat: bool = option(False, "Each turn is a user's message; apply the chat template.")
    tokens: int = option(64, "New tokens per row.")
    repeats: int = option(3, "Measured calls.", least=1)
    warmups: int = option(1, "Calls before, of each method.", least=1)
    temperature: float = option(0.0, "Above 0 Foredraft samples, and no peer takes part.", least=0.0)
    worst: bool = option(True, "Also text that cannot be guessed.")

    def __post_init__(self) -> None:
        for name, known in (("modes", (*MODES, COMPILED)), ("dtypes", ("bfloat16", "float32", "float16"))):
            unknown = [each for each in getattr(self, name) if each not in known]
            if unknown:
                raise ConfigurationError(f"unknown {name} {', '.join(unknown)}; choose from {', '.join(known)}")
        if self.tokens < 2:
            raise ConfigurationError(f"{self.tokens} tokens have no time between them; ask for 2 or more")


@dataclass(frozen=True)
class Method:
    """One way to decode, of one ``side``.

    Attributes:
        setting: what sets it apart from others of its side and mode.
        length: γ, 0 where the side chooses itself.
        options: for the adapter.
        hopeless: it is for text that cannot be guessed; if it has a draft model, one that knows nothing.
        weights: what they are made of where they are converted, unless it is the dtype.
        fresh: its drafter forgets before every call what earlier texts taught it; the others' forget between repeats.
    """

    side: str
    mode: str
    setting: str = ""
    length: int = 0
    options: tuple[tuple[str, Any], ...] = field(default=())
    hopeless: bool = False
    fresh: bool = False
    weights: str = ""

    @property
    def name(self) -> str:
        return f"{self.side} {self.mode}" + (f", {self.setting}" if self.setting else "")

    @property
    def automatic(self) -> bool:
        return self.setting.startswith(AUTO)


@dataclass(frozen=True)
class Cell:
    """One call that every one of ``methods``, by name, makes in every repeat: ``ids`` row by row, continued by ``tokens`` each."""

    scenario: str
    index: int
    category: str
    ids: tuple[tuple[int, ...], ...]
    tokens: int
    temperature: float
    methods: tuple[str, ...]

    @property
    def batch(self) -> int:
        return len(self.ids)

    @property
    def key(self) -> tuple[str, int, int]:
        return self.scenario, self.batch, self.index


def methods(settings: Settings) -> list[Method]:
    """Everyone who meets on the prompts; plain ones first, so that texts can be compared with theirs, sides alternating."""
    found: list[Method] = []
    greedy = settings.temperature == 0
    sides = (FOREDRAFT, *(settings.peers if greedy else ()))
    for mode in (*settings.modes, *settings.drafters):
        for side in sides:
            found += ours(settings, mode) if side == FOREDRAFT else theirs(settings, side, mode)
    return found


def ours(settings: Settings, mode: str) -> list[Method]:
    if mode == COMPILED:
        return []
    rules = settings.rules if settings.temperature else (AUTO,)
    if mode == PLAIN:
        return [Method(FOREDRAFT, PLAIN)]
    made = []
    for rule in rules:
        for shape in settings.shapes:
            setting = shape if rule == AUTO else f"{shape}, {rule}"
            options = {"rule": rule, **({} if shape == AUTO else {"shape": shape}), **({} if mode in MODES else {"drafter": mode})}
            made.append(Method(FOREDRAFT, mode, setting, _chain(shape), tuple(options.items())))
    return made


def theirs(settings: Settings, side: str, mode: str) -> list[Method]:
    """Settings in which a peer is tried; the best counts."""
    if mode == PLAIN:
        backends = ("PA", "SDPA") if side == "openvino" else ()
        return [Method(side, PLAIN, backend, 0, (("backend", backend),)) for backend in backends] or [Method(side, PLAIN)]
    if mode == COMPILED:
        return [Method(side, COMPILED)] if side == TRANSFORMERS else []
    if mode not in MODES:
        return []
    made = []
    for length in settings.lengths:
        made.append(Method(side, mode, f"γ={length}", length))
        if side == "llamacpp" and mode == LOOKUP:
            made.append(Method(side, mode, f"ngram-simple, γ={length}", length, (("kind", "ngram-simple"),)))
    return made


def _chain(shape: str) -> int:
    """γ of ``chain(γ)``, else 0."""
    inner = shape.removeprefix("chain(").removesuffix(")")
    return int(inner) if shape.startswith("chain(") and inner.isdigit() else 0


def hopeless(settings: Settings) -> list[Method]:
    """Foredraft's methods for text that cannot be guessed: a draft model that knows nothing, on a greedy text, and prompt lookup, on
    a random one. They are apart from the others, because what a planner learns there it would take along to their next text."""
    modes = {DRAFT: "auto, untrained", LOOKUP: "auto, random text"}
    return [
        Method(FOREDRAFT, mode, setting, 0, (("rule", AUTO),), hopeless=True) for mode, setting in modes.items() if mode in settings.modes
    ]


def automatic(found: Iterable[Method]) -> list[Method]:
    """Foredraft's plain one, and those whose shapes are chosen as they go, or else the first of each mode: those that batches are
    measured with."""
    mine = [each for each in found if each.side == FOREDRAFT and not each.hopeless]
    chosen = [each for each in mine if each.mode == PLAIN]
    for mode in dict.fromkeys(each.mode for each in mine if each.mode != PLAIN):
        alike = [each for each in mine if each.mode == mode]
        chosen.append(next((each for each in alike if each.automatic), alike[0]))
    return chosen


def cells(settings: Settings, texts: Sequence[tuple[str, Sequence[int]]], everyone: Sequence[Method], vocabulary: int) -> list[Cell]:
    """All calls of one repeat. ``texts`` are prompts as (category, ids); other batches than 1, and hopeless text, are Foredraft's alone.

    Rows of a batch are the prompts, and where there are not enough of them, the same ones cut shorter.
    """
    import random

    found = []
    main = tuple(each.name for each in everyone if not each.hopeless)
    if 1 in settings.batches:
        for index, (category, ids) in enumerate(texts):
            found.append(Cell(TEXT, index, category, (tuple(ids),), settings.tokens, settings.temperature, main))
    few = automatic(everyone)
    for batch in settings.batches:
        if batch > 1:
            rows = tuple(_cut(texts[row % len(texts)][1], row // len(texts)) for row in range(batch))
            found.append(Cell(BATCH, 0, BATCH, rows, settings.tokens, settings.temperature, tuple(each.name for each in few)))
    if settings.worst:
        plain = [each.name for each in few if each.mode == PLAIN]
        lost, looking = ([each.name for each in everyone if each.hopeless and each.mode == mode] for mode in (DRAFT, LOOKUP))
        generator = random.Random(0)
        for batch in settings.batches:
            rows = tuple(tuple(generator.randrange(vocabulary) for _ in range(48)) for _ in range(batch))
            for scenario, who, temperature in ((HOPELESS, lost, 0.0), (RANDOM, looking, WILD)):
                if plain and who:
                    found.append(Cell(scenario, 0, scenario, rows, settings.tokens, temperature, (*plain, *who)))
    return found


def _cut(ids: Sequence[int], times: int) -> tuple[int, ...]:
    return tuple(ids[: max(2, len(ids) - 5 * times)])
