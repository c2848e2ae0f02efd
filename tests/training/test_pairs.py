"""Targets with an encoder: they write texts behind sources, and heads learn on what their decoders make of these pairs."""

from __future__ import annotations

import copy
import json
import shutil

import numpy as np
import pytest
import torch
from encoder_decoders import START, build, save_t5
from helpers import prompts, tiny
from training_helpers import LENGTHS, make_data, trainer
from typer.testing import CliRunner

from foredraft.cli import app
from foredraft.errors import ConfigurationError
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.medusa import MedusaHead
from foredraft.models.features import LAST
from foredraft.training.acceptance import Held, calibrated, counted
from foredraft.training.batches import Order
from foredraft.training.data import Manifest, Texts, refuse_other_data, shard_file
from foredraft.training.features import Reader, store
from foredraft.training.journal import Journal

NAME = "t5 v1.1"
HEADS = {"medusa": (MedusaHead, {"heads": 2}), "eagle3": (Eagle3Head, {"steps": 2})}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs") / "data"
    make_data(folder, model=build(NAME), count=16, temperatures=(0.0,))
    return folder


def asked(count=16):
    return prompts([LENGTHS[index % len(LENGTHS)] for index in range(count)])


# -- what is written --------------------------------------------------------------------------------------------------------


def test_texts_are_what_the_target_writes_behind_its_sources(data, tmp_path):
    texts, model = Texts(data), build(NAME)
    assert [texts.prompt(index) for index in range(16)] == asked() and set(texts.prompt_lengths.tolist()) == {1}
    for index in range(3):
        expected = model.generate(torch.tensor([asked()[index]]), do_sample=False, max_new_tokens=16)
        assert texts[index].tolist() == expected[0].tolist()
    stopped = tmp_path / "data"
    shutil.copytree(data, stopped)
    shard_file(stopped, 1).unlink()
    make_data(stopped, model=model, count=16, temperatures=(0.0,))
    assert shard_file(stopped, 1).read_bytes() == shard_file(data, 1).read_bytes()
    for batch in (1, 4):
        make_data(tmp_path / str(batch), model=model, count=4, temperatures=(1.0,), batch=batch)
    assert shard_file(tmp_path / "1", 0).read_bytes() == shard_file(tmp_path / "4", 0).read_bytes()
    assert Texts(tmp_path / "1")[0].tolist() != texts[0].tolist()
    both = Texts.together([texts, Texts(stopped)])
    assert both.prompt(17) == asked()[1] and both.digest() != texts.digest()


def test_a_forced_token_begins_every_text(tmp_path):
    model = copy.deepcopy(build("bart"))
    model.generation_config.forced_bos_token_id = 9
    make_data(tmp_path, model=model, count=2, temperatures=(0.0,))
    texts = Texts(tmp_path)
    expected = model.generate(torch.tensor([asked()[1]]), do_sample=False, max_new_tokens=17)[0].tolist()
    assert texts[1].tolist() == expected and expected[:2] == [START, 9] and texts.prompt_lengths.tolist() == [2, 2]


def test_data_of_another_kind_is_refused(data, tmp_path):
    manifest = Manifest.read(data)
    refuse_other_data(manifest, build(NAME))
    with pytest.raises(ConfigurationError, match=r"has sources, and .* has no encoder to read them"):
        refuse_other_data(manifest, tiny(), other_target=True)
    with pytest.raises(ConfigurationError, match=r"has no sources, and .* has an encoder"):
        refuse_other_data(make_data(tmp_path / "texts", count=1), build(NAME), other_target=True)
    with pytest.raises(ConfigurationError, match="max_new_tokens must be at least 1"):
        make_data(tmp_path / "none", model=build(NAME), max_new_tokens=0)
    with pytest.raises(ConfigurationError, match="reads input_features"):
        make_data(tmp_path / "none", model=build("whisper"))
    nameless = copy.deepcopy(build(NAME))
    nameless.generation_config.decoder_start_token_id = nameless.config.decoder_start_token_id = None
    with pytest.raises(ConfigurationError, match="set its decoder_start_token_id"):
        make_data(tmp_path / "none", model=nameless)
    assert not (tmp_path / "none").exists()


# -- what is read -----------------------------------------------------------------------------------------------------------


