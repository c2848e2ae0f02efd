"""The LayerSkip recipe: its numbers against cases made by hand, what a pass leaves out, exact runs, and the model that comes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, build
from cover import nightly_but
from training_helpers import in_a_process, make_data, options, trainer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from foredraft import Speculator
from foredraft.cli import app
from foredraft.errors import ConfigurationError, UnsupportedModelError
from foredraft.loading import load_model
from foredraft.models.layers import LayerRanges
from foredraft.training.batches import Tokens
from foredraft.training.data import Texts
from foredraft.training.early_exits import EarlyExitLearner, EarlyExits, held_out_loss
from foredraft.training.journal import Journal
from foredraft.training.layerskip import Recipe

LAYERS = 4
HERE = str(Path(__file__).parent)
PLAIN = {"dropout": 0.0, "scale": 0.0}


def model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": LAYERS, "vocab_size": 128}
    return LlamaForCausalLM(LlamaConfig(eos_token_id=None, bos_token_id=None, initializer_range=0.2, **sizes)).eval()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts") / "data"
    make_data(folder, model=model())
    return folder


def run(data, folder, recipe=PLAIN, **changed):
    given = {"backbone": "full", "kind": "layerskip", "head": recipe, "learning_rate": 2e-3, **changed}
    return trainer(data, folder, cls=EarlyExits, model=model(), **given)


def batch(rows=3, width=9):
    ids = torch.randint(3, 100, (rows, width), generator=torch.Generator().manual_seed(0))
    valid = torch.arange(width)[None] < torch.tensor([width, width - 2, width - 4, width])[:rows, None]
    return Tokens(ids, valid, valid & (torch.arange(width) > 1), torch.arange(rows).numpy())


# -- the recipe's numbers ---------------------------------------------------------------------------------------------------


def test_dropout_rates():
    assert Recipe(dropout=0.3).dropped(4, 7, 10) == pytest.approx([0, 0.3 * (2 ** (1 / 3) - 1), 0.3 * (2 ** (2 / 3) - 1), 0.3])
    new = Recipe(dropout=0.3, schedule="exponential")
    assert new.dropped(3, 0, 5) == [0, 0, 0] and new.dropped(3, 4, 5) == pytest.approx([0, 0.3 * (2**0.5 - 1), 0.3])
    assert new.dropped(3, 2, 5)[2] == pytest.approx(0.3 * (2**0.5 - 1))


def test_weights_of_exits():
    # e = s * (0, 1, 3) and 3 + 3 s for the last of four layers
    assert Recipe(scale=0.5, curriculum="all").weights(4, 0, 10) == pytest.approx([0, 0.5 / 6.5, 1.5 / 6.5, 4.5 / 6.5])
    assert Recipe(scale=0, curriculum="all").weights(4, 3, 10) == [0, 0, 0, 1]
    favoured = Recipe(scale=0.5, curriculum="all", exit=2, favour=2.0).weights(4, 0, 10)
    assert favoured == pytest.approx([0, 9 / 15, 1.5 / 15, 4.5 / 15])


def learning(recipe, steps, layers=6):
    """The layers that learn in each step; layer 0 has weight 0 in any case."""
    return [[layer for layer, weight in enumerate(recipe.weights(layers, step, steps)) if weight] for step in range(steps)]


def test_curricula():
    assert learning(Recipe(curriculum="rotational", rotation=3), 4) == [[3, 5], [1, 4, 5], [2, 5], [3, 5]]
    gradual = learning(Recipe(curriculum="gradual"), 24)  # T / 2L = 2 steps: one layer more
    assert gradual[:9] == [[5], [5], [4, 5], [4, 5], [3, 4, 5], [3, 4, 5], [2, 3, 4, 5], [2, 3, 4, 5], [1, 2, 3, 4, 5]]
    assert gradual[9:] == [[1, 2, 3, 4, 5]] * 15
    assert learning(Recipe(curriculum="rotational", rotation=5, exit=2), 3) == [[1, 5], [1, 5], [1, 2, 5]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1"),
        ({"dropout": float("nan")}, "dropout"),
        ({"scale": -1.0}, "scale must be at least 0"),
        ({"schedule": "linear"}, "unknown schedule 'linear'"),
        ({"curriculum": "rotation"}, "unknown curriculum 'rotation'"),
        ({"rotation": 0}, "rotation must be at least 1"),
        ({"exit": 0}, "exit must lie between 1 and 3 for a model of 4 layers, got 0"),
        ({"exit": LAYERS}, "exit must lie between 1 and 3"),
        ({"exits": 2}, "no option 'exits'"),
    ],
)
def test_bad_recipes(given, message):
    with pytest.raises(ConfigurationError, match=message):
        EarlyExits.for_target(model(), **given)


# -- what a pass computes ---------------------------------------------------------------------------------------------------


def test_which_layers_a_text_leaves_out_follows_from_seed_step_and_text():
    learner = EarlyExitLearner(model(), Recipe(dropout=0.4), 7)
    many = Tokens(*[torch.zeros(2000, 1)] * 3, torch.arange(2000).numpy())
    kept = learner.kept(many, 3, 10)
    assert (1 - kept.float().mean(1)).tolist() == pytest.approx(Recipe(dropout=0.4).dropped(LAYERS, 3, 10), abs=0.04) and kept[0].all()
    few = Tokens(*[torch.zeros(2, 1)] * 3, torch.tensor([900, 5]).numpy())
    assert torch.equal(learner.kept(few, 3, 10), kept[:, [900, 5]])
    for other in (learner.kept(many, 4, 10), EarlyExitLearner(model(), Recipe(dropout=0.4), 8).kept(many, 3, 10)):
        assert not torch.equal(other, kept)


FAMILIES = [name for name, entry in ARCHITECTURES.items() if entry.support == "tree" and name != "gemma3n_text"]
FAST = ("llama", "gemma2", "gpt2", "bloom", "opt", "cohere", "granite", "gptj")


@pytest.mark.parametrize("family", nightly_but([(each,) for each in FAST], [(each,) for each in FAMILIES]))
def test_every_family_exits_and_leaves_out_as_a_model_without_those_layers(family):
    """Row by row, against passes in which other modules stand where the layers were."""
    subject, tokens = build(family, ARCHITECTURES[family].implementations[0]), batch()
    learner = EarlyExitLearner(subject, Recipe(), 0)
    ranges, count = LayerRanges(subject), learner.ranges.count
    kept = torch.ones(count, 3, dtype=torch.bool)
    kept[count - 1, 0] = kept[0, 1] = False
    middle = count // 2 - 1
    with torch.no_grad():
        with learner._leaving_out(kept, [middle]) as states:
            logits = subject(input_ids=tokens.ids, use_cache=False).logits
        early = learner.ranges.read_out(states[middle].flatten(0, 1)).view_as(logits)
        for row, aside in enumerate(([count - 1], [0], [])):
            for end, found in ((count, logits), (middle + 1, early)):
                with ranges.only(0, end, aside=aside):
                    expected = subject(input_ids=tokens.ids[row : row + 1], use_cache=False).logits
                torch.testing.assert_close(found[row : row + 1], expected, atol=1e-4, rtol=1e-4)


def test_the_loss_is_the_weighted_sum_of_cross_entropies():
    subject, tokens, recipe = model(), batch(), Recipe(dropout=0.0, scale=0.7, curriculum="all", exit=1, favour=0.3)
    total, count, parts = EarlyExitLearner(subject, recipe, 0)(tokens, 2, 10)
    assert parts.keys() == {"loss_model", "loss_exit_1"}
    states = subject(input_ids=tokens.ids, output_hidden_states=True).hidden_states[1:LAYERS]
    logits = [subject.lm_head(subject.model.norm(each)) for each in states] + [subject(input_ids=tokens.ids).logits]
    wanted = [(row, place) for row in range(3) for place in range(1, 9) if tokens.counted[row, place]]
    nats = [-sum(each[row, place - 1].log_softmax(-1)[tokens.ids[row, place]] for row, place in wanted) / len(wanted) for each in logits]
    assert int(count) == len(wanted)
    expected = sum(weight * each for weight, each in zip(recipe.weights(LAYERS, 2, 10), nats))
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(torch.stack(list(parts.values())), torch.stack([nats[-1], nats[0]]))
    ours, theirs = (torch.autograd.grad(each, list(subject.parameters())) for each in (total, expected))
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)


def test_families_whose_layers_cannot_be_run_in_part_are_refused():
    with pytest.raises(UnsupportedModelError, match="cannot be run in part: upper layers read the keys of lower ones"):
        EarlyExitLearner(build("gemma3n_text"), Recipe(), 0)


@pytest.mark.parametrize(("change", "message"), [({"quantization_config": {}}, "quantized weights"), ({}, "has adapters already")])
def test_weights_that_cannot_be_trained_are_refused(data, tmp_path, change, message):
    subject = model()
    subject.config.update(change)
    subject._hf_peft_config_loaded = not change
    with pytest.raises(ConfigurationError, match=message):
        trainer(data, tmp_path, cls=EarlyExits, model=subject, backbone="full", kind="layerskip", head={})


# -- runs -------------------------------------------------------------------------------------------------------------------


def test_without_dropout_and_scale_it_is_plain_training_bit_for_bit(data, tmp_path):
    ours, theirs = run(data, tmp_path, steps=6, evaluate_every=6), model().requires_grad_()
    batches, settings = ours.order.read(step=0), options(learning_rate=2e-3)
    learning = torch.optim.AdamW(theirs.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for step in range(6):
        (tokens,) = next(batches)[1]
        counted = tokens.counted[:, 1:] & tokens.valid[:, 1:]
        logits = theirs(input_ids=tokens.ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits[counted], tokens.ids[:, 1:][counted], reduction="sum") / counted.sum()
        (loss * counted.sum()).backward()
        for weight in theirs.parameters():
            weight.grad.mul_(1 / float(counted.sum()))
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        learning.param_groups[0]["lr"] = 2e-3 * settings.rate(step, 6)
        learning.step()
        learning.zero_grad()
    ours.train()
    assert all(torch.equal(value, theirs.state_dict()[name.removeprefix("backbone.")]) for name, value in ours.weights().items())
    assert len(ours.weights()) == len(list(theirs.parameters()))


STRONG = {"dropout": 0.5, "scale": 0.3, "rotation": 2, "exit": 2}


@pytest.mark.parametrize("backbone", ["full", pytest.param("lora", marks=pytest.mark.nightly)])
def test_a_run_that_was_killed_and_resumed_ends_as_one_that_was_not(data, tmp_path, backbone):
    def again(folder, **changed):
        return run(data, tmp_path / folder, STRONG, backbone=backbone, lora_rank=2, steps=8, evaluate_every=4, held_out=2, **changed)

    def killed(parts):
        if first.state.step == 7:
            raise SystemExit
        return step_of(parts)

    whole, first = again("whole"), again("parts")
    begin = {name: value.clone() for name, value in whole.weights().items()}
    whole.train()
    step_of, first._step = first._step, killed
    with pytest.raises(SystemExit):
        first.train()
    second = again("parts", resume=True)
    assert second.state.step == 6 and second.train().finished
    assert all(torch.equal(value, second.weights()[name]) for name, value in whole.weights().items())
    assert any(not torch.equal(value, begin[name]) for name, value in whole.weights().items())
    ours, theirs = ([{**line, "seconds": 0, "tokens_per_second": 0} for line in Journal.read(each.folder)] for each in (whole, second))
    assert ours == theirs and [line["step"] for line in ours if "held_out_loss" in line] == [0, 4, 8]
    assert {"loss", "loss_model", "loss_exit_2"} <= ours[1].keys() and (whole.folder / "curves.png").exists()


TOGETHER = """
import sys
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[3])
from test_layerskip import STRONG, run
trained = run(Path(sys.argv[1]), Path(sys.argv[2]), STRONG, steps=4, evaluate_every=2)
assert trained.accelerator.num_processes == 2
trained.train()
weights = trained.weights()
if trained.accelerator.is_main_process:
    torch.save(weights, trained.folder / "weights.pt")
