"""A search for a skip set from names to a stored file: what ``foredraft skip search`` does."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.drafters.draft_verify import DraftVerify
from foredraft.drafters.sublayer_costs import sublayers_of
from foredraft.errors import ConfigurationError
from foredraft.loading import load_model
from foredraft.models.skips import SkipSet, Sublayers
from foredraft.models.support import describe
from foredraft.planning.skip_costs import measure_costs, read_costs
from foredraft.planning.skip_search import SkipSearch
from foredraft.speculator import Speculator
from foredraft.target import Target
from foredraft.training.batches import Order
from foredraft.training.data import Manifest, Texts, refuse_other_data

FEWEST, MOST, ANSWER = 4, 16, 48  # texts at the end of the data whose prompts sets are timed on, and tokens of each answer
REPEATS = 3  # of each answer that count; after each, a third of the sets goes on, and two at least
BATCH = 2048  # tokens of a pass, padding included
Report = Callable[[str], None]


class Agreement:
    """How often a pass without some sublayers has the same likeliest token as the whole target, over ``tokens`` of the answers in texts,
    or all if there are fewer."""

    def __init__(self, model: PreTrainedModel, sublayers: Sublayers, texts: Texts, members: Sequence[int], tokens: int):
        answers = (texts.lengths - texts.prompt_lengths)[list(members)]
        few = int(np.searchsorted(np.cumsum(answers), tokens)) + 1
        order = Order(texts, members[:few], max(BATCH, int(texts.lengths.max())), 1, seed=0)
        self.model, self.sublayers = model, sublayers
        self._batches = [order.tokens(batch).to(model.device) for batch in order.epoch(0)]
        self._expected = list(self._likeliest(None))
        self.tokens = sum(map(len, self._expected))

    def __call__(self, skip: SkipSet) -> float:
        return sum(int((found == expected).sum()) for found, expected in zip(self._likeliest(skip), self._expected)) / self.tokens

    @torch.inference_mode()
    def _likeliest(self, skip: SkipSet | None) -> Iterator[Tensor]:
        """The likeliest tokens where answers stand, ``[T]`` of each batch."""
        for batch in self._batches:
            with nullcontext() if skip is None else self.sublayers.left_out(skip):
                logits = self.model(input_ids=batch.ids, use_cache=False).logits  # padding is behind the texts, where no token sees it
            yield logits[:, :-1].argmax(-1)[batch.counted[:, 1:]]


def run(
    target: str | PreTrainedModel,
    data: Path,
    out: Path,
    *,
    trials: int,
    seed: int = 0,
    tokens: int = 4096,
    costs: Path | None = None,
    finalists: int = 10,
    partial: bool = False,
    other_target: bool = False,
    dtype: str = "auto",
    device: str | None = None,
    threads: int | None = None,
    report: Report = lambda line: None,
) -> bool:
    """Search, and store the best set in ``out``; whether nobody interrupted it. Interrupted, it stores the best of the sets so far.

    Args:
        target: a name, or a model that may be packed here.
        tokens: of answers that a trial reads.
        costs: a file with the seconds of sublayers, in place of measuring them. The best sets are not timed then either, so that the
            same seed gives the same set.
        finalists: so many of the best sets are timed in the end; with 0 the set with the best prediction is stored.

    Raises:
        ConfigurationError: texts of another model, too few of them, or costs that do not fit.
        UnsupportedModelError: sublayers of the model cannot be left out.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    Manifest.read(data)  # before weights are read
    model = load_model(target, dtype=dtype, device=device) if isinstance(target, str) else target
    texts = Texts(data, partial=partial)
    refuse_other_data(texts.manifest, model, other_target=other_target)
    held_out = count_held_out(texts)
    if len(texts) <= held_out or not (texts.lengths > texts.prompt_lengths)[:-held_out].any():
        raise ConfigurationError(f"{str(data)!r} must hold more than {FEWEST} texts with answers; make some with foredraft data generate")
    packed = Target(model, owned=True, reuse_prefix=False)
    try:
        search = begun(packed, texts, tokens, costs, report)
        prompts = [texts.prompt(index) for index in range(len(texts) - held_out, len(texts))]
        rates: dict[SkipSet | None, float] = {}
        with interrupting() as interrupted:
            for number, trial in enumerate(search.run(trials, seed), 1):
                best = search.ranked[0].rate
                report(
                    f"{number:>5}  {trial.stage:<9}  agrees {trial.agreement:6.1%}  {trial.rate:8.1f} tokens/s predicted, best {best:.1f}"
                )
            if costs is None and finalists:
                report(f"timing the best {finalists}")
                rates = timed(model, [search.set_of(each.skipped) for each in search.finalists(finalists)], prompts)
        if search.judged:
            store(search, rates, model, out, report)
        elif interrupted:
            report("interrupted before the first trial: nothing is stored")
        return not interrupted
    finally:
        packed.close()


