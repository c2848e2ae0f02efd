"""The figures of the suite of learning while serving follow from its records."""

from __future__ import annotations

import pytest

from benchmarks.online import FROZEN, LEARNING, PLAIN, SHIFT, Alpha, Call, Online, Settings, timed_collecting


def run() -> Online:
    suite = Online(Settings(draft="a", other="b", seeds=1, tokens=30_000))
    for served in range(0, 30_000, 1000):
        version = served // 10_000
        seconds = {LEARNING: 1.0, FROZEN: 1.2, PLAIN: 2.0}
        text = served // 1000
        for side, each in seconds.items():
            if side == LEARNING or text % 4 == 0:
                slower = 1.0 if text % 4 == 0 else 3.0  # what the others did not write is not compared
                suite.calls.append(Call(SHIFT, 0, side, text, served, 1000, slower * each, version if side == LEARNING else 0, 0))
    suite.alphas = [Alpha("a", 0, 0, "A", 0.6), Alpha("a", 0, 0, "B", 0.4), Alpha("b", 0, 0, "A", 0.5), Alpha("b", 0, 0, "B", 0.5)]
    suite.alphas += [Alpha(LEARNING, 0, version, "B", 0.4 + 0.03 * version) for version in range(3)]
    suite.alphas.append(Alpha(LEARNING, 0, 2, "A", 0.57))
    suite.collecting = {"collecting": [0.001, 0.002, 0.003], "passes": [0.1, 0.2, 0.3]}
    return suite


def test_figures_follow_from_the_records_and_survive_a_document():
    suite = run()
    for each in (suite, Online.read(suite.document(command="", environment={}))):
        found = {figure.name.split(",")[0]: figure for figure in each.figures()}
        assert found["gap in α between the drafts of A and B"].spread.median == pytest.approx(0.1)
        assert found["share of the gap closed over tokens 15"].spread.median == pytest.approx(0.3)  # version 1
        assert found["share of the gap closed over tokens 15"].verdict == "missed"
        assert found["α back on A over what it was"].spread.median == pytest.approx(0.95)
        speeds = [figure.spread.median for figure in each.figures() if figure.spread and "tokens/s" in figure.name]
        assert speeds == pytest.approx([1.2, 2.0])
        assert found["host time of collecting"].spread.median == pytest.approx(0.01)
        curve = each.tables()[1].rows
        assert [row[1].split(" ")[0] for row in curve] == ["0.00", "0.00", "0.30", "0.30", "0.60", "0.60"]


def test_an_interrupted_run_keeps_what_was_measured(monkeypatch):
    def run_of(seed, texts):
        if seed:
            raise KeyboardInterrupt
        suite.alphas.append(Alpha("a", seed, 0, "B", 0.4))

    suite = Online(Settings(draft="a", other="b", layers=0))
    monkeypatch.setattr(suite, "_texts", dict)
    monkeypatch.setattr(suite, "_run", run_of)
    suite.run()
    assert len(suite.alphas) == 1 and [each.method for each in suite.failed()] == ["seed 1"]


@pytest.mark.nightly
def test_collecting_is_timed():
    assert all(seconds > 0 for each in timed_collecting(1).values() for seconds in each)
