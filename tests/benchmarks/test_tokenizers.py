"""The suite of draft models with another tokenizer: what it makes of its calls, and a run."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner
from vocabularies import model, tokenizer

from benchmarks import report, tokenizers
from benchmarks.cli import app


def test_its_figures_take_the_better_of_both_ways():
    run = tokenizers.Tokenizers(tokenizers.Settings(foreign="x", beginnings=2, temperature=(0.0,)))
    sides = {tokenizers.SAME: (20, 1.0), tokenizers.INTERSECTION: (12, 1.0), tokenizers.TEXT: (16, 2.0), tokenizers.TRANSFORMERS: (10, 2.5)}
    for side, (kept, seconds) in sides.items():
        run.calls += [tokenizers.Call(side, 0.0, prompt, 0, 10, kept, 4, 8, seconds) for prompt in range(2)]
    found = {figure.name: (figure.spread and figure.spread.median, figure.how, figure.verdict) for figure in run.figures()}
    assert found["bytes per target pass over same tokenizer, temperature 0"] == (0.8, "text", "met")
    assert found["tokens/s over transformers, temperature 0"] == (2.5, "intersection", "met")
    assert found["bytes per target pass over transformers, temperature 0"] == (1.6, "text", "met")
    run.calls = run.calls[:-1]
    assert {figure.name: figure.verdict for figure in run.figures()}["tokens/s over transformers, temperature 0"] == "not measured"


@pytest.mark.nightly
def test_a_run_of_all_sides(tmp_path):
    model("unigram", 1).save_pretrained(tmp_path / "draft")
    tokenizer("unigram").save_pretrained(tmp_path / "draft")
    options = ["--target", "zoo:python-8m", "--dtype", "float32", "--foreign", str(tmp_path / "draft"), "--quick", "--threads", "1"]
    result = CliRunner().invoke(app, ["tokenizers", *options, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    found = report.load(tmp_path / "tokenizers.json.gz")
    assert len(found["calls"]) == 5 * 2 * 2 and not found["failures"] and "intersection (another" in found["about"][0]
