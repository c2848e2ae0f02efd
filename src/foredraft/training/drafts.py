"""A draft model that is distilled from the target, as the trainer sees it; and where it comes from."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from foredraft.errors import ConfigurationError, UnsupportedModelError
from foredraft.heads.base import Batch, Head, HeadConfig, refuse_unknown_options
from foredraft.heads.losses import pairs
from foredraft.loading import load_model, tokenizer_of, vocabulary_difference
from foredraft.losses import Few, Loss, compare
from foredraft.models.identity import shape_of
from foredraft.models.layers import LayerRanges
from foredraft.training.batches import Tokens
from foredraft.training.data import Texts, shard_file
from foredraft.training.distilling import Distilling

LAYERS = re.compile(r"target\[([0-9, ]+)\]")
NUMBERS = ("moe_layers", "mlp_only_layers")  # fields of configurations that list layers by number


@dataclass(frozen=True, kw_only=True)
class DraftConfig(HeadConfig):
    recipe: Distilling = field(default_factory=Distilling)


class Draft(Head):
    """Stands where a head stands in other runs. The model is no part of this module: it is trained as the model, not as a head."""

    kind = "draft"
    drafter = "draft-model"
    config: DraftConfig
    model: PreTrainedModel
    config_class = DraftConfig

    def __init__(self, config: DraftConfig, model: PreTrainedModel):
        super().__init__(config)
        vars(self)["model"] = model

    @classmethod
    def for_target(cls, model: PreTrainedModel, **options: Any) -> Draft:
        """Options: those of :class:`~foredraft.training.distilling.Distilling`.

        Raises:
            ConfigurationError: a draft with another vocabulary, an unknown loss, or no such model.
        """
        refuse_unknown_options("a draft", options, [each.name for each in fields(Distilling)])
        recipe = Distilling(**options)
        Loss.parse(recipe.loss)
        draft = source_of(recipe.draft, model)
        if difference := vocabulary_difference(model, draft, tokenizer_of(model), tokenizer_of(draft)):
            raise ConfigurationError(f"the draft {recipe.draft!r} does not share the target's vocabulary: {difference}")
        return cls(DraftConfig(shape_of(model), recipe=recipe), draft.to(model.device).eval())

    @property
    def drafter_options(self) -> dict[str, Any]:
        return {"source": self.model}


def source_of(draft: str, target: PreTrainedModel) -> PreTrainedModel:
    """The model that training begins with.

    Raises:
        ConfigurationError: there is none.
    """
    if found := LAYERS.fullmatch(draft.strip()):
        return copy_of_layers(target, [int(each) for each in found[1].split(",") if each.strip()])
    if draft.startswith("target["):
        raise ConfigurationError(f"cannot read {draft!r}; name the target's layers from 0 on, as in 'target[0,3,7]'")
    path, weights = Path(draft).expanduser(), ("*.safetensors", "*.bin")
    if path.suffix == ".json" or ((path / "config.json").exists() and not any(any(path.glob(each)) for each in weights)):
        return from_scratch(path)
    return load_model(draft)


def copy_of_layers(target: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A model of these layers of ``target``, with copies of its embeddings, final norm and LM head.

    Raises:
        ConfigurationError: it has no such layers, or more is needed to copy them.
    """
    try:
        ranges = LayerRanges(target)
    except UnsupportedModelError as error:
        raise ConfigurationError(f"--draft target[…]: {error}") from error
    if not layers or sorted(set(layers)) != list(layers) or layers[-1] >= ranges.count:
        raise ConfigurationError(
            f"target[{','.join(map(str, layers))}] must name layers from 0 to {ranges.count - 1}, each once and in ascending order"
        )
    config = copy.deepcopy(target.config)
    for name, value in vars(config).items():
        if name in NUMBERS and value is not None:
            setattr(config, name, [place for place, layer in enumerate(layers) if layer in value])
        elif isinstance(value, (list, tuple)) and len(value) == ranges.count:  # one for each layer, such as layer_types
            setattr(config, name, type(value)(value[layer] for layer in layers))
    config.num_hidden_layers = len(layers)
    model = type(target)(config).to(target.dtype)
    prefix = next(name for name, module in target.named_modules() if module is ranges.layers) + "."
    kept = {}
    for name, value in target.state_dict().items():
        if name.startswith(prefix):
            number, _, rest = name.removeprefix(prefix).partition(".")
            if int(number) not in layers:
                continue
            name = f"{prefix}{layers.index(int(number))}.{rest}"
        kept[name] = value
    try:
        model.load_state_dict(kept)
    except RuntimeError as error:
        raise ConfigurationError(f"the layers of {type(target).__name__} cannot be copied one by one: {error}") from error
    model.generation_config = copy.deepcopy(target.generation_config)
    return model


