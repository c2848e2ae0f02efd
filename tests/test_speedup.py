"""Whether a call was faster than plain decoding, by how much, and how that is known."""

from __future__ import annotations

import json

import pytest
from helpers import Oracle, alone, generate, padded, repetitive, tiny

from foredraft import Speculator
from foredraft.planning import costs
from foredraft.speedup import Speedup


def after(*, plain: int = 0, drafted: int = 0, passes: float = 3.0, round_seconds: float = 0.02, overhead: float = 0.0, price=(0.01, True)):
    """A call of so many rounds, where a plain pass takes 10 ms and every plain round ``overhead`` more."""
    found = Speedup()
    for index in range(plain):
        seconds = 0.01 + (index % 3 - 1) * 1e-4
        found.plain_round(1, 1, seconds, seconds + overhead)
    for _ in range(drafted):
        found.drafted_round(1, passes, 64, round_seconds)
    found.settle(lambda rows, context: price)
    return found


def test_the_gain_is_that_over_plain_passes_for_the_same_tokens():
    found = after(drafted=20)
    assert found.value == pytest.approx(1.5) and found.sentence() == "1.5× plain decoding (measured)"
    assert after(drafted=20, passes=1.5).sentence() == "0.75× plain decoding (measured)"  # a fixed shape may lose


def test_three_plain_passes_make_a_measurement():
    assert after(drafted=20, price=(0.01, False)).sentence() == "1.5× plain decoding (estimated from the stored profile)"
    own = after(plain=3, drafted=20, price=(99.0, False))  # those of the call itself count, not the profile
    assert own.sentence() == "1.5× plain decoding (measured)" and own.value == pytest.approx(63 / 43)
    assert "estimated" in after(plain=2, drafted=20, price=(0.01, False)).sentence()
    assert "were not timed" in after(drafted=20, price=None).sentence() and after(drafted=20, price=None).value is None


def test_nothing_is_lost_only_where_the_lower_bound_says_so():
    assert after(plain=60, drafted=1, passes=1).sentence() == "drafting does not pay here: decoded plainly, nothing lost"
    tried = after(plain=60, drafted=3, passes=1)
    assert tried.sentence() == "drafting does not pay here: 0.95× plain decoding (measured)"
    slow = after(plain=60, overhead=0.001)  # what the drafter and the planner do beside plain rounds is lost
    assert slow.lower_bound == pytest.approx(0.909, abs=1e-3) and "nothing lost" not in slow.sentence()
    unknown = after(plain=2, drafted=1, passes=2)
    assert (
        unknown.value == pytest.approx(1.0, abs=0.01)
        and unknown.lower_bound == pytest.approx(0.5, abs=0.01)
        and "nothing lost" not in unknown.sentence()
    )
    assert Speedup().sentence() == "too few tokens to compare with plain decoding"


def test_calls_after_each_other_add_up():
    total = after(drafted=20)
    total.add(after(drafted=20, passes=1.0))
    assert total.value == pytest.approx(1.0) and total.source == "measured"
    total.add(after(drafted=20, price=None))
    assert total.value is None


def test_a_sum_of_calls_has_the_source_of_its_larger_part():
    measured, estimated = after(drafted=2), after(drafted=40, price=(0.01, False))
    assert (measured.source, estimated.source) == ("measured", "estimated from the stored profile")
    measured.add(estimated)
    assert measured.source == "estimated from the stored profile"
    estimated.add(after(drafted=90))
    assert estimated.source == "measured"


def test_a_batch_stands_for_the_plain_passes_of_its_longest_row():
    rows = repetitive((12, 12))
    right = rows[0] + alone(tiny(), rows[0], max_new_tokens=16)
    speculator = Speculator(tiny(), Oracle([right, [0]], wrong=10**9), draft_length=3)
    stream = speculator.stream(**padded(rows), max_new_tokens=16, do_sample=False)
    assert sum(len(tokens) for tokens in stream) == 32
    speedup, kept = stream._run.stats.speedup, [row.kept for row in stream.stats.rows]
    passes = [row.passes for row in stream.stats.rows]
    assert kept == [15, 15] and passes[0] < passes[1]  # one row is done early, and the batch gains nothing by that
    speedup.settle(lambda rows, context: (1.0, True))
    alone_at_the_end = speedup.plain_rounds and speedup.plain / max(speedup._times[1])
    assert speedup.replaced + alone_at_the_end == pytest.approx(15, abs=1)


def test_a_stored_profile_is_an_estimate(tmp_path, monkeypatch):
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    monkeypatch.setattr(costs, "REPEATS", 7)  # where each pass is timed once, nothing counts as measured
    row = repetitive((12,))[0]
    oracle = Oracle([row + alone(tiny(), row, max_new_tokens=16)], wrong=10**9)

    def summary(**shape):
        return Speculator(tiny(), oracle, **shape).generate(**padded([row]), max_new_tokens=16, do_sample=False).stats.summary()

    assert "passes were not timed" in summary(draft_length=3)
    said = summary()
    assert "(measured)" in said or "nothing lost" in said
    assert "× plain decoding (estimated from the stored profile)" in summary(draft_length=3)


def test_statistics_say_it_in_words_and_in_json():
    speculator = Speculator(tiny(), "prompt-lookup")
    stats = speculator.generate(**padded(repetitive((12,))), max_new_tokens=16, do_sample=False).stats
    assert "plain decoding" in stats.summary() or "decoded plainly" in stats.summary()
    found = json.loads(json.dumps(stats.to_dict()))["speedup"]
    assert found["value"] == stats.speedup.value and found["lower_bound"] <= found["value"] and found["source"] == "measured"
    plain = Speculator(tiny(), "none").generate(**padded(repetitive((12,))), max_new_tokens=4, do_sample=False).stats
    assert plain.summary() == "plain decoding, as asked"
    assert generate(speculator, repetitive((12,)), max_new_tokens=1)


def test_it_can_be_read_while_another_thread_decodes():
    found = Speedup()
    for rows in (1, 2):
        found.plain_round(rows, 1, 0.01, 0.01)
        found.drafted_round(rows, 3, 64, 0.02)

    def price(rows, context):
        found.drafted_round(rows + 2, 3, 64, 0.02)
        return 0.01, True

    found.settle(price)
    assert found.drafted_rounds == 4
