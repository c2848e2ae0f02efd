"""Drafts that are distilled: what is compared, texts that are written during a run, exact runs, and what comes of them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, build
from cover import nightly_but
from kernel_cases import needs_kernels
from safetensors.torch import load_file
from training_helpers import in_a_process, make_data, trainer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from foredraft import Speculator
from foredraft.cli import app
from foredraft.errors import ConfigurationError
from foredraft.heads.medusa import MedusaHead
from foredraft.loading import load_model
from foredraft.losses import Loss, compare
from foredraft.models.identity import shape_of
from foredraft.models.layers import LayerRanges
from foredraft.training.acceptance import DEPTH, Held, costs
from foredraft.training.continuations import BY_DRAFT, BY_TARGET
from foredraft.training.data import Texts
from foredraft.training.distilling import POSITIONS, Distilling
from foredraft.training.drafts import Distiller, Draft, DraftConfig, StoredProbabilities, copy_of_layers
from foredraft.training.journal import Journal
from foredraft.training.worth import DraftHeld, Prices, compared

VOCABULARY = 128


def model(seed: int = 0, layers: int = 3, width: int = 32, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": 2, "num_hidden_layers": layers}
    config = LlamaConfig(
        eos_token_id=None, bos_token_id=None, initializer_range=0.2, vocab_size=VOCABULARY, tie_word_embeddings=tied, **sizes
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A target, a draft of another shape, and data of the target with its probabilities."""
    folder = tmp_path_factory.mktemp("place")
    model().save_pretrained(folder / "target")
    model(1, layers=1, width=16).save_pretrained(folder / "draft")
    model(1, layers=1, width=16, tied=True).save_pretrained(folder / "tied")
    make_data(folder / "data", model=load_model(str(folder / "target")), top=VOCABULARY)
    return folder


def run(place, folder, *, resume=False, **changed):
    recipe = {"draft": str(place / "tied"), "loss": "lk(3)", **{name: changed.pop(name) for name in list(changed) if name in RECIPE}}
    given = {"kind": "draft", "head": recipe, "backbone": "full", "learning_rate": 3e-3, "held_out": 2, "evaluate_every": 4, **changed}
    return trainer(place / "data", folder, cls=Draft, model=load_model(str(place / "target")), resume=resume, **given)


RECIPE = Distilling.__dataclass_fields__
FAMILIES = [name for name, entry in ARCHITECTURES.items() if entry.support == "tree" and name != "gemma3n_text"]
FAST = ("llama", "gemma2", "gpt2", "bloom", "opt", "gptj")


# -- drafts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", nightly_but([(each,) for each in FAST], [(each,) for each in FAMILIES]))
def test_a_copy_of_layers_is_the_target_without_the_others(family, tmp_path):
    target, ids = build(family, ARCHITECTURES[family].implementations[0]), torch.arange(3, 12)[None]
    ranges = LayerRanges(target)
    kept = [0, ranges.count - 1]
    with torch.no_grad(), ranges.only(0, ranges.count, aside=[each for each in range(ranges.count) if each not in kept]):
        expected = target(input_ids=ids, use_cache=False).logits
    copied = copy_of_layers(target, kept).eval()
    copied.save_pretrained(tmp_path)
    for each in (copied, AutoModelForCausalLM.from_pretrained(tmp_path)):
        torch.testing.assert_close(each(input_ids=ids, use_cache=False).logits, expected, atol=1e-5, rtol=1e-5)
    theirs = {weight.data_ptr() for weight in target.parameters()}
    assert not theirs & {weight.data_ptr() for weight in copied.parameters()}


def test_a_copy_of_layers_keeps_those_that_are_routed(tmp_path):
    target = build("llama4_text", "eager")
    assert target.config.moe_layers == [1]
    for kept, routed in (([1, 2], [0]), ([0, 2], []), ([0, 1, 2], [1])):
        copy_of_layers(target, kept).save_pretrained(tmp_path)
        assert AutoModelForCausalLM.from_pretrained(tmp_path).config.moe_layers == routed


# -- what is compared -----------------------------------------------------------------------------------------------------


