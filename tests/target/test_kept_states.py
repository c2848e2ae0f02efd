"""Models that can only verify chains go on from what was kept of texts that begin alike; their logits are those of a plain pass."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import make_drafter, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft import CacheMemoryError, ConfigurationError, RowParameters, Speculator, TokenTree
from foredraft.backends.states import KEPT, State, StateStore
from foredraft.target import Target
from foredraft.target.budgets import budget

HOW = {"falcon_alibi": "sdpa", "qwen3_next": "sdpa", "zamba2": "sdpa"}
FAMILIES = ["gpt_neo", "falcon_alibi", "qwen3_next", "zamba2", "mamba2", "rwkv"]  # caches that are cut, mixed, recurrent, no cache
RECURRENT = ["qwen3_next", "zamba2", "mamba2", "rwkv"]


def model_of(family):
    return tiny(family, HOW.get(family, "eager"))


def text(length, seed=0):
    return [3 + (7 * i * i + 3 * seed * i + seed) % 100 for i in range(length)]


@torch.inference_mode()
def plain(target, ids):
    """``[L, V]`` of one pass with no cache."""
    whole = torch.tensor([list(ids)])
    return target.model(input_ids=whole, attention_mask=torch.ones_like(whole), use_cache=False).logits[0]


def close(got, wanted):
    assert (got - wanted).abs().max() <= 3e-4 * wanted.abs().max()


class Reader:
    """A target, and how many tokens its model has read."""

    def __init__(self, family, **options):
        self.target, self.count = Target(model_of(family), test=False, **options), 0
        self.target.model.register_forward_pre_hook(self._note, with_kwargs=True)
        self.read([5, 6, 7])  # rwkv changes its weights in the first pass
        self.target.compact([])

    def _note(self, module, args, kwargs):
        self.count += kwargs["input_ids"].shape[1] if kwargs.get("use_cache") else 0

    @torch.inference_mode()
    def read(self, *texts, **options):
        """How many tokens the model has read for these new rows, whose logits are right."""
        before, first = self.count, len(self.target.lengths)
        self.target.open(texts, **options)
        logits = self.target.prefill(texts, first=first)
        assert self.target.lengths[first:] == [len(each) for each in texts]
        read = self.count - before
        for got, each in zip(logits, texts):
            close(got, plain(self.target, each)[-1])
        return read

    @torch.inference_mode()
    def go_on(self, ids, row=0, rows=1):
        """Row ``row`` is right behind ``ids``, and goes on with three tokens, of which two are kept."""
        chain = torch.tensor([[5, 6, 7]] * rows)
        close(self.target.score(TokenTree.from_chain(chain))[row], plain(self.target, [*ids, 5, 6, 7])[len(ids) :])
        self.target.commit(None, [2] * rows)
        return [*ids, 5, 6]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chat_whose_history_is_sent_again(family):
    reader, history = Reader(family), text(60)
    assert reader.read(history) == 60
    for turn in range(3):
        history = reader.go_on(reader.go_on(history))
        reader.target.compact([])
        history = [*history, *text(20, turn + 1)]
        assert 20 <= reader.read(history) <= 25  # a rejected token takes the state back by a round
    assert reader.go_on(history)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_text_that_is_sent_again_as_it_ended(family):
    """What comes behind it is not what came behind its prompt."""
    reader, prompt = Reader(family), text(40)
    reader.read(prompt)
    chain = torch.tensor([[5, 6, 7]])
    reader.target.score(TokenTree.from_chain(chain))
    reader.target.commit(None, [3])
    reader.target.compact([])
    assert reader.read([*prompt, 5, 6, 7]) <= 3


@pytest.mark.parametrize("family", FAMILIES)
def test_instructions_are_read_twice_and_then_no_more(family):
    reader, base = Reader(family), text(70)
    cut = reader.target.reuse_prefix and family not in RECURRENT
    counts = [reader.read([*base, 100 + row, *text(15, row)]) for row in range(4)]
    assert counts == [86, 16 if cut else 86, 16, 16]
    reader.go_on([*base, 100, *text(15, 0)], rows=4)
    reader.target.compact([])
    assert reader.read(base) <= 1, "what comes behind it was not kept, or the last token is read"


@pytest.mark.parametrize("family", RECURRENT)
def test_rows_that_are_equal_read_their_prompt_once(family):
    reader, prompt = Reader(family), text(60)
    assert reader.read(prompt, prompt, prompt) == 60
    chain = torch.tensor([[5, 6], [7, 8], [9, 10]])
    with torch.inference_mode():
        logits = reader.target.score(TokenTree.from_chain(chain))
        for row, line in enumerate(chain.tolist()):
            close(logits[row], plain(reader.target, prompt + line)[-2:])
        reader.target.commit(None, [2, 1, 2])
        close(reader.target.advance(torch.tensor([4, 4, 4]))[1], plain(reader.target, [*prompt, 7, 4])[-1])


@pytest.mark.parametrize("family", ["gpt_neo", "qwen3_next"])
def test_who_shares_nothing(family):
    reader, prompt = Reader(family), text(60)
    reader.read(prompt, isolations=["a"])
    assert reader.read(prompt, isolations=["b"]) == reader.read(prompt) == 60
    assert reader.read(prompt, isolations=["b"]) <= 1
    reader.target.compact([])
    name, weight = next(iter(reader.target.model.named_parameters()))
    reader.target.rewrite({name: 1.5 * weight})
    assert reader.read(prompt) == 60, "weights have changed"
    reader.target.rewrite({name: weight / 1.5})
    reader.target.compact([])
    assert reader.read(prompt) == 60, "what the row left was computed with the former weights"
    alone = Reader(family, reuse_prefix=False)
    assert alone.read(prompt) == alone.read(prompt) == 60 and not len(alone.target.cache.states)
    reader.target.release()
    assert reader.read(prompt) == 60


@settings(deadline=None, max_examples=12)
@given(data=st.data(), family=st.sampled_from(["gpt_neo", "qwen3_next", "mamba2"]))
@torch.inference_mode()
def test_whatever_rows_do_their_logits_are_those_of_a_plain_pass(data, family):
    """Texts of few kinds, so that they share much; rows open, go on, are taken back and leave in any order; few states are kept."""
    reader, texts = Reader(family, prefill_chunk=data.draw(st.sampled_from([19, 1024]))), []
    target = reader.target
    target.cache.states.limit = data.draw(st.sampled_from([None, 1, 200_000]))
    for _ in range(data.draw(st.integers(3, 7))):
        what = data.draw(st.sampled_from(["open", "go on", "go on", "leave"])) if texts else "open"
        if what == "open":
            pieces = st.lists(st.sampled_from([text(17), text(40), text(25, 3), [9]]), min_size=1, max_size=4)
            new = [list(itertools.chain(*data.draw(pieces))) for _ in range(data.draw(st.integers(1, 2)))]
            reader.read(*new)
            texts += [list(each) for each in new]
        elif what == "go on":
            chain = torch.tensor([text(3, data.draw(st.integers(0, 1)))] * len(texts))
            logits = target.score(TokenTree.from_chain(chain))
            kept = [data.draw(st.integers(1, 3)) for _ in texts]
            for row, ids in enumerate(texts):
                close(logits[row], plain(target, ids + chain[row].tolist())[len(ids) :])
                ids += chain[row].tolist()[: kept[row]]
            target.commit(None, kept)
        else:
            keep = [row for row in range(len(texts)) if data.draw(st.booleans())]
            target.compact(keep)
            texts = [texts[row] for row in keep]
        assert target.lengths == [len(ids) for ids in texts]


@pytest.mark.parametrize(("family", "drafter"), [("qwen3_next", "ngram"), ("qwen3_next", "draft-model"), ("mamba2", "ngram")])
def test_keyed_texts_are_those_of_plain_decoding(family, drafter):
    base = text(40)
    prompts = [[*base, *text(4 * row, row)] for row in (0, 1, 1, 2)]
    wanted = texts_of(Speculator(model_of(family), "none", reuse_prefix=False), prompts)
    speculator = Speculator(model_of(family), make_drafter(drafter, family), rule="match", shape="chain(3)")
    assert texts_of(speculator, prompts) == wanted
    assert texts_of(speculator, prompts) == wanted, "the second time, all of it is known"


def texts_of(speculator, prompts, new=12, session=None, most=None):
    """The texts; all the while, rows and states take ``most`` bytes."""
    session, found = session or speculator.session(), {}
    for row, prompt in enumerate(prompts):
        session.add(prompt, RowParameters(max_new_tokens=new, do_sample=True, seed=(3, row)))
    while session.live:
        for commit in session.step():
            found.setdefault(commit.slot, []).extend(commit.tokens)
        if most is not None:
            assert session.memory.held <= most and (
                session.memory.held + session.memory.cached <= most or len(speculator.target.cache.states) == 1
            )
    return [found[slot] for slot in sorted(found)]


def test_a_prompt_is_read_in_pieces_while_others_run(monkeypatch):
    speculator = Speculator(model_of("mamba2"), "none")
    session = speculator.session()
    monkeypatch.setattr("foredraft.session.PAUSE", 0.25)
    monkeypatch.setattr("foredraft.session.SHARE", 0.0)
    session._read_rate = 500.0  # about 125 tokens at a time
    slot = session.add(text(20), RowParameters(max_new_tokens=40))
    session.step()
    session.add(text(450, 1), RowParameters(max_new_tokens=2))
    committed = []
    while len(session.rows) < 2:
        session._read_rate = 500.0
        committed.append([commit.slot for commit in session.step()])
    assert len(committed) == 4 and committed[:3] == [[slot]] * 3, "a round of the other after each piece"
    session.close()


# -- a budget -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_next", "gpt_neo"])
def test_texts_within_a_budget_are_those_without(family):
    """Rows wait, are set aside, and are read again; states are given up for them."""
    prompts = [[*text(30), *text(8, row)] for row in range(3)]
    wanted = texts_of(Speculator(model_of(family), "none", reuse_prefix=False), prompts, new=40)
    one = Target(model_of(family)).whole(38 + 40 + 8)[0]
    tight = Speculator(model_of(family), "ngram", rule="match", shape="chain(3)", cache_memory=f"{int(2.2 * one)}B")
    session = tight.session()
    assert session.fits(prompts[0], RowParameters(max_new_tokens=40)) == "now"
    assert texts_of(tight, prompts, new=40, session=session, most=int(2.2 * one)) == wanted
    assert session.memory.held == 0 and 0 < session.memory.cached <= int(2.2 * one)
    with pytest.raises(CacheMemoryError, match="cache_memory allows"):
        session.add(text(300), RowParameters(max_new_tokens=200))


def test_on_a_gpu_the_memory_of_the_gpu_counts(monkeypatch):
    """And what torch has reserved there is free as far as it is not used."""
    for name, found in {"mem_get_info": (1000, 9000), "memory_reserved": 700, "memory_allocated": 500}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, found=found: found)
    assert [budget(each, torch.device("cuda", 0), lambda: None) for each in ("auto", 0.5, "1MB")] == [
        (False, 960),
        (True, 600),
        (True, 10**6),
    ]


def test_a_budget_without_room_for_a_row_is_refused():
    with pytest.raises(ConfigurationError, match="no room for one row"):
        Target(model_of("mamba2"), cache_memory="100B")
    assert Target(model_of("mamba2"), test=False).whole(10) == Target(model_of("mamba2"), test=False).whole(500) != [0]


@pytest.mark.parametrize("family", ["gpt_neo", "qwen3_next", "rwkv"])
def test_a_row_takes_what_it_is_counted_as(family):
    reader, ids = Reader(family), text(60)
    reader.read(ids)
    row = reader.target.cache.rows[0]
    pages = len(row.pages) * reader.target.cache.pages.page_bytes
    assert reader.target.whole(60) == [2 * (row.live.bytes - row.live.logits.nbytes) + pages] == [reader.target.cache.memory.held]
    assert bool(pages) == (family != "rwkv")


# -- what is kept -----------------------------------------------------------------------------------------------------


def state(tokens, numbers=100):
    return State(list(tokens), [torch.zeros(numbers)])


def test_the_least_recently_used_state_goes_first():
    store = StateStore()
    store.limit = 3 * 400
    texts = [text(20, seed) for seed in range(4)]
    for each in texts[:3]:
        store.add("key", state(each))
    assert store.find("key", [*texts[0], 1], 21) is not None and store.find("other", [*texts[0], 1], 21) is None
    store.add("key", state(texts[3]))
    assert [store.find("key", [*each, 1], 21) is not None for each in texts] == [True, False, True, True]
    assert len(store) == 3 and store.bytes == 1200 and store.evicted == 1
    store.limit = None
    for seed in range(KEPT + 5):
        store.add("key", state(text(20, seed + 10)))
    assert len(store) == KEPT


def test_what_is_not_kept():
    store = StateStore()
    assert store.add("key", state(text(15))) is None and not len(store)
    number = store.add("key", state(text(20)))
    assert store.add("key", state(text(20))) is None and len(store) == 1, "it is there"
    assert store.find("key", text(21), 19) is None, "it has read one token too many"
    assert store.find("key", text(21), 20) is not None
    assert store.find("key", text(20), 20) is None, "what comes behind the last token is not known"
    store.add("key", state(text(30)), number)
    assert store.find("key", text(21), 20) is None and len(store) == 1 and store.bytes == 400


def test_a_state_that_an_interrupt_left_half_removed_is_forgotten():
    reader = Reader("qwen3_next")
    reader.read(text(90))
    reader.target.reset()
    cache = reader.target.cache
    assert cache.pages.pool.cached
    cache.states._order.popitem()
    cache.share_no_more()
    assert cache.states.bytes == cache.pages.pool.cached == len(cache.states) == 0
    assert reader.read(text(90)) == 90


@pytest.mark.parametrize("family", ["gpt_neo", "qwen3_next", "rwkv"])
def test_bytes_are_those_of_the_tensors(family):
    reader = Reader(family)
    reader.read(text(40))
    store = reader.target.cache.states
    ((state, size),) = next(iter(store._states.values())).values()
    held = state.memory if isinstance(state.memory, list) else [part for layer in state.memory.layers for part in vars(layer).values()]
    parts = [part for each in held for part in (each.values() if isinstance(each, dict) else [each]) if isinstance(part, torch.Tensor)]
    assert store.bytes == size == sum(part.nbytes for part in [*parts, state.logits]) > 0
