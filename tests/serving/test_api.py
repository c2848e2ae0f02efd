"""What a request says is what happens: every field, whole and streamed, whatever else is decoded beside it."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import pytest
import torch
from served import TINY, events, served, tiny_chat
from transformers import GenerationConfig

from foredraft import Speculator
from foredraft.loading import load_model, load_tokenizer
from foredraft.serving.requests import Requests

CHAT = {"messages": [{"role": "user", "content": "hello"}]}


def post(url: str, path: str = "/v1/completions", **body: Any) -> Any:
    response = httpx.post(url + path, json=body, timeout=60)
    assert response.status_code == 200, response.text
    return events(response) if body.get("stream") else response.json()


def text(answer: Any) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def joined(chunks: Any, n: int = 1) -> list[str]:
    return ["".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index) for index in range(n)]


@pytest.mark.parametrize("share", [False, True])
def test_users_of_different_keys_share_nothing_unless_they_may(share, monkeypatch):
    seen, plan = [], Requests.plan

    async def noted(self, asked, isolation, owner):
        seen.append(isolation)
        return await plan(self, asked, isolation, owner)

    monkeypatch.setattr(Requests, "plan", noted)
    with served(tiny_chat(), keys={"first": "one", "second": "two"}, share=share) as url:
        for key in ("one", "two"):
            answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, headers={"Authorization": f"Bearer {key}"}, timeout=60)
            assert answer.status_code == 200
    assert seen == [None, None] if share else (None not in seen and seen[0] != seen[1])


FIELDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 0.5, "top_p": 0.8},
    {"top_k": 3},
    {"min_p": 0.05},
    {"presence_penalty": 1.5, "frequency_penalty": -0.5},
    {"repetition_penalty": 1.3},
    {"logit_bias": {"65": 5, "66": -100}},
    {"n": 3},
    {"stop": ["e", "ab"]},
    {"logprobs": 3},
    {"min_tokens": 20, "max_tokens": 24},
    {"ignore_eos": True},
    {"echo": True, "logprobs": 1},
    {"prompt": ["hello", "tool"], "n": 2},
    {"prompt": [3, 4, 5]},
    {"prompt": [[3, 4, 5], [7]]},
    {"structured_outputs": {"regex": "[ab]{3,5}"}},
    {"structured_outputs": {"choice": ["yes", "no (really)", "a|b"]}},
    {"prediction": {"type": "content", "content": "hello the user"}},
]


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: "-".join(fields) or "plain")
def test_whole_streamed_and_without_speculation_are_the_same(url: str, fields: dict[str, Any]):
    body = {"prompt": "the user", "max_tokens": 16, "seed": 5} | fields
    whole = post(url, **body)
    n = len(whole["choices"])
    chunks = post(url, **body, stream=True, stream_options={"include_usage": True})
    assert joined(chunks, n) == text(whole)
    assert chunks[-1]["usage"] == whole["usage"]
    ends = {c["index"]: c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]}
    assert [ends[index] for index in range(n)] == [choice["finish_reason"] for choice in whole["choices"]]
    if "logprobs" in fields:
        kept = [[], [], [], []]
        for choice in (c for chunk in chunks for c in chunk["choices"]):
            for part, name in zip(kept, ("tokens", "token_logprobs", "top_logprobs", "text_offset")):
                part += choice["logprobs"][name]
        assert kept == list(whole["choices"][0]["logprobs"].values())
    plain = post(url, **body, speculation="off")
    assert text(plain) == text(whole)
    assert (
        plain["metrics"]["speculative_decoding"] is None
        or plain["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
        or "prediction" in fields
    )
    short = post(url, **body, speculation={"max_draft": 1})
    assert text(short) == text(whole)


def test_texts_are_those_of_generate(url: str):
    """Alone, by the same seed, temperature and nucleus. The server's Speculator is free between two requests."""
    speculator = tiny_chat()
    ids = torch.tensor([speculator.tokenizer("the user")["input_ids"]])
    answer = post(url, prompt="the user", max_tokens=12, seed=3, temperature=0.7, top_p=0.9, n=2, return_token_ids=True)
    config = GenerationConfig(do_sample=True, temperature=0.7, top_p=0.9, top_k=0, max_new_tokens=12, eos_token_id=302, pad_token_id=303)
    assert len(answer["choices"]) == 2
    for index, choice in enumerate(answer["choices"]):
        output = speculator.generate(ids, seed=[(3, index)], generation_config=config)
        assert choice["token_ids"] == output.sequences[0, ids.shape[1] :].tolist()


