"""Suites made from Python's own library: their formats, and that they hold what they are for."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from benchmarks import datasets, suites
from benchmarks.cli import app
from benchmarks.suite import plain
from foredraft.estimates import Spread


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("suites") / "new"
    counts = suites.write(made)
    assert set(counts) == set(suites.SUITES) and all(count >= 5 for count in counts.values())
    return made


def test_they_are_read_back_as_the_formats_they_are_in(folder):
    for name in suites.SUITES:
        prompts = datasets.read(str(folder / f"{name}.jsonl"))
        assert len({prompt.name for prompt in prompts}) == len(prompts)
        assert all(len(prompt.turns) == (2 if name == "chat" else 1) for prompt in prompts)
        assert {prompt.category for prompt in prompts} == {name}


def test_an_edit_goes_on_with_a_copy_in_which_a_name_is_changed(folder):
    for prompt in datasets.read(str(folder / "edit.jsonl")):
        before, after = prompt.turns[0].split("\n\n\n# The same code, in which ")
        name = after.split(" ")[0]
        begun = after.split(":\n\n", 1)[1].rstrip("\n").split("\n")
        assert [line.replace(f"new_{name}", name) for line in begun] == [line.rstrip("\n") for line in before.split("\n")[: len(begun)]]
        assert before.count(name) >= suites.USES


def test_a_chat_asks_again_for_what_was_answered(folder):
    for prompt in datasets.read(str(folder / "chat.jsonl")):
        first, second = prompt.turns
        again = first.rsplit(">>> help(", 1)[1]
        assert first.count(again) == 2 or first.count(again.split("\n")[0]) == 2
        assert second.strip() in first


def test_a_completion_ends_behind_a_docstring(folder):
    for prompt in datasets.read(str(folder / "completion.jsonl")):
        assert prompt.turns[0].rstrip().endswith(('"""', "'''", '"'))


def test_the_command(tmp_path):
    done = CliRunner().invoke(app, ["suites", "--out", str(tmp_path)])
    assert done.exit_code == 0 and "edit.jsonl: 12 prompts" in done.stdout


def test_an_interval_without_an_end_can_be_written_down():
    found = plain({"spread": Spread(1.5, 0.5, float("inf")), "shares": [float("nan"), 0.25]})
    assert json.loads(json.dumps(found, allow_nan=False)) == {"spread": {"median": 1.5, "low": 0.5, "high": None}, "shares": [None, 0.25]}
