"""``foredraft serve`` as a process: what it prints, how it drains, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Queue
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
import uvicorn
from helpers import forked
from served import TINY, tiny_chat
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from typer.testing import CliRunner
from uvicorn.server import ServerState

from foredraft.backends import native
from foredraft.cli import main
from foredraft.cli.serve import Serving, read_keys, settings_of
from foredraft.cli.settings import Configuration
from foredraft.errors import ConfigurationError
from foredraft.serving import Settings, app, sse
from foredraft.serving.connections import Connection
from foredraft.serving.running import Server
from foredraft.serving.sockets import address_of, bind

LONG = {"model": "tiny", "prompt": "x", "max_tokens": 100_000, "stream": True, "ignore_eos": True}


def command(out: int, *arguments: str) -> None:
    """The command line, in a forked process."""
    sys.stdout = os.fdopen(out, "w")
    sys.argv = ["foredraft", "serve", *arguments]
    main()


def server(out: int, prepare: Callable[[Any], None], settings: dict[str, Any]) -> None:
    """The process behind it, with a model that is there already."""
    sys.stdout = os.fdopen(out, "w")
    speculator = tiny_chat()
    prepare(speculator)
    application = app(speculator, Settings(model="tiny", **settings))
    process = Server(
        application,
        application.state.engine,
        bind("127.0.0.1", 0),
        ready=lambda address: print("ready", address, flush=True),
        said=lambda line: print(line, flush=True),
    )
    process.serve_until_signal()
    sys.exit(int(process.died))


@contextmanager
def process(function: Callable[..., None], *arguments: Any) -> Iterator[SimpleNamespace]:
    """A process with its ``url``, once it is ready, and its ``lines``."""
    read, write = os.pipe()
    running = forked(function, write, *arguments)
    os.close(write)
    try:
        with os.fdopen(read) as lines:
            line = lines.readline()
            url = next((word for word in line.replace("/v1", " ").split() if word.startswith("http://")), "")
            assert url, line
            yield SimpleNamespace(url=url, line=line, lines=lines, process=running, kill=lambda sig: os.kill(running.pid, sig))
    finally:
        running.kill()
        running.join(10)


def ended(found: SimpleNamespace, seconds: float = 20.0) -> int | None:
    found.process.join(seconds)
    return found.process.exitcode


def nothing(speculator: Any) -> None:
    pass


def slow(speculator: Any) -> None:
    """A text takes many seconds, on any machine."""
    score = speculator.target.score

    def slowly(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.05)
        return score(*arguments, **options)

    speculator.target.score = slowly


def test_the_command_serves_until_it_is_told_to_stop():
    native.refusal(torch.float32)  # compiled once, in the process that is forked
    flags = [
        "--no-page",
        "--api-key",
        "secret",
        "--request-metrics",
        "--cors-origin",
        "https://a.example",
        "--cors-origin",
        "https://b.example",
    ]
    with process(command, str(TINY), "--drafter", "none", "--port", "0", "--threads", "1", *flags) as found:
        assert "the OpenAI API is at http://127.0.0.1:" in found.line and "web page" not in found.line
        with httpx.Client(base_url=found.url, timeout=30) as client:
            asked = {"model": str(TINY), "prompt": "x", "max_tokens": 3, "seed": 1}
            assert client.get("/health").status_code == 200 and client.post("/v1/completions", json=asked).status_code == 401
            client.headers["authorization"] = "Bearer secret"
            answers = [client.post("/v1/completions", json=asked).json() for _ in range(2)]
            assert answers[0]["choices"] == answers[1]["choices"] and answers[0]["usage"]["completion_tokens"] == 3
            assert answers[0]["system_fingerprint"].startswith("fp_") and "speculative_decoding" in answers[0]["metrics"]
            for origin, allowed in (("https://a.example", True), ("https://b.example", True), ("https://c.example", False)):
                headers = client.get("/v1/models", headers={"origin": origin}).headers
                assert (headers.get("access-control-allow-origin") == origin) == allowed
        found.kill(signal.SIGINT)
        assert ended(found) == 0


def test_sigterm_drains_and_then_tells_the_rest():
    with process(server, slow, {"drain": 3.0}) as found, httpx.Client(base_url=found.url, timeout=30) as client:
        with client.stream("POST", "/v1/completions", json=LONG) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data:")
            begin = time.monotonic()
            found.kill(signal.SIGTERM)
            with httpx.Client(base_url=found.url, timeout=30) as other:  # new connections are taken, and refused in words
                while (health := other.get("/health")).status_code == 200:
                    assert time.monotonic() - begin < 2.9
                assert health.status_code == 503 and health.json() == {"status": "draining"}
                refusal = other.post("/v1/completions", json={**LONG, "stream": False})
                assert refusal.status_code == 503 and "about to stop" in refusal.json()["error"]["message"]
                gets = [other.get(path) for path in ("/v1/models", "/v1/models/tiny", "/tokenizer_info", "/openapi.json", "/rounds", "/no")]
                for refusal in [*gets, *(other.post(path, json={"prompt": "a"}) for path in ("/tokenize", "/detokenize", "/rounds"))]:
                    assert refusal.status_code == 503 and refusal.json()["error"]["code"] == "draining", refusal.url
                assert other.get("/metrics").status_code == other.get("/").status_code == 200
            rest = [line for line in lines if line]
        assert 2.9 < time.monotonic() - begin < 15
        assert rest[-2] == "event: error" and "the server stops" in rest[-1] and len(rest) > 4
        assert ended(found) == 0
        assert "have 3 s" in found.lines.read()


def test_a_second_signal_ends_at_once():
    with process(server, nothing, {"drain": 60.0}) as found, httpx.stream("POST", found.url + "/v1/completions", json=LONG) as response:
        lines = response.iter_lines()  # without a reference to it the connection would be closed, and the server have nothing to end
        next(lines)
        found.kill(signal.SIGTERM)
        assert "a second signal" in found.lines.readline()
        begin = time.monotonic()
        found.kill(signal.SIGTERM)
        assert ended(found) == 128 + signal.SIGTERM and time.monotonic() - begin < 5


def test_a_dead_engine_ends_the_process_with_1():
    def broken(speculator: Any) -> None:
        def score(*arguments: Any, **options: Any) -> None:
            raise RuntimeError("a planted fault")

        speculator.target.score = score

    with process(server, broken, {}) as found, httpx.Client(base_url=found.url, timeout=30) as client:
        statuses = [client.post("/v1/completions", json={**LONG, "stream": False}).status_code for _ in range(3)]
        assert statuses == [500] * 3 and ended(found) == 1


def test_connections_cannot_be_held_open_for_nothing(monkeypatch):
    """Silent, or with a head that never ends, on a new connection and on one that had an answer. A stream may take longer."""
    monkeypatch.setattr("foredraft.serving.connections.HEADERS", 0.5)  # in the forked process, too
    with process(server, nothing, {}) as found:
        address = ("127.0.0.1", int(found.url.rpartition(":")[2]))

        def closed_after(connection: socket.socket, *, drips: bool) -> float:
            connection.settimeout(0.1)
            begin = time.monotonic()
            while time.monotonic() - begin < 5:
                try:
                    if drips:
                        connection.send(b"X-A: b\r\n")
                    if not connection.recv(4096):
                        break
                except TimeoutError:
                    pass
                except ConnectionError:
                    break
            return time.monotonic() - begin

        for drips, begins in ((False, b""), (True, b"GET /health HTTP/1.1\r\n")):
            with socket.create_connection(address) as connection:
                connection.sendall(begins)
                assert 0.3 < closed_after(connection, drips=drips) < 3
        with socket.create_connection(address) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200 OK" in connection.recv(4096)
            time.sleep(0.7)  # between requests it may be idle
            connection.sendall(b"GET /health HTTP/1.1\r\n")
            assert 0.3 < closed_after(connection, drips=True) < 3
        with httpx.stream("POST", found.url + "/v1/completions", json=LONG, timeout=30) as response:
            begin, lines = time.monotonic(), response.iter_lines()
            while time.monotonic() - begin < 1:
                next(lines)


def test_what_is_no_http_gets_an_error_like_any_other():
    """And in the middle of an answer, nothing is put into that."""
    chunked = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    with process(server, nothing, {"max_body": 1000}) as found:
        address = ("127.0.0.1", int(found.url.rpartition(":")[2]))

        def sent(*parts: bytes) -> bytes:
            with socket.create_connection(address, timeout=10) as connection:
                received = b""
                for part in parts:
                    connection.sendall(part)
                    received += connection.recv(1 << 16)
                while more := connection.recv(1 << 16):
                    received += more
            return received

        for broken in (b"no HTTP\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: a\r\n\r\n", chunked + b"no number\r\n"):
            head, _, text = sent(broken).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400 ") and b"content-type: application/json" in head
            assert json.loads(text)["error"]["code"] == "invalid_http", text
        large = sent(chunked + b"800\r\n" + b"a" * 0x800 + b"\r\n", b"no number\r\n")  # the rest is read before the answer ends
        assert large.startswith(b"HTTP/1.1 413 ") and large.count(b"HTTP/1.1") == 1


def test_a_client_that_reads_nothing_is_cut_off_and_a_slow_one_is_not(monkeypatch):
    """Also once the connection is to be closed: that alone would wait for the client for ever."""
    monkeypatch.setattr(sse, "STALLED", 0.01)

    class Transport(asyncio.Transport):
        def __init__(self, unsent: list[int]):
            super().__init__()
            self.unsent, self.aborted = unsent, asyncio.Event()

        def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
            assert high == 0

        def get_write_buffer_size(self) -> int:
            return self.unsent.pop(0)

        def abort(self) -> None:
            self.aborted.set()

    async def main() -> None:
        config = uvicorn.Config(app=lambda scope: None, log_config=None)
        for unsent in ([9, 5, 2, 2], [9, 9]):
            connection, transport = Connection(config=config, server_state=ServerState(), app_state={}), Transport(unsent)
            connection.connection_made(transport)
            connection.pause_writing()
            await asyncio.wait_for(transport.aborted.wait(), 5)
            assert not unsent
        connection, transport = Connection(config=config, server_state=ServerState(), app_state={}), Transport([9])
        connection.connection_made(transport)
        connection.pause_writing()
        connection.resume_writing()
        assert connection._stalled is None
        connection._stop()

    asyncio.run(main())


def test_there_are_only_so_many_connections(monkeypatch):
    monkeypatch.setattr("foredraft.serving.running.CONNECTIONS", 2)
    with process(server, nothing, {"max_rows": 1, "max_queue": 1}) as found:
        address = ("127.0.0.1", int(found.url.rpartition(":")[2]))
        idle = [socket.create_connection(address) for _ in range(4)]
        refused = httpx.get(found.url + "/v1/models", headers={"x-request-id": "mine"})
        assert refused.status_code == 503 and "too many connections" in refused.json()["error"]["message"]
        assert refused.headers["x-request-id"] == "mine" and refused.headers["retry-after"] == "1"
        assert httpx.get(found.url + "/health").json() == {"status": "ready"}
        for each in idle:
            each.close()
        begin = time.monotonic()
        while httpx.get(found.url + "/v1/models").status_code == 503:
            assert time.monotonic() - begin < 5


def test_nobody_is_taken_for_somebody_else():
    """Or a client would have as many turns in the queue as it can invent addresses."""

    async def client(request: Request) -> PlainTextResponse:
        return PlainTextResponse(request.client.host)

    engine: Any = SimpleNamespace(settings=Settings())
    ready: Queue[str] = Queue()
    running = Server(Starlette(routes=[Route("/", client)]), engine, bind("127.0.0.1", 0), ready=ready.put, said=print)
    thread = threading.Thread(target=running.serve_until_signal, daemon=True)
    thread.start()
    assert httpx.get(ready.get(timeout=10), headers={"X-Forwarded-For": "10.0.0.1"}).text == "127.0.0.1"
    running.should_exit = True
    thread.join(10)
    assert not thread.is_alive()


# -- what it refuses --------------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        from foredraft.cli import app as commands

        result = CliRunner().invoke(commands, ["serve", str(TINY), "--drafter", "none", "--port", str(port)], prog_name="foredraft")
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
    assert f"cannot listen at 127.0.0.1 port {port}" in result.stderr and "--port 0" in result.stderr


def test_deterministic_refuses_what_cannot_be_repeated():
    """By its message, before it takes requests. The rule ``auto`` has draws that depend on the drafts."""
    from foredraft.cli import app as commands

    asked = ["serve", str(TINY), "--drafter", "none", "--rule", "auto", "--port", "0", "--threads", "1", "--deterministic"]
    result = CliRunner().invoke(commands, asked, prog_name="foredraft")
    assert result.exit_code == 2 and "cannot be repeated bit for bit" in result.stderr and "Leave --deterministic out" in result.stderr
    assert settings_of(Configuration("zoo:python-8m"), Serving(deterministic=True)).deterministic
    assert settings_of(Configuration("zoo:python-8m"), Serving()).deterministic is None


def test_addresses():
    for host in ("127.0.0.1", "localhost"):
        with bind(host, 0) as bound:
            assert address_of(bound).startswith("http://")
    for host in ("no.such.host.invalid", "no..such.host", "no" * 40):
        with pytest.raises(ConfigurationError, match="cannot listen at no"):
            bind(host, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the second socket is refused at once")
def test_a_port_that_another_server_took_while_this_one_loaded_is_one_line():
    """Both may have a socket there as long as neither listens."""
    with bind("127.0.0.1", 0) as other, bind("127.0.0.1", other.getsockname()[1]) as bound:
        other.listen()
        engine: Any = SimpleNamespace(settings=Settings())
        late = Server(Starlette(), engine, bound, ready=print, said=print)
        with pytest.raises(ConfigurationError, match=r"cannot listen at 127.0.0.1 port \d+: .*in use"):
            late.serve_until_signal()


def test_keys_are_read_from_a_file_too(tmp_path):
    path = tmp_path / "keys"
    path.write_text("\n# two keys\nfirst\n  second  \n", encoding="utf-8")
    assert read_keys(["zero"], path) == ["zero", "first", "second"]
    path.write_text("first", encoding="utf-8-sig")  # as some editors write it
    assert read_keys([], path) == ["first"]
    path.write_text("# none\n", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="holds no key"):
        read_keys([], path)


def test_chat_templates_are_read_from_a_file(tmp_path):
    configuration, path = Configuration("zoo:python-8m"), tmp_path / "template.jinja"
    path.write_text("{{ messages }}", encoding="utf-8-sig")
    assert settings_of(configuration, Serving(chat_template=path)).chat_template == "{{ messages }}"
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="holds no template"):
        settings_of(configuration, Serving(chat_template=path))


def test_a_mistake_in_a_chat_template_is_found_before_the_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("foredraft.cli.generation.load_speculator", None)
    path = tmp_path / "template.jinja"
    path.write_text("\n{% for message in messages %}{{ message.content }", encoding="utf-8")
    from foredraft.cli import app as commands

    result = CliRunner().invoke(commands, ["serve", str(TINY), "--chat-template", str(path), "--port", "0"], prog_name="foredraft")
    assert result.exit_code == 2 and "the chat template given cannot be read, line 2: unexpected '}'" in result.stderr, result.output


def test_flags_become_settings():
    configuration = Configuration("zoo:python-8m", drafter="suffix", rule="match")
    found = settings_of(configuration, Serving(api_key=["a", "b"], max_rows=3, max_body="1MiB", drain=2.0, no_page=True))
    assert found == Settings(model="zoo:python-8m", keys={"key-1": "a", "key-2": "b"}, max_rows=3, max_body=1 << 20, drain=2.0, page=False)
    assert not settings_of(Configuration("zoo:python-8m", rule="auto"), Serving()).repeatable
    for serving, options, why in (
        (Serving(max_body="many"), {}, "many"),
        (Serving(max_body="0.5"), {}, "--max-body"),
        (Serving(max_body="0MiB"), {}, "--max-body"),
        (Serving(queue_timeout=0.0), {}, "--queue-timeout takes a number of seconds above 0"),
        (Serving(request_timeout=0.0), {}, "--request-timeout"),
        (Serving(api_key=["a", "a"]), {}, "twice"),
        (Serving(api_key=["a", "b"]), {"learn": True}, "--share"),
        (Serving(api_key=["a", "b"]), {"drafter_option": ["learn=true"]}, "--share"),
    ):
        with pytest.raises(ConfigurationError, match=why):
            settings_of(Configuration("zoo:python-8m", **options), serving)
    assert settings_of(Configuration("zoo:python-8m", learn=True), Serving(api_key=["a", "b"], share=True)).share
    stores = Configuration("zoo:python-8m", drafter="suffix:store.bin", learn=True)  # which each key has one of
    assert len(settings_of(stores, Serving(api_key=["a", "b"])).keys) == 2
    assert settings_of(Configuration("zoo:python-8m", learn=True), Serving(api_key=["a"])).keys == {"key-1": "a"}
