"""The drafters that need no training: what each is worth on four kinds of text, beside each other and beside vLLM's of the same kind.

Speed is measured as in the speed suite: processes that take turns, call by call. Acceptance at equal draft length is found by replays of
texts that plain decoding made (:mod:`benchmarks.replays`), which needs no quiet machine.

What a drafter has learned from one prompt it keeps for the next, as it does for a user; between repeats everything is forgotten, or else
the second repeat would measure memory. Those that keep something are also measured with nothing kept. vLLM's methods keep nothing.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import checkpoints, datasets, speed, speed_plan, suites
from benchmarks.checkpoints import Checkpoint
from benchmarks.datasets import Prompt
from benchmarks.peer_process import FOREDRAFT
from benchmarks.replays import Kept, Replays, with_store
from benchmarks.speed_plan import AUTO, LOOKUP, PLAIN, RANDOM, TEXT, WILD, Cell, Contender
from foredraft.errors import ConfigurationError
from foredraft.loading import fingerprint, load_tokenizer

PROMPT_LOOKUP, SUFFIX, REST, SEVERAL = "prompt-lookup", "suffix", "rest", "several"
DRAFTERS = (PROMPT_LOOKUP, SUFFIX, "ngram", REST, "token-recycling", "lookahead", SEVERAL)
KEEPS = {"ngram": "n-grams of earlier texts", "token-recycling": "its matrix of successors"}
VLLM = "vllm"
RANDOM_TEXTS = 5  # what is to be told there is a percent or two: the calls of one text are too few
THEIRS = {PROMPT_LOOKUP: LOOKUP, SUFFIX: SUFFIX}  # vLLM's mode for the same idea
KINDS = (datasets.EMBEDDED, *suites.SUITES)
COPIES = ("edit",)  # copy-heavy suites
ROOM = 2048  # tokens of a text, prompt included, that vLLM is set up for
KNOWN, SEED = 120, 0  # files that the datastore of `rest` is made from; of random text


@dataclass(frozen=True)
class Settings(speed_plan.Settings):
    """What is run, besides what the speed suite's settings say.

    Attributes:
        drafters: of Foredraft's; ``members`` are those that ``several`` merges. ``rest`` reads a datastore of library files.
        suites: names of :data:`KINDS`, or files; ``limit`` turns of each at most.
        lengths: γ of chains of equal length on both sides; every other draft is as long as the planner says.
        replayed: whose texts acceptance is measured on, "" for not at all; ``replay_limit`` turns of each suite × ``replay_tokens``.
        ngrams: longest matches that prompt lookup is tried with there.
    """

    dtypes: tuple[str, ...] = ("bfloat16",)
    batches: tuple[int, ...] = (1,)
    modes: tuple[str, ...] = ()
    drafters: tuple[str, ...] = DRAFTERS
    peers: tuple[str, ...] = (VLLM,)
    lengths: tuple[int, ...] = (5, 10)
    limit: int | None = 2
    members: tuple[str, ...] = (SUFFIX, "ngram", REST)
    suites: tuple[str, ...] = KINDS
    replayed: str = "zoo:python-8m"
    replay_limit: int = 6
    replay_tokens: int = 128
    ngrams: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 16, 32)

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = [each for each in self.drafters if each not in DRAFTERS]
        if unknown:
            raise ConfigurationError(f"unknown drafters {', '.join(unknown)}; choose from {', '.join(DRAFTERS)}")
        wrong = [each for each in self.members if each not in DRAFTERS or each == SEVERAL]
        if wrong or len(self.members) < 2:
            raise ConfigurationError(f"several asks two or more of {', '.join(DRAFTERS[:-1])}; got {', '.join(self.members)}")
        if any(each != VLLM for each in self.peers):
            raise ConfigurationError(f"only vllm has drafters of the same kinds; got peers {', '.join(self.peers)}")

    @property
    def needs_datastore(self) -> bool:
        return REST in self.drafters or (SEVERAL in self.drafters and REST in self.members)

    def spec(self, drafter: str) -> str:
        """``drafter`` as it is written; ``several`` with its members."""
        return f"{SEVERAL}:{','.join(self.members)}" if drafter == SEVERAL else drafter

    @property
    def kept(self) -> dict[str, str]:
        """Drafters that keep something from text to text, and what."""
        found = {name: what for name, what in KEEPS.items() if name in self.drafters}
        inner = [KEEPS[name] for name in self.members if name in KEEPS]
        if SEVERAL in self.drafters and inner:
            found[SEVERAL] = ", ".join(inner)
        return found


def ours(settings: Settings, drafter: str) -> list[Contender]:
    """One drafter: as it comes, with nothing kept if it keeps something, and in chains where vLLM has the same kind."""
    options = (("drafter", settings.spec(drafter)), ("rule", AUTO))
    found = [Contender(FOREDRAFT, drafter, AUTO, 0, options)]
    if drafter in settings.kept:
        found.append(Contender(FOREDRAFT, drafter, f"{AUTO}, nothing kept", 0, options, fresh=True))
    if drafter in THEIRS:
        found += [
            Contender(FOREDRAFT, drafter, f"chain({length})", length, (*options, ("shape", f"chain({length})")))
            for length in settings.lengths
        ]
    return found


def contenders(settings: Settings) -> list[Contender]:
    """Everyone; plain ones first, and those for random text last."""
    plain = [Contender(side, PLAIN) for side in (FOREDRAFT, *settings.peers)]
    found = [*plain]
    for drafter in settings.drafters:
        found += ours(settings, drafter)
        if drafter in THEIRS:
            found += [Contender(side, THEIRS[drafter], f"γ={length}", length) for side in settings.peers for length in settings.lengths]
    if settings.worst:
        for drafter in settings.drafters:
            options = (("drafter", settings.spec(drafter)), ("rule", AUTO))
            found.append(Contender(FOREDRAFT, drafter, f"{AUTO}, random text", 0, options, hopeless=True, fresh=True))
    return found


def cells(settings: Settings, texts: Sequence[tuple[str, Sequence[int]]], everyone: Sequence[Contender], vocabulary: int) -> list[Cell]:
    """Every prompt for everyone, then random text for plain decoding and those who are there for it.

    Raises:
        ConfigurationError: a prompt that leaves no room for so many tokens.
    """
    main = tuple(each.name for each in everyone if not each.hopeless)
    found = []
    for index, (suite, ids) in enumerate(texts):
        if settings.peers and len(ids) + settings.tokens > ROOM:
            raise ConfigurationError(
                f"a prompt of {suite} has {len(ids)} tokens: with {settings.tokens} more it is longer than {ROOM}; ask for fewer"
            )
        found.append(Cell(TEXT, index, suite, (tuple(ids),), settings.tokens, 0.0, main))
    guessing = tuple(each.name for each in everyone if each.hopeless)
    if guessing:
        generator = random.Random(SEED)
        for index in range(RANDOM_TEXTS):
            row = tuple(generator.randrange(vocabulary) for _ in range(48))
            found.append(Cell(RANDOM, index, RANDOM, (row,), settings.tokens, WILD, (f"{FOREDRAFT} {PLAIN}", *guessing)))
    return found


class Run(speed.Run):
    """One run of the suite; see :class:`benchmarks.speed.Run`."""

    settings: Settings

    def __init__(self, settings: Settings, advance: Callable[[], None] = lambda: None, *, peers: Path, work: Path, **more: Any):
        self.replays: list[Kept] = []
        self.known: tuple[int, int] = 0, 0  # files and tokens of the datastore
        self._stores: dict[str, Path] = {}
        super().__init__(settings, advance, peers=peers, work=work, **more)

    def read(self, limit: int | None = None) -> list[Prompt]:
        """Of every suite so many turns; made ones are written as the files that they are published as, and read back."""
        folder, made, found = self.work / "suites", False, list[Prompt]()
        for name in self.settings.suites:
            source = name
            if name in suites.SUITES:
                if not made:
                    suites.write(folder)
                    made = True
                source = str(folder / f"{name}.jsonl")
            kind = name if name in KINDS else Path(name).stem
            found += [replace(prompt, category=kind) for prompt in turns(datasets.read(source), limit or self.settings.limit)]
        return found

    @property
    def suites(self) -> list[str]:
        return list(dict.fromkeys(prompt.category for prompt in self.prompts))

    def contenders(self) -> list[Contender]:
        return contenders(self.settings)

    def cells(self, texts: Sequence[tuple[str, Sequence[int]]], everyone: Sequence[Contender], vocabulary: int) -> list[Cell]:
        return cells(self.settings, texts, everyone, vocabulary)

    def options(self, contender: Contender, target: Checkpoint) -> dict[str, Any]:
        """With the datastore in place of its name."""
        found = super().options(contender, target)
        if "drafter" in found and target.slug in self._stores:
            found["drafter"] = with_store(found["drafter"], self._stores[target.slug])
        return found

    @property
    def steps(self) -> int:
        return super().steps + (len(Replays.settings(self.settings)) if self.settings.replayed else 0)

    def run(self) -> None:
        """Replays first, which may run on any machine, then the clock.

        Raises:
            ConfigurationError: a target that cannot be loaded, or prompts that make no tokens.
        """
        settings = self.settings
        for source in settings.targets if settings.needs_datastore else ():
            target = checkpoints.written(source, self.work)
            self._stores[target.slug] = self._datastore(str(target.path), target.slug)
        if settings.replayed:
            store = None
            if settings.needs_datastore:
                store = self._datastore(settings.replayed, checkpoints.written(settings.replayed, self.work).slug)
            self.replays = Replays(settings, self.read(settings.replay_limit), store, self.advance).run()
        super().run()

    def _datastore(self, source: str, slug: str) -> Path:
        """The first files of Python's library that no suite is made from, as a datastore for ``rest``."""
        from foredraft.drafters.datastore import Datastore

        tokenizer = load_tokenizer(source)
        files = library_files()
        texts = [tokenizer(file.read_text(encoding="utf-8", errors="replace"), verbose=False)["input_ids"] for file in files]
        path = self.work / slug / "rest.store"
        path.parent.mkdir(parents=True, exist_ok=True)
        Datastore.build(texts, vocab_size=len(tokenizer), fingerprint=fingerprint(tokenizer)).save(path)
        self.known = len(files), sum(map(len, texts))
        return path.absolute()


def library_files() -> list[Path]:
    """Modules of Python's library whose text is in no suite.

    Raises:
        ConfigurationError: this Python has no source files.
    """
    files = [file for file in sorted(Path(os.__file__).parent.glob("*.py")) if file.stem not in suites.MODULES][:KNOWN]
    if not files:
        raise ConfigurationError(
            "this Python comes without the source of its library, which the datastore of rest is made from; leave rest out"
        )
    return files


def turns(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """The first ``limit`` turns of all ``prompts`` together."""
    found, left = [], sum(len(prompt.turns) for prompt in prompts) if limit is None else limit
    for prompt in prompts:
        if left <= 0:
            break
        found.append(replace(prompt, turns=prompt.turns[:left]))
        left -= len(prompt.turns)
    return found
