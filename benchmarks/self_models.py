"""What the suite of self-speculation asks of models without a clock: what early exits and single sublayers know, and how a model becomes
as large as it has to be.

Inflation's own layers do nothing, and leaving them out is free. So the models here are inflated in width alone, and a model with a layer
that does nothing is refused.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import checkpoints
from benchmarks.checkpoints import Checkpoint
from foredraft import Speculator, inflate
from foredraft.drafters.layer_skip import LayerSkip
from foredraft.errors import ConfigurationError, ForedraftError
from foredraft.estimates import Estimate, quotient
from foredraft.loading import load_model
from foredraft.models import skips
from foredraft.models.skips import SkipSet, Sublayers
from foredraft.target import Target
from foredraft.training.data import Texts
from foredraft.training.skips import begun
from recipes.zoo import corpus, evaluation, tokenization

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WIDER = 4  # times as wide; a power of four keeps the numbers exact
SILENT = 1e-6  # no larger weight: such a matrix writes nothing that is seen
CHAIN = 5  # tokens of a draft that a trained exit is judged by
TOGETHER = 32  # prompts that are answered together
JUDGED = 1024  # tokens that a set of sublayers is judged on
PARTS = ("attention", "mlp")
BARE, TRAINED, BEHIND_ATTENTION = SIDES = ("bare", "trained", "trained, behind attention")


@dataclass(frozen=True)
class Bits:
    """What a model needs for held-out files, file by file."""

    model: str
    bits: tuple[float, ...]
    bytes: tuple[int, ...]


@dataclass(frozen=True)
class Agreement:
    """At how many of the ``tokens`` of each file ``what`` has the same likeliest next token as the whole model."""

    model: str
    what: str
    same: tuple[float, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Accepted:
    """Draft tokens accepted behind layer ``exit``, and rounds, prompt by prompt."""

    side: str
    exit: int
    accepted: tuple[int, ...]
    rounds: tuple[int, ...]


def share(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """A quotient of sums; the interval is over files or prompts."""
    return quotient(*(np.array(each, dtype=float)[:, None] for each in (above, below)))


# -- models ---------------------------------------------------------------------------------------------------------------


def refuse_silent_layers(model: Any, name: str) -> None:
    """
    Raises:
        ConfigurationError: a layer whose attention or MLP writes nothing to the residual stream, so that leaving it out is free.
    """
    for index, layer in enumerate(model.model.layers):
        for part, matrix in (("attention", layer.self_attn.o_proj), ("MLP", layer.mlp.down_proj)):
            if not bool((matrix.weight.abs() > SILENT).any()):
                raise ConfigurationError(
                    f"layer {index} of {name} does nothing: the output matrix of its {part} is zero, so leaving it out is free and its "
                    "figures would mean nothing; inflate in width alone: inflate(model, hidden_size=…, layers=<its own>)"
                )


def digest(model: PreTrainedModel) -> str:
    """A word for the weights of ``model``."""
    found = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        found.update(name.encode() + weight.float().cpu().numpy().tobytes())
    return found.hexdigest()[:12]


def widened(model: PreTrainedModel, name: str, tokenizer: str, work: Path) -> Checkpoint:
    """``model`` inflated in width alone, as files under ``work`` that are kept for as long as its weights are the same.

    Raises:
        ConfigurationError: a layer of it does nothing.
    """
    slug = f"{name}-{digest(model)}"
    path = (work / slug / "hf").absolute()
    wide = inflate(model.float(), hidden_size=WIDER * model.config.hidden_size, layers=model.config.num_hidden_layers)
    refuse_silent_layers(wide, name)
    if not (path / checkpoints.DONE).exists():
        checkpoints.save(wide, tokenizer, path)
    return Checkpoint(name, path, slug)


# -- held-out text ----------------------------------------------------------------------------------------------------------


def texts(folder: Path, *, build: bool) -> corpus.Corpus:
    """The corpus in ``folder``, collected from this machine where there is none and it may be built.

    Raises:
        ConfigurationError: there is none.
    """
    if not (folder / "corpus" / "manifest.json").exists():
        if not build:
            raise ConfigurationError(f"there is no corpus in {str(folder)!r}; make one: python -m recipes.zoo corpus --out FOLDER")
        corpus.build().save(folder / "corpus")
    return corpus.Corpus.load(folder / "corpus")


def documents(tokenizer: Any, files: Sequence[corpus.SourceFile], count: int) -> list[tokenization.Encoded]:
    """``count`` of the files, evenly spread."""
    chosen = [files[index * len(files) // count] for index in range(min(count, len(files)))]
    return [tokenization.encode(tokenizer, [file]) for file in chosen]


def bits(name: str, model: PreTrainedModel, files: Sequence[tokenization.Encoded]) -> Bits:
    sizes = [int(each.sizes.sum()) for each in files]
    needed = [evaluation.score_model(model, each).bits_per_byte * size for each, size in zip(files, sizes)]
    return Bits(name, tuple(needed), tuple(sizes))


def exits(name: str, model: Any, files: Sequence[tokenization.Encoded]) -> list[Agreement]:
    """Every exit against the last layer: its states through the model's own final norm and LM head."""
    shares = [evaluation.score_exits(model, each) for each in files]
    tokens = tuple(len(each.tokens) - 1 for each in files)
    return [
        Agreement(name, f"exit {layer + 1}", tuple(each[layer] * count for each, count in zip(shares, tokens)), tokens)
        for layer in range(len(shares[0]) - 1)
    ]


