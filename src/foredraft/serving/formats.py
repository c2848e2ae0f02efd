"""What a text has to match, compiled in threads of its own and within bounds, so that no schema or expression slows others."""

from __future__ import annotations

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from foredraft.errors import ConfigurationError, GrammarError
from foredraft.grammars import Grammar
from foredraft.serving.failures import busy, refused
from foredraft.serving.hard_schemas import check
from foredraft.serving.schema import ChatRequest, CompletionRequest, JsonObject, JsonSchemaFormat, NamedTool, StructuredOutputs
from foredraft.serving.tools import calls_schema, free_calls

LONGEST = 1 << 16  # characters of a schema or a grammar
LONGEST_REGEX = 1 << 12
THREADS = 2  # so that one slow format leaves a thread to the others
SECONDS = 10.0  # that a compilation may take once it has a thread, and may wait for one
MOST_WAITING = 16  # compilations that wait for a thread
MOST_ITEMS = 10_000  # that the parser may make for the tokens allowed at one place: some 30 ms, in which all texts wait
KEPT = 16  # grammars that were asked for last
WAITING = "the formats of other requests are being compiled; try again later"


def wanted(request: CompletionRequest | ChatRequest, tokenizer: Any, ends: frozenset[int]) -> tuple[str, dict[str, Any]] | None:
    """The field that says what the text has to match, and the argument of :class:`Grammar` for it; None where nothing does. ``ends``: the
    tokens that end a text.

    Raises:
        ApiError: two fields say it.
    """
    found: dict[str, dict[str, Any]] = {}
    if request.structured_outputs is not None:
        found["structured_outputs"] = of_structured(request.structured_outputs)
    if isinstance(request, ChatRequest):
        format = request.response_format
        if isinstance(format, JsonObject):
            found["response_format"] = {"json_schema": {"type": "object"}}
        elif isinstance(format, JsonSchemaFormat):
            found["response_format"] = {"json_schema": format.json_schema.schema_ or {"type": "object"}}
        if request.tool_choice == "required" or isinstance(request.tool_choice, NamedTool):
            found.pop("response_format", None)  # of an answer in words, which there is none
            found["tool_choice"] = {"json_schema": calls_schema(request)}
        elif not found and (calls := free_calls(request, tokenizer, ends)) is not None:
            found["tools"] = {"grammar": calls}
        elif [*found] == ["response_format"]:
            calls = free_calls(request, tokenizer, ends, found["response_format"]["json_schema"])
            found |= {} if calls is None else {"response_format": {"grammar": calls}}
    if len(found) > 1:
        raise refused(f"{' and '.join(found)} cannot be combined: both say what the text has to match", [*found][-1])
    return next(iter(found.items()), None)


def of_structured(outputs: StructuredOutputs) -> dict[str, Any]:
    """The argument of :class:`Grammar`; ``choice`` is a regular expression that messages call by the name of the field."""
    if outputs.json_ is not None:
        return {"json_schema": outputs.json_}
    if outputs.choice is not None:
        return {"choice": "|".join(escaped(each) for each in outputs.choice)}
    if outputs.regex is not None:
        return {"regex": outputs.regex}
    return {"json_schema": {"type": "object"}} if outputs.json_object else {"grammar": outputs.grammar}


def escaped(text: str) -> str:
    """``text`` as a regular expression, in the dialect of Rust."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&\-~]", r"\\\g<0>", text)


class Formats:
    """Compiles grammars for one tokenizer. Requests that ask for the same one share it, also while it is being compiled."""

    def __init__(self, tokenizer: Any, eos: frozenset[int]):
        self.tokenizer, self.eos = tokenizer, sorted(eos)
        self._threads, self._free = ThreadPoolExecutor(THREADS, "grammars"), asyncio.Semaphore(THREADS)
        self._waiting = 0
        self._known: dict[tuple[str, str, str], asyncio.Task[Grammar]] = {}  # the one that was asked for last comes last

    async def compile(self, param: str, source: dict[str, Any]) -> Grammar:
        """The grammar of ``source``, an argument of :class:`Grammar`, which the field ``param`` gives.

        Raises:
            ApiError: 400 where it cannot be used or is too large; 503 where others keep the threads busy.
        """
        (kind, value), *_ = source.items()
        text = value if isinstance(value, str) else json.dumps(value)
        most = LONGEST_REGEX if kind in ("regex", "choice") and param != "tool_choice" else LONGEST
        if len(text) > most:
            raise refused(f"{param}: the {kind} has {len(text)} characters; at most {most} are taken", param, "grammar_too_large")
        found = self._known.pop((param, kind, text), None)
        if found is None or (found.done() and (found.cancelled() or found.exception())):
            found = asyncio.ensure_future(self._compiled(param, kind, source))
            found.add_done_callback(lambda made: made.cancelled() or made.exception())  # though nobody may wait any more
        self._known[param, kind, text] = found
        while len(self._known) > KEPT:
            del self._known[next(iter(self._known))]
        return await asyncio.shield(found)

    async def _compiled(self, param: str, kind: str, source: dict[str, Any]) -> Grammar:
        if self._waiting >= MOST_WAITING:
            raise busy(WAITING)
        self._waiting += 1
        try:
            await asyncio.wait_for(self._free.acquire(), SECONDS)
        except asyncio.TimeoutError:
            raise busy(WAITING) from None
        finally:
            self._waiting -= 1
        made = asyncio.get_running_loop().run_in_executor(self._threads, self._make, source)
        made.add_done_callback(self._freed)  # which may be long after nobody waits any more
        try:
            return await asyncio.wait_for(asyncio.shield(made), SECONDS)
        except asyncio.TimeoutError:
            raise refused(
                f"{param}: the {kind} takes longer than {SECONDS:g} seconds to compile; simplify it", param, "grammar_too_large"
            ) from None
        except GrammarError as error:
            raise refused(f"{param}: {error}", param, "grammar_too_large") from None
        except ConfigurationError as error:
            raise refused(f"{param}: {error}", param, "invalid_grammar") from None

    def _freed(self, made: asyncio.Future[Grammar]) -> None:
        self._free.release()
        if not made.cancelled():
            made.exception()  # so that asyncio does not complain where nobody asked for it

    def _make(self, source: dict[str, Any]) -> Grammar:
        """Compiled, and asked for its first mask, which shows what it will cost."""
        (kind, value), *_ = source.items()
        check(kind, value)
        given = {"regex" if kind == "choice" else kind: value}
        grammar = Grammar(self.tokenizer, backend="llguidance", eos=self.eos, most_items=MOST_ITEMS, **given)
        import numpy as np

        try:
            grammar.compiled.fill([grammar.compiled.start()], np.zeros((1, grammar.compiled.words), np.int32))
        except GrammarError:
            raise
        except Exception as error:  # the library raises anything
            raise ConfigurationError(f"llguidance cannot use this: {str(error).strip()[:500]}") from error
        return grammar

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
