"""Beginnings that the layer of an EAGLE-3 head or an MTP layer shares: drafts and texts are those of one that reads all prompts in full."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from cover import nightly_but
from head_cases import shaken
from helpers import padded
from kernel_cases import DTYPES, TOLERANCE, build, needs_kernels
from learning_cases import never_started, noisy
from mtp_cases import mtp_layers

from benchmarks.prompts import PYTHON
from foredraft import RowParameters, Speculator, zoo
from foredraft.drafters.base import DraftRequest
from foredraft.drafters.eagle3 import Eagle3
from foredraft.drafters.learning.serving import Learning
from foredraft.drafters.mtp import Mtp
from foredraft.drafters.several import Several
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.logits.processors import Pipeline
from foredraft.logits.sampler import Sampler
from foredraft.models.paged_cache import PagedCache
from foredraft.models.pages import PAGE
from foredraft.shapes import TreeShape
from foredraft.target import Target

pytestmark = needs_kernels
EXECUTIONS = ["native", "eager"]  # pages, and none
SHAPE = TreeShape.parse("product(2,2,1)")


def text(length: int, seed: int = 0) -> list[int]:
    return [(7 * i * i + 3 * seed * i + seed) % 100 for i in range(length)]


@dataclass
class Row:
    """``ids`` are a prompt and the token after it."""

    slot: int
    ids: list[int]
    isolation: str | None = None
    capacity: int = 500
    source: None = None

    @property
    def prompt_length(self) -> int:
        return len(self.ids) - 1


class Pair:
    """A target and a head, and the rows that both have."""

    def __init__(self, execution: str = "native", dtype: torch.dtype = torch.float32, *, reuse: bool = True, mtp: bool = False, **options):
        model = build("qwen3", dtype)
        head = None if mtp else shaken(Eagle3Head.for_target(model, aux_layers=(1, 2))).requires_grad_(False)
        self.drafter = Mtp(mtp_layers(model)) if head is None else Eagle3(head, **options)
        self.target = Target(model, execution=execution, test=False, reuse_prefix=reuse)
        self.drafter.bind(self.target)
        self.rows: list[Row] = []
        self._slots = 0
        native = execution == "native"
        assert native == (self.drafter._inner.execution == "native" if mtp else self.drafter._step is not None)
        assert mtp or isinstance(self.drafter._cache, PagedCache) == native

    @torch.inference_mode()
    def read(self, *texts: list[int], isolation: str | None = None) -> int:
        """How many tokens the target has read of ``texts``."""
        first = len(self.rows)
        rows = [Row(self._slots + index, list(each), isolation) for index, each in enumerate(texts)]
        self._slots += len(rows)
        self.target.open([row.ids for row in rows], isolations=[isolation] * len(rows))
        known = self.target.lengths[first:]
        self.target.prefill([row.ids for row in rows], first=first)
        for row in rows:
            row.ids.append(row.ids[0])
        self.drafter.read(rows, self.target.prompt_hidden)
        self.drafter.begin(rows)
        self.rows += rows
        assert [len(each) for each in self.target.prompt_hidden] == [len(a) - b for a, b in zip(texts, known)]
        return sum(map(len, texts)) - sum(known)

    @torch.inference_mode()
    def drop(self, *gone: int) -> None:
        self.drafter.end([self.rows[index] for index in gone])
        keep = [index for index in range(len(self.rows)) if index not in gone]
        self.target.compact(keep)
        self.rows = [self.rows[index] for index in keep]

    @torch.inference_mode()
    def drafts(self) -> torch.Tensor:
        """``[R, N]`` tokens of the trees below all rows; the last step of each text is read again when it is asked the next time."""
        lengths = [len(row.ids) for row in self.rows]
        greedy = Sampler([Pipeline()] * len(lengths), [False] * len(lengths), lengths, None, lambda: torch.zeros(0))
        limits, proposal = [SHAPE.depth] * len(lengths), "deterministic"
        cpu = torch.device("cpu")
        return self.drafter.draft(DraftRequest(self.rows, SHAPE, SHAPE.depth, limits, proposal, False, 100, cpu, greedy)).tokens

    def held(self, row: int) -> list[torch.Tensor]:
        """Keys and values of the steps of a row, ``[heads, L, size]``."""
        cache, length = self.drafter._cache, self.drafter._cache.lengths[row]
        stores = (cache.layers[0].keys, cache.layers[0].values)
        if isinstance(cache, PagedCache):
            return [store[cache.tables[row]].transpose(0, 1).flatten(1, 2)[:, :length] for store in stores]
        return [store[row, :, :length] for store in stores]


def assert_as_alone(pair: Pair, alone: Pair) -> None:
    """Each row holds, and drafts, what it would ``alone``, where nothing is shared."""
    steps = [pair.held(row) for row in range(len(pair.rows))]
    for row, (keys, _) in zip(pair.rows, steps):
        assert len(row.ids) - keys.shape[1] in (1, 2)  # the last step is made with the first draft
    drafts = pair.drafts()
    for row, mine, tokens in zip(pair.rows, steps, drafts):
        assert alone.read(row.ids[:-1]) == len(row.ids) - 1
        for got, wanted in zip(mine, alone.held(0)):
            got = got[:, : wanted.shape[1]].float()
            assert (got - wanted.float()).abs().max() <= 2 * TOLERANCE[wanted.dtype] * wanted.float().abs().max()
        assert mine[0].dtype != torch.float32 or torch.equal(tokens, alone.drafts()[0])
        alone.drop(0)


# -- what is shared ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("over", [False, True], ids=["live", "over"])
@pytest.mark.parametrize(("execution", "mtp"), [("native", False), ("eager", False), ("native", True)])
def test_a_beginning_is_shared_at_every_offset(execution, mtp, over):
    """Steps of texts with n + 1 tokens in common are the same up to n; the target reads the token at n again for its features."""
    base = text(2 * PAGE + 20)
    pair, alone = Pair(execution, mtp=mtp), Pair(execution, reuse=False, mtp=mtp)
    pair.read(base)
    for length in (16, 17, 18, *range(PAGE - 2, PAGE + 4), 100, *range(2 * PAGE - 1, 2 * PAGE + 3), len(base)):
        if over:
            pair.drop(0)
            pair.read(base)
            pair.drop(0)
        mine = [*base[:length], 101 % 97, *text(5, length)] if length < len(base) else base
        common = next((i for i, (a, b) in enumerate(zip(base, mine)) if a != b), len(mine))
        shared = common - 1 if common > 16 else 0
        assert pair.read(mine) == len(mine) - shared
        assert_as_alone(pair, alone)
        if over:
            pair.read(base)
            pair.drop(0)
        else:
            pair.drop(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("execution", "mtp"), [("native", False), ("eager", False), ("native", True)])
def test_rows_of_a_ragged_batch_share_with_each_other_and_with_what_is_over(execution, mtp, dtype):
    begin = text(100)
    pair, alone = Pair(execution, dtype, mtp=mtp), Pair(execution, dtype, reuse=False, mtp=mtp)
    first = [begin + text(40, 1), begin + text(3, 2), text(70, 3), begin]
    in_full = sum(map(len, first))
    assert pair.read(*first) == (in_full if execution == "eager" else in_full - 2 * PAGE)  # whole pages of what is read together
    assert_as_alone(pair, alone)
    pair.drop(1, 2)
    assert_as_alone(pair, alone)
    pair.read(begin + text(9, 2), text(65, 3))
    assert_as_alone(pair, alone)
    pair.drop(0, 1, 2, 3)
    pair.read(begin + text(60, 1))
    assert_as_alone(pair, alone)
    assert pair.target.lengths == [160]


def test_a_page_that_others_hold_is_not_written_over():
    pair, alone = Pair(), Pair(reuse=False)
    pair.read(text(2 * PAGE + 1))  # as many steps as two pages hold
    pair.read(text(2 * PAGE + 1))
    assert pair.drafter._cache.pool.shared == 2 and pair.target.pools[0].shared == 2
    for _ in range(2):
        pair.drafts()  # the second time the last step is made again
    for row in pair.rows:
        row.ids.pop()
    pair.drafter.reset(), pair.target.reset()
    pair.rows = []
    pair.read(text(2 * PAGE + 1))
    assert_as_alone(pair, alone)


def test_a_row_that_was_opened_and_never_begun_is_dropped():
    pair, alone = Pair(), Pair(reuse=False)
    pair.read(text(80, 5))
    with torch.inference_mode():
        pair.target.open([text(150, 4)])
        pair.target.compact([0])
    assert pair.read(text(150)) == 150
    pair.drop(0, 1)
    assert pair.read(text(150, 4)) == 150 and pair.read(text(150)) == 1
    assert_as_alone(pair, alone)


# -- what is not ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_isolated_rows_share_with_their_own_kind_alone(execution):
    pair = Pair(execution)
    mine = text(150)
    assert pair.read(mine, isolation="a") == 150 and pair.read(mine) == 150
    for isolation, read in (("a", 1), ("b", 150), (None, 1), ("b", 1)):
        assert pair.read(mine, isolation=isolation) == read
    pair.drop(*range(6))
    for isolation, read in (("c", 150), ("a", 1), (None, 1)):
        assert pair.read(mine, isolation=isolation) == read
    pair.drop(0, 1, 2)
    keys = pair.drafter._texts
    assert keys._key(mine, "a") != keys._key(mine, None) and keys._key(mine, None) != keys._key(mine[1:], None)


def test_the_first_token_is_part_of_every_step():
    """No slot stands for it, and texts that differ in it alone share nothing."""
    pair, alone = Pair(), Pair(reuse=False)
    pair.read(text(100))
    assert pair.read([55, *text(100)[1:]]) == 100
    assert_as_alone(pair, alone)


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch):
    """No learner is started."""
    monkeypatch.setitem(Learning.__init__.__kwdefaults__, "start", never_started)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_nothing_is_shared_with_what_other_weights_of_the_head_have_made(execution, tmp_path: Path, no_process):
    pair, alone = Pair(execution, learn=tmp_path / "a"), Pair(execution, reuse=False, learn=tmp_path / "b")
    pair.read(text(150), text(90, 1))
    pair.drop(1)
    asked = [(pair.target.needed(text(150), None, 0), pair.target.unread(text(90, 1), None))]
    weights = noisy(pair.drafter.learning.versions.load(0), 1, amount=1.0)
    for each in (pair, alone):
        each.drafter.learning._newer = lambda now: None
        each.drafter.learning.versions.save(1, weights)
        each.drafter._take_up(1)
    asked.append((pair.target.needed(text(150), None, 0), pair.target.unread(text(90, 1), None)))
    assert asked == ([([1], 2), ([3], 90)] if execution == "native" else [([], None)] * 2)
    assert pair.read(text(150)) == 150 and pair.read(text(90, 1)) == 90  # like a row that goes on, and like one that is over
    pair.drop(0)
    assert_as_alone(pair, alone)
    assert pair.read(text(90, 1)) == 1
    assert_as_alone(pair, alone)
    pair.drop(0, 1, 2)
    pair.drafter.forget()
    alone.drafter.forget()
    assert pair.read(text(150)) == 150
    assert_as_alone(pair, alone)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_nothing_is_shared_with_what_the_target_s_former_weights_have_made(execution):
    pair, alone = Pair(execution), Pair(execution, reuse=False)
    pair.read(text(150))
    pair.drop(0)
    for each in (pair, alone):
        with torch.no_grad():
            each.target.model.model.layers[1].input_layernorm.weight.mul_(1.3)  # as an adapter may
    version = pair.target.version
    assert pair.read(text(150)) == 150 and pair.target.version == version + 1
    pair.drop(0)
    assert pair.read(text(150)) == 1
    assert_as_alone(pair, alone)


# -- whole texts ------------------------------------------------------------------------------------------------------


@cache
def model():
    return zoo.load("python-8m", dtype=torch.float32)


@cache
def chat() -> list[list[int]]:
    """Prompts, of which each but the second begins like the one before."""
    ids = [zoo.load_tokenizer("python-8m")(each)["input_ids"] for each in PYTHON]
    system, (first, other, second, third, _) = (ids[0])[:130], [each[:40] for each in (*ids[1:], ids[0])]
    return [system + first, other, system + first + second, system[:64] + third, system[:65] + other, system + first + second + third]


class Watched(Eagle3):
    """Notes its trees, by the text that they hang below."""

    def bind(self, target) -> None:
        super().bind(target)
        self.trees: dict[tuple[int, ...], tuple[list[int], list[int]]] = {}

    def draft(self, request):
        tree = super().draft(request)
        for index, row in enumerate(request.rows):
            real = [node for node in range(tree.nodes) if tree.valid is None or tree.valid[index, node]]
            above = tree.parents.expand(tree.rows, tree.nodes)[index]
            self.trees[tuple(row.ids)] = tree.tokens[index, real].tolist(), above[real].tolist()
        return tree


def watching(execution: str, shape: str = "product(3,2,1)", drafter=None, **options) -> Speculator:
    how = {"execution": execution, "shape": shape, "rule": "match", "self_test": execution == "native", **options}
    return Speculator(model(), drafter or Watched("zoo:python-8m-eagle3"), **how)


WAYS = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "temperature": 0.8, "seed": 3}}


@pytest.mark.parametrize(
    ("execution", "batch", "way"),
    nightly_but(
        {("native", 1, "sampled"), ("native", 3, "greedy"), ("eager", 3, "greedy")}, list(itertools.product(EXECUTIONS, [1, 3], WAYS))
    ),
)
def test_texts_and_drafts_are_the_same_with_and_without_reuse(execution, batch, way):
    found = []
    for reuse in (True, False):
        speculator = watching(execution, reuse_prefix=reuse)
        texts, read = [], []
        for first in range(0, len(chat()), batch):
            rows, before = chat()[first : first + batch], speculator.target.layer_tokens[0]
            given = {**padded(rows), "max_new_tokens": 16, "eos_token_id": None, **WAYS[way]}
            texts.append(speculator.generate(**given).sequences.tolist())
            read.append(speculator.target.layer_tokens[0] - before)
        if execution == "native":  # what is kept of texts that are over, in pages
            assert [bool(cache.pool.cached) for cache in (speculator.target.cache, speculator.drafter._cache)] == [reuse, reuse]
        found.append((texts, speculator.drafter.trees, read))
        speculator.close()
    (texts, trees, read), (wanted, expected, in_full) = found
    assert texts == wanted and trees == expected and len(trees) > 20
    saved = [whole - rest for whole, rest in zip(in_full, read)]
    if batch == 1:
        lengths = [len(each) for each in chat()]
        pages = [0, 0, lengths[0] - 1, 63, 64, lengths[2] - 1]
        assert saved == (pages if execution == "native" else [0, 0, 0, 63, 63, 64])  # without pages, only the row before is there
    else:
        assert sum(saved) > 150


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_rows_that_join_and_leave_share(execution):
    found = []
    for reuse in (True, False):
        speculator = watching(execution, shape="chain(3)", reuse_prefix=reuse)
        session, texts = speculator.session(), {}
        for index, row in enumerate(chat()):
            session.add(row, RowParameters(max_new_tokens=8 + 5 * (index % 3), seed=(1, index), do_sample=index % 2 == 0))
            for _ in range(3):
                for commit in session.step():
                    texts.setdefault(commit.slot, []).extend(commit.tokens)
            if index == 3:
                session.remove(session.rows[-1].slot)
        while session.live:
            for commit in session.step():
                texts.setdefault(commit.slot, []).extend(commit.tokens)
        found.append((texts, speculator.drafter.trees))
        tokens = speculator.target.layer_tokens[0]
        found[-1] += (tokens,)
        speculator.close()
    (texts, trees, read), (wanted, expected, in_full) = found
    assert texts == wanted and trees == expected and read < in_full - 150


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_rows_that_join_beside_one_whose_prompt_is_scored_share_too(execution):
    """That prompt is opened and read by itself, between those of the others."""
    found = []
    for reuse in (True, False):
        speculator = watching(execution, shape="chain(3)", reuse_prefix=reuse)
        session, texts = speculator.session(), {}
        for indices in ([0], [2, 1, 3]):
            for index in indices:
                session.add(chat()[index], RowParameters(max_new_tokens=8, prompt_logprobs=0 if index == 1 else None))
            while session.live:
                for commit in session.step():
                    texts.setdefault(commit.slot, []).extend(commit.tokens)
        found.append((texts, speculator.drafter.trees, speculator.target.layer_tokens[0]))
        speculator.close()
    (texts, trees, read), (wanted, expected, in_full) = found
    assert texts == wanted and trees == expected and read < in_full - 100


def test_the_only_one_of_several_drafters_that_reads_prompts_shares_too():
    found = []
    for reuse in (True, False):
        speculator = watching("native", "chain(3)", Several(["prompt-lookup", Watched("zoo:python-8m-eagle3")]), reuse_prefix=reuse)
        texts = [speculator.generate(torch.tensor([row]), max_new_tokens=12, do_sample=False).sequences.tolist() for row in chat()]
        found.append((texts, speculator.drafter.drafters[1].trees, speculator.target.layer_tokens[0]))
        assert speculator.drafter.page_bytes == speculator.drafter.drafters[1].page_bytes > 0
        speculator.close()
    assert found[0][:2] == found[1][:2] and found[0][2] < found[1][2] - 400
    both = watching("native", "chain(3)", Several([Eagle3("zoo:python-8m-eagle3"), Eagle3("zoo:python-8m-eagle3")]))
    for _ in range(2):  # they read in full
        before = both.target.layer_tokens[0]
        both.generate(torch.tensor(chat()[:1]), max_new_tokens=1, do_sample=False)
        assert both.target.layer_tokens[0] - before == len(chat()[0])
    both.close()
