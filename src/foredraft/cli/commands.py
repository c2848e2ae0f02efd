"""The commands and their options, in the order in which help lists them. Each body only hands its options on; torch is imported inside."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from foredraft import __version__, verification
from foredraft.cli import options, tables
from foredraft.cli.audit import audit
from foredraft.cli.checks import check, check_extra, check_grammar, check_model, check_output, check_source_is_read, check_source_text
from foredraft.cli.data import app as data
from foredraft.cli.datastore import app as datastores
from foredraft.cli.failures import FAILED, INTERRUPTED, exit_codes, write_json, writing
from foredraft.cli.heads import convert, export
from foredraft.cli.memory import memory
from foredraft.cli.options import BEGINNINGS, LINES, MODELS, OUTPUT, PROMPTS, SAMPLING, SPECULATION, grouped
from foredraft.cli.printers import make_printer
from foredraft.cli.progress import Progress
from foredraft.cli.prompts import read_prompts, read_tasks, read_texts
from foredraft.cli.serve import serve
from foredraft.cli.settings import Configuration, Contest, Decoding, Loading
from foredraft.cli.skip import app as skip
from foredraft.cli.suggest import suggest as suggested
from foredraft.cli.theory import theory
from foredraft.cli.train import train
from foredraft.errors import ConfigurationError


class Commands(typer.core.TyperGroup):
    """All commands, which fail as :func:`exit_codes` says."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        with exit_codes():
            return super().invoke(ctx)


app = typer.Typer(
    cls=Commands,
    help="Faster text generation with unmodified Hugging Face models, with the same output distribution (speculative decoding).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point of the console script and of ``python -m foredraft``."""
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # a character that a terminal cannot show ends no command
    app(prog_name="foredraft")


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"foredraft {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    pass


@app.command()
@grouped
def generate(
    *,
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="The text to continue. Without it, or with -, the whole of stdin is one prompt, exactly as it is.", show_default=False
        ),
    ] = None,
    prompts: Annotated[Path | None, PROMPTS(metavar="FILE", show_default=False, help=LINES)] = None,
    batch_size: Annotated[int, PROMPTS(min=1, help="Most prompts per batch.")] = 8,
    source: Annotated[
        str | None,
        PROMPTS(
            metavar="TEXT",
            show_default=False,
            help="What an encoder-decoder model reads, in place of PROMPT; - is stdin. For such a model, each line of --prompts is one.",
        ),
    ] = None,
    source_language: Annotated[
        str | None,
        PROMPTS(metavar="CODE", help="The language of the source, as the tokenizer calls it (src_lang).", show_default="the tokenizer's"),
    ] = None,
    target_language: Annotated[
        str | None,
        PROMPTS(
            metavar="CODE",
            help="The language to write, for M2M-100, NLLB and mBART-50: its token is forced_bos_token_id.",
            show_default="the model's",
        ),
    ] = None,
    chat: Annotated[bool, PROMPTS("--chat", help="Each prompt is a user's message; apply the chat template.")] = False,
    system: options.System = None,
    target: options.Target = "zoo:python-8m",
    configuration: Configuration,
    learn: options.Learn = False,
    draft_length: Annotated[int | None, SPECULATION(min=0, help="The same as --shape 'chain(N)'.", show_default=False)] = None,
    lossy: Annotated[bool, SPECULATION("--lossy", help="Allow a rule that changes the output distribution.")] = False,
    decoding: Decoding,
    json_schema: options.JsonSchema = None,
    regex: options.Regex = None,
    grammar: options.GrammarFile = None,
    grammar_backend: options.GrammarBackend = None,
    show: Annotated[bool, OUTPUT("--show", help="Highlight accepted draft tokens.")] = False,
    verbose: options.Verbose = False,
    as_json: Annotated[bool, OUTPUT("--json", help="One JSON object per prompt and line, as soon as it is complete.")] = False,
    logprobs: Annotated[
        int | None,
        OUTPUT(
            metavar="K",
            min=0,
            show_default=False,
            help="With --json: the target's log-probability of every token, and of the K most likely tokens at its position.",
        ),
    ] = None,
) -> None:
    """Generate text for one or more prompts, as the model's generation config says where no option does.

    Text is streamed to stdout; how much faster than plain decoding it was goes to stderr.

    Exit codes: 0 success, 1 failure while running, 2 invalid arguments, 130 Ctrl-C (what was generated is printed).
    """
    texts = read_prompts(prompt if source is None else source, prompts)
    check(configuration, encoders=True, lossy=True)
    languages = decoding.languages
    check_source_text(target, prompt, source, prompts, languages=languages)
    if system is not None and not chat:
        raise ConfigurationError("--system needs --chat")
    decoding = replace(decoding, matched=check_grammar(json_schema, regex, grammar, grammar_backend))
    with Progress(f"loading {target}") as progress:
        printer = make_printer(progress, count=len(texts), show=show, as_json=as_json, logprobs=logprobs is not None, verbose=verbose)
        from foredraft.cli.generation import generate

        try:
            reads = partial(check_source_is_read, target, source=source is not None, prompt=prompt is not None, languages=languages)
            outcome = generate(texts, configuration, decoding, printer, progress, reads=reads)
        finally:
            printer.end_line()
        printer.finished(outcome)
    if outcome.interrupted:
        raise typer.Exit(INTERRUPTED)


