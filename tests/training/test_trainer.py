"""The trainer: exact resumption, several processes, early stopping by acceptance, and what it refuses."""

from __future__ import annotations

import json
import os
import random
import signal

import pytest
import torch
from helpers import clone, perturbed, tiny
from training_helpers import ScriptedHeld, ToyHead, in_a_process, last_hidden, make_data, options, trainer, was_killed

from foredraft import Speculator
from foredraft.errors import ConfigurationError
from foredraft.heads.medusa import MedusaHead
from foredraft.heads.rnn import RnnHead
from foredraft.training import checkpoints
from foredraft.training.acceptance import Held
from foredraft.training.batches import Order, Tokens
from foredraft.training.data import Texts, shard_file
from foredraft.training.features import Reader, StoredReader, store
from foredraft.training.journal import Journal
from foredraft.training.learner import HEAD, part


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts") / "data"
    make_data(folder)
    return folder


def toy(data, folder, **changed):
    return trainer(data, folder, cls=ToyHead, **changed)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# -- resuming ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [ToyHead, pytest.param(MedusaHead, marks=pytest.mark.nightly)])
def test_a_run_that_was_stopped_and_resumed_ends_as_one_that_was_not(data, tmp_path, cls):
    whole = trainer(data, tmp_path / "whole", cls=cls)
    whole.train()
    first = trainer(data, tmp_path / "parts", cls=cls)
    first.report = lambda line: setattr(first, "_asked", line["step"] == 7)  # as a signal in step 7 would
    stopped = first.train()
    assert not stopped.finished and stopped.state.step == 8
    second = trainer(data, tmp_path / "parts", cls=cls, resume=True)
    assert second.train().finished
    assert same(whole.weights(), second.weights())
    ours, theirs = ([{**line, "seconds": 0, "tokens_per_second": 0} for line in Journal.read(run.folder)] for run in (whole, second))
    assert ours == theirs


def killed(data, folder, step, where):
    run = toy(data, folder)

    def die(*_):
        if run.state.step >= step:
            os.kill(os.getpid(), signal.SIGKILL)

    if where == "step":
        step_of = run._step
        run._step = lambda parts: (die(), step_of(parts))[1]
    else:
        checkpoints.write_json = lambda path, document: die()  # a checkpoint that is all there but for its last file
    run.train()


