"""The distill suite: which cells it runs and goes on with, how it chooses, and that its figures follow from what was measured."""

import json
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import distill, report
from benchmarks.cli import app
from benchmarks.distill import (
    BEGUN,
    FULL,
    GREEDY,
    REFERENCE,
    SAMPLED,
    SHORT,
    TEST,
    VALIDATION,
    Answer,
    Cell,
    Distill,
    Settings,
    Timed,
    Trained,
)
from foredraft.errors import ConfigurationError

LK = "lk(3), λ = 0.5"


def rows(name, length, half, tokens_per_pass, *, seed=0):
    """Two prompts of ten passes each, alike: intervals have no width."""
    return [Answer(name, length, seed, half, t, prompt, round(10 * tokens_per_pass), 10) for t in (GREEDY, SAMPLED) for prompt in range(2)]


def measured():
    run = Distill(Settings(judged=2, losses=("fkl", "lk(3)"), shares=(0.0, 0.5)))
    for half in (VALIDATION, TEST):
        run.answers += rows(BEGUN, "", half, 2.0)
    for number, cell in enumerate(run.settings.grid):
        run.trained.append(Trained(cell.name, SHORT, 0, 10, 0.5, 0.5))
        run.answers += rows(cell.name, SHORT, VALIDATION, 2.1 + number / 10)
    for name, validation, test in ((REFERENCE, 2.2, 2.5), (LK, 2.3, 2.4)):
        for seed in range(2):
            run.trained.append(Trained(name, FULL, seed, 10, 0.5, 0.5))
            run.answers += [*rows(name, FULL, VALIDATION, validation, seed=seed), *rows(name, FULL, TEST, test, seed=seed)]
    for draft, seconds in ((BEGUN, 1.2), (LK, 1.0)):
        run.timings += [Timed(draft, t, prompt, 0, 10, seconds) for t in (GREEDY, SAMPLED) for prompt in range(2)]
    return run


def test_cells_are_chosen_on_validation_prompts_and_judged_on_test_prompts():
    run = measured()
    assert run.best(SHORT)[0] == LK and run.best(FULL) == [LK, REFERENCE]  # though the test prompts say otherwise
    values = [each.spread.median for each in run.figures()]
    assert values == pytest.approx([1.4, 1.4, 1.4 / 1.5, 1.2])
    assert [each.verdict for each in run.figures()] == ["met", "met", "missed", "met"]


def test_all_seeds_count_together():
    run = measured()
    run.answers += rows(LK, FULL, TEST, 4.4, seed=2)
    assert run.both(LK, FULL, TEST).value == pytest.approx((2 * 2.4 + 4.4) / 3 - 1)


def test_nothing_measured_is_said():
    run = Distill(Settings(judged=2))
    assert {each.verdict for each in run.figures()} == {"not measured"} and len(run.settings.grid) == 18
    assert len(Distill(Settings(losses=("lk",))).settings.grid) == 4  # fkl on given texts is always there


def test_a_document_brings_the_report_back(tmp_path):
    run = measured()
    path = tmp_path / "distill.json.gz"
    where = {"packages": {}, "commit": "", "dirty": False}
    report.save(path, run.document(command="", environment=where))
    again = Distill.read(report.load(path))
    assert [table.markdown() for table in again.tables()] == [table.markdown() for table in run.tables()]
    assert any(LK in row for table in run.tables() for row in table.rows)


@pytest.fixture
def faked(monkeypatch, tmp_path):
    """No model is loaded and none is trained; what was trained is noted."""
    trained = []
    monkeypatch.setattr(distill, "load_model", lambda *given, **named: None)
    monkeypatch.setattr(distill, "load_tokenizer", lambda *given: None)
    monkeypatch.setattr(Distill, "_texts", lambda self, *given: {VALIDATION: [[1], [1]], TEST: [[1], [1]]})
    monkeypatch.setattr(Distill, "_train", lambda self, cell, folder: trained.append((cell, folder.mkdir())))
    monkeypatch.setattr(distill, "outcome", lambda cell, folder: Trained(cell.name, cell.length, cell.seed, 1, 0.5, 0.5))
    for way in ("answered", "expected"):
        monkeypatch.setattr(distill, way, lambda name, length, seed, half, *_: rows(name, length, half, 2 + len(name) / 10, seed=seed))
    return lambda **given: (run := Distill(Settings(work=tmp_path / "work", judged=2, served="none", **given))).run() or (run, trained)


def test_a_run_goes_on_cell_by_cell(faked):
    small = {"losses": ("fkl", "lk(3)"), "shares": (0.0, 0.5), "seeds": 2}
    run, trained = faked(cells=3, **small)
    assert [each.length for each, _ in trained] == [SHORT] * 3 and len(run.trained) == 3
    run, trained = faked(**small)
    assert [each for each, _ in trained[:4]] == run.settings.grid
    assert len(trained) == 4 + 2 * 4 and {each.length for each, _ in trained[4:]} == {FULL}  # the best three, and fkl
    run, trained = faked(**small)
    assert len(trained) == 12 and len(run.trained) == 12, "a cell that is there was trained again"
    with pytest.raises(ConfigurationError, match="batch_tokens was 2048 and is now 4096"):
        faked(batch_tokens=4096, **small)


def test_names_of_cells_are_read_back():
    for cell in Settings().grid:
        assert distill.read(cell.name) == (cell.loss, cell.share)
    assert Cell(FULL, "jsd(0.5)", 0.5, 1).slug == "full-jsd0.5-0.5-1"


@pytest.mark.parametrize(("given", "says"), [(("--loss", "kl"), "unknown loss 'kl'"), (("--on-policy", "2"), "a share from 0 to 1")])
def test_bad_settings(tmp_path, given, says):
    done = CliRunner().invoke(app, ["distill", "--work", str(tmp_path), *given])
    assert done.exit_code == 2 and says in done.output


def test_what_was_measured_lies_in_the_folder_of_the_cell(faked, tmp_path):
    faked(losses=("fkl",), shares=(0.0,), full=0)
    document = json.loads((tmp_path / "work" / "short-fkl-0-0" / "measured.json").read_text())
    assert document["trained"]["cell"] == REFERENCE and len(document["answers"]) == 2 * 2 * 2 // 2


def test_both_drafts_write_with_the_same_seed_from_all_of_the_distribution():
    class Side:
        model = SimpleNamespace(device="cpu")

        def generate(self, ids, **asked):
            self.asked = asked
            return SimpleNamespace(sequences=torch.zeros(1, ids.shape[1] + 4))

    side = Side()
    assert distill.timed(side, [1, 2, 3], SAMPLED, 4, seed=7)[0] == 4
    wanted = {"do_sample": True, "temperature": 1.0, "top_k": 0, "seed": 7, "repeatable": False}
    assert side.asked.items() >= wanted.items()
    distill.timed(side, [1, 2, 3], GREEDY, 4, seed=7)
    assert side.asked["do_sample"] is False and "top_k" not in side.asked
