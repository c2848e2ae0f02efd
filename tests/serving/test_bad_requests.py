"""What cannot be served is refused in OpenAI's form, with a status of its own, and nobody else notices."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import socket
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import reduce
from typing import Any

import httpx
import pytest
from served import TINY, gauge, served, tiny_chat, wait_for
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.routing import Mount

from foredraft import ConfigurationError, Speculator
from foredraft.loading import load_model, load_tokenizer
from foredraft.serving import Settings, application, formats, protect, sse
from foredraft.serving.failures import ApiError
from foredraft.serving.hard_schemas import check
from foredraft.serving.requests import Requests
from foredraft.serving.schema import ChatRequest, CompletionRequest, TokenizeRequest

OK = {"prompt": "hello", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


def refusal(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"] and error["type"]
    assert response.headers["x-request-id"]
    return error


BODIES: list[tuple[bytes, str]] = [
    (b"", "valid JSON"),
    (b"{", "valid JSON"),
    (b"[]", "object"),
    (b'{"prompt": "\xff"}', "UTF-8"),
    (b'{"prompt": "a", "temperature": NaN}', "NaN"),
    (b'{"prompt": "a", "temperature": 1e999}', "too large"),
    (b'{"prompt": "\\ud800"}', "surrogate"),
    (b'{"prompt": "a", "metadata": {"\\udc00": 1}}', "surrogate"),
    (b'{"prompt": ' + b"[" * 30_000 + b"]" * 30_000 + b"}", "nested"),
    (b'{"prompt": "a", "metadata": ' + b'{"a":' * 100 + b"1" + b"}" * 100 + b"}", "nested"),
    (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "JSON"),
]


@pytest.mark.parametrize(("body", "why"), BODIES, ids=[why + str(index) for index, (_, why) in enumerate(BODIES)])
def test_malformed_json(url: str, body: bytes, why: str):
    response = httpx.post(url + "/v1/completions", content=body, headers={"content-type": "application/json"})
    assert why in refusal(response, 400)["message"]


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[1], []]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt.0"),
    ({"prompt": [10**6]}, "prompt"),
    ({"prompt": [-1]}, "prompt.0"),
    ({"prompt": [True]}, "prompt.0"),
    ({"prompt": [3] * 2048}, "prompt"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 1e-9}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"min_p": 1}, "min_p"),
    ({"top_k": -2}, "top_k"),
    ({"n": 0}, "n"),
    ({"n": 10**9}, "n"),
    ({"n": 128, "prompt": [[3]] * 9}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "a" * 300}, "stop"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"100000": 1}}, "logit_bias"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"rounds": True}, "rounds"),
    ({"speculation": "on"}, "speculation"),
    ({"speculation": {"max_draft": -1}}, "speculation.max_draft"),
    ({"best_of": 3}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"unheard_of": 1}, "unheard_of"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a" * 5000}}, "structured_outputs"),
    ({"structured_outputs": {"json": {"type": "nonsense"}}}, "structured_outputs"),
    ({"structured_outputs": {"json": "[" * 30_000}}, "structured_outputs"),
    ({"structured_outputs": {"json": '{"enum": ["\\ud800"]}'}}, "structured_outputs"),
    ({"structured_outputs": {"json": {"enum": ["a" * 70_000]}}}, "structured_outputs"),
    ({"structured_outputs": {"json": {"type": "integer", "multipleOf": 10**400}}}, "structured_outputs"),
    ({"structured_outputs": {"json": '{"minimum": ' + "9" * 5000 + "}"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "min_tokens": 1}, "min_tokens"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
]


@pytest.mark.parametrize(("fields", "param"), FIELDS, ids=[f"{param}{index}" for index, (_, param) in enumerate(FIELDS)])
def test_fields(url: str, fields: dict[str, Any], param: str | None):
    error = refusal(httpx.post(url + "/v1/completions", json=OK | fields, timeout=30), 400)
    assert error["param"] == param and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(("field", "value"), [("regex", "a" * 5000), ("choice", ["a" * 2500] * 2), ("grammar", "#" * 70_000)])
def test_what_is_too_long_is_called_by_its_name(url: str, field: str, value: Any):
    error = refusal(httpx.post(url + "/v1/completions", json=OK | {"structured_outputs": {field: value}}, timeout=30), 400)
    assert error["code"] == "grammar_too_large" and f"the {field} has " in error["message"]


def called(arguments: str) -> dict[str, Any]:
    """An answer that called a tool."""
    return {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}]}


CHATS: list[tuple[dict[str, Any], str | None]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0"),
    ({"messages": [{"role": "user", "content": "a", "annotations": [{}]}]}, "messages.0"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages.0.content.0.type"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "response_format"),
    ({"functions": []}, "functions"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs"),  # which the template does not read
    ({"chat_template_kwargs": {"eos_token": "x"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop.1"),
    ({"messages": [called("[" * 30_000)]}, "messages"),
    ({"messages": [called("[" * 30_000 + "]" * 30_000)]}, "messages"),
    ({"messages": [called('{"a": "\\ud800"}')]}, None),
    ({"messages": [called('{"a": NaN}')]}, None),
]


@pytest.mark.parametrize(("fields", "param"), CHATS, ids=[f"{param}{index}" for index, (_, param) in enumerate(CHATS)])
def test_chat_fields(url: str, fields: dict[str, Any], param: str | None):
    assert refusal(httpx.post(url + "/v1/chat/completions", json=CHAT | fields, timeout=30), 400)["param"] == param


def test_a_chat_without_a_template_is_refused():
    tokenizer = load_tokenizer(TINY)
    tokenizer.chat_template = None
    with served(Speculator(load_model(TINY), "none", tokenizer=tokenizer, execution="eager")) as url:
        for path in ("/v1/chat/completions", "/tokenize"):
            error = refusal(httpx.post(url + path, json={"messages": CHAT["messages"]}, timeout=60), 400)
            assert error["code"] == "no_chat_template" and "or start the server with --chat-template" in error["message"]


@pytest.mark.parametrize("field", [{"tools": []}, {"add_generation_prompt": True}, {"chat_template_kwargs": {}}], ids=str)
def test_a_text_to_tokenize_takes_no_fields_of_a_conversation(url: str, field: dict[str, Any]):
    error = refusal(httpx.post(url + "/tokenize", json={"prompt": "a"} | field), 400)
    assert [error["param"]] == list(field) and "needs messages" in error["message"]


MANY = 100_000


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("completions", {f"odd{index}": 1 for index in range(MANY)}, "odd0"),
        ("completions", {"stream": True, "stream_options": {f"odd{index}": 1 for index in range(MANY)}}, "stream_options.odd0"),
        ("completions", {"prompt": [-1] * MANY}, "prompt.0"),
        ("completions", {"prompt": [[-1]] * MANY}, "prompt.0.0"),
        ("completions", {"stop": [1] * MANY}, "stop.0"),
        ("completions", {"logit_bias": {str(index): "a" for index in range(MANY)}}, "logit_bias"),
        ("completions", {"prediction": {"content": [{}] * MANY}}, "prediction.content.0.type"),
        ("chat/completions", {"messages": [{}] * MANY}, "messages.0.role"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{}] * MANY}]}, "messages.0.content.0.type"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 5000}]}, "messages.0.content"),
        ("chat/completions", {"tools": [{}] * MANY}, "tools.0.type"),
        ("tokenize", {"messages": [{}] * MANY}, "messages.0.role"),
        ("tokenize", {"messages": [CHAT["messages"][0]] * 5000}, "messages"),
        ("tokenize", {"prompt": "a", "tools": [{}] * MANY}, "tools.0.type"),
    ],
)
def test_of_a_million_mistakes_one_is_told_of(path: str, fields: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch):
    kind = {"completions": CompletionRequest, "chat/completions": ChatRequest, "tokenize": TokenizeRequest}[path]
    rest = {"completions": OK, "chat/completions": CHAT, "tokenize": {}}[path]
    counted: list[int] = []

    def field_error(errors: Any, data: Any) -> ApiError:
        counted.append(len(errors))
        return original(errors, data)

    original = protect.field_error
    monkeypatch.setattr(protect, "field_error", field_error)
    with pytest.raises(ApiError) as found:
        protect.parse(json.dumps(rest | fields).encode(), kind)
    assert found.value.param == param and counted[0] < 10


def test_what_cannot_change_a_text_is_accepted(url: str):
    noted = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "suffix": None, "logit_bias": None, "audio": None}
    assert httpx.post(url + "/v1/completions", json=OK | noted, timeout=30).status_code == 200


def test_paths_methods_and_types(url: str):
    refusal(httpx.get(url + "/nowhere"), 404)
    refusal(httpx.get(url + "/v1/models/other"), 404)
    refusal(httpx.post(url + "/v1/completions", json=OK | {"model": "other"}), 404)
    for method, path in (("POST", ""), ("GET", ""), ("GET", "/resp_1"), ("POST", "/resp_1/cancel")):
        assert "not served" in refusal(httpx.request(method, url + "/v1/responses" + path), 404)["message"]
    for path in ("/v1/completions/", "/v1/models/", "/page", "/health/"):  # nothing is guessed, and nobody is sent elsewhere
        refusal(httpx.get(url + path), 404)
    refusal(httpx.get(url + "/v1/completions"), 405)
    refusal(httpx.post(url + "/v1/completions", content=b"{}", headers={"content-type": "text/plain"}), 415)
    refusal(httpx.get(url + "/page/..%2f..%2fschema.py"), 404)
    refusal(httpx.get(url + "/health", headers={"host": "evil.example"}), 400)
    assert httpx.get(url + "/health", headers={"host": "localhost:1"}).status_code == 200


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:1", "127.0.0.2:1", "[::1]:1"])
def test_every_local_host_is_taken(url: str, host: str):
    """A server may listen at any local address."""
    assert httpx.get(url + "/health", headers={"host": host}).status_code == 200


def test_request_ids_are_echoed(url: str):
    assert httpx.get(url + "/v1/models", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert httpx.get(url + "/v1/models", headers={"x-request-id": "a b"}).headers["x-request-id"] != "a b"


def raw(url: str, sent: bytes, *, timeout: float = 10) -> bytes:
    """What comes back, as far as the server closes the connection."""
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=timeout) as connection:
        connection.sendall(sent)
        received = b""
        while part := connection.recv(1 << 16):
            received += part
    return received


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_large_bodies_are_refused_before_they_are_read(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(protect, "LINGER", 0.5)
    assert raw(url, HEAD + b"Content-Length: 100001\r\n\r\n").startswith(b"HTTP/1.1 413")
    chunk = b"8000\r\n" + b"a" * 0x8000 + b"\r\n"
    for count in (4, 100):  # the answer must not be lost because bytes are unread when the server closes the connection
        assert raw(url, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * count).startswith(b"HTTP/1.1 413")
    assert raw(url, HEAD + b"Content-Length: 3276800\r\n\r\n" + b"a" * 3276800).startswith(b"HTTP/1.1 413")


def test_slow_bodies_are_given_up(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(protect, "BODY_TIMEOUT", 0.2)
    assert raw(url, HEAD + b'Content-Length: 50\r\n\r\n{"prompt"').startswith(b"HTTP/1.1 408")


def test_bodies_of_all_requests_together_are_bounded(monkeypatch: pytest.MonkeyPatch):
    """What one request holds is there for the next ones once it is over."""
    monkeypatch.setattr(protect, "BODIES", 1)
    large = {**OK, "user": "u" * 600}
    with served(tiny_chat(), max_body=1000) as own, socket.create_connection(("127.0.0.1", int(own.rpartition(":")[2]))) as slow:
        slow.sendall(HEAD + b"Content-Length: 900\r\n\r\n" + b" " * 700)
        begin = time.monotonic()
        while (answer := httpx.post(own + "/v1/completions", json=large)).status_code == 200:
            assert time.monotonic() - begin < 5
        assert refusal(answer, 503)["code"] == "busy" and answer.headers["retry-after"] == "1"
        assert httpx.post(own + "/v1/completions", json=OK).status_code == 200
        slow.close()
        while httpx.post(own + "/v1/completions", json=large).status_code == 503:
            assert time.monotonic() - begin < 5


def test_one_key_cannot_hold_all_bodies(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(protect, "SHARE", 1)
    large = {**OK, "user": "u" * 600}
    with served(tiny_chat(), max_body=1000, keys={"a": "one", "b": "two"}) as own:
        with socket.create_connection(("127.0.0.1", int(own.rpartition(":")[2]))) as slow:
            slow.sendall(HEAD + b"Authorization: Bearer one\r\nContent-Length: 900\r\n\r\n" + b" " * 700)

            def status(key: str) -> int:
                return httpx.post(own + "/v1/completions", json=large, headers={"authorization": f"Bearer {key}"}).status_code

            wait_for(lambda: status("one") == 503)
            assert status("two") == 200
        wait_for(lambda: status("one") == 200)


def test_keys_are_asked_for_everywhere_but_where_they_are_not():
    with served(tiny_chat(), keys={"a": "secret"}) as url:
        assert httpx.get(url + "/health").status_code == httpx.get(url + "/metrics").status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}, {"authorization": "Basic secret"}):
            assert refusal(httpx.get(url + "/v1/models", headers=headers), 401)["code"] == "invalid_api_key"
            refusal(httpx.post(url + "/tokenize", json={"prompt": "a"}, headers=headers), 401)
        assert httpx.get(url + "/v1/models", headers={"authorization": "bearer secret"}).status_code == 200


def test_how_long_a_key_is_looked_for_says_nothing_about_it(monkeypatch):
    """Every key is compared, in a time that does not depend on where it differs, whichever was given."""
    compared, compare = [], hmac.compare_digest
    monkeypatch.setattr("foredraft.serving.protect.hmac.compare_digest", lambda *both: compared.append(both) or compare(*both))
    with served(tiny_chat(), keys={"a": "first", "b": "second", "c": "third"}) as url:
        for key, status in (("first", 200), ("third", 200), ("firsT", 401)):
            compared.clear()
            assert httpx.get(url + "/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == status
            assert compared == [(key.encode(), each) for each in (b"first", b"second", b"third")]


def test_a_mounted_server_asks_for_keys_where_it_would_alone():
    """Wherever it is mounted."""
    own = application.app(tiny_chat(), Settings(model="tiny", keys={"a": "secret"}))
    transport = httpx.ASGITransport(Starlette(routes=[Mount("/page/model", app=own)]))

    async def statuses(*paths: str) -> list[int]:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost/page/model") as client:
            return [(await client.get(path)).status_code for path in paths]

    assert asyncio.run(statuses("/metrics", "/", "/page/icon.svg", "/v1/models")) == [200, 200, 200, 401]


def test_keys_may_have_any_letters():
    with served(tiny_chat(), keys={"a": "schlüssel-à"}) as url:
        for key, status in (("schlüssel-à", 200), ("schlussel-a", 401)):
            assert httpx.get(url + "/v1/models", headers={b"authorization": b"Bearer " + key.encode()}).status_code == status


def test_a_path_is_one_line_of_the_log(url: str, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "foredraft.serving")
    httpx.get(url + "/a%0areq-1%20GET%20/v1/models%20200")
    wait_for(lambda: "/a%0Areq-1%20GET%20/v1/models%20200 404 " in caplog.text)
    assert all("\n" not in record.getMessage() for record in caplog.records)


def test_other_origins_are_allowed_where_settings_say_so(url: str):
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in httpx.options(url + "/v1/completions", headers=asked).headers
    with served(tiny_chat(), cors_origins=["https://a.example"], keys={"a": "secret"}, max_queue=4) as open_url:
        error = httpx.options(open_url + "/v1/completions", headers=asked | {"origin": "https://b.example"})
        assert error.status_code == 400 and "--cors-origin" in error.json()["error"]["message"]
        many = httpx.post(open_url + "/v1/completions", json=OK | {"n": 5}, headers={"authorization": "Bearer secret"})
        assert refusal(many, 400)["param"] == "n" and "--max-queue" in many.text
        allowed = httpx.options(open_url + "/v1/completions", headers=asked)
        assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == "https://a.example"
        assert httpx.get(open_url + "/v1/models", headers=asked).headers["access-control-allow-origin"] == "https://a.example"


def test_full_queues_say_when_to_come_back(monkeypatch: pytest.MonkeyPatch):
    with served(tiny_chat(), max_queue=2, max_rows=1) as url:
        long = {"prompt": "hello", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        with httpx.Client() as client, ExitStack() as open_streams:
            open_streams.enter_context(client.stream("POST", url + "/v1/completions", json=long))
            wait_for(lambda: live(url) == 1)
            body = json.dumps(long | {"n": 2}).encode()
            waiting = open_streams.enter_context(socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))))
            waiting.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            wait_for(lambda: gauge(url, "waiting") == 2)
            full = httpx.post(url + "/v1/completions", json=long)
            assert refusal(full, 429)["code"] == "queue_full" and int(full.headers["retry-after"]) >= 1
            monkeypatch.setattr(Requests, "plan", None)  # a refusal costs no tokenising
            refusal(httpx.post(url + "/v1/completions", json=long), 429)


def test_requests_that_take_too_long_are_over():
    with served(tiny_chat(), request_timeout=0.3) as url:
        long = {"prompt": "hello", "max_tokens": 1900, "ignore_eos": True}
        refusal(httpx.post(url + "/v1/completions", json=long, timeout=30), 504)
        streamed = httpx.post(url + "/v1/completions", json=long | {"stream": True}, timeout=30)
        assert streamed.status_code == 200 and "[DONE]" not in streamed.text
        name, data = streamed.text.strip().split("\n\n")[-1].split("\n")
        assert name == "event: error" and json.loads(data.removeprefix("data: "))["error"]["type"] == "timeout_error"


def live(url: str) -> int:
    return gauge(url, "running")


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_leave_free_their_rows(stream: bool, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "foredraft.serving")
    with served(tiny_chat()) as url:
        body = json.dumps({"prompt": "hello", "max_tokens": 1900, "ignore_eos": True, "stream": stream}).encode()
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
            connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            wait_for(lambda: live(url) == 1)
            if stream:
                connection.recv(100)
        wait_for(lambda: live(url) == 0)
        wait_for(lambda: " 499 " in caplog.text)
        ended = [line for line in httpx.get(url + "/metrics").text.splitlines() if line.startswith("vllm:request_success_total{")]
        assert [float(line.split()[-1]) for line in ended if '"abort"' in line] == [1.0], "it did not end by itself"


def test_the_log_has_the_status_of_an_error_in_a_stream(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "foredraft.serving")
    with served(tiny_chat(), request_timeout=0.3) as url:
        body = {"prompt": "hello", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        assert "event: error" in httpx.post(url + "/v1/completions", json=body, timeout=30).text
        wait_for(lambda: "POST /v1/completions 504 " in caplog.text)


def test_readers_that_stall_are_given_up(monkeypatch: pytest.MonkeyPatch):
    """Once the system's buffers are full, ``send`` waits until the client reads."""
    monkeypatch.setattr(sse, "STALLED", 0.05)
    closed = []

    async def parts() -> Any:
        yield b"a"
        yield b"b"

    def close() -> None:
        closed.append(True)

    async def send(message: Any) -> None:
        if message.get("body") == b"b":
            await asyncio.Event().wait()

    async def receive() -> Any:
        await asyncio.Event().wait()

    with pytest.raises(ClientDisconnect):
        asyncio.run(sse.EventStream(parts(), close)({"type": "http"}, receive, send))
    assert closed


