"""The busy suite: what it makes of its measurements, and a run."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from benchmarks import busy, report
from benchmarks.cli import app


def test_its_figures_compare_turn_by_turn():
    run = busy.Busy(busy.Settings(nodes="1"))
    for turn, slow in enumerate((1.0, 10.0, 2.0)):  # others slow a whole turn down
        for state, times in ((busy.QUIET, 1.0), (busy.LOOP, 2.0), (busy.ONE, 3.0), (busy.TWO, 6.0)):
            run.measurements.append(busy.Measurement(state, "1 node", "foredraft", turn, slow * times))
            run.measurements.append(
                busy.Measurement(state, "1 node", busy.SINGLE, turn, slow * times * (0.5 if state == busy.TWO else 2.0))
            )
            run.measurements.append(busy.Measurement(state, busy.DECODED, "openvino", turn, slow * 2.5))
            run.measurements.append(busy.Measurement(state, busy.DECODED, "foredraft", turn, slow * times))
    found = {figure.name: (figure.spread and figure.spread.median, figure.verdict) for figure in run.figures()}
    assert found["1 node, one busy loop: times as long as quiet"] == (2.0, "met")
    assert found["1 node, two torch loops: times as long as quiet"] == (6.0, "missed")
    assert found["1 node, one busy loop: speed over one thread's"] == (2.0, "met")
    assert found["1 node, two torch loops: speed over one thread's"] == (0.5, "missed")
    assert found["one busy loop: speed over openvino's"] == (1.25, "met")
    assert found["demo, quiet: seconds"] == (None, "not measured")


@pytest.mark.nightly
def test_a_run_names_the_peers_that_are_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(busy, "STATES", {busy.QUIET: [], busy.LOOP: ["while True: pass"]})
    monkeypatch.setattr(busy, "STARTING", 0.1)
    options = ["--target", "zoo:python-1m", "--turns", "1", "--seconds", "0.01", "--builds", "0", "--demos", "0", "--threads", "2"]
    result = CliRunner().invoke(app, ["busy", *options, "--peers", str(tmp_path / "none"), "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    found = report.load(tmp_path / "busy.json.gz")
    assert len(found["measurements"]) == 2 * 2 * 2 and found["missing"] == ["openvino", "vllm", "llamacpp"] and not found["failures"]
    assert "Not installed: openvino, vllm, llamacpp." in (tmp_path / "busy.md").read_text()
