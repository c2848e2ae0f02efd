"""The order of ``make gpu``: reports are on disk before the next stage begins, failures stay failures, and time ends."""

import json

import pytest
import torch

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


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_fails_with_one_line(capsys):
    assert main() == 1
    said = capsys.readouterr()
    assert "CUDA device" in said.err and said.err.count("\n") == 1 and not said.out
