"""What a client is told when something is wrong: OpenAI's error object, and the status that goes with each error of ours."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from math import ceil
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from foredraft.errors import BusyError, CacheMemoryError, ConfigurationError, GrammarError
from foredraft.serving.jobs import DrainingError, JobTimeoutError, QueueFullError

Handler = Callable[[Request], Awaitable[Any]]
log = logging.getLogger("foredraft.serving")
TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
STATUSES: dict[int, str] = {
    400: "a field, the JSON or the Host header cannot be used; the message says why",
    401: "no API key, or an unknown one",
    404: "no such path or model",
    405: "the path has another method",
    408: "the body came too slowly",
    413: "the body is larger than --max-body",
    415: "the content type is not application/json",
    429: "the queue is full, or the request would probably wait for too long; Retry-After says when to try again",
    500: "a fault of the server",
    503: "the server is about to stop, its engine has died, or others keep it busy; then Retry-After says when to try again",
    504: "the request waited or ran for longer than the server allows",
}


class ApiError(Exception):
    """An answer other than 200.

    Attributes:
        param: the field that is wrong.
        code: a word for programs.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, headers: Mapping[str, str] | None = None
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def refused(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that cannot be served as it is."""
    return ApiError(400, message, param=param, code=code or ("invalid_field" if param else None))


def busy(message: str) -> ApiError:
    """A request that could be served at another time."""
    return ApiError(503, message, code="busy", headers={"Retry-After": "1"})


def told(error: Exception) -> ApiError:
    """The answer to a request that ended in ``error``. An unexpected error is logged, and the client gets no details of it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": str(max(1, ceil(error.retry_after)))})
    if isinstance(error, DrainingError):
        return ApiError(503, str(error), code="draining")
    if isinstance(error, BusyError):
        return busy(str(error))
    if isinstance(error, JobTimeoutError):
        return ApiError(504, str(error), code="timeout")
    if isinstance(error, GrammarError):
        return refused(str(error), code="grammar_too_large")
    if isinstance(error, (ConfigurationError, CacheMemoryError)):
        return refused(str(error))
    log.error("a request failed: %s", error, exc_info=error)
    return ApiError(500, "the server failed on this request; its log says why", code="internal_error")


def guarded(handler: Handler) -> Handler:
    """``handler``, none of whose errors is left to the machinery around it."""

    async def answer(request: Request) -> Any:
        try:
            found = await handler(request)
            return found if isinstance(found, Response) else JSONResponse(found)
        except ClientDisconnect:
            raise
        except Exception as error:
            return told(error).response()

    answer.__name__, answer.__doc__ = getattr(handler, "__name__", "answer"), handler.__doc__
    return answer
