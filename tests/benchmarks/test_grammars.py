"""The grammars suite runs, and its report has a line for each library that is installed."""

import pytest
from typer.testing import CliRunner

from benchmarks import grammars, report
from benchmarks.cli import app


def test_the_grammars_suite_times_every_library(tmp_path):
    pytest.importorskip("outlines_core")
    result = CliRunner().invoke(app, ["grammars", "--repeats", "1", "--vocab-size", "0", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    document = report.load(tmp_path / "grammars.json.gz")
    run = grammars.Grammars.read(document)
    assert set(run.versions) == set(run.libraries) == {each.library for each in run.measurements}
    assert len(run.measurements) == len(run.libraries) * (1 + len(grammars.SHAPES))
    assert all(each.seconds > 0 for each in run.measurements)
    assert f"outlines {run.versions['outlines']}" in (tmp_path / "grammars.md").read_text()
