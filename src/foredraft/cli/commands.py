"""The commands and their options. Each body only hands its options on; torch is imported inside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foredraft import __version__
from foredraft.cli.data import app as data
from foredraft.cli.datastore import app as datastores
from foredraft.cli.failures import FAILED, INTERRUPTED, exit_codes, note
from foredraft.cli.heads import convert, export
from foredraft.cli.train import train

PROMPTS, MODELS, SPECULATION, SAMPLING, OUTPUT = "Prompts", "Models", "Speculation", "Decoding", "Output"

app = typer.Typer(
    help="Faster text generation with unmodified Hugging Face models, with the same output distribution (speculative decoding).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(datastores, name="datastore")
app.add_typer(data, name="data")
app.command()(train)
app.command()(export)
app.command()(convert)

Target = Annotated[str, typer.Option(help="The model: a path, a hub id, or zoo:NAME (see foredraft models).", rich_help_panel=MODELS)]
Dtype = Annotated[str, typer.Option(help="auto (as in the checkpoint), float32, bfloat16 or float16.", rich_help_panel=MODELS)]
Quantization = Annotated[
    str | None,
    typer.Option(
        help="int8 loads the model with int8 weights (torchao). That is another model, with its own output distribution.",
        show_default="as in the checkpoint",
        rich_help_panel=MODELS,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        help="cpu, cuda, cuda:1, …, or auto to spread the model over all devices.",
        show_default="cuda if there is one, else cpu",
        rich_help_panel=MODELS,
    ),
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads.", show_default="torch's choice", rich_help_panel=MODELS)]


def main() -> None:
    """Entry point of the console script and of ``python -m foredraft``."""
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
def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="The text to continue. Without it, or with -, the whole of stdin is one prompt, exactly as it is.", show_default=False
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help='One prompt per line; in a .jsonl file, one JSON object with a "prompt" per line.',
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Most prompts per batch.", rich_help_panel=PROMPTS)] = 8,
    chat: Annotated[
        bool, typer.Option("--chat", help="Each prompt is a user's message; apply the chat template.", rich_help_panel=PROMPTS)
    ] = False,
    target: Target = "zoo:python-8m",
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    device: Device = None,
    threads: Threads = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:SOURCE]",
            help="The drafter (see foredraft drafters); none is plain decoding.",
            show_default="prompt-lookup; for zoo:python-300m, draft-model:zoo:python-1m",
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    drafter_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            show_default=False,
            help="An option of the drafter; repeat for more. Values may be numbers, true, false, none or text.",
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    rule: Annotated[
        str, typer.Option(help="The verification rule: auto, or a name (see foredraft rules).", rich_help_panel=SPECULATION)
    ] = "auto",
    shape: Annotated[
        str | None,
        typer.Option(
            help="The largest tree per round: chain(5), product(4,2,1), paths(0,1,0.0), dynamic(depth=5,k=4,total=16), opt(total=16), or "
            "auto, which chooses in every round by measured costs.",
            show_default="auto",
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    draft_length: Annotated[
        int | None, typer.Option(min=0, help="The same as --shape 'chain(N)'.", show_default=False, rich_help_panel=SPECULATION)
    ] = None,
    lossy: Annotated[
        bool, typer.Option("--lossy", help="Allow a rule that changes the output distribution.", rich_help_panel=SPECULATION)
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most new tokens per prompt.", rich_help_panel=SAMPLING)] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="Above 0, sample; at 0, decode greedily.", rich_help_panel=SAMPLING)] = 0.0,
    top_k: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Sample from the k most likely tokens; 0 is all.",
            show_default="the model's, or transformers' 50",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Sample from the most likely tokens whose probabilities sum to this.",
            show_default="the model's",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="The same seed gives the same text. With rules other than match this needs a fixed --shape.",
            show_default="drawn, and shown at the end",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Highlight accepted draft tokens.", rich_help_panel=OUTPUT)] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document with texts, tokens and statistics.", rich_help_panel=OUTPUT)
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            min=0,
            show_default=False,
            help="With --json: the target's log-probability of every token, and of the K most likely tokens at its position.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
) -> None:
    """Generate text for one or more prompts. Text is streamed to stdout; statistics go to stderr.

    Exit codes: 0 success, 1 failure while running, 2 invalid arguments, 130 Ctrl-C (what was generated is printed).
    """
    from foredraft.cli.printers import make_printer
    from foredraft.cli.progress import Progress
    from foredraft.cli.prompts import read_prompts

    with exit_codes():
        texts = read_prompts(prompt, prompts)
        if temperature == 0 and not (top_k is None and top_p is None):
            note("note: --top-k and --top-p change nothing at temperature 0, which is greedy decoding")
        with Progress(f"loading {target}") as progress:
            printer = make_printer(progress, count=len(texts), show=show, as_json=as_json, logprobs=logprobs is not None)
            from foredraft.cli.generation import generate
            from foredraft.cli.settings import Configuration, Decoding

            configuration = Configuration(
                target, drafter, drafter_option or (), rule, shape, draft_length, not lossy, dtype, device, threads, quantization
            )
            decoding = Decoding(max_new_tokens, temperature, top_k, top_p, seed, batch_size, chat, logprobs)
            try:
                outcome = generate(texts, configuration, decoding, printer, progress)
            finally:
                printer.end_line()
            printer.finished(outcome)
        if outcome.interrupted:
            raise typer.Exit(INTERRUPTED)


@app.command()
def audit(
    target: Annotated[str, typer.Argument(help="The model: a path, a hub id, or zoo:NAME (see foredraft models).")] = "zoo:python-8m",
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='One prompt per line; in a .jsonl file, one JSON object with a "prompt" per line.',
            show_default="six beginnings of Python, for the embedded models",
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="auto, float32, bfloat16 or float16. Below float32, rounding alone can look like a fault.", rich_help_panel=MODELS
        ),
    ] = "float32",
    quantization: Quantization = None,
    device: Device = None,
    threads: Threads = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:SOURCE]",
            help="The drafter (see foredraft drafters).",
            show_default="as in foredraft generate",
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    drafter_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", show_default=False, help="An option of the drafter; repeat for more.", rich_help_panel=SPECULATION
        ),
    ] = None,
    rule: Annotated[str, typer.Option(help="auto, or a name (see foredraft rules).", rich_help_panel=SPECULATION)] = "auto",
    shape: Annotated[
        str | None,
        typer.Option(help="The largest tree per round, or auto.", show_default="auto", rich_help_panel=SPECULATION),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="Above 0, sample; at 0, decode greedily.", rich_help_panel=SAMPLING)] = 1.0,
    top_k: Annotated[
        int | None,
        typer.Option(min=0, help="Sample from the k most likely tokens; 0 is all.", show_default="the model's", rich_help_panel=SAMPLING),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Sample from the most likely tokens whose probabilities sum to this.",
            show_default="the model's",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random draws.", rich_help_panel=SAMPLING)] = 0,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens per prompt in the comparison with plain decoding.", rich_help_panel=SAMPLING)
    ] = 48,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Continuations for the statistical tests.",
            show_default="enough to find a total variation of 1 % per token",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Continuations that are drawn together.", rich_help_panel=SAMPLING)] = 256,
    significance: Annotated[
        float, typer.Option(help="Probability that a correct configuration is reported as a fault.", rich_help_panel=SAMPLING)
    ] = 1e-3,
    part: Annotated[
        list[str] | None,
        typer.Option(help="exact, keyed or statistical; repeat for more.", show_default="all that apply", rich_help_panel=OUTPUT),
    ] = None,
    as_json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the full report to this file.", show_default=False, rich_help_panel=OUTPUT),
    ] = None,
) -> None:
    """Check that a configuration keeps the target's output distribution, and report how large a bias would be found.

    Exit codes: 0 exact; 1 a fault, a lossy rule, or a necessary part left out; 2 invalid arguments.
    """
    from foredraft.cli.progress import Progress

    with exit_codes():
        with Progress(f"auditing {target}"):
            from foredraft.cli import audit as auditing
            from foredraft.cli.settings import Configuration, Decoding

            configuration = Configuration(
                target, drafter, drafter_option or (), rule, shape, None, False, dtype, device, threads, quantization
            )
            sampling = Decoding(temperature=temperature, top_k=top_k, top_p=top_p).sampling()
            own = {"seed": seed, "samples": samples, "batch_size": batch_size, "significance": significance}
            report = auditing.run(configuration, prompts, part, {"max_new_tokens": max_new_tokens, **own, **sampling})
            if as_json is not None:
                auditing.write(report, as_json)
        typer.echo("\n".join(auditing.lines(report)))
        if report.verdict != "exact":
            raise typer.Exit(FAILED)


@app.command()
def demo(
    target: Target = "zoo:python-300m",
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:SOURCE]",
            help="Compare this drafter with plain decoding; repeat for more.",
            show_default="prompt-lookup; for zoo targets draft-model:zoo:python-1m too",
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    dtype: Dtype = "bfloat16",
    device: Device = None,
    threads: Threads = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.", rich_help_panel=SAMPLING)] = 40,
    repeats: Annotated[int, typer.Option(min=1, help="Runs per prompt and drafter; the median is reported.", rich_help_panel=SAMPLING)] = 3,
) -> None:
    """Compare plain and speculative decoding of three prompts: text, speed, acceptance.

    The default target, zoo:python-300m, computes the same as zoo:python-8m at the cost of a model with 300 million parameters.
    """
    from foredraft.cli.progress import Progress

    with exit_codes(), Progress(f"loading {target}") as progress:
        from foredraft.cli.demo import Demo, Setting
        from foredraft.cli.demo_report import show

        if not show(Demo(Setting(target, drafter or (), dtype, device, max_new_tokens, repeats, threads)), progress):
            raise typer.Exit(FAILED)


@app.command()
def tune(
    target: Target = "zoo:python-300m",
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:SOURCE]",
            help="A candidate; repeat for more.",
            show_default="prompt-lookup; for zoo targets draft-model:zoo:python-1m too",
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    device: Device = None,
    threads: Threads = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts that are decoded together.", rich_help_panel=PROMPTS)] = 1,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='One prompt per line; in a .jsonl file, one JSON object with a "prompt" per line.',
            show_default="six beginnings of Python, for the embedded models",
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    as_json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the full report to this file.", show_default=False, rich_help_panel=OUTPUT),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Write a chart (needs matplotlib).", show_default=False, rich_help_panel=OUTPUT),
    ] = None,
) -> None:
    """Measure drafters on this machine, recommend a drafter and a shape, and check the prediction against plain decoding.

    The measured costs are saved; --shape auto uses them from then on.
    """
    from foredraft.cli.progress import Progress

    with exit_codes():
        with Progress(f"loading {target}") as progress:
            from foredraft.cli import tables
            from foredraft.cli import tune as tuning

            draw = None if plot is None else tuning.plotter()
            setting = tuning.Setting(target, drafter or (), dtype, device, threads, batch_size, prompts, quantization)
            found = tuning.Tuning(setting, progress).run()
            if as_json is not None:
                tuning.write(as_json, tuning.document(setting, found))
            if draw is not None and plot is not None:
                draw(plot, setting, found)
        tables.console().print(tuning.report(setting, found))


@app.command()
def models() -> None:
    """List the embedded models (pip install 'foredraft[zoo]'). Use them as zoo:NAME; they need no network."""
    from foredraft.cli import tables

    with exit_codes():
        tables.console().print(tables.models())


@app.command()
def drafters(
    name: Annotated[str | None, typer.Argument(help="Show the options of this drafter.", show_default=False)] = None,
) -> None:
    """List drafters; with a name, show its options and their defaults."""
    from foredraft.cli import tables

    with exit_codes():
        tables.console().print(tables.all_drafters() if name is None else tables.one_drafter(name))


@app.command()
def rules() -> None:
    """List verification rules, and the drafts for which each of them is exact."""
    from foredraft.cli import tables

    with exit_codes():
        tables.console().print(tables.rules())
