"""Whose turn it is, and what happens in which thread: the engine's thread decodes, and everything else is done beside it."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from served import events, gauge, served, tiny_chat, wait_for

from foredraft.serving.queue import FairQueue
from foredraft.session import Session

TOOL = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object", "additionalProperties": False}}}
ELSEWHERE = ("json", "jinja2", "tokenizers", "pydantic", "fastapi", "starlette", "uvicorn", "h11", "httptools")
SERVING = ("application", "chat", "formats", "protect", "requests", "responses", "schema", "sse", "stops", "tools", "writers")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere 127.0.0.2 is no address of this machine")
def test_without_keys_addresses_take_turns(monkeypatch: pytest.MonkeyPatch):
    """Three requests of one client wait when another sends its first."""
    turns, pop = [], FairQueue.pop

    def noted(self: FairQueue) -> Any:
        turns.append((row := pop(self)).job.owner)
        return row

    monkeypatch.setattr(FairQueue, "pop", noted)
    first, second = (httpx.Client(transport=httpx.HTTPTransport(local_address=f"127.0.0.{each}"), timeout=60) for each in (1, 2))
    with served(tiny_chat(), max_rows=1) as url, ThreadPoolExecutor(4) as threads, first, second:
        asked = {"prompt": "hello", "max_tokens": 1}
        long = {"prompt": "hello", "max_tokens": 1900, "ignore_eos": True, "stream": True, "speculation": "off"}
        with first.stream("POST", url + "/v1/completions", json=long):
            wait_for(lambda: gauge(url, "running") == 1)
            for waiting, client in enumerate((first, first, first, second), 1):
                threads.submit(client.post, url + "/v1/completions", json=asked)
                wait_for(lambda waiting=waiting: gauge(url, "waiting") == waiting)
        wait_for(lambda: len(turns) == 5)
    assert turns == ["127.0.0.1", "127.0.0.1", "127.0.0.2", "127.0.0.1", "127.0.0.1"]


def test_pings_come_while_a_prompt_is_read(monkeypatch: pytest.MonkeyPatch):
    """By a server that has nothing else to do, so that the request does not wait for its turn."""
    step = Session.step

    def slow(self: Session, **options: Any) -> Any:
        if self.waiting:
            time.sleep(0.3)
        return step(self, **options)

    monkeypatch.setattr(Session, "step", slow)
    monkeypatch.setattr("foredraft.serving.application.PING", 0.05)
    with served(tiny_chat()) as url:
        response = httpx.post(url + "/v1/completions", json={"prompt": [5] * 1900, "max_tokens": 2, "stream": True}, timeout=60)
    assert response.text.startswith(": ping\n\n: ping\n\n") and len(events(response)) > 0


def test_the_engines_thread_speaks_no_http_and_reads_no_text():
    """Nor does it write JSON, tokenise or render templates: what Python calls there is looked at."""
    called: set[str] = set()

    def note(frame: Any, event: str, argument: Any) -> None:
        if threading.current_thread().name == "foredraft-engine":
            called.add(str(frame.f_globals.get("__name__")))
        else:
            sys.setprofile(None)

    threading.setprofile(note)
    try:
        with served(tiny_chat(), request_metrics=True) as url:
            completion = {"prompt": "hello", "max_tokens": 4, "logprobs": 2, "stop": "zz", "structured_outputs": {"regex": "[ab]{3}"}}
            chat = {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL], "max_tokens": 4}
            for stream in ({}, {"stream": True, "rounds": True, "stream_options": {"include_usage": True}}):
                for path, asked in (("completions", completion), ("chat/completions", chat)):
                    assert httpx.post(f"{url}/v1/{path}", json=asked | stream, timeout=60).status_code == 200
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    assert {"foredraft.serving.engine", "foredraft.session"} <= called
    wrong = {f"foredraft.serving.{name}" for name in SERVING} | {"foredraft.detokenizer"}
    assert not [name for name in called if name in wrong or name.partition(".")[0] in ELSEWHERE or ".tokenization_" in name]
