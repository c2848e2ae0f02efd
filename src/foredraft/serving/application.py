"""The server as an ASGI application: paths, and what happens to a request between the client and the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from foredraft.errors import GrammarError
from foredraft.loading import name_of
from foredraft.serving import openapi, pages
from foredraft.serving.engine import Engine
from foredraft.serving.failures import ApiError, Handler, guarded, refused, told
from foredraft.serving.jobs import Failed, Job, Joined
from foredraft.serving.protect import Protection, read_json
from foredraft.serving.requests import Requests
from foredraft.serving.responses import Answer, ChatAnswer, CompletionAnswer, Facts
from foredraft.serving.roll import RollRequest, router
from foredraft.serving.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from foredraft.serving.settings import Settings
from foredraft.serving.sizes import cached, sizes_of
from foredraft.serving.sse import DONE, PING, PINGED, EventStream, data, failure, unless_left
from foredraft.serving.workers import Workers
from foredraft.serving.writers import TokenNames
from foredraft.speculator import Speculator
from foredraft.verification.match import Match

VERSION = "1"  # of the API
MOST_ASIDE = 64  # requests for tokens and texts of tokens that wait
PRIVATE = ("name_or_path", "is_local", "local_files_only")  # of the tokenizer: about this machine, as are paths of files
Choices = list[dict[str, Any]]


class Server:
    """What the paths share."""

    def __init__(self, speculator: Speculator, settings: Settings):
        self.settings, self.speculator = settings, speculator
        speculator.target.reserve_cache()
        self.engine = Engine(speculator, settings)
        session = self.engine.session
        self.requests = Requests(speculator, settings, guess=isinstance(session.loop.rule, Match), cached=partial(cached, session=session))
        self.tokenizer = speculator.tokenizer
        self.names = TokenNames(self.tokenizer)
        self.created = int(time.time())
        self._tokens = Workers(2, MOST_ASIDE, "tokens")

    def close(self) -> None:
        self.requests.close()
        self._tokens.close()

    # -- completions ----------------------------------------------------------------------------------------------------

    async def complete(self, request: Request) -> Response:
        """Continue prompts."""
        return await self.answer(request, await read_json(request, CompletionRequest), CompletionAnswer)

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self.answer(request, await read_json(request, ChatRequest), ChatAnswer)

    async def answer(self, request: Request, asked: Any, kind: type[Answer]) -> Response:
        state, arrived = request.scope["state"], time.monotonic()
        self.engine.check_room(state["owner"])
        isolation = None if self.settings.share else state["key"]
        plan = await unless_left(request.receive, self.requests.plan(asked, isolation, state["owner"]))
        shape = self.speculator.shape
        facts = Facts(
            id=state["id"],
            created=int(time.time()),
            model=self.settings.model,
            fingerprint=self.engine.fingerprint,
            metrics=self.settings.request_metrics,
            depth=shape.depth,
        )
        answer = kind(asked, plan, facts, self.tokenizer, self.names)
        job = Job(plan.choices, owner=state["owner"], id=state["id"], arrived=arrived, grammar=plan.grammar)
        self.engine.submit(job, await asyncio.to_thread(sizes_of, job.choices, self.engine.session, self.settings))
        if asked.stream:
            return await self.streamed(request, job, asked, answer)
        try:
            await unless_left(request.receive, exhaust(self.choices(job, answer)))
        finally:
            self.engine.leave(job)  # which changes nothing if it is over
        return JSONResponse(await asyncio.to_thread(answer.whole))

    async def choices(self, job: Job, answer: Answer) -> AsyncGenerator[Choices | None]:
        """What the events of ``job`` add to the choices of ``answer``; None each time nothing has come for :data:`PING` seconds. The engine
        learns of stop strings."""
        async for event in job.events_or_pauses(PING):
            if event is None:
                yield None
            elif isinstance(event, Joined):
                yield answer.begin()
            elif isinstance(event, Failed):
                if isinstance(event.error, GrammarError) and job.grammar is not None:
                    raise refused(f"{job.grammar}: {event.error}", job.grammar, "grammar_too_large") from event.error
                raise event.error
            else:
                if event.commit.prompt_logprobs is None:
                    choices = answer.take(event.choice, event.commit)
                else:  # of a long prompt that takes a while
                    choices = await asyncio.to_thread(answer.take, event.choice, event.commit)
                if event.commit.finish_reason is None and answer.writers[event.choice].over:
                    self.engine.finish(job, event.choice)
                yield choices
                if answer.over:
                    return

    async def streamed(self, request: Request, job: Job, asked: Any, answer: Answer) -> Response:
        """A stream that begins with the first event, or with a ping if there is none for long; what is refused until then has a status."""
        events = self.choices(job, answer)
        try:
            first = await unless_left(request.receive, anext(events))
        except BaseException:
            self.engine.leave(job)
            raise
        return EventStream(self.stream(asked, answer, events, first, request.state), lambda: self.engine.leave(job))

    async def stream(
        self, asked: Any, answer: Answer, events: AsyncGenerator[Choices | None], first: Choices | None, state: Any
    ) -> AsyncGenerator[bytes]:
        """The answer as server-sent events; ``state.status``, which is logged, is that of an error in them."""
        options = asked.stream_options
        try:
            async with aclosing(events):
                if part := written(asked, answer, first):
                    yield part
                async for choices in events:
                    if part := written(asked, answer, choices):
                        yield part
            if options.include_usage:
                yield data(answer.chunk([], usage=True) | answer.about_all())
            yield DONE
        except Exception as error:  # the status has been sent
            found = told(error)
            state.status = found.status
            yield failure(found)

    # -- tokens ---------------------------------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a text or a conversation."""
        asked = await read_json(request, TokenizeRequest)
        self.requests.check_model(asked.model)
        return await self.aside(request, partial(self._tokenize, asked))

    def _tokenize(self, asked: TokenizeRequest) -> Response:
        ids = self.requests.tokenize(asked)
        strings = self.tokenizer.convert_ids_to_tokens(ids) if asked.return_token_strs else None
        return JSONResponse({"count": len(ids), "max_model_len": self.requests.longest, "tokens": ids, "token_strs": strings})

    async def aside(self, request: Request, work: Callable[[], Response]) -> Response:
        """``work`` in threads that completions do not need.

        Raises:
            ApiError: 503; too much of it waits.
            DrainingError: the server is about to stop, or was not started.
        """
        self.engine.check_ready()
        return await self._tokens.run(request.scope["state"]["owner"], work)

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens."""
        asked = await read_json(request, DetokenizeRequest)
        self.requests.check_model(asked.model)
        if asked.tokens and max(asked.tokens) >= self.requests.vocabulary:
            raise refused(f"token {max(asked.tokens)} is outside the model's vocabulary of {self.requests.vocabulary}", "tokens")
        return await self.aside(request, lambda: JSONResponse({"prompt": self.tokenizer.decode(asked.tokens)}))

    async def tokenizer_info(self, request: Request) -> dict[str, Any]:
        """What the tokenizer's own configuration says."""
        plain = {
            name: value
            for name, value in self.tokenizer.init_kwargs.items()
            if isinstance(value, (str, int, float, bool, type(None))) and name not in PRIVATE and not name.endswith("_file")
        }
        return {**plain, "tokenizer_class": type(self.tokenizer).__name__, "chat_template": self.requests.chat.source or None}

    # -- about the server -----------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> dict[str, Any]:
        """The one model that there is."""
        return {"object": "list", "data": [self.card]}

    async def model(self, request: Request) -> dict[str, Any]:
        """The model of that name."""
        name = request.path_params["name"]
        if not name:
            raise ApiError(404, "the name of the model is missing; /v1/models has a list", code="model_not_found")
        self.requests.check_model(name)
        return self.card

    @property
    def card(self) -> dict[str, Any]:
        name = self.settings.model
        about = {"id": name, "object": "model", "created": self.created, "owned_by": "foredraft", "root": name, "parent": None}
        return {**about, "max_model_len": self.requests.longest, **self._abilities()}

    def _abilities(self) -> dict[str, bool]:
        """Whether there is a chat template, and whether a text depends on its seed alone, rounding aside."""
        return {"chat": bool(self.requests.chat.template), "exact": isinstance(self.engine.session.loop.rule, Match)}

    async def health(self, request: Request) -> Response:
        """200 while requests are taken."""
        state = self.engine.state
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    async def metrics(self, request: Request) -> Response:
        """Counts for Prometheus."""
        body, kind = self.engine.metrics.render()
        return Response(body, headers={"content-type": kind})


