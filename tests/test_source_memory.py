"""Models with an encoder within a budget of memory: pages of texts, and runs of pages of sources that rows with equal sources share."""

from __future__ import annotations

import copy
import itertools
import random

import encoder_decoders
import pytest
import torch
from cover import nightly_but
from kernel_cases import always as always  # a fixture
from kernel_cases import needs_kernels
from sourced_cases import build, compact_all_but_sources

from foredraft import CacheMemoryError, ConfigurationError, RowParameters, Source, Speculator, TokenTree
from foredraft.admission import Admission
from foredraft.drafters.draft_model import DraftModel
from foredraft.models.encoder_decoder import Decoder, some_source
from foredraft.models.pages import PAGE
from foredraft.models.source_runs import CrossKeys, Encoded, RunPool, SourcedCache, SourcedPages
from foredraft.target import Target

pytestmark = [needs_kernels, pytest.mark.usefixtures("always")]
START = 2
NAMES = ("t5 v1.1", "bart", "whisper")
WAYS = {"native": "native", "handed": "eager"}  # the kernels read pages, and the model's own layers get what is on them
BOTH = [(name, way) for name in NAMES for way in WAYS]
TURNS = {("t5 v1.1", "native", 0), ("whisper", "handed", 0)}
PARAMETERS = {"do_sample": True, "max_new_tokens": 70}


def model(name):
    return copy.deepcopy(build(name, torch.float32))


def paged(name, way, memory="1GiB", drafter="none", **options):
    shape = {} if drafter == "none" else {"shape": "chain(3)"}
    how = {"execution": WAYS[way], "cache_memory": memory, "rule": "match", **shape, **options}
    speculator = Speculator(model(name), drafter, **how)
    assert isinstance(speculator.target.cache, SourcedPages), speculator.target.reasons
    with torch.inference_mode():
        assert (speculator.target.backend.direct is not None) == (way == "native")
    return speculator


def some_sources(name, *seeds):
    """Of unequal lengths, where they are text; those of equal seeds are equal, and no two are the same object."""
    return [some_source(build(name, torch.float32), 150 - 13 * seed, seed) for seed in seeds]


def serve(session, sources, every=1, prompt=(START,), **parameters):
    """The texts of rows with ``sources``, of which another joins after each ``every`` steps. They end at unequal lengths."""
    found, slots, left = {}, {}, list(enumerate(sources))
    parameters = {**PARAMETERS, **parameters}
    new = parameters.pop("max_new_tokens")
    for step in itertools.count():
        if not session.live and not left:
            break
        if left and step % every == 0:
            index, source = left.pop(0)
            given = RowParameters(seed=(7, index), source=source, max_new_tokens=new - 7 * (2 - index % 3), **parameters)
            slots[session.add(list(prompt), given)] = index
        for commit in session.step():
            found.setdefault(slots[commit.slot], []).extend(commit.tokens)
    return [found[index] for index in sorted(found)]


def plain(name, sources, **parameters):
    """The same by a cache without pages, each row alone."""
    speculator = Speculator(model(name), "none", execution="eager", rule="match")
    assert not isinstance(speculator.target.cache, SourcedPages)
    session = speculator.session()
    texts = []
    for index, source in enumerate(sources):
        new = {**PARAMETERS, **parameters}
        new["max_new_tokens"] -= 7 * (2 - index % 3)
        session.add(list(new.pop("prompt", (START,))), RowParameters(seed=(7, index), source=source, **new))
        texts.append([token for _ in iter(lambda: session.live, False) for commit in session.step() for token in commit.tokens])
    return texts


# -- texts ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "keyed"])
@pytest.mark.parametrize(("name", "way"), nightly_but({("t5 v1.1", "native"), ("bart", "handed")}, BOTH))
def test_texts_within_a_budget_are_those_of_plain_decoding(name, way, sampled):
    """Rows join, leave, wait and are set aside; some have equal sources."""
    sources, how = some_sources(name, 1, 2, 1, 3, 2), {"do_sample": sampled, "max_new_tokens": 150}
    wanted = plain(name, sources, **how)
    target = paged(name, way).target
    least = target.cost(target.whole(151 + 4, sources[0]))
    tight = paged(name, way, f"{2 * least}B", drafter="ngram").session()
    assert serve(tight, sources, **how) == wanted
    memory = tight.memory
    assert memory.set_aside > 0 and memory.held == memory.sources.held == memory.sources.shared == 0 < memory.sources.cached


