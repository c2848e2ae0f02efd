"""``foredraft chat``: a conversation that is streamed. What begins with a slash is not a message.

Each answer is asked for with the whole conversation so far; the cache of the turn before is used again.
"""

from __future__ import annotations

import json
import secrets
import sys
from contextlib import suppress
from pathlib import Path

from foredraft.cli.failures import note, writing
from foredraft.cli.figures import execution_line, figures_line, sentence
from foredraft.cli.generation import load_speculator
from foredraft.cli.printers import Marking, write
from foredraft.cli.prompts import messages
from foredraft.cli.settings import Configuration, Decoding, Result
from foredraft.detokenizer import Detokenizer
from foredraft.errors import ConfigurationError, first_line
from foredraft.loading import load_tokenizer
from foredraft.preparation import pad
from foredraft.text import encode

HELP = """/reset          forget the conversation
/system TEXT    set the system message, and forget the conversation
/drafted on     show which tokens were drafted and accepted; /drafted off
/save FILE      write the conversation as a line of JSON
/quit           leave, as Ctrl-D does"""


class Chat:
    """One conversation.

    Raises:
        ConfigurationError: what cannot work, such as a model without a chat template.
    """

    def __init__(self, configuration: Configuration, decoding: Decoding, *, drafted: bool = False, verbose: bool = False):
        self.verbose = verbose
        self.target, self.drafter, self.decoding = configuration.target, configuration.drafter_name, decoding
        self.tokenizer = load_tokenizer(configuration.target)
        self.messages = messages("system", decoding.system)
        encode(self.tokenizer, [*self.messages, *messages("user", "?")], self.target)  # refused now rather than at the first message
        self.speculator = load_speculator(configuration, self.tokenizer)
        self.mark = Marking(drafted)
        self.seed = secrets.randbits(32) if decoding.seed is None else decoding.seed
        self.turn = 0

    def run(self) -> None:
        """Read messages and answer them until the input ends."""
        note(f"{self.target} is ready; /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves")
        if self.verbose:
            note(execution_line(self.speculator.target.execution, self.speculator.target.reasons))
        self.mark.explain()
        with suppress(ImportError):
            import readline  # noqa: F401  (lines can be edited)
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
                line.encode()
            except EOFError:
                return
            except UnicodeError as error:
                raise ConfigurationError(f"stdin is not UTF-8 text: {first_line(error)}") from error
            except KeyboardInterrupt:
                if not sys.stdin.isatty():
                    raise
                note("\nCtrl-D or /quit leaves")
                continue
            if line in ("/quit", "/exit"):
                return
            try:
                if line.startswith("/"):
                    self.command(*(line[1:].split(maxsplit=1) or [""]))
                elif line:
                    self.answer(line)
            except ConfigurationError as error:
                note(f"error: {error}")

    def command(self, name: str, argument: str = "") -> None:
        """What a slash begins."""
        if name == "help":
            note(HELP)
        elif name in ("reset", "system"):
            system = argument if name == "system" else next((each["content"] for each in self.messages if each["role"] == "system"), None)
            self.messages = messages("system", system or None)
            note("the conversation is forgotten")
        elif name == "drafted" and argument in ("on", "off"):
            self.mark.show = argument == "on"
            self.mark.explain()
        elif name == "save" and argument:
            with writing(path := Path(argument).expanduser()):
                path.write_text(json.dumps({"messages": self.messages}) + "\n", encoding="utf-8")
            note(f"saved {path}")
        else:
            raise ConfigurationError(f"unknown command {f'/{name} {argument}'.strip()!r}\n{HELP}")

    def answer(self, message: str) -> None:
        """Stream the answer to ``message``; Ctrl-C ends it, and what there is stays in the conversation."""
        conversation = [*self.messages, *messages("user", message)]
        ids = encode(self.tokenizer, conversation, self.target)
        model = self.speculator.model
        arguments = {**pad([ids], self.speculator.target.device), **self.decoding.arguments(model.generation_config, self.tokenizer)}
        result = Result(self.turn, message, ids, Detokenizer(self.tokenizer, ids))
        stream = self.speculator.stream(**arguments, seed=[(self.seed, self.turn)], repeatable=self.decoding.seed is not None)
        try:
            for tokens in stream:
                write(self.mark(result.extend(tokens, tokens.accepted, tokens.finish_reason)))
        except KeyboardInterrupt:
            write(self.mark(result.interrupt()))
        finally:
            stream.close()
            write("\n")
        stream.stats.seed = self.seed
        self.turn += 1
        self.messages = [*conversation, *messages("assistant", result.text)]
        interrupted = result.finish_reason == "interrupted"
        sampled = self.decoding.sampled(model.generation_config)
        note(sentence(stream.stats, sampled=sampled, interrupted=interrupted))
        if self.verbose:
            note(figures_line(stream.stats, drafter=self.drafter, sampled=sampled))
        if result.finish_reason in ("length", "context"):
            note("the answer reached --max-new-tokens" if result.finish_reason == "length" else "the model's context is full; /reset")
