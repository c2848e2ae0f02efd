"""Is a configuration exact? ``foredraft.audit`` asks the real target, drafter and rule.

Four parts. The exact one enumerates the rule on small tables (``exact.py``); the noise one counts what the random numbers in use
make of such tables (``noise.py``); the keyed one compares texts token for token where they are a function of the seed
(``keyed.py``); the statistical one tests sampled tokens against the target's own distribution, where a rule draws freshly
(``statistical.py``). What plain decoding is, they take from transformers (``reference.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from foredraft.auditing import exact, keyed, noise, statistical
from foredraft.auditing.prompts import token_ids
from foredraft.auditing.reference import Reference
from foredraft.auditing.report import INTERRUPTED, LEFT_OUT, AuditReport, ExactnessError, ExactPart, KeyedPart, NoisePart, StatisticalPart
from foredraft.auditing.tally import Design
from foredraft.drafters.base import Drafter
from foredraft.errors import ConfigurationError, Interrupted, whole
from foredraft.hub import named
from foredraft.loading import name_of
from foredraft.shapes import TreeShape
from foredraft.speculator import Speculator
from foredraft.verification.base import Rule
from foredraft.verification.match import Match

__all__ = ["AuditReport", "ExactPart", "ExactnessError", "KeyedPart", "NoisePart", "StatisticalPart", "audit"]

PARTS = ("exact", "noise", "keyed", "statistical")
SAMPLERS = {"temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"}
OWN = {
    "seed", "inputs", "input_ids", "attention_mask", "max_length", "num_return_sequences",
    "output_scores", "output_logits", "output_logprobs", "return_dict_in_generate", "streamer",
}  # fmt: skip
DRAWING = ("noise", "statistical")
MOST_POSITIONS = 24  # of a continuation in the statistical part


def audit(
    target: Speculator | PreTrainedModel | str | Path,
    drafter: Drafter | str | None = None,
    *,
    rule: Rule | str = "auto",
    shape: TreeShape | str | None = None,
    drafter_options: dict[str, Any] | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    prompts: Sequence[str | Sequence[int]] | None = None,
    seed: int = 0,
    max_new_tokens: int = 48,
    samples: int | None = None,
    batch_size: int = 256,
    significance: float = 1e-3,
    bias: float = 0.01,
    parts: Sequence[str] | None = None,
    **sampling: Any,
) -> AuditReport:
    """Check that a configuration's output distribution is the target's, and say how sure that is.

    Args:
        target: a :class:`~foredraft.Speculator` as it is in use, or what one is made of: then ``drafter``, ``rule``, ``shape``,
            ``drafter_options``, ``dtype`` and ``device`` are those of the Speculator. A model by name is loaded in float32 unless told
            otherwise: in half precision rounding alone changes the distribution.
        prompts: texts or lists of token ids; None for built-in ones. A model with an encoder reads them as sources.
        seed: of everything that is drawn.
        max_new_tokens: tokens per prompt in the keyed part.
        samples: continuations in the statistical part; None for as many as find a bias of ``bias`` with probability 0.9.
        batch_size: continuations drawn at once.
        significance: how often a correct configuration may be accused by the noise part, and by the statistical one.
        bias: total variation per token that the number of samples is made for, and that is planted to show that it is found.
        parts: of "exact", "noise", "keyed" and "statistical"; None for those that matter.
        sampling: arguments of ``generate``: ``do_sample``, ``temperature``, ``top_k``, ``top_p``, ``repetition_penalty``, ….

    Raises:
        ConfigurationError: an option that cannot work.
        Interrupted: Ctrl-C; ``.output`` is the report of the parts that were complete.
    """
    counts = {"max_new_tokens": max_new_tokens, "samples": samples, "batch_size": batch_size}
    check_options(parts, {"significance": significance, "bias": bias}, counts, sampling)
    target = named(target)
    if not isinstance(target, Speculator):
        precision, drafter = (dtype or "float32") if isinstance(target, str) else dtype, "prompt-lookup" if drafter is None else drafter
        speculator = Speculator(
            target, drafter, rule=rule, shape=shape, drafter_options=drafter_options, dtype=precision, device=device, lossless=False
        )
    elif rule != "auto" or any(each is not None for each in (drafter, shape, drafter_options, dtype, device)):
        raise ConfigurationError("a Speculator already has a drafter, rule, shape, dtype and device; leave them out")
    else:
        speculator = target
    if speculator.target.sourced and speculator.model.main_input_name != "input_ids":
        raise ConfigurationError(f"{name_of(speculator.model)} reads {speculator.model.main_input_name}, and audit gives models text")
    design, rows = Design(significance, bias), token_ids(speculator, prompts)
    as_asked = continued(speculator, rows, sampling, max_new_tokens)
    length = min(MOST_POSITIONS, max(6, 2 * speculator.shape.depth + 4))
    sampled = as_asked[0].sampled
    skipped = unneeded(speculator.rule, sampled)
    if parts is not None:  # what is asked for is run, unless there is nothing to run
        skipped = {part: skipped.get(part, LEFT_OUT) for part in PARTS if part not in parts or (part in DRAWING and not sampled)}
    checks: dict[str, Callable[[], Any]] = {
        "exact": lambda: exact.check(speculator),
        "noise": lambda: noise.check(speculator, seed=seed, significance=design.significance),
        "keyed": lambda: keyed_parts(speculator, as_asked, count=max_new_tokens, seed=seed, sampling=sampling),
        "statistical": lambda: statistical.check(
            speculator,
            continued(speculator, rows, sampling, length),
            length=length,
            samples=samples,
            batch_size=batch_size,
            seed=seed,
            design=design,
            arguments=sampling,
        ),
    }
    found: dict[str, Any] = {"exact": None, "noise": None, "keyed": [], "statistical": None}
    undone = [part for part in PARTS if part not in skipped]
    try:
        while undone:
            found[undone[0]] = checks[undone[0]]()
            del undone[0]
    except KeyboardInterrupt:
        skipped = {**skipped, **dict.fromkeys(undone, INTERRUPTED)}
    report = AuditReport(
        target=name_of(speculator.model),
        dtype=str(speculator.model.dtype).removeprefix("torch."),
        drafter=speculator.drafter.name,
        rule=str(speculator.rule),
        shape=str(speculator.shape),
        proposal=speculator.proposal,
        sampling=sampling,
        lossless=speculator.rule.lossless,
        seed=seed,
        **found,
        skipped=skipped,
    )
    if not report.complete:
        raise Interrupted(report)
    return report


def continued(speculator: Speculator, prompts: Sequence[Sequence[int]], arguments: dict[str, Any], count: int) -> list[Reference]:
    """``prompts`` as transformers would continue them by ``count`` tokens: where an end token is forced, it is the last of these."""
    return [Reference.of(speculator.model, prompt, {**arguments, "max_new_tokens": count}) for prompt in prompts]


def keyed_parts(
    speculator: Speculator, as_asked: Sequence[Reference], *, count: int, seed: int, sampling: dict[str, Any]
) -> list[KeyedPart]:
    """Greedily in any case; and sampled, where the text is a function of the seed."""
    greedy = {**{name: value for name, value in sampling.items() if name not in SAMPLERS}, "do_sample": False}
    runs = [(continued(speculator, [each.inputs for each in as_asked], greedy, count), greedy)]
    if as_asked[0].sampled and isinstance(speculator.rule, Match):
        runs.append((list(as_asked), sampling))
    nodes = speculator.shape.nodes + 1
    return [keyed.check(speculator, references, count=count, nodes=nodes, seed=seed, arguments=arguments) for references, arguments in runs]


def unneeded(rule: Rule, sampled: bool) -> dict[str, str]:
    """Parts that say nothing about such a configuration, and why."""
    if not sampled:
        return dict.fromkeys(DRAWING, "greedy decoding draws nothing")
    if not rule.lossless:
        return {"noise": "a lossy rule does not follow the target's distribution"}
    if isinstance(rule, Match):
        return {"statistical": "the text is a function of the seed, which the keyed part compares token for token"}
    return {}


def check_options(parts: Sequence[str] | None, shares: dict[str, float], counts: dict[str, int | None], sampling: dict[str, Any]) -> None:
    """Raises:
    ConfigurationError: names the option and what it takes.
    """
    unknown = [part for part in parts or () if part not in PARTS]
    if unknown or (parts is not None and (isinstance(parts, str) or not parts)):
        raise ConfigurationError(f"parts must be a list of {', '.join(PARTS)}, got {parts!r}")
    for name, value in shares.items():
        if not 0 < value < 0.5:
            raise ConfigurationError(f"{name} must lie between 0 and 0.5, got {value!r}")
    for name, count in counts.items():
        if count is not None:
            whole(name, count)
    if taken := sorted(OWN & sampling.keys()):
        raise ConfigurationError(
            f"{', '.join(taken)} is not supported: audit builds its own batches; pass prompts=[...] and max_new_tokens instead"
        )