class Cors(CORSMiddleware):
    """Starlette's, with an error in the common form."""

    def preflight_response(self, request_headers: Headers) -> Response:
        answer = super().preflight_response(request_headers)
        if answer.status_code == 200:
            return answer
        error = ApiError(400, f"{bytes(answer.body).decode()}; --cors-origin says which pages may use this server", code="cors")
        return JSONResponse(error.body, 400, {name: value for name, value in answer.headers.items() if not name.startswith("content-")})


def written(asked: Any, answer: Answer, choices: Choices | None) -> bytes:
    """Chunks of a stream, or a ping where there is nothing to say."""
    if choices is None:
        return PINGED
    chunks = [answer.chunk([choice]) for choice in choices]
    if chunks and answer.over and not asked.stream_options.include_usage:
        chunks[-1] |= answer.about_all()
    return b"".join(map(data, chunks))


async def exhaust(events: AsyncIterator[Any]) -> None:
    async for _ in events:
        pass


async def answer_error(request: Request, error: Exception) -> Response:
    """Of what no route is for; routes answer for their own errors."""
    assert isinstance(error, HTTPException)
    if request.url.path.startswith("/v1/responses"):  # OpenAI's newer API
        return ApiError(404, "/v1/responses is not served here; use /v1/chat/completions or /v1/completions", code="not_served").response()
    words = {404: f"there is no {request.url.path[:200]} here", 405: f"{request.method} is not possible at {request.url.path[:200]}"}
    return ApiError(error.status_code, words.get(error.status_code, str(error.detail)), headers=error.headers).response()


