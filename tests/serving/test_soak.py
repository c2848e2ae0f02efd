"""A real ``foredraft serve`` under all that clients do to it, for a while: every text is as alone, and nothing is left behind.

Run as a program, this file is that server: the command line, with what a test cannot ask for over HTTP (:func:`planted`).
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SECONDS = float(os.environ.get("FOREDRAFT_SOAK") or (180 if "CI" in os.environ else 20))
HOUR = 3600.0
CLIENTS, ROWS, QUEUE = 6, 4, 12
# Of memory. A short run ends before kept beginnings have filled the cache, which may happen behind the first count (in some 2,000
# requests, 25 MB: measured over 7 minutes, after which nothing grew). Allocators of Python and torch take some more from the system.
# Jobs and rows that stay are counted, so a leak of them shows at once.
CACHE = 24  # MiB
GROWTH = (0.01, 0.03)
KNOWN = 8  # jobs and rows: those that the last calls of the engine and of the event loop still refer to
STALLED = 1.0  # in place of a minute
SERVE = ("zoo:python-8m", "--drafter", "draft-model:zoo:python-1m", "--shape", "product(2,1,1)", "--threads", "1", "--port", "0")
LIMITS = ("--max-rows", str(ROWS), "--max-queue", str(QUEUE), "--cache-memory", f"{CACHE}MiB", "--queue-timeout", "600")
HEAD = '"""Small helpers for lists and numbers, with doctests."""\n\nimport math\nimport os\nimport sys\nfrom pathlib import Path\n\n\n' * 2
STARTS = ("def mean(values):\n", "class Stack:\n    def __init__(self", "for i in range(10):\n", "import re\n\nPATTERN = ", "x = [", "é = ")
FORMATS: list[dict[str, Any]] = [
    {"regex": "[a-z]{2,8}( [a-z]{1,5}){0,3}"},
    {"choice": ["yes", "no", "perhaps"]},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"]}},
]
BAD: list[tuple[str, bytes]] = [
    ("/v1/completions", b"{"),
    ("/v1/completions", b'{"prompt": "a", "temperature": -1}'),
    ("/v1/completions", b'{"prompt": "a", "structured_outputs": {"regex": "("}}'),
    ("/v1/completions", json.dumps({"prompt": "a b " * 4000}).encode()),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}]}'),  # there is no chat template
    ("/nowhere", b"{}"),
]


def asks(chance: random.Random, count: int) -> list[dict[str, Any]]:
    """What decides a text, of so many requests."""
    found = []
    for _ in range(count):
        ask: dict[str, Any] = {
            "prompt": chance.choice(["", HEAD]) + chance.choice(STARTS),
            "max_tokens": chance.randint(1, 60),
            "seed": chance.randrange(1000),
            "temperature": chance.choice([0, 0, 0.7, 1]),
            "n": chance.choice([1, 1, 1, 2, 3]),
        }
        ask |= chance.choice([{}, {}, {"stop": ["\n\n", "return"]}, {"top_p": 0.9, "frequency_penalty": 0.5}])
        found.append(ask | ({"structured_outputs": chance.choice(FORMATS)} if chance.random() < 0.15 else {}))
    return found


def aside(chance: random.Random) -> dict[str, Any]:
    """What must not change a text."""
    return chance.choice(
        [{}, {"logprobs": 3}, {"speculation": "off"}, {"speculation": {"max_draft": 1}}, {"prediction": {"content": chance.choice(STARTS)}}]
    )


def texts_of(response: httpx.Response) -> list[tuple[str, str]]:
    """The text of each choice and why it ended; an error of a stream raises ValueError."""
    if "event-stream" not in response.headers["content-type"]:
        return [(choice["text"], choice["finish_reason"]) for choice in response.json()["choices"]]
    found: dict[int, tuple[str, str]] = {}
    *lines, last = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    if last != "[DONE]":
        raise ValueError(last)
    for choice in (choice for line in lines for choice in json.loads(line)["choices"]):
        text, reason = found.get(choice["index"], ("", ""))
        found[choice["index"]] = text + choice["text"], choice["finish_reason"] or reason
    return [found[index] for index in sorted(found)]


class Crowd:
    """Clients that ask at random; :attr:`wrong` is what should not have been."""

    def __init__(self, url: str, solo: list[tuple[dict[str, Any], list[tuple[str, str]]]]):
        self.url, self.solo = url, solo
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    def load(self, seconds: float, seed: int) -> None:
        threads = [threading.Thread(target=self.run, args=(seconds, random.Random(f"{seed} {number}"))) for number in range(CLIENTS)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()

    def run(self, seconds: float, chance: random.Random) -> None:
        end = time.monotonic() + seconds
        kinds, weights = zip((self.finish, 70), (self.leave, 12), (self.poison, 8), (self.bad, 8), (self.stall, 2))
        with httpx.Client(base_url=self.url, timeout=600) as client:
            while time.monotonic() < end and len(self.wrong) < 10:
                (kind,) = chance.choices(kinds, weights)
                try:
                    self.counts[kind(client, chance)] += 1
                except Exception as error:
                    self.wrong.append(f"{kind.__name__}: {error!r}")

    def finish(self, client: httpx.Client, chance: random.Random) -> str:
        ask, alone = chance.choice(self.solo)
        sent = ask | aside(chance) | {"stream": chance.random() < 0.5}
        response = client.post("/v1/completions", json=sent)
        if response.status_code == 429:
            return "told to come back"
        assert response.status_code == 200, response.text
        found = texts_of(response)
        assert found == alone, (sent, found, alone)
        return "finished"

    def leave(self, client: httpx.Client, chance: random.Random) -> str:
        """Before there is an answer, or after some of it."""
        ask, _ = chance.choice(self.solo)
        sent = ask | {"max_tokens": 1000, "stream": chance.random() < 0.7}
        try:
            with client.stream("POST", "/v1/completions", json=sent, timeout=chance.choice([0.005, 0.05, 0.5])) as response:
                for _, _ in zip(range(chance.randint(0, 20)), response.iter_lines()):
                    pass
        except httpx.TimeoutException:
            pass
        return "left"

    def poison(self, client: httpx.Client, chance: random.Random) -> str:
        ask, _ = chance.choice(self.solo)
        stream = chance.random() < 0.5
        response = client.post("/v1/completions", json={**ask, "max_tokens": 20, "stop": None, "user": "poison", "stream": stream})
        if response.status_code == 429:
            return "told to come back"
        assert "the server failed on this request" in response.text or response.status_code == 200, response.text
        return "failed" if "the server failed" in response.text else "over before the poison"

    def bad(self, client: httpx.Client, chance: random.Random) -> str:
        path, body = chance.choice(BAD)
        response = client.post(path, content=body, headers={"content-type": "application/json"})
        assert 400 <= response.status_code < 500, response.text
        return "refused"

    def stall(self, client: httpx.Client, chance: random.Random) -> str:
        """Ask for more than the system's buffers hold, and read nothing for longer than the server waits; on a slow machine the buffers
        may not be full by then."""
        sent = {"prompt": STARTS[0], "n": 2, "max_tokens": 400, "ignore_eos": True, "logprobs": 20, "rounds": True, "stream": True}
        body = json.dumps(sent).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(60)
            connection.connect(("127.0.0.1", httpx.URL(self.url).port))
            connection.sendall(head.encode() + body)
            received = connection.recv(12)
            if not received.endswith(b"200"):
                assert received.endswith(b"429"), received
                return "told to come back"
            time.sleep(STALLED * 4)
            while part := connection.recv(1 << 16):
                received += part
        return "read late" if b"[DONE]" in received else "given up"


@contextmanager
def serving(log: Path) -> Iterator[SimpleNamespace]:
    """The server's process, and its ``url``."""
    with log.open("w") as errors:
        process = subprocess.Popen([sys.executable, __file__, "serve", *SERVE, *LIMITS], stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        line = process.stdout.readline()
        found = re.search(r"http://[\d.:]+", line)
        assert found, line + log.read_text()
        yield SimpleNamespace(url=found[0], process=process)
    finally:
        process.kill()
        process.wait()


def idle(url: str) -> None:
    """Wait until no row runs or waits; rows hold no pages then. What is kept of beginnings alone is not counted as theirs."""
    end = time.monotonic() + 30
    while True:
        text = httpx.get(url + "/metrics").text
        values = dict(re.findall(r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc){.*} (.+)$", text, re.MULTILINE))
        if len(values) == 3 and all(float(value) == 0 for value in values.values()):
            return
        assert time.monotonic() < end, values
        time.sleep(0.05)


def left_behind(server: SimpleNamespace) -> tuple[int, int]:
    """How many requests and rows the server still knows once it is idle, and how many bytes it has in memory. Connections of clients
    that stalled take some seconds to close."""
    idle(server.url)
    end = time.monotonic() + 30
    while True:
        server.process.send_signal(signal.SIGUSR1)
        known = int(server.process.stdout.readline())
        if known <= KNOWN or time.monotonic() > end:
            break
        time.sleep(1)
    (kilobytes,) = re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{server.process.pid}/status").read_text())
    return known, int(kilobytes) << 10


@pytest.mark.parametrize("seconds", [SECONDS, pytest.param(HOUR, marks=pytest.mark.nightly)])
def test_a_long_life(seconds: float, tmp_path: Path):
    log = tmp_path / "log"
    with serving(log) as server:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            solo = []
            for ask in asks(random.Random(0), 40):
                answer = client.post("/v1/completions", json=ask | {"speculation": "off"})
                solo.append((ask, texts_of(answer)))
            assert not answer.json()["system_fingerprint"].endswith("-approx"), "on this machine texts may depend on the load"
        crowd = Crowd(server.url, solo)
        crowd.load(seconds / 4, seed=1)
        before = left_behind(server)
        crowd.load(seconds * 3 / 4, seed=2)
        after = left_behind(server)
        print(seconds, dict(crowd.counts), before, after)
        assert not crowd.wrong, crowd.wrong
        assert crowd.counts["finished"] > 0
        known, growth = after[0], after[1] - before[1] - (CACHE << 20 if seconds < HOUR else 0)
        assert known <= KNOWN and growth <= GROWTH[seconds < HOUR] * before[1], (known, growth / before[1])
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0


def planted() -> None:
    """A row of the user "poison" fails at its fourth token. SIGUSR1 has it printed how many jobs and rows there are. Readers are given up
    soon, and buffers of the system are small, so that stalled ones are noticed."""
    from transformers import LogitsProcessor

    from foredraft.cli import serve
    from foredraft.rows import SessionRow
    from foredraft.serving import sse
    from foredraft.serving.jobs import Job
    from foredraft.serving.requests import Requests

    class Poison(LogitsProcessor):
        def __init__(self, length: int):
            self.length = length

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            if input_ids.shape[1] >= self.length:
                raise ZeroDivisionError("poison")
            return scores

    def processors(self: Requests, request: Any, length: int, grammar: Any) -> list[Any]:
        return [*given(self, request, length, grammar), *([Poison(length + 3)] if request.user == "poison" else [])]

    def bind(host: str, port: int) -> socket.socket:
        bound = bound_to(host, port)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return bound

    def known() -> int:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what is free goes back to the system, and only what is in use is counted
        return sum(isinstance(each, (Job, SessionRow)) for each in gc.get_objects())

    given, bound_to = Requests.processors, serve.bind
    Requests.processors, serve.bind, sse.STALLED = processors, bind, STALLED
    signal.signal(signal.SIGUSR1, lambda *_: print(known(), flush=True))


if __name__ == "__main__":
    from foredraft.cli import main

    planted()
    main()