trained.accelerator.end_training()
"""


@pytest.mark.nightly
def test_two_processes_learn_what_one_does_from_twice_the_batch(data, tmp_path):
    done = in_a_process(TOGETHER, str(data), str(tmp_path / "two"), HERE, processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    one = run(data, tmp_path / "one", STRONG, steps=4, evaluate_every=2, accumulate=2)
    one.train()
    theirs = torch.load(tmp_path / "two" / "weights.pt")
    for name, value in one.weights().items():
        torch.testing.assert_close(theirs[name], value, atol=2e-5, rtol=1e-4)


def test_the_held_out_loss_is_that_of_the_texts_that_are_held_out(data, tmp_path):
    trained, texts = run(data, tmp_path, steps=1), Texts(data)
    nats, count = 0.0, 0
    for index in range(28, 32):
        ids = torch.from_numpy(texts[index]).long()[None]
        with torch.no_grad():
            each = torch.nn.functional.cross_entropy(model()(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="none")
        answers = each[texts.prompt_lengths[index] - 1 :]
        nats, count = nats + float(answers.sum()), count + len(answers)
    assert held_out_loss(trained.model, trained.apart) == pytest.approx(nats / count, rel=1e-5)


# -- the command ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    model().save_pretrained(folder / "target")
    make_data(folder / "data", model=load_model(str(folder / "target")))
    return folder


def train(place, out, *more, kind="layerskip"):
    arguments = ["train", kind, "--target", str(place / "target"), "--data", str(place / "data"), "--out", str(out), "--steps", "8"]
    arguments += ["--batch-tokens", "96", "--warmup", "2", "--evaluate-every", "4", "--held-out", "2", "--answer-tokens", "6"]
    return CliRunner().invoke(app, [*arguments, *more])


@pytest.mark.parametrize("backbone", [pytest.param("full", marks=pytest.mark.nightly), "lora"])  # the other way round above
def test_a_plain_checkpoint_comes_of_it(place, tmp_path, backbone):
    more = ("--exit", "2", "--backbone", backbone, "--learning-rate", "0.003")
    done = train(place, tmp_path, *more)
    assert done.exit_code == 0, done.output
    said = " ".join(done.stdout.split())
    assert "its text has its own output distribution, not that of" in said and "--drafter-option exit=2" in said and "its own loss" in said
    ours, before = AutoModelForCausalLM.from_pretrained(tmp_path), model().state_dict()
    assert ours.state_dict().keys() == before.keys() and not (tmp_path / "adapter_config.json").exists()
    assert any(not torch.equal(value, before[name]) for name, value in ours.state_dict().items())
    ids = torch.tensor([Texts(place / "data").prompt(0)])
    plain = ours.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0)
    speculative = Speculator(ours, "layer-skip", drafter_options={"exit": 2}, shape="chain(3)")
    assert speculative.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0).sequences.tolist() == plain.tolist()
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    best = max((line for line in lines if line.get("step") and "held_out_loss" in line), key=lambda line: line["acceptance_length"])
    for name, form in (("acceptance_length", ".3f"), ("held_out_loss", ".4f")):
        assert f"{lines[0][name]:{form}} → {best[name]:{form}}" in said
    again = train(place, tmp_path, *more)
    assert again.exit_code == 2 and "--resume" in again.stderr


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        ("layerskip", ("--exit", "4"), "exit must lie between 1 and 3"),
        ("layerskip", ("--exit", "0"), "--exit"),
        ("layerskip", ("--backbone", "frozen"), "--backbone full, or lora"),
        ("layerskip", ("--curriculum", "some"), "unknown curriculum 'some'"),
        ("layerskip", ("--stored-hidden",), "--stored-hidden is for heads, not for layerskip; leave it out"),
        ("layerskip", ("--head-option", "heads=2"), "--head-option is for heads"),
        ("layerskip", ("--learning-rate", "0"), "learning_rate must be above 0"),
        ("exit", ("--exit", "2"), "--exit is for layerskip, not for exit; leave it out"),
    ],
)
def test_refusals(place, tmp_path, kind, more, message):
    done = train(place, tmp_path, *more, kind=kind)
    assert done.exit_code == 2 and message in " ".join(done.stderr.replace("│", " ").split()), done.output


def test_the_model_to_be_trained_is_not_overwritten(place):
    done = train(place, place / "target")
    assert done.exit_code == 2 and "is the model that is to be trained" in " ".join(done.stderr.split())