def test_micro_batches_hold_texts_and_sources(data):
    texts = Texts(data)
    order = Order(texts, range(12), 96, 2, seed=4, longest=12)
    batches = order.epoch(0)
    assert sorted(member for batch in batches for member in batch.tolist()) == list(range(12))
    for batch in batches:
        tokens = order.tokens(batch)
        assert tokens.ids.numel() + tokens.source["input_ids"].numel() <= 96
        for row, member in enumerate(batch):
            read = tokens.source["input_ids"][row][tokens.source["attention_mask"][row].bool()]
            assert read.tolist() == texts.prompt(member)
    with pytest.raises(ConfigurationError, match="a text and its source have 29 tokens and --batch-tokens is 28"):
        Order(texts, range(12), 28, 1, seed=0)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_states_are_those_of_each_text_behind_its_own_source(data, name):
    texts, model = Texts(data), build(name)
    tokens = Order(texts, range(8), 512, 1, seed=0).tokens(np.arange(8))
    hidden, logits = Reader(model, [1, LAST])(tokens)
    for row in range(8):
        length = texts.lengths[row]
        given = {"input_ids": torch.tensor([texts.prompt(row)]), "decoder_input_ids": torch.tensor(texts[row].tolist())[None]}
        with torch.no_grad():
            alone = model(**given, output_hidden_states=True)
        torch.testing.assert_close(hidden[row, :length, 0], alone.decoder_hidden_states[1][0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model.lm_head(hidden[row, :length, 1]), alone.logits[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits[row, :length], alone.logits[0], rtol=1e-4, atol=1e-4)


# -- training ---------------------------------------------------------------------------------------------------------------


def fitted(data, folder, kind, **changed):
    cls, head = HEADS[kind]
    return trainer(data, folder, cls=cls, model=copy.deepcopy(build(NAME)), kind=kind, head=head, **changed)


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_learns_and_acceptance_grows(data, tmp_path, kind):
    held = Held([Texts(data).prompt(index) for index in range(4)], 16)
    run = fitted(data, tmp_path, kind, steps=30, batch_tokens=400, evaluate_every=30, held=held)
    before = held.measure(run.model, run.drafting).acceptance_length
    outcome = run.train()
    losses = [line["loss"] for line in Journal.read(tmp_path) if "loss" in line]
    assert max(losses[-4:]) < 0.8 * losses[0] and outcome.state.best_length > before + 0.2
    if kind == "medusa":
        counted(outcome.head, run.model, held, run.texts, run.order.members)
        tree = calibrated(outcome.head, run.model, held, nodes=3)
        assert tree.tree.nodes == 3 and tree.accuracies[0][0] > 0.3


@pytest.mark.parametrize("kind", ["medusa", pytest.param("eagle3", marks=pytest.mark.nightly)])
def test_a_run_that_was_stopped_ends_as_one_that_was_not(data, tmp_path, kind):
    whole, first = (fitted(data, tmp_path / each, kind, steps=6) for each in ("whole", "parts"))
    whole.train()
    first.report = lambda line: setattr(first, "_asked", line["step"] == 3)
    assert first.train().state.step == 4
    second = fitted(data, tmp_path / "parts", kind, steps=6, resume=True)
    assert second.train().finished
    ours, theirs = whole.weights(), second.weights()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_stored_hidden_states_are_those_behind_sources(data, tmp_path):
    folder = shutil.copytree(data, tmp_path / "texts")
    assert store(build(NAME), folder, [LAST], batch_tokens=60) == 2
    fresh, stored = (fitted(folder, tmp_path / str(way), "medusa", stored=way) for way in (False, True))
    part = next(fresh.order.read(step=0))[1][0]
    for ours, theirs in zip(stored.learner.reader(part), fresh.learner.reader(part)):
        torch.testing.assert_close(ours[part.valid], theirs[part.valid], atol=1e-4, rtol=1e-4)


def test_backbones_with_an_encoder_are_refused(data, tmp_path):
    with pytest.raises(ConfigurationError, match="a target with an encoder is not trained; leave --backbone out"):
        fitted(data, tmp_path, "medusa", backbone="full")


# -- the commands -----------------------------------------------------------------------------------------------------------


def command(*arguments, code=0):
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == code, done.output
    return done.stdout if code == 0 else done.stderr


def test_commands_refuse(tmp_path):
    save_t5(tmp_path)
    (tmp_path / "sources.txt").write_text("x = 1")
    making = ("data", "generate", tmp_path / "sources.txt", "--target", tmp_path, "--out", tmp_path / "texts")
    assert "leave --windows and --prompt-tokens out" in command(*making, "--prompt-tokens", "4", code=2)
    for kind in ("layerskip", "exit"):
        training = ("train", kind, "--target", tmp_path, "--data", tmp_path, "--out", tmp_path / "out")
        assert "is an encoder-decoder model, which is not taken here" in command(*training, code=2)


@pytest.mark.nightly
def test_the_commands(tmp_path):
    model, texts, out = tmp_path / "model", tmp_path / "texts", tmp_path / "head"
    save_t5(model)
    sources = tmp_path / "sources.jsonl"
    sources.write_text("".join(json.dumps({"text": f"x = add(x, y, {number})"}) + "\n" for number in range(12)))
    making = ("data", "generate", sources, "--target", model, "--out", texts, "--max-new-tokens", "6")
    assert "12 texts" in command(*making)
    facts = json.loads(command("data", "info", texts, "--json"))
    assert facts["answer_tokens"] == 72 and facts["prompt_tokens"] > 72 and facts["settings"]["sources"]
    assert "of sources" in command("data", "info", texts)
    training = ("train", "medusa", "--target", model, "--data", texts, "--out", out, "--head-option", "heads=2", "--steps", "1")
    small = ("--held-out", "2", "--answer-tokens", "4", "--batch-tokens", "200")
    command(*training, *small)
    drafting = ("generate", "--source", "x = add(x, y, 3)", "--target", model, "--temperature", "0", "--max-new-tokens", "6", "--json")
    drafted, plain = (json.loads(command(*drafting, "--drafter", each)) for each in (f"medusa:{out}", "none"))
    assert drafted["text"] == plain["text"] and drafted["stats"]["drafted"] > 0