def test_seeds_repeat_under_load_and_differ_from_each_other(url: str):
    alone = [text(post(url, prompt="hello", max_tokens=20, seed=seed)) for seed in range(4)]
    assert len({each[0] for each in alone}) == 4
    with ThreadPoolExecutor(16) as pool:
        noise = [pool.submit(post, url, prompt="the tool" * (i % 3 + 1), max_tokens=30, n=i % 3 + 1) for i in range(8)]
        again = [pool.submit(post, url, prompt="hello", max_tokens=20, seed=seed) for seed in range(4)]
        assert [text(each.result()) for each in again] == alone
        assert all(each.result()["choices"] for each in noise)


def test_choices_of_several_prompts_are_seeded_by_their_number(url: str):
    both = post(url, prompt=["hello", "the"], n=2, seed=9, max_tokens=12)
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert text(post(url, prompt="hello", n=4, seed=9, max_tokens=12))[:2] == text(both)[:2]
    assert text(post(url, prompt=["x", "the"], n=2, seed=9, max_tokens=12))[2:] == text(both)[2:]
    assert both["usage"]["prompt_tokens"] == 2


def test_a_drawn_seed_is_returned_and_repeats_the_text(url: str):
    first = post(url, prompt="hello", max_tokens=20)
    assert text(post(url, prompt="hello", max_tokens=20, seed=first["seed"])) == text(first)
    assert post(url, prompt="hello", max_tokens=20)["seed"] != first["seed"]


def test_log_probabilities_are_the_models_own(url: str):
    speculator = tiny_chat()
    answer = post(url, prompt="hello", max_tokens=8, seed=1, logprobs=2, echo=True, return_token_ids=True)
    choice = answer["choices"][0]
    ids = [*choice["prompt_token_ids"], *choice["token_ids"]]
    with torch.no_grad():
        own = speculator.model(torch.tensor([ids])).logits[0].log_softmax(-1)
    found = choice["logprobs"]["token_logprobs"]
    assert found[0] is None
    expected = [float(own[place, token]) for place, token in enumerate(ids[1:])]
    assert all(math.isclose(a, b, abs_tol=1e-3) for a, b in zip(found[1:], expected, strict=True))
    assert all(len(top) in (2, 3) for top in choice["logprobs"]["top_logprobs"][1:])


def test_echo_alone_returns_the_prompt(url: str):
    answer = post(url, prompt="hello user", max_tokens=0, echo=True, logprobs=1)
    choice = answer["choices"][0]
    assert choice["text"] == "hello user" and choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0 and len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_text_wherever_it_is_cut(url: str, stream: bool):
    """Stop strings of two letters from all over a text."""
    body = {"prompt": "hello", "max_tokens": 12, "seed": 2, "stream": stream}
    full = text(post(url, **body | {"stream": False}))[0]
    for at in range(1, len(full) - 2, 2):
        stop = full[at : at + 2]
        answer = post(url, **body, stop=stop)
        assert (joined(answer) if stream else text(answer))[0] == full[: full.index(stop)]
        choices = [choice for chunk in (answer if stream else [answer]) for choice in chunk["choices"]]
        assert not any(stop in choice["text"] for choice in choices) and choices[-1]["stop_reason"] == stop


def test_rounds_are_told_to_who_asks_for_them(url: str):
    chunks = post(url, prompt="hello", max_tokens=12, seed=2, rounds=True, stream=True)
    rounds = [choice["round"] for chunk in chunks for choice in chunk["choices"] if "round" in choice]
    names = {"shape", "tokens", "texts", "parents", "drafters", "p", "q", "path", "accepted", "bonus", "ended"}
    assert rounds and all(set(each) == names for each in rounds)
    assert all(each["accepted"] == len(each["path"]) - 1 and len(each["tokens"]) == len(each["texts"]) for each in rounds)
    assert not any("round" in c for chunk in post(url, prompt="hello", max_tokens=4, stream=True) for c in chunk["choices"])


