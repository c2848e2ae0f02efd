"""What stands in front of every request: who may ask, for which host, and how much may be sent how slowly.

:class:`Protection` is an ASGI middleware. It reads no body: :func:`read_json` does, after path and key are known to be right.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import math
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import quote

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foredraft.serving.failures import ApiError, refused, told
from foredraft.serving.jobs import DrainingError
from foredraft.serving.settings import Settings

log = logging.getLogger("foredraft.serving")
DEPTH = 64  # of lists and objects in each other
LARGE = 1 << 16  # bytes from which on JSON is read in a thread of its own
BODY_TIMEOUT = 30.0  # seconds for a whole body
LINGER = 1.0  # seconds in which the rest of a body that was refused is read and dropped
ID = re.compile(r"[\x21-\x7e]{1,128}")
METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE")
OPEN = ("/", "/health", "/metrics")  # paths that need no key, and are answered while the server drains
CLOSE = {"Connection": "close"}
BUSY = {**CLOSE, "Retry-After": "1"}
BODIES = 32  # of the largest size that all requests together may hold
SHARE = 8  # of these that the requests of one owner may hold
INSTEAD = {"response_format": "use structured_outputs", "functions": "use tools", "function_call": "use tool_choice"}
LEFT = 499  # in the log: the client left before it had its answer
Model = TypeVar("Model", bound=BaseModel)


class Protection:
    """Checks Host and key, gives every request an id, and logs how it ended. ``check_ready`` raises DrainingError while the server takes no
    requests; then the page's files, ``/health`` and ``/metrics`` alone are answered. After every other request, ``answered`` is called with
    the path of its route ("none" if there is none), its method ("other" if it is unusual), the status and the seconds that it took.

    Below it, ``scope["state"]`` has ``id``, ``owner`` (whose turn it is in the queue), ``key`` (the key's name, None without keys)
    and ``status``, of the line in the log. Above it, ``crowded`` may say that there are too many connections.
    """

    def __init__(self, app: ASGIApp, settings: Settings, check_ready: Callable[[], None], answered: Callable[[str, str, int, float], None]):
        self.app, self.check_ready, self.answered = app, check_ready, answered
        self.keys = [(name, key.encode()) for name, key in settings.keys.items()]
        self.local, self.most = is_local(settings.host), settings.max_body
        self.held: Counter[str] = Counter()  # bytes of the bodies of all requests under way, by their owners

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        given = headers.get("x-request-id", "")
        state = scope.setdefault("state", {})
        state["id"] = given if ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        state["status"], state["held"], begin = 0, 0, time.monotonic()
        state["read"] = closes = False

        async def answer(message: Message) -> None:
            nonlocal closes
            if message["type"] == "http.response.start":
                state["status"] = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", state["id"].encode())]
                closes = (b"connection", b"close") in message["headers"]
            elif closes and not state["read"] and not message.get("more_body", False):
                await send({**message, "more_body": True})
                await drop_rest(receive)
                message = {"type": "http.response.body"}
            await send(message)

        try:
            self.check_host(headers.get("host", ""))
            if state.get("crowded") and path_of(scope) != "/health":
                raise ApiError(503, "the server has too many connections; try again later", code="busy", headers=BUSY)
            state["key"] = self.key_of(scope, headers.get("authorization", ""))
            state["owner"] = state["key"] or str((scope.get("client") or ("",))[0])
            self.check_length(headers.get("content-length", "0"))
            if not is_open(path_of(scope)):
                self.check_ready()
            await self.app(scope, self.bounded(receive, state), answer)
        except (ApiError, DrainingError) as error:
            if state["status"]:
                raise
            await told(error).response()(scope, receive, answer)
        except ClientDisconnect:  # nobody is there to be told
            state["status"] = LEFT
        finally:
            if state["held"]:
                self.held[state["owner"]] -= state["held"]
                self.held += Counter()  # without those that hold nothing
            status, seconds = state["status"] or LEFT, time.monotonic() - begin
            if not is_open(path_of(scope)):
                method = scope["method"] if scope["method"] in METHODS else "other"
                self.answered(getattr(scope.get("route"), "path", "none"), method, status, seconds)
            if path_of(scope) not in OPEN:
                # percent-encoded again, so that no path can look like another line
                log.info("%s %s %s %d %.3f s", state["id"], scope["method"], quote(scope["path"]), status, seconds)

    def check_length(self, length: str) -> None:
        """A body that is too large is refused before it is read.

        Raises:
            ApiError: 413.
        """
        if not length.isascii() or not length.isdigit() or int(length[:20]) > self.most:
            raise too_large(self.most)

    def bounded(self, receive: Receive, state: dict[str, Any]) -> Receive:
        """``receive`` that raises ApiError where the body is larger than it said, does not arrive in time, or is too much together with
        those of other requests. ``state["held"]`` says how large it is, ``state["read"]`` whether it has ended."""
        end = time.monotonic() + BODY_TIMEOUT

        async def receive_in_time() -> Message:
            if state["read"]:  # what comes now is that the client has left
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), end - time.monotonic())
            except asyncio.TimeoutError:
                raise ApiError(408, f"the body did not arrive within {BODY_TIMEOUT:g} seconds", headers=CLOSE) from None
            size = len(message.get("body", b""))
            state["held"] += size
            self.held[state["owner"]] += size
            state["read"] = not message.get("more_body", False)
            if state["held"] > self.most:
                raise too_large(self.most)
            if self.held[state["owner"]] > SHARE * self.most or self.held.total() > BODIES * self.most:
                raise ApiError(503, "the server holds too many large requests; try again later", code="busy", headers=BUSY)
            return message

        return receive_in_time

    def check_host(self, host: str) -> None:
        """A page of another site that points its own name at this machine must not read what a local server says.

        Raises:
            ApiError: 400.
        """
        if self.local and not is_local(name_of_host(host)):
            raise refused(
                f"the Host header names {host[:100]!r}, but this server answers on localhost only; start it with --host (in Python, give "
                "Settings a host)",
                code="host",
            )

    def key_of(self, scope: Scope, header: str) -> str | None:
        """The name of the key that was given; None where the server has no keys, or the path needs none.

        Raises:
            ApiError: 401.
        """
        if not self.keys or is_open(path_of(scope)) or scope["method"] == "OPTIONS":
            return None
        kind, _, key = header.partition(" ")
        given = key.strip(" \t").encode("latin-1") if kind.lower() == "bearer" else b""
        found = None
        for name, key_bytes in self.keys:  # all of them, so that the time says nothing
            if hmac.compare_digest(given, key_bytes):
                found = name
        if found is None:
            why = "the API key is not known" if given else "no API key was given"
            raise ApiError(
                401, f"{why}: send the header 'Authorization: Bearer KEY'", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
            )
        return found


async def drop_rest(receive: Receive) -> None:
    """Read the rest of a body for a while. Closing a connection that holds unread bytes resets it, and the client may never see the answer.
    It rarely did so before Python 3.12, whose ``wait_for`` no longer gives the event loop time to read more before the close."""
    end = time.monotonic() + LINGER
    try:
        while (await asyncio.wait_for(receive(), end - time.monotonic())).get("more_body", False):
            pass
    except asyncio.TimeoutError:
        pass


def too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than the {most} bytes that this server takes", code="too_large", headers=CLOSE)


def path_of(scope: Scope) -> str:
    """The path below where another application mounts this one."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def is_open(path: str) -> bool:
    """Whether everybody may ask for it, at any time."""
    return path in OPEN or path.startswith("/page/")


def is_local(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def name_of_host(header: str) -> str:
    """The name in a Host header, without port and brackets."""
    return header[1:].partition("]")[0] if header.startswith("[") else header.partition(":")[0].lower()


async def read_json(request: Request, model: type[Model]) -> Model:
    """The body as a ``model``.

    Raises:
        ApiError: 400, 408, 413 or 415.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"the content type must be application/json, got {kind[:100] or 'none'!r}", code="unsupported_media_type")
    body = await request.body()
    return await asyncio.to_thread(parse, body, model) if len(body) > LARGE else parse(body, model)


def parse(body: bytes, model: type[Model]) -> Model:
    """JSON text as a ``model``. A member that is null counts as left out."""
    try:
        data = json.loads(body.decode("utf-8"), parse_constant=refuse_constant)
    except UnicodeDecodeError as error:
        raise refused(f"the body is not UTF-8: {error.reason} at byte {error.start}", code="invalid_json") from None
    except RecursionError:
        raise refused(f"the JSON is nested deeper than {DEPTH} levels", code="invalid_json") from None
    except ValueError as error:
        raise refused(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise refused("the body must be a JSON object", code="invalid_json")
    check_values(data)
    try:
        return model.model_validate({name: value for name, value in data.items() if value is not None})
    except ValidationError as error:
        raise field_error(error.errors(include_url=False, include_input=False), data) from None


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def check_values(data: Any) -> None:
    """Refuse what JSON can say but nothing here can use: deep nesting, text that is no Unicode, numbers beyond a double."""
    level: Sequence[Any] = [data]
    for _ in range(DEPTH + 1):
        following: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                following += value.keys()
                following += value.values()
            elif isinstance(value, list):
                following += value
            elif isinstance(value, str):
                if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
                    raise refused("a string holds half of a surrogate pair, which is no character", code="invalid_json")
            elif isinstance(value, float) and not math.isfinite(value):
                raise refused("a number is too large", code="invalid_json")
        if not following:
            return
        level = following
    raise refused(f"the JSON is nested deeper than {DEPTH} levels", code="invalid_json")


def field_error(errors: Sequence[Any], data: Any) -> ApiError:
    """What pydantic says of the field that it got furthest into; the kinds that a value may have are one sentence."""
    found: dict[tuple[str, ...], list[Any]] = {}
    for each in errors:
        found.setdefault(path_in(data, each["loc"], missing=each["type"] == "missing"), []).append(each)
    path, furthest = max(found.items(), key=lambda item: len(item[0]))
    param, first = ".".join(path) or None, furthest[0]
    if first["type"] == "inconsistent" and param is None:
        return refused(first["msg"], first["ctx"]["field"])
    if first["type"] == "extra_forbidden":
        return refused(f"{param} is not supported here; {INSTEAD.get(path[-1], 'leave it out')}", param, "unknown_field")
    if first["type"] == "missing":
        return refused(f"{param} is missing", param, "missing_field")
    message = ", or: ".join(dict.fromkeys(each["msg"].removeprefix("Value error, ") for each in furthest))
    return refused(f"{param}: {message}" if param else message, param)


def path_in(data: Any, loc: Sequence[str | int], *, missing: bool) -> tuple[str, ...]:
    """``loc`` without the names that pydantic gives to the members of a union."""
    path: list[str] = []
    for part in loc:
        if isinstance(data, dict) and (part in data or (missing and part is loc[-1])):
            path, data = [*path, str(part)], data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            path, data = [*path, str(part)], data[part]
    return tuple(path)
