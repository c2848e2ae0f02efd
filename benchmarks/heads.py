"""The heads suite: exported heads in vLLM beside the same heads here, prompt by prompt and draft by draft.

Both sides decode greedily with chains of the same length, in the same dtype, from the same checkpoint of the target. They count alike: both
draft from the first token after the prompt on, a round is a target pass after the one that read the prompt, and tokens past the limit do
not count. So with the same rounding every draft is the same token by token. Where texts or drafts differ, the suite says from where on,
and how close the call was. What a tree adds, and a Medusa head's successors, is measured beside it, here only: vLLM drafts chains, by the
heads alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import datasets
from benchmarks.checkpoints import Checkpoint, written
from benchmarks.figures import Figure
from benchmarks.peer_process import PeerError, PeerProcess, PeerSettings, find
from benchmarks.report import Table
from benchmarks.suite import Failure, Suite, option
from foredraft import Speculator
from foredraft.errors import ConfigurationError
from foredraft.estimates import Spread
from foredraft.heads import checkpoints
from foredraft.loading import load_model, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from foredraft.drafters.base import DraftRequest
    from foredraft.heads.base import Head
    from foredraft.tree import TokenTree

TOLERANCE = 0.05
TIE = 0.25  # of a logit: two ways of rounding differ by as much in bfloat16
SAME = 0.99  # of the drafts in float32, where only what is very close to a tie can be rounded the other way
PEER = "vllm"
LAYOUTS = {"medusa": "vllm", "eagle3": "speculators"}
WIDTHS = (3, 2)  # of the first levels of a tree, where the head has none of its own


@dataclass(frozen=True)
class Settings(PeerSettings):
    targets: tuple[str, ...] = option(("zoo:python-8m", "zoo:python-300m"), "A checkpoint folder or zoo:NAME.", flag="--target")
    heads: tuple[str, ...] = option(
        ("medusa", "eagle3"), "As embedded for the target, or from SOURCE.", flag="--head", metavar="KIND[:SOURCE]"
    )
    dtypes: tuple[str, ...] = option(("float32", "bfloat16"), "bfloat16, float32.", flag="--dtype")
    length: int = option(4, "Tokens that an EAGLE-3 head drafts; a Medusa head drafts one with each head.", least=1, flag="--gamma")
    tree: str = option("", "A shape to draft here besides; the head's own unless given.")
    suite: str = option(datasets.EMBEDDED, "embedded, or a file of prompts.")
    limit: int = option(5, "Prompts of each category, at most.", least=1)
    tokens: int = option(96, "New tokens per prompt.", least=2)

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
    """``rounds`` that added ``kept`` tokens."""

    rounds: int
    kept: int

    @property
    def acceptance(self) -> float:
        return self.kept / self.rounds if self.rounds else float("nan")


@dataclass(frozen=True)
class Text(Side):
    """A text and how it came about: ``ids`` the new tokens, and ``drafts`` by the number of new tokens that were there when they were
    made."""

    ids: tuple[int, ...]
    drafts: dict[int, tuple[int, ...]]

    @property
    def counts(self) -> Side:
        return Side(self.rounds, self.kept)


@dataclass(frozen=True)
class Compared:
    """One prompt of a case, by its name. ``parted`` is the first new token in which the texts differ, None for none, ``gap`` by how much
    the target's logits of the two tokens differ there; ``shared`` rounds begin at the same place of the same text on both sides, ``alike``
    of them with the same draft."""

    case: str
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
            assert self.gap is not None
            why = "a tie" if self.gap <= TIE else "not explained: the tokens are not as likely"
            reasons.append(f"texts differ from token {self.parted} on, {why}, {self.gap:.2g} of a logit apart")
        if self.alike < self.shared:
            reasons.append(f"{self.shared - self.alike} of {self.shared} drafts in the same place differ")
        if not reasons and self.ours.rounds != self.theirs.rounds:
            reasons.append("not explained: same text and drafts, other counts")
        return "; ".join(reasons) or "none: every draft is the same"


class Heads(Suite[Settings]):
    """Exported heads in vLLM beside the same heads here: acceptance prompt by prompt, and draft by draft.

    Exits with 1 when something could not be measured; it is then listed as a failure and has no figures.
    """

    name = "heads"
    title = "Exported heads in vLLM"
    settings_type = Settings
    prompts: list[Compared]
    failures: list[Failure]
    trees: dict[str, str]  # by case
    versions: dict[str, str]

    @property
    def cases(self) -> list[Case]:
        given = self.settings
        return [Case(target, head, dtype) for target in given.targets for head in given.heads for dtype in given.dtypes]

    @property
    def steps(self) -> int:
        return len(self.cases)

    def run(self) -> None:
        torch.set_num_threads(self.settings.threads)
        for case in self.cases:
            try:
                self.prompts += self._case(case)
            except (PeerError, ConfigurationError) as error:
                self.failures.append(Failure(case.name, "measurement", str(error)))
            self.advance()

    def _case(self, case: Case) -> list[Compared]:
        checkpoint = written(case.target, self.settings.work_folder)
        model = load_model(str(checkpoint.path), dtype=case.dtype)
        model.generation_config.eos_token_id = None
        head = checkpoints.load(case.source, model)
        folder = self.settings.work_folder / checkpoint.slug / "heads" / f"{case.kind}-{case.dtype}"
        exported = checkpoints.save(head, folder, format=LAYOUTS[case.kind], target=str(checkpoint.path))
        texts = self._texts(checkpoint)
        length = getattr(head.config, "heads", self.settings.length)
        tree = self.trees[case.name] = self.settings.tree or head.config.tree or usual_tree(length)
        found = []
        with self._engine(case, checkpoint, exported, length) as engine:
            for name, ids in texts:
                theirs = self._theirs(engine, ids)
                ours = decoded(model, head, ids, f"chain({length})", self.settings.tokens, alone=True)
                grown = decoded(model, head, ids, tree, self.settings.tokens)
                found.append(compared(case, name, ids, model, ours, theirs, grown))
        return found

    def _texts(self, checkpoint: Checkpoint) -> list[tuple[str, list[int]]]:
        tokenizer = load_tokenizer(str(checkpoint.path))
        asked = datasets.read(self.settings.suite, self.settings.limit)
        return [(each.name, next(datasets.conversation(each, tokenizer, lambda ids: None))) for each in asked]

    @contextmanager
    def _engine(self, case: Case, checkpoint: Checkpoint, exported: Path, length: int) -> Iterator[PeerProcess]:
        settings, peer = self.settings, find(PEER, self.settings.peers_folder)
        process = PeerProcess(peer, threads=settings.threads, log=self.settings.work_folder / "heads-vllm.log")
        try:
            started = process.ask("start", limit=settings.patience, threads=settings.threads, device="cpu", folder=str(peer.folder))
            self.versions |= started["versions"]
            how = {"mode": case.kind, "length": length, "ngram": 1, "options": {}, "draft": str(exported), "dtype": case.dtype}
            process.ask("load", limit=settings.patience, name=case.name, checkpoint=str(checkpoint.path), **how)
            yield process
        finally:
            process.close()

    def _theirs(self, engine: PeerProcess, ids: Sequence[int]) -> Text:
        settings = self.settings
        asked = {"tokens": settings.tokens, "temperature": 0.0, "seed": 0}
        found = engine.ask("generate", limit=settings.timeout, name="", ids=[list(ids)], **asked)
        drafts, there = {}, 1
        for draft, gained in zip(found["drafts"], found["gained"], strict=True):
            drafts[there] = tuple(draft)
            there += gained
        return Text(found["rounds"], found["kept"], tuple(found["ids"][0]), drafts)

    # -- what is reported -----------------------------------------------------------------------------------------------

    def by_case(self) -> dict[str, list[Compared]]:
        found: dict[str, list[Compared]] = {}
        for each in self.prompts:
            found.setdefault(each.case, []).append(each)
        return found

    def figures(self) -> list[Figure]:
        """vLLM accepts what Foredraft accepts; in float32 because it drafts the same. Spreads are over prompts, medians of all together."""
        found, figures = self.by_case(), []
        for case in self.cases:
            mine = found.get(case.name)
            name = f"{case.name}: acceptance length in vLLM beside ours"
            figures.append(Figure(name, apart(mine) if mine else None, high=TOLERANCE))
            if case.dtype == "float32":
                figures.append(Figure(f"{case.name}: drafts that are the same", alike(mine) if mine else None, low=SAME))
        return figures

    def tables(self) -> list[Table]:
        whole, prompts = [], []
        for name, mine in self.by_case().items():
            sums = totals(mine)
            drafts = f"{sum(each.alike for each in mine)} of {sum(each.shared for each in mine)}"
            ours, theirs, tree = (f"{sums[side]:.3f}" for side in ("ours", "theirs", "tree"))
            whole.append((name, ours, theirs, f"{sums['theirs'] / sums['ours'] - 1:+.1%}", drafts, tree, self.trees[name]))
            for each in mine:
                cells = [f"{side.acceptance:.3f} ({side.rounds})" for side in (each.ours, each.theirs, each.tree)]
                prompts.append((f"{name}: {each.prompt}", *cells, f"{each.alike} of {each.shared}", each.difference))
        figures = []
        for one in self.figures():
            bound = f"≤ {one.high:.0%}" if one.high is not None else f"≥ {one.low:.0%}"
            figures.append((one.name, bound, "–" if one.spread is None else f"{one.spread.median:.1%}", one.verdict))
        columns = ("", "Foredraft, chain", "vLLM, chain", "apart", "drafts that are the same", "Foredraft, tree", "tree")
        by_prompt = ("", "Foredraft", "vLLM", "tree", "same drafts", "difference")
        made = [
            Table("Figures to reach", ("", "bound", "found", "verdict"), figures),
            Table("Acceptance length", columns, whole),
            Table("By prompt: acceptance length (rounds)", by_prompt, prompts),
        ]
        if self.failures:
            made.append(Table("Not measured", ("", "why"), [(each.method, each.message) for each in self.failures]))
        return made

    def notes(self, environment: Mapping[str, Any]) -> list[str]:
        settings = self.settings
        engine = ", ".join(f"{name} {version}" for name, version in self.versions.items()) or "not run"
        return [
            f"vLLM's side: {engine}.",
            f"Greedy, {settings.tokens} new tokens per prompt, suite {settings.suite}. Acceptance length is tokens per target "
            "pass behind the prompt's, summed over prompts and then divided. vLLM loads the folder that `foredraft export --to vllm` "
            "writes. Drafts are compared token by token where both sides draft at the same place of the same text.",
            "In bfloat16 the two sides round at different places, which decides near ties among drafted tokens the other way now and then; "
            "in float32 that is rare, so that the same drafts there say that both sides compute the same. No times are taken here; the "
            "speed suite has them.",
        ]


def usual_tree(depth: int) -> str:
    return f"product({','.join(map(str, [*WIDTHS, *[1] * depth][:depth]))})"


def decoded(model: PreTrainedModel, head: Head, ids: Sequence[int], shape: str, tokens: int, *, alone: bool = False) -> Text:
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
    return Text(out.stats.row_passes, out.stats.kept, tuple(out.sequences[0, len(ids) :].tolist()), drafts)


def compared(case: Case, prompt: str, ids: Sequence[int], model: PreTrainedModel, ours: Text, theirs: Text, tree: Text) -> Compared:
    pairs = zip(ours.ids, theirs.ids)
    parted = next((index for index, (one, other) in enumerate(pairs) if one != other), None)
    same = len(ours.ids) if parted is None else parted  # new tokens that are the same on both sides
    shared = [there for there in sorted(ours.drafts.keys() & theirs.drafts.keys()) if there <= same]
    same_drafts = sum(_agree(ours.drafts[there], theirs.drafts[there]) for there in shared)
    gap = None if parted is None else gap_at(model, [*ids, *ours.ids[:parted]], ours.ids[parted], theirs.ids[parted])
    return Compared(case.name, prompt, ours.counts, theirs.counts, tree.counts, parted, gap, len(shared), same_drafts)


def _agree(ours: Sequence[int], theirs: Sequence[int]) -> bool:
    """At the end of a row we draft no more than there is room for, so that only what both drafted counts."""
    return bool(ours) == bool(theirs) and all(one == other for one, other in zip(ours, theirs))


@torch.inference_mode()
def gap_at(model: PreTrainedModel, ids: Sequence[int], ours: int, theirs: int) -> float:
    """By how much the target's logits of two next tokens differ."""
    logits = model(torch.tensor([list(ids)])).logits[0, -1].float()
    return float((logits[ours] - logits[theirs]).abs())


def totals(found: Sequence[Compared]) -> dict[str, float]:
    """Acceptance lengths over all prompts of a case."""
    sides = {"ours": [each.ours for each in found], "theirs": [each.theirs for each in found], "tree": [each.tree for each in found]}
    return {name: sum(each.kept for each in mine) / max(1, sum(each.rounds for each in mine)) for name, mine in sides.items()}


def apart(mine: Sequence[Compared]) -> Spread:
    whole, gaps = totals(mine), [abs(each.theirs.acceptance / each.ours.acceptance - 1) for each in mine]
    return Spread(abs(whole["theirs"] / whole["ours"] - 1), min(gaps), max(gaps))


def alike(mine: Sequence[Compared]) -> Spread:
    shares = [each.alike / max(1, each.shared) for each in mine]
    return Spread(sum(each.alike for each in mine) / max(1, sum(each.shared for each in mine)), min(shares), max(shares))