@app.command()
@grouped
def chat(
    *,
    target: Annotated[str, typer.Argument(metavar="MODEL", help="A chat model: a path or a hub id.", show_default=False)],
    system: options.System = None,
    configuration: Configuration,
    learn: options.Learn = False,
    max_new_tokens: Annotated[int | None, SAMPLING(min=1, help="Most tokens per answer.", show_default="the model's, or 1024")] = None,
    decoding: Decoding,
    drafted: Annotated[bool, OUTPUT("--drafted", help="Highlight accepted draft tokens.")] = False,
    verbose: options.Verbose = False,
) -> None:
    """Talk with a model. /help lists what can be typed beside messages; Ctrl-C stops an answer, Ctrl-D leaves.

    Exit codes: 0 success, 1 failure while running, 2 invalid arguments.
    """
    check(configuration)
    with Progress(f"loading {target}") as progress:
        from foredraft.cli.chat import Chat

        conversation = Chat(configuration, replace(decoding, longest=1024), drafted=drafted, verbose=verbose)
        progress.clear()
        conversation.run()


@app.command()
@grouped
def tune(
    *,
    target: options.Target = "zoo:python-300m",
    contest: Contest,
    batch_size: Annotated[int, PROMPTS(min=1, help="Prompts that are decoded together.")] = 1,
    prompts: options.PromptFile = None,
    as_json: options.JsonFile = None,
    verbose: options.Verbose = False,
    plot: Annotated[Path | None, OUTPUT(metavar="FILE.png", help="Write a chart (needs matplotlib).", show_default=False)] = None,
) -> None:
    """Measure drafters on this machine, and say what to write, how much it gains over plain decoding, and how sure that is.

    The measured costs are saved; --shape auto uses them from then on. After Ctrl-C (exit code 130), what was measured until then is shown
    and written.
    """
    check(contest.plain, contest.options)
    texts = () if prompts is None else read_prompts(None, prompts)
    check_output(as_json)
    check_output(plot)
    if plot is not None:
        check_extra("matplotlib", "plot", "--plot")
    with Progress(f"loading {target}") as progress:
        from foredraft.cli import tune as tuning

        setting = tuning.Setting(**vars(contest), batch_size=batch_size, prompts=texts)
        measuring = tuning.Tuning(setting, progress)
        found = measuring.run()
        if as_json is not None:
            write_json(as_json, tuning.document(setting, found, measuring.spread, complete=measuring.complete))
    tables.console().print(tuning.report(setting, found, measuring.spread, verbose=verbose), soft_wrap=True)
    if not measuring.complete:
        raise KeyboardInterrupt
    if plot is not None:  # the last: it may end in .nope
        tuning.draw(plot, setting, found)


