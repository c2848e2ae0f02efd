"""The metrics have vLLM's names and labels, and their sums are what the events say."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from engines import ask, job, parameters, run, running, table_speculator
from helpers import perturbed, prompts, repetitive, tiny
from learning_cases import never_started
from prometheus_client.parser import text_string_to_metric_families
from served import served, tiny_chat

from foredraft import RowParameters, Speculator
from foredraft.drafters.draft_model import DraftModel
from foredraft.drafters.learning.serving import Learning
from foredraft.drafters.several import Several
from foredraft.guesses import Prediction
from foredraft.rows import Commit
from foredraft.serving.engine import Engine
from foredraft.serving.jobs import Choice, Event, Job, Progress
from foredraft.serving.queue import Live, Waiting

VLLM = [  # what vLLM's dashboards, vllm.benchmarks.serve and AIPerf read, https://docs.vllm.ai/en/latest/usage/metrics.html
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total", "prompt_tokens_total"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_cached_total", "prompt_tokens_by_source_total"),
    *("num_requests_waiting_by_reason", "engine_sleep_state"),
    *("generation_tokens_total", "request_success_total", "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total"),
    *("spec_decode_num_accepted_tokens_total", "spec_decode_num_accepted_tokens_per_pos_total"),
]
HISTOGRAMS = [
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds", "iteration_tokens_total"),
    *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds", "request_prefill_time_seconds"),
    *("request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens", "request_params_n"),
    *("request_params_max_tokens", "request_max_num_generation_tokens", "request_prefill_kv_computed_tokens"),
]


def samples(engine: Engine) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Every sample: name, then its labels without those of the server."""
    body, kind = engine.metrics.render()
    assert kind.startswith("text/plain")
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            if family.name.startswith(("process_", "http_")):
                continue
            assert (labels.pop("model_name"), labels.pop("engine")) == ("a model", "0"), sample
            found.setdefault(sample.name, {})[tuple(sorted(labels.items()))] = sample.value
    return found


async def all_events(asked: Job) -> list[Event]:
    return [event async for event in asked.events()]


def test_names_labels_and_sums():
    async def main() -> None:
        async with running(table_speculator(), model="a model", max_rows=2) as engine:
            asked = [job(Choice([0, 1, 2], parameters(9, seed=each)), Choice([1], parameters(1, seed=each))) for each in range(4)]
            for each in asked:
                engine.submit(each)
            events = await asyncio.gather(*map(all_events, asked))
            drafts = engine.metrics.drafts.total()
            engine.submit(leaver := job(Choice([0], parameters(10_000))))
            await anext(leaver.events())
            engine.leave(leaver)
            await ask(engine, Choice([2], parameters(3)))
            found = samples(engine)
        missing = [name for name in VLLM if f"vllm:{name}" not in found]
        assert missing + [name for name in HISTOGRAMS if f"vllm:{name}_bucket" not in found] == []
        commits = [event.commit for each in events for event in each if isinstance(event, Progress)]
        stats = engine.session.stats

        def one(name: str, **labels: str) -> float:
            return found[name][tuple(sorted(labels.items()))]

        assert one("vllm:prompt_tokens_total") == 4 * (3 + 1) + 1 + 1
        assert one("vllm:prefix_cache_queries_total") == one("vllm:prompt_tokens_total")
        assert one("vllm:prefix_cache_hits_total") == stats.reused == 0  # probability tables keep nothing
        sources = {"local_compute": one("vllm:prompt_tokens_total"), "local_cache_hit": 0, "external_kv_transfer": 0}
        assert {source: one("vllm:prompt_tokens_by_source_total", source=source) for source in sources} == sources
        assert one("vllm:request_prefill_kv_computed_tokens_sum") == one("vllm:prompt_tokens_total")
        assert (
            one("vllm:engine_sleep_state", sleep_state="awake") == 1 and one("vllm:num_requests_waiting_by_reason", reason="capacity") == 0
        )
        assert one("vllm:generation_tokens_total") == stats.new_tokens >= 4 * (9 + 1) + 3
        assert {reason: one("vllm:request_success_total", finished_reason=reason) for reason in ("stop", "length", "abort", "error")} == {
            "stop": 0, "length": 9, "abort": 1, "error": 0
        }  # fmt: skip
        assert one("vllm:spec_decode_num_drafts_total") >= drafts == sum(commit.drafted > 0 for commit in commits) > 8
        assert one("vllm:spec_decode_num_draft_tokens_total") == stats.drafted > 16
        accepted = found["vllm:spec_decode_num_accepted_tokens_per_pos_total"]
        assert sum(accepted.values()) == one("vllm:spec_decode_num_accepted_tokens_total") == stats.accepted > 0
        assert next(iter(accepted)) == (("position", "0"),)
        for name, count in (
            ("time_to_first_token", 10),
            ("e2e_request_latency", 9),
            ("request_queue_time", 10),
            ("request_decode_time", 9),
        ):
            assert one(f"vllm:{name}_seconds_count") == count, name
        assert one("vllm:request_time_per_output_token_seconds_count") == 5  # with two tokens or more
        assert one("vllm:request_generation_tokens_sum") == 4 * (9 + 1) + 3
        longest = "vllm:request_max_num_generation_tokens"
        assert (one(f"{longest}_count"), one(f"{longest}_sum")) == (5, 4 * 9 + 3)  # of the rows of each request
        assert one("vllm:num_requests_running") == one("vllm:num_requests_waiting") == 0

        drafter = engine.session.drafter.name
        depths = [one("foredraft:drafted_tokens_total", depth=str(depth), drafter=drafter) for depth in (1, 2)]
        assert depths == stats.drafted_by_depth and sum(depths) == stats.drafted
        assert sum(found["foredraft:rounds_total"].values()) == sum(stats.shapes.values())
        assert one("foredraft:row_passes_total", drafter=drafter) == stats.row_passes
        assert one("foredraft:plain_rounds_total", drafter=drafter) == stats.shapes.get("chain(0)", 0)
        assert one("foredraft:seconds_total", drafter=drafter, phase="target") > 0

    run(main())