def parts_of(trained, count=1):
    return [tokens for _, tokens in zip(range(count), (each for _, parts in trained.order.read(step=0) for each in parts))]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_loss_is_the_mean_over_counted_tokens(place, tmp_path, temperature):
    trained = run(place, tmp_path, temperature=temperature)
    (tokens,) = parts_of(trained)
    total, count, parts = trained.plain(tokens, 0, 1)
    losses, alphas = [], []
    for row in range(len(tokens.ids)):
        where = (tokens.counted[row] & tokens.valid[row])[1:].nonzero().flatten()
        p, q = (each(input_ids=tokens.ids[row : row + 1]).logits[0, where] for each in (trained.model, trained.trained))
        found = compare(Loss.parse("lk(3)"), q, p, temperature)
        losses.append(found.loss)
        alphas.append(found.alpha)
    assert int(count) == len(torch.cat(losses)) == int((tokens.counted & tokens.valid).sum())
    torch.testing.assert_close(total, torch.cat(losses).mean(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(parts["alpha"], torch.cat(alphas).mean(), atol=1e-5, rtol=1e-5)
    total.backward()
    assert all(weight.grad is not None for weight in trained.trained.parameters())
    assert all(weight.grad is None for weight in trained.model.parameters())


def test_only_rejected_tokens_count(place, tmp_path):
    trained = run(place, tmp_path, positions="rejected", loss="fkl")
    (tokens,) = parts_of(trained)
    draws = [trained.plain(tokens, 0, 1) for _ in range(100)]
    whole, count, parts = Distiller(trained.trained, trained.model, replace(trained.head.config.recipe, positions="all"), None)(
        tokens, 0, 1
    )
    rejected = torch.stack([each[2]["rejected"] for each in draws]).mean()
    assert float(rejected) == pytest.approx(1 - float(parts["alpha"]), abs=0.03)
    assert {int(each[1]) for each in draws} == {int(count)} and max(each[0].item() for each in draws) < whole.item()


@pytest.mark.parametrize("positions", POSITIONS)
def test_the_log_has_the_same_figures_where_nothing_is_counted(place, tmp_path, positions):
    """As in a batch of texts that are all prompt: other steps of the same report have counted tokens."""
    trained = run(place, tmp_path, positions=positions)
    (tokens,) = parts_of(trained)
    some, none = (trained.plain(each, 0, 1) for each in (tokens, replace(tokens, counted=torch.zeros_like(tokens.counted))))
    assert none[2].keys() == some[2].keys() and all(float(each) == 0 for each in (*none[:2], *none[2].values()))
    none[0].backward()


def test_stored_probabilities_are_those_of_a_pass(place, tmp_path):
    trained = run(place, tmp_path / "stored", steps=2, evaluate_every=2, stored_probabilities=True)
    passing = Distiller(trained.trained, trained.model, Distilling(draft="x", loss="lk(3)"), None)
    for tokens in parts_of(trained, 3):
        for ours, theirs in zip(trained.plain(tokens, 0, 1)[:2], passing(tokens, 0, 1)[:2]):
            torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)  # the rest's mass is 1 - Σ in float32
    two = StoredProbabilities(Texts.together([Texts(place / "data"), Texts(place / "data")]))
    tokens = replace(tokens, members=tokens.members + 32)  # the same texts, of the second folder
    labels = (tokens.counted & tokens.valid).flatten().nonzero().flatten()
    torch.testing.assert_close(
        two(tokens, labels).log_probabilities, trained.plain.stored(parts_of(trained, 3)[-1], labels).log_probabilities
    )
    trained.train()
    assert trained.state.step == 2


# -- texts that are written during a run -----------------------------------------------------------------------------------


def written(trained, step=0):
    trained.continuations.write(step)
    trained.continuations.read(step, [])
    return trained.continuations._texts


def test_a_share_is_continued_by_the_draft_and_the_rest_by_the_target_or_as_given(place, tmp_path):
    texts = Texts(place / "data")
    trained = run(place, tmp_path / "both", on_policy=0.25, teacher_texts=True, rewrite_every=50, max_length=20)
    shares = trained.continuations._shares(range(30), 0)
    assert len(shares[BY_DRAFT]) == 8 and sorted(shares[BY_DRAFT] + shares[BY_TARGET]) == list(range(30))
    found = written(trained)
    assert sorted(found) == list(range(30))
    for member, text in found.items():
        given = texts[member][:20]
        assert text[: texts.prompt_lengths[member]].tolist() == texts.prompt(member) and len(text) == len(given)
    (tokens,) = parts_of(trained)
    (read,) = trained.continuations.read(0, [tokens])
    assert read.ids.shape == tokens.ids.shape and torch.equal(read.valid, tokens.valid) and torch.equal(read.counted, tokens.counted)
    assert not torch.equal(read.ids, tokens.ids)
    alone = written(run(place, tmp_path / "half", on_policy=0.5, rewrite_every=50))
    assert len(alone) == 15


def test_the_writer_is_the_draft_as_it_is(place, tmp_path):
    trained = run(place, tmp_path, on_policy=1.0, rewrite_every=3, steps=9, evaluate_every=9, temperature=0.05)
    seen = {}
    write = trained.continuations._written

    def watched(writer, members, window):
        found = write(writer, members, window)
        if writer == BY_DRAFT:
            seen[window] = {name: value.clone() for name, value in trained.trained.state_dict().items()}
            member = max(found, key=lambda each: len(found[each]))
            prompt = int(trained.texts.prompt_lengths[member])
            with torch.no_grad():
                logits = trained.trained(input_ids=torch.from_numpy(found[member]).long()[None]).logits[0]
            likely = logits.argmax(-1)[prompt - 1 : -1].numpy()
            assert np.mean(likely == found[member][prompt:]) > 0.5, "cold text is not the draft's own"
        return found

    trained.continuations._written = watched
    trained.train()
    assert sorted(seen) == [0, 1, 2]
    assert all(not torch.equal(seen[0][name], seen[1][name]) for name in seen[0] if "proj" in name)


@pytest.mark.parametrize("backbone", ["full", pytest.param("lora", marks=pytest.mark.nightly)])
def test_a_run_that_was_killed_and_resumed_ends_as_one_that_was_not(place, tmp_path, backbone):
    settings = {"on_policy": 0.5, "teacher_texts": True, "rewrite_every": 4, "positions": "rejected", "steps": 11, "save_every": 3}
    last = random.Random(backbone).randrange(4, 11)  # 4: the first window is over, and the checkpoint is in it

    def again(folder, **changed):
        return run(place, tmp_path / folder, backbone=backbone, lora_rank=2, **settings, **changed)

    def killed(parts):
        if first.state.step == last:
            raise SystemExit
        return step_of(parts)

    whole, first = again("whole"), again("parts")
    begin = {name: value.clone() for name, value in whole.weights().items()}
    whole.train()
    step_of, first._step = first._step, killed
    with pytest.raises(SystemExit):
        first.train()
    second = again("parts", resume=True)
    assert second.state.step == last - last % 3 and second.train().finished
    for file in ("model.safetensors", "optimizer.bin"):
        ours, theirs = ((each.folder / "checkpoint-0000011" / file).read_bytes() for each in (whole, second))
        assert ours == theirs
    learnt = load_file(whole.folder / "checkpoint-0000011" / "model.safetensors")
    assert any(not torch.equal(value, begin[name]) for name, value in learnt.items() if name in begin)
    ours, theirs = ([{**line, "seconds": 0, "tokens_per_second": 0} for line in Journal.read(each.folder)] for each in (whole, second))
    assert ours == theirs and [line["step"] for line in ours if "alpha" in line and "alphas" in line] == [0, 4, 8, 11]
    left = [[path.name for path in each.folder.glob("written-*")] for each in (whole, second)]
    assert left == [["written-00002.safetensors"]] * 2, "texts of windows that the last checkpoint is past are deleted"


TOGETHER = """
import sys
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[3])
from test_drafts import run
trained = run(Path(sys.argv[1]), Path(sys.argv[2]), steps=4, evaluate_every=2, on_policy=0.5, rewrite_every=2)
assert trained.accelerator.num_processes == 2
trained.train()
weights = trained.weights()
if trained.accelerator.is_main_process:
    torch.save(weights, trained.folder / "weights.pt")
trained.accelerator.end_training()
"""


@pytest.mark.nightly
def test_two_processes_learn_what_one_does_from_twice_the_batch(place, tmp_path):
    done = in_a_process(TOGETHER, str(place), str(tmp_path / "two"), str(Path(__file__).parent), processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    one = run(place, tmp_path / "one", steps=4, evaluate_every=2, on_policy=0.5, rewrite_every=2, accumulate=2)
    one.train()
    theirs = torch.load(tmp_path / "two" / "weights.pt")
    for name, value in one.weights().items():
        torch.testing.assert_close(theirs[name], value, atol=2e-5, rtol=1e-4)


def test_texts_that_a_lost_run_left_are_not_read(place, tmp_path):
    first = run(place, tmp_path, on_policy=1.0, rewrite_every=4, steps=1)
    file = first.continuations.file(0)
    first.continuations.write(0)
    before = file.read_bytes()
    file.write_bytes(b"nothing")
    run(place, tmp_path, on_policy=1.0, rewrite_every=4, steps=1).train()
    assert file.read_bytes() == before


# -- what comes of it ------------------------------------------------------------------------------------------------------


QUICK = "--steps 8 --batch-tokens 96 --warmup 2 --evaluate-every 4 --held-out 4 --answer-tokens 6 --learning-rate 0.01 --precision float32"


def train(place, out, *more, draft="draft", data=None):
    draft = draft if draft.startswith("target[") else str(place / draft)
    arguments = ["train", "draft", "--target", str(place / "target"), "--data", str(data or place / "data"), "--out", str(out)]
    done = CliRunner().invoke(app, [*arguments, "--draft", draft, *QUICK.split(), *more])
    return done, " ".join(done.output.replace("│", " ").split())


@pytest.fixture
def priced(monkeypatch):
    """What passes cost is not measured, which takes two seconds."""
    monkeypatch.setattr(Prices, "measured", lambda model, draft: Prices(1.0, (1.2, 1.4, 1.6, 1.8, 2.0), "eager"))


LORA = ("--backbone", "lora", "--learning-rate", "0.1")


NIGHTLY = [pytest.param(more, marks=pytest.mark.nightly) for more in ((), ("--on-policy", "0.5", "--rewrite-every", "6"))]


@pytest.mark.parametrize("more", [LORA, *NIGHTLY])  # whole weights are trained below
def test_a_plain_checkpoint_and_a_report_come_of_it(place, tmp_path, more, priced):
    done, said = train(place, tmp_path, *more)
    assert done.exit_code == 0, done.output
    ours, before = AutoModelForCausalLM.from_pretrained(tmp_path), model(1, layers=1, width=16).state_dict()
    assert ours.state_dict().keys() == before.keys() and not (tmp_path / "adapter_config.json").exists()
    assert any(not torch.equal(value, before[name]) for name, value in ours.state_dict().items())
    lines = [line for line in Journal.read(tmp_path / "run") if "alphas" in line]
    best = max(lines, key=lambda line: line["acceptance_length"])
    assert best["step"] and best["alpha"] > lines[0]["alpha"] + 0.01, "nothing was learnt"
    assert f"the draft of step {best['step']}; use --target {place / 'target'} --drafter draft-model:{tmp_path}" in said
    assert f"α = 1 - E[TV] {lines[0]['alpha']:.3f} → {best['alpha']:.3f}" in said
    for name in ("greedy", "sampled"):
        assert f"{name} {lines[0][f'{name}_length']:.3f} → {best[f'{name}_length']:.3f}" in said and f"predicted speed, {name}" in said
    target, prompt = load_model(str(place / "target")), torch.tensor([Texts(place / "data").prompt(0)])
    found = Speculator(target, ours, shape="chain(3)").generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
    plain = target.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert found.sequences.tolist() == plain.tolist()
    again, said = train(place, tmp_path, *more)
    assert again.exit_code == 2 and "--resume" in said


def test_a_draft_that_nothing_made_better_is_handed_out_as_it_was(place, tmp_path):
    """The whole target is its own best draft."""
    done, said = train(place, tmp_path, "--learning-rate", "1", "--steps", "2", "--evaluate-every", "2", draft="target[0,1,2]")
    assert done.exit_code == 0, done.output
    assert "the draft is as large as the target" in said and "the draft as it was: no step made it better" in said
    assert "α = 1 - E[TV] 1.000 → 1.000" in said and "distilling gained nothing that 4 held-out texts can show" in said
    ours = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(value, ours[name]) for name, value in model().state_dict().items())


def test_a_draft_from_scratch(place, tmp_path):
    model(1, layers=1, width=16).config.save_pretrained(tmp_path / "config")
    for source in (tmp_path / "config", tmp_path / "config" / "config.json"):
        trained = run(place, tmp_path / f"run-{source.name}", draft=str(source))
        assert trained.trained.num_parameters() == model(1, layers=1, width=16).num_parameters()
        again = run(place, tmp_path / f"again-{source.name}", draft=str(source))
        assert all(torch.equal(value, again.weights()[name]) for name, value in trained.weights().items())


def test_expected_acceptance_is_that_of_rounds():
    """Greedy rounds follow from the text alone; of sampled ones there is a mean."""
    target, draft = model(), model()
    with torch.no_grad():
        for index, weight in enumerate(draft.parameters()):
            weight += 0.03 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(index))
    chance = random.Random(0)
    prompts = [[chance.randrange(VOCABULARY) for _ in range(5)] for _ in range(24)]
    head = Draft(DraftConfig(shape_of(target), recipe=Distilling("draft")), draft)
    expected = DraftHeld(prompts, 40).measure(target, head)
    greedy, sampled = (Held(prompts, 40, temperature=each, rule="rejection").measure(target, head) for each in (0.0, 1.0))
    assert 1.2 < expected.sampled < 4 and 1.2 < expected.greedy < 4, "the draft must be neither right nor wrong"
    assert expected.greedy == pytest.approx(greedy.acceptance_length, rel=0.02)
    assert expected.by_depth == pytest.approx(greedy.by_depth, abs=0.03)
    assert expected.sampled == pytest.approx(sampled.acceptance_length, rel=0.1)
    assert expected.acceptance_length == (expected.greedy + expected.sampled) / 2
    assert len(expected.greedy_lengths) == len(prompts) and fmean(expected.greedy_lengths) == pytest.approx(expected.greedy, rel=0.1)


