"""Rows within a budget of memory: who may join, who waits, and that waiting changes nothing but the time."""

from __future__ import annotations

import itertools
import random
from itertools import pairwise

import pytest
import torch
from cover import covered, nightly_but
from head_cases import shaken
from helpers import padded, repetitive, tiny
from kernel_cases import build, needs_kernels

from foredraft import CacheMemoryError, ConfigurationError, RowParameters, Speculator
from foredraft import session as session_module
from foredraft.admission import Admission
from foredraft.device import free_memory
from foredraft.drafters.draft_model import DraftModel
from foredraft.drafters.draft_verify import DraftVerify
from foredraft.drafters.eagle3 import Eagle3
from foredraft.drafters.layer_skip import LayerSkip
from foredraft.drafters.prompt_lookup import PromptLookup
from foredraft.drafters.several import Several
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.models.paged_cache import PagedCache
from foredraft.models.pages import PAGE
from foredraft.target import budgets

pytestmark = needs_kernels

PAGE_BYTES = 2 * 3 * 2 * 32 * 4 * PAGE  # keys and values, layers, heads, size, bytes
DRAFTERS = {
    "none": lambda: "none",
    "prompt-lookup": lambda: "prompt-lookup",
    "ngram": lambda: "ngram",
    "draft-model": lambda: DraftModel(build("llama", torch.float32), execution="native"),
    "eagle3": lambda: Eagle3(shaken(Eagle3Head.for_target(build("qwen3", torch.float32)))),
}
BESIDE = {"draft-model": 1, "eagle3": 1 / 3}  # what they keep beside a page, of a model of three layers, and of one layer as large


def speculator_of(drafter="prompt-lookup", *, pages=None, dtype=torch.float32, **options):
    memory = "auto" if pages is None else f"{pages * PAGE_BYTES}B"
    fixed = {} if drafter == "none" else {"shape": "chain(3)"}
    how = {"execution": "native", "cache_memory": memory, "rule": "match", **fixed, **options}
    return Speculator(build("qwen3", dtype), DRAFTERS[drafter](), **how)


def rows_of(count, seed=1):
    rows = repetitive([30 + 37 * index % 90 for index in range(count)], seed=seed)
    return [[token % 100 for token in row] for row in rows]


def serve(session, rows, new=200, every=1, **parameters):
    """The texts of ``rows``, of which another joins after each ``every`` steps."""
    found, slots, rows = {}, {}, list(enumerate(rows))
    steps = 0
    while session.live or rows:
        if rows and steps % every == 0:
            index, row = rows.pop(0)
            slots[session.add(row, RowParameters(max_new_tokens=new, seed=(7, index), **parameters))] = index
        steps += 1
        for commit in session.step():
            found.setdefault(slots[commit.slot], []).extend(commit.tokens)
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize(
    ("drafter", "sampled"),
    nightly_but(
        {("none", False), ("prompt-lookup", True), ("ngram", False), ("eagle3", False)}, list(itertools.product(DRAFTERS, [False, True]))
    ),
)
def test_the_text_is_the_same_while_rows_wait(drafter, sampled):
    rows = rows_of(8)
    wanted = serve(speculator_of(drafter).session(), rows, do_sample=sampled)
    session = speculator_of(drafter, pages=9 + int(9 * BESIDE.get(drafter, 0))).session()
    assert serve(session, rows, do_sample=sampled) == wanted
    assert session.memory.set_aside > 0 and session.memory.held == 0 and session.memory.limit == 9
    assert session.stats.memory.set_aside == session.memory.set_aside


@pytest.mark.parametrize(
    ("drafter", "dtype", "seed"),
    [
        *covered(["none", "prompt-lookup", "draft-model", "eagle3"], [torch.float32], range(3), ways=1),
        *itertools.product(["none", "draft-model"], [torch.bfloat16], [0]),
    ],
)
def test_the_text_is_the_same_while_rows_are_set_aside_at_random_rounds(drafter, dtype, seed, monkeypatch):
    """In bfloat16, too: kernels give the same bits whatever pieces a text is read in."""
    rows = rows_of(6, seed=2)
    wanted = serve(speculator_of(drafter, dtype=dtype).session(), rows, new=40, do_sample=True)
    dice, gone = random.Random(seed), []

    def excess(self, rows):
        gone.append([row for row in rows if dice.random() < 0.15])
        return gone[-1]

    monkeypatch.setattr(Admission, "excess", excess)
    assert serve(speculator_of(drafter, dtype=dtype).session(), rows, new=40, do_sample=True) == wanted and any(gone)