@pytest.mark.parametrize("where", ["step", "save"])
def test_a_run_that_was_killed_resumes_exactly(data, tmp_path, where):
    whole = toy(data, tmp_path / "whole")
    whole.train()
    step = random.Random(os.urandom(4)).randrange(4, 12) if where == "step" else 6
    assert was_killed(killed, data, tmp_path / "parts", step, where), f"not killed at step {step}"
    resumed = toy(data, tmp_path / "parts", resume=True)
    assert resumed.state.step in ((step // 3 * 3,) if where == "step" else (0,))
    resumed.train()
    assert same(whole.weights(), resumed.weights()), f"killed at step {step}"


def test_sigterm_saves_and_a_second_signal_ends_at_once(data, tmp_path):
    run = toy(data, tmp_path)
    run.report = lambda line: signal.raise_signal(signal.SIGTERM) if line["step"] == 4 else None
    outcome = run.train()
    assert (outcome.finished, outcome.state.step) == (False, 5)
    assert checkpoints.read(checkpoints.latest(tmp_path))[0].step == 5
    again = toy(data, tmp_path, resume=True)
    again.report = lambda line: [signal.raise_signal(signal.SIGINT) for _ in range(2)]
    with pytest.raises(KeyboardInterrupt):
        again.train()


def test_a_run_is_resumed_with_the_same_settings_only(data, tmp_path):
    toy(data, tmp_path, steps=4).train()
    with pytest.raises(ConfigurationError, match=r"already holds a run.*--resume"):
        toy(data, tmp_path, steps=4)
    with pytest.raises(ConfigurationError, match=r"learning_rate was 0.01 and is now 0.5"):
        toy(data, tmp_path, steps=4, learning_rate=0.5, resume=True)
    make_data(tmp_path / "other", seed=5)
    with pytest.raises(ConfigurationError, match=r"data was .* and is now"):
        toy(tmp_path / "other", tmp_path, steps=4, resume=True)
    with pytest.raises(ConfigurationError, match=r"held-out prompts was .* and is now"):
        toy(data, tmp_path, steps=4, held=Held([[1, 2, 3]], 4), resume=True)
    for other, what in ((perturbed(), "target"), (clone(tiny()).bfloat16(), "dtype")):
        with pytest.raises(ConfigurationError, match=rf"{what} was .* and is now"):
            toy(data, tmp_path, steps=4, model=other, resume=True)
    toy(data, tmp_path, steps=4, report_every=7, resume=True)  # what changes nothing may change


def test_training_leaves_the_callers_generators_alone(data, tmp_path):
    import numpy as np

    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    toy(data, tmp_path, steps=4).train()
    toy(data, tmp_path, steps=4, resume=True).train()
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]


# -- several processes ------------------------------------------------------------------------------------------------------

TOGETHER = """
import sys
from pathlib import Path
import torch
from training_helpers import trainer
data, folder, processes = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
run = trainer(data, folder, steps=4, evaluate_every=2, learning_rate=1e-3)
assert run.accelerator.num_processes == processes
run.train()
weights = run.weights()
if run.accelerator.is_main_process:
    torch.save(weights, folder / "weights.pt")
run.accelerator.end_training()
"""


@pytest.mark.nightly
def test_two_processes_learn_what_one_does_from_twice_the_batch(data, tmp_path):
    done = in_a_process(TOGETHER, str(data), str(tmp_path / "two"), "2", processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    one = trainer(data, tmp_path / "one", steps=4, evaluate_every=2, learning_rate=1e-3, accumulate=2)
    one.train()
    theirs = torch.load(tmp_path / "two" / "weights.pt")
    for name, value in one.weights().items():
        torch.testing.assert_close(theirs[name], value, atol=2e-5, rtol=1e-4)
    ours, theirs = (Journal.read(tmp_path / each) for each in ("one", "two"))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for name in mine.keys() & {"loss", "loss_1", "accuracy_0", "gradient_norm", "acceptance_length", "tokens"}:
            assert mine[name] == pytest.approx(other[name], rel=1e-4), name


@pytest.mark.nightly
def test_sharded_weights_learn_the_same_and_resume_exactly(data, tmp_path, monkeypatch):
    done = in_a_process(TOGETHER, str(data), str(tmp_path / "copied"), "2", processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    program = TOGETHER.replace("processes\n", "processes and str(run.accelerator.distributed_type).endswith('FSDP')\n")
    for folder, code in (
        ("sharded", program),
        ("resumed", program.replace("run.train()", "run._asked = True; run.train()")),  # stops behind its first step
        ("resumed", program.replace("folder, steps", "folder, resume=True, steps")),
    ):
        done = in_a_process(code, str(data), str(tmp_path / folder), "2", processes=2)
        assert done.returncode == 0, done.stderr[-3000:]
    copied, sharded, resumed = (torch.load(tmp_path / each / "weights.pt") for each in ("copied", "sharded", "resumed"))
    for name, value in copied.items():
        torch.testing.assert_close(sharded[name], value, atol=2e-5, rtol=1e-4)
    assert same(sharded, resumed)


# -- what is measured and kept ----------------------------------------------------------------------------------------------


def test_the_head_with_the_longest_acceptance_is_kept_and_patience_ends_the_run(data, tmp_path):
    run = trainer(data, tmp_path, held=ScriptedHeld([1.5, 2.5, 2.0, 2.5, 9.0]), steps=50, evaluate_every=2, save_every=3, patience=2)
    outcome = run.train()
    assert outcome.finished and (outcome.state.step, outcome.state.best, outcome.state.best_length) == (8, 4, 2.5)
    stored = checkpoints.load_best(tmp_path, 4)
    assert same(outcome.head.state_dict(), part(stored, HEAD)) and not same(stored, run.weights())
    assert [path.name for path in tmp_path.glob("best-*")] == ["best-0000004.safetensors"]


def test_acceptance_is_that_of_a_speculator_with_the_head(data):
    head = MedusaHead.for_target(tiny(), heads=2)
    with torch.no_grad():  # the LM head's own guess for the token after next is wrong for sure; noise gets some right
        for index, each in enumerate(head.lm_heads):
            each.weight.add_(torch.randn(each.weight.shape, generator=torch.Generator().manual_seed(index)))
    asked = [Texts(data).prompt(index) for index in range(4)]
    measured = Held(asked, 12).measure(tiny(), head)
    counts = [
        Speculator(tiny(), "medusa", drafter_options={"source": head}, shape="chain(2)")
        .generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=0)
        .stats
        for ids in asked
    ]
    assert measured.acceptance_length == sum(each.kept for each in counts) / sum(each.row_passes for each in counts)
    assert measured.tokens == sum(each.kept for each in counts) and len(measured.by_depth) == 2


def test_medusa_learns_and_acceptance_grows(data, tmp_path):
    run = trainer(data, tmp_path, steps=60, learning_rate=3e-2, evaluate_every=30, held=Held([Texts(data).prompt(i) for i in range(8)], 16))
    outcome = run.train()
    lines = Journal.read(tmp_path)
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.5 * losses[0] and outcome.state.best_length > 1.1
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_the_log_is_one_json_object_per_line(data, tmp_path):
    toy(data, tmp_path, steps=5).train()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5]
    assert {"loss", "loss_0", "learning_rate", "gradient_norm", "tokens", "epoch", "seconds"} <= lines[0].keys()
    assert lines[0]["learning_rate"] == pytest.approx(0.005) and lines[1]["learning_rate"] == pytest.approx(0.01)


# -- batches and features ---------------------------------------------------------------------------------------------------


def test_an_epoch_reads_every_text_once_and_steps_follow_from_their_number(data):
    texts = Texts(data)
    order = Order(texts, range(28), 96, 2, seed=4)
    read = [member for batch in order.epoch(0) for member in batch.tolist()]
    assert sorted(read) == list(range(28)) and read != sorted(read)
    assert [batch.tolist() for batch in order.epoch(1)] != [batch.tolist() for batch in order.epoch(0)]
    assert all(len(batch) * max(texts.lengths[batch]) <= 96 for batch in order.epoch(0))
    walked = order.read(step=0)
    steps = [next(walked) for _ in range(order.steps(0) + 2)]
    for step in (1, order.steps(0), order.steps(0) + 1):
        epoch, parts = next(order.read(step=step))
        assert epoch == steps[step][0] and [part.members.tolist() for part in parts] == [part.members.tolist() for part in steps[step][1]]
    halves = [next(order.read(step=1, rank=rank, processes=2))[1] for rank in range(2)]
    assert [half[0].members.tolist() for half in halves] == [part.members.tolist() for part in steps[1][1]]


def test_what_is_counted_and_cut(data):
    texts = Texts(data)
    part = Order(texts, range(8), 512, 1, seed=0).tokens(torch.arange(8).numpy())
    for row, member in enumerate(part.members):
        length, prompt = texts.lengths[member], texts.prompt_lengths[member]
        assert part.ids[row, :length].tolist() == texts[member].tolist()
        assert part.valid[row].tolist() == [place < length for place in range(part.ids.shape[1])]
        assert part.counted[row].tolist() == [prompt <= place < length for place in range(part.ids.shape[1])]
    cut = Order(texts, range(8), 512, 1, seed=0, longest=10, everything=True).tokens(torch.arange(8).numpy())
    assert cut.ids.shape == (8, 10) and bool(cut.counted.all())


def test_hidden_states_and_logits_are_the_targets():
    ids = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(0))
    everywhere = torch.ones_like(ids, dtype=torch.bool)
    hidden, logits = Reader(tiny(), [1, -1])(Tokens(ids, everywhere, everywhere, torch.arange(2).numpy()))
    with torch.no_grad():
        expected = tiny()(input_ids=ids, output_hidden_states=True)
    assert hidden.shape[:3] == (2, 9, 2) and torch.equal(hidden[:, :, 0], expected.hidden_states[1])
    assert torch.equal(hidden[:, :, 1], last_hidden(tiny(), ids)) and torch.equal(logits, expected.logits)
    assert not hidden.requires_grad and not logits.requires_grad


