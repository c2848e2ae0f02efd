"""``foredraft theory``: the paper's numbers, the rule that is not exact, what is drawn and written, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foredraft import theory
from foredraft.cli import app
from foredraft.cli.plots import Curve, Plot, text_of
from foredraft.cli.theory import Setting, figures, read_cells
from foredraft.errors import ConfigurationError

DOCS = Path(__file__).parents[2] / "docs"
CELL = {
    "target": "t",
    "draft": "draft-model:d",
    "task": "code",
    "temperature": 0.0,
    "gamma": 4,
    "alpha": {"value": 0.75, "low": 0.7, "high": 0.8},
    "c": 0.0804,
    "c_operations": 0.01,
    "tokens_per_pass": 3.1,
    "speedup": {"value": 2.25, "low": 2.0, "high": 2.5},
    "operations": 1.6,
}


def cli(*arguments):
    return CliRunner().invoke(app, ["theory", *map(str, arguments)], prog_name="foredraft")


def written(path: Path, **document) -> Path:
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    ("alpha", "gamma", "operations", "speed"),
    [(0.6, 2, 1.53, 1.96), (0.7, 3, 1.58, 2.53), (0.8, 2, 1.23, 2.44), (0.8, 5, 1.63, 3.69), (0.9, 2, 1.11, 2.71), (0.9, 10, 1.60, 6.86)],
)
def test_table_1_of_the_paper(alpha: float, gamma: int, operations: float, speed: float):
    """Leviathan, Kalman and Matias 2023, at c = ĉ = 0."""
    assert theory.operations(alpha, gamma, 0) == pytest.approx(operations, abs=5e-3)
    assert theory.speedup(alpha, gamma, 0) == theory.expected_tokens(alpha, gamma) == pytest.approx(speed, abs=5e-3)


def test_other_values():
    assert theory.speedup(0.2, 3, 0) == pytest.approx(1.248)  # the paper's bigram model
    assert theory.speedup(0.8, 4, 0.1) == pytest.approx((1 - 0.8**5) / (0.2 * 1.4))
    assert theory.operations(0.8, 4, 0.1) == pytest.approx(0.2 * (4 * 0.1 + 5) / (1 - 0.8**5))
    assert theory.calls(0.8, 4, 1000) == pytest.approx(1000 * 0.2 / (1 - 0.8**5))
    assert theory.expected_tokens(0, 5) == theory.expected_tokens(0.5, 0) == 1
    assert theory.expected_tokens(theory.below_one(1.0), 5) == pytest.approx(6)


@pytest.mark.parametrize(("alpha", "c"), [(0.3, 0.3), (0.3, 0.31), (0.7, 0.05), (0.9, 0.02)])
def test_the_best_length(alpha: float, c: float):
    """Drafting pays exactly where α > c, by (1 + α) / (1 + c) at least (the paper's Corollary 3.9)."""
    best = theory.best_gamma(alpha, c)
    around = [theory.speedup(alpha, gamma, c) for gamma in range(best + 9)]
    assert max(around) == around[best] and (best > 0) == (alpha > c)
    assert around[best] >= min((1 + alpha) / (1 + c), 1) and (not best or around[best] >= (1 + alpha) / (1 + c))


def test_work_with_and_without_a_cache():
    """Plain decoding, counted pass by pass; and a draft of two tokens that is never accepted."""
    plain = {cached: theory.work(0, 0, prompt=7, tokens=5, cached=cached) for cached in (False, True)}
    assert plain[False].target_tokens == sum(range(7, 12)) and plain[True].target_tokens == 7 + 4
    assert plain[False].target_passes == 5 and plain[True].draft_tokens == plain[False].draft_passes == 0
    drafted = theory.work(0, 2, prompt=7, tokens=5, cached=False)
    assert drafted.target_tokens == sum(length + 2 for length in range(7, 12)) and drafted.draft_passes == 10
    assert drafted.draft_tokens == sum(length + length + 1 for length in range(7, 12))
    cached = theory.work(0, 2, prompt=7, tokens=5, cached=True)
    assert cached.target_tokens == (7 + 2) + 4 * 3 and cached.draft_tokens == (7 + 1) + 4 * 2
    assert cached.seconds(1, 0.1, 0.5) == pytest.approx(5 + 2.1 + 0.5 * (10 + 1.6))


def test_rules_by_enumeration(tmp_path: Path):
    """Independent samples agree one time in a hundred; drawing anew after a mismatch gives 11/27 in place of 1/3."""
    result = cli("--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    found = {(each["rule"], each["drawn"]): each for each in json.loads((tmp_path / "out.json").read_text())["rules"]}
    wrong = found.pop(("draw anew", "iid"))
    assert wrong["first"] == pytest.approx(11 / 27, abs=1e-12) and not wrong["exact"]
    assert {rule for rule, _ in found} == {"match", "rejection", "block", "multi-candidate", "k-seq", "traversal"}
    assert all(each["first"] == pytest.approx(1 / 3, abs=1e-12) and each["exact"] for each in found.values())
    compared = found.pop(("match", "iid"))
    assert compared["accepted_uniform"] == pytest.approx(0.01) and compared["accepted"] == wrong["accepted"] == pytest.approx(4 / 9)
    assert all(each["accepted_uniform"] == pytest.approx(1) and each["accepted"] == pytest.approx(2 / 3) for each in found.values())
    for block in re.findall(r"```text\n(.*?)```", (DOCS / "theory.md").read_text(), re.S):
        assert {line.rstrip() for line in block.splitlines()} <= {line.rstrip() for line in result.stdout.splitlines()}


def test_measured_points_lie_on_the_curves_of_their_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("foredraft.cli.theory.rules", list)
    report = written(
        tmp_path / "r.json", report="table", cells=[CELL, {**CELL, "gamma": 2, "alpha": {"value": 1.0}}, {**CELL, "c": 0.0796}]
    )
    result = cli("--with", report, "--plots", tmp_path / "plots", "--json", tmp_path / "o.json")
    assert result.exit_code == 0, result.output
    assert "t, draft-model:d  code, temperature 0" in result.stdout and "3.10 / 3.05" in result.stdout and "2.25 / 2.31" in result.stdout
    assert "b γ 4, c 0.08" in result.stdout and "γ 10" not in result.stdout.split("Best γ")[0].split("Expected tokens")[1]
    points = {plot.name: {each.label: each.measured for each in plot.curves} for plot in figures(Setting(), read_cells(report))}
    assert points["speedup"] == {"γ 2, c 0.08": [(1.0, 2.25)], "γ 4, c 0.08": [(0.75, 2.25)] * 2}
    assert points["calls"] == {"γ 2": [(1.0, 1000 / 3.1)], "γ 4": [(0.75, 1000 / 3.1)] * 2}
    first, second, _ = json.loads((tmp_path / "o.json").read_text())["measured"]
    assert first["predicted"]["speedup"] == pytest.approx(theory.speedup(0.75, 4, 0.0804)) and second["predicted"]["tokens_per_pass"] == 3
    names = {path.stem for path in (tmp_path / "plots").iterdir() if path.read_bytes().startswith(b"\x89PNG")}
    assert names == {"tokens", "speedup", "operations", "calls", "best-gamma", "tokens-read", "seconds"}
    assert (
        names
        == set(re.findall(r"\(theory/([\w-]+)\.png\)", (DOCS / "theory.md").read_text()))
        == {path.stem for path in (DOCS / "theory").iterdir()}
    )


def test_a_value_that_is_given_twice_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("foredraft.cli.theory.rules", list)
    given = ["--alpha", 0.5, "--gamma", 2, "--c", 0.1]
    result = cli(*given, *given, "--json", tmp_path / "o.json")
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "o.json").read_text())
    assert len(document["chains"]) == len(document["best"]) == 1 and len(document["cache"]) == 4
    assert "operations  c 0.1\n" in result.stdout


