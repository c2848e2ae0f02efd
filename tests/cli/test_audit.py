"""``foredraft audit`` on the embedded models: what it prints, what it writes, how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foredraft import zoo
from foredraft.auditing import noise
from foredraft.cli import app

SMALL = ["--max-new-tokens", "12", "--threads", "1"]


@pytest.fixture(autouse=True)
def few_continuations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the part that tests the noise; how many it needs to find a fault is tested in tests/auditing."""
    monkeypatch.setattr(noise, "CONTINUATIONS", 512)
    monkeypatch.setattr(noise, "BATCH", 512)


def audit(*arguments: str):
    return CliRunner().invoke(app, ["audit", "zoo:python-1m", *SMALL, *arguments], prog_name="foredraft")


def test_an_exact_configuration_ends_well_and_is_written_down(tmp_path: Path):
    file = tmp_path / "audit.json"
    result = audit("--rule", "match", "--shape", "chain(5)", "--json", str(file))
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1].startswith("EXACT: rule 'match' with drafter 'prompt-lookup' and shape chain(5)")
    assert (
        "zoo:python-1m" in result.stdout
        and "greedy: 6 texts, 72 tokens" in result.stdout
        and "sampled with the same seeds" in result.stdout
    )
    document = json.loads(file.read_text())
    assert all(limit in result.stdout for limit in document["limits"])
    assert (
        document["complete"] is True
        and document["verdict"] == "exact"
        and document["exact"]["error"] < 1e-9
        and len(document["keyed"]) == 2
    )


def test_the_statistical_part_says_what_it_would_have_found(tmp_path: Path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("import os\ndef f(x):\n")
    result = audit(
        "--drafter", "draft-model:zoo:python-1m", "--rule", "block", "--shape", "chain(2)", "--samples", "160", "--prompts", str(prompts)
    )
    assert result.exit_code == 0, result.output
    assert "160 continuations" in result.stdout and "towards the draft's distribution" not in result.stdout.splitlines()[-1]
    assert "its samples could not have shown a bias" in result.stdout.splitlines()[-1], "of a draft that is the target"


def test_samples_that_test_nothing_do_not_say_exact():
    result = audit("--drafter", "draft-model:zoo:python-1m", "--rule", "block", "--shape", "chain(2)", "--samples", "2")
    assert result.exit_code == 1 and result.stdout.splitlines()[-1].startswith("INCONCLUSIVE: "), result.output
    assert "nothing could be tested by its samples: they are too few" in result.stdout


def test_what_was_checked_before_ctrl_c_is_shown_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("foredraft.auditing.keyed.check", interrupted)
    result = audit("--rule", "match", "--shape", "chain(2)", "--json", str(tmp_path / "audit.json"))
    assert result.exit_code == 130 and "interrupted" in result.stderr, result.output
    document = json.loads((tmp_path / "audit.json").read_text())
    assert document["complete"] is False and document["verdict"] == "inconclusive" and document["keyed"] == []
    assert document["exact"]["passed"] and document["noise"]["passed"]
    assert "error " in result.stdout and "no fault found, but the keyed part was interrupted" in result.stdout.splitlines()[-1]


def test_a_model_of_ones_own_has_prompts(tmp_path: Path):
    zoo.load("python-1m").save_pretrained(tmp_path)
    zoo.load_tokenizer("python-1m").save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["audit", str(tmp_path), *SMALL, "--part", "keyed", "--temperature", "0"], prog_name="foredraft")
    assert "greedy: 8 texts, 96 tokens" in result.stdout, result.output


def test_a_lossy_rule_is_no_exact_one():
    result = audit("--rule", "typical", "--part", "exact")
    assert result.exit_code == 1 and "LOSSY" in result.stdout and "FAULT" in result.stdout


def test_what_was_left_out_is_said():
    result = audit("--rule", "block", "--drafter", "draft-model:zoo:python-1m", "--part", "exact")
    assert result.exit_code == 1 and "INCONCLUSIVE" in result.stdout and "left out" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rule", "nonsense"], "unknown rule"),
        (["--shape", "star(3)"], "unknown shape"),
        (["--part", "guess"], "exact, noise, keyed, statistical"),
        (["--significance", "2"], "significance"),
        (["--rule", "block"], "not exact for"),
        (["--part", "exact", "--rule", "match", "--json", "{folder}/nowhere/file.json"], "cannot write"),
    ],
)
def test_what_can_not_work_is_refused(arguments: list[str], message: str, tmp_path: Path):
    result = audit(*(argument.format(folder=tmp_path) for argument in arguments))
    assert result.exit_code == 2 and message in result.stderr