def test_a_head_that_reads_no_hidden_states_is_trained(data, tmp_path):
    run = trainer(data, tmp_path, cls=RnnHead, head={"steps": 2, "hidden_states": False}, steps=2, evaluate_every=2)
    before = {name: value.clone() for name, value in run.weights().items()}
    assert run.train().finished and not same(before, run.weights())


def test_heads_on_a_narrow_lm_head_learn_in_float32(data, tmp_path):
    model = clone(tiny()).to(torch.bfloat16)
    head = {"heads": 2, "lm_head": "target"}
    assert trainer(data, tmp_path, model=model, held=ScriptedHeld([1.0]), head=head, steps=1).train().finished


def test_stored_hidden_states_teach_what_fresh_ones_do(data, tmp_path):
    import shutil

    folder = shutil.copytree(data, tmp_path / "texts")
    with pytest.raises(ConfigurationError, match=r"holds no hidden states; store them with: foredraft data hidden"):
        trainer(folder, tmp_path / "none", stored=True)
    assert store(tiny(), folder, [-1, 1], batch_tokens=100) == 4 and store(tiny(), folder, [-1, 1]) == 0
    fresh, stored = (trainer(folder, tmp_path / str(way), stored=way) for way in (False, True))
    part = next(fresh.order.read(step=0))[1][0]
    for ours, theirs in zip(stored.learner.reader(part), fresh.learner.reader(part)):
        torch.testing.assert_close(ours[part.valid], theirs[part.valid], atol=1e-4, rtol=1e-4)
    fresh.train()
    stored.train()
    for name, value in fresh.weights().items():
        torch.testing.assert_close(stored.weights()[name], value, atol=1e-3, rtol=1e-2)