def test_predicted_speed_is_tokens_over_cost():
    prices = Prices(1.0, (1.25, 1.5, 3.0), "native")
    assert prices.speed([0.8, 0.6, 0.5]) == (pytest.approx(2.4 / 1.5), 2)
    line = {"alphas": [0.5, 0.6], "alpha": 0.55, "agreement": 0.5, "greedy_length": 2.0, "sampled_length": 2.0}
    line |= {"accepted_by_depth": [0.8, 0.6, 0.5], "accepted_by_depth_sampled": [0.4, 0.2, 0.1], "greedy_lengths": [1.9, 2.1]}
    better = {**line, "alphas": [0.55, 0.651], "alpha": 0.6, "accepted_by_depth": [1, 1, 1]}
    said = " ".join(compared(line, better, prices, 1.0))
    assert "greedy, one row, native: 1.60 → 2.00 times plain decoding, chain of 2" in said and "gained nothing" not in said
    worse = {**line, "alphas": [0.9, 0.3]}
    assert "gained nothing" in " ".join(compared(line, worse, prices, 1.0))
    assert "gained nothing" in " ".join(compared(line, {**worse, "greedy_lengths": [2.9, 1.2]}, prices, 1.0))
    greedy = " ".join(compared(line, {**worse, "greedy_length": 2.4, "greedy_lengths": [2.3, 2.5]}, prices, 1.0))
    assert "greedy 2.000 → 2.400 (+0.400 ± 0.000, mean of texts)" in greedy and "gained nothing" not in greedy


