"""One call at a time per Speculator and per model object; a second thread is refused or waits, and nothing is computed wrongly."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from helpers import perturbed, prompts, tiny
from kernel_cases import always as always  # a fixture
from kernel_cases import build, needs_kernels
from transformers import StoppingCriteria, StoppingCriteriaList

from foredraft import BusyError, ForedraftError, RowParameters, Speculator
from foredraft.drafters.draft_model import DraftModel
from foredraft.drafters.several import Several
from foredraft.drafters.suffix import Suffix
from foredraft.drafters.suffix_store import SuffixStore
from foredraft.target import Target
from foredraft.tree import TokenTree

IDS = torch.tensor(prompts((12,), vocabulary=100))
NEW = 6


class Pause(StoppingCriteria):
    """Holds a call up in the middle of its first step."""

    def __init__(self):
        self.reached, self.go = threading.Event(), threading.Event()

    def __call__(self, input_ids, scores, **kwargs):
        self.reached.set()
        assert self.go.wait(10)
        return torch.zeros(len(input_ids), dtype=torch.bool)


@contextmanager
def paused(speculator):
    """``speculator`` is in the middle of a call in another thread; the future of its output."""
    pause = Pause()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(speculator.generate, IDS, max_new_tokens=NEW, stopping_criteria=StoppingCriteriaList([pause]))
        try:
            assert pause.reached.wait(10)
            yield future
        finally:
            pause.go.set()
        future.result()


def elsewhere(call, *args):
    """What ``call`` returns in a thread that ends afterwards."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, *args).result(10)


def text(speculator, **options):
    return speculator.generate(IDS, max_new_tokens=NEW, **options).sequences.tolist()


def drain(stream):
    return [token for tokens in stream for token in tokens]


def test_a_second_thread_is_refused_at_once():
    speculator = Speculator(tiny(), draft_length=2)
    expected = text(speculator)
    with paused(speculator) as future:
        with pytest.raises(BusyError, match=r"wait=True.*model object of its own"):
            text(speculator)
        with pytest.raises(BusyError):
            next(speculator.stream(IDS, max_new_tokens=NEW))
        for action in (speculator.release, speculator.close):
            with pytest.raises(BusyError):
                action()
    assert future.result().sequences.tolist() == expected == text(speculator)


@pytest.mark.parametrize("execution", ["eager", pytest.param("native", marks=needs_kernels)])
def test_two_speculators_over_one_model_take_turns(execution, always):
    model = build("llama", torch.float32)
    first, second = Speculator(model, "none", execution=execution), Speculator(model, "none", execution="eager")
    expected = text(first)
    with paused(first):
        with pytest.raises(BusyError):
            text(second)
        with pytest.raises(BusyError):
            Speculator(model, "none")
        with pytest.raises(BusyError):
            second.close()
    assert text(second) == expected


def test_a_shared_draft_model_or_store_counts():
    draft, store = perturbed(), SuffixStore()
    pairs = [
        [Speculator(tiny(), Several([DraftModel(draft)]), draft_length=2), Speculator(draft, "none")],
        [Speculator(build("llama", torch.float32), Suffix(source=store, learn=True), draft_length=2) for _ in range(2)],
    ]
    for first, second in pairs:
        with paused(first), pytest.raises(BusyError):
            text(second)
        assert text(second)


def test_others_wait_if_they_are_told_to():
    model = tiny()
    speculators = [Speculator(model, draft_length=2, wait=True) for _ in range(2)]
    expected = text(speculators[0])
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(text, speculators[i % 2]) for i in range(12)]
        assert all(each.result(20) == expected for each in found)
    with ThreadPoolExecutor(1) as pool:
        stream = speculators[0].stream(IDS, max_new_tokens=NEW)
        next(stream)
        later = pool.submit(text, speculators[1])
        assert not wait([later], timeout=0.3).done  # a text takes a tenth of that
        stream.close()
        assert later.result(10) == expected


def test_models_of_their_own_need_no_turns():
    speculators = [Speculator(build("llama", torch.float32), draft_length=2) for _ in range(2)]
    with paused(speculators[0]):
        assert text(speculators[1]) == elsewhere(text, speculators[1])