def test_a_batch_that_does_not_fit_at_once_is_generated_all_the_same():
    rows = rows_of(12)
    few, many = (speculator_of(pages=pages).generate(**padded(rows), max_new_tokens=80, do_sample=False) for pages in (7, None))
    assert few.sequences.tolist() == many.sequences.tolist()
    assert few.stats.memory.set_aside + few.stats.memory.evicted > 0 == many.stats.memory.set_aside


def test_the_youngest_wait_and_come_back_before_newer_ones():
    session = speculator_of("none", pages=6).session()
    for row in rows_of(4):
        session.add(row[:30], RowParameters(max_new_tokens=150))
    order = []
    while session.live:
        order += [commit.slot for commit in session.step() if commit.finish_reason]
        waiting = [row.slot for row in session.waiting]
        assert waiting == sorted(waiting) and all(row.slot < waiting[0] for row in session.rows if waiting)
    assert order == [0, 1, 2, 3] and session.memory.set_aside > 0


def test_a_row_that_fills_the_memory_is_read_beside_what_others_left():
    speculator = speculator_of("none", pages=4)
    for last in (1, 2, 3):  # each shares a page in part with the one before
        row = [*([7, 8, 9] * 70), *([last] * 40)]
        found = serve(speculator.session(), [row], new=4 * PAGE - 1 - len(row))
        assert found == serve(speculator_of("none").session(), [row], new=4 * PAGE - 1 - len(row))


def test_pages_of_live_rows_never_exceed_the_limit():
    speculator = speculator_of("ngram", pages=8, shape="product(2,2)")
    session, pool = speculator.session(), speculator.target.pools[0]
    for row in rows_of(10):
        session.add(row, RowParameters(max_new_tokens=60))
    while session.live:
        session.step()
        assert pool.held <= pool.made <= 8
        assert speculator.target.cache.layers[0].keys.shape[0] <= 8 + 1


# -- long prompts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["none", "draft-model", "eagle3"])
def test_long_prompts_are_read_piece_by_piece_between_rounds(drafter, monkeypatch):
    rows = [*rows_of(2), [token % 97 for token in range(3, 403)], rows_of(1)[0]]
    wanted = serve(speculator_of(drafter).session(), rows, new=60, do_sample=True)
    read = []
    monkeypatch.setattr(session_module, "LEAST", 24)  # tokens at a time, and no pause for more
    monkeypatch.setattr(session_module, "PAUSE", 0.0)
    monkeypatch.setattr(session_module, "SHARE", 0.0)
    speculator = speculator_of(drafter)
    prefill, passed = speculator.target.prefill, speculator.target.layer_tokens[0]

    def watched(prompts, *, first, **given):
        read.append((speculator.target.layer_tokens[0], first))
        return prefill(prompts, first=first, **given)

    monkeypatch.setattr(speculator.target, "prefill", watched)
    session = speculator.session()
    assert serve(session, rows, new=60, do_sample=True) == wanted
    behind = [tokens for tokens, first in read if first == 2]
    assert len(behind) > 12 and all(later - before > 24 for before, later in pairwise(behind)), "no round between two pieces"
    assert session.memory.held == 0 and passed == 0


@pytest.mark.parametrize("drafter", ["none", "eagle3"])
def test_what_was_read_ahead_is_not_read_again(drafter, monkeypatch):
    monkeypatch.setattr(session_module, "LEAST", 72)
    monkeypatch.setattr(session_module, "PAUSE", 0.0)
    monkeypatch.setattr(session_module, "SHARE", 0.0)
    speculator = speculator_of(drafter, **({} if drafter == "none" else {"shape": "chain(1)"}))
    session = speculator.session()
    session.add([5] * 10, RowParameters(max_new_tokens=30))
    session.step()
    session.add(list(range(100)) * 3, RowParameters(max_new_tokens=1))
    before, rounds = speculator.target.layer_tokens[0], 0
    while session.waiting:
        session.step()
        rounds += 1
    wanted = 300 + 4 if drafter == "none" else 300 + 4 + 4 * 2  # a head needs the last state of a piece again, and drafts one token
    assert rounds == 5 and speculator.target.layer_tokens[0] - before == wanted  # four pieces and rounds, and the rest
    assert (session.stats.prompt_tokens, session.stats.reused) == (310, 0)  # a piece that was read is no reuse
    session.add(list(range(100)) * 3, RowParameters(max_new_tokens=1))
    while session.waiting:
        session.step()
    assert session.stats.prompt_tokens == 610 and 256 <= session.stats.reused < 300


