"""Threads for requests: owners take turns, what waits is bounded, and what is far too long is not read at all."""

from __future__ import annotations

import asyncio
import threading

import httpx
import pytest
from served import served, tiny_chat

from foredraft.serving.failures import ApiError
from foredraft.serving.requests import Requests
from foredraft.serving.workers import Workers


def test_owners_take_turns():
    """One owner's ten pieces of work do not keep another's from being next."""
    done: list[str] = []

    async def main() -> None:
        workers, go = Workers(1, 20, "test"), threading.Event()
        first = asyncio.ensure_future(workers.run("many", go.wait))
        await asyncio.sleep(0)
        asked = [workers.run("many", lambda: done.append("many")) for _ in range(10)]
        waiting = [asyncio.ensure_future(each) for each in asked]
        await asyncio.sleep(0)
        waiting += [asyncio.ensure_future(workers.run(owner, lambda owner=owner: done.append(owner))) for owner in ("one", "two")]
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(first, *waiting)
        assert await workers.run("late", lambda: 7) == 7
        workers.close()

    asyncio.run(main())
    assert done == ["many", "one", "two", *["many"] * 9]


def test_what_waits_is_bounded_and_who_leaves_makes_room():
    async def main() -> None:
        workers, go, ran = Workers(1, 2, "test"), threading.Event(), []
        first = asyncio.ensure_future(workers.run("a", go.wait))
        await asyncio.sleep(0)
        second, third = (asyncio.ensure_future(workers.run("a", lambda: ran.append(1))) for _ in range(2))
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="2 requests wait") as error:
            await workers.run("b", go.wait)
        assert error.value.status == 503
        first.cancel()  # its thread goes on
        second.cancel()
        await asyncio.sleep(0)
        assert not ran
        fourth = asyncio.ensure_future(workers.run("b", lambda: ran.append(2)))  # there is room for one
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="2 requests wait"):
            await workers.run("b", go.wait)
        go.set()
        await asyncio.gather(third, fourth)
        assert ran == [1, 2] and await workers.run("b", lambda: 2) == 2
        with pytest.raises(ZeroDivisionError):
            await workers.run("b", lambda: 1 / 0)
        assert await workers.run("b", lambda: 3) == 3
        workers.close()

    asyncio.run(main())


def test_who_leaves_as_a_thread_comes_free_is_passed_over():
    async def main() -> None:
        workers, go = Workers(1, 5, "test"), threading.Event()
        first = asyncio.ensure_future(workers.run("a", go.wait))
        await asyncio.sleep(0)
        second = asyncio.ensure_future(workers.run("a", lambda: 2))
        await asyncio.sleep(0)
        second.cancel()
        workers._next()  # before the one that was cancelled runs again
        with pytest.raises(asyncio.CancelledError):
            await second
        go.set()
        await first
        workers.close()

    asyncio.run(main())


def test_a_text_that_is_far_too_long_is_not_tokenised(monkeypatch: pytest.MonkeyPatch):
    encode, seen = Requests.encode, []

    def noted(self: Requests, text: str, **options: bool) -> list[int]:
        seen.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(Requests, "encode", noted)
    with served(tiny_chat()) as url:
        longest = httpx.get(url + "/v1/models").json()["data"][0]["max_model_len"]
        for path, body in (
            ("/v1/completions", {"prompt": "a" * 1_000_000}),
            ("/v1/completions", {"prompt": ["a", "a" * 1_000_000]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 1_000_000}]}),
        ):
            error = httpx.post(url + path, json=body, timeout=60)
            assert error.status_code == 400 and error.json()["error"]["code"] == "context_length_exceeded"
            assert f"characters, but prompt and answer can have {longest} tokens" in error.json()["error"]["message"]
        assert max(seen) < 1_000_000
        long = httpx.post(url + "/v1/completions", json={"prompt": "a b " * longest}, timeout=60).json()[
            "error"
        ]  # may fit, until it is read
        assert long["code"] == "context_length_exceeded" and "tokens, but" in long["message"] and max(seen) == 4 * longest