@pytest.mark.parametrize("ending", ["close", "collect", "read"])
def test_a_stream_keeps_its_turn_until_it_is_over(ending):
    speculator = Speculator(tiny(), "none")
    expected = text(speculator)
    stream = speculator.stream(IDS, max_new_tokens=NEW)
    assert elsewhere(text, speculator) == expected, "a stream that has not begun is in nobody's way"
    next(stream)
    with pytest.raises(BusyError):
        elsewhere(text, speculator)
    if ending == "close":
        elsewhere(stream.close)
    elif ending == "collect":
        del stream
    else:
        assert len(drain(stream)) == NEW - 1
    assert elsewhere(text, speculator) == expected


def test_a_call_while_another_thread_closes_a_stream_is_told_so(monkeypatch):
    speculator = Speculator(tiny(), "none")
    expected = text(speculator)
    stream, reached, go = speculator.stream(IDS, max_new_tokens=NEW), threading.Event(), threading.Event()
    next(stream)
    reset = speculator.target.reset
    monkeypatch.setattr(speculator.target, "reset", lambda: (reached.set(), go.wait(10), reset()))
    with ThreadPoolExecutor(1, "closing") as pool:
        closed = pool.submit(stream.close)
        assert reached.wait(10)
        try:
            with pytest.raises(BusyError, match="closing_0 is using"):
                text(speculator)
        finally:
            go.set()
        closed.result(10)
    assert text(speculator) == expected


def test_an_abandoned_stream_is_taken_over():
    speculator = Speculator(tiny(), "none")
    expected = text(speculator)

    def begin():
        stream = speculator.stream(IDS, max_new_tokens=NEW)
        next(stream)
        return stream

    for start in (begin, lambda: elsewhere(begin)):  # in this thread, and in one that has ended
        stream = start()
        assert text(speculator) == expected
        with pytest.raises(ForedraftError, match="this one was stopped"):
            next(stream)
        assert elsewhere(text, speculator) == expected, "a stream that was stopped is in nobody's way"
    circle = [elsewhere(begin)]
    circle.append(circle)
    del circle
    running = begin()
    elsewhere(gc.collect)  # ends the stream of the circle, in the middle of another
    assert len(drain(running)) == NEW - 1


def test_what_was_stopped_leaves_the_turn_to_what_took_over():
    speculator = Speculator(tiny(), "none")
    old, new = (speculator.stream(IDS, max_new_tokens=NEW) for _ in range(2))
    next(old)
    next(new)
    with pytest.raises(ForedraftError, match="this one was stopped"):
        next(old)
    with pytest.raises(BusyError):
        elsewhere(text, speculator)
    assert len(drain(new)) == NEW - 1
    sessions = [speculator.session() for _ in range(2)]
    for session in sessions:
        session.add(IDS[0].tolist(), RowParameters(max_new_tokens=NEW))
        session.step()
    sessions[0].remove(0)
    with pytest.raises(BusyError):
        elsewhere(text, speculator)
    assert not sessions[0].live and sessions[1].step()[0].tokens


def test_any_thread_may_read_a_stream_one_at_a_time():
    speculator = Speculator(tiny(), "none")
    expected = text(speculator)[0][-NEW:]
    stream, found = speculator.stream(IDS, max_new_tokens=NEW), []
    with ThreadPoolExecutor(3) as pool:
        while len(found) < NEW:
            found += pool.submit(next, stream).result(10)
    assert found == expected
    pause = Pause()
    stream = speculator.stream(IDS, max_new_tokens=NEW, stopping_criteria=StoppingCriteriaList([pause]))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(next, stream)
        assert pause.reached.wait(10)
        for action in (stream.__next__, stream.close):
            with pytest.raises(BusyError):
                action()
        pause.go.set()
        assert first.result(10) + drain(stream) == expected


