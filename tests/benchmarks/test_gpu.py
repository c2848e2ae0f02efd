"""What ``make gpu`` reports: each stage before the next one begins, failures as failures, skipped tests as failures, and that time ends."""

import json

import pytest
import torch

from benchmarks import environment, gpu
from benchmarks.gpu import main, run_stages
from foredraft import zoo


def test_each_report_is_on_disk_before_the_next_stage_and_failures_stay(tmp_path):
    now, seen = [0.0], []

    def stage(name, seconds, ok=True):
        def run(left):
            seen.append((name, sorted(path.stem for path in tmp_path.iterdir())))
            now[0] += seconds
            if ok is None:
                raise RuntimeError("out of memory\nand a page of advice")
            return {"ok": ok}

        return run

    stages = {"a": stage("a", 10), "b": stage("b", 10, None), "c": stage("c", 60), "d": stage("d", 1)}
    assert not run_stages(stages, tmp_path, minutes=1.6, clock=lambda: now[0])
    assert seen == [("a", []), ("b", ["a"]), ("c", ["a", "b"])]
    reports = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in stages}
    assert [reports[name]["ok"] for name in stages] == [True, False, True, False]
    assert reports["b"]["reason"] == "RuntimeError: out of memory" and "not run" in reports["d"]["reason"]
    assert run_stages({"a": stage("a", 1)}, tmp_path, clock=lambda: now[0])


def test_exponentials_may_differ_in_their_last_bits_and_nothing_else():
    here = {"words": torch.tensor([1 << 40, 3]), "race": torch.tensor([5]), "exponentials": torch.tensor([0.3, 2.0])}
    rounded = {**here, "exponentials": torch.nextafter(here["exponentials"], torch.tensor(9.0))}
    assert all(gpu.alike(here, rounded).values())
    others = {"words": here["words"] + 1, "race": here["race"] + 1, "exponentials": here["exponentials"] * 1.001}
    assert not any(gpu.alike(here, others).values())


@pytest.mark.parametrize("skipped", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_skipped_tests_have_not_passed(skipped, tmp_path, monkeypatch):
    """In a folder whose options are quiet, as those of this one are."""
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "-q"\nmarkers = ["cuda: needs a GPU"]\n')
    lines = ["import pytest", "@pytest.mark.cuda", "def test_first(): pass", "@pytest.mark.cuda", "def test_second():"]
    lines += ["    pytest.skip('needs a GPU')" if skipped else "    pass"]
    (tmp_path / "test_them.py").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu, "WORKERS", 1)
    assert gpu.tests(60)["ok"] != skipped


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_fails_with_one_line(capsys):
    assert main([]) == 1
    said = capsys.readouterr()
    assert "CUDA device" in said.err and said.err.count("\n") == 1 and not said.out


@pytest.fixture
def small(monkeypatch):
    """On a CPU, with the models as they are."""
    monkeypatch.setattr(gpu, "models", lambda size: [zoo.load(name) for name in (zoo.TARGET, zoo.DRAFT)])
    monkeypatch.setattr(gpu, "wait_for", lambda device: None)
    monkeypatch.setattr(gpu, "describe", lambda device: environment.describe("cpu"))
    for name, value in {"NEW": 4, "REPEATS": 2, "WARM_UPS": 1, "PROMPTS": 1}.items():
        monkeypatch.setattr(gpu, name, value)
    monkeypatch.setitem(gpu.PLAN, "small", {1: ["plain, eager", "plain", "draft model", gpu.SAMPLED], 2: ["plain"]})


def test_methods_are_timed_in_turns_and_the_page_says_what_was_found(small, tmp_path):
    assert run_stages({"speed small": gpu.speed("small")}, tmp_path)
    figures = json.loads((tmp_path / "speed small.json").read_text())["figures"]
    assert len(figures) == (2 + 4) + (1 + 1)
    for name, each in figures.items():
        assert len(each["tokens_per_second"]) == 2 and each["over_transformers"] > 0, name
        rows = int(name[-1])
        alone = "temperature" in name or name.startswith("plain, rows")  # compared with nothing
        assert each.get("equal_texts") == (None if alone else [rows, rows])
        assert name.startswith("transformers") or (each["tokens_per_pass"] >= 1 and each["execution"] == "eager")
    text = gpu.page(tmp_path, ["speed small"]).markdown()
    assert "speed small: passed" in text and "| plain, eager, rows: 1 | eager |" in text


def test_a_stage_without_time_has_failed(small, tmp_path):
    report = gpu.speed("small")(-1)
    assert not report["ok"] and all(each["over_transformers"] is None for each in report["figures"].values())
    run_stages({"speed small": lambda left: report, "tests": lambda left: {"ok": False, "summary": "2 failed"}}, tmp_path)
    text = gpu.page(tmp_path, ["speed small", "tests"]).markdown()
    assert "tests: failed, 2 failed" in text and "| plain, rows: 1 | – | – | – |" in text


def test_batches_are_of_unequal_lengths():
    one, four = gpu.prompts(1, torch.device("cpu")), gpu.prompts(4, torch.device("cpu"))
    assert [len(each["input_ids"]) for each in (*one, *four)] == [1, 1, 4]
    assert len(set(four[0]["attention_mask"].sum(1).tolist())) == 4 and bool(four[0]["attention_mask"][:, -1].all())
