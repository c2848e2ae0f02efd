"""The suite of draft models with another tokenizer: what it makes of its calls, and a run."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner
from vocabularies import model, tokenizer

from benchmarks import report, tokenizers
from benchmarks.cli import app
from recipes.zoo.corpus import Corpus, SourceFile


def test_its_figures_count_with_one_target_and_time_with_another():
    settings = tokenizers.Settings(foreign="x", counted=2, timed=1, repeats=1, temperature=(0.0,))
    run = tokenizers.Tokenizers(settings)
    sides = {tokenizers.SAME: (20, 1.0), tokenizers.INTERSECTION: (12, 1.0), tokenizers.TEXT: (16, 2.0), tokenizers.TRANSFORMERS: (10, 2.5)}
    for side, (kept, seconds) in sides.items():
        run.calls += [tokenizers.Call(side, False, 0.0, prompt, 0, 10, kept, 4, 8, 99.0, 20.0) for prompt in range(2)]
        run.calls += [tokenizers.Call(side, True, 0.0, 0, 0, 10, 99, 4, 8, seconds, 0.0)]

    def found(what: str) -> list[tuple[float, str, str]]:
        return [
            (each.spread.median if each.spread else 0.0, each.how, each.verdict) for each in run.figures() if each.name.startswith(what)
        ]

    assert found("bytes per target pass over same tokenizer") == [(0.8, "text", "met")]
    assert found("tokens/s over transformers") == [(2.5, "intersection", "met"), (1.25, "text", "missed")]
    assert found("bytes per target pass over transformers") == [(1.6, "text", "met")]  # greedily transformers drafts by text
    run.calls = run.calls[:-1]
    assert [each[2] for each in found("tokens/s over transformers")] == ["not measured"] * 2
    assert len(run.tables()[0].rows) == 5
    run.calls.append(tokenizers.Call(tokenizers.TEXT, False, 0.0, 0, 1, 10, 16, 4, 8, 99.0, 20.0))  # one prompt failed in the second turn
    run.failures.append(tokenizers.Failure(tokenizers.TEXT, "temperature 0", "why"))
    assert found("bytes per target pass over transformers") == [(0.0, "text", "not measured")]
    assert found("bytes per target pass over same tokenizer") == [(0.6, "intersection", "missed")]


@pytest.mark.nightly
def test_a_run_of_all_sides(tmp_path):
    model("unigram", 1).save_pretrained(tmp_path / "draft")
    tokenizer("unigram").save_pretrained(tmp_path / "draft")
    text = "def area(width, height):\n    return width * height\n\n" * 20
    file = SourceFile("package", "file.py", text)
    Corpus([file], [file], {}).save(tmp_path / "corpus")
    options = ["--target", "zoo:python-8m", "--dtype", "float32", "--foreign", str(tmp_path / "draft"), "--quick", "--threads", "1"]
    given = [*options, "--corpus", str(tmp_path / "corpus"), "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["tokenizers", *given])
    assert result.exit_code == 0, result.output
    found = report.load(tmp_path / "tokenizers.json.gz")
    assert len(found["calls"]) == 5 * 3 * 2 + 2 and not found["failures"] and "intersection (another" in found["about"][0]
    assert all(each["drafts"] >= each["passes"] for each in found["calls"] if each["side"] == tokenizers.SAME)  # however they are made
    plain = {
        each["prompt"]: each["nats"] for each in found["calls"] if (each["side"], each["temperature"], each["timed"]) == ("plain", 0, False)
    }
    assert all(each["nats"] == plain[each["prompt"]] for each in found["calls"] if each["temperature"] == 0 and not each["timed"])