def test_readers_that_go_on_are_not_given_up(monkeypatch: pytest.MonkeyPatch):
    """However long the answer takes, if each part of it is read in time."""
    monkeypatch.setattr(sse, "STALLED", 0.2)
    sent = []

    async def parts() -> Any:
        for part in (b"a", b"b", b"c"):
            yield part
            await asyncio.sleep(0.25)

    async def send(message: Any) -> None:
        sent.append(message.get("body"))

    async def receive() -> Any:
        await asyncio.Event().wait()

    asyncio.run(sse.EventStream(parts(), lambda: None)({"type": "http"}, receive, send))
    assert sent == [None, b"a", b"b", b"c", b""]


def test_pings_come_while_nothing_else_does(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sse, "PING", 0.05)
    monkeypatch.setattr("foredraft.serving.application.PING", 0.05)
    with served(tiny_chat(), max_rows=1) as url:
        first = threading.Thread(
            target=httpx.post, args=(url + "/v1/completions",), kwargs={"json": OK | {"max_tokens": 200, "ignore_eos": True}, "timeout": 60}
        )
        first.start()
        wait_for(lambda: live(url) == 1)
        waiting = httpx.post(url + "/v1/completions", json=OK | {"stream": True}, timeout=60)
        assert ": ping\n\n" in waiting.text and "[DONE]" in waiting.text
        first.join()