@pytest.mark.parametrize(("name", "way", "seed"), nightly_but(TURNS, [(*both, seed) for both in BOTH for seed in (0, 1)]))
def test_texts_are_the_same_where_rows_are_set_aside_at_random_rounds(name, way, seed, monkeypatch):
    sources = some_sources(name, 1, 2, 1, 3)
    wanted, dice, gone = plain(name, sources, max_new_tokens=40), random.Random(seed), []

    def excess(self, rows):
        gone.append([row for row in rows if dice.random() < 0.15])
        return gone[-1]

    monkeypatch.setattr(Admission, "excess", excess)
    for drafter in ("ngram", DraftModel(model(name), execution=WAYS[way])):
        session = paged(name, way, drafter=drafter).session()
        assert serve(session, sources, max_new_tokens=40) == wanted and any(gone)
        assert session.memory.held == session.memory.sources.held == 0


def test_the_same_beginning_behind_another_source_is_not_shared():
    prompt = [START, *encoder_decoders.texts((40,))[0]]
    sources = some_sources("bart", 1, 2, 1)
    speculator = paged("bart", "native")
    assert serve(speculator.session(), sources, prompt=prompt, max_new_tokens=20) == plain(
        "bart", sources, prompt=prompt, max_new_tokens=20
    )
    target = speculator.target
    assert [target.unread([*prompt, 5], None, source) for source in some_sources("bart", 1, 3)] == [1, len(prompt) + 1]
    assert target.unread([*prompt, 5], "another", sources[0]) == len(prompt) + 1


@pytest.mark.parametrize(
    ("fault", "way"),
    [("over", "native"), ("over", "handed"), ("compact", "native"), ("compact", "handed")],
)
def test_the_keys_of_a_row_that_has_left_are_found(fault, way, monkeypatch):
    """A planted fault: the row that takes its place reads them."""
    sources, speculator = some_sources("t5 v1.1", 1, 2, 3), paged("t5 v1.1", way)
    wanted = plain("t5 v1.1", sources)
    assert serve(speculator.session(), sources) == wanted
    over = CrossKeys.over
    if fault == "over":
        monkeypatch.setattr(CrossKeys, "over", lambda self, rows: len(rows) == len(self.rows) or over(self, rows))
    else:
        monkeypatch.setattr(SourcedCache, "compact", compact_all_but_sources)
    assert serve(speculator.session(), sources) != wanted


