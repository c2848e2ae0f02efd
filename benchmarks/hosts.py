"""The hosts suite: what drafters that need no training take on the host, beside the target's pass, behind a long text.

A text of Python's library is gone on with as it was written, a few tokens per round, whatever is drafted: no draft is better served than
another. In every round a drafter drafts, the target scores what it drafted, and the drafter is told what became of it; the pass has
emptied the caches by the time the next drafter is asked. Drafters take turns.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.drafters_plan import DRAFTERS, SEVERAL, library_files, with_store
from benchmarks.figures import Figure
from benchmarks.passes import synchroniser
from benchmarks.report import Table
from benchmarks.suite import Suite, TargetSettings, option
from foredraft import drafters
from foredraft.drafters.base import Drafter, DraftRequest, Feedback
from foredraft.drafters.datastore import Datastore
from foredraft.errors import ConfigurationError
from foredraft.estimates import Spread, turned
from foredraft.loading import fingerprint, load_model, load_tokenizer
from foredraft.logits.processors import Pipeline
from foredraft.logits.sampler import Sampler
from foredraft.models.cache import TreeCache, Window
from foredraft.models.paged_cache import PagedCache
from foredraft.models.pages import PAGE
from foredraft.planning.costs import StandIn
from foredraft.shapes import TreeShape
from foredraft.target import Target
from foredraft.tree import Proposal, TokenTree

LIMIT = 0.03  # of a pass
WARM_UPS = 4  # rounds
ROOM = 1024  # nodes behind the text
READ = 1024  # tokens of it that are computed


@dataclass(frozen=True)
class Settings(TargetSettings):
    context: int = option(32768, "Tokens of the text at the beginning.", least=1)
    drafters: str = option(" ".join(DRAFTERS), "Separated by spaces.")
    members: str = option("suffix,ngram,rest", "What several merges.")
    shapes: str = option("chain(5) product(3,2,1,1)", "Separated by spaces.")
    kept: int = option(3, "Tokens that every round adds.", least=1)
    rounds: int = option(30, "Measured rounds.", least=1)

    def __post_init__(self) -> None:
        shapes, names = self.shapes.split(), self.drafters.split()
        if not shapes or not names or not all(TreeShape.parse(shape).nodes for shape in shapes):
            raise ConfigurationError(
                f"--shapes and --drafters name one each at least, and shapes have nodes; got {self.shapes!r}, {self.drafters!r}"
            )
        for name in (*names, *self.members.split(",")):
            drafters.find(name)


@dataclass(frozen=True)
class Method:
    """A drafter, as it is written, and a shape."""

    drafter: str
    shape: str

    @property
    def name(self) -> str:
        return f"{self.drafter}, {self.shape}"


@dataclass(frozen=True)
class Measurement:
    """One round: seconds of the draft with what the drafter learns afterwards, and of the target's pass over what it drafted."""

    method: str
    round: int
    nodes: int
    host: float
    target: float


class Live:
    """A drafter at work on a row of its own."""

    def __init__(self, drafter: Drafter, shape: TreeShape, ids: Sequence[int]):
        self.drafter, self.shape = drafter, shape
        self.row = StandIn(0, list(ids), len(ids) + (1 << 20))

    def request(self, target: Target) -> DraftRequest:
        sampler = Sampler(pipelines=[Pipeline()], sampled=[False], lengths=[len(self.row.ids)], noise=None, committed=_no_history)
        depth = self.shape.depth
        proposal: Proposal = "deterministic" if "deterministic" in self.drafter.proposals_for(self.shape) else "mixed"
        return DraftRequest([self.row], self.shape, depth, [depth], proposal, False, target.vocab_size, target.device, sampler)