def test_nobody_can_make_the_metrics_grow():
    """Anybody may send any method to any path."""
    with served(tiny_chat(), model="a model") as url:
        sizes = []
        for round in range(2):
            for number in range(20):
                httpx.request(f"M{round}{number}", f"{url}/nowhere{round}{number}")
            sizes.append(httpx.get(url + "/metrics").text.count('handler="none"'))
        assert sizes[0] == sizes[1] and 'method="other"' in httpx.get(url + "/metrics").text


def test_vllms_load_tool_reads_its_counts_from_the_text():
    """``vllm.benchmarks.serve`` goes through the lines: it tells names apart by what is in them, and looks for a position in the labels."""

    async def main() -> None:
        async with running(table_speculator(), model="tiny") as engine:
            await ask(engine, *(Choice([0], parameters(30, seed=each)) for each in range(3)))
            lines, stats, drafts = engine.metrics.render()[0].decode().splitlines(), engine.session.stats, engine.metrics.drafts.total()
        read, places = Counter[str](), dict[int, int]()
        for line in lines:
            if line.startswith("vllm:spec_decode"):
                name, value = line.split()
                parts = ("drafts", "draft_tokens", "accepted_tokens_per_pos", "accepted_tokens")
                part = next(each for each in parts if f"num_{each}" in name)
                read[part] += int(float(value))
                if part == "accepted_tokens_per_pos":
                    places[int(name.partition('position="')[2].partition('"')[0])] = int(float(value))
                assert name.partition("{")[0].endswith("_total")
        assert read["drafts"] == drafts > 0 and read["draft_tokens"] == stats.drafted > drafts
        assert read["accepted_tokens"] == stats.accepted == sum(places.values()) > 0
        assert places == dict(enumerate(stats.accepted_by_depth))

    run(main())


def test_pages_that_rows_hold_are_a_share_of_those_that_may_be_held():
    async def main() -> None:
        speculator = Speculator(tiny(), "none", cache_memory="1MiB", execution="eager")
        async with running(speculator, model="a model") as engine:
            shares, step = [samples(engine)["vllm:kv_cache_usage_perc"][()]], engine.session.step

            def watched(**options: Any) -> Any:
                commits = step(**options)
                shares.append(samples(engine)["vllm:kv_cache_usage_perc"][()])
                return commits

            engine.session.step = watched  # type: ignore[method-assign]
            await ask(engine, Choice([3] * 70, RowParameters(100)))
            limit = engine.session.memory.limit
        assert shares[0] == shares[-1] == 0  # of 70 tokens, then of 170, 64 to a page
        assert {round(share * limit, 6) for share in shares} == {0, 2, 3}

    run(main())


def test_the_longest_row_of_a_request_counts_whenever_it_ends():
    async def main() -> None:
        async with running(table_speculator(), model="a model", max_rows=1) as engine:
            await ask(engine, Choice([0], parameters(9)), Choice([1], parameters(2)))
            assert samples(engine)["vllm:request_max_num_generation_tokens_sum"][()] == 9

    run(main())


