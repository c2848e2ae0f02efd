"""An OpenAI server without a model: it samples from a small table by keyed noise. Faults are switched on one at a time."""

from __future__ import annotations

import hashlib
import json
import math
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

WORDS = [" the", " a", " cat", " dog", " sat", " ran", " on", " and", " mat", " sun", " é", " blue", " ok", " no"]
WORDS += ["s", "ing", "ed", ".", "\n", "!"]
EOS = "<eos>"
VOCABULARY = [*WORDS, EOS]
FIELDS = {
    "model", "prompt", "messages", "max_tokens", "temperature", "top_p", "seed", "n", "stop", "stream", "stream_options", "logprobs",
    "top_logprobs", "top_k", "min_p", "repetition_penalty", "speculation",
}  # fmt: skip


def uniform(*key: object) -> float:
    """In (0, 1), a function of ``key``."""
    return (int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big") + 0.5) / 2**64


@cache
def table(last: int, before: int, scale: float = 3.0) -> tuple[float, ...]:
    """The log-probabilities after two tokens."""
    scores = [scale * uniform("score", last, before, token) for token in range(len(VOCABULARY))]
    scores[-1] = -2.0
    total = math.log(sum(map(math.exp, scores)))
    return tuple(score - total for score in scores)


@dataclass
class FakeServer:
    """Attributes:
    faults: names of those that are on.
    without: fields that are refused, beside unknown ones.
    lenient: unknown fields are ignored.
    chat_only: no ``/v1/completions``.
    """

    faults: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()
    lenient: bool = False
    chat_only: bool = False
    fingerprint: str | None = "fp-1"
    drafts: bool = True
    drafted: int = 0
    in_flight: int = 0
    process: random.Random = field(default_factory=lambda: random.Random(5))
    lock: Any = field(default_factory=threading.Lock)
    arrived: Any = field(default_factory=threading.Condition)
    own: Any = field(default_factory=threading.local)

    def on(self, fault: str) -> bool:
        return fault in self.faults

    @property
    def beside(self) -> int:
        """Requests in flight when that of this thread began, itself among them."""
        return self.own.beside

    # -- HTTP ---------------------------------------------------------------------------------------------------------

    def transport(self) -> httpx.MockTransport:
        def handle(request: httpx.Request) -> httpx.Response:
            body = json.loads(request.content) if request.content else {}
            status, kind, content = self.respond(request.url.path, body)
            return httpx.Response(status, headers={"content-type": kind}, content=content.encode())

        return httpx.MockTransport(handle)

    def respond(self, path: str, body: dict[str, Any]) -> tuple[int, str, str]:
        """Status, content type and content."""
        if path == "/v1/models":
            return 200, "application/json", json.dumps({"data": [{"id": "fake"}]})
        if path == "/metrics" and self.drafts:
            lines = [f'vllm:spec_decode_num_{name}_tokens_total{{engine="0"}} {self.drafted}' for name in ("draft", "accepted")]
            return 200, "text/plain", "\n".join(lines) + "\n"
        chat = path == "/v1/chat/completions"
        if not chat and (path != "/v1/completions" or self.chat_only):
            return 404, "application/json", json.dumps({"error": {"message": "no such path"}})
        refused = sorted(set(body) & self.without or (set() if self.lenient else set(body) - FIELDS))
        if refused:
            return 400, "application/json", json.dumps({"error": {"message": f"{refused[0]} is not supported"}})
        return self.complete(body, chat)

    def complete(self, body: dict[str, Any], chat: bool) -> tuple[int, str, str]:
        several = threading.current_thread().name.startswith("ThreadPoolExecutor")
        with self.arrived:
            self.in_flight += 1
            self.arrived.notify_all()
            # The client asks several at once from a pool. On a busy machine one may be answered before the next arrives.
            self.arrived.wait_for(lambda: self.in_flight > 1, timeout=0.1 if several else 0)
            self.own.beside = self.in_flight
        try:
            if self.on("fails under load") and self.beside > 1:
                return 500, "application/json", json.dumps({"error": {"message": "out of memory"}})
            choices = [self.choice(body, index, chat) for index in range(body.get("n") or 1)]
        finally:
            with self.arrived:
                self.in_flight -= 1
        usage = {"completion_tokens": sum(choice.pop("count") for choice in choices)}
        rest = {"model": "fake", "system_fingerprint": self.fingerprint}
        if not body.get("stream"):
            for choice in choices:
                text = "".join(choice.pop("pieces"))
                choice.update({"message": {"role": "assistant", "content": text}} if chat else {"text": text})
            return 200, "application/json", json.dumps({**rest, "choices": choices, "usage": usage})
        chunks = [chunk for choice in choices for chunk in self.chunks(choice, chat)]
        documents = [{**rest, "choices": [chunk]} for chunk in chunks]
        if (body.get("stream_options") or {}).get("include_usage"):
            documents.append({**rest, "choices": [], "usage": usage})
        return 200, "text/event-stream", "".join(f"data: {json.dumps(each)}\n\n" for each in [*documents]) + "data: [DONE]\n\n"

    def chunks(self, choice: dict[str, Any], chat: bool) -> list[dict[str, Any]]:
        pieces = choice["pieces"] or [""]
        if self.on("streamed text differs") and len(pieces) > 3:
            pieces = [*pieces[:2], *pieces[3:]]
        made = [
            {"index": choice["index"], **({"delta": {"content": piece}} if chat else {"text": piece}), "finish_reason": None}
            for piece in pieces
        ]
        made[0]["logprobs"] = choice["logprobs"]
        made[-1]["finish_reason"] = choice["finish_reason"]
        return made

    # -- tokens -------------------------------------------------------------------------------------------------------

    def choice(self, body: dict[str, Any], index: int, chat: bool) -> dict[str, Any]:
        prompt = body["messages"][-1]["content"] if chat else body["prompt"]
        most, stops = body.get("max_tokens") or 16, body.get("stop") or []
        scale = 3.4 if self.on("text changes with the batch") and self.beside > 1 else 3.0
        ids = self.sample(body, prompt, index, most, scale)
        finish = "stop" if ids[-1] == len(WORDS) else "length"
        shown = [VOCABULARY[token] for token in ids if token < len(WORDS)]
        count = len(ids)
        if self.on("drops the last token") and finish == "length":
            shown, ids = shown[:-1], ids[:-1]
        if self.on("drops the last token and does not count it") and finish == "length":
            shown, ids, count = shown[:-1], ids[:-1], count - 1
        if self.on("drops the last token from the text") and finish == "length":
            shown = shown[:-1]
        pieces, stopped = self.cut(shown, stops, streamed=bool(body.get("stream")))
        asked = body.get("logprobs") is not None and not (body.get("stream") and self.on("no log-probabilities in a stream"))
        logprobs = self.logprobs(body, prompt, ids, chat, scale) if asked else None
        return {
            "index": index, "pieces": pieces, "count": count, "logprobs": logprobs, "finish_reason": "stop" if stopped else finish,
        }  # fmt: skip

    def sample(self, body: dict[str, Any], prompt: str, index: int, most: int, scale: float) -> list[int]:
        seed, temperature = body.get("seed"), body.get("temperature", 1.0)
        if seed is None or self.on("ignores the seed"):
            with self.lock:
                seed = self.process.random()
        if self.on("one seed for all"):
            seed = 3
        key: tuple[object, ...] = (seed, 0 if self.on("n choices are alike") else index)
        if self.on("a global seed"):
            with self.lock:
                self.process.seed(seed)
        if self.on("noise by slot"):
            key += (self.beside,)
        ids: list[int] = []
        last, before = start(prompt)
        while len(ids) < most:
            if self.on("a global seed"):
                time.sleep(0.0002)  # other requests draw meanwhile
                noise = lambda token: self.process.random()  # noqa: E731
            else:
                place = len(ids) // 2 if self.on("noise is used twice") else len(ids)
                noise = lambda token: uniform(*key, place, token)  # noqa: E731, B023
            token = self.pick(table(last, before, scale), temperature, noise, body, len(ids))
            ids.append(token)
            if token == len(WORDS):
                break
            last, before = token, last
        with self.lock:
            self.drafted += len(ids) // 2
        return ids

    def pick(self, logprobs: tuple[float, ...], temperature: float, noise: Callable[[int], float], body: dict[str, Any], place: int) -> int:
        """The Gumbel race; greedily without noise."""
        scores = list(logprobs)
        if self.on("text changes with speculation") and body.get("speculation") != "off" and place % 5 == 4:
            scores = scores[1:] + scores[:1]
        if temperature == 0:
            if self.on("greedy is not greedy") and place == 7:
                return sorted(range(len(scores)), key=lambda token: -scores[token])[1]
            return max(range(len(scores)), key=scores.__getitem__)
        best = max(range(len(scores)), key=scores.__getitem__)
        if self.on("biased by 0.03") and noise(-1) < 0.03 / (1 - math.exp(scores[best])):  # a total variation of 0.03 at each token
            return best
        return max(range(len(scores)), key=lambda token: scores[token] / temperature - math.log(-math.log(noise(token))))

    def cut(self, shown: list[str], stops: list[str], *, streamed: bool) -> tuple[list[str], bool]:
        """Pieces of text up to the first stop string, two tokens at a time; and whether there is one."""
        text = "".join(shown)
        places = [(text.index(stop), len(stop)) for stop in stops if stop in text]
        end, length = min(places, default=(len(text), 0))
        if places and self.on("leaks a stop string"):
            end += length
        if places and streamed and self.on("leaks the beginning of a stop string"):
            end += 1
        if stops and not places and self.on("loses what it held back"):
            end -= 1
        pieces, begin = [], 0
        for index in range(0, len(shown), 2):
            piece = "".join(shown[index : index + 2])
            pieces.append(piece[: max(0, end - begin)])
            begin += len(piece)
        return [piece for piece in pieces if piece], bool(places)

    # -- log-probabilities --------------------------------------------------------------------------------------------

    def logprobs(self, body: dict[str, Any], prompt: str, ids: list[int], chat: bool, scale: float) -> dict[str, Any]:
        count = (body.get("top_logprobs") or 0) if chat else int(body["logprobs"])
        count = min(count, 0 if self.on("no alternatives") else 5 if self.on("five alternatives") else count)
        last, before = start(prompt)
        rows = []
        for place, token in enumerate(ids):
            values = list(table(last, before, scale))
            if self.on("log-probabilities change under load") and self.beside > 1:
                values = [value - 0.01 for value in values]
            if self.on("log-probabilities are wrong under load") and self.beside > 1:
                values = [value - 0.6 for value in values]
            order = sorted(range(len(values)), key=lambda each: -values[each])[:count]
            listed = order if token in order or not count else [*order, token]
            own, top = values[token], {VOCABULARY[each]: values[each] for each in listed}
            if place % 3 == 1 and self.on("log-probability 0 for drafted tokens"):
                own = 0.0
            if place % 3 == 1 and self.on("log-probability 0 and no alternatives"):
                own, top = 0.0, {VOCABULARY[token]: 0.0}
            rows.append((VOCABULARY[token], own, top))
            last, before = token, last
        if chat:
            content = [{**item(name, own), "top_logprobs": [item(*each) for each in list(top.items())[:count]]} for name, own, top in rows]
            return {"content": content}
        names, values, tops = ([list(each) for each in zip(*rows)]) if rows else ([], [], [])
        return {"tokens": names, "token_logprobs": values, "top_logprobs": tops if count else None}


def start(prompt: str) -> tuple[int, int]:
    return len(prompt) % len(WORDS), sum(map(ord, prompt)) % len(WORDS)


def item(name: str, value: float) -> dict[str, Any]:
    return {"token": name, "logprob": value, "bytes": list(name.encode())}


def serve(fake: FakeServer) -> ThreadingHTTPServer:
    """``fake`` on a free port, in threads; ``shutdown`` ends it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply({})

        def do_POST(self) -> None:
            self.reply(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def reply(self, body: dict[str, Any]) -> None:
            status, kind, content = fake.respond(self.path, body)
            data = content.encode()
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