def test_streamed_token_ids_add_up_to_those_of_the_whole(url: str):
    """Those of rounds that show no text are among them: here a round adds a part of a character."""
    body = {"prompt": "hello", "structured_outputs": {"choice": ["é€é€"]}, "speculation": "off", "return_token_ids": True}
    chunks = post(url, **body, stream=True)
    streamed = [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]
    assert streamed == post(url, **body)["choices"][0]["token_ids"] and len(streamed) > 4


def test_streams_begin_with_the_tokens_of_the_prompt(url: str):
    """As vLLM has it: in the first chunk of every choice, and of a chat beside the choices, streamed or not."""
    body = {"prompt": ["hello", "the"], "n": 2, "max_tokens": 6, "return_token_ids": True}
    streamed = [choice for chunk in post(url, **body, stream=True) for choice in chunk["choices"]]
    for choice in post(url, **body)["choices"]:
        first, *rest = [each for each in streamed if each["index"] == choice["index"]]
        assert first["prompt_token_ids"] == choice["prompt_token_ids"] and not any("prompt_token_ids" in each for each in rest)

    chat = {**CHAT, "max_tokens": 6, "return_token_ids": True}
    whole, (first, *rest) = (post(url, "/v1/chat/completions", **chat, stream=stream) for stream in (False, True))
    assert first["prompt_token_ids"] == whole["prompt_token_ids"] == post(url, "/tokenize", **CHAT)["tokens"]
    assert not any("prompt_token_ids" in each for each in [*rest, *whole["choices"]])
    assert "prompt_token_ids" not in post(url, "/v1/chat/completions", **CHAT, max_tokens=6, stream=True)[0]