def from_scratch(path: Path) -> PreTrainedModel:
    """A model of the configuration at ``path``, with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if not path.exists():
        raise ConfigurationError(f"there is no configuration {str(path)!r}; write a config.json for a draft from scratch")
    try:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(f"{str(path)!r} is no configuration of a causal language model: {str(error).splitlines()[0]}") from error


class Distiller(nn.Module):
    """One forward pass is the loss of a micro-batch; gradients reach the draft alone.

    Args:
        backbone: the draft.
        target: gives p, unless ``stored`` does.
    """

    def __init__(self, backbone: PreTrainedModel, target: PreTrainedModel, recipe: Distilling, stored: StoredProbabilities | None):
        super().__init__()
        self.target: PreTrainedModel
        self.stored: StoredProbabilities | None
        self.backbone, self.recipe, self.loss = backbone, recipe, Loss.parse(recipe.loss)
        vars(self).update(target=target, stored=stored)  # not as submodules: they are not trained

    def forward(self, tokens: Tokens, step: int, steps: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The mean loss, the tokens it is a mean of, and the mean α and greedy agreement of all counted ones."""
        places, labels = pairs(Batch(tokens.ids, tokens.valid, tokens.counted, tokens.ids, tokens.ids), 1)
        with torch.enable_grad():
            logits = self.backbone(input_ids=tokens.ids, use_cache=False).logits.flatten(0, 1)[places]
        target = self._said(tokens, places, labels)
        if isinstance(target, Tensor):
            both = min(target.shape[-1], logits.shape[-1])  # vocabularies that are padded differently
            logits, target = logits[:, :both], target[:, :both]
        found = compare(self.loss, logits, target, self.recipe.temperature)
        count = torch.tensor(float(len(places)), device=logits.device)
        most = count.clamp(min=1)  # where nothing is counted, the parts are there all the same
        parts = {"alpha": found.alpha.sum() / most, "agreement": found.agrees.sum() / most}
        if self.recipe.positions == "all":
            return found.loss.sum() / most, count, parts
        rejected = torch.rand(len(places)).to(logits.device) >= found.alpha
        return (found.loss * rejected).sum() / most, count, {**parts, "rejected": rejected.sum() / most}

    def _said(self, tokens: Tokens, places: Tensor, labels: Tensor) -> Tensor | Few:
        """The target's p at the places that predict the tokens at ``labels``."""
        if self.stored is not None:
            return self.stored(tokens, labels)
        with torch.no_grad(), torch.autocast(tokens.ids.device.type, enabled=False):
            return self.target(input_ids=tokens.ids, use_cache=False).logits.flatten(0, 1)[places]


class StoredProbabilities:
    """The target's most likely tokens at every place of the answers of ``texts``, and their log-probabilities.

    Raises:
        ConfigurationError: they were not stored.
    """

    def __init__(self, texts: Texts):
        from safetensors import safe_open

        self._texts, self._slices = texts, list[tuple[Any, Any]]()
        self._of: list[tuple[int, int]] = []  # of each text: which slices, and where its answer begins in them
        for part in texts.parts:
            begun = dict.fromkeys(part.shards, 0)
            first = len(self._slices)
            for shard in part.shards:
                opened: Any = safe_open(shard_file(part.folder, shard), "pt")  # type: ignore[no-untyped-call]
                if "top_ids" not in opened.keys():  # noqa: SIM118
                    raise ConfigurationError(
                        f"{str(part.folder)!r} has no stored probabilities; make the data with foredraft data generate "
                        "--top-k-probabilities K, or leave --stored-probabilities out"
                    )
                self._slices.append((opened.get_slice("top_ids"), opened.get_slice("top_logprobs")))
            for (shard, _), length, prompt in zip(part.origins, part.lengths, part.prompt_lengths):
                self._of.append((first + part.shards.index(shard), begun[shard]))
                begun[shard] += int(length - prompt)

    def __call__(self, tokens: Tokens, labels: Tensor) -> Few:
        """What the target said in front of the tokens at ``labels``, places in the flattened batch."""
        rows, columns = np.divmod(labels.cpu().numpy(), tokens.ids.shape[1])
        ids, values = list[Tensor](), list[Tensor]()
        for row in np.unique(rows):
            member = int(tokens.members[row])
            slices, begin = self._of[member]
            wanted = columns[rows == row] - int(self._texts.prompt_lengths[member])
            span = slice(begin, begin + int(wanted.max()) + 1)
            for found, part in zip((ids, values), self._slices[slices]):
                found.append(part[span][torch.from_numpy(wanted)])
        device = tokens.ids.device
        if not ids:
            return Few(torch.zeros(0, 1, dtype=torch.long, device=device), torch.zeros(0, 1, device=device))
        return Few(torch.cat(ids).long().to(device), torch.cat(values).to(device))
