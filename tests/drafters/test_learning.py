"""A draft that learns while it serves: the text stays plain decoding's whatever it learns, and nothing that the learner does can harm."""

from __future__ import annotations

import copy
import errno
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vocabularies
from cover import covered
from drafting import Row
from helpers import PAD, generate, perturbed, plainly, prompts, tiny
from kernel_cases import always, needs_kernels
from kernel_cases import build as build_with_kernels
from learning_cases import exact_law, law_of, never_started, noisy, restless, small
from safetensors import SafetensorError
from tape import Tape

from foredraft import ConfigurationError, Speculator, testing
from foredraft.backends import native, recorder
from foredraft.backends.packing import onednn_lays_out
from foredraft.cli.figures import figures_line
from foredraft.drafters.base import Feedback
from foredraft.drafters.draft_model import DraftModel
from foredraft.drafters.learning import collecting, serving
from foredraft.drafters.learning.buffer import EVERY, NEW, OLD, TEXT, TRIAL, Buffer, Layout
from foredraft.drafters.learning.collecting import Collector, likeliest
from foredraft.drafters.learning.duty import SLICE, Duty
from foredraft.drafters.learning.serving import Learning, LearnOptions
from foredraft.drafters.learning.versions import Versions
from foredraft.drafters.several import Several
from foredraft.target import Target
from foredraft.testing import distance
from foredraft.tree import TokenTree

__all__ = ["always"]
NEW_TOKENS = 16
ROWS = prompts((12, 5, 9))
SAMPLED = {"do_sample": True, "seed": 7, "temperature": 1.0, "top_k": 0}


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch):
    """No test starts a learner, unless it says so."""
    monkeypatch.setitem(Learning.__init__.__kwdefaults__, "start", never_started)


# -- the text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "options"), covered(["chain(4)", "product(2,2,1)", "dynamic(3,2,5)"], [SAMPLED, {"do_sample": False}], ways=1)
)
def test_the_text_is_that_of_plain_decoding_with_a_swap_after_every_round(shape: str, options: dict, tmp_path: Path):
    expected = plainly(tiny(), ROWS, max_new_tokens=NEW_TOKENS, **options)
    execution = "auto" if shape == "chain(4)" and options is SAMPLED else "eager"
    drafter = DraftModel(perturbed(), execution=execution, learn=tmp_path / "learnt")
    speculator = Speculator(tiny(), drafter, shape=shape, rule="match")
    learning = restless(drafter)
    for _ in range(2):  # the second call finds what the first left behind
        before, rounds = learning.swaps, speculator.target.passes
        assert generate(speculator, ROWS, max_new_tokens=NEW_TOKENS, **options) == expected
        assert learning.swaps - before >= speculator.target.passes - rounds - 1 > 2
    assert learning.unusable == 0


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("execution", ["packed", "native"])
def test_packed_weights_are_swapped_whole(execution: str, dtype: torch.dtype, tmp_path: Path, always: None):
    """What drafts after a swap is the model with the new weights, in whatever layout."""
    if execution == "packed" and not onednn_lays_out(dtype):
        pytest.skip(f"oneDNN has no layouts for {dtype} on this CPU")
    source = build_with_kernels("llama", dtype)
    drafter = DraftModel(source, execution=execution, learn=tmp_path)
    speculator = Speculator(build_with_kernels("llama", dtype), drafter, shape="chain(3)")
    before = {name: value.clone() for name, value in source.named_parameters()}
    weights = noisy(drafter.learning.versions.load(0), 1)
    for row in ROWS[:1], ROWS:
        generate(speculator, [[token % 100 for token in each] for each in row], max_new_tokens=9)
    drafter.learning.versions.save(1, weights)
    drafter._take_up(1)
    assert drafter.model.execution == execution and drafter.learning.version == 1
    other = build_with_kernels("llama", dtype)
    other.load_state_dict(weights, strict=False)
    ids = [token % 100 for token in ROWS[0]]
    drafter.model.open([ids])
    with torch.inference_mode():
        found = drafter.model.prefill([ids], first=0)[0].float()
    expected = other(torch.tensor([ids])).logits[0, -1].detach().float()
    assert float((found - expected).abs().max()) < (1e-3 if dtype is torch.float32 else 0.1) * float(expected.abs().max())
    assert all(torch.equal(value, before[name]) for name, value in source.named_parameters()), "the user's model is as it was"
    speculator.close()