def of_property(schemas: Iterable[Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{index}": schema for index, schema in enumerate(schemas)}}


PATTERNS = [{"type": "string", "pattern": f".*{letter}.{{{index}}}.*"} for index, letter in enumerate("abcdefghijklmnopqrst", 5)]
TOGETHER: Any = reduce(lambda inner, outer: {**outer, "anyOf": [inner]}, PATTERNS)
MULTIPLES = {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (2, 3, 5, 7, 11, 13, 17, 19, 23)]}
NAMES = {"type": "object", "patternProperties": {f"^a{index}$": {"type": "string"} for index in range(400)}}
ENDLESS = {
    "patterns of allOf": {"json": {"allOf": PATTERNS}},
    "patterns of anyOf": {"json": TOGETHER},
    "patterns by reference": {"json": {"$defs": {"a/b": {"allOf": PATTERNS}}, **of_property([{"$ref": "#/$defs/a~1b"}])}},
    "patterns by places in a list": {
        "json": {"$defs": {"p": {"anyOf": PATTERNS}}, "allOf": [{"$ref": f"#/$defs/p/anyOf/{index}"} for index in range(len(PATTERNS))]}
    },
    "patterns by a reference in other words": {"json": {"$defs": {"p": {"allOf": PATTERNS}}, "$ref": "#/%24defs/p"}},
    "patterns by an anchor": {"json": {"$defs": {"p": {"$anchor": "here", "allOf": PATTERNS}}, "$ref": "#here"}},
    "patterns by another base": {"json": {"$defs": {"p": {"$id": "http://a/b", "allOf": PATTERNS}}, "$ref": "#/$defs/p"}},
    "terminals in Lark": {"grammar": "start: T\nT: " + " & ".join(f"/{each['pattern']}/" for each in PATTERNS)},
    "terminals behind a quote in a pattern": {
        "grammar": 'start: T\nT: /a\n"/ & ' + " & ".join(f"/{each['pattern']}/" for each in PATTERNS)
    },
    "patterns of properties": {"json": {"allOf": [of_property([each]) for each in PATTERNS]}},
    "a schema as text": {"json": json.dumps({"allOf": PATTERNS})},
    "a schema in Lark": {"grammar": "start: %json " + json.dumps({"allOf": PATTERNS})},
    "common multiples": {"json": MULTIPLES},
    "many multiples": {"json": of_property({"type": "integer", "multipleOf": 9973 - index} for index in range(50))},
    "one multiple": {"json": {"type": "integer", "multipleOf": 399_989}},
    "names": {"json": NAMES},
    "properties": {"json": of_property([{}] * 3000)},
}
HARD = {
    "alternatives": {"regex": "(a|aa|ab|b)*" * 50 + "c"},
    "counts": {"regex": "(.{1,1000}){1,1000}"},
    "options": {"regex": "a?" * 2000 + "a" * 90},
    "a list of numbers": {"json": {"type": "array", "items": {"enum": list(range(8000))}}},
    "numbers": {"json": of_property({"type": "number", "minimum": -1.2345e10 - index, "maximum": 9.8765e12} for index in range(500))},
    "terminals": {"grammar": "start: A0\n" + "".join(f"A{index}: A{index + 1} A{index + 1}\n" for index in range(40)) + 'A40: "x"\n'},
    "ambiguous": {"grammar": "start: e\ne: e e e | e e | /(.|\\n)/\n"},
    "a long expression": {"grammar": "start: /" + "(a|aa|ab|b)*" * 5000 + "/\n"},
}


@pytest.mark.parametrize("name", ENDLESS)
def test_schemas_that_would_take_for_ever_are_refused(url: str, name: str):
    """llguidance would not come back from most of these: its limits do not cover them."""
    asked, begin = OK | {"structured_outputs": ENDLESS[name]}, time.monotonic()
    assert refusal(httpx.post(url + "/v1/completions", json=asked, timeout=60), 400)["param"] == "structured_outputs"
    assert time.monotonic() - begin < 5


def test_schemas_as_people_write_them_are_no_hard_ones():
    """Patterns, formats, steps and references, as long as one value has few of them."""
    each = {"anyOf": [{"type": "string", "pattern": "^[a-z]+$"}, {"type": "string", "format": "date"}, {"type": "null"}], "title": "A"}
    tree = {"type": "object", "properties": {"text": each, "next": {"$ref": "#/$defs/tree"}, "price": {"multipleOf": 0.01}}}
    check("json_schema", {"$defs": {"tree": tree}, **of_property([each, tree, {"type": "integer", "multipleOf": 50}] * 30)})
    check("json_schema", {"type": "object", "properties": {"pattern": each, "multipleOf": each, "allOf": each, "$ref": each}})


@pytest.mark.parametrize("name", HARD)
def test_hard_grammars_slow_nobody(url: str, name: str):
    """They are refused, or bounded, while others go on."""
    begin = time.monotonic()
    with ThreadPoolExecutor(1) as thread:
        hard = thread.submit(httpx.post, url + "/v1/completions", json=OK | {"structured_outputs": HARD[name]}, timeout=60)
        assert httpx.post(url + "/v1/completions", json=OK, timeout=60).status_code == 200
        assert time.monotonic() - begin < 5
        assert hard.result(30).status_code in (200, 400, 503) and time.monotonic() - begin < 15


def test_a_grammar_that_is_hard_to_follow_ends_its_own_text_alone(url: str, monkeypatch: pytest.MonkeyPatch):
    """It compiles at once, and the tokens that it allows take longer to find at each place: a second, without a bound."""
    monkeypatch.setattr(formats, "MOST_ITEMS", 1000)
    grammar = HARD["ambiguous"]["grammar"].replace("start", "start ")
    never_ends = {str(tiny_chat().tokenizer.eos_token_id): -100}
    asked = OK | {"max_tokens": 60, "structured_outputs": {"grammar": grammar}, "logit_bias": never_ends}
    error = refusal(httpx.post(url + "/v1/completions", json=asked, timeout=60), 400)
    assert error["code"] == "grammar_too_large" and error["param"] == "structured_outputs"
    assert error["message"].startswith("structured_outputs: ") and "Too many items" in error["message"]
    assert "<state>" not in error["message"]
    assert httpx.post(url + "/v1/completions", json=OK, timeout=60).status_code == 200


def test_a_slow_grammar_is_the_fault_of_its_own_request(url: str, monkeypatch: pytest.MonkeyPatch):
    """It cannot be stopped. Others have a thread left, and where none is left they are told to come back."""
    let_go, make = threading.Event(), formats.Formats._make

    def slow(self: Any, source: dict[str, Any]) -> Any:
        if source["regex"].startswith("slow"):
            let_go.wait(20)
        return make(self, source)

    def ask(regex: str) -> httpx.Response:
        return httpx.post(url + "/v1/completions", json=OK | {"structured_outputs": {"regex": regex}}, timeout=60)

    monkeypatch.setattr(formats.Formats, "_make", slow)
    monkeypatch.setattr(formats, "SECONDS", 0.5)
    try:
        assert refusal(ask("slow1"), 400)["code"] == "grammar_too_large"
        assert ask("quick").status_code == 200
        refusal(ask("slow2"), 400)
        full = ask("quick2")
        assert refusal(full, 503)["code"] == "busy" and full.headers["retry-after"]
    finally:
        let_go.set()
    wait_for(lambda: ask("quick").status_code == 200)


def test_a_grammar_is_compiled_once_for_all_who_ask(monkeypatch: pytest.MonkeyPatch):
    """More than may wait for a thread; one that cannot be compiled is tried again."""
    made: list[str] = []

    def make(self: Any, source: dict[str, Any]) -> Any:
        time.sleep(0.1)
        made.append(source["regex"])
        if source["regex"] == "wrong":
            raise ConfigurationError("no")
        return source

    async def ask() -> None:
        some = formats.Formats(None, frozenset())
        asked = [some.compile("tools", {"regex": "right"}) for _ in range(2 * formats.MOST_WAITING)]
        assert await asyncio.gather(*asked, some.compile("tools", {"regex": "right"})) == [{"regex": "right"}] * (len(asked) + 1)
        for _ in range(2):
            with pytest.raises(ApiError):
                await some.compile("tools", {"regex": "wrong"})
        for number in range(formats.KEPT):
            await some.compile("tools", {"regex": str(number)})
        assert len(some._known) == formats.KEPT
        some.close()

    monkeypatch.setattr(formats.Formats, "_make", make)
    asyncio.run(ask())
    assert made == ["right", "wrong", "wrong", *map(str, range(formats.KEPT))]


def test_tokenizing_takes_no_thread_from_completions(monkeypatch: pytest.MonkeyPatch):
    let_go = threading.Event()
    monkeypatch.setattr(application, "MOST_ASIDE", 1)
    monkeypatch.setattr(application.Requests, "tokenize", lambda self, asked: [let_go.wait(20)] * 0)

    def full() -> bool:
        try:
            return httpx.post(url + "/detokenize", json={"tokens": [3]}, timeout=0.5).status_code == 503
        except httpx.TimeoutException:  # it was the one that may wait
            return False

    with ExitStack() as stack:
        url = stack.enter_context(served(tiny_chat()))
        body = b'{"prompt": "a"}'
        for _ in range(2):
            asking = stack.enter_context(socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))))
            asking.sendall(HEAD.replace(b"/v1/completions", b"/tokenize") + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        try:
            wait_for(lambda: not full())  # both threads are taken, and one request waits
            wait_for(full)
            assert httpx.post(url + "/v1/completions", json=OK, timeout=30).status_code == 200
        finally:
            let_go.set()
        wait_for(lambda: httpx.post(url + "/detokenize", json={"tokens": [3]}).status_code == 200)


def test_clients_that_leave_at_any_moment_leave_nothing_behind(url: str):
    """Before their row has a turn, while it is read, in the middle of the stream."""
    body = json.dumps({"prompt": "hello", "max_tokens": 1900, "ignore_eos": True, "stream": True, "n": 2}).encode()
    for pause in [0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05] * 3:
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
            connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            time.sleep(pause)
    wait_for(lambda: live(url) == gauge(url, "waiting") == 0)