def count_held_out(texts: Texts) -> int:
    """Texts at the end that no trial reads."""
    return max(FEWEST, min(len(texts) // 5, MOST))


def begun(target: Target, texts: Texts, tokens: int, costs: Path | None, report: Report) -> SkipSearch:
    """A search over all sublayers that can be left out, with nothing judged yet."""
    found = target.sublayers
    if None in found.mlp:
        report(f"the MLPs of {describe(target.model)} are no modules of their own: only attention is left out")
    sublayers = sublayers_of(found)
    seconds = measure_costs(target) if costs is None else read_costs(costs, sublayers)
    agreement = Agreement(target.model, found, texts, range(len(texts) - count_held_out(texts)), tokens)
    report(
        f"{len(sublayers)} sublayers; a trial reads {agreement.tokens:,} tokens; plain decoding is taken for {seconds.plain:.1f} tokens/s"
    )
    return SkipSearch(sublayers, seconds, agreement)


@contextmanager
def interrupting() -> Iterator[list[str]]:
    """Ctrl-C and SIGTERM end the block and no more; the list then holds something."""
    interrupted: list[str] = []
    try:
        previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    except ValueError:  # not in the main thread: whoever runs it there decides
        previous = None
    try:
        yield interrupted
    except KeyboardInterrupt:
        interrupted.append("interrupted")
    finally:
        if previous is not None:
            signal.signal(signal.SIGTERM, previous)


def timed(model: PreTrainedModel, sets: Sequence[SkipSet], prompts: Sequence[Sequence[int]]) -> dict[SkipSet | None, float]:
    """Tokens per second with each of ``sets``, drafted as the planner decides, best first, and, under None, of plain decoding: they answer
    all prompts in turns, and after each turn the slower sets are left out. Of answers to the same prompt the median counts."""
    # "eager" leaves the model as it is, packed where it was packed
    fixed: dict[str, Any] = {"execution": "eager", "self_test": False, "reuse_prefix": False}
    contenders: dict[SkipSet | None, Speculator] = {None: Speculator(model, "none", **fixed)}
    contenders.update({skip: Speculator(model, DraftVerify(skip=skip), **fixed) for skip in sets})
    seconds: dict[SkipSet | None, list[list[float]]] = {skip: [[] for _ in prompts] for skip in contenders}
    rates: dict[SkipSet | None, float] = {}
    left = list(sets)
    try:
        for turn in range(1 + REPEATS):
            for number, prompt in enumerate(prompts if turn else prompts[:FEWEST]):
                order = [None, *left]
                for skip in order[number % len(order) :] + order[: number % len(order)]:
                    ids = torch.tensor([prompt], device=model.device)
                    stats = contenders[skip].generate(ids, do_sample=False, max_new_tokens=ANSWER).stats
                    assert stats is not None
                    spent = stats.seconds["total"] - stats.seconds["prefill"] - stats.seconds.get("planning", 0.0)
                    if turn:  # the first is the warm-up
                        seconds[skip][number].append(spent / max(1, stats.new_tokens - 1))
            if turn:
                rates.update({skip: len(prompts) / sum(map(median, seconds[skip])) for skip in (None, *left)})
                left = sorted(left, key=lambda skip: -rates[skip])[: max(2, len(left) // 3)]
    finally:
        for each in contenders.values():
            each.close()
    return {skip: rates[skip] for skip in dict.fromkeys([*left, *rates])}


def store(search: SkipSearch, rates: Mapping[SkipSet | None, float], model: PreTrainedModel, out: Path, report: Report) -> None:
    """Write the best set, by what was measured where that is known, and say what it gains."""
    trials = {search.set_of(each.skipped): each for each in search.ranked}
    timed = [skip for skip in rates if skip is not None]  # the best one first
    best = timed[0] if timed else next(iter(trials))
    plain = rates.get(None, search.costs.plain)
    rate = rates.get(best, trials[best].rate)
    best.save(
        out,
        model,
        [
            {**asdict(skip), "agreement": each.agreement, "rate": each.rate, "length": each.length, "stage": each.stage}
            | ({"measured": rates[skip]} if skip in rates else {})
            for skip, each in trials.items()
        ],
        costs=search.costs.to_dict(search.sublayers),
    )
    what = "measured" if timed else f"predicted with chains of {trials[best].length}"
    report(
        f"{out}: without {best} drafts agree {trials[best].agreement:.1%} of the time; {rate:.1f} tokens/s {what}, "
        f"{rate / plain:.2f} times as many as plain decoding"
    )
    if rate <= plain:
        report("no set was found that is faster than plain decoding; --shape auto then drafts nothing")
    report(f"use --drafter draft-verify:{out}")
