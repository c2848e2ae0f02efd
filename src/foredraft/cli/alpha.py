"""``foredraft alpha``: whether a draft model is worth it, by texts that are there already: two passes for each, and a cost measurement.

At every token of a text, with the text before it as context, p is the target's distribution and q the draft's. α = Σ min(p, q), which is
1 - TV(p, q), is how often a drafted token is accepted there.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from rich.console import Group, RenderableType
from rich.text import Text as Line
from torch import Tensor

from foredraft.auditing.reference import Reference
from foredraft.cli.figures import counted
from foredraft.cli.generation import load_speculator, make_drafter
from foredraft.cli.progress import Progress
from foredraft.cli.prompts import Text
from foredraft.cli.settings import Configuration
from foredraft.cli.tables import add_row, new_table
from foredraft.drafters.draft_model import DraftModel
from foredraft.drafters.foreign import Foreign
from foredraft.drafters.vocabularies import Reading
from foredraft.errors import ConfigurationError, TargetOutputError
from foredraft.loading import load_tokenizer
from foredraft.planning import search
from foredraft.planning.costs import PROMPT, CostModel, StandIn, measure
from foredraft.planning.teacher_forced import Numbers, Share, expected_rounds
from foredraft.speculator import Speculator
from foredraft.target import Target
from foredraft.text import encode
from foredraft.training.data import Texts, refuse_other_data
from foredraft.tree import TokenTree

MOST = 12  # tokens of a chain
FEW = 10  # texts, below which an interval is rough
WIDER = 4  # times as many tokens in each range of positions as in the one before


@dataclass(frozen=True)
class Setting:
    """The options of the same names; ``sampling`` are arguments of ``generate``."""

    configuration: Configuration
    draft: str
    texts: Sequence[Text]
    sampling: dict[str, Any]
    length: int
    limit: int


@dataclass(frozen=True, eq=False)
class Compared:
    """One text: ``alpha`` ``[n]`` and ``agrees`` ``[n]`` (0 or 1: the likeliest tokens are the same) at its last n tokens, which ``first``
    tokens stand before."""

    category: str
    first: int
    alpha: Numbers
    agrees: Numbers

    def __len__(self) -> int:
        return len(self.alpha)


@dataclass(frozen=True)
class Rates:
    """Texts of a category, or places of them: how many, ``alpha`` and ``agreement``."""

    name: str
    texts: int
    tokens: int
    alpha: Share
    agreement: Share

    @staticmethod
    def of(name: str, parts: Sequence[tuple[Numbers, Numbers]]) -> Rates:
        """From α and agreement of each text."""
        wholes = [len(alpha) for alpha, _ in parts]
        shares = (Share.of([each.sum() for each in column], wholes, most=1.0) for column in zip(*parts))
        return Rates(name, sum(whole > 0 for whole in wholes), sum(wholes), *shares)


@dataclass(frozen=True)
class Forecast:
    """What chains promise: tokens per pass and speed-up of chains of 1, 2, … tokens; ``best`` is the length of the fastest, 0 for none,
    ``speedup`` its speed-up with the interval that texts leave."""

    lengths: Sequence[float]
    speedups: Sequence[float]
    best: int
    speedup: Share


@dataclass(frozen=True)
class Report:
    """All that was found; ``sampled`` is None where only greedy decoding was asked for. ``shared`` is the part of the draft's tokens that
    the target knows, where it has another tokenizer; ``cut`` texts then went beyond its context. Of a run that was interrupted, which is
    not ``complete``, only the texts until then count."""

    whole: Rates
    categories: Sequence[Rates]
    positions: Sequence[Rates]
    c: float
    draft_seconds: float
    target_seconds: float
    sampled: Forecast | None
    greedy: Forecast
    left_out: int = 0
    shared: float | None = None
    cut: int = 0
    complete: bool = True


def run(setting: Setting, progress: Progress) -> Report:
    """Load, measure costs, compare on every text; after Ctrl-C, what was compared until then.

    Raises:
        ConfigurationError: no text is long enough, or the draft has another tokenizer and cannot be compared.
    """
    configuration = setting.configuration
    tokenizer = load_tokenizer(configuration.target)
    speculator = load_speculator(configuration, tokenizer)
    assert isinstance(speculator.drafter, DraftModel)
    if speculator.drafter.foreign is not None and speculator.drafter.foreign.by == "text":  # what is compared are the tokens of both
        speculator.drafter.close()
        speculator.drafter = make_drafter(configuration.drafter_name, {"vocabulary": "intersection"}, tokenizer)
        speculator.drafter.bind(speculator.target)
    assert isinstance(speculator.drafter, DraftModel)
    draft, foreign, found = speculator.drafter.model, speculator.drafter.foreign, list[Compared]()
    if foreign is not None and draft.chains_only:
        raise ConfigurationError(f"foredraft alpha cannot compare a draft of this kind with another tokenizer: {draft.chains_only}")
    room = [setting.length, *(each.trained for each in (speculator.target, draft) if each.trained is not None)]
    texts, left_out = tokens_of(setting, speculator, tokenizer, min(room))
    said = None if foreign is None else partial(in_other_tokens, draft, foreign)
    progress.show("measuring costs")
    costs = measured(speculator)
    try:
        for number, (category, ids, first) in enumerate(texts, 1):
            progress.show(f"comparing, text {number} of {len(texts)}")
            found.append(compare(speculator.model, draft.model, category, ids, first, setting.sampling, said=said))
    except KeyboardInterrupt:
        if not found:
            raise
    if not any(map(len, found)):
        raise ConfigurationError("no text fits the draft's context, not even its first tokens; choose a draft with a longer one")
    made = report_of([each for each in found if len(each)], costs, sampled=setting.sampling["do_sample"], left_out=left_out)
    shared = None if foreign is None else foreign.vocabularies.share
    cut = sum(len(each) < len(ids) - first for each, (_, ids, first) in zip(found, texts))
    return replace(made, shared=shared, cut=cut, complete=len(found) == len(texts))


def tokens_of(setting: Setting, speculator: Speculator, tokenizer: Any, longest: int) -> tuple[list[tuple[str, list[int], int]], int]:
    """Category, at most ``longest`` token ids, and the number of the first token that counts, of at most ``limit`` texts of each category;
    and how many more there are. Of texts that a model wrote, the answers count; of others, all tokens but the first.

    Raises:
        ConfigurationError: no text is long enough, or a folder's ids mean something else to the target.
    """
    found: list[tuple[str, list[int], int]] = []
    left_out = 0
    for category, members in groupby(sorted(setting.texts, key=lambda text: text.category), key=lambda text: text.category):
        own: list[tuple[str, list[int], int]] = []
        for text in members:
            if isinstance(text.content, (str, list)):
                if len(own) == setting.limit:
                    left_out += 1
                    continue
                ids = encode(tokenizer, text.content, setting.configuration.target)[:longest]
                own.append((category, ids, 1))
                continue
            folder = Texts(text.content, partial=True)
            refuse_other_data(folder.manifest, speculator.model, other_target=True)
            taken = min(len(folder), setting.limit - len(own))
            left_out += len(folder) - taken
            for index in range(taken):
                own.append((category, folder[index][:longest].tolist(), max(1, int(folder.prompt_lengths[index]))))
        found += own
    long_enough = [each for each in found if len(each[1]) > each[2]]
    if not long_enough:
        raise ConfigurationError("no text has two tokens or more; give longer texts, or a larger --length")
    return long_enough, left_out + len(found) - len(long_enough)


@torch.inference_mode()
def compare(
    target: Any,
    draft: Any,
    category: str,
    ids: Sequence[int],
    first: int,
    sampling: dict[str, Any],
    *,
    said: Callable[[Sequence[int], int], Tensor] | None = None,
) -> Compared:
    """One pass of each model over a text; the logits processors of ``generate`` act on both. ``said`` is :func:`in_other_tokens` of a
    draft with another tokenizer; only as many tokens count as it returns."""
    reference = Reference.of(target, ids[:first], {**sampling, "max_new_tokens": len(ids)})  # none of these tokens is the last one
    text = torch.tensor([list(ids)], device=target.device)
    ours = reference.logits(text[:, first:])[0]
    if not bool(ours.amax(-1).isfinite().all()):
        raise TargetOutputError(
            f"the target's logits are NaN or infinite in a text of {category!r}; try a wider dtype (float32 or bfloat16)"
        )
    theirs = reference.logits(text[:, first:], model=draft)[0] if said is None else said(ids, first)
    alpha, agrees = np.empty(len(theirs)), np.empty(len(theirs))
    for place in range(len(theirs)):
        before, size = text[:, : first + place], ours.shape[-1]
        p, q = (reference.distribution(before, logits[place, None], vocab_size=size) for logits in (ours, theirs))
        q = q.nan_to_num()  # a draft that knows no token that is left does not draft
        alpha[place], agrees[place] = float(torch.minimum(p, q).sum()), bool(q.any() and p.argmax() == q.argmax())
    return Compared(category, first, alpha, agrees)


@torch.inference_mode()
def in_other_tokens(draft: Target, foreign: Foreign, ids: Sequence[int], first: int) -> Tensor:
    """``[n, V]`` logits at the target's tokens, before each of ``ids`` from ``first`` on, of a draft with another tokenizer that scores
    trees; as many as its context has room for.

    How it reads the end of a text depends on what follows, so that its readings of all the beginnings are no one line of tokens but a
    tree; one pass scores it.
    """
    reading = Reading(foreign.vocabularies, StandIn(0, list(ids[:first]), len(ids)))
    tokens, parents, roots, ends = list[int](), list[int](), list[int](), list[int]()
    known: dict[tuple[int, int], int] = {}
    room = min((each for each in (draft.context, draft.trained) if each is not None), default=math.inf)
    for place in range(first, len(ids)):
        reading.follow(ids[:place])
        node, before = -1, len(tokens)
        for token in reading.ids:
            above, node = node, known.setdefault((node, token), len(tokens))
            if node == len(tokens):
                tokens.append(token)
                parents.append(above)
                roots.append(node if above < 0 else roots[above])
        if len(tokens) > before and roots.count(roots[-1]) > room:
            del tokens[before:], parents[before:], roots[before:]
            break
        ends.append(-1 if reading.behind else node)
    logits = torch.full((len(ends), len(foreign.known)), float("-inf"), device=draft.device)
    for root in sorted(set(roots)):
        nodes = [node for node, own in enumerate(roots) if own == root]
        where = {node: number for number, node in enumerate(nodes)}
        tree = TokenTree(torch.tensor([[tokens[node] for node in nodes]]), torch.tensor([[where.get(parents[node], -1) for node in nodes]]))
        draft.open([[tokens[root]]], reserve=[len(nodes) + 1])
        said = draft.score(replace(tree, tokens=tree.tokens.to(draft.device), parents=tree.parents.to(draft.device)))[0]
        draft.reset()
        here = [place for place, end in enumerate(ends) if end in where]
        if here:
            logits[here] = foreign.intersection.scattered(said[[where[ends[place]] for place in here]].float())
    return logits


@torch.inference_mode()
def measured(speculator: Speculator, most: int = MOST) -> CostModel:
    """What passes cost, and drafts of at most so many tokens."""
    costs = CostModel()
    measure(costs, speculator.target, speculator.drafter, largest=search.chain(most))
    return costs


def chain_costs(costs: CostModel, most: int, context: float = PROMPT, drafted: float = 1.0) -> search.Costs:
    """Of chains of at most so many tokens, one row, behind ``context`` tokens; a part of the rounds, ``drafted``, gets a draft."""
    verify = costs.verify(1, range(1, most + 2), context)
    return search.Costs(verify, lambda levels: costs.draft_seconds(1, levels), available=drafted, any_row=drafted)


def report_of(found: Sequence[Compared], costs: CostModel, *, sampled: bool, left_out: int = 0) -> Report:
    """Everything, from the comparison of each text and what passes cost."""
    by_category: dict[str, list[Compared]] = {}
    for each in found:
        by_category.setdefault(each.category, []).append(each)
    categories = [Rates.of(name, [(each.alpha, each.agrees) for each in own]) for name, own in by_category.items()]
    draft, target = costs.level.at(1, 1), costs.pass_seconds(1, 1, PROMPT)
    return Report(
        whole=Rates.of("all", [(each.alpha, each.agrees) for each in found]),
        categories=categories,
        positions=by_position(found),
        c=draft / target,
        draft_seconds=draft,
        target_seconds=target,
        sampled=forecast([each.alpha for each in found], costs) if sampled else None,
        greedy=forecast([each.agrees for each in found], costs),
        left_out=left_out,
    )


def by_position(found: Sequence[Compared]) -> list[Rates]:
    """By how many tokens stand before: 1 to 15, 16 to 63, ….."""
    groups, begin, end = [], 1, 4 * WIDER
    longest = max(each.first + len(each) for each in found)
    while begin < longest:
        cuts = [slice(*(min(max(0, bound - each.first), len(each)) for bound in (begin, end))) for each in found]
        parts = [(each.alpha[cut], each.agrees[cut]) for each, cut in zip(found, cuts)]
        if any(len(alpha) for alpha, _ in parts):
            groups.append(Rates.of(f"{begin}–{min(end, longest) - 1}", parts))
        begin, end = end, WIDER * end
    return groups


def forecast(chances: Sequence[Numbers], costs: CostModel) -> Forecast:
    """Of chains whose token at each place of each text is accepted with such a chance."""
    tokens, rounds = np.array([len(each) for each in chances], dtype=float), expected_rounds(chances, MOST)
    priced = chain_costs(costs, MOST)
    lengths = [Share.of(tokens, rounds[:, deep]) for deep in range(MOST)]
    plain = search.plain(priced)
    plans = [search.priced(search.chain(deep), each.value - 1, (1,) * deep, priced) for deep, each in enumerate(lengths, 1)]
    best = max([plain, *plans], key=lambda plan: plan.rate)
    depth = best.shape.depth
    speedup = lengths[depth - 1].times(plain.seconds / best.seconds) if depth else Share(1.0, 1.0, 1.0)
    return Forecast([each.value for each in lengths], [plan.rate / plain.rate for plan in plans], depth, speedup)


# -- what is shown ----------------------------------------------------------------------------------------------------------


def document(setting: Setting, found: Report) -> dict[str, Any]:
    """Everything, for JSON."""
    own = {"schema": 1, "target": setting.configuration.target, "draft": setting.draft, "dtype": setting.configuration.dtype}
    return {**own, "threads": torch.get_num_threads(), "sampling": setting.sampling, **asdict(found)}


def report(setting: Setting, found: Report) -> RenderableType:
    """For a terminal."""
    whole, sampling = found.whole, ", ".join(f"{name} {value}" for name, value in setting.sampling.items() if name != "do_sample")
    head = f"{setting.configuration.target}, draft {setting.draft}: {counted(whole.texts, 'text')}, {counted(whole.tokens, 'token')}"
    lines = [head + (f", {sampling}" if sampling else ", greedy")]
    if found.shared is not None:
        lines.append(
            f"The draft has another tokenizer; the target knows {found.shared:.0%} of the draft's tokens, and only these are compared. "
            "Chains look ahead and keep more."
        )
    if found.cut:
        lines.append(f"{counted(found.cut, 'text')} cut where the draft's context ends: its tokens for a text are more than the target's")
    if not found.complete:
        lines.append("Interrupted: only the texts that were compared until then count.")
    if found.left_out:
        lines.append(f"{counted(found.left_out, 'text')} left out: beyond --limit {setting.limit}, or too short")
    if whole.texts < FEW:
        lines.append(f"Intervals are over texts, and {counted(whole.texts, 'text')} cannot tell much: give more --data.")
    tables = [rates(found, "", [whole])]
    tables += [rates(found, "category", found.categories)] * (len(found.categories) > 1) + [rates(found, "tokens before", found.positions)]
    parts: list[RenderableType] = [*map(Line, lines)]
    for table in tables:
        parts += [Line(), table]
    return Group(*parts, Line(), chains(found), Line(), *map(Line, answer(setting, found)))


def rates(found: Report, what: str, groups: Sequence[Rates]) -> RenderableType:
    sampled = found.sampled is not None
    table = new_table(what, ">texts", ">tokens", *([">α", ">95 %"] if sampled else []), ">greedy agreement", ">95 %")
    for each in groups:
        shares = [each.alpha, each.agreement] if sampled else [each.agreement]
        cells = [cell for share in shares for cell in (f"{share.value:.3f}", between(share, 3))]
        add_row(table, each.name, f"{each.texts:,}", f"{each.tokens:,}", *cells)
    return table


def chains(found: Report) -> RenderableType:
    """What each length of a chain promises, up to a little beyond the best."""
    forecasts = {"sampled": found.sampled, "greedy": found.greedy}
    columns = {name: each for name, each in forecasts.items() if each is not None}
    shown = min(MOST, 2 + max(each.best for each in columns.values()))
    titles = [title for name in columns for title in (f">{name}: tokens per pass", ">speed-up")]
    table = new_table(">γ", *titles)
    for deep in range(1, shown + 1):
        cells = []
        for each in columns.values():
            cells += [f"{each.lengths[deep - 1]:.2f}", f"{each.speedups[deep - 1]:.2f}×" + (" ←" if deep == each.best else "  ")]
        add_row(table, str(deep), *cells)
    return table


def answer(setting: Setting, found: Report) -> list[str]:
    """c, the best γ and what it promises."""
    seconds = f"{1e3 * found.draft_seconds:.2f} ms for a token of the draft, {1e3 * found.target_seconds:.2f} ms for a pass of the target"
    lines = [f"c         {found.c:.3f} ({seconds}; one row)"]
    for name, each in (("sampled", found.sampled), ("greedy", found.greedy)):
        if each is None:
            continue
        if not each.best:
            lines.append(f"{name:9} drafting does not pay: no chain is predicted to be faster than plain decoding")
            continue
        lines.append(
            f"{name:9} best γ {each.best}: {each.speedup.value:.2f}× plain decoding predicted ({between(each.speedup, 2)} over texts), "
            f"{each.lengths[each.best - 1]:.2f} tokens per pass"
        )
    best = (found.sampled or found.greedy).best
    if best:
        given = setting.configuration
        ways = {name: getattr(given, name) for name in ("dtype", "quantization", "device", "threads")}
        loading = {name: value for name, value in ways.items() if value not in (None, "auto")}
        sampling = {name: value for name, value in setting.sampling.items() if name != "do_sample"} if found.sampled else {"temperature": 0}
        flags = {"target": given.target, "drafter": f"draft-model:{setting.draft}", **loading, **sampling, "shape": f"chain({best})"}
        command = " ".join(f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in flags.items())
        command += "" if found.shared is None else " --drafter-option vocabulary=intersection"
        lines.append(f'write     foredraft generate {command} "PROMPT"')
    return lines


def between(share: Share, digits: int) -> str:
    return "–" if share.low is None or share.high is None else f"{share.low:.{digits}f} to {share.high:.{digits}f}"