@pytest.mark.parametrize("drafter", ["draft-model", "several"])
def test_a_draft_model_reads_the_same_pieces(drafter, monkeypatch):
    """Live rows would wait for it otherwise."""
    monkeypatch.setitem(DRAFTERS, "several", lambda: Several(["prompt-lookup", DRAFTERS["draft-model"]()]))
    monkeypatch.setattr(session_module, "LEAST", 72)
    monkeypatch.setattr(session_module, "PAUSE", 0.0)
    monkeypatch.setattr(session_module, "SHARE", 0.0)
    speculator = speculator_of(drafter, shape="chain(2)")
    (draft,) = speculator.drafter.draft_models
    session = speculator.session()
    session.add([5] * 10, RowParameters(max_new_tokens=60))
    for _ in range(3):
        session.step()
    session.add([token % 97 for token in range(3, 403)], RowParameters(max_new_tokens=9))
    read = [draft.layer_tokens[0]]
    while session.live:
        session.step()
        read.append(draft.layer_tokens[0])
    steps = [later - before for before, later in pairwise(read)]
    assert steps[:5] == [72] * 5 and max(steps) <= 90  # the rest of the row is read together with filler for the other
    assert 400 <= sum(steps) < 700 and draft.cache.pool.held == 0


# -- what is counted --------------------------------------------------------------------------------------------------


def test_without_reuse_nothing_is_counted_as_shared():
    for pages in (15, 19, 22):
        speculator = speculator_of("none", pages=pages, reuse_prefix=False)
        texts = serve(speculator.session(), [[token % 100 for token in range(440)]] * 4, new=20)
        assert len(texts) == 4 and all(text == texts[0] for text in texts)


@pytest.mark.parametrize("drafter", [lambda: LayerSkip(exit=1), DraftVerify], ids=["layer-skip", "draft-verify"])
def test_nodes_that_lower_layers_read_are_counted(drafter):
    how = {"execution": "native", "rule": "match", "shape": "dynamic(depth=8,k=8,total=8)"}
    enough, few = (Speculator(build("qwen3", torch.float32), drafter(), cache_memory=f"{pages * PAGE_BYTES}B", **how) for pages in (3, 2))
    assert serve(enough.session(), [[5] * 10], new=100) == serve(speculator_of("none").session(), [[5] * 10], new=100)
    with pytest.raises(CacheMemoryError, match="needs up to"):  # at once, not in the middle of the text
        few.session().add([5] * 10, RowParameters(max_new_tokens=100))


@pytest.mark.parametrize("joins", [1, 2], ids=["together", "one by one"])
def test_a_draft_shares_only_what_it_has_read(joins):
    """A row that is over before the first draft has never been read by the draft model."""
    begin = [token % 97 for token in range(3, 203)]
    speculator = Speculator(
        build("qwen3", torch.float32), DraftModel(build("qwen3", torch.float32)), execution="native", rule="match", shape="chain(3)"
    )
    for _ in range(2):
        session = speculator.session()
        session.add([*begin, 1], RowParameters(max_new_tokens=1))
        if joins == 2:
            session.step()
        for last in (2, 3):
            session.add([*begin, last], RowParameters(max_new_tokens=30))
        while session.live:
            session.step()
        assert session.stats.acceptance_rate == 1.0


@pytest.mark.parametrize(("drafter", "shape"), covered(["draft-model", "eagle3"], ["chain(3)", "dynamic(depth=6,k=8,total=4)"], ways=1))
def test_target_and_draft_together_stay_within_the_budget(drafter, shape):
    begin = [token % 97 for token in range(3, 203)]
    rows = [*([[*begin, 1]] * 4), *rows_of(2), [*begin, 2], [*begin, 1]]
    wanted = serve(speculator_of("none").session(), rows, new=150, do_sample=True)
    speculator = speculator_of(drafter, pages=10 + int(10 * BESIDE[drafter]), shape=shape)
    session, drafted = speculator.session(), speculator.drafter
    step = session.step

    def watched():
        commits = step()
        caches = speculator.target.cache, drafted.model.cache if drafter == "draft-model" else drafted._cache
        assert sum(cache.pool.made * cache.page_bytes for cache in caches) <= speculator.target.budget
        return commits

    session.step = watched
    assert serve(session, rows, new=150, do_sample=True) == wanted
    assert session.memory.set_aside > 0 and session.stats.accepted > 0


