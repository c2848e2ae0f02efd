"""The heads suite: exported heads in vLLM beside the same heads here, prompt by prompt and draft by draft.

Both sides decode greedily with chains of the same length, in the same dtype, from the same checkpoint of the target. They count alike: both
draft from the first token after the prompt on, a round is a target pass after the one that read the prompt, and tokens past the limit do
not count. So with the same rounding every draft is the same token by token. Where texts or drafts differ, the suite says from where on,
and how close the call was. What a tree adds, and a Medusa head's successors, is measured beside it, here only: vLLM drafts chains, by the
heads alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import datasets
from benchmarks.checkpoints import Checkpoint, written
from benchmarks.peer_process import PeerError, PeerProcess, find
from foredraft import Speculator
from foredraft.errors import ConfigurationError
from foredraft.heads import checkpoints
from foredraft.loading import load_model, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from foredraft.drafters.base import DraftRequest
    from foredraft.heads.base import Head
    from foredraft.tree import TokenTree

PEER = "vllm"
LAYOUTS = {"medusa": "vllm", "eagle3": "speculators"}
WIDTHS = (3, 2)  # of the first levels of a tree, where the head has none of its own


@dataclass(frozen=True)
class Settings:
    """What is run. ``heads`` are ``KIND``, the one embedded for the target, or ``KIND:SOURCE``; ``length`` is that of an EAGLE-3 head's
    chains, a Medusa head drafts as many tokens as it has heads; ``tree`` is a shape, "" takes the head's own."""

    targets: tuple[str, ...] = ("zoo:python-8m", "zoo:python-300m")
    heads: tuple[str, ...] = ("medusa", "eagle3")
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    length: int = 4
    tree: str = ""
    suite: str = datasets.EMBEDDED
    limit: int = 5
    tokens: int = 96
    threads: int = 2
    timeout: float = 120.0
    patience: float = 900.0
    device: str = "cpu"

    def __post_init__(self) -> None:
        for each in self.heads:
            if each.partition(":")[0] not in LAYOUTS:
                raise ConfigurationError(f"vLLM has {' and '.join(LAYOUTS)} heads; {each!r} is none")


@dataclass(frozen=True)
class Case:
    """One head on one target in one dtype."""

    target: str
    head: str
    dtype: str

    @property
    def kind(self) -> str:
        return self.head.partition(":")[0]

    @property
    def source(self) -> str:
        given = self.head.partition(":")[2]
        return given or f"{self.target}-{self.kind}"

    @property
    def name(self) -> str:
        return f"{self.kind} on {self.target}, {self.dtype}"


@dataclass(frozen=True)
class Side:
    """A text and how it came about: ``ids`` the new tokens, ``rounds`` that added ``kept`` of them, and ``drafts`` by the number of new
    tokens that were there when they were made."""

    ids: tuple[int, ...]
    rounds: int
    kept: int
    drafts: dict[int, tuple[int, ...]]

    @property
    def acceptance(self) -> float:
        return self.kept / self.rounds if self.rounds else float("nan")


@dataclass(frozen=True)
class Compared:
    """One prompt. ``parted`` is the first new token in which the texts differ, None for none, ``gap`` by how much the target's logits of
    the two tokens differ there; ``shared`` rounds begin at the same place of the same text on both sides, ``alike`` of them with the same
    draft."""

    case: Case
    prompt: str
    ours: Side
    theirs: Side
    tree: Side
    parted: int | None
    gap: float | None
    shared: int
    alike: int

    @property
    def difference(self) -> str:
        """What explains that the two counts differ, or could."""
        reasons = []
        if self.parted is not None:
            reasons.append(f"texts differ from token {self.parted} on, a tie within {self.gap:.2g} of a logit")
        if self.alike < self.shared:
            reasons.append(f"{self.shared - self.alike} of {self.shared} drafts in the same place differ")
        if not reasons and self.ours.rounds != self.theirs.rounds:
            reasons.append("not explained: same text and drafts, other counts")
        return "; ".join(reasons) or "none: every draft is the same"


@dataclass(frozen=True)
class Failure:
    case: Case
    message: str


