"""``foredraft generate``: load, then run the prompts batch by batch and hand what is committed to a printer."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from foredraft import drafters
from foredraft.cli.failures import note
from foredraft.cli.figures import combine, execution_line
from foredraft.cli.progress import Progress
from foredraft.cli.prompts import messages
from foredraft.cli.settings import Configuration, Decoding, Outcome, Result
from foredraft.detokenizer import Detokenizer
from foredraft.device import default_device
from foredraft.errors import ConfigurationError, first_line, unknown
from foredraft.loading import load_tokenizer, parse_device
from foredraft.planning import FixedPlanner
from foredraft.planning.costs import BUDGET
from foredraft.speculator import Speculator
from foredraft.stats import Stats
from foredraft.text import encode, padded, text_before

if TYPE_CHECKING:
    from foredraft.cli.printers import Printer


def generate(
    prompts: Sequence[str],
    configuration: Configuration,
    decoding: Decoding,
    printer: Printer,
    progress: Progress,
    *,
    reads: Callable[[bool], None] = lambda encoder: None,
) -> Outcome:
    """Continue every prompt, at most ``batch_size`` at a time; Ctrl-C ends it with what there is. ``reads`` is told whether the target has
    an encoder, and raises where the prompts are not for such a model."""
    tokenizer = load_tokenizer(configuration.target)
    system, name = messages("system", decoding.system), configuration.target
    forced = translating(tokenizer, name, decoding)
    rows = [encode(tokenizer, [*system, *messages("user", each)] if decoding.chat else each, name) for each in prompts]
    speculator = load_speculator(configuration, tokenizer)
    reads(speculator.target.sourced)
    if printer.verbose:
        progress.clear()
        note(execution_line(speculator.target.execution, speculator.target.reasons))
    detokenizers = [Detokenizer(tokenizer, text_before(speculator.model, ids)) for ids in rows]
    results = [Result(index, *each) for index, each in enumerate(zip(prompts, rows, detokenizers))]
    seed = decoding.seed if decoding.seed is not None else secrets.randbits(32)
    sampled = decoding.sampled(speculator.model.generation_config)
    if decoding.filters() and not sampled:
        progress.clear()
        note("note: --top-k, --top-p and --min-p change nothing in greedy decoding; add --temperature 1 to sample")
    arguments = {**decoding.arguments(speculator.model.generation_config, tokenizer), **forced}
    printer.begin(configuration, seed if sampled else None)
    progress.show("reading the prompt")
    stats: list[Stats] = []
    interrupted = False
    for start in range(0, len(results), decoding.batch_size):
        batch = results[start : start + decoding.batch_size]
        ids = padded(speculator.model, [result.ids for result in batch], tokenizer)
        seeds, repeatable = [(seed, result.index) for result in batch], decoding.seed is not None
        stream = speculator.stream(**ids, seed=seeds, repeatable=repeatable, **arguments)
        stats.append(stream.stats)
        try:
            for tokens in stream:
                result = batch[tokens.row]
                if tokens.logprobs is not None:
                    result.logprobs.append(tokens.logprobs)
                result.stats = stream.stats.rows[tokens.row]
                printer.committed(result, result.extend(tokens, tokens.accepted, tokens.finish_reason))
        except KeyboardInterrupt:
            interrupted = True
            for result in batch:
                if result.finish_reason is None:
                    printer.committed(result, result.interrupt())
            break
        finally:
            stream.close()
    total = combine(stats, seed=seed if sampled else None)
    return Outcome(configuration, results[: len(total.rows)], total, sampled, interrupted)


def translating(tokenizer: Any, name: str, decoding: Decoding) -> dict[str, int]:
    """Tell the tokenizer of the model ``name`` the language of the source; returns what makes ``generate`` write the other language.

    Raises:
        ConfigurationError: the tokenizer knows no such language, or none at all.
    """
    if not decoding.languages:
        return {}
    if not hasattr(tokenizer, "src_lang"):
        raise ConfigurationError(f"the tokenizer of {name!r} knows no languages; leave {' and '.join(decoding.languages)} out")
    others = tokenizer.special_tokens_map.values()
    codes = getattr(tokenizer, "lang_code_to_id", None) or {  # NLLB's has its codes among the special tokens
        token: id for token, id in zip(tokenizer.all_special_tokens, tokenizer.all_special_ids) if token not in others
    }
    for option, code in decoding.languages.items():
        if code not in codes:
            some = ", ".join(list(codes)[:12])
            raise unknown(f"{option}: unknown language", code, codes, hint=f"the tokenizer of {name!r} knows {len(codes)}, such as {some}")
    if decoding.source_language is not None:
        tokenizer.src_lang = decoding.source_language
    return {} if decoding.target_language is None else {"forced_bos_token_id": codes[decoding.target_language]}


def load_speculator(
    configuration: Configuration, tokenizer: Any, *, reuse_prefix: bool = True, cache_memory: str | float = "auto"
) -> Speculator:
    """What is wrong with the drafter is said before any weights are read."""
    if configuration.threads is not None:
        torch.set_num_threads(configuration.threads)
    drafter = make_drafter(configuration.drafter_name, configuration.drafter_options, tokenizer)
    speculator = Speculator(
        configuration.target,
        drafter,
        rule=configuration.rule,
        shape=configuration.shape,
        draft_length=configuration.draft_length,
        lossless=not configuration.lossy,
        dtype=configuration.dtype,
        device=pick_device(configuration.device, configuration.target),
        quantization=configuration.quantization,
        reuse_prefix=reuse_prefix,
        cache_memory=cache_memory,
        tokenizer=tokenizer,
    )
    if isinstance(speculator.planner, FixedPlanner) and speculator.shape.nodes:
        speculator.planner.budget = BUDGET  # plain passes are timed, so that the speed-up is known
    return speculator


def make_drafter(spec: str, options: dict[str, Any], tokenizer: Any) -> Any:
    """The drafter by name; one that counts text is given the target's tokenizer.

    Raises:
        ConfigurationError: an unknown name or option, or a value of the wrong type.
    """
    takes = drafters.options(spec.partition(":")[0])
    if "tokenizer" in takes and "PreTrainedModel" not in str(takes["source"].annotation):  # a model has its own
        options = {"tokenizer": tokenizer, **options}
    if isinstance(options.get("device"), str):
        check_device(options["device"])
    name, _, source = spec.partition(":")
    try:
        if name == "several" and source and not options:
            return drafters.create(
                name, {"source": [make_drafter(part.strip(), {}, tokenizer) for part in source.split(",") if part.strip()]}
            )
        return drafters.create(spec, options)
    except TypeError as error:
        raise ConfigurationError(f"drafter {spec!r} cannot take these options: {error}") from error


def pick_device(name: str | None, target: str) -> str:
    """The named device, or the GPU where there is one; an embedded model is never spread over several."""
    name = None if name is None else str(parse_device(name))
    if name is None or (name == "auto" and target.startswith("zoo:")):
        return default_device()
    if name != "auto":
        check_device(name)
    return name


def check_device(name: str) -> None:
    """Raises:
    ConfigurationError: no such device here.
    """
    try:
        torch.empty(1, device=name).fill_(0)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigurationError(f"device {name!r} cannot be used here: {first_line(error)}") from error