def test_a_curve_in_a_terminal():
    lines = text_of(Plot("x", "", "α", "speed", [Curve("one", [(0, 1), (1, 3)], [(0.5, 2)]), Curve("two", [(0, 3)])])).splitlines()
    assert lines[1].startswith("       3 │b") and lines[1].endswith("a") and lines[14].startswith("       1 │a")
    assert any("A" in line for line in lines[7:9]) and lines[-1].strip() == "a one   b two"


@pytest.mark.parametrize("alpha", [-0.1, 1.0, 1.5, float("nan")])
def test_alpha_outside_its_range(alpha: float):
    with pytest.raises(ConfigurationError, match="α must be at least 0 and less than 1"):
        theory.expected_tokens(alpha, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--alpha 1", "α must be at least 0 and less than 1, got 1"),
        ("--gamma -1", "γ must not be negative, got -1"),
        ("--c -0.5", "c must be a number of at least 0, got -0.5"),
        ("--operations inf", "ĉ must be a number of at least 0, got inf"),
        ("--prompt 0", "must have at least 1 token each"),
        ("--pass-ms 0 --token-ms 0", "must be numbers, and not both 0"),
        ("--with none.json", "none.json is not readable JSON"),
        ("--with empty.json", "empty.json is not readable JSON"),
        ("--with other.json", "other.json is not a report of foredraft table"),
        ("--with bare.json", "bare.json has no cells"),
        ("--with broken.json", "broken.json is not a report of foredraft table: it lacks 'alpha'"),
        ("--with flat.json", "flat.json is not a report of foredraft table: 'float' object is not subscriptable"),
        ("--with null.json", "null.json is not a report of foredraft table: '<=' not supported between"),
        ("--with nan.json", "nan.json is not a report of foredraft table: speedup is nan"),
        ("--with above.json", "above.json is not a report of foredraft table: alpha is 1.5"),
        ("--with names.json", "names.json is not a report of foredraft table: string indices must be integers"),
        ("--plots other.json", "cannot write 'other.json'"),
        ("--json /none/out.json", "there is no folder '/none'"),
    ],
)
def test_what_cannot_work_is_refused(arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("foredraft.cli.theory.rules", list)
    (tmp_path / "empty.json").touch()
    written(tmp_path / "other.json", schema=1, candidates=[])
    written(tmp_path / "bare.json", report="table", cells=[])
    written(tmp_path / "broken.json", report="table", cells=[{name: value for name, value in CELL.items() if name != "alpha"}])
    written(tmp_path / "flat.json", report="table", cells=[{**CELL, "alpha": 0.75}])
    written(tmp_path / "null.json", report="table", cells=[{**CELL, "tokens_per_pass": None}])
    written(tmp_path / "nan.json", report="table", cells=[{**CELL, "speedup": {"value": float("nan")}}])
    written(tmp_path / "above.json", report="table", cells=[{**CELL, "alpha": {"value": 1.5}}])
    written(tmp_path / "names.json", report="table", cells={"a": CELL})
    result = cli(*arguments.split())
    assert result.exit_code == 2 and message in result.output.replace("\n", " "), result.output
