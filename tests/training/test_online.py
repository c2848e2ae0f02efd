"""The learner: it makes a draft better at what is served now, publishes nothing that is worse, and harms nobody when it fails."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import Row
from helpers import generate, prompts
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft import Speculator
from foredraft.drafters.base import Feedback
from foredraft.drafters.draft_model import DraftModel
from foredraft.drafters.learning import serving
from foredraft.drafters.learning.serving import Learning, LearnOptions
from foredraft.training import online
from foredraft.training.online import OnlineLearner, _copy
from foredraft.tree import TokenTree

VOCABULARY = 24


def model(seed: int = 0, layers: int = 1) -> LlamaForCausalLM:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
    }
    config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=layers, eos_token_id=None, bos_token_id=None, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Table:
    """A target whose next token depends on the last one alone."""

    seed: int
    p: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.p = torch.softmax(2.5 * torch.randn(VOCABULARY, VOCABULARY, generator=generator), -1)

    def alpha(self, draft: Any) -> float:
        """Of ``draft`` on texts of this target."""
        ids = torch.tensor([self.text(60, seed) for seed in range(8)])
        with torch.no_grad():
            q = draft(ids).logits.softmax(-1)
        return float(torch.minimum(q, self.p[ids]).sum(-1)[:, 10:].mean())

    def text(self, length: int, seed: int) -> list[int]:
        generator, ids = torch.Generator().manual_seed(seed), [0]
        while len(ids) < length:
            ids.append(int(torch.multinomial(self.p[ids[-1]], 1, generator=generator)))
        return ids


@dataclass
class Inline:
    """A learner in this process, which computes what it is granted by a clock that it moves on."""

    clock: Clock
    seconds: float = 0.02  # of a turn
    learner: OnlineLearner | None = None
    turns: Iterator[bool] | None = None

    def __call__(self, folder: Path, options: LearnOptions) -> Inline:
        self.learner = OnlineLearner(folder, rate=options.rate, keep=options.keep)
        self.turns = self.learner.turns()
        return self

    def poll(self) -> int | None:
        return None

    def kill(self) -> None: ...

    def wait(self) -> int:
        return 0

    def work(self, until: float) -> None:
        """What a process beside the server does meanwhile."""
        begin = self.clock.now
        while self.turns is not None and begin < min(until, self.learner.buffer["granted"]) and next(self.turns):
            begin += self.seconds
            self.learner.buffer["heartbeat"] = begin
        self.learner is None or self.learner.buffer.__setitem__("busy", begin > self.clock.now)


class Server:
    """Serves texts of a table with a draft that learns; the clock is fake."""

    def __init__(self, folder: Path, draft: LlamaForCausalLM, **options: Any):
        self.clock, self.draft, self.tokens = Clock(), draft, 0
        self.inline = Inline(self.clock)
        about = {"class": "transformers:LlamaForCausalLM", "name": "", "config": draft.config.to_dict()}
        given = LearnOptions(folder=str(folder), **{"rate": 3e-3, **options})
        first = {name: value.detach().clone() for name, value in draft.named_parameters()}
        self.learning = Learning(model(9), about, first, given, clock=self.clock, start=self.inline)

    def serve(self, table: Table, tokens: int, seed: int) -> None:
        """One text; every round rejects at its last place, takes 0.1 s, and 0.1 more while the learner computes."""
        text = table.text(tokens + 4, seed)
        row, end = Row(text[:1], capacity=10**9), 1
        self.learning.begin([row])
        while end < tokens:
            accepted = end % 3
            busy = self.learning.buffer["busy"]
            self.inline.work(self.clock.now + 0.1)
            self.clock.now += 0.2 if busy else 0.1
            tree = TokenTree.from_chain(torch.zeros(1, 4, dtype=torch.long))
            logits = table.p[torch.tensor(text[end - 1 : end + 3])].log()[None]
            row.ids = text[: end + accepted + 1]
            self.swap(self.learning.observe([row], Feedback(tree, [accepted], None, logits)))
            end += accepted + 1
        self.swap(self.learning.end([row]))
        self.tokens += tokens

    def swap(self, version: int | None) -> None:
        if version is not None and (weights := self.learning.load(version)) is not None:
            self.draft.load_state_dict(weights, strict=False)
            self.learning.swapped(version, 0.01)


def test_a_draft_follows_a_shift_and_does_not_forget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The curve of α over tokens, with a fake clock: first text of one target, then of another, and what is left of the first. The first
    weights know nothing that they could rehearse."""
    monkeypatch.setattr(online, "REHEARSED", 0)
    server, one, other = Server(tmp_path, model(), between=False), Table(1), Table(2)
    assert one.alpha(server.draft) < 0.35
    curve: list[tuple[float, float]] = []
    for target in (one, other):
        for index in range(16):
            server.serve(target, 200, index)
        curve.append((one.alpha(server.draft), other.alpha(server.draft)))
    before, after = curve
    assert before[0] > 0.6, curve
    assert after[1] > before[1] + 0.3 * (before[0] - before[1]), curve
    facts = server.learning.facts()
    assert facts["swaps"] >= 4 and facts["steps"] > 50
    assert facts["seconds"]["lost"] < 0.06 * facts["seconds"]["serving"]