@app.command()
@grouped
def alpha(
    *,
    target: Annotated[str, MODELS(help="The model: a path, a hub id, or zoo:NAME.", show_default=False)],
    draft: Annotated[str, MODELS(help="The draft model, likewise.", show_default=False)],
    data: Annotated[
        list[Path],
        PROMPTS(
            metavar="TEXTS",
            show_default=False,
            help='A folder made by foredraft data generate, a .jsonl file with "text", "prompt" or "messages" on each line, or a text; '
            "repeat for more.",
        ),
    ],
    category: Annotated[
        str, PROMPTS(metavar="KEY", help="What names the category in lines of .jsonl files; without it the file's name does.")
    ] = "category",
    limit: Annotated[int, PROMPTS(min=1, metavar="N", help="Texts of each category, at most: the first ones.")] = 100,
    length: Annotated[int, PROMPTS(min=2, help="Tokens of each text, at most: the first ones.")] = 1024,
    loading: Loading,
    temperature: options.Temperature = 1.0,
    top_k: Annotated[int, SAMPLING(min=0, help="Sample from the k most likely tokens; 0 is all.")] = 0,
    top_p: options.TopP = None,
    as_json: options.JsonFile = None,
) -> None:
    """Say whether a draft model is worth it: acceptance rate α on texts, what it costs, the best γ, and the speed that these predict.

    Reads each text once with either model and generates nothing. Texts that the target wrote (foredraft data generate) tell most.

    Exit codes: 0 success, 1 failure while running, 2 invalid arguments, 130 Ctrl-C. What was compared until then is shown and written.
    """
    configuration = Configuration(**vars(loading), drafter=f"draft-model:{draft}", shape="chain(1)")
    check(configuration)
    texts = read_texts(data, category)
    check_output(as_json)
    with Progress(f"loading {target}") as progress:
        from foredraft.cli import alpha as comparison

        sampling = Decoding(temperature=temperature, top_k=top_k, top_p=top_p).sampling()
        setting = comparison.Setting(configuration, draft, texts, sampling, length, limit)
        found = comparison.run(setting, progress)
        if as_json is not None:
            write_json(as_json, comparison.document(setting, found))
    tables.console().print(comparison.report(setting, found), soft_wrap=True)
    if not found.complete:
        raise KeyboardInterrupt


@app.command()
@grouped
def table(
    *,
    target: Annotated[list[str], MODELS(help="The model: a path, a hub id, or zoo:NAME; repeat for more.", show_default=False)],
    contest: Contest,
    task: Annotated[
        list[Path] | None,
        PROMPTS(metavar="FILE", help=f"A task is a file of prompts and has its name; repeat for more. {LINES}", show_default=BEGINNINGS),
    ] = None,
    limit: Annotated[int, PROMPTS(min=1, metavar="N", help="Prompts of each task, at most: the first ones.")] = 20,
    drafter_option: Annotated[
        list[str] | None,
        SPECULATION(metavar="KEY=VALUE", show_default=False, help="An option for every drafter that has it; repeat for more."),
    ] = None,
    gamma: Annotated[list[int], SPECULATION(min=1, help="Drafted tokens per round; repeat for more.")] = [3, 5, 7],  # noqa: B006
    rule: Annotated[
        str | None,
        SPECULATION(
            help="The verification rule where tokens are sampled.",
            show_default="rejection, as in the paper; auto for drafts not drawn from q",
        ),
    ] = None,
    temperature: Annotated[list[float], SAMPLING(min=0.0, help="Above 0, sample; 0 is greedy; repeat for more.")] = [0.0, 1.0],  # noqa: B006
    max_new_tokens: Annotated[int, SAMPLING(min=2, help="Most new tokens per prompt and run.")] = 64,
    repeats: Annotated[int, SAMPLING(min=1, help="Measured runs of each prompt, after one to warm up.")] = 3,
    as_json: options.JsonFile = None,
    markdown: Annotated[Path | None, OUTPUT(metavar="FILE", help="Write the table as Markdown.", show_default=False)] = None,
    latex: Annotated[Path | None, OUTPUT(metavar="FILE", help="Write the table for LaTeX.", show_default=False)] = None,
) -> None:
    """Measure drafts as papers tabulate them: α, c, and the speed-up beside what the formula and the measured costs predict.

    Plain decoding and all drafts take turns. A star marks the fastest draft of each task and temperature, if it beats plain decoding. A
    bigram model, counted from the text at hand, is always among them.

    Exit codes: 0 success, 1 failure while running, 2 invalid arguments, 130 Ctrl-C. What was measured until then is shown and written.
    """
    for each in target:
        own = replace(contest, target=each)
        check(own.plain, own.options, encoders=True)
    if rule not in (None, "auto") and not verification.describe(rule).lossless:
        raise ConfigurationError(f"rule {rule!r} is lossy: it changes the output distribution; name another with --rule")
    tasks = read_tasks(task or (), limit)
    for path in (as_json, markdown, latex):
        check_output(path)
    with Progress("loading") as progress:
        from foredraft.cli import table as pairs

        setting = pairs.Setting(contest, target, tasks, temperature, sorted({*gamma}), rule, max_new_tokens, repeats)
        cells, complete = list[pairs.Cell](), False
        try:
            for some in pairs.run(setting, progress):
                cells += some
            complete = True
        finally:  # what was measured before Ctrl-C or a failure is kept
            progress.clear()
            if cells and as_json is not None:
                write_json(as_json, pairs.document(setting, cells, complete=complete))
            for path, write in ((markdown, pairs.markdown), (latex, pairs.latex)):
                if cells and path is not None:
                    with writing(path):
                        path.write_text(write(cells), encoding="utf-8")
            if cells:
                tables.console().print(pairs.report(cells), soft_wrap=True)