@needs_kernels
def test_costs_are_those_of_models_that_are_loaded_by_name(place):
    """Packed weights replace the target's for as long as it is measured."""
    target = load_model(str(place / "target"))
    before = {name: value.clone() for name, value in target.named_parameters()}
    by_name = Speculator(str(place / "target"), f"draft-model:{place / 'draft'}", shape="chain(1)")
    prices = Prices.measured(target, str(place / "draft"))
    assert prices.execution == by_name.target.execution != "eager" and len(prices.rounds) == DEPTH and min(prices.plain, *prices.rounds) > 0
    assert all(torch.equal(value, before[name]) for name, value in target.named_parameters()), "the target is as it was"
    assert not any("forward" in vars(module) for module in target.modules())
    head = MedusaHead.for_target(target, heads=2)
    assert costs(head, target)[1] == by_name.target.execution
    assert all(torch.equal(value, before[name]) for name, value in target.named_parameters())


# -- bad input -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"draft": ""}, "Pass --draft"),
        ({"positions": "some"}, "unknown positions 'some'"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"on_policy": 1.5}, "a share from 0 to 1"),
        ({"rewrite_every": 0}, "rewrite_every must be at least 1"),
        ({"stored_probabilities": True, "on_policy": 0.5}, "leave --on-policy and --teacher-texts out"),
        ({"stored_probabilities": True, "teacher_texts": True}, "leave --on-policy and --teacher-texts out"),
        ({"stored_probabilities": True, "temperature": 0.7}, "those of temperature 1"),
        ({"loss": "kl"}, "unknown loss 'kl'"),
        ({"draft": "target[0,3]"}, "layers from 0 to 2"),
        ({"draft": "target[1,0]"}, "ascending order"),
        ({"draft": "target[first]"}, "cannot read 'target[first]'"),
        ({"draft": "none.json"}, "there is no configuration"),
        ({"unknown": 1}, "no option 'unknown'"),
    ],
)
def test_bad_settings(given, message):
    with pytest.raises(ConfigurationError) as found:
        Draft.for_target(model(), **{"draft": "target[0]", **given})
    assert message in str(found.value)


