"""The suite ``serve``: its load tool on a server without a model, and its figures from records."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_openai import FIELDS, FakeServer, serve

from benchmarks import report
from benchmarks.peer_process import PeerError
from benchmarks.serve import PROMPTS, Serve
from benchmarks.serve_load import Asked, Load, Tool, arrivals, quantile
from benchmarks.serve_plan import FIGURES, Number, Rate, Run, ServeSettings
from benchmarks.serve_servers import MODES, Server
from benchmarks.suite import Failure
from foredraft.errors import ConfigurationError


@pytest.fixture
def url() -> Iterator[str]:
    server = serve(FakeServer(lenient=True))
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def bodies(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"text {number}", "max_tokens": 6, "temperature": 0.0, "seed": number} for number in range(count)]


def test_a_closed_loop_asks_everything_once(url: str):
    found = Tool(url, {"model": "fake"}).closed(bodies(7), 3)
    assert [each.number for each in found.asked] == list(range(7)) and not found.problems
    assert found.tokens == sum(each.tokens for each in found.asked) and found.rate > 0 and found.share > 0
    assert all(each.begin <= each.first <= each.last and each.text for each in found.asked)


def test_an_open_loop_asks_at_the_same_moments_for_everyone(url: str):
    found = Tool(url, {"model": "fake"}).open(bodies(2), 40, 0.5, 1)
    assert len(found.asked) == len(list(arrivals(40, 0.5, 1))) > 5 and not found.problems
    assert list(arrivals(40, 0.5, 1)) == list(arrivals(40, 0.5, 1)) != list(arrivals(40, 0.5, 2))


def test_a_guest_joins(url: str):
    found = Tool(url, {"model": "fake"}).beside(bodies(2), 4, bodies(1)[0], 0.01)
    assert len(found.asked) == 5 and not found.problems


def test_what_goes_wrong_is_a_problem_and_no_time():
    server = serve(FakeServer(without=frozenset(FIELDS)))
    found = Tool(f"http://127.0.0.1:{server.server_address[1]}", {"model": "fake"}).closed(bodies(2), 1)
    server.shutdown()
    server.server_close()
    assert len(found.problems) == 2 and "HTTP 400" in found.problems[0] and found.tokens == 0
    assert Tool("http://127.0.0.1:9", {}).closed(bodies(1), 1).problems[0].startswith("ConnectError")


def test_quantiles_are_values():
    assert quantile([3, 1, 2], 0.99) == 3 and quantile([3, 1, 2], 0.5) == 2
    assert quantile(range(1, 101), 0.99) == 99  # and not the largest


def suite(**settings: Any) -> Serve:
    return Serve(ServeSettings(**settings))


def test_figures_come_from_records_alone():
    run = suite()
    for turn in range(2):
        for side, mode, tokens in (("ours", "draft", 150), ("ours", "plain", 90), ("vllm", "plain", 80), ("vllm", "ngram", 100)):
            run.runs.append(Run("throughput", side, mode, 1, 0.0, turn, tokens, 2, 1.0, 0.1))
        for side, first in (("ours", 0.5), ("vllm", 1.0)):
            run.rates.append(Rate("vllm", side, turn, 1.0, first, first, 0, 0.1))
    run.numbers.append(Number("overload neither", 0, 2.0))
    run = Serve.read(json.loads(json.dumps(run.document(command="x", environment={}))))
    found = {figure.name: figure for figure in run.figures()}
    best = found["tokens/s over the best peer, 1 client, greedy"]
    assert best.spread is not None and best.spread.median == 1.5 and best.how == "vllm, ngram" and best.verdict == "met"
    assert found["p99 to the first token, over vllm at 0.75 of its capacity"].verdict == "met"
    assert found["10× overload: requests neither finished as alone nor refused"].verdict == "missed"
    assert found["tokens/s over the best peer, 16 clients, greedy"].verdict == "not measured"
    assert len(run.tables()) == 4


def test_a_server_that_does_not_start_is_a_row_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Server, "_command", lambda self: (["false"], {}))
    run = suite(only=("ours",), chosen=("join",), work_path=tmp_path, patience=5.0)
    with pytest.raises(ConfigurationError, match="ended with 1"):
        run.run()
    assert [(each.method, each.stage) for each in run.failures] == [("ours", "start")]


@pytest.mark.parametrize("given", [{"only": ("tgi",)}, {"chosen": ("speed",)}])
def test_unknown_names_are_refused(given: dict[str, Any]):
    with pytest.raises(ConfigurationError, match="takes"):
        suite(**given).run()


def test_half_of_the_prompts_are_to_copy():
    kinds = [json.loads(line)["kind"] for line in PROMPTS.read_text().splitlines()]
    assert kinds == ["copying"] * 8 + ["free"] * 8 and all(hasattr(Serve, f"_{name}") for name in FIGURES)


def test_failures_of_an_earlier_run_stay_until_they_are_measured_again(tmp_path: Path):
    former = suite()
    former.runs.append(Run("throughput", "ours", "draft", 1, 0.0, 0, 10, 1, 1.0, 0.1))
    for about in (("vllm-plain", "start"), ("ours", "start"), ("llamacpp: draft", "throughput, 4 clients"), ("join", "run")):
        former.failures.append(Failure(*about, "why"))
    path = tmp_path / "serve.json.gz"
    report.save(path, former.document(command="x", environment={"date": "then", "commit": "c"}))
    run = suite(only=("ours",), chosen=("join",), earlier=path)
    run._keep(path)
    assert [each.method for each in run.failures] == ["vllm-plain", "llamacpp: draft"] and len(run.runs) == 1
    with pytest.raises(ConfigurationError, match="other settings: tokens"):
        suite(tokens=64)._keep(path)


def test_a_cell_whose_server_is_not_there_fails_alone():
    run = suite()
    run.servers, run.modes, run.texts = {}, [], ["a", "b"]
    for cell in (run._join, run._overload):
        with pytest.raises(PeerError, match="ours was not started"):
            cell()


def test_what_is_compared_has_been_warmed_up(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def ask(self: Serve, mode: Any, load: str, given: Any) -> Load:
        asked.append((mode.side, load))
        chunks = (1.0, 1.0 + len(asked), 3.0 + len(asked))
        return Load(1.0, 0.1, [Asked(number, 0.0, 1.0, 2.0, 3, "done", chunks) for number in range(4)])

    monkeypatch.setattr(Serve, "_ask", ask)
    run = suite(only=("ours", "llamacpp"), turns=1)
    run.texts, run.modes = ["a", "b"] * 8, [mode for mode in MODES if mode.side == "llamacpp"]
    run._join()
    assert [load for _, load in asked] == ["beside"] * 3 and len(run.numbers) == 1
    asked.clear()
    run._latency()
    assert [side for side, load in asked if load == "closed"] == ["ours", *["llamacpp"] * 4] and len(run.rates) == 2