def filled(folder: Path, tokens: int = 2000, **options: Any) -> tuple[Server, OnlineLearner, Table]:
    """A folder with texts, and a learner that has not begun."""
    server, table = Server(folder, model(), share=0.0, between=False, **options), Table(1)
    server.learning._start = lambda *given: server.inline
    for index in range(tokens // 200):
        server.serve(table, 200, index)
    return server, OnlineLearner(folder, rate=3e-3), table


def steps(learner: OnlineLearner, trials: int) -> None:
    turns = learner.turns()
    while learner.buffer["trials"] < trials and next(turns):
        pass


def test_what_is_better_is_published_and_what_is_not_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(online, "TIMES", 1000)
    server, learner, table = filled(tmp_path)
    steps(learner, 6)
    buffer = learner.buffer
    assert buffer["trials"] == 6 and buffer["published"] + buffer["refused"] == 6 and buffer["published"] >= 3
    assert server.learning.versions.numbers()[-1] == buffer["published"]
    assert 0 < abs(buffer["again"]) < 0.2, "what keys of former weights cost was measured"
    best = table.alpha(learner.model)
    learner.rate = 10.0  # nothing good comes of this
    steps(learner, 9)
    assert buffer["refused"] >= 3
    server.swap(server.learning._newer(server.clock.now))
    assert server.learning.version == buffer["published"] and table.alpha(server.draft) > best - 0.1


def test_weights_that_became_nan_are_left_and_learning_goes_on(tmp_path: Path):
    _, learner, _ = filled(tmp_path)
    steps(learner, 1)
    published = learner.buffer["published"]
    with torch.no_grad():
        next(learner.model.parameters()).fill_(torch.nan)
    steps(learner, 2)
    assert learner.buffer["published"] == published and learner.buffer["refused"] == 1
    assert all(bool(torch.isfinite(value).all()) for value in learner.model.parameters())
    steps(learner, 5)
    assert learner.buffer["published"] > published


def test_a_version_that_the_server_refuses_is_left_too(tmp_path: Path):
    server, learner, _ = filled(tmp_path)
    steps(learner, 1)
    version = learner.buffer["published"]
    assert version == 1
    weights = server.learning.versions.load(version)
    server.learning.versions.save(version, {**weights, "lm_head.weight": weights["lm_head.weight"] * torch.nan})
    server.swap(server.learning._newer(server.clock.now))
    assert server.learning.version == 0 and learner.buffer["unusable"] == 1
    steps(learner, 4)
    server.swap(server.learning._newer(server.clock.now))
    assert server.learning.version == learner.buffer["published"] > 1


def test_learning_ends_when_everything_was_learnt_often_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(online, "TIMES", 2)
    server, learner, table = filled(tmp_path)
    turns = learner.turns()
    while next(turns):
        pass
    steps_taken = learner.buffer["steps"]
    assert steps_taken * online.BATCH >= 2 * learner.buffer["written"] and not next(turns)
    server.serve(table, 800, 99)
    assert next(turns), "there is something new"


def test_a_learner_goes_on_from_the_newest_version(tmp_path: Path):
    _, learner, table = filled(tmp_path)
    steps(learner, 5)
    again = OnlineLearner(tmp_path)
    assert again.version == learner.buffer["published"] > 0
    assert abs(table.alpha(again.model) - table.alpha(learner.model)) < 0.05


def test_what_was_forgotten_does_not_count_as_learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(online, "TIMES", 2)
    server, learner, table = filled(tmp_path)
    turns = learner.turns()
    while next(turns):
        pass
    last = server.learning.buffer["published"]
    server.learning.forget()
    assert server.learning.buffer["unusable"] == last, "no number is used twice"
    server.serve(table, 800, 99)
    assert next(OnlineLearner(tmp_path).turns()), "there is something new"


def test_what_former_keys_cost_is_measured_without_dropout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As the draft serves, and of the weights that are tried; the draft is trained as before."""
    monkeypatch.setattr(online, "TIMES", 1000)
    monkeypatch.setattr(online, "REHEARSED", 0)  # which reads with keys as well
    _, learner, _ = filled(tmp_path)
    seen = set[tuple[str, bool, bool]]()
    for name, module in (("model", learner.model), ("beside", learner.beside)):
        module.register_forward_pre_hook(
            lambda module, given, named, name=name: seen.add((name, named["use_cache"], module.training)), with_kwargs=True
        )
    steps(learner, 1)
    assert seen == {("model", False, True), ("beside", False, False), ("beside", True, False)}


def test_a_draft_keeps_to_what_the_first_weights_say_in_their_own_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(online, "TIMES", 1000)
    learners = []
    for count in (online.TOGETHER, 0):
        monkeypatch.setattr(online, "REHEARSED", count)
        learners.append(filled(tmp_path / str(count))[1])
        steps(learners[-1], 4)
    with_texts, without = learners
    assert len(with_texts.rehearsed) == online.TOGETHER and not without.rehearsed
    ids, first, distances = torch.stack(with_texts.rehearsed), model(), []
    assert ids.shape == (online.TOGETHER, with_texts.buffer.layout.length) and 0 <= int(ids.min()) <= int(ids.max()) < VOCABULARY
    for learner in learners:
        with torch.no_grad():
            logs, own = (each(ids).logits.log_softmax(-1) for each in (first, learner.model))
        distances.append(float((logs.exp() * (logs - own)).sum(-1).mean()))
    assert distances[0] < 0.6 * distances[1]


def test_texts_that_are_rehearsed_end_and_are_no_longer_than_the_context(tmp_path: Path):
    _, learner, _ = filled(tmp_path)
    _copy(learner.beside, learner.first)
    config = learner.model.config
    config.max_position_embeddings, config.eos_token_id, config.bos_token_id = 40, [3, 5], 7
    before = torch.get_rng_state()
    assert sum(1 for _ in learner._write()) == 39 and torch.equal(torch.get_rng_state(), before)
    lengths = {len(text) for text in learner.rehearsed}
    assert 2 <= min(lengths) < max(lengths) <= 40 and len(learner.rehearsed) <= online.TOGETHER
    assert all(text[0] == 7 and not {3, 5} & set(text[1:].tolist()) for text in learner.rehearsed)


def test_what_is_published_is_the_mean_of_the_last_weights(tmp_path: Path):
    server, learner, _ = filled(tmp_path)
    steps(learner, 1)
    found, own, first = server.learning.versions.load(1), *(dict(each.state_dict()) for each in (learner.model, model()))
    assert all(torch.equal(found[name], first[name].lerp(value, online.LEARNT)) for name, value in learner.mean.items())
    for name, value in found.items():
        moved, whole = (float((each - first[name]).norm()) for each in (value, own[name]))
        assert 0 < moved < 0.95 * online.LEARNT * whole, f"{name}: these are the last weights, and no mean of several"


def test_more_weights_learn_more_slowly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    weights = sum(each.numel() for each in model().parameters())
    assert filled(tmp_path)[1].rate == 3e-3, "as it was asked for"
    for small, expected in ((weights, online.RATE), (2 * weights, online.RATE), (weights / 4, online.RATE / 2)):
        monkeypatch.setattr(online, "SMALL", small)
        assert OnlineLearner(tmp_path).rate == pytest.approx(expected)


def test_the_server_sees_the_first_turn_too(tmp_path: Path):
    """A turn of a large draft takes longer than what is granted at once."""
    _, learner, _ = filled(tmp_path, tokens=200)
    buffer, seen = learner.buffer, list[int]()
    buffer["busy"], buffer["granted"] = 0, float("inf")

    def turns() -> Iterator[bool]:
        seen.append(buffer["busy"])
        raise KeyboardInterrupt
        yield True

    learner.turns = turns  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        online.work(learner)
    assert seen == [1]


# -- in a process of its own ------------------------------------------------------------------------------------------------


def process(folder: Path, *, memory: int | None = None) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "foredraft.training.online", str(folder), "--parent", str(os.getpid()), "--rate", "0.003"]
    limit = None if memory is None else lambda: resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, preexec_fn=limit, start_new_session=True)


def until(condition: Any, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.nightly
def test_a_process_learns_while_it_is_granted_time_and_can_be_killed(tmp_path: Path):
    server, learner, _ = filled(tmp_path)
    buffer = learner.buffer
    running = process(tmp_path)
    try:
        until(lambda: buffer["heartbeat"] > 0)
        time.sleep(0.3)
        assert buffer["steps"] == 0 and not buffer["busy"], "nothing is granted yet"
        assert os.getpriority(os.PRIO_PROCESS, running.pid) == online.NICE
        if (group := Path(f"/proc/{running.pid}/autogroup")).exists():
            assert group.read_text().split()[-1] == str(online.NICE)
        buffer["granted"] = float("inf")
        until(lambda: buffer["published"] > 0)
    finally:
        running.kill()
        running.wait()
    server.swap(server.learning._newer(server.clock.now))
    assert server.learning.version > 0


@pytest.mark.nightly
def test_a_process_without_memory_ends_and_serving_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """From the first text to the last, beside plain decoding."""
    target, rows = model(1, layers=2), prompts((8, 5), vocabulary=VOCABULARY)
    monkeypatch.setitem(Learning.__init__.__kwdefaults__, "start", lambda folder, options: process(folder, memory=400 << 20))
    monkeypatch.setattr(serving, "LOOK", 0.0)
    drafter = DraftModel(model(2), learn=tmp_path)
    speculator = Speculator(target, drafter, shape="chain(3)", rule="match")
    expected = generate(Speculator(target, "none"), rows, max_new_tokens=300)
    drafter.learning.duty.elapsed = 1e9
    end = time.monotonic() + 120
    while not drafter.learning._ends:
        assert generate(speculator, rows, max_new_tokens=300) == expected and time.monotonic() < end
    assert generate(speculator, rows, max_new_tokens=300) == expected
    speculator.close()


@pytest.mark.nightly
def test_a_learner_that_hangs_or_is_killed_while_text_is_written_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """All of the text is plain decoding's."""
    target, rows = model(1, layers=2), prompts((8, 5), vocabulary=VOCABULARY)
    monkeypatch.setattr(serving, "LOOK", 0.05)
    drafter = DraftModel(model(2), learn={"folder": tmp_path, "share": 1.0})
    speculator = Speculator(target, drafter, shape="chain(3)", rule="match")
    expected, learning = generate(Speculator(target, "none"), rows, max_new_tokens=100), drafter.learning

    def written(condition: Any) -> None:
        def met() -> bool:
            assert generate(speculator, rows, max_new_tokens=100) == expected
            return bool(condition())

        until(met)

    try:
        written(lambda: learning.buffer["busy"])
        monkeypatch.setattr(serving, "HUNG", 0.5)
        os.kill(learning._process.pid, signal.SIGSTOP)
        written(lambda: learning._ends)
        monkeypatch.setattr(serving, "HUNG", 300.0)
        written(lambda: learning._process)
        ends = learning._ends
        learning._process.send_signal(signal.SIGKILL)
        written(lambda: learning._ends == ends + 1)
    finally:
        speculator.close()
