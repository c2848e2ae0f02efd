"""What the drafters suite runs: settings, methods, texts, and the datastore of ``rest``."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import datasets, speed_plan, suites
from benchmarks.datasets import Prompt
from benchmarks.peer_process import FOREDRAFT
from benchmarks.speed_plan import AUTO, LOOKUP, PLAIN, RANDOM, TEXT, WILD, Cell, Method
from benchmarks.suite import option
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
    """What is run, besides what the speed suite's settings say. Drafts are as long as the planner says, but for chains of ``lengths``."""

    dtypes: tuple[str, ...] = option(("bfloat16",), "bfloat16, float32.", flag="--dtype")
    batches: tuple[int, ...] = (1,)
    modes: tuple[str, ...] = ()
    rules: tuple[str, ...] = (AUTO,)
    shapes: tuple[str, ...] = (AUTO,)
    prompts: tuple[str, ...] = ()
    ngram: int = 3
    chat: bool = False
    temperature: float = 0.0
    drafters: tuple[str, ...] = option(DRAFTERS, "Of Foredraft's; rest reads a datastore of library files.", flag="--drafter")
    peers: tuple[str, ...] = option((VLLM,), "vllm, for its methods of the same kinds.", flag="--peer")
    lengths: tuple[int, ...] = option((5, 10), "γ of chains on both sides.", least=1, flag="--gamma")
    limit: int | None = option(2, "Turns of each suite, at most.", least=1)
    members: str = option(f"{SUFFIX},ngram,{REST}", "What several merges.", metavar="NAME,NAME")
    suites: tuple[str, ...] = option(KINDS, "embedded, edit, completion, chat, or a file of prompts.", flag="--suite")
    replayed: str = option("zoo:python-8m", "Whose texts acceptance is simulated on; none to leave that out.")
    replay_limit: int = option(6, "Turns of each suite there, at most.", least=1)
    replay_tokens: int = option(128, "New tokens per turn there.", least=2)
    ngrams: tuple[int, ...] = option((1, 2, 3, 4, 5, 6, 8, 16, 32), "Longest matches that prompt lookup is tried with there.", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = [each for each in self.drafters if each not in DRAFTERS]
        if unknown:
            raise ConfigurationError(f"unknown drafters {', '.join(unknown)}; choose from {', '.join(DRAFTERS)}")
        wrong = [each for each in self.merged if each not in DRAFTERS or each == SEVERAL]
        if wrong or len(self.merged) < 2:
            raise ConfigurationError(f"several asks two or more of {', '.join(DRAFTERS[:-1])}; got {', '.join(self.merged)}")
        if any(each != VLLM for each in self.peers):
            raise ConfigurationError(f"only vllm has drafters of the same kinds; got peers {', '.join(self.peers)}")

    @property
    def merged(self) -> list[str]:
        return self.members.split(",")

    @property
    def needs_datastore(self) -> bool:
        return REST in self.drafters or (SEVERAL in self.drafters and REST in self.merged)

    def spec(self, drafter: str) -> str:
        """``drafter`` as it is written; ``several`` with its members."""
        return f"{SEVERAL}:{self.members}" if drafter == SEVERAL else drafter

    @property
    def kept(self) -> dict[str, str]:
        """Drafters that keep something from text to text, and what."""
        found = {name: what for name, what in KEEPS.items() if name in self.drafters}
        inner = [KEEPS[name] for name in self.merged if name in KEEPS]
        if SEVERAL in self.drafters and inner:
            found[SEVERAL] = ", ".join(inner)
        return found


def ours(settings: Settings, drafter: str) -> list[Method]:
    """One drafter: as it comes, with nothing kept if it keeps something, and in chains where vLLM has the same kind."""
    options = (("drafter", settings.spec(drafter)), ("rule", AUTO))
    found = [Method(FOREDRAFT, drafter, AUTO, 0, options)]
    if drafter in settings.kept:
        found.append(Method(FOREDRAFT, drafter, f"{AUTO}, nothing kept", 0, options, fresh=True))
    if drafter in THEIRS:
        found += [
            Method(FOREDRAFT, drafter, f"chain({length})", length, (*options, ("shape", f"chain({length})"))) for length in settings.lengths
        ]
    return found


def methods(settings: Settings) -> list[Method]:
    """Everyone; plain ones first, and those for random text last."""
    plain = [Method(side, PLAIN) for side in (FOREDRAFT, *settings.peers)]
    found = [*plain]
    for drafter in settings.drafters:
        found += ours(settings, drafter)
        if drafter in THEIRS:
            found += [Method(side, THEIRS[drafter], f"γ={length}", length) for side in settings.peers for length in settings.lengths]
    if settings.worst:
        for drafter in settings.drafters:
            options = (("drafter", settings.spec(drafter)), ("rule", AUTO))
            found.append(Method(FOREDRAFT, drafter, f"{AUTO}, random text", 0, options, hopeless=True, fresh=True))
    return found


def cells(settings: Settings, texts: Sequence[tuple[str, Sequence[int]]], everyone: Sequence[Method], vocabulary: int) -> list[Cell]:
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


def datastore(source: str, path: Path) -> tuple[int, int]:
    """Write the first files of Python's library that no suite is made from as a datastore for ``rest``; returns how many files and tokens
    they are."""
    from foredraft.drafters.datastore import Datastore

    tokenizer, files = load_tokenizer(source), library_files()
    texts = [tokenizer(file.read_text(encoding="utf-8", errors="replace"), verbose=False)["input_ids"] for file in files]
    path.parent.mkdir(parents=True, exist_ok=True)
    Datastore.build(texts, vocab_size=len(tokenizer), fingerprint=fingerprint(tokenizer)).save(path)
    return len(files), sum(map(len, texts))


def with_store(drafter: str, store: Path) -> str:
    """``drafter`` with the path of the datastore behind each ``rest``."""
    name, colon, members = drafter.partition(":")
    each = [f"{REST}:{store}" if member == REST else member for member in (members.split(",") if colon else [name])]
    return f"{name}:{','.join(each)}" if colon else each[0]


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