def app(speculator: Speculator, settings: Settings | None = None) -> FastAPI:
    """The server, as an ASGI application: run it with uvicorn, or as part of another application.

    Its lifespan starts the engine, and at the end gives running requests ``settings.drain`` seconds. One process serves one model: give
    uvicorn no ``workers``.

    Args:
        speculator: what decodes; the server alone uses it from now on.
        settings: as the flags of ``foredraft serve``.
    """
    settings = settings or Settings(model=name_of(speculator.model))
    server = Server(speculator, settings)

    @asynccontextmanager
    async def lifespan(application: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(lambda: server.engine.fingerprint)  # it reads all weights
        server.engine.start()
        try:
            yield
        finally:
            await server.engine.drain(settings.drain)
            await asyncio.to_thread(server.engine.stop)
            server.close()

    found = FastAPI(title="Foredraft", version=VERSION, lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False)
    found.state.engine = server.engine
    for path, method, handler, body in routes(server):
        found.add_api_route(path, guarded(handler), methods=[method], **openapi.described(path, handler, body))
        if method == "GET":
            found.add_api_route(path, guarded(handler), methods=["HEAD"], include_in_schema=False)
    bodies = [body for *_, body in routes(server) if body is not None]
    if settings.page:
        found.include_router(router(server.engine, speculator, server.names), responses=openapi.ERRORS)
        pages.add(found)
        bodies.append(RollRequest)
    found.add_exception_handler(HTTPException, answer_error)
    openapi.add_schemas(found, bodies)
    told = server.engine.metrics.answered
    found.add_middleware(Protection, settings=settings, check_ready=server.engine.check_ready, answered=told)
    if settings.cors_origins:
        origins, shown = list(settings.cors_origins), ["x-request-id", "retry-after"]
        found.add_middleware(Cors, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"], expose_headers=shown)
    return found


def routes(server: Server) -> list[tuple[str, str, Handler, type[BaseModel] | None]]:
    """Path, method, what answers, and the model of its body."""
    return [
        ("/v1/completions", "POST", server.complete, CompletionRequest),
        ("/v1/chat/completions", "POST", server.chat, ChatRequest),
        ("/tokenize", "POST", server.tokenize, TokenizeRequest),
        ("/detokenize", "POST", server.detokenize, DetokenizeRequest),
        ("/tokenizer_info", "GET", server.tokenizer_info, None),
        ("/v1/models", "GET", server.models, None),
        ("/v1/models/{name:path}", "GET", server.model, None),
        ("/health", "GET", server.health, None),
        ("/metrics", "GET", server.metrics, None),
    ]