@pytest.fixture(scope="module")
def bare(place):
    """Whole texts: prompts with nothing behind them."""
    make_data(place / "bare", model=load_model(str(place / "target")), max_new_tokens=0)
    return place / "bare"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--on-policy", "0.5", "--count-prompts"), "pass --prompt-tokens N"),
        (("--teacher-texts", "--count-prompts"), "pass --prompt-tokens N"),
        (("--stored-probabilities", "--prompt-tokens", "4"), "leave --prompt-tokens or"),
        (("--head-option", "heads=2"), "--head-option is for heads, not for draft"),
        (("--dropout", "0.2"), "--dropout is for layerskip, not for draft"),
        (("--backbone", "frozen"), "pass --backbone full, or lora"),
        (("--temperature", "0"), "temperature must be above 0"),
        ((), "the texts are prompts without answers"),
    ],
)
def test_bad_input(place, bare, tmp_path, more, message):
    done, said = train(place, tmp_path / "out", *more, data=bare)
    assert done.exit_code == 2 and message in said, done.output


def test_probabilities_that_were_not_stored(place, tmp_path):
    make_data(tmp_path / "data", model=load_model(str(place / "target")), max_new_tokens=4)
    done, said = train(place, tmp_path / "out", "--stored-probabilities", data=tmp_path / "data")
    assert done.exit_code == 2 and "has no stored probabilities" in said, done.output


def test_whole_texts_get_prompts(place, bare, tmp_path, priced):
    done, said = train(
        place, tmp_path / "out", "--prompt-tokens", "4", "--on-policy", "1", "--steps", "2", "--evaluate-every", "2", data=bare
    )
    assert done.exit_code == 0 and "the draft" in said, done.output


def test_other_kinds_refuse_the_options_of_drafts(place, tmp_path):
    arguments = ["train", "medusa", "--target", str(place / "target"), "--data", str(place / "data"), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*arguments, "--loss", "fkl"])
    assert done.exit_code == 2 and "--loss is for draft, not for medusa" in " ".join(done.output.replace("│", " ").split())


def test_another_vocabulary_and_the_draft_as_out_are_refused(place, tmp_path):
    config = LlamaConfig(vocab_size=4096, hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "other")
    done, said = train(place, tmp_path / "out", draft=str(tmp_path / "other"))
    assert done.exit_code == 2 and "does not share the target's vocabulary" in said
    done, said = train(place, place / "draft")
    assert done.exit_code == 2 and "is the model that is to be trained" in said
    done, said = train(place, place / "target")
    assert done.exit_code == 2 and "is the target" in said
    assert not (Path(place) / "draft" / "run").exists()