class Hosts(Suite[Settings]):
    """What drafters that need no training take on the host behind a long text, beside a pass of the target."""

    name = "hosts"
    title = "What drafters take on the host, behind a long text"
    settings_type = Settings
    measurements: list[Measurement]
    known: int  # tokens of the datastore

    @property
    def methods(self) -> dict[str, Method]:
        settings = self.settings
        return {
            each.name: each for each in (Method(name, shape) for shape in settings.shapes.split() for name in settings.drafters.split())
        }

    @property
    def steps(self) -> int:
        return 1 + WARM_UPS + self.settings.rounds

    @torch.inference_mode()
    def run(self) -> None:
        settings = self.settings
        torch.set_num_threads(settings.threads)
        tokenizer = load_tokenizer(settings.target)
        stored, text = self._texts(tokenizer)
        model = load_model(settings.target, dtype=settings.dtype, device=settings.device)
        room = len(text) + ROOM
        model.config.max_position_embeddings = max(model.config.max_position_embeddings, room)  # its text is not looked at
        target = Target(model, owned=True, reuse_prefix=False, test=False)
        with tempfile.TemporaryDirectory() as folder:
            store = Path(folder) / "rest.store"
            Datastore.build(stored, vocab_size=len(tokenizer), fingerprint=fingerprint(tokenizer)).save(store)
            live = {name: self._begun(each, store, target, text[: settings.context]) for name, each in self.methods.items()}
            lengthened(target, text[: settings.context], room)
            self.advance()
            for number in range(WARM_UPS + settings.rounds):
                more = text[settings.context + number * settings.kept :][: settings.kept]
                for name in turned(list(live), number):
                    self._round(name, live[name], target, more, number - WARM_UPS)
                self.advance()
        target.close()

    def _texts(self, tokenizer: Any) -> tuple[list[list[int]], list[int]]:
        """Those of the datastore, and one text of other files that is long enough."""
        files, settings = library_files(), self.settings
        needed = settings.context + settings.kept * (WARM_UPS + settings.rounds)
        read = (tokenizer(file.read_text(encoding="utf-8", errors="replace"), verbose=False)["input_ids"] for file in reversed(files))
        text: list[int] = []
        while len(text) < needed:
            ids = next(read, None)
            if ids is None:
                raise ConfigurationError(f"Python's library here has {len(text)} tokens, and a context of {needed} was asked for")
            text += ids
        stored = list(read)
        self.known = sum(map(len, stored))
        return stored, text[:needed]

    def _begun(self, method: Method, store: Path, target: Target, text: Sequence[int]) -> Live:
        spec = f"{SEVERAL}:{self.settings.members}" if method.drafter == SEVERAL else method.drafter
        live = Live(drafters.create(with_store(spec, store), {}), TreeShape.parse(method.shape), text)
        live.drafter.bind(target)
        live.drafter.begin([live.row])
        return live

    def _round(self, name: str, live: Live, target: Target, more: Sequence[int], number: int) -> None:
        """``number`` is below 0 in a warm-up."""
        wait, request = synchroniser(target.device), live.request(target)
        begin = time.perf_counter()
        tree = live.drafter.draft(request)
        wait()
        drafted = time.perf_counter()
        logits = target.score(tree.with_safe_parents())
        wait()
        scored = time.perf_counter()
        path = reached(tree, more)
        live.row.ids += more
        feedback = Feedback(
            tree, [len(path) - 1], None if tree.chain else _padded(path, tree), logits if live.drafter.info.needs_logits else None
        )
        told = time.perf_counter()
        live.drafter.observe([live.row], feedback)
        wait()
        if number >= 0:
            host = drafted - begin + time.perf_counter() - told
            self.measurements.append(Measurement(name, number, tree.nodes, host, scored - drafted))

    # -- what is reported -----------------------------------------------------------------------------------------------

    def of(self, name: str) -> list[Measurement]:
        return [each for each in self.measurements if each.method == name]

    def figures(self) -> list[Figure]:
        return [
            Figure(f"{name}: time on the host over that of a pass", share(self.of(name)), high=LIMIT, noise=True) for name in self.methods
        ]

    def tables(self) -> list[Table]:
        lines = []
        for figure, (name, method) in zip(self.figures(), self.methods.items()):
            host, pass_, nodes = (Spread.of([getattr(each, of) for each in self.of(name)]).median for of in ("host", "target", "nodes"))
            cells = (f"{nodes:g}", f"{host * 1e6:.0f}", f"{pass_ * 1e3:.1f}", share(self.of(name)).text(2, 100), figure.verdict)
            lines.append((method.drafter, method.shape, *cells))
        columns = ("drafter", "shape", "nodes scored", "host, µs", "pass, ms", "host over pass, %", f"≤ {100 * LIMIT:g} %")
        return [Table(f"Medians per round, behind {self.settings.context} tokens", columns, lines)]

    def notes(self, environment: Mapping[str, Any]) -> list[str]:
        settings = self.settings
        return [
            f"{settings.target}, {settings.dtype}, one greedy row; {settings.rounds} rounds after {WARM_UPS} to warm up, in turns. Each "
            f"adds {settings.kept} tokens of the text, which is of Python's library, to the {settings.context} there are. In brackets the "
            "host's quartiles.",
            f"The cache holds the first {min(READ, settings.context)} tokens again and again: what a pass takes does not depend on them.",
            f"{SEVERAL} merges {settings.members}. The datastore of rest holds {self.known} tokens.",
            "The host's time is that of the draft and of learning from the round, right after passes that emptied the caches.",
        ]