def test_drafts_are_counted_for_the_one_of_several_that_made_them():
    """As the traces say; and for a guess that stands in for all of them."""

    async def main() -> None:
        speculator = Speculator(tiny(), "several:prompt-lookup,token-recycling", shape="chain(3)", execution="eager")
        first, *others = [*repetitive((30, 24)), *prompts((9,), seed=3)]
        async with running(speculator, model="a model") as engine:
            (text,) = await ask(engine, Choice(first, RowParameters(60, max_draft=0)))
            asked = [job(Choice(ids, RowParameters(60, trace=True))) for ids in others]
            asked.append(job(Choice(first, RowParameters(60, trace=True, guesses=[Prediction(text)]))))
            for each in asked:
                engine.submit(each)
            events = [event for each in await asyncio.gather(*map(all_events, asked)) for event in each]
            found, stats = samples(engine), engine.session.stats
        traces = [event.commit.trace for event in events if isinstance(event, Progress) and event.commit.trace]
        for kind, total, nodes in (
            ("drafted", stats.drafted, [(each, node) for each in traces for node in range(1, len(each.tokens))]),
            ("accepted", stats.accepted, [(each, node) for each in traces for node in each.path[1:]]),
            ("drafts", found["vllm:spec_decode_num_drafts_total"][()], [(each, 1) for each in traces if len(each.tokens) > 1]),
        ):
            counted = Counter[str]()
            for labels, count in found[f"foredraft:{kind}_total" if kind == "drafts" else f"foredraft:{kind}_tokens_total"].items():
                counted[dict(labels)["drafter"]] += int(count)
            assert counted == Counter(each.drafters[node] for each, node in nodes) and sum(counted.values()) == total
            assert set(counted) == {"prompt-lookup", "token-recycling", "prediction"}, counted

    run(main())


def test_what_drafters_learn_is_counted_by_their_names(tmp_path: Path):
    async def main() -> None:
        learning = [DraftModel(perturbed(), learn={"folder": tmp_path / name}, execution="eager") for name in ("one", "other")]
        alone = Speculator(tiny(), learning[0], shape="chain(2)", execution="eager")
        async with running(alone, model="a model") as engine:
            assert "foredraft:learning_alpha" not in samples(engine), "nothing was accepted or rejected yet"
            learning[0].learning._every = 5
            learning[0].learning.buffer["steps"] = 3
            await ask(engine, Choice(prompts((9,))[0], RowParameters(20)))
            found, facts = samples(engine), learning[0].learnt
        one = (("drafter", "draft-model"),)
        assert found["foredraft:learning_alpha"] == {one: facts["alpha"][-1][1]} and found["foredraft:learning_version"] == {one: 0}
        assert [found[f"foredraft:learning_{name}_total"][one] for name in ("steps", "swaps", "refused", "unusable")] == [3, 0, 0, 0]
        phases = {dict(labels)["phase"] for labels in found["foredraft:learning_seconds_total"]}
        assert phases == set(facts["seconds"]) and "learner" in phases
        several = Speculator(tiny(), Several([learning[1], "prompt-lookup"]), shape="chain(2)", execution="eager")
        async with running(several, model="a model") as engine:
            assert list(samples(engine)["foredraft:learning_version"]) == [one]
        async with running(table_speculator(), model="a model") as engine:
            assert not any("learning" in name for name in samples(engine))

    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(Learning.__init__.__kwdefaults__, "start", never_started)
        run(main())


def test_a_scrape_while_rounds_run_disturbs_nobody():
    """In the middle of a round, and then as often as a busy machine lets both go on."""

    async def main() -> None:
        speculator = table_speculator()
        async with running(speculator, model="a model") as engine:
            speculator.drafter.gate.clear()
            asking = asyncio.gather(*(ask(engine, Choice([0], parameters(20, seed=each))) for each in range(6)))
            while not samples(engine)["vllm:num_requests_running"][()]:
                await asyncio.sleep(0.001)
            speculator.drafter.gate.set()
            while not asking.done():
                samples(engine)
                await asyncio.sleep(0.005)  # without it, the threads that decode and ask would wait for each other's lock all the time
            await asking

    run(main())


def test_the_dashboard_and_the_docs_name_metrics_that_there_are():
    async def main() -> set[str]:
        async with running(table_speculator(), model="a model") as engine:
            await ask(engine)
            return set(samples(engine))

    docs = Path(__file__).parents[2] / "docs"
    board, there = json.loads((docs / "grafana.json").read_text(encoding="utf-8")), run(main())
    asked = {
        name for panel in board["panels"] for each in panel["targets"] for name in re.findall(r"\b(?:vllm|foredraft):\w+", each["expr"])
    }
    assert len(asked) > 12 and asked <= there, asked - there
    named = {f"{name}_total" for name in re.findall(r"`(foredraft:\w+)`", (docs / "server.md").read_text(encoding="utf-8"))}
    assert named == {name for name in there if name.startswith("foredraft:")}, "docs/server.md names them all"


def test_counting_costs_little():
    """A step counts with a few calls of functions for each row, whatever was counted before: some 40 µs for 16 rows."""

    async def main() -> list[str]:
        async with running(table_speculator(), model="a model") as engine:
            live, called = Live(Waiting(job(), 0, 9), 0.0, first=0.0), list[str]()
            for _ in range(2):
                called.clear()
                commit = Commit(0, [1, 2], 1, None, drafter="a", drafted_by_depth=[1, 1, 1])
                sys.setprofile(lambda frame, event, other: called.append(frame.f_code.co_name) if event == "call" else None)
                try:
                    engine.metrics.progress(live, commit, 1.0)
                finally:
                    sys.setprofile(None)
            return called

    assert 1 <= len(called := run(main())) <= 10, called
