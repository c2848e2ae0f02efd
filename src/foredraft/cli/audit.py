"""``foredraft audit``: its options. ``audit_model.py`` and ``audit_server.py`` do the work; importing this loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

from foredraft.cli import options
from foredraft.cli.checks import check, check_extra, check_output
from foredraft.cli.failures import FAILED, write_json
from foredraft.cli.options import MODELS, OUTPUT, SAMPLING, grouped, panel
from foredraft.cli.progress import Progress
from foredraft.cli.prompts import read_prompts
from foredraft.cli.settings import Configuration, Decoding
from foredraft.errors import ConfigurationError, Interrupted

SERVER = panel("A server")
FOR_SERVERS = {"api_key", "model", "at_once"}
FOR_BOTH = {"server", "prompts", "seed", "max_new_tokens", "samples", "significance", "as_json"}


@dataclass(frozen=True)
class Remote:
    """The options of the same names, for a server."""

    server: Annotated[
        str | None, SERVER(metavar="URL", help="Audit this OpenAI server, whatever runs it, in place of TARGET.", show_default=False)
    ] = None
    api_key: Annotated[str | None, SERVER(envvar="FOREDRAFT_API_KEY", help="Its key.", show_default=False)] = None
    model: Annotated[str | None, SERVER(help="The model's name there.", show_default="the first that it lists")] = None
    at_once: Annotated[int, SERVER(min=2, help="Requests at a time under load.")] = 8


@grouped
def audit(
    *,
    context: typer.Context,
    target: Annotated[str, typer.Argument(help="The model: a path, a hub id, or zoo:NAME (see foredraft models).")] = "zoo:python-8m",
    remote: Remote,
    prompts: options.PromptFile = None,
    dtype: Annotated[
        str, MODELS(help="auto, float32, bfloat16 or float16. Below float32, rounding alone can look like a fault.")
    ] = "float32",
    configuration: Configuration,
    temperature: options.Temperature = 1.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    seed: Annotated[int, SAMPLING(min=0, help="Seed of all random draws.")] = 0,
    max_new_tokens: Annotated[
        int, SAMPLING(min=1, help="Tokens per prompt in the comparison with plain decoding; of each answer of a server.")
    ] = 48,
    samples: Annotated[
        int | None,
        SAMPLING(
            min=1,
            help="Continuations for the statistical tests.",
            show_default="enough to find a total variation of 1 % per token; of a server, 3 %",
        ),
    ] = None,
    batch_size: Annotated[int, SAMPLING(min=1, help="Continuations that are drawn together.")] = 256,
    significance: Annotated[float, SAMPLING(help="Probability that a correct configuration is reported as a fault.")] = 1e-3,
    part: Annotated[list[str] | None, OUTPUT(help="exact, noise, keyed or statistical; repeatable.", show_default="all that apply")] = None,
    as_json: options.JsonFile = None,
) -> None:
    """Check that a configuration keeps the target's output distribution, and report how large a bias would be found.

    With --server: check that an OpenAI server repeats its answers, alone and under load, and samples from its own log-probabilities.

    Exit codes: 0 exact; 1 a fault, a lossy rule, a server that is not reproducible, or a necessary part left out; 2 invalid arguments;
    130 Ctrl-C. What was found until then is shown and written.
    """
    check_given(context, remote.server)
    check_output(as_json)
    texts = None if prompts is None else read_prompts(None, prompts)
    own = {"seed": seed, "samples": samples, "significance": significance, "max_new_tokens": max_new_tokens}
    if remote.server is not None:
        audit_server(remote, {**own, "prompts": texts}, as_json)
        return
    configuration = replace(configuration, lossy=True)
    check(configuration, encoders=True)
    with Progress(f"auditing {target}"):
        from foredraft.cli import audit_model as auditing

        sampling = Decoding(temperature=temperature, top_k=top_k, top_p=top_p).sampling()
        report = kept(lambda: auditing.run(configuration, texts, part, {"batch_size": batch_size, **own, **sampling}))
        if as_json is not None:
            write_json(as_json, report.to_dict())
    finish(auditing.lines(report), report)


def audit_server(remote: Remote, given: dict[str, Any], as_json: options.JsonFile) -> None:
    """Audit the server; ``given`` are options of :func:`foredraft.auditing.server.audit_server`."""
    check_extra("httpx", "serve", "--server")
    with Progress(f"asking {remote.server}") as progress:
        from foredraft.auditing import server
        from foredraft.cli.audit_server import lines

        asked: dict[str, Any] = {"api_key": remote.api_key, "model": remote.model, "at_once": remote.at_once, "progress": progress.show}
        report = kept(lambda: server.audit_server(str(remote.server), **given, **asked))
        if as_json is not None:
            write_json(as_json, report.to_dict())
    finish(lines(report), report)


def kept(audited: Callable[[], Any]) -> Any:
    """The report; after Ctrl-C, that of what was checked until then."""
    try:
        return audited()
    except Interrupted as stopped:
        return stopped.output


def finish(lines: Iterable[str], report: Any) -> None:
    typer.echo("\n".join(lines))
    if not report.complete:
        raise KeyboardInterrupt
    if report.verdict != "exact":
        raise typer.Exit(FAILED)


def check_given(context: typer.Context, server: str | None) -> None:
    """Refuse options of the other kind of audit.

    Raises:
        ConfigurationError: names them.
    """
    sources = {str(each.name): (each, context.get_parameter_source(str(each.name))) for each in context.command.params}
    given = {name: each for name, (each, source) in sources.items() if source is not None and source.name == "COMMANDLINE"}
    names = {name: each.opts[0] if each.opts[0].startswith("-") else "TARGET" for name, each in given.items()}
    if server is None and (wrong := [flag for name, flag in names.items() if name in FOR_SERVERS]):
        raise ConfigurationError(f"{', '.join(wrong)} needs --server URL")
    if server is not None and (wrong := [flag for name, flag in names.items() if name not in FOR_SERVERS | FOR_BOTH]):
        raise ConfigurationError(f"--server audits a server as it runs; {', '.join(wrong)} is for models, leave it out")