@pytest.mark.parametrize("limit", [None, 20])
def test_equal_prompts_share_their_pages_in_a_draft_model(limit):
    speculator = speculator_of("draft-model", pages=limit)
    draft, prompt = speculator.drafter.model, torch.arange(3, 303)[None] % 97
    pages = []
    commit = draft.commit
    draft.commit = lambda *given: pages.append(draft.pools[0].held) or commit(*given)
    how = {"do_sample": True, "num_return_sequences": 6, "max_new_tokens": 8, "seed": 3}
    got = speculator.generate(prompt, **how).sequences
    assert torch.equal(got, speculator_of("none").generate(prompt, **how).sequences)
    if limit is None:  # otherwise rows wait for each other
        assert max(pages) == 4 + 6, "six rows share the four full pages of their prompt"


@pytest.mark.parametrize("drafter", ["draft-model", "eagle3"])
def test_a_draft_that_needs_more_pages_than_its_target_has_takes_them(drafter, monkeypatch):
    rows = rows_of(3)
    free = speculator_of(drafter).session()
    wanted = serve(free, rows, new=60)
    keep_to = PagedCache.keep_to

    def kept(self, other):
        keep_to(self, other)
        self.pool.limit = 5

    monkeypatch.setattr(PagedCache, "keep_to", kept)
    session = speculator_of(drafter).session()
    assert serve(session, rows, new=60) == wanted
    assert session.stats.drafted == free.stats.drafted


# -- questions --------------------------------------------------------------------------------------------------------


def test_fits():
    session = speculator_of("none", pages=6).session()
    few, many = [5] * 30, [6] * 250
    assert session.fits(few, RowParameters(max_new_tokens=20)) == "now"
    session.add(many, RowParameters(max_new_tokens=20))
    session.step()
    assert session.fits(many, RowParameters(max_new_tokens=20)) == "later"
    with pytest.raises(
        CacheMemoryError, match=r"needs up to 672 KiB.*cache_memory allows 576 KiB.*smaller max_new_tokens or a shorter prompt"
    ):
        session.fits([5] * 400, RowParameters(max_new_tokens=20))
    with pytest.raises(CacheMemoryError):
        session.add([5] * 30, RowParameters(max_new_tokens=400))
    assert len(session.rows) == 1 and not session.waiting
    slot = session.add(many, RowParameters(max_new_tokens=20))
    assert session.fits(few, RowParameters(max_new_tokens=20)) == "later", "whoever came first is served first"
    assert session.step() and session.waiting
    session.remove(slot)
    assert not session.waiting


def test_a_row_that_was_set_aside_can_be_removed(monkeypatch):
    session = speculator_of("none").session()
    for row in rows_of(3):
        session.add(row, RowParameters(max_new_tokens=20))
    session.step()
    with monkeypatch.context() as patch:
        patch.setattr(Admission, "excess", lambda self, rows: rows[1:])
        patch.setattr(Admission, "joining", lambda self, rows, waiting: [])
        session.step()
    assert [row.slot for row in session.waiting] == [1, 2]
    session.remove(1)
    while session.live:
        session.step()
    assert session.memory.held == 0


# -- bad input --------------------------------------------------------------------------------------------------------


def test_nobody_else_uses_the_target_while_it_is_asked_whether_a_row_fits(monkeypatch):
    session = speculator_of(pages=8).session()
    joining, seen = session.admission.joining, []
    monkeypatch.setattr(session.admission, "joining", lambda *given: seen.append(session.turn.running) or joining(*given))
    assert session.fits([5] * 30, RowParameters(max_new_tokens=20)) == "now"
    assert seen == [True] and session.turn.thread is None


