"""What heads read of the target: hidden states and logits of a batch, computed by the target or read from files.

Hidden states can be stored beside the texts of a folder, for targets whose pass costs more than reading them back.

``hidden.json`` says which they are and whose; ``hidden-00012.safetensors`` holds those of shard 12, ``[T, F, d]`` in the order of its
texts and in the target's dtype. Both appear whole or not at all, and the same command goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.errors import ConfigurationError
from foredraft.files import read_json, replacing
from foredraft.models.features import LAST, features_of_texts
from foredraft.models.skips import SkipSet, Sublayers
from foredraft.training.batches import Order, Tokens
from foredraft.training.data import Texts, changes, refuse_other_data, shard_file, weights_digest, write_json

INDEX = "hidden.json"
CLOSE = 0.1  # largest difference between logits from stored states and the target's own, of their standard deviation


class Reader:
    """Hidden states and logits of texts.

    Args:
        model: the target.
        features: which hidden states, numbered as heads number them.
        skip: take, in their place, the last state of a pass without these sublayers, behind the final norm.
        train: keep the graph, for a backbone that is trained too.

    Raises:
        ConfigurationError, UnsupportedModelError: hidden states that there are not, or that cannot be had.
    """

    def __init__(self, model: PreTrainedModel, features: Sequence[int], *, skip: SkipSet | None = None, train: bool = False):
        self.model, self.train, self.skip = model, train, skip
        self.sublayers = None if skip is None else Sublayers(model)
        if self.sublayers is not None and skip is not None:
            self.sublayers.check(skip)
        self.features = features_of_texts(model, features)

    def __call__(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """``[B, S, F, d]`` at every token, in the order of the features, and logits ``[B, S, V]``.

        Padding must be behind the texts, where no token sees it.
        """
        with torch.set_grad_enabled(self.train):
            hidden, logits = self.features.read(self.model, tokens.ids, tokens.source)
        if self.sublayers is not None and self.skip is not None:
            with torch.set_grad_enabled(self.train), self.sublayers.left_out(self.skip):
                hidden = self.model.base_model(input_ids=tokens.ids, use_cache=False)[0][:, :, None]
        return hidden, logits


def store(
    model: PreTrainedModel,
    folder: Path,
    features: Sequence[int],
    *,
    batch_tokens: int = 8192,
    report: Callable[[int, int], None] = lambda done, of: None,
) -> int:
    """Make the files that are missing; how many were made.

    Raises:
        ConfigurationError: texts of another target, or other hidden states than those that are there.
    """
    texts = Texts(folder, partial=True)
    refuse_other_data(texts.manifest, model)
    wanted = {"features": list(features), "weights": weights_digest(model), "dtype": str(model.dtype)}
    if not (folder / INDEX).exists():
        write_json(folder / INDEX, wanted)
    if changed := changes(index_of(folder), wanted):
        raise ConfigurationError(f"{str(folder / INDEX)!r} says otherwise: {'; '.join(changed)}. Delete it and the files hidden-* first")
    reader, made = Reader(model, features), 0
    for number, shard in enumerate(texts.shards):
        path = shard_file(folder, shard, "hidden")
        if not path.exists():
            _write(path, reader, texts, [index for index, (of, _) in enumerate(texts.origins) if of == shard], batch_tokens)
            made += 1
        report(number + 1, len(texts.shards))
    return made


def _write(path: Path, reader: Reader, texts: Texts, members: Sequence[int], batch_tokens: int) -> None:
    from safetensors.torch import save_file

    order = Order(texts, members, max(batch_tokens, int(texts.sizes[list(members)].sum(1).max())), 1, seed=0)
    found: dict[int, Tensor] = {}
    for batch in order.epoch(0):
        tokens = order.tokens(batch).to(reader.model.device)
        hidden, _ = reader(tokens)
        for member, line in zip(batch.tolist(), hidden):
            found[member] = line[: texts.lengths[member]].to("cpu", copy=True)
    with replacing(path) as partial:
        save_file({"hidden": torch.cat([found[member] for member in members])}, partial)


def index_of(folder: Path) -> dict[str, Any]:
    """Raises ConfigurationError if there is none."""
    if not (folder / INDEX).exists():
        raise ConfigurationError(f"{str(folder)!r} holds no hidden states; store them with: foredraft data hidden {folder}")
    return read_json(folder / INDEX)


class StoredReader(Reader):
    """As :class:`Reader`, from what :func:`store` left; logits are the LM head's of the stored last state.

    Raises:
        ConfigurationError: states that are not there, of another target, or that the target makes its logits of in another way.
    """

    def __init__(self, model: PreTrainedModel, features: Sequence[int], texts: Texts):
        super().__init__(model, features)
        import safetensors

        safe_open: Any = safetensors.safe_open
        if len(texts.parts) > 1:
            raise ConfigurationError("stored hidden states need a single --data folder; pass one, or leave --stored-hidden out")
        there = index_of(texts.folder)
        if there["weights"] != weights_digest(model):
            raise ConfigurationError(f"the hidden states in {str(texts.folder)!r} are another target's; delete them and store this one's")
        if there["dtype"] != str(model.dtype):
            raise ConfigurationError(
                f"the hidden states in {str(texts.folder)!r} are {there['dtype'].removeprefix('torch.')}, and the target is "
                f"{str(model.dtype).removeprefix('torch.')}; pass the same --dtype, or delete them and store them again"
            )
        if missing := [number for number in (*features, LAST) if number not in there["features"]]:
            raise ConfigurationError(
                f"hidden states {missing[0]} are not stored in {str(texts.folder)!r}, which has {there['features']}; delete them and store "
                f"all that the head reads, and {LAST} for the logits: --features {','.join(map(str, dict.fromkeys((*features, LAST))))}"
            )
        self._texts, self._lm_head = texts, model.get_output_embeddings()
        self._which = [there["features"].index(number) for number in features]
        self._last = there["features"].index(LAST)
        paths = {shard: shard_file(texts.folder, shard, "hidden") for shard in texts.shards}
        if absent := [path.name for path in paths.values() if not path.exists()]:
            raise ConfigurationError(f"{', '.join(absent[:3])} missing: let foredraft data hidden {texts.folder} finish")
        self._files: dict[int, Any] = {shard: safe_open(path, "pt").get_slice("hidden") for shard, path in paths.items()}
        self._starts = [int(start - texts.starts[index - row]) for index, (start, (_, row)) in enumerate(zip(texts.starts, texts.origins))]
        self._check()

    @torch.no_grad()
    def __call__(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        device, width = tokens.ids.device, tokens.ids.shape[1]
        lines = []
        for member in tokens.members.tolist():
            start, length = self._starts[member], min(int(self._texts.lengths[member]), width)
            states = self._files[self._texts.origins[member][0]][start : start + length]
            lines.append(torch.nn.functional.pad(states, (0, 0, 0, 0, 0, width - length)))
        hidden = torch.stack(lines).to(device)
        return hidden[:, :, self._which], self._lm_head(hidden[:, :, self._last])

    def _check(self) -> None:
        """Models that scale or cap their logits have more behind the last state than an LM head."""
        tokens = Order(self._texts, [0], int(self._texts.sizes[0].sum()), 1, seed=0).tokens(np.asarray([0])).to(self.model.device)
        theirs, ours = super().__call__(tokens)[1].float(), self(tokens)[1].float()
        if float((theirs - ours).abs().max()) > CLOSE * float(theirs.std()):
            raise ConfigurationError("this target's logits are not its LM head's of the last hidden state; train without --stored-hidden")