app.command()(serve)
app.command()(theory)
app.command()(memory)


@app.command()
def suggest(target: Annotated[str, typer.Argument(metavar="MODEL", help="A path, a hub id, or zoo:NAME.", show_default=False)]) -> None:
    """Say which draft model suits a model, by its configuration alone, and list drafters that suit any."""
    check_model(target)
    typer.echo("\n".join(suggested(target)))


@app.command()
def demo(
    target: options.Target = "zoo:python-8m",
    drafters: options.Candidates = None,
    dtype: options.Dtype = "float32",
    device: options.Device = None,
    threads: options.Threads = None,
    max_new_tokens: Annotated[int, SAMPLING(min=1, help="Most tokens per prompt and run.")] = 64,
    seconds: Annotated[float, SAMPLING(min=1, help="When to end: a slow machine decodes fewer tokens. Loading is not cut short.")] = 50,
) -> None:
    """See in a minute what you gain: transformers, plain decoding and drafters on two prompts.

    The target is loaded twice, once for transformers. zoo:python-300m computes the same as zoo:python-8m at the cost of a model with 300
    million parameters; give it more --seconds.
    """
    given = {**locals(), "started": time.monotonic()}
    check(Configuration(target, dtype=dtype, device=device), {each: {} for each in drafters or ()})
    with Progress(f"loading {target}; about {seconds:.0f} s left") as progress:
        from foredraft.cli.demo import Demo, Setting, show

        if not show(Demo(Setting(**given), progress)):
            raise typer.Exit(FAILED)


app.command()(audit)


@app.command()
def models() -> None:
    """List the embedded models (pip install 'foredraft\\[zoo]'). Use them as zoo:NAME; they need no network."""
    tables.console().print(tables.models())


@app.command()
def drafters(name: Annotated[str | None, typer.Argument(help="Show the options of this drafter.", show_default=False)] = None) -> None:
    """List drafters; with a name, show its options and their defaults."""
    tables.console().print(tables.all_drafters() if name is None else tables.one_drafter(name))


@app.command()
def rules() -> None:
    """List verification rules, and the drafts for which each of them is exact."""
    tables.console().print(tables.rules())


for command in (train, export, convert):
    app.command()(command)
for name, commands in (("data", data), ("skip", skip), ("datastore", datastores)):
    app.add_typer(commands, name=name)
