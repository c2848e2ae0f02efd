"""Servers for tests: an application behind uvicorn, in a thread of this process."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from foredraft import Speculator
from foredraft.serving import Settings, app

TINY = Path(__file__).parents[1] / "serving" / "tiny_chat"


@cache
def tiny_chat() -> Speculator:
    """A model of random weights with a chat template, which drafts for itself."""
    from foredraft.loading import load_model, load_tokenizer

    draft = load_model(TINY)
    tokenizer = load_tokenizer(TINY)
    return Speculator(load_model(TINY), draft, shape="product(2,1,1)", tokenizer=tokenizer, execution="eager")


@contextmanager
def served(speculator: Any, **settings: Any) -> Iterator[str]:
    """The address of a server of ``speculator``."""
    listening = socket.create_server(("127.0.0.1", 0))
    application = app(speculator, Settings(**{"model": "tiny", "drain": 1.0, **settings}))
    server = uvicorn.Server(uvicorn.Config(application, log_level="warning", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    with httpx.Client() as client:
        while not server.started and thread.is_alive():
            threading.Event().wait(0.01)
        assert client.get(url + "/health").status_code == 200
    try:
        yield url
    finally:
        server.should_exit = True
        thread.join(10)
        listening.close()


def events(response: httpx.Response) -> list[Any]:
    """The data of server-sent events, parsed; the last must be ``[DONE]``."""
    found = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert found[-1] == "[DONE]", response.text[-500:]
    return [json.loads(each) for each in found[:-1]]


def gauge(url: str, name: str) -> int:
    """How many rows are ``running`` or ``waiting``."""
    lines = httpx.get(url + "/metrics").text.splitlines()
    return int(float(next(line.split()[-1] for line in lines if line.startswith(f"vllm:num_requests_{name}{{"))))


def wait_for(true: Callable[[], object], seconds: float = 15) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "too late"
        time.sleep(0.02)