def test_recorded_drafts_are_those_of_the_new_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As on CUDA: recordings read the weights where they lie, so they go on after a swap."""
    monkeypatch.setattr(recorder, "recorder_for", lambda device: Tape())
    drafter = DraftModel(perturbed(), execution="graphs", learn=tmp_path)
    speculator = Speculator(tiny(), drafter, shape="chain(3)", rule="match", execution="eager")
    expected = plainly(tiny(), ROWS[:1], max_new_tokens=40)
    drafter.learning.versions.save(1, {name: value.detach() for name, value in tiny().named_parameters()})
    assert generate(speculator, ROWS[:1], max_new_tokens=40) == expected
    drafts = drafter._loops[1].drafts
    assert drafts > 0 and speculator.drafter.learning.facts()["version"] == 0
    drafter.learning.buffer["published"] = 1  # the target's own weights
    assert generate(speculator, ROWS[:1], max_new_tokens=4) == [expected[0][:4]]
    output = speculator.generate(torch.tensor(ROWS[:1]), max_new_tokens=40, pad_token_id=PAD)
    assert output.sequences[0, len(ROWS[0]) :].tolist() == expected[0]
    assert output.stats.acceptance_rate == 1.0 and drafter._loops[1].drafts > drafts


def shared(target, texts):
    """How much of each text the cache of ``target`` holds already."""
    with torch.inference_mode():
        return target._texts.find(target.cache, texts, [None] * len(texts), share=True, unread=1)[1]


def test_rows_go_on_with_their_keys_and_later_rows_do_not_copy_them(tmp_path: Path):
    drafter = DraftModel(perturbed(), learn=tmp_path)
    speculator = Speculator(tiny(), drafter, shape="chain(3)")
    long = prompts((60,))
    generate(speculator, long, max_new_tokens=4)
    assert shared(drafter.model, long) == [59]
    drafter.learning.versions.save(1, noisy(drafter.learning.versions.load(0), 1))
    drafter._take_up(1)
    assert shared(drafter.model, long) == [0]
    assert shared(speculator.target, long) == [59]


@pytest.mark.parametrize("again", [0.0, 1e9])
def test_texts_are_read_again_where_that_pays(again: float, tmp_path: Path):
    """Afterwards the cache holds what the new weights alone would have put there; the text is the same in either case."""
    drafter = DraftModel(perturbed(), execution="eager", learn=tmp_path)
    speculator = Speculator(tiny(), drafter, shape="chain(3)", rule="match")
    learning, read = restless(drafter), []
    learning.buffer["again"] = again
    learning.read_again = lambda tokens, seconds: read.append(tokens)  # type: ignore[method-assign]
    assert generate(speculator, ROWS, max_new_tokens=9) == plainly(tiny(), ROWS, max_new_tokens=9)
    assert bool(read) == bool(again)
    row = Row(list(range(100)), prompt_length=20, capacity=140)
    learning._round, learning._reading = 0.1, 0.001
    learning.buffer["again"] = 0.1  # 40 tokens ahead save 0.4 s, and 100 tokens take 0.1 s
    assert learning.reads_again([row]) and not learning.reads_again([Row(row.ids, prompt_length=98, capacity=140)])


# -- the law --------------------------------------------------------------------------------------------------------------


class BetweenDraftAndVerification(DraftModel):
    """The fault that must not be: weights change behind the draft, and its first token is verified with the q of the new ones."""

    def draft(self, request: Any) -> TokenTree:
        self._take_up(1)
        tree = super().draft(request)
        self._take_up(2)
        self.model.rewind([len(row.ids) - 1 for row in request.rows])
        other = super().draft(request)
        return tree if tree.q is None or other.q is None else replace(tree, q=torch.cat([other.q[:, :1], tree.q[:, 1:]], 1))


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch):
    """Rounding of float32 is no outcome."""
    monkeypatch.setattr(testing, "RESOLUTION", 1e-5)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_law_holds_with_a_swap_after_every_round(rule: str, tmp_path: Path, coarse: None):
    drafter = DraftModel(small(1), execution="eager", learn=tmp_path)
    assert distance(law_of(drafter, rule, swapping=True), exact_law()) < 1e-3


def test_a_swap_between_draft_and_verification_would_be_found(tmp_path: Path, coarse: None):
    drafter = BetweenDraftAndVerification(small(1), execution="eager", learn=tmp_path)
    assert distance(law_of(drafter, "rejection", swapping=False), exact_law()) > 5e-3


# -- what is collected ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocabulary", "share"), [(1000, 1.0), (collecting.LIGHT, 1.0), (2 * collecting.LIGHT, 0.5), (10**6, collecting.OTHERS)]
)
def test_of_a_large_vocabulary_fewer_places_are_kept(vocabulary: int, share: float):
    collector, row = Collector(lambda piece: None), Row([0] * 3000)
    feedback = Feedback(None, [2000], None, torch.empty(1, 1, vocabulary))  # type: ignore[arg-type]
    feedback = replace(feedback, tree=SimpleNamespace(height=2000))
    collector._lengths[0] = 500
    kept = collector._chosen(row, feedback, 2000)
    assert len(kept) == pytest.approx(2001 * share, rel=0.1) and {weight for _, _, weight in kept} == {1 / share}


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("vocabulary", [9, 1000, 20_000, 20_001])
def test_the_likeliest_tokens_and_their_probabilities(vocabulary: int, kernels: bool, monkeypatch: pytest.MonkeyPatch):
    if not kernels:
        monkeypatch.setattr(native, "largest", lambda logits, k: None)
    logits = torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(0)).bfloat16()
    logs, ids = likeliest(logits)
    expected = logits.float().log_softmax(-1)
    assert torch.allclose(logs, expected.topk(logs.shape[1], -1).values, atol=1e-4)
    assert torch.allclose(expected.gather(1, ids), logs, atol=1e-4)


def test_pieces_say_what_the_target_said_at_their_places(tmp_path: Path):
    """Of a served text, against the target's own pass over it; every place that was verified is among them."""
    drafter = DraftModel(perturbed(), learn=tmp_path)
    for shape in ("chain(4)", "product(2,2,1)"):
        speculator = Speculator(tiny(), drafter, shape=shape)
        pieces: list[Any] = []
        drafter.learning.collector.keep = pieces.append
        drafter.learning.duty.elapsed = 1e9  # there is time for every round
        texts = [row + new for row, new in zip(ROWS, generate(speculator, ROWS, max_new_tokens=NEW_TOKENS, **SAMPLED))]
        assert len(pieces) == len(ROWS)
        for piece in pieces:
            tokens = piece["tokens"][: piece["length"]].tolist()
            text = next(text for text in texts if tokens == text[: len(tokens)])
            expected = tiny()(torch.tensor([text])).logits[0].log_softmax(-1)
            for place, logs, ids in zip(piece["places"][: piece["count"]], piece["logs"], piece["ids"]):
                assert torch.allclose(expected[int(place), torch.from_numpy(ids).long()], torch.from_numpy(logs), atol=1e-3)
            places = piece["places"][: piece["count"]]
            assert (places == range(places[0], piece["length"] - 1)).all() and (piece["weights"][: piece["count"]] == 1).all()
        speculator.close()


