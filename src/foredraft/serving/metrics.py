"""What ``/metrics`` says: vLLM's names and labels, so that its dashboards and load tools read them, and ``foredraft:`` ones for drafts.

A *request* of vLLM's is a row here: one choice. Counts are plain numbers, and those of the session's own statistics are read when somebody
asks; only histograms are filled while rows are decoded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import prometheus_client
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from foredraft.rows import Commit
from foredraft.serving.queue import Live
from foredraft.session import Session
from foredraft.stats import by_drafter

LABELS = ("model_name", "engine")
HTTP = "HTTP requests, without those for the page's files, /health and /metrics"
SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
HISTOGRAMS: Mapping[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("From the arrival of a request to its first token", SHORT),
    "inter_token_latency_seconds": ("Between two rounds of a request; each gives it at least one token", BETWEEN),
    "request_time_per_output_token_seconds": ("From the first token of a request to its last, divided by the tokens between", BETWEEN),
    "e2e_request_latency_seconds": ("From the arrival of a request to its last token", WHOLE),
    "request_queue_time_seconds": ("From the arrival of a request until it is decoded", WHOLE),
    "request_inference_time_seconds": ("From then to its last token", WHOLE),
    "request_prefill_time_seconds": ("From then to its first token", WHOLE),
    "request_decode_time_seconds": ("From its first token to its last", WHOLE),
    "request_prefill_kv_computed_tokens": ("Tokens of a request's prompt that the cache did not hold", TOKENS),
    "request_prompt_tokens": ("Tokens of a request's prompt", TOKENS),
    "request_generation_tokens": ("Tokens that a request got", TOKENS),
    "request_max_num_generation_tokens": ("Tokens that the longest row of a request got", TOKENS),
    "request_params_max_tokens": ("Tokens that a request asked for at most", TOKENS),
    "request_params_n": ("Rows of a request", (1, 2, 5, 10, 20)),
    "iteration_tokens_total": ("Tokens that one step read of prompts and added to texts", TOKENS),
}
REASONS = {"eos": "stop", "stop": "stop", "removed": "stop", "length": "length", "context": "length"}
FINISHED = ("stop", "length", "abort", "error")
LEARNING: Mapping[str, tuple[type[CounterMetricFamily] | type[GaugeMetricFamily], str]] = {  # of a drafter that learns
    "version": (GaugeMetricFamily, "Version of the weights that draft; 0 are the first"),
    "alpha": (GaugeMetricFamily, "Share of the drafted tokens looked at that was accepted, over the last thousand tokens or more"),
    "steps": (CounterMetricFamily, "Steps of training"),
    "swaps": (CounterMetricFamily, "How often the weights changed"),
    "refused": (CounterMetricFamily, "Trials after which no version was published"),
    "unusable": (CounterMetricFamily, "Versions that could not be used"),
}
PLAIN = "chain(0)"  # the shape of a round without a draft


class Metrics:
    """All metrics of one server, in a registry of its own.

    Attributes:
        refused: requests that were turned away because the queue was full, or they would have waited for too long.
        finished: rows that are over, by vLLM's reasons.
    """

    def __init__(self, model: str, session: Session, rows: Any):
        self.model, self.session, self.rows = model, session, rows
        self.drafts: Counter[str] = Counter()  # by drafter
        self.guesses_drafted = self.guessed = self.prompt_tokens = self.prompt_tokens_cached = self.refused = 0
        self.by_drafter = {"drafted": Counter[tuple[str, str]](), "accepted": Counter[tuple[str, str]]()}  # by name and depth
        self.finished: Counter[str] = Counter(dict.fromkeys(FINISHED, 0))
        self.registry = CollectorRegistry()
        self.seen = {
            name: Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=self.registry).labels(model, "0").observe
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        labels, registry = ("handler", "method"), self.registry
        self.requests = prometheus_client.Counter("http_requests", HTTP, (*labels, "status"), registry=registry)
        self.request_seconds = Histogram("http_request_duration_seconds", f"Seconds of {HTTP}", labels, buckets=WHOLE, registry=registry)
        ProcessCollector(registry=self.registry)
        self.registry.register(self)

    def render(self) -> tuple[bytes, str]:
        """The answer to ``GET /metrics``, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def answered(self, handler: str, method: str, status: int, seconds: float) -> None:
        """An HTTP request to ``handler``, the path with its parameters' names, is over."""
        self.requests.labels(handler, method, f"{status // 100}xx").inc()
        self.request_seconds.labels(handler, method).observe(seconds)

    # -- in the engine's thread -----------------------------------------------------------------------------------------

    def joined(self, live: Live) -> None:
        self.seen["request_queue_time_seconds"](live.joined - live.waiting.job.arrived)
        self.seen["request_params_n"](len(live.waiting.job.choices))
        self.seen["request_params_max_tokens"](live.waiting.choice.parameters.max_new_tokens)

    def progress(self, live: Live, commit: Commit, now: float) -> int:
        """A row gained the tokens of ``commit``. Returns how many were read and added."""
        tokens = len(commit.tokens)
        if live.first is None:
            live.first = now
            read = len(live.waiting.choice.ids)
            reused = 0 if commit.stats is None else commit.stats.reused or 0
            self.prompt_tokens += read
            self.prompt_tokens_cached += reused
            self.seen["request_prefill_kv_computed_tokens"](read - reused)
            tokens += read
            self.seen["time_to_first_token_seconds"](now - live.waiting.job.arrived)
        else:
            self.seen["inter_token_latency_seconds"](now - live.last)
        drafted, accepted = self.by_drafter["drafted"], self.by_drafter["accepted"]
        for depth, count in enumerate(commit.drafted_by_depth, 1):
            if count:
                drafted[commit.drafter, str(depth)] += count
                accepted[commit.drafter, str(depth)] += depth <= commit.accepted
        if commit.drafted:
            self.drafts[commit.drafter] += 1
        self.guesses_drafted += commit.guesses_drafted
        self.guessed += commit.guessed
        live.tokens += len(commit.tokens)
        live.last = now
        return tokens

    def over(self, live: Live, reason: str) -> None:
        """A row is over; it has all its tokens unless ``reason`` is "abort" or "error"."""
        self.finished[reason] += 1
        if reason in ("abort", "error") or live.first is None:
            return
        for name, begin, end in (
            ("e2e_request_latency_seconds", live.waiting.job.arrived, live.last),
            ("request_inference_time_seconds", live.joined, live.last),
            ("request_prefill_time_seconds", live.joined, live.first),
            ("request_decode_time_seconds", live.first, live.last),
        ):
            self.seen[name](end - begin)
        if live.tokens > 1:
            self.seen["request_time_per_output_token_seconds"]((live.last - live.first) / (live.tokens - 1))
        self.seen["request_prompt_tokens"](len(live.waiting.choice.ids))
        self.seen["request_generation_tokens"](live.tokens)
        job = live.waiting.job
        job.longest = max(job.longest, live.tokens)
        if not job.unfinished:
            self.seen["request_max_num_generation_tokens"](job.longest)

    # -- when somebody asks ---------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """For the registry; another thread may be in a step."""
        stats, memory = self.session.stats, self.session.memory
        usage = 0.0 if memory is None or not memory.limit else memory.held / memory.limit
        yield self._gauge("vllm:num_requests_running", "Rows that are decoded", self.rows.running)
        yield self._gauge("vllm:num_requests_waiting", "Rows that wait for their turn", self.rows.waiting)
        reasons = {"capacity": self.rows.waiting, "deferred": 0}
        yield self._gauges("vllm:num_requests_waiting_by_reason", "Likewise; all wait for their turn", "reason", reasons)
        states = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
        yield self._gauges("vllm:engine_sleep_state", "This server never sleeps", "sleep_state", states)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the cache's pages that rows hold; 0 without a limit", usage)
        yield self._count("vllm:num_preemptions", "How often a row was set aside because pages ran out", self.session.admission.set_aside)
        prompts, cached = self.prompt_tokens, self.prompt_tokens_cached
        sources = {"local_compute": prompts - cached, "local_cache_hit": cached, "external_kv_transfer": 0}
        yield self._count("vllm:prompt_tokens", "Tokens of prompts", prompts)
        yield self._count("vllm:prompt_tokens_cached", "Tokens of prompts that the cache held", cached)
        yield self._counts("vllm:prompt_tokens_by_source", "Tokens of prompts by where their keys and values came from", "source", sources)
        yield self._count("vllm:prefix_cache_queries", "Tokens of prompts that were looked up in the cache", stats.prompt_tokens)
        yield self._count("vllm:prefix_cache_hits", "Tokens of prompts that the cache held", stats.reused)
        yield self._count("vllm:generation_tokens", "Tokens that requests got", stats.new_tokens)
        yield self._counts("vllm:request_success", "Requests that are over", "finished_reason", dict(self.finished))
        drafts = dict(self.drafts)
        yield self._count("vllm:spec_decode_num_drafts", "Drafts: rounds of a row with at least one drafted token", sum(drafts.values()))
        yield self._count("vllm:spec_decode_num_draft_tokens", "Drafted tokens", stats.drafted)
        yield self._count("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted", stats.accepted)
        by_position = {str(position): count for position, count in enumerate(list(stats.accepted_by_depth))}
        yield self._counts("vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by their place", "position", by_position)

        yield self._counts("foredraft:drafts", "Drafts, by who made them", "drafter", drafts)
        for name, counts in self.by_drafter.items():
            text, labels = f"Tokens that were {name}, by who drafted them and their depth", (*LABELS, "drafter", "depth")
            metric = CounterMetricFamily(f"foredraft:{name}_tokens", text, labels=labels)
            for (drafter, depth), count in list(counts.items()):
                metric.add_metric([self.model, "0", drafter, depth], count)
            yield metric
        shapes = dict(stats.shapes)
        yield self._counts("foredraft:rounds", "Rounds by the shape that was planned", "shape", shapes, drafter=True)
        yield self._counts("foredraft:plain_rounds", "Passes planned without a draft", None, {"": shapes.get(PLAIN, 0)}, drafter=True)
        yield self._counts("foredraft:row_passes", "Passes, each counted once per row", None, {"": stats.row_passes}, drafter=True)
        yield self._counts("foredraft:kept_tokens", "Tokens that came of them", None, {"": stats.kept}, drafter=True)
        seconds = {phase: spent for phase, spent in dict(stats.seconds).items() if phase not in ("total", "overhead")}
        yield self._counts("foredraft:seconds", "Seconds of decoding by phase", "phase", seconds, drafter=True)
        yield self._count("foredraft:guesses_drafted_tokens", "Drafts that were expected or that a grammar forced", self.guesses_drafted)
        yield self._count("foredraft:guesses_accepted_tokens", "How many of these were accepted", self.guessed)
        yield self._count("foredraft:requests_refused", "Requests turned away because too many waited", self.refused)
        yield from self._learning()

    def _learning(self) -> Iterator[Metric]:
        """Of drafters that learn while they serve; steps and trials where this process leads."""
        learners = by_drafter(self.session.drafter.learnt, self.session.drafter.name)
        for name, (family, text) in LEARNING.items():
            metric = family(f"foredraft:learning_{name}", text, labels=(*LABELS, "drafter"))
            for drafter, facts in learners.items():
                value = facts["alpha"][-1][1] if name == "alpha" and facts["alpha"] else facts.get(name)
                if isinstance(value, (int, float)):
                    metric.add_metric([self.model, "0", drafter], value)
            if metric.samples:
                yield metric
        seconds = CounterMetricFamily("foredraft:learning_seconds", "Seconds by what they went to", labels=(*LABELS, "drafter", "phase"))
        for drafter, facts in learners.items():
            for phase, spent in facts["seconds"].items():
                seconds.add_metric([self.model, "0", drafter, phase], spent)
        if learners:
            yield seconds

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        metric = GaugeMetricFamily(name, text, labels=LABELS)
        metric.add_metric([self.model, "0"], value)
        return metric

    def _gauges(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        metric = GaugeMetricFamily(name, text, labels=(*LABELS, label))
        for value, number in values.items():
            metric.add_metric([self.model, "0", value], number)
        return metric

    def _count(self, name: str, text: str, value: float) -> Metric:
        return self._counts(name, text, None, {"": value})

    def _counts(self, name: str, text: str, label: str | None, values: Mapping[str, float], *, drafter: bool = False) -> Metric:
        """A counter with a value for each value of ``label``, if there is one."""
        names = [*LABELS, *(["drafter"] if drafter else []), *([label] if label else [])]
        metric = CounterMetricFamily(name, text, labels=names)
        for value, count in values.items():
            metric.add_metric([self.model, "0", *([self.session.drafter.name] if drafter else []), *([value] if label else [])], count)
        return metric
