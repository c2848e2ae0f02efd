"""What ``foredraft demo`` prints."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rich.console import Console
from rich.text import Text

from foredraft import zoo
from foredraft.cli.demo import PLAIN, Comparison, Demo, Difference
from foredraft.cli.figures import combine, counted, number
from foredraft.cli.progress import Progress
from foredraft.cli.tables import add_row, console, new_table

INFLATED = "a benchmark instrument: the same 8 M model inflated to the cost of 300 M"


def show(demo: Demo, progress: Progress) -> bool:
    """Run the demo and print as it goes; False if a text differed for no reason that rounding explains."""
    out = console()
    progress.clear()
    introduce(out, demo)
    comparisons: list[Comparison] = []
    progress.show("warming up, then prompt 1")
    for index, comparison in enumerate(demo.compare(), 1):
        comparisons.append(comparison)
        progress.clear()
        report(out, f"prompt {index} of {len(demo.prompts)}", comparison)
        if index < len(demo.prompts):
            progress.show(f"prompt {index + 1}")
    conclude(out, comparisons)
    return all(difference.explained for comparison in comparisons for difference in comparison.differences)


def introduce(out: Console, demo: Demo) -> None:
    setting = demo.setting
    kinds = {zoo.PREFIX + model.name: model.kind for model in zoo.describe()} if setting.target.startswith(zoo.PREFIX) else {}
    label = f" ({INFLATED})" if kinds.get(setting.target) == "inflated" else ""
    dtype, device = str(demo.model.dtype).removeprefix("torch."), demo.model.device
    threads = f", {counted(torch.get_num_threads(), 'thread')}" if device.type == "cpu" else ""
    out.print(Text(f"Target {setting.target}{label}, {dtype}, {device}{threads}, torch {torch.__version__}."))
    job = f"{counted(len(demo.prompts), 'prompt')} of Python, {counted(setting.max_new_tokens, 'new token')} each, greedy."
    out.print(Text(f"{job} The drafters take turns, after a warm-up; figures are medians of {setting.repeats}, prefill included."))


def report(out: Console, label: str, comparison: Comparison) -> None:
    out.print()
    out.print(Text(f"── {label}", style="bold"))
    out.print(Text.assemble((comparison.prompt, "dim"), comparison.text.rstrip()), soft_wrap=True)
    out.print()
    _table(out, [comparison])
    if not comparison.differences:
        out.print(Text(f"The text is the same in all {len(comparison.runs)} ways, token for token.", style="green"))
    for difference in comparison.differences:
        out.print(Text(explanation(difference), style="yellow" if difference.explained else "red"))


def conclude(out: Console, comparisons: Sequence[Comparison]) -> None:
    out.print()
    out.print(Text("── all prompts", style="bold"))
    _table(out, comparisons)
    same = sum(not comparison.differences for comparison in comparisons)
    out.print(Text(f"Same text in every way: {same} of {len(comparisons)} prompts."))
    for way in comparisons[0].runs:
        if way != PLAIN:
            out.print(Text(verdict(way, speed(comparisons, way) / speed(comparisons, PLAIN))))


def explanation(difference: Difference) -> str:
    begin = f"The text of {difference.way} leaves the plain one at new token {difference.position + 1}"
    if not difference.explained:
        return f"{begin}, and rounding does not explain it (logits {difference.gap:.3g} apart). This is a defect; please report it."
    return (
        f"{begin}, where the two tokens' logits are {difference.gap:.3g} apart and the dtype resolves {difference.unit:.3g}: a tie that "
        "rounding decides, which differs with the number of tokens in a pass. --dtype float32 makes ties rare."
    )


def verdict(way: str, ratio: float) -> str:
    return f"{way}: {ratio:.2f} times the speed of plain decoding" + (", so SLOWER here." if ratio < 1 else ".")


def speed(comparisons: Sequence[Comparison], way: str) -> float:
    """Tokens per second over all prompts."""
    return sum(each.stats(way).new_tokens for each in comparisons) / sum(each.seconds(way) for each in comparisons)


def _table(out: Console, comparisons: Sequence[Comparison]) -> None:
    table = new_table("drafter", ">tokens/s", ">acceptance length", ">target passes", ">speed")
    plain = speed(comparisons, PLAIN)
    for way in comparisons[0].runs:
        rate = speed(comparisons, way)
        stats = combine([each.stats(way) for each in comparisons], seed=None)
        name = f"{way} (plain)" if way == PLAIN else way
        add_row(table, name, f"{rate:.1f}", number(stats.acceptance_length, 2), str(stats.target_passes), f"{rate / plain:.2f}×")
    out.print(table)
