"""From a request to rows: prompts as token ids, logits processors in the order of transformers, seeds, and what ends a text."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from transformers import MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from foredraft.grammars import Grammar
from foredraft.guesses import Guess
from foredraft.logits.known_processors import warpers
from foredraft.logits.penalties import LogitBias, PresenceFrequencyPenalty
from foredraft.logits.processors import Pipeline
from foredraft.rows import ForcedTokens, Prediction, RowParameters
from foredraft.serving.chat import Chat, text_of
from foredraft.serving.failures import ApiError, refused
from foredraft.serving.formats import Formats, wanted
from foredraft.serving.jobs import Choice
from foredraft.serving.schema import ChatRequest, CompletionRequest, Sampling, TokenizeRequest
from foredraft.serving.settings import Settings
from foredraft.serving.workers import Workers
from foredraft.speculator import Speculator

MOST_ROWS = 1024  # of one request
MOST_WAITING = 256  # requests whose prompts wait to be tokenised
MOST_PREDICTED = 1 << 16  # tokens of a prediction that are drafted from
NEW_TOKENS = 4096  # where neither the request nor the model's context limits a text
DRAWN = 1 << 53  # drawn seeds are whole numbers that JavaScript knows


@dataclass(frozen=True)
class Plan:
    """A request as rows. Choice i of prompt j is row j * n + i, and has the seed (seed, j * n + i). ``grammar`` is the field that has the
    grammar of its texts, if there is one."""

    prompts: Sequence[Sequence[int]]
    choices: Sequence[Choice]
    seed: int
    grammar: str | None = None


class Requests:
    """Makes rows of requests, for one Speculator."""

    def __init__(self, speculator: Speculator, settings: Settings, *, guess: bool, cached: Callable[[int], int] = lambda most: most):
        """``guess``: the rule lets predictions, and what a grammar forces, be drafted. ``cached``: how many tokens of a row, of so many at
        most, the cache can ever hold."""
        self.settings, self.tokenizer, self.guess, self.cached = settings, speculator.tokenizer, guess, cached
        self.encode("")  # drops its file's truncation and padding, which fails while another thread is tokenising
        self.longest = settings.longest(speculator.target)
        self.vocabulary, self.device = speculator.target.vocab_size, speculator.target.device
        config = speculator.target.model.generation_config
        ends = config.eos_token_id if config.eos_token_id is not None else self.tokenizer.eos_token_id
        self.eos = frozenset(() if ends is None else [ends] if isinstance(ends, int) else ends)
        self.chat = Chat(self.tokenizer, settings.chat_template)
        self.formats = Formats(self.tokenizer, self.eos)
        self._workers = Workers(2, MOST_WAITING, "requests")
        self._letters = max(map(len, self.tokenizer.get_vocab()))  # that a token stands for at most

    async def plan(self, request: CompletionRequest | ChatRequest, isolation: str | None, owner: str = "") -> Plan:
        """The rows of ``request``; tokenising and compiling happen in other threads, in which owners take turns.

        Raises:
            ApiError: 400 or 404, where the message names the field; 503 where too many wait for a thread.
        """
        self.check_model(request.model)
        form = wanted(request, self.tokenizer, self.eos)
        grammar = None
        if form is not None:
            if request.ignore_eos or request.min_tokens:
                which = "ignore_eos" if request.ignore_eos else "min_tokens"
                raise refused(f"{which} cannot be combined with {form[0]}, which says what the text is", which)
            try:
                grammar = await self.formats.compile(*form)
            except ApiError:
                await self.check_tools(request, form[0])
                raise
        found = await self._workers.run(owner, partial(self._plan, request, isolation, grammar))
        return replace(found, grammar=form[0] if form else None)

    async def check_tools(self, request: CompletionRequest | ChatRequest, field: str) -> None:
        """Where the grammar that the ``field`` gives is made of the tools' schemas: look for the one that cannot be used.

        Raises:
            ApiError: as :meth:`Formats.compile` for that schema, by its name.
        """
        if isinstance(request, ChatRequest) and field in ("tools", "tool_choice", "response_format"):
            for number, tool in enumerate(request.tools):
                if tool.function.parameters and (field == "tool_choice" or tool.function.strict):
                    await self.formats.compile(f"tools.{number}.function.parameters", {"json_schema": tool.function.parameters})

    def check_model(self, model: str) -> None:
        if model not in ("", self.settings.model):
            raise ApiError(
                404,
                f"there is no model {model[:200]!r} here; this server has {self.settings.model!r}",
                param="model",
                code="model_not_found",
            )

    def _plan(self, request: CompletionRequest | ChatRequest, isolation: str | None, grammar: Grammar | None) -> Plan:
        prompts = self.prompts(request)
        if len(prompts) * request.n > MOST_ROWS:
            raise refused(
                f"{len(prompts)} prompts with n={request.n} are {len(prompts) * request.n} choices; at most {MOST_ROWS} are taken", "n"
            )
        seed = secrets.randbelow(DRAWN) if request.seed is None else request.seed
        choices = []
        guesses = self.guesses(request, grammar)
        for number, ids in enumerate(prompts):
            parameters = partial(
                RowParameters,
                max_new_tokens=max(1, self.limit(request, len(ids))),
                do_sample=request.temperature > 0,
                pipeline=Pipeline.alone(self.processors(request, len(ids), grammar), prompt_length=len(ids), device=self.device),
                eos=frozenset() if request.ignore_eos else self.eos,
                logprobs=request.top,
                prompt_logprobs=request.top if isinstance(request, CompletionRequest) and request.echo else None,
                isolation=isolation,
                max_draft=request.max_draft,
                guesses=guesses,
                trace=request.rounds,
            )
            choices += [Choice(ids, parameters(seed=(seed, number * request.n + index))) for index in range(request.n)]
        return Plan(prompts, choices, seed)

    def close(self) -> None:
        self.formats.close()
        self._workers.close()

    # -- prompts --------------------------------------------------------------------------------------------------------

    def prompts(self, request: CompletionRequest | ChatRequest) -> list[list[int]]:
        if isinstance(request, ChatRequest):
            tools = [] if request.tool_choice == "none" else request.tools
            text = self.chat.text(request.messages, tools, options=request.chat_template_kwargs)
            found, param = [self.encode_prompt(text, "messages", special=False)], "messages"
        else:
            found, param = self.several(request.prompt), "prompt"
        for ids in found:
            self.check_prompt(ids, param)
        return found

    def several(self, prompt: Any) -> list[list[int]]:
        """The prompts of a completion: a text, token ids, or a list of either."""
        several = [prompt] if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int) else prompt
        return [self.encode_prompt(each, "prompt") if isinstance(each, str) else each for each in several]

    def encode_prompt(self, text: str, param: str, *, special: bool = True) -> list[int]:
        """A text that is far too long is refused before it is tokenised, which takes seconds per megabyte."""
        if self.longest is not None and len(text) > self.longest * self._letters:
            raise refused(
                f"the prompt has {len(text)} characters, but prompt and answer can have {self.longest} tokens together, of {self._letters} "
                "characters at most; shorten the prompt",
                param,
                "context_length_exceeded",
            )
        return self.encode(text, special=special)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=special)["input_ids"])

    def check_prompt(self, ids: Sequence[int], param: str) -> None:
        if not ids:
            raise refused("the prompt is empty; give at least one token, for instance the BOS token", param)
        if max(ids) >= self.vocabulary:
            raise refused(f"token {max(ids)} is outside the model's vocabulary of {self.vocabulary}", param)
        if self.longest is not None and len(ids) >= self.longest:
            raise refused(
                f"the prompt has {len(ids)} tokens, but prompt and answer can have {self.longest} together; shorten the prompt",
                param,
                "context_length_exceeded",
            )

    def limit(self, request: CompletionRequest | ChatRequest, length: int) -> int:
        """Most new tokens after a prompt of that length."""
        room = NEW_TOKENS if self.longest is None else self.longest - length
        if request.limit is None:
            most = self.cached(length + room)
            if most <= length:
                raise refused(
                    f"the prompt has {length} tokens; without max_tokens a text has at most {most}: give max_tokens or a shorter prompt",
                    "messages",  # completions have a limit of their own
                    "context_length_exceeded",
                )
            return most - length
        return min(request.limit, room if self.longest else request.limit)

    def tokenize(self, request: TokenizeRequest) -> list[int]:
        if request.messages is not None:
            text = self.chat.text(
                request.messages, request.tools, begin_answer=request.add_generation_prompt, options=request.chat_template_kwargs
            )
            return self.encode(text, special=request.add_special_tokens is True)
        return self.encode(request.prompt or "", special=request.add_special_tokens is not False)

    def guesses(self, request: Sampling, grammar: Grammar | None) -> list[Guess]:
        """What is drafted in place of the drafter's tokens; of these the first that says anything."""
        found: list[Guess] = []
        if request.prediction is not None:
            if not self.guess:
                raise refused("prediction needs a server with the rule match; leave it out", "prediction", "needs_match")
            tokens = self.encode(text_of(request.prediction.content), special=False)
            prediction = Prediction(tokens[:MOST_PREDICTED])
            prediction.prepare()
            found.append(prediction)
        if grammar is not None and self.guess:
            found.append(ForcedTokens(grammar))
        return found

    # -- logits ---------------------------------------------------------------------------------------------------------

    def processors(self, request: Sampling, length: int, grammar: Grammar | None) -> list[Any]:
        """In the order in which transformers would call them after a prompt of that length."""
        found: list[Any] = []
        if request.logit_bias:
            found.append(LogitBias(self.biases(request.logit_bias)))
        if request.repetition_penalty != 1:
            found.append(RepetitionPenaltyLogitsProcessor(float(request.repetition_penalty)))
        if request.presence_penalty or request.frequency_penalty:
            found.append(PresenceFrequencyPenalty(request.presence_penalty, request.frequency_penalty))
        if request.min_tokens and self.eos and not request.ignore_eos:
            found.append(MinNewTokensLengthLogitsProcessor(length, request.min_tokens, sorted(self.eos)))
        if grammar is not None:
            found.append(grammar)
        if request.temperature > 0:
            top_k, top_p = request.top_k if request.top_k > 0 else None, float(request.top_p) if request.top_p < 1 else None
            found += warpers(float(request.temperature), top_k, top_p, float(request.min_p) or None)
        return found

    def biases(self, given: dict[str, float]) -> dict[int, float]:
        found = {int(token): float(bias) for token, bias in given.items()}
        if found and max(found) >= self.vocabulary:
            raise refused(f"logit_bias: token {max(found)} is outside the model's vocabulary of {self.vocabulary}", "logit_bias")
        return found