def test_chats_get_what_the_cache_can_ever_hold_of_a_text():
    """Where that is less than the context, and they do not say how much they want; the same with a prediction as without."""
    page = sum(tiny_chat().target.page_bytes)
    how = {"tokenizer": load_tokenizer(TINY), "execution": "eager", "cache_memory": f"{3 * page}B"}
    asked = {**CHAT, "ignore_eos": True, "seed": 3}
    with served(Speculator(load_model(TINY), "none", **how)) as url:
        found = [
            post(url, "/v1/chat/completions", **asked, **more) for more in ({}, {"prediction": {"type": "content", "content": "hello"}})
        ]
        refused = httpx.post(url + "/v1/chat/completions", json=asked | {"max_tokens": 1000}, timeout=60)
        error = refused.json()["error"]
        assert refused.status_code == 400 and (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
        assert (
            "1000 more, which the server's cache cannot hold (--cache-memory)" in error["message"] and "new_tokens" not in error["message"]
        )
    plain, guessed = (each["choices"][0] for each in found)
    assert plain["finish_reason"] == guessed["finish_reason"] == "length" and plain["message"] == guessed["message"]
    assert all(2 * 64 < each["usage"]["total_tokens"] < 3 * 64 for each in found)


def test_predictions_are_counted(url: str):
    full = post(url, prompt="hello", max_tokens=30, seed=2)
    guess = {"type": "content", "content": text(full)[0]}
    answer = post(url, prompt="hello", max_tokens=30, seed=2, prediction=guess)
    assert text(answer) == text(full)
    details = answer["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0
    assert "completion_tokens_details" not in full["usage"]
    wrong = post(url, prompt="hello", max_tokens=30, seed=2, prediction={"type": "content", "content": text(full)[0][:9] + "?" * 9})
    assert text(wrong) == text(full) and wrong["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] > 0


def test_predictions_and_what_a_grammar_forces_are_both_drafted(url: str):
    """And the predicted tokens alone are counted as such."""
    grammar = {"regex": "(yes|no): a long text that the grammar forces"}
    body = {"prompt": "hello", "max_tokens": 60, "seed": 2, "structured_outputs": grammar}
    plain = post(url, **body)
    found = {}
    for predicted in ("other", text(plain)[0][:9]):
        chunks = post(
            url,
            **body,
            prediction={"type": "content", "content": predicted},
            stream=True,
            rounds=True,
            stream_options={"include_usage": True},
        )
        assert joined(chunks) == text(plain)
        drafters = {name for chunk in chunks for choice in chunk["choices"] for name in choice.get("round", {}).get("drafters", ())}
        found[predicted] = chunks[-1]["usage"]["completion_tokens_details"]["accepted_prediction_tokens"], "grammar" in drafters
    assert found.pop("other") == (0, True)
    ((accepted, forced),) = found.values()
    assert 0 < accepted < 10 and forced


def test_request_metrics_are_vllms(url: str):
    found = post(url, prompt="hello", max_tokens=30, seed=2)["metrics"]["speculative_decoding"]
    assert found["num_spec_steps"] == sum(found["acceptance_histogram"]) > 0
    assert found["num_accepted_draft_tokens"] == sum(k * count for k, count in enumerate(found["acceptance_histogram"]))
    assert found["mean_acceptance_length"] == 1 + found["num_accepted_draft_tokens"] / found["num_spec_steps"]
    assert post(url, prompt="hello", max_tokens=4, n=2)["metrics"] == {"speculative_decoding": None}
    streamed = [chunk["metrics"] for chunk in post(url, prompt="hello", max_tokens=30, seed=2, stream=True) if "metrics" in chunk]
    assert streamed == [{"speculative_decoding": found}]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_grammars_hold_whole_and_streamed(url: str, path: str):
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["n"],
        "additionalProperties": False,
    }
    prompt = {"prompt": "x"} if path.endswith("v1/completions") else CHAT
    for seed in range(3):
        answer = post(url, path, **prompt, max_tokens=60, seed=seed, structured_outputs={"json": schema})
        choice = answer["choices"][0]
        written = choice["text"] if "text" in choice else choice["message"]["content"]
        assert list(json.loads(written)) == ["n"] and choice["finish_reason"] == "stop"
        chunks = post(url, path, **prompt, max_tokens=60, seed=seed, structured_outputs={"json": schema}, stream=True)
        pieces = [choice.get("text") or choice.get("delta", {}).get("content") or "" for chunk in chunks for choice in chunk["choices"]]
        assert "".join(pieces) == written and len(pieces) > 1


def test_top_p_0_is_the_likeliest_token_alone(url: str):
    sampled, greedy = (post(url, prompt="hello", max_tokens=20, seed=3, **how) for how in ({"top_p": 0}, {"temperature": 0}))
    assert text(sampled) == text(greedy) != text(post(url, prompt="hello", max_tokens=20, seed=3))


SCHEMAS = [
    {"type": "object", "minProperties": 1, "maxProperties": 2, "additionalProperties": {"type": "integer"}},
    {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["b"]},
    {"type": "object", "patternProperties": {"^x": {"type": "boolean"}}, "additionalProperties": False, "maxProperties": 2},
    {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 5}, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string", "maxLength": 5}], "items": False, "minItems": 2},
    {"type": "string", "minLength": 3, "maxLength": 6},
    {"type": "string", "pattern": "^[a-c]+$", "maxLength": 10},
    {"type": "string", "pattern": "b", "maxLength": 6},
    {"type": "string", "enum": ["\u00e9", "\u65e5\u672c", "\u2028"]},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "integer", "minimum": 5, "maximum": 17, "multipleOf": 3},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 3},
    {"type": ["integer", "null"], "minimum": 1, "maximum": 3},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 5}, {"const": "x"}]},
    {"enum": [1, "a", None, [1, 2], {"a": 1}]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"const": {"b": [True]}}, "maxItems": 2}}},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_what_is_written_is_valid(url: str, schema: dict[str, Any]):
    """By a model with random weights, which writes whatever it may; some texts are cut, few because it likes quotes."""
    bias = {str(tiny_chat().tokenizer.convert_tokens_to_ids('"')): 4}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    ended = 0
    for seed in range(3):
        asked = {**CHAT, "seed": seed, "temperature": 1.5, "max_tokens": 100, "response_format": form, "logit_bias": bias}
        choice = post(url, "/v1/chat/completions", **asked)["choices"][0]
        if choice["finish_reason"] == "stop":
            ended += 1
            jsonschema.validate(json.loads(choice["message"]["content"]), schema, format_checker=jsonschema.FormatChecker())
    assert ended