def lengthened(target: Target, text: Sequence[int], room: int) -> None:
    """Open a row whose cache is as long as ``text``: it holds the first ``READ`` tokens again and again. Reading tens of thousands takes
    a CPU minutes, and what a pass takes does not depend on them."""
    cache, read = target.cache, min(READ, len(text))
    if not isinstance(cache, TreeCache):
        raise ConfigurationError("this suite takes a target that can verify trees")
    target.open([text[:read]])
    target.prefill([text[:read]], first=0)
    if read == len(text):
        return
    cache.reserve(room)
    target.score(TokenTree.root(torch.tensor([text[read - 1]], device=target.device)))  # allocates
    cache.enter(Window(0, 1, (read,), len(text) - read))
    for layer in cache.written:
        for states in (layer.keys, layer.values):
            if isinstance(cache, PagedCache):
                pages = cache.tables[0]
                for index in range(read // PAGE, len(pages)):
                    states[pages[index]] = states[pages[index % (read // PAGE)]]
            else:
                for first in range(read, len(text), read):
                    more = min(read, len(text) - first)
                    states[:, :, first : first + more] = states[:, :, :more]
    cache.commit(None, [len(text) - read])


def reached(tree: TokenTree, text: Sequence[int]) -> list[int]:
    """The nodes of the one row of ``tree`` along ``text``, of which the last token is not looked for: the target adds it itself."""
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    valid = [True] * tree.nodes if tree.valid is None else tree.valid[0].tolist()
    path = [0]
    for token in text[:-1]:
        node = next((node for node in range(1, len(tokens)) if valid[node] and (parents[node], tokens[node]) == (path[-1], token)), None)
        if node is None:
            break
        path.append(node)
    return path


def _padded(path: Sequence[int], tree: TokenTree) -> Tensor:
    return torch.tensor([[*path, *[path[-1]] * (tree.height + 1 - len(path))]], device=tree.tokens.device)


def _no_history() -> Tensor:
    raise AssertionError("no processor reads a history here")


def share(rounds: Sequence[Measurement]) -> Spread:
    """Host seconds over seconds of a pass, medians; the interval is that of the host's quartiles over the median pass."""
    pass_ = Spread.of([each.target for each in rounds]).median
    ordered = sorted(each.host for each in rounds)
    quarter = len(ordered) // 4
    return Spread(Spread.of(ordered).median / pass_, ordered[quarter] / pass_, ordered[-1 - quarter] / pass_)