def test_a_call_from_inside_a_call_is_refused():
    speculator, other = Speculator(tiny(), "none"), Speculator(tiny(), "none")
    seen = []

    class Nested(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            seen.append(text(other))  # of the same model
            with pytest.raises(BusyError, match="from inside"):
                text(speculator)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    expected = text(other)
    assert text(speculator, stopping_criteria=StoppingCriteriaList([Nested()])) == expected
    assert seen == [expected] * NEW


def test_a_call_that_fails_gives_its_turn_up():
    speculator = Speculator(tiny(), "none")

    class Broken(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        text(speculator, stopping_criteria=StoppingCriteriaList([Broken()]))
    assert elsewhere(text, speculator) == text(speculator)


def test_rows_are_added_by_any_thread():
    speculator = Speculator(tiny(), draft_length=2)
    expected = text(speculator)[0][-NEW:]
    session, texts = speculator.session(), {}
    with ThreadPoolExecutor(3) as pool:
        added = [pool.submit(session.add, IDS[0].tolist(), RowParameters(max_new_tokens=NEW)) for _ in range(30)]
        while session.live or not all(each.done() for each in added):
            for commit in session.step():
                texts.setdefault(commit.slot, []).extend(commit.tokens)
    assert texts == dict.fromkeys(range(30), expected)


def test_a_row_that_is_over_before_it_is_added_leaves_no_counts():
    session = Speculator(tiny(), "none").session()

    class Waiting(list):
        def append(self, row):
            super().append(row)
            assert elsewhere(session.step)[0].finish_reason == "length"

    session.waiting = Waiting()
    session.add(IDS[0].tolist(), RowParameters(max_new_tokens=1))
    assert not session.live and session.stats.rows == []


def test_sessions_take_turns():
    speculator = Speculator(tiny(), "none")
    sessions = [speculator.session() for _ in range(2)]
    pause = Pause()
    sessions[0].add(IDS[0].tolist(), RowParameters(max_new_tokens=NEW, criteria=[pause]))
    sessions[1].add(IDS[0].tolist(), RowParameters(max_new_tokens=NEW))
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(sessions[0].step)
        assert pause.reached.wait(10)
        for action in (sessions[0].step, sessions[0].close, sessions[1].step, partial(sessions[0].remove, 0)):
            with pytest.raises(BusyError):
                action()
        pause.go.set()
        assert step.result(10)[0].tokens
        with pytest.raises(BusyError):
            sessions[1].step()
        pool.submit(sessions[0].remove, 0).result(10)
        assert sessions[1].step()[0].tokens, "no row of the other session is left"
    del sessions
    assert elsewhere(text, speculator), "an abandoned session is in nobody's way"


@pytest.mark.parametrize("action", ["remove", "close"])
def test_no_step_begins_while_another_thread_removes_rows_that_wait(action, monkeypatch):
    session = Speculator(tiny(), "none").session()
    slot = session.add(IDS[0].tolist(), RowParameters(max_new_tokens=NEW))
    over, reached, go = session._over, threading.Event(), threading.Event()
    monkeypatch.setattr(session, "_over", lambda rows: (reached.set(), go.wait(10), over(rows)))
    with ThreadPoolExecutor(1) as pool:
        removed = pool.submit(*((session.remove, slot) if action == "remove" else (session.close,)))
        assert reached.wait(10)
        try:
            with pytest.raises(BusyError):
                session.step()
        finally:
            go.set()
        removed.result(10)
    assert not session.live and session.step() == []


@needs_kernels
def test_targets_over_one_model_have_scratch_of_their_own(always):
    """Passes of two targets beside each other, without turns: only what they compute with is shared, the weights."""
    model = build("llama", torch.float32)
    targets = [Target(model, execution=execution) for execution in ("native", "eager")]
    tree = TokenTree.from_parents(torch.arange(5, 13)[None], (-1, 0, 0, 1, 1, 2, 3, 3))

    @torch.inference_mode()
    def passes(target, length):
        texts, found = [[(3 * i + length) % 90 for i in range(length)]], []
        for _ in range(40):
            target.open(texts)
            found += [target.prefill(texts, first=0), target.score(tree)]
            target.commit(None, [1])
            target.reset()
        return found

    alone = [passes(target, length) for target, length in zip(targets, (30, 47))]
    assert targets[0].cache.scratch is not targets[1].cache.scratch
    with ThreadPoolExecutor(2) as pool:
        together = [each.result(20) for each in [pool.submit(passes, target, length) for target, length in zip(targets, (30, 47))]]
    assert all(torch.equal(a, b) for one, other in zip(alone, together) for a, b in zip(one, other))
