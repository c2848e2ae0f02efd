"""``foredraft train``: a head from a target by name and a folder of texts, and what is refused before anything is read."""

from __future__ import annotations

import errno
import json
import shutil

import pytest
import torch
from helpers import clone, tiny
from training_helpers import make_data
from typer.testing import CliRunner

from foredraft import Speculator
from foredraft.cli import app
from foredraft.heads import checkpoints
from foredraft.heads.ngram_log_odds import NgramLogOdds
from foredraft.loading import load_model
from foredraft.training.data import Texts
from foredraft.training.runs import alone_in


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A target on the disk and texts of it."""
    folder = tmp_path_factory.mktemp("place")
    clone(tiny()).save_pretrained(folder / "target")
    make_data(folder / "data", model=load_model(str(folder / "target")))
    return folder


def train(place, out, *more, kind="medusa"):
    arguments = ["train", kind, "--target", str(place / "target"), "--data", str(place / "data"), "--out", str(out)]
    arguments += ["--head-option", "heads=2", "--steps", "20", "--batch-tokens", "96", "--learning-rate", "0.02", "--warmup", "2"]
    arguments += ["--evaluate-every", "10", "--held-out", "4", "--answer-tokens", "12", "--precision", "float32"]
    return CliRunner().invoke(app, [*arguments, *more])


def test_a_head_is_trained_stored_with_its_tree_and_drafts(place, tmp_path):
    done = train(place, tmp_path, "--tree-nodes", "4")
    assert done.exit_code == 0, done.output
    assert "held out:" in done.stdout and f"use --drafter medusa:{tmp_path}" in done.stdout
    config = json.loads((tmp_path / "config.json").read_text())["foredraft"]
    assert config["about"]["options"]["steps"] == 20 and config["about"]["steps"] == 20
    model = load_model(str(place / "target"))
    head = checkpoints.load(tmp_path, model)
    assert head.config.tree and f": {head.config.tree}" in done.stdout
    ids = torch.tensor([Texts(place / "data").prompt(0)])
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0)
    output = Speculator(model, f"medusa:{tmp_path}", shape=head.config.tree).generate(
        ids, max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    assert output.sequences.tolist() == plain.tolist() and output.stats.drafted > 0
    again = train(place, tmp_path, "--tree-nodes", "4")
    assert again.exit_code == 2 and "--resume" in again.stderr
    assert train(place, tmp_path, "--tree-nodes", "4", "--resume").exit_code == 0


@pytest.mark.parametrize(
    ("backbone", "file"),
    [
        ("lora", "adapter/adapter_model.safetensors"),
        pytest.param("full", "target/model.safetensors", marks=pytest.mark.nightly),
    ],
)
def test_a_changed_target_is_stored_and_said(place, tmp_path, backbone, file):
    done = train(place, tmp_path, "--backbone", backbone)
    assert done.exit_code == 0, done.output
    assert (tmp_path / file).exists() and "has its output distribution, not that of" in done.stdout.replace("\n", " ")
    if backbone == "full":
        model = load_model(str(tmp_path / "target"))
        checkpoints.load(tmp_path, model)
        assert any(not torch.equal(weight, tiny().state_dict()[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--head-option", "haeds=2"), "no option 'haeds'"),
        (("--head-option", "heads"), "--head-option takes KEY=VALUE"),
        (("--precision", "int4"), "unknown precision"),
        (("--backbone", "some"), "unknown backbone"),
        (("--backbone-rate", "1e-5"), "--backbone-rate is for --backbone lora or full; pass that, or leave it out"),
        (("--backbone", "full", "--lora-rank", "4"), "--lora-rank is for --backbone lora; pass that, or leave it out"),
        (("--held-out-data", "/nowhere"), "holds no data"),
        (("--data", "/nowhere"), "holds no data"),
    ],
)
def test_refusals_come_by_name(place, tmp_path, more, message):
    done = train(place, tmp_path, *more)
    assert done.exit_code == 2 and message in done.stderr.replace("\n", " ")


def test_a_tree_is_for_heads_that_store_one(place, tmp_path):
    done = train(place, tmp_path, "--tree-nodes", "4", kind="eagle3")
    assert done.exit_code == 2 and "--tree-nodes is for medusa, hydra and rnn, not for eagle3" in done.stderr.replace("\n", " ")


def test_an_unknown_kind_and_texts_of_another_target(place, tmp_path):
    done = train(place, tmp_path, kind="medussa")
    assert done.exit_code == 2 and "unknown kind of head 'medussa', did you mean 'medusa'? Choose medusa" in done.stderr
    other = tmp_path / "other"
    shutil.copytree(place, other)
    model = clone(tiny())
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)
    model.save_pretrained(other / "target")
    done = train(other, tmp_path / "out")
    assert done.exit_code == 2 and "other weights" in done.stderr
    assert train(other, tmp_path / "out", "--other-target").exit_code == 0


def test_the_target_is_not_overwritten(place, tmp_path):
    folder = shutil.copytree(place, tmp_path / "place")
    before = (folder / "target" / "model.safetensors").read_bytes()
    done = train(folder, folder / "target")
    assert done.exit_code == 2 and "is the target: choose another folder" in done.stderr.replace("\n", " ")
    assert (folder / "target" / "model.safetensors").read_bytes() == before and not (folder / "target" / "run").exists()


def test_a_folder_that_cannot_be_made_is_said(place, tmp_path):
    (tmp_path / "file").touch()
    done = train(place, tmp_path / "file" / "out")
    assert done.exit_code == 2 and "cannot write" in done.stderr
    arguments = ["data", "generate", str(tmp_path / "text"), "--target", "zoo:python-8m", "--out", str(tmp_path / "file" / "out")]
    (tmp_path / "text").write_text("import os\n")
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2 and "cannot write" in done.stderr


def test_one_run_at_a_time_writes_to_a_folder(place, tmp_path, monkeypatch):
    with alone_in(tmp_path / "run"):
        done = train(place, tmp_path)
        assert done.exit_code == 2 and "another run is writing to" in done.stderr and "pgrep -af 'foredraft train'" in done.stderr
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]
        monkeypatch.setenv("RANK", "1")
        with alone_in(tmp_path / "run"):
            pass  # another process of the run that holds the lock
    monkeypatch.delenv("RANK")
    with alone_in(tmp_path / "run"):
        pass


def test_a_file_system_without_locks_refuses_nobody(tmp_path, monkeypatch):
    def missing(*given):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", missing)
    with alone_in(tmp_path / "run"):
        pass


def test_ngrams_of_held_out_texts_are_not_counted(place, tmp_path, monkeypatch):
    texts, counted, count = Texts(place / "data"), [], NgramLogOdds.count
    monkeypatch.setattr(NgramLogOdds, "count", lambda lines, *given, **named: counted.extend(lines) or count(lines, *given, **named))
    assert train(place, tmp_path, "--steps", "2").exit_code == 0
    assert [line.tolist() for line in counted] == [texts[index].tolist() for index in range(len(texts) - 4)]


def test_hidden_states_are_stored_and_read(place, tmp_path):
    folder = shutil.copytree(place, tmp_path / "place")
    done = CliRunner().invoke(app, ["data", "hidden", str(folder / "data"), "--target", str(folder / "target")])
    assert done.exit_code == 0 and "of 4 shards stored" in done.stdout, done.output
    assert train(folder, tmp_path / "out", "--stored-hidden").exit_code == 0


def test_texts_of_several_folders_and_without_answers(place, tmp_path):
    plain = str(tmp_path / "plain")
    make_data(tmp_path / "plain", count=8, model=load_model(str(place / "target")), max_new_tokens=0)
    both = train(place, tmp_path / "both", "--data", plain, "--count-prompts")
    assert both.exit_code == 0, both.output
    about = json.loads((tmp_path / "both" / "config.json").read_text())["foredraft"]["about"]
    assert [each["max_new_tokens"] for each in about["data"]] == [16, 0]
    assert "log-odds are stored with it" in both.stdout
    assert checkpoints.load(tmp_path / "both", load_model(str(place / "target"))).log_odds is not None
    without = train(place, tmp_path / "without", "--no-successors")
    assert without.exit_code == 0 and not (tmp_path / "without" / "successors").exists()
    stored = train(place, tmp_path / "stored", "--data", plain, "--stored-hidden")
    assert stored.exit_code == 2 and "single --data folder" in stored.stderr
    arguments = ["train", "medusa", "--target", str(place / "target"), "--data", plain, "--out", str(tmp_path / "none"), "--held-out", "2"]
    nothing = CliRunner().invoke(app, arguments)
    assert nothing.exit_code == 2 and "--count-prompts" in nothing.stderr
