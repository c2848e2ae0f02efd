"""What ``make gpu`` reports: each stage before the next one begins, failures as failures, skipped tests as failures, and that time ends."""

import json

import pytest
import torch
from helpers import tiny

from benchmarks import gpu
from benchmarks.gpu import main, run_stages


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


@pytest.mark.parametrize("skipped", [False, True])
def test_skipped_tests_have_not_passed(skipped, tmp_path, monkeypatch):
    """In a folder whose options are quiet, as those of this one are."""
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "-q"\nmarkers = ["cuda: needs a GPU"]\n')
    lines = ["import pytest", "@pytest.mark.cuda", "def test_first(): pass", "@pytest.mark.cuda", "def test_second():"]
    lines += ["    pytest.skip('needs a GPU')" if skipped else "    pass"]
    (tmp_path / "test_them.py").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    assert gpu.tests(60)["ok"] != skipped


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_fails_with_one_line(capsys):
    assert main() == 1
    said = capsys.readouterr()
    assert "CUDA device" in said.err and said.err.count("\n") == 1 and not said.out


def test_pages_are_timed_beside_one_block(monkeypatch):
    """On a CPU, where both have pages."""
    monkeypatch.setattr(gpu, "llama_1b", lambda dtype: tiny())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    for name, value in {"PROMPT": 90, "NEW": 4, "REPEATS": 2, "ROWS": (1, 2)}.items():
        monkeypatch.setattr(gpu, name, value)
    report = gpu.pages("eager")(60)
    assert report["ok"] and len(report["figures"]) == 6 and set(report["reasons"]) == {"block", "pages"}
    assert all(len(each["tokens_per_second"]) == 2 and each["ratio"] > 0 for each in report["figures"].values())
    late = gpu.pages("eager")(-1)
    assert not late["ok"] and all(each["ratio"] is None for each in late["figures"].values())


def test_prompts_of_several_rows_are_of_unequal_lengths():
    mask = gpu.prompts(3, torch.device("cpu"))["attention_mask"]
    assert mask.sum(1).tolist() == [gpu.PROMPT, gpu.PROMPT - 40, gpu.PROMPT - 80] and bool(mask[:, -1].all())
