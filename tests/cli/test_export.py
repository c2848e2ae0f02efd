"""``foredraft export`` and ``foredraft convert``: what they write, the command they print, and what they refuse."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from head_cases import make, says
from helpers import tiny
from safetensors.torch import load_file
from typer.testing import CliRunner

from foredraft import zoo
from foredraft.cli import app
from foredraft.cli.heads import serving
from foredraft.heads import checkpoints


def cli(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="foredraft")


def refused(*arguments) -> str:
    result = cli(*arguments)
    assert result.exit_code == 2, result.output
    return result.stderr


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """The tiny target as files, with a name that a shell would take apart."""
    folder = tmp_path_factory.mktemp("models") / "a target"
    tiny().save_pretrained(folder)
    return folder


def stored(name: str, folder: Path, target: Path) -> Path:
    """A head that remembers ``target``."""
    head = make(name)
    head.config = replace(head.config, target=replace(head.config.target, name=str(target)))
    return checkpoints.save(head, folder)


@pytest.mark.parametrize(
    ("name", "to", "method", "tokens"),
    [
        ("medusa", "vllm", "medusa", 3),
        ("medusa-shared", "vllm", "medusa", 2),
        ("medusa-low-rank", "vllm", "medusa", 2),
        ("medusa-biased", "medusa", "medusa", 2),
        ("eagle3", "vllm", "eagle3", 5),
        ("eagle3", "speculators", "eagle3", 5),
        ("eagle3-whole", "eagle3", "eagle3", 5),
    ],
)
def test_the_folder_holds_the_head_and_the_line_serves_it(tmp_path: Path, target: Path, name, to, method, tokens):
    source, out = stored(name, tmp_path / "head", target), tmp_path / "out it goes"
    result = cli("export", source, "--to", to, "--out", out)
    assert result.exit_code == 0, result.output
    command = shlex.split(result.stdout.strip())
    assert command[:3] == ["vllm", "serve", str(target)] and command[3] == "--speculative-config"
    assert json.loads(command[4]) == {"method": method, "model": str(out), "num_speculative_tokens": tokens}
    back = checkpoints.load(out, tiny())
    assert torch.allclose(says(back), says(make(name)), atol=1e-5)
    if to == "vllm":  # nothing is left for the engine to guess
        names = set(load_file(out / "model.safetensors"))
        assert {"lm_head.weight", "lm_heads.0.weight"} & names
    config = json.loads((out / "config.json").read_text())
    verifier = config.get("speculators_config", {}).get("verifier", {}).get("name_or_path", config.get("base_model_name_or_path"))
    assert verifier == (None if to == "eagle3" else str(target))


def test_options_of_export(tmp_path: Path, target: Path):
    source = stored("eagle3", tmp_path / "head", Path("elsewhere/model"))
    result = cli(
        "export", source, "--to", "vllm", "--out", tmp_path / "out", "--draft-length", "2", "--dtype", "bfloat16", "--target", target
    )
    assert json.loads(shlex.split(result.stdout.strip())[4])["num_speculative_tokens"] == 2
    assert load_file(tmp_path / "out" / "model.safetensors")["fc.weight"].dtype == torch.bfloat16
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(target)
    medusa = stored("medusa", tmp_path / "medusa", target)
    said = refused("export", medusa, "--to", "vllm", "--out", tmp_path / "x", "--draft-length", "2")
    assert "one token per head, here 3, not 2; leave --draft-length out" in said


def test_what_a_format_leaves_behind_is_said(tmp_path: Path, target: Path):
    head = make("medusa")
    head.config = replace(head.config, tree="product(2,1)", target=replace(head.config.target, name=str(target)))
    checkpoints.save(head, tmp_path / "head", about={"texts": 5})
    result = cli("export", tmp_path / "head", "--to", "vllm", "--out", tmp_path / "out")
    assert "note: the calibrated tree stays behind: vLLM drafts chains" in result.stderr and result.stdout.startswith("vllm serve")
    assert checkpoints.describe(tmp_path / "out")["about"] == {"texts": 5}


@pytest.mark.parametrize(("name", "kind"), [("hydra", "hydra"), ("rnn", "rnn")])
def test_heads_that_engines_do_not_have(tmp_path: Path, target: Path, name, kind):
    source = stored(name, tmp_path / "head", target)
    said = refused("export", source, "--to", "vllm", "--out", tmp_path / "out")
    assert f"vLLM has no {kind} heads; it has medusa and eagle3" in said
    said = refused("export", source, "--to", "medusa", "--out", tmp_path / "out")
    assert f"stores medusa heads, not {kind}" in said and not (tmp_path / "out").exists()


def test_refusals_of_export_name_the_fix(tmp_path: Path, target: Path):
    source = stored("medusa", tmp_path / "head", target)
    out = ("--out", tmp_path / "out")
    assert "unknown format 'gguf'; choose vllm, speculators, medusa, eagle3" in refused("export", source, "--to", "gguf", *out)
    assert "no such folder" in refused("export", tmp_path / "none", "--to", "vllm", *out)
    assert "choose vllm, medusa, foredraft" in refused("export", source, "--to", "speculators", *out)
    assert "has no revision 'v1'" in refused("export", source, "--to", "vllm", *out, "--revision", "v1")
    assert "is a file; a head is stored in a folder" in refused("export", source, "--to", "vllm", "--out", source / "config.json")
    before = {path: path.read_bytes() for folder in (source, target) for path in folder.iterdir()}
    assert "is the head itself: choose another folder" in refused("export", source, "--to", "vllm", "--out", source)
    assert "is the target: choose another folder" in refused("export", source, "--to", "vllm", "--out", target)
    assert {path: path.read_bytes() for folder in (source, target) for path in folder.iterdir()} == before
    config = json.loads((source / "config.json").read_text())
    del config["foredraft"]
    (source / "config.json").write_text(json.dumps(config))
    assert "load it with its target (--target)" in refused("export", source, "--to", "medusa", *out)
    assert cli("export", source, "--to", "medusa", *out, "--target", target).exit_code == 0
    shared = make("medusa-shared")
    shared.config = replace(shared.config, target=replace(shared.config.target, name=""))
    checkpoints.save(shared, tmp_path / "shared")
    assert "add --target" in refused("export", tmp_path / "shared", "--to", "vllm", *out)


def test_where_engines_find_embedded_targets(tmp_path: Path):
    head = make("medusa")
    line = serving(head, tmp_path, "zoo:python-8m", None)
    assert line.target == str(zoo.path("python-8m")) and not line.notes
    line = serving(head, tmp_path, "zoo:python-300m", None)
    assert line.target == "TARGET" and "z.load('zoo:python-300m').save_pretrained('TARGET')" in line.notes[0]
    head.config = replace(head.config, target=replace(head.config.target, name=""))
    assert "put it in place of TARGET" in serving(head, tmp_path, None, None).notes[0]


# -- convert --------------------------------------------------------------------------------------------------------------------


def pickled(folder: Path, name: str, contents) -> Path:
    """A published Medusa checkpoint of the older kind."""
    checkpoints.save(make("medusa-biased"), folder / "safe", format="medusa")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 2}))
    torch.save(contents(load_file(folder / "safe" / "medusa_lm_head.safetensors")), folder / name)
    return folder / name


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "pytorch_model.bin"])
def test_a_pickle_becomes_a_head(tmp_path: Path, name: str):
    file = pickled(tmp_path / "old", name, lambda tensors: tensors)
    result = cli("convert", file, "--out", tmp_path / "new")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{tmp_path / 'new'}: 10 tensors")
    assert torch.equal(says(checkpoints.load(tmp_path / "new", tiny())), says(make("medusa-biased")))


def test_tensors_that_share_memory_are_converted(tmp_path: Path):
    file = pickled(tmp_path / "old", "head.pt", lambda tensors: {**tensors, "1.2.weight": tensors["0.2.weight"]})
    assert cli("convert", file, "--out", tmp_path / "new").exit_code == 0
    head = checkpoints.load(tmp_path / "new", tiny())
    assert torch.equal(head.lm_heads[0].weight, head.lm_heads[1].weight)


class Harmful:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickles_that_hold_more_than_tensors(tmp_path: Path):
    harmful = pickled(tmp_path / "old", "head.pt", lambda tensors: {**tensors, "x": Harmful(tmp_path / "harm")})
    assert "holds more than tensors and is not read" in refused("convert", harmful, "--out", tmp_path / "new")
    assert not (tmp_path / "harm").exists() and not (tmp_path / "new").exists()
    nested = pickled(tmp_path / "old", "head.pt", lambda tensors: {"state_dict": tensors, "epoch": 3})
    assert "more than tensors: epoch, state_dict" in refused("convert", nested, "--out", tmp_path / "new")
    empty = pickled(tmp_path / "old", "head.pt", lambda tensors: [1, 2])
    assert "holds no tensors by name, but list" in refused("convert", empty, "--out", tmp_path / "new")
    empty.write_bytes(b"no pickle")
    assert "head.pt" in refused("convert", empty, "--out", tmp_path / "new")


def test_refusals_of_convert_name_the_fix(tmp_path: Path):
    assert "there is no file" in refused("convert", tmp_path / "none.pt", "--out", tmp_path / "new")
    file = pickled(tmp_path / "old", "head.pt", lambda tensors: tensors)
    assert "name the file in that folder" in refused("convert", tmp_path / "old", "--out", tmp_path / "new")
    (tmp_path / "old" / "config.json").rename(tmp_path / "elsewhere.json")
    assert "name it with --config FILE" in refused("convert", file, "--out", tmp_path / "new")
    assert cli("convert", file, "--out", tmp_path / "new", "--config", tmp_path / "elsewhere.json").exit_code == 0
