"""The suite ``memory``: what its worker counts, and what the report makes of records."""

import pytest
from kernel_cases import needs_kernels

from benchmarks.memory import PAGES, PRESENT, Count, FirstToken, Memory, MemorySettings, Turn
from benchmarks.memory_worker import PAGE, Worker, prefixes
from foredraft.errors import ConfigurationError


@pytest.fixture(scope="module")
def worker():
    return Worker("tiny", 1)


@needs_kernels
def test_the_worker_counts_what_is_held(worker):
    found = worker.trace(long=600, rows=3, common=150)
    assert 1 < found["ratio"] == found["held"] / found["distinct"] < 2
    found = worker.chat(pages=60, requests=12)
    assert 1 < found["rows"] <= found["most"] <= 12
    assert worker.churn(requests=40, settled=30)["held"] == 0
    few, enough = (worker.short(rows=6, share=share) for share in (0.4, 2.0))
    assert few["again"] >= 0 == enough["again"] and few["set_aside"] > 0 == enough["set_aside"]


@needs_kernels
def test_the_worker_times_rounds(worker):
    assert worker.behind(tokens=2 * 1024 + 5, nodes=16, rounds=2)["tokens"] == 2
    assert worker.kept[1].target.lengths == [2 * 1024 + 5]
    assert worker.batch(longest=40, rows=3, new=5, shape="none")["tokens"] == 3 * 4
    found = worker.first_token(shared=3 * PAGE, own=5, seed=1)
    assert found["new"] > 0 < found["shared"]


def test_beginnings_are_told_apart():
    first, second = prefixes([1, 2, 3, 4]), prefixes([1, 2, 4, 4])
    assert first[:2] == second[:2] and not set(first[2:]) & set(second[2:])


def test_figures_come_from_the_records():
    suite = Memory(MemorySettings(contexts="100"))
    name = suite.cells[0].name
    suite.turns = [Turn(name, side, turn, 10, seconds) for turn in range(3) for side, seconds in ((PAGES, 1.0), (PRESENT, 0.5 + turn))]
    suite.counts = [Count("chat", PAGES, "rows", 12.0), Count("chat", PRESENT, "rows", 4.0), Count("trace", PAGES, "ratio", 1.05)]
    suite.first_tokens = [FirstToken(0, 10.0, 0.2)]
    verdicts = {figure.name.split(",")[0].split(" behind")[0]: figure.verdict for figure in suite.figures()}
    assert suite.quotients(name) == [0.5, 1.5, 2.5]
    assert verdicts["bytes held over bytes of distinct tokens"] == verdicts["first token"] == "met"
    assert verdicts["rows at once"] == "missed" and verdicts["growth of resident size"] == "not measured"
    assert all(table.rows for table in suite.tables())


def test_a_checkout_to_compare_with_is_asked_for():
    with pytest.raises(ConfigurationError, match="--present needs a checkout"):
        Memory(MemorySettings()).run()