@pytest.mark.parametrize("asked", [True, False])
def test_texts_that_have_ended_stay_until_memory_that_was_asked_for_is_used_up(asked):
    """So what is held does not depend on how many rows happened to run at once."""
    speculator = speculator_of("none", pages=200 if asked else None)
    session, pool = speculator.session(), speculator.target.pools[0]
    for index in range(150):
        text = [index % 100, index // 100, *((index + place * (1 + index % 7)) % 100 for place in range(120))]
        session.add(text, RowParameters(max_new_tokens=10, seed=(7, index)))
        while session.live:
            session.step()
    assert not pool.held and (pool.made == 200 if asked else pool.made <= 64 + 2 * 3)


def test_budgets_that_make_no_sense_are_refused():
    model = build("qwen3", torch.float32)
    for memory, message in [
        ("6 gigs", "'6 gigs' is not an amount of memory; write a size such as"),
        (1.5, "1.5"),
        (True, "True"),
        (f"{PAGE_BYTES - 1}B", r"one page of 64 tokens, which takes 96 KiB here; allow more"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            Speculator(model, "none", execution="native", cache_memory=memory)
        assert not any(vars(each).get("forward") for each in model.modules()), "the model was not left as it was"
    draft = build("qwen3", torch.float32)
    with pytest.raises(ConfigurationError, match=r"a row of two tokens and a draft of shape product\(4,4,4\), which take 384 KiB"):
        Speculator(model, DraftModel(draft), execution="native", shape="product(4,4,4)", cache_memory=f"{4 * PAGE_BYTES - 1}B")
    least = Speculator(model, DraftModel(draft), execution="native", shape="product(4,4,4)", cache_memory=f"{4 * PAGE_BYTES}B")
    assert least.generate(torch.tensor([[5]]), max_new_tokens=1, do_sample=False).sequences.shape == (1, 2)
    least.close()
    with pytest.raises(ConfigurationError, match=r"cache_memory needs a cache in pages.*no comparison with the model's own attention"):
        Speculator(tiny(), "none", cache_memory="1GiB", self_test=False)
    with pytest.raises(ConfigurationError, match="isolation must be a string or None, got 7"):
        RowParameters(max_new_tokens=1, isolation=7)
    with pytest.raises(ConfigurationError, match="isolation must be a string or None, got 7"):
        Speculator(model, "none", execution="native").generate(torch.tensor([[1, 2]]), max_new_tokens=1, isolation=7)


def test_what_a_draft_takes_is_not_promised_to_the_cache(monkeypatch):
    free = [100 * PAGE_BYTES]
    monkeypatch.setattr(budgets, "free_memory_of", lambda device: free[0])

    class Large(PromptLookup):
        def bind(self, target):
            super().bind(target)
            free[0] //= 2

    made = Speculator(build("qwen3", torch.float32), Large(), execution="native", cache_memory=0.5)
    assert made.target.budget == 25 * PAGE_BYTES and made.target.pools[0].limit == 25


def test_where_free_memory_is_not_known_a_fraction_is_refused(monkeypatch):
    monkeypatch.setattr(budgets, "free_memory_of", lambda device: None)
    assert speculator_of("none").target.budget is None
    with pytest.raises(ConfigurationError, match=r"cache_memory=0.5 is a fraction of the free memory.*give a size such as '6GiB'"):
        speculator_of("none", cache_memory=0.5)
    assert speculator_of("none", pages=3).target.budget == 3 * PAGE_BYTES


def test_a_draft_shares_the_budget():
    for drafter, pages in (("prompt-lookup", 20), ("draft-model", 10), ("eagle3", 15)):
        assert speculator_of(drafter, pages=20).target.pools[0].limit == pages


def test_free_memory_is_what_the_machine_and_the_container_leave(tmp_path):
    assert free_memory(tmp_path) is None
    for name, content in {
        "proc/meminfo": "MemTotal: 900 kB\nMemAvailable: 500 kB\n",
        "sys/fs/cgroup/memory.max": "max\n",
        "sys/fs/cgroup/memory.current": "300000\n",
        "sys/fs/cgroup/memory.stat": "anon 5\ninactive_file 20000\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert free_memory(tmp_path) == 500 * 1024
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("400000\n")
    assert free_memory(tmp_path) == 120_000
    version_1 = tmp_path / "sys/fs/cgroup/memory"
    version_1.mkdir()
    for name, content in {"limit_in_bytes": "50000", "usage_in_bytes": "30000", "stat": "cache 1\ntotal_inactive_file 2000\n"}.items():
        (version_1 / f"memory.{name}").write_text(content)
    assert free_memory(tmp_path) == 22_000
