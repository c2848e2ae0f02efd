"""What ``foredraft demo`` prints."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.text import Text

from foredraft import zoo
from foredraft.cli.demo import PLAIN, TRANSFORMERS, Comparison, Demo, Difference
from foredraft.cli.figures import counted
from foredraft.cli.tables import add_row, console, new_table
from foredraft.speedup import MEASURED

INFLATED = "a benchmark instrument: the same 8 M model inflated to the cost of 300 M"
KINDS = ("ordinary text", "text that repeats itself")  # of the prompts


def show(demo: Demo) -> bool:
    """Run the demo and print as it goes; False if a text differed for no reason that rounding explains."""
    out = console()
    demo.progress.clear()
    introduce(out, demo)
    fine = True
    for index, comparison in enumerate(demo.compare()):
        demo.progress.clear()
        report(out, f"prompt {index + 1} of {len(demo.prompts)}: {KINDS[index]}", comparison)
        fine = fine and all(difference.explained for difference in comparison.differences)
    return fine


def introduce(out: Console, demo: Demo) -> None:
    setting = demo.setting
    kinds = {zoo.PREFIX + model.name: model.kind for model in zoo.describe()} if setting.target.startswith(zoo.PREFIX) else {}
    label = f" ({INFLATED})" if kinds.get(setting.target) == "inflated" else ""
    dtype, device = str(demo.model.dtype).removeprefix("torch."), demo.model.device
    threads = f", {counted(torch.get_num_threads(), 'thread')}" if device.type == "cpu" else ""
    out.print(Text(f"Target {setting.target}{label}, {dtype}, {device}{threads}, torch {torch.__version__}."))
    job = f"{counted(len(demo.prompts), 'prompt')}, at most {counted(setting.max_new_tokens, 'new token')} each, greedy, in turns."
    out.print(Text(f"{job} Speeds are medians, prefill included. About {demo.left:.0f} s left."))


def report(out: Console, label: str, comparison: Comparison) -> None:
    out.print()
    out.print(Text(f"── {label}", style="bold"))
    out.print(Text.assemble((comparison.prompt, "dim"), comparison.text.rstrip()), soft_wrap=True)
    out.print()
    _table(out, comparison)
    for way in comparison.runs:
        if way not in (TRANSFORMERS, PLAIN):
            out.print(Text(f"{way}: {verdict(comparison, way)}"))
    if not comparison.differences:
        out.print(Text(f"The text is the same in all {len(comparison.runs)} ways, token for token.", style="green"))
    for difference in comparison.differences:
        out.print(Text(explanation(difference), style="yellow" if difference.explained else "red"))


def explanation(difference: Difference) -> str:
    begin = f"The text of {difference.way} leaves that of transformers at new token {difference.position + 1}"
    if not difference.explained:
        return f"{begin}, and rounding does not explain it (logits {difference.gap:.3g} apart). This is a defect; please report it."
    return f"{begin}: a tie that rounding decides (logits {difference.gap:.3g} apart, the dtype resolves {difference.unit:.3g})."


def verdict(comparison: Comparison, way: str) -> str:
    """As ``stats.summary()``, from the plain runs of this prompt."""
    ratio, stats = comparison.speed(way) / comparison.speed(PLAIN), comparison.runs[way][-1].stats
    if ratio < 1.05 and stats is not None and "nothing lost" in stats.summary():
        return stats.speedup.sentence()
    return f"{ratio:.{1 if ratio >= 1.05 else 2}f}× plain decoding ({MEASURED})"


def _table(out: Console, comparison: Comparison) -> None:
    table = new_table("", ">tokens/s", ">× transformers", ">× plain")
    names = {TRANSFORMERS: "transformers", PLAIN: "Foredraft, plain decoding"}
    for way in comparison.runs:
        speed = comparison.speed(way)
        over = [f"{speed / comparison.speed(each):.1f}×" for each in (TRANSFORMERS, PLAIN)]
        add_row(table, names.get(way, f"Foredraft, {way}"), f"{speed:.1f}", *(over if way != TRANSFORMERS else (over[0], "")))
    out.print(table)