def numbered(number: int) -> Any:
    piece = torch.zeros(1, dtype=torch.uint8).numpy().repeat(TEXT.piece.itemsize).view(TEXT.piece)[0]
    piece["length"], piece["count"], piece["tokens"][0] = 1, 1, number
    return piece


def test_the_buffer_keeps_the_newest_and_some_of_all_others(tmp_path: Path):
    buffer = Buffer(tmp_path / "texts", create=True)
    total = 3 * (TRIAL + NEW + OLD)
    for number in range(total):
        buffer.add(numbered(number))
    held = buffer.pieces["tokens"][:, 0]
    trial, new, old = held[:TRIAL], held[TRIAL : TRIAL + NEW], held[TRIAL + NEW :]
    assert len(set(held.tolist())) == len(held), "nothing is there twice"
    assert min(trial) > total - EVERY * (TRIAL + 1) and min(new) > total - 2 * NEW
    assert min(old) < total / 20 and 0.35 < old.mean() / total < 0.6
    assert len(buffer.trial()) == TRIAL
    again = Buffer(tmp_path / "texts", create=True)
    assert again["written"] == total and len(again.trial()) == TRIAL


def test_a_piece_that_is_half_written_is_passed_over(tmp_path: Path):
    buffer = Buffer(tmp_path / "texts", create=True)
    for number in range(EVERY * TRIAL):
        buffer.add(numbered(number))
    buffer.pieces["tokens"][3, 1] = 77
    assert len(buffer.trial()) == TRIAL - 1