@torch.inference_mode()
def sublayers(name: str, model: Any, files: Sequence[tokenization.Encoded]) -> list[Agreement]:
    """The model without each single sublayer against the whole model."""

    def likeliest() -> list[Tensor]:
        return [model(input_ids=ids, use_cache=False).logits.argmax(-1) for ids in map(beginning, files)]

    parts, whole, found = Sublayers(model), likeliest(), []
    for layer in range(parts.count):
        for part, skip in (("attention", SkipSet(attention=(layer,))), ("MLP", SkipSet(mlp=(layer,)))):
            with parts.left_out(skip):
                found.append(agreement(name, f"without {part} {layer}", likeliest(), whole))
    return found


def beginning(file: tokenization.Encoded) -> Tensor:
    """``[1, L]``, no more than a model sees at once."""
    return torch.from_numpy(file.tokens[: evaluation.WINDOW].astype(np.int64))[None]


def agreement(model: str, what: str, got: Sequence[Tensor], expected: Sequence[Tensor]) -> Agreement:
    same = tuple(float((one == other).sum()) for one, other in zip(got, expected))
    return Agreement(model, what, same, tuple(each.numel() for each in expected))


# -- exits of a frozen model --------------------------------------------------------------------------------------------------


def train_exits(
    target: str, data: Path, folder: Path, exits: Sequence[int], *, texts: int, steps: int, threads: int
) -> dict[tuple[int, bool], Path]:
    """Exits that ``foredraft train exit`` made beside ``target``, from texts that it wrote, by layer and whether they stand behind the
    next one's attention; what is there already is kept.

    Raises:
        ForedraftError: a command failed; the message is its own.
    """
    foredraft(
        "data",
        *("generate", str(data), "--target", target, "--out", str(folder / "texts"), "--windows", str(texts), "--prompt-tokens", "64"),
        *("--max-new-tokens", "80", "--temperature", "0,1", "--threads", str(threads)),
    )
    found = {(exit, attention): folder / f"exit-{exit}{'-attention' * attention}" for exit in exits for attention in (False, True)}
    for (exit, attention), place in found.items():
        if not (place / checkpoints.DONE).exists():
            foredraft(
                *("train", "exit", "--target", target, "--data", str(folder / "texts"), "--out", str(place), "--threads", str(threads)),
                *("--head-option", f"exit={exit}", "--head-option", f"attention={str(attention).lower()}"),
                *("--steps", str(steps), "--evaluate-every", str(max(1, steps // 2))),
                *(["--resume"] if place.exists() else []),
            )
            (place / checkpoints.DONE).touch()
    return found


def foredraft(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "foredraft", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or "no message").splitlines()[-1]
        raise ForedraftError(f"foredraft {arguments[0]} {arguments[1]} ended with {done.returncode}: {said}")


def accepted(
    model: PreTrainedModel, side: str, exit: int, make: Callable[[], LayerSkip], prompts: Sequence[Sequence[int]], tokens: int
) -> Accepted:
    """Greedy chains behind layer ``exit``, of ``prompts`` that are equally long; end of text is ignored."""
    model.generation_config.eos_token_id = None
    speculator, rows = Speculator(model, make(), shape=f"chain({CHAIN})", reuse_prefix=False), []
    try:
        for begin in range(0, len(prompts), TOGETHER):
            ids = torch.tensor([list(each) for each in prompts[begin : begin + TOGETHER]])
            how: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
            stats = speculator.generate(ids, **how).stats
            assert stats is not None
            rows += stats.rows
    finally:
        speculator.close()
    return Accepted(side, exit, tuple(row.kept - row.passes for row in rows), tuple(row.passes for row in rows))


def frozen(
    model: PreTrainedModel, trained: dict[tuple[int, bool], Path], prompts: Sequence[Sequence[int]], tokens: int
) -> Iterator[Accepted]:
    """Each exit bare, trained, and trained behind attention."""
    for (exit, attention), place in trained.items():
        if not attention:
            yield accepted(model, BARE, exit, partial(LayerSkip, exit=exit), prompts, tokens)
        yield accepted(model, BEHIND_ATTENTION if attention else TRAINED, exit, partial(LayerSkip, place), prompts, tokens)


# -- sublayers to leave out -----------------------------------------------------------------------------------------------------


def search_sets(writer: str, target: str, data: Path, folder: Path, *, trials: int, threads: int) -> dict[str, list[str]]:
    """The set that ``foredraft skip search`` found for ``target``, on texts of ``writer``, which computes the same, and the best one that
    greedy elimination alone comes by in as many trials: in words, and how often drafts agree. What is there already is kept.

    Raises:
        ForedraftError: a command failed; the message is its own.
    """
    texts, searched, greedy = folder / "texts", folder / f"set-{trials}.json", folder / f"greedy-{trials}.json"
    if not searched.exists():
        foredraft(
            *("data", "generate", str(data), "--target", writer, "--out", str(texts), "--windows", "96", "--prompt-tokens", "64"),
            *("--max-new-tokens", "64", "--temperature", "0,1", "--threads", str(threads)),
        )
        foredraft(
            *("skip", "search", "--target", target, "--data", str(texts), "--other-target", "--out", str(searched)),
            *("--trials", str(trials), "--finalists", str(min(10, 1 + trials // 6)), "--tokens", str(JUDGED)),
            *("--dtype", "bfloat16", "--threads", str(threads)),
        )
    if not greedy.exists():
        eliminate(target, texts, searched, greedy, trials)
    return {name: described(place) for name, place in (("searched set", searched), ("greedy elimination", greedy))}


def eliminate(target: str, texts: Path, costs: Path, out: Path, trials: int) -> None:
    """Greedy elimination alone, by the same texts and ``costs`` as a search."""
    model = load_model(target, dtype="bfloat16")
    search = begun(Target(model, execution="eager"), Texts(texts), JUDGED, costs, lambda line: None)
    for skipped in search.eliminate():
        search.judge(skipped, "greedy")
        if len(search.judged) >= trials:
            break
    best = search.ranked[0]
    chosen = search.set_of(best.skipped)
    chosen.save(out, model, [{**asdict(chosen), "agreement": best.agreement}])


def described(place: Path) -> list[str]:
    """The set in a file as ``draft-verify`` takes it, and how often drafts agree."""
    held = skips.read(place)
    chosen = next(each for each in held["trials"] if all(each[part] == held[part] for part in PARTS))
    return [" ".join(f"{part}={','.join(map(str, held[part]))}" for part in PARTS if held[part]), f"{chosen['agreement']:.1%}"]
