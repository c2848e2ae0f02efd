"""``foredraft serve``: a model behind the OpenAI API. Importing this loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from foredraft.cli import options
from foredraft.cli.checks import check, check_extra
from foredraft.cli.failures import FAILED, note
from foredraft.cli.options import MODELS, SPECULATION, grouped, panel
from foredraft.cli.progress import Progress
from foredraft.cli.settings import Configuration
from foredraft.errors import ConfigurationError
from foredraft.files import read_text
from foredraft.models.cache_sizes import parse_memory
from foredraft.serving.settings import Settings
from foredraft.serving.sockets import bind

ADDRESS, LIMITS, ACCESS = map(panel, ("Address", "Limits", "Access"))
STORES = ("suffix", "ngram")  # drafters that learn into stores, which are kept apart by key
HERE = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Serving:
    """The options of the same names, which :class:`~foredraft.serving.settings.Settings` explains."""

    host: Annotated[str, ADDRESS(help="The address to listen at; 0.0.0.0 is every one of this machine.")] = "127.0.0.1"
    port: Annotated[int, ADDRESS(min=0, max=65535, help="The port; 0 is any that is free.")] = 8000
    no_page: Annotated[bool, ADDRESS("--no-page", help="Serve no web page at /.")] = False
    cors_origin: Annotated[
        list[str] | None, ADDRESS(metavar="ORIGIN", help="Web pages from here may use the server; repeat for more.", show_default="none")
    ] = None
    api_key: Annotated[
        list[str] | None,
        ACCESS(metavar="KEY", help="Requests must give this key, or another of them; repeat for more.", show_default="none is needed"),
    ] = None
    api_key_file: Annotated[Path | None, ACCESS(metavar="FILE", help="One key per line, beside those given.", show_default=False)] = None
    share: Annotated[
        bool, ACCESS("--share", help="What is kept of one key's texts (cached beginnings, drafts) speeds up other keys' texts too.")
    ] = False
    max_rows: Annotated[int, LIMITS(min=1, help="Most texts that are decoded together.")] = Settings.max_rows
    max_batch_tokens: Annotated[
        int | None,
        LIMITS(
            min=2, help="Most tokens in all of these texts, prompts and all that may still come.", show_default="as --cache-memory allows"
        ),
    ] = None
    cache_memory: Annotated[str, LIMITS(metavar="SIZE", help="Most memory for keys and values: 6GiB, or 0.5 of what is free.")] = "auto"
    max_queue: Annotated[int, LIMITS(min=1, help="Most texts that wait; further requests get 429.")] = Settings.max_queue
    queue_timeout: Annotated[float, LIMITS(min=0, metavar="SECONDS", help="A request waits no longer.")] = Settings.queue_timeout
    request_timeout: Annotated[float, LIMITS(min=0, metavar="SECONDS", help="A request takes no longer.")] = Settings.request_timeout
    drain: Annotated[
        float, LIMITS(min=0, metavar="SECONDS", help="What running requests have after SIGTERM or Ctrl-C; a second one ends them.")
    ] = Settings.drain
    max_body: Annotated[str, LIMITS(metavar="SIZE", help="The largest request.")] = "8MiB"
    request_metrics: Annotated[
        bool, ADDRESS("--request-metrics", help="Say in each response what its drafts came to (metrics.speculative_decoding).")
    ] = False
    chat_template: Annotated[Path | None, MODELS(metavar="FILE", help="A chat template in Jinja.", show_default="the tokenizer's")] = None
    deterministic: Annotated[
        bool,
        SPECULATION("--deterministic", help="Refuse to start where a text may depend on what else is decoded; else only warn."),
    ] = False


@grouped
def serve(
    *,
    target: Annotated[str, typer.Argument(metavar="MODEL", help="A path, a hub id, or zoo:NAME (see foredraft models).")],
    configuration: Configuration,
    rule: Annotated[
        str,
        SPECULATION(
            help="The verification rule. With match the seed alone decides a text. auto keeps more drafted tokens, and a text then depends "
            "on the drafts too; or one of 'foredraft rules'."
        ),
    ] = "match",
    learn: options.Learn = False,
    serving: Serving,
) -> None:
    """Serve a model behind the OpenAI API, with continuous batching, metrics and a web page. The same seed gives the same text.

    Exit codes: 0 stopped by a signal, 1 the engine died or memory ran out, 2 invalid arguments, 130 or 143 ended by a second signal.
    """
    for module, package in (("fastapi", "fastapi"), ("uvicorn", "uvicorn"), ("prometheus_client", "prometheus-client")):
        check_extra(module, "serve", f"foredraft serve ({package})")
    check(configuration)
    settings = settings_of(configuration, serving)
    parse_memory(serving.cache_memory)
    bound = bind(serving.host, serving.port)
    with Progress(f"loading {target}") as progress:
        from foredraft import serving as server
        from foredraft.cli.generation import load_speculator
        from foredraft.loading import load_tokenizer
        from foredraft.serving import running
        from foredraft.serving.chat import Chat

        running.log_to_stderr()
        tokenizer = load_tokenizer(target)
        Chat(tokenizer, settings.chat_template)  # mistakes in the template, before any weights are read
        speculator = load_speculator(configuration, tokenizer, cache_memory=serving.cache_memory)
        application = server.app(speculator, settings)
        progress.show("measuring the machine")
        running.warm_up(speculator, application.state.engine)
        progress.clear()
        process = running.Server(application, application.state.engine, bound, ready=lambda address: ready(address, serving), said=note)
        process.serve_until_signal()
    if process.died:
        note("error: the engine has died; the log says why")
        raise typer.Exit(FAILED)


def ready(address: str, serving: Serving) -> None:
    """What is shown once requests are taken."""
    page = "" if serving.no_page else f", with a web page at {address}"
    typer.echo(f"ready: the OpenAI API is at {address}/v1{page}; Ctrl-C stops it")
    if serving.host not in HERE and not (serving.api_key or serving.api_key_file):
        note("note: without --api-key, everybody who reaches this machine can use the model")


def settings_of(configuration: Configuration, serving: Serving) -> Settings:
    """What the server is told.

    Raises:
        ConfigurationError: keys or sizes that cannot be, or learning from several keys' texts unasked.
    """
    keys = {f"key-{number}": key for number, key in enumerate(read_keys(serving.api_key or (), serving.api_key_file), 1)}
    size = None
    with suppress(ConfigurationError):  # which offers what this option does not take
        size = parse_memory(serving.max_body)
    if not isinstance(size, int):
        raise ConfigurationError(f"--max-body takes a size such as 8MiB, got {serving.max_body!r}")
    for flag, seconds in (("--queue-timeout", serving.queue_timeout), ("--request-timeout", serving.request_timeout)):
        if not seconds > 0:
            raise ConfigurationError(f"{flag} takes a number of seconds above 0, or no request is served; got {seconds:g}")
    same = ("host", "share", "max_rows", "max_batch_tokens", "max_queue", "queue_timeout", "request_timeout", "drain", "request_metrics")
    template = None if serving.chat_template is None else read(serving.chat_template)
    if template is not None and not template.strip():
        raise ConfigurationError(f"--chat-template {str(serving.chat_template)!r} holds no template; leave it out for the tokenizer's")
    settings = Settings(
        model=configuration.target,
        keys=keys,
        max_body=size,
        cors_origins=tuple(serving.cors_origin or ()),
        page=not serving.no_page,
        chat_template=template,
        repeatable=configuration.rule != "auto",
        deterministic=serving.deterministic or None,
        **{name: getattr(serving, name) for name in same},
    )
    if configuration.drafter_options.get("learn", False) is not False and configuration.drafter_name.partition(":")[0] not in STORES:
        settings.check_learning()  # the engine does, too, but once all weights are read
    return settings


def read(path: Path) -> str:
    return read_text(path.expanduser())


def read_keys(given: Sequence[str], path: Path | None) -> list[str]:
    """Keys that were given, and those in a file, where blank lines and those that begin with # are none."""
    lines = [] if path is None else [line.strip() for line in read(path).splitlines()]
    found = [*given, *(line for line in lines if line and not line.startswith("#"))]
    if path is not None and len(found) == len(given):
        raise ConfigurationError(f"--api-key-file {str(path)!r} holds no key; write one per line")
    return found