class Run:
    """One run of the suite; ``advance`` is called after each of ``steps``."""

    def __init__(self, settings: Settings, advance: Callable[[], None] = lambda: None, *, peers: Path, work: Path):
        self.settings, self.advance, self.peers, self.work = settings, advance, peers, work
        self.cases = [Case(target, head, dtype) for target in settings.targets for head in settings.heads for dtype in settings.dtypes]
        self.compared: list[Compared] = []
        self.failures: list[Failure] = []
        self.trees: dict[str, str] = {}
        self.versions: dict[str, str] = {}

    @property
    def steps(self) -> int:
        return len(self.cases)

    def run(self) -> None:
        torch.set_num_threads(self.settings.threads)
        for case in self.cases:
            try:
                self.compared += self._case(case)
            except (PeerError, ConfigurationError) as error:
                self.failures.append(Failure(case, str(error)))
            self.advance()

    def _case(self, case: Case) -> list[Compared]:
        checkpoint = written(case.target, self.work)
        model = load_model(str(checkpoint.path), dtype=case.dtype)
        model.generation_config.eos_token_id = None
        head = checkpoints.load(case.source, model)
        folder = self.work / checkpoint.slug / "heads" / f"{case.kind}-{case.dtype}"
        exported = checkpoints.save(head, folder, format=LAYOUTS[case.kind], target=str(checkpoint.path))
        prompts = self._prompts(checkpoint)
        length = getattr(head.config, "heads", self.settings.length)
        tree = self.trees[case.name] = self.settings.tree or head.config.tree or usual_tree(length)
        found = []
        with self._engine(case, checkpoint, exported, length) as engine:
            for name, ids in prompts:
                theirs = self._theirs(engine, ids)
                ours = decoded(model, head, ids, f"chain({length})", self.settings.tokens, alone=True)
                grown = decoded(model, head, ids, tree, self.settings.tokens)
                found.append(compared(case, name, ids, model, ours, theirs, grown))
        return found

    def _prompts(self, checkpoint: Checkpoint) -> list[tuple[str, list[int]]]:
        tokenizer = load_tokenizer(str(checkpoint.path))
        asked = datasets.read(self.settings.suite, self.settings.limit)
        return [(each.name, next(datasets.conversation(each, tokenizer, lambda ids: None))) for each in asked]

    @contextmanager
    def _engine(self, case: Case, checkpoint: Checkpoint, exported: Path, length: int) -> Iterator[PeerProcess]:
        settings, peer = self.settings, find(PEER, self.peers)
        process = PeerProcess(peer, threads=settings.threads, log=self.work / "heads-vllm.log")
        try:
            started = process.ask("start", limit=settings.patience, threads=settings.threads, device="cpu", folder=str(peer.folder))
            self.versions |= started["versions"]
            how = {"mode": case.kind, "length": length, "ngram": 1, "options": {}, "draft": str(exported), "dtype": case.dtype}
            process.ask("load", limit=settings.patience, name=case.name, checkpoint=str(checkpoint.path), **how)
            yield process
        finally:
            process.close()

    def _theirs(self, engine: PeerProcess, ids: Sequence[int]) -> Side:
        settings = self.settings
        asked = {"tokens": settings.tokens, "temperature": 0.0, "seed": 0}
        found = engine.ask("generate", limit=settings.timeout, name="", ids=[list(ids)], **asked)
        drafts, there = {}, 1
        for draft, gained in zip(found["drafts"], found["gained"], strict=True):
            drafts[there] = tuple(draft)
            there += gained
        return Side(tuple(found["ids"][0]), found["rounds"], found["kept"], drafts)


def usual_tree(depth: int) -> str:
    return f"product({','.join(map(str, [*WIDTHS, *[1] * depth][:depth]))})"


def decoded(model: PreTrainedModel, head: Head, ids: Sequence[int], shape: str, tokens: int, *, alone: bool = False) -> Side:
    """The greedy continuation of ``ids`` here; of trees the drafts are all tokens below the root. ``alone`` is without what other engines
    do not have, a Medusa head's successors."""
    options: dict[str, Any] = {"source": head, **({"successors": "off"} if alone and head.kind == "medusa" else {})}
    speculator = Speculator(model, f"{head.kind}", drafter_options=options, shape=shape, reuse_prefix=False)
    drafts: dict[int, tuple[int, ...]] = {}
    inner = speculator.drafter.draft

    def watched(request: DraftRequest) -> TokenTree:
        tree = inner(request)
        tokens = tree.tokens[0, 1:] if tree.valid is None else tree.tokens[0, 1:][tree.valid[0, 1:]]
        drafts[len(request.rows[0].ids) - len(ids)] = tuple(tokens.tolist())
        return tree

    speculator.drafter.draft = watched  # type: ignore[method-assign]
    out = speculator.generate(torch.tensor([list(ids)]), max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    assert out.stats is not None
    return Side(tuple(out.sequences[0, len(ids) :].tolist()), out.stats.row_passes, out.stats.kept, drafts)


def compared(case: Case, prompt: str, ids: Sequence[int], model: PreTrainedModel, ours: Side, theirs: Side, tree: Side) -> Compared:
    pairs = zip(ours.ids, theirs.ids)
    parted = next((index for index, (one, other) in enumerate(pairs) if one != other), None)
    same = len(ours.ids) if parted is None else parted  # new tokens that are the same on both sides
    shared = [there for there in sorted(ours.drafts.keys() & theirs.drafts.keys()) if there <= same]
    alike = sum(_agree(ours.drafts[there], theirs.drafts[there]) for there in shared)
    gap = None if parted is None else gap_at(model, [*ids, *ours.ids[:parted]], ours.ids[parted], theirs.ids[parted])
    return Compared(case, prompt, ours, theirs, tree, parted, gap, len(shared), alike)


def _agree(ours: Sequence[int], theirs: Sequence[int]) -> bool:
    """At the end of a row we draft no more than there is room for, so that only what both drafted counts."""
    return all(one == other for one, other in zip(ours, theirs))


@torch.inference_mode()
def gap_at(model: PreTrainedModel, ids: Sequence[int], ours: int, theirs: int) -> float:
    """By how much the target's logits of two next tokens differ."""
    logits = model(torch.tensor([list(ids)])).logits[0, -1].float()
    return float((logits[ours] - logits[theirs]).abs())


def totals(found: Sequence[Compared]) -> dict[str, float]:
    """Acceptance lengths over all prompts of a case."""
    sides = {"ours": [each.ours for each in found], "theirs": [each.theirs for each in found], "tree": [each.tree for each in found]}
    return {name: sum(each.kept for each in mine) / max(1, sum(each.rounds for each in mine)) for name, mine in sides.items()}