# -- sharing --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_equal_sources_share_one_run(way):
    speculator, read = paged("bart", way), []
    speculator.model.get_encoder().register_forward_hook(lambda module, given, named, output: read.append(len(output[0])), with_kwargs=True)
    session, run = speculator.session(), -(-(150 - 13) // PAGE)
    for source in some_sources("bart", 1, 1, 2, 1):
        session.add([START], RowParameters(max_new_tokens=9, source=source))
    session.step()
    memory = session.memory.sources
    assert (memory.held, memory.shared, memory.cached, sum(read)) == (2 * run - 1, run, 0, 2)
    assert len({id(each) for each in speculator.target.cache.sources}) == 2
    while session.live:
        session.step()
    memory = session.memory.sources
    assert (memory.held, memory.shared, memory.cached, memory.evicted) == (0, 0, 2 * run - 1, 0)
    del read[:]
    serve(session, some_sources("bart", 2, 1), max_new_tokens=20)
    assert read == [], "what is kept of a source was not found"
    serve(session, some_sources("bart", 2), max_new_tokens=20, isolation="another")
    assert read == [1]
    speculator.release()
    assert session.memory.sources.cached == 0


@torch.inference_mode()
@pytest.mark.parametrize("way", WAYS)
def test_a_row_that_leaves_moves_nothing_of_the_others_where_kernels_read_pages(way):
    target = paged("bart", way).target
    target.open([[START]] * 3, sources=some_sources("bart", 1, 2, 3))
    target.prefill([[START]] * 3, first=0)
    before = [[each.data_ptr() for pair in run.keys for each in pair] for run in target.cache.sources]
    target.compact([1, 2])
    target.score(TokenTree.root(torch.tensor([5, 6])))
    after = [[each.data_ptr() for pair in run.keys for each in pair] for run in target.cache.sources]
    assert (after == before[1:]) == (way == "native")


@torch.inference_mode()
@pytest.mark.parametrize("way", WAYS)
def test_what_is_kept_takes_what_is_counted(way):
    """Nothing of other sources stays alive beside it."""
    target = paged("bart", way).target
    sources = [Source.of(text) for text in encoder_decoders.texts((2 * PAGE, PAGE, PAGE))]
    target.open([[START]] * 3, sources=sources)
    target.prefill([[START]] * 3, first=0)
    run = target.cache.sources[0]
    assert run.page_bytes == target.source_bytes == target.page_bytes[-1]
    target.compact([1, 2])
    held = [run.states, *(each for pair in run.keys for each in pair)]
    assert sum(each.untyped_storage().nbytes() for each in held) == 2 * target.source_bytes
    pool = target.cache.runs
    assert (pool.held, pool.cached) == (2, 2)
    pool.limit = 3
    assert (pool.held, pool.cached, pool.evicted) == (2, 0, 2)


@torch.inference_mode()
@pytest.mark.parametrize("way", WAYS)
def test_a_source_that_is_left_alone_keeps_nothing_of_others_alive(way):
    target = paged("bart", way).target
    sources = [Source.of(text) for text in encoder_decoders.texts((2 * PAGE, PAGE, PAGE))]
    target.open([[START]] * 3, sources=sources)
    target.prefill([[START]] * 3, first=0)
    target.compact([1])
    target.advance(torch.tensor([5]))
    run = target.cache.sources[0]
    held = [run.states, *(each for pair in run.keys for each in pair)]
    assert sum(each.untyped_storage().nbytes() for each in held) == target.source_bytes


def test_counts_are_those_of_the_rows():
    """Any order of rows that come and go, within a limit that changes."""
    dice, pool, rows, kept = random.Random(4), RunPool(), [], {}
    runs = [Encoded(None, torch.zeros(PAGE * (1 + key % 3), 1), key) for key in range(9)]
    pool.spare = 3
    for _ in range(3000):
        what, key = dice.random(), dice.randrange(9)
        if what < 0.02:
            pool.limit = dice.choice([None, 6, 12])
        elif what < 0.03:
            pool.forget()
            kept.clear()
        elif what < 0.5 and rows:
            pool.drop(rows.pop(dice.randrange(len(rows))))
        else:
            run = pool.find(key)
            assert run is kept.get(key, run)
            run = run or (runs[key] if not runs[key].rows else Encoded(None, runs[key].states, key))
            fits = run.rows or pool.room is None or run.pages <= pool.room
            before = pool.held, pool.shared, pool.cached
            try:
                pool.hold(run)
                assert fits
                rows.append(run)
                kept[key] = run
            except CacheMemoryError:
                assert not fits and before == (pool.held, pool.shared, pool.cached)
        kept = {key: run for key, run in kept.items() if run in pool.kept}
        assert pool.held == sum(run.pages for run in set(rows)) and all(run.rows == rows.count(run) for run in set(rows))
        assert pool.shared == sum(run.pages for run in set(rows) if rows.count(run) > 1)
        assert pool.cached == sum(run.pages for run in kept.values() if not run.rows)
        assert pool.cached == 0 or pool.limit is None or pool.held + pool.cached <= pool.limit
        assert pool.cached <= max(pool.spare, pool._most_held)
    assert pool.evicted > 50


def test_the_least_recently_used_goes_first():
    pool, runs = RunPool(), [Encoded(None, torch.zeros(PAGE, 1), key) for key in range(4)]
    pool.limit = pool.spare = 3
    for run in runs[:3]:
        pool.hold(run)
        pool.drop(run)
    assert pool.find(0) is runs[0]
    pool.hold(runs[3])
    assert [run.key for run in pool.kept] == [2, 0, 3]


# -- a budget -------------------------------------------------------------------------------------------------------------


def test_fits_and_errors():
    probe, (short, long) = paged("bart", "native").target, some_sources("bart", 10, 1)
    enough = probe.cost(probe.whole(21 + PAGE, long))
    session = paged("bart", "native", f"{enough}B").session()
    given = {"max_new_tokens": 20}
    assert session.fits([START], RowParameters(source=long, **given)) == "now"
    session.add([START], RowParameters(source=long, **given))
    session.step()
    assert session.fits([START], RowParameters(source=short, **given)) == "later"
    little = paged("bart", "native", f"{probe.cost([2, 2])}B").session()
    assert little.fits([START], RowParameters(source=short, **given)) == "now"
    with pytest.raises(CacheMemoryError, match=r"needs up to .* cache_memory allows .*smaller max_new_tokens or a shorter source"):
        little.add([START], RowParameters(source=some_source(build("bart", torch.float32), 240, 1), **given))
    with pytest.raises(ConfigurationError, match="no room for one page of 64 tokens"):
        paged("bart", "native", f"{probe.cost([1, 1]) - 1}B")
    target = paged("bart", "native", f"{probe.cost([2, 2])}B").target
    for texts, sources, what in (([1, 1], [short, long], "of sources"), ([1, 3 * PAGE], [short, short], "of 64 tokens, and")):
        with pytest.raises(CacheMemoryError, match=what):
            target.open([[START] * length for length in texts], sources=sources)
        assert [pool.held for pool in target.pools] == [0, 0] and not target.lengths
    assert serve(little, [short]) == plain("bart", [short])


@torch.inference_mode()
def test_what_setting_a_row_aside_frees_includes_a_run_that_no_other_row_holds():
    target, (one, other) = paged("bart", "native").target, some_sources("bart", 1, 2)
    target.open([[START]] * 3, sources=[one, one, other])
    pages = [run.pages for run in target.cache.sources]
    freed = [target.growth(0, without=without)[-1] for without in ([], [0], [0, 1], [2], [1, 2])]
    assert freed == [0, 0, -pages[0], -pages[2], -pages[2]]


def test_models_whose_layers_are_their_own_have_pages_on_request():
    asked, auto = Target(model("bart"), execution="eager", cache_memory=0.5), Target(model("bart"), execution="eager")
    assert isinstance(asked.cache, SourcedPages) and "the model has an encoder" in asked.reasons["paged_attention"]
    assert not isinstance(auto.cache, SourcedPages) and "a size or a fraction as cache_memory" in auto.reasons["pages"]
    assert auto.pools == [] and auto.needed([START], None, 5, some_sources("bart", 1)[0]) == []
    with pytest.raises(ConfigurationError, match=r"cache_memory needs a cache in pages.*self_test=False"):
        Speculator(model("bart"), "none", execution="eager", cache_memory="1GiB", self_test=False)


def test_a_draft_shares_the_budget():
    alone = paged("bart", "native").target
    text, source = alone.page_bytes
    for drafter, beside in (
        ("ngram", (0, 0)),
        (DraftModel(model("bart"), execution="native"), (text, source)),
        (DraftModel(model("bart"), execution="eager"), (text, source)),
    ):
        speculator = paged("bart", "native", drafter=drafter)
        assert (speculator.drafter.page_bytes, speculator.drafter.source_bytes) == beside
        assert speculator.target.cost([1, 10]) == text + beside[0] + 10 * (source + beside[1])
    draft = DraftModel("anywhere", template="{source}")
    draft.info = paged("bart", "native", drafter=DraftModel(model("bart"), execution="native")).drafter.info
    assert draft.source_bytes == draft.page_bytes == text, "it reads the source as a part of its text"


@torch.inference_mode()
@pytest.mark.parametrize("name", list(encoder_decoders.FAMILIES))
def test_lengths_are_known_before_the_encoder_has_read(name):
    if encoder_decoders.FAMILIES[name].support == "refused":
        return
    whole = encoder_decoders.build(name)
    given, decoder = encoder_decoders.sources(name), Decoder(whole, None)
    main = given[whole.main_input_name]
    sources = [Source({key: each[row : row + 1] for key, each in given.items()}) for row in range(len(main))]
    sources += [some_source(whole, length, length) for length in (5, 19)]
    states = decoder.encode(sources)
    sound = whole.main_input_name != "input_ids"
    for source in sources:
        assert decoder.length(source) >= len(states[source]) if sound else decoder.length(source) == len(states[source])
        known = Source(source.inputs, states[source][None])
        assert decoder.length(known) == len(decoder.encode([known])[known])