@pytest.mark.nightly
@pytest.mark.parametrize("width", [0, 32])
def test_a_million_tokens_take_no_more_memory_than_the_first(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(collecting, "OTHERS", 0.03)  # to save time
    monkeypatch.setattr(collecting, "LIGHT", 0)
    layout = Layout(width)
    buffer = Buffer(tmp_path / "texts", layout, create=True)
    collector, generator = Collector(buffer.add, layout), torch.Generator().manual_seed(0)
    rows, size = [Row([0, 1], slot) for slot in range(64)], (tmp_path / "texts").stat().st_size
    collector.begin(rows)
    tokens, kept = 0, []
    logits, hidden = torch.randn(64, 32, 20, generator=generator), torch.randn(64, 32, width, generator=generator)
    tree = TokenTree.from_chain(torch.zeros(64, 32, dtype=torch.long))
    while tokens < 1_000_000:
        accepted = torch.randint(0, 32, (64,), generator=generator).tolist()
        for row, count in zip(rows, accepted):
            row.ids = row.ids[-4000:] if len(row.ids) < 4000 else row.ids
            row.ids += [7] * (count + 1)
        tokens += sum(accepted) + 64
        collector.observe(rows, SimpleNamespace(tree=tree, accepted=accepted, path=None, logits=logits, hidden=hidden, failed=()))
        kept.append(sum(len(each.found) for each in collector._stretches.values()))
        assert all(each.read < layout.length for each in collector._stretches.values())
        if len(rows[0].ids) > 3000:
            collector.end(rows)
            rows = [Row([0, 1], slot) for slot in range(64)]
            collector.begin(rows)
    assert max(kept) <= 64 * layout.places and buffer["written"] > TRIAL + NEW + 64
    assert (tmp_path / "texts").stat().st_size == size < 40 << 20


# -- what it costs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [0.1, 0.5, 0.9])
def test_learning_costs_its_share_of_the_time_and_no_more(loss: float):
    """A machine on which a round takes longer while the learner computes: the account finds out by how much."""
    duty, until, plainly = Duty(0.05), 0.0, 0.0
    now = 0.0
    for _ in range(20_000):
        busy = now < until
        seconds = 0.02 / (1 - loss) if busy else 0.02
        now, plainly = now + seconds, plainly + 0.02
        duty.round(seconds, (1, 5), busy=busy)
        if duty.allows():
            until = now + SLICE
    assert 0.02 < 1 - plainly / now < 0.06 and duty.lost > 0
    assert abs(duty.rate - loss) < 0.1


def test_rounds_that_happen_to_be_short_are_no_gain_of_learning():
    duty, plain = Duty(0.05), 0.1
    duty.round(plain, (1, 5), busy=False)
    for seconds in (0.08, 0.07, 0.09):  # noise: the learner makes no round faster
        duty.round(seconds, (1, 5), busy=True)
    assert duty.lost == 0.0
    duty.spend(0.25)
    assert duty.lost == 0.25
    duty.round(0.3, (1, 5), busy=True)
    assert duty.lost == pytest.approx(0.25 + 0.2 - 0.06)


def test_between_calls_only():
    duty = Duty(0.0)
    for _ in range(1000):
        duty.round(0.1, (1, 5), busy=False)
    assert not duty.allows()


# -- a learner that fails -------------------------------------------------------------------------------------------------


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Learners:
    """Starts learners that do nothing, and remembers them."""

    started: list[Any] = field(default_factory=list)
    sleeps: float = 1000.0

    def __call__(self, folder: Path, options: LearnOptions) -> Any:
        self.started.append(subprocess.Popen([sys.executable, "-S", "-c", f"import time; time.sleep({self.sleeps})"]))
        return self.started[-1]

    def stop(self) -> None:
        for each in self.started:
            each.kill()
            each.wait()


@pytest.fixture
def learners() -> Iterator[Learners]:
    made = Learners()
    yield made
    made.stop()


def learning_at(folder: Path, clock: Clock, start: Any, **options: Any) -> Learning:
    draft = perturbed()
    about = {"class": "transformers:LlamaForCausalLM", "name": "", "config": {}}
    weights = {name: value.detach() for name, value in draft.named_parameters()}
    return Learning(tiny(), about, weights, LearnOptions(folder=str(folder), **options), clock=clock, start=start)


def serve(learning: Learning, clock: Clock, seconds: float, *, alive: bool = False) -> None:
    """Rounds of one row for so long; a learner that is ``alive`` shows it."""
    row = Row(list(range(40)))
    feedback = Feedback(TokenTree.from_chain(torch.zeros(1, 5, dtype=torch.long)), [2], None)
    learning.begin([row])
    end = clock.now + seconds
    while clock.now < end:
        clock.now += 0.1
        if alive and learning.buffer is not None:
            learning.buffer["heartbeat"] = clock.now
        learning.observe([row], feedback)
    learning.end([row])


def fill(learning: Learning, count: int = 20) -> None:
    for number in range(count):
        learning.buffer.add(numbered(number))


def test_a_learner_that_is_killed_is_started_again_and_given_up_at_last(
    tmp_path: Path, learners: Learners, caplog: pytest.LogCaptureFixture
):
    clock = Clock()
    learning = learning_at(tmp_path, clock, learners)
    assert learners.started, "it makes itself ready before the first row"
    fill(learning)
    serve(learning, clock, 5, alive=True)
    for count in range(1, len(serving.PAUSES) + 1):
        assert len(learners.started) == count
        learners.started[-1].kill()  # -9
        learners.started[-1].wait()
        serve(learning, clock, 700, alive=True)
    assert len(learners.started) == len(serving.PAUSES) and "learns no more" in caplog.text
    learning.close()


def test_the_log_has_a_line_for_each_trial(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "foredraft")
    clock = Clock()
    learning = learning_at(tmp_path, clock, never_started)
    for trials, refused, published in ((1, 1, 0), (2, 1, 1), (2, 1, 1)):
        learning.buffer["before"], learning.buffer["after"] = 0.5, 0.5 + 0.1 * published
        learning.buffer["refused"], learning.buffer["published"], learning.buffer["trials"] = refused, published, trials
        serve(learning, clock, 3)
    said = [record.getMessage() for record in caplog.records if "trial" in record.getMessage()]
    assert said == [
        "trial 1: α 0.5000 with the weights in use, 0.5000 with the new ones, which are refused",
        "trial 2: α 0.5000 with the weights in use, 0.6000 with the new ones, which are published as version 1",
    ]
    learning.close()


def test_tokens_that_nobody_drafted_say_nothing_of_acceptance(tmp_path: Path):
    learning, row = learning_at(tmp_path, Clock(), never_started), Row(list(range(40)))
    learning._every, chain = 8, TokenTree.from_chain(torch.zeros(1, 5, dtype=torch.long))
    learning.begin([row])
    learning.observe([row], Feedback(chain, [4], None, drafted=False))
    learning.observe([row], Feedback(chain, [2], None))
    assert learning.curve == [(8, 2 / 3)]
    learning.end([row])
    learning.close()


def test_a_learner_that_cannot_be_started_harms_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    def refuse(folder: Path, options: LearnOptions) -> Any:
        raise OSError(12, "Cannot allocate memory")

    clock = Clock()
    learning = learning_at(tmp_path, clock, refuse)
    fill(learning)
    serve(learning, clock, 200)
    assert learning._ends == len(serving.PAUSES) and not learning.buffer["busy"] and "learns no more" in caplog.text
    learning.close()


def test_a_learner_that_hangs_is_ended(tmp_path: Path, learners: Learners):
    clock = Clock()
    learning = learning_at(tmp_path, clock, learners)
    fill(learning)
    serve(learning, clock, 900, alive=True)
    assert len(learners.started) == 1 and learners.started[0].poll() is None
    serve(learning, clock, serving.HUNG + 60)
    assert learners.started[0].wait() == -9 and len(learners.started) == 2
    learning.close()
    assert learners.started[1].poll() == -9, "it ends with the server"


def test_a_learner_ends_with_who_started_it_and_not_with_whom_that_has_forked(
    tmp_path: Path, learners: Learners, monkeypatch: pytest.MonkeyPatch
):
    clock = Clock()
    learning = learning_at(tmp_path, clock, learners)
    fill(learning)
    serve(learning, clock, 5, alive=True)
    (process,) = learners.started
    with monkeypatch.context() as child:
        child.setattr(serving.os, "getpid", lambda: -1)
        other = copy.copy(learning)
        other.versions = copy.copy(learning.versions)
        other.close()
        assert not other.leads and process.poll() is None and not Versions(tmp_path).lead()
    del learning, other
    gc.collect()
    assert process.poll() == -9


def test_a_file_system_without_locks_has_one_learner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def without(*given: object) -> None:
        raise OSError(errno.ENOSYS, "none")

    with monkeypatch.context() as patch:
        patch.setattr("fcntl.flock", without)
        assert Versions(tmp_path).lead()
    first = Versions(tmp_path)
    assert first.lead() and not Versions(tmp_path).lead()
    copied = os.dup(first._lock.fileno())  # as in a process that was forked
    first.close()
    assert Versions(tmp_path).lead()
    os.close(copied)


def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*given: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        Versions(tmp_path).save(1, {"a": torch.ones(3)})
    with pytest.raises(ConfigurationError, match="cannot be written"):
        DraftModel(perturbed(), execution="eager", learn=tmp_path / "new").bind(Target(tiny()))


def test_weights_that_are_nan_or_no_weights_are_never_used(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    drafter = DraftModel(perturbed(), execution="eager", learn=tmp_path)
    speculator = Speculator(tiny(), drafter, shape="chain(4)", rule="match")
    expected = plainly(tiny(), ROWS, max_new_tokens=NEW_TOKENS)
    learning = drafter.learning
    first = learning.versions.load(0)
    name = next(iter(first))
    wrong = [
        {**first, name: first[name].clone().fill_(torch.nan)},
        {**first, name: first[name][:-1].clone()},
        {**first, name: first[name].bfloat16()},
        {key: value for key, value in first.items() if key != name},
    ]
    for number, weights in enumerate(wrong, 1):
        learning.versions.save(number, weights)
        learning.buffer["published"] = number
        assert generate(speculator, ROWS, max_new_tokens=NEW_TOKENS) == expected
        assert (learning.version, learning.unusable, learning.buffer["unusable"]) == (0, number, number)
        assert not learning.versions.path(number).exists() and f"version {number} has" in caplog.text
    learning.versions.path(5).write_bytes(b"not whole")
    learning.buffer["published"] = 5
    assert generate(speculator, ROWS, max_new_tokens=NEW_TOKENS) == expected and learning.unusable == 5
    learning.versions.save(6, noisy(first, 1))
    learning.buffer["published"] = 6
    assert generate(speculator, ROWS, max_new_tokens=NEW_TOKENS) == expected and learning.version == 6
    assert learning.buffer["accepted"] == 6
    speculator.close()


# -- from one start to the next -------------------------------------------------------------------------------------------


def test_the_next_start_has_the_newest_version_and_forgetting_brings_the_first_back(tmp_path: Path):
    drafter = DraftModel(perturbed(), execution="eager", learn=tmp_path)
    speculator = Speculator(tiny(), drafter, shape="chain(4)")
    first = drafter.learning.versions.load(0)
    for number in (1, 2, 3, 4, 5):
        drafter.learning.versions.save(number, noisy(first, number))
    assert drafter.learning.versions.numbers() == [0, 3, 4, 5], "the last three are kept"
    drafter.learning.versions.path(5).write_bytes(b"cut off by a crash")
    speculator.close()

    drafter = DraftModel(perturbed(), execution="eager", learn=tmp_path)
    speculator = Speculator(tiny(), drafter, shape="chain(4)")
    assert drafter.learning.version == 4, "what cannot be read is passed over"
    kept = dict(drafter.model.model.named_parameters())
    assert all(torch.equal(value, kept[name]) for name, value in noisy(first, 4).items())
    fill(drafter.learning)
    drafter.forget()
    assert all(torch.equal(value, kept[name]) for name, value in first.items())
    assert drafter.learning.versions.numbers() == [0] and drafter.learning.buffer["written"] == 0 and not drafter.learning.buffer.trial()
    assert not drafter.learning.buffer.pieces["tokens"].any(), "the texts are gone from the file"
    generate(speculator, ROWS, max_new_tokens=4)
    assert drafter.learning.version == 0
    speculator.close()


def test_a_crash_while_a_version_is_written_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    versions = Versions(tmp_path)
    weights = {"a": torch.ones(3)}
    versions.save(1, weights)
    with monkeypatch.context() as patched:
        patched.setattr("foredraft.files.os.replace", lambda *paths: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            versions.save(2, {"a": torch.zeros(3)})
    assert versions.numbers() == [0, 1] and torch.equal(versions.load(1)["a"], weights["a"])


def test_what_a_killed_learner_left_is_deleted(tmp_path: Path):
    versions, left = Versions(tmp_path), tmp_path / ".version-0000002.safetensors.x7.tmp"
    for tidy in (lambda: versions.save(1, {"a": torch.ones(3)}), versions.clear):
        left.write_bytes(b"half a version")
        tidy()
        assert not left.exists()


@pytest.mark.parametrize("after", range(3))
def test_a_crash_while_a_folder_is_made_leaves_one_that_is_made_whole(after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    about, first, frozen = {"target": {}, "draft": {"digest": "x"}}, {"a": torch.ones(3)}, {"b": torch.zeros(2)}
    real, done = os.replace, list[str]()

    def killed(source: str, goal: Path) -> None:
        if len(done) == after:
            raise KeyboardInterrupt
        done.append(goal.name)
        real(source, goal)

    with monkeypatch.context() as patched:
        patched.setattr("foredraft.files.os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            Versions(tmp_path).begin(about, first, lambda: frozen)
    versions = Versions(tmp_path)
    versions.begin(about, first, lambda: frozen)
    assert torch.equal(versions.load(0)["a"], first["a"]) and torch.equal(versions.frozen()["b"], frozen["b"])
    with pytest.raises(ConfigurationError, match="another draft"):
        Versions(tmp_path).begin({**about, "draft": {"digest": "y"}}, first)


def test_two_processes_may_begin_a_folder_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The other one makes it whole after the first look of this one, which found nothing."""
    about, first = {"target": {}, "draft": {"digest": "x"}}, {"a": torch.ones(3)}
    versions, other = Versions(tmp_path), Versions(tmp_path)

    def then_the_other(look: Any) -> Any:
        def looked(path: Path) -> Any:
            found = look(path)
            found = found if isinstance(found, bool) else list(found)
            patched.undo()
            other.begin(about, first)
            return found

        return looked

    with monkeypatch.context() as patched:
        for name in ("exists", "iterdir"):
            patched.setattr(Path, name, then_the_other(getattr(Path, name)))
        versions.begin(about, first)
    assert versions.about() == about and torch.equal(versions.load(0)["a"], first["a"])


def test_two_processes_share_a_folder(tmp_path: Path):
    """One learns, the other uses what it publishes, and takes over when the first is gone."""
    clock = Clock()
    one, other = (learning_at(tmp_path, clock, never_started) for _ in range(2))
    assert (one.leads, other.leads) == (True, False)
    serve(other, clock, 3)
    assert other.buffer is None
    one.versions.save(1, noisy(one.versions.load(0), 1))
    clock.now += 2
    assert other._newer(clock.now) == 1
    with pytest.raises(ConfigurationError, match="another process learns"):
        other.forget()
    one.close()
    serve(other, clock, 3)
    assert other.leads and other.buffer["published"] == 1
    other.close()


def test_a_process_that_cannot_take_over_tries_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*given: Any, **named: Any) -> Any:
        raise OSError(28, "No space left on device")

    clock = Clock()
    one, other = (learning_at(tmp_path, clock, never_started) for _ in range(2))
    one.close()
    with monkeypatch.context() as patched:
        patched.setattr(serving, "Buffer", full)
        serve(other, clock, 3)
    assert not other.leads and other.buffer is None
    serve(other, clock, 3)
    assert other.leads and other.buffer is not None
    other.close()


# -- bad input ------------------------------------------------------------------------------------------------------------


def test_a_folder_is_needed_that_can_be_written_to(tmp_path: Path):
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("")
    for given, message in (
        (True, "needs a folder"),
        (tmp_path / "file" / "below", "cannot be written"),
        (tmp_path / "full", "something else"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            Speculator(tiny(), DraftModel(perturbed(), learn=given))


def test_what_was_learnt_for_another_pair_is_refused(tmp_path: Path):
    Speculator(tiny(), DraftModel(perturbed(), learn=tmp_path)).close()
    Speculator(tiny(), DraftModel(perturbed(), learn=tmp_path)).close()
    with pytest.raises(ConfigurationError, match="another draft"):
        Speculator(tiny(), DraftModel(perturbed(seed=6), learn=tmp_path))
    with pytest.raises(ConfigurationError, match="another target"):
        Speculator(perturbed(seed=7), DraftModel(perturbed(), learn=tmp_path))
    (tmp_path / "about.json").write_text("{")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        Speculator(tiny(), DraftModel(perturbed(), learn=tmp_path))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"shre": 0.1}, "no option 'shre', did you mean 'share'. Choose folder, share, between, cores, device, loss, rate, keep"),
        ("{share: 0.1}", "write options as JSON"),
        ({"share": 2}, "between 0 and 1"),
        ({"keep": 0}, "keep"),
        ({"loss": "fkll"}, "unknown loss .fkll."),
        ({"cores": [4096]}, "core 4096"),
        (7, "takes True"),
    ],
)
def test_options_that_make_no_sense(given: Any, message: str):
    with pytest.raises(ConfigurationError, match=message):
        DraftModel(perturbed(), learn=given)


def test_what_cannot_learn_says_so(tmp_path: Path):
    with pytest.raises(ConfigurationError, match="quantized"):
        DraftModel("zoo:python-1m", quantization="int8", learn=True)
    target, foreign = (vocabularies.model(kind) for kind in ("byte-level", "unigram"))
    drafter = DraftModel(foreign, tokenizer=vocabularies.tokenizer("unigram"), learn=tmp_path / "learnt")
    with pytest.raises(ConfigurationError, match="another tokenizer than the target's cannot learn from it: leave learn out"):
        Speculator(target, drafter, tokenizer=vocabularies.tokenizer("byte-level"))
    assert not (tmp_path / "learnt").exists()


def test_statistics_say_what_was_learnt(tmp_path: Path):
    drafter = DraftModel(perturbed(), execution="eager", learn=tmp_path)
    speculator = Speculator(tiny(), drafter, shape="chain(4)")
    learning = restless(drafter)
    learning._every = 10
    output = speculator.generate(torch.tensor(ROWS[:1]), max_new_tokens=60, pad_token_id=PAD)
    facts = output.stats.learning
    assert learning.swaps - 1 == facts["swaps"] > 5 and facts["unusable"] == 0 and facts["seconds"]["serving"] > 0
    assert len(facts["alpha"]) >= 4 and all(0 <= alpha <= 1 for _, alpha in facts["alpha"])
    assert [tokens for tokens, _ in facts["alpha"]] == sorted(tokens for tokens, _ in facts["alpha"])
    assert output.stats.to_dict()["learning"]["swaps"] == facts["swaps"]
    *_, line = figures_line(output.stats, drafter="draft-model", sampled=False).splitlines()
    assert f"draft-model learns · version {facts['version']} · {facts['swaps']} swaps · 0 steps · 0 trials, 0 refused · α 0." in line
    assert Speculator(tiny(), perturbed()).generate(torch.tensor(ROWS[:1]), max_new_tokens=4, pad_token_id=PAD).stats.learning is None


def test_statistics_of_several_drafters_say_what_each_learnt(tmp_path: Path):
    learning = [DraftModel(perturbed(), learn=tmp_path / name) for name in ("one", "other")]
    for members, names in ((learning[:1], ["draft-model"]), (learning, ["draft-model", "draft-model 2"]), ([], None)):
        speculator = Speculator(tiny(), Several(["prompt-lookup", *members]))
        learnt = speculator.generate(torch.tensor(ROWS[:1]), max_new_tokens=4, pad_token_id=PAD).stats.learning
        assert (learnt and list(learnt)) == names
        assert all(each["version"] == 0 for each in (learnt or {}).values())
        speculator.close()