def test_stored_hidden_states_that_do_not_fit_are_refused(data, tmp_path):
    import shutil

    folder = shutil.copytree(data, tmp_path / "texts")
    store(tiny(), folder, [-1])
    with pytest.raises(ConfigurationError, match=r"features was \[-1\] and is now \[1\]"):
        store(tiny(), folder, [1])
    with pytest.raises(ConfigurationError, match=r"hidden states 1 are not stored .* --features 1,-1"):
        StoredReader(tiny(), [1], Texts(folder))
    with pytest.raises(ConfigurationError, match="are float32, and the target is bfloat16"):
        StoredReader(clone(tiny()).bfloat16(), [-1], Texts(folder))
    with pytest.raises(ConfigurationError, match="other weights"):
        store(perturbed(), folder, [-1])
    with pytest.raises(ConfigurationError, match="another target's"):
        StoredReader(perturbed(), [-1], Texts(folder))
    capped = clone(tiny())
    forward = capped.forward

    def twice(*args, **named):
        output = forward(*args, **named)
        output.logits = 2 * output.logits
        return output

    capped.forward = twice
    with pytest.raises(ConfigurationError, match="logits are not its LM head's"):
        StoredReader(capped, [-1], Texts(folder))
    with pytest.raises(ConfigurationError, match="train a backbone without --stored-hidden"):
        trainer(folder, tmp_path / "run", model=clone(tiny()), backbone="full", stored=True)
    shard_file(folder, 1, "hidden").unlink()
    with pytest.raises(ConfigurationError, match=r"hidden-00001.* missing"):
        StoredReader(tiny(), [-1], Texts(folder))


# -- refusals ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch_tokens": 20}, "a text has .* tokens and --batch-tokens is 20"),
        ({"held_out": 32}, "32 texts, 32 of them held out, leave none"),
        ({"max_length": 5}, "the texts, cut to 5 tokens, are prompts without answers"),
        ({"accumulate": 500}, "fewer than the 500 micro-batches of a step"),
        ({"head": {"haeds": 3}}, "no option 'haeds'"),
    ],
)
def test_refusals(data, tmp_path, changed, message):
    with pytest.raises(ConfigurationError, match=message):
        trainer(data, tmp_path, **changed)


@pytest.mark.parametrize(
    "changed",
    [
        {"precision": "fp8"},
        {"backbone": "half"},
        {"steps": 0},
        {"batch_tokens": 0},
        {"max_length": 0},
        {"learning_rate": float("nan")},
        {"backbone_rate": 0.0},
        {"epochs": 0.0},
    ],
)
def test_settings_that_are_none(changed):
    with pytest.raises(ConfigurationError, match=next(iter(changed))):
        options(**changed)
