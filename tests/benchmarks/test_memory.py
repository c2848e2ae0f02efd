"""The suite ``memory``: what its worker counts, and what the report makes of records."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from kernel_cases import needs_kernels

from benchmarks.memory import PAGES, PRESENT, VLLM, Count, FirstToken, Memory, MemorySettings, Turn
from benchmarks.memory_worker import PAGE, Worker, pools_of, prefixes
from benchmarks.peer_process import PeerError, WorkerProcess
from foredraft.errors import ConfigurationError


@pytest.fixture(scope="module")
def worker():
    return Worker("tiny", 1)


@needs_kernels
def test_the_worker_counts_what_is_held(worker):
    found = worker.trace(long=600, rows=3, common=150)
    assert 1 < found["ratio"] == found["held"] / found["distinct"] < 2 and found["peak"] >= found["held"]
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


def test_the_worker_serves_models_without_kernels():
    worker = Worker("windows", 1)
    assert worker.family(tokens=1200, nodes=16, rounds=2)["tokens"] == 2
    assert worker.kept[1].target.lengths == [1200 + 4]
    found = worker.windows(tokens=700, new=4)
    assert 0 < found["ratio"] <= found["peak ratio"] and found["ratio"] == found["held"] / found["full"]


def test_the_trace_is_handed_on(worker, tmp_path):
    given = worker.written(str(tmp_path), long=300, rows=2, common=100)
    assert (tmp_path / "config.json").exists() and len(given["ids"]) == 3
    assert given["ids"][0][:100] == given["ids"][1][:100] and given["ids"][0][100:200] != given["ids"][1][100:200]


def test_pools_are_found_however_a_target_says_it():
    one, other = SimpleNamespace(page_bytes=3), SimpleNamespace(page_bytes=4)
    several = [(one, 3), (other, 4)]
    assert pools_of(SimpleNamespace(pools=[one, other])) == several == pools_of(SimpleNamespace(pools=[one, other], page_bytes=[3, 4]))
    assert pools_of(SimpleNamespace(pool=one, page_bytes=3)) == [(one, 3)]
    assert pools_of(SimpleNamespace()) == pools_of(SimpleNamespace(pool=None)) == pools_of(SimpleNamespace(pools=[])) == []


def test_beginnings_are_told_apart():
    first, second = prefixes([1, 2, 3, 4]), prefixes([1, 2, 4, 4])
    assert first[:2] == second[:2] and not set(first[2:]) & set(second[2:])


def test_figures_come_from_the_records():
    suite = Memory(MemorySettings(contexts="100"))
    name = suite.cells[0].name
    suite.turns = [Turn(name, side, turn, 10, seconds) for turn in range(3) for side, seconds in ((PAGES, 1.0), (PRESENT, 0.5 + turn))]
    suite.counts = [Count("chat", PAGES, "rows", 12.0), Count("chat", PRESENT, "rows", 4.0), Count("trace", PAGES, "ratio", 1.05)]
    suite.counts += [Count("windows", PAGES, "ratio", 0.2), Count("windows", PAGES, "peak ratio", 0.3)]
    suite.counts += [Count("trace", PAGES, "peak", 100.0), Count("trace", VLLM, "peak", 98.0), Count("trace", VLLM, "block size", 128.0)]
    suite.first_tokens = [FirstToken(0, 10.0, 0.2)]
    verdicts = {figure.name.split(",")[0].split(" behind")[0]: figure.verdict for figure in suite.figures()}
    assert suite.quotients(name) == [0.5, 1.5, 2.5]
    assert verdicts["bytes held over bytes of distinct tokens"] == verdicts["first token"] == "met"
    assert verdicts["rows at once"] == "missed" and verdicts["growth of resident size"] == "not measured"
    assert verdicts["most bytes held"] == "met"
    assert [figure.verdict for figure in suite.figures() if figure.name.startswith("sliding")] == ["met", "missed"]
    assert all(table.rows for table in suite.tables())
    assert any("128 tokens per block" in note for note in suite.notes({}))


def test_vllm_is_left_out_where_it_is_not_installed(tmp_path):
    suite = Memory(MemorySettings(peers_path=tmp_path))
    suite._blocks({})
    assert any("not measured: not installed" in note for note in suite.notes({})) and not suite.failures


def test_a_family_without_pages_is_no_measurement():
    suite = Memory(MemorySettings(families="phi3"))
    side = SimpleNamespace(ask=lambda what, **given: {"tokens": 1, "seconds": 1.0, "pages": False})
    with pytest.raises(PeerError, match="not in pages"):
        suite._compare(next(cell for cell in suite.cells if cell.model == "phi3"), {PAGES: side, PRESENT: side})


def test_a_checkout_to_compare_with_is_asked_for():
    with pytest.raises(ConfigurationError, match="--present needs a checkout"):
        Memory(MemorySettings()).run()


def test_a_side_that_has_ended_says_so_each_time():
    side = WorkerProcess([sys.executable, "-c", "raise SystemExit('out of memory')"], {}, stderr=subprocess.PIPE)
    with side:
        for _ in range(2):
            with pytest.raises(PeerError, match="exit code 1: out of memory"):
                side.ask(what="trace")