@pytest.mark.parametrize("stream", [False, True])
def test_json_objects(url: str, stream: bool):
    """Whatever object it is: a grammar forces one, and the limit may cut it."""
    bias = {str(tiny_chat().tokenizer.convert_tokens_to_ids("}")): 100}
    answer = post(
        url, "/v1/chat/completions", **CHAT, response_format={"type": "json_object"}, logit_bias=bias, max_tokens=20, stream=stream
    )
    if stream:
        written = "".join(choice["delta"].get("content") or "" for chunk in answer for choice in chunk["choices"])
    else:
        written = answer["choices"][0]["message"]["content"]
    assert json.loads(written) == {}


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/models/tiny", "/metrics", "/tokenizer_info", "/"])
def test_whoever_looks_whether_it_is_there_gets_no_body(url: str, path: str):
    head, get = httpx.head(url + path), httpx.get(url + path)
    assert head.status_code == get.status_code == 200 and not head.content
    assert head.headers["content-type"] == get.headers["content-type"] and httpx.head(url + "/v1/completions").status_code == 405


def test_tokens_to_text_and_back(url: str):
    ids = post(url, "/tokenize", prompt="hello user", return_token_strs=True)
    assert ids["count"] == len(ids["tokens"]) == len(ids["token_strs"]) and ids["max_model_len"] == 2048
    assert post(url, "/detokenize", tokens=ids["tokens"])["prompt"] == "hello user"
    chat = post(url, "/tokenize", **CHAT)
    assert post(url, "/detokenize", tokens=chat["tokens"])["prompt"] == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_what_is_said_of_the_tokenizer_names_no_paths(url: str, monkeypatch: pytest.MonkeyPatch):
    for name in ("vocab_file", "merges_file"):
        monkeypatch.setitem(tiny_chat().tokenizer.init_kwargs, name, "/home/somebody/file")
    found = httpx.get(url + "/tokenizer_info")
    assert found.json()["tokenizer_class"] and "somebody" not in found.text


def test_requests_are_counted_by_path_and_status(url: str):
    """And what the cache held of a prompt is told apart from what was read."""

    def counts(*wanted: str) -> list[float]:
        lines = dict(line.rsplit(" ", 1) for line in httpx.get(url + "/metrics").text.splitlines() if not line.startswith("#"))
        return [float(lines.get(each, 0)) for each in wanted]

    names = (
        'http_requests_total{handler="/v1/completions",method="POST",status="2xx"}',
        'http_requests_total{handler="/v1/completions",method="POST",status="4xx"}',
        'http_requests_total{handler="/v1/models/{name:path}",method="GET",status="4xx"}',
        'http_requests_total{handler="none",method="GET",status="4xx"}',
        'http_request_duration_seconds_count{handler="/v1/completions",method="POST"}',
        'vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_cache_hit"}',
        'vllm:prompt_tokens_cached_total{engine="0",model_name="tiny"}',
        'vllm:request_prefill_kv_computed_tokens_sum{engine="0",model_name="tiny"}',
    )
    before = counts(*names)
    prompt = [each % 50 + 3 for each in range(150)]
    for _ in range(2):
        post(url, prompt=prompt, max_tokens=2)
    httpx.post(url + "/v1/completions", json={"prompt": 7})
    for path in ("/v1/models/nobody", "/somewhere", "/else", "/health"):
        httpx.get(url + path)
    assert [after - start for after, start in zip(counts(*names), before)] == [2, 1, 1, 2, 3, 149, 149, 150 + 1]


def test_about_the_server(url: str):
    card = httpx.get(url + "/v1/models").json()["data"][0]
    assert card["id"] == "tiny" and card == httpx.get(url + "/v1/models/tiny").json()
    assert "vllm:num_requests_running" in httpx.get(url + "/metrics").text
