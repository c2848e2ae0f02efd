"""A small recurrent network as the drafter: it reads tokens one by one, from the target's last hidden state on or by itself.

From the hidden state on, it begins anew in every round and is trained over as many steps as it is to draft (as Zhang et al. 2024 do,
"Recurrent drafter"). By itself it is a language model of its own, which reads the whole text and needs nothing of the target but its
embeddings and LM head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from foredraft.errors import whole
from foredraft.heads.base import Batch
from foredraft.heads.losses import pairs
from foredraft.heads.vocabulary import Guess, VocabularyConfig, VocabularyHead, one_of, yes_or_no
from foredraft.models.features import LAST

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from typing_extensions import Self

CELLS = {"gru": nn.GRU, "lstm": nn.LSTM}


@dataclass(frozen=True, kw_only=True)
class RnnConfig(VocabularyConfig):
    """Attributes, besides those of :class:`~foredraft.heads.vocabulary.VocabularyConfig`:

    cell: ``gru`` or ``lstm``.
    width: numbers in the state of a layer; the target's hidden size unless given.
    layers: recurrent layers.
    hidden_states: begin at the target's last hidden state, anew in every round; otherwise it reads the text by itself.
    steps: tokens in a row that it learns to draft from a hidden state; it can draft more.
    embedding_size: of the target's embeddings; found, not chosen.
    """

    cell: str = "gru"
    width: int = 0
    layers: int = 1
    hidden_states: bool = True
    steps: int = 5
    embedding_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("cell", self.cell, tuple(CELLS))
        yes_or_no("hidden_states", self.hidden_states)
        for name in ("width", "layers", "steps", "embedding_size"):
            whole(name, getattr(self, name))

    @property
    def predictions(self) -> int:
        return self.steps if self.hidden_states else 1

    @property
    def state_size(self) -> int:
        """Numbers in the state of a row."""
        return self.layers * self.width * (2 if self.cell == "lstm" else 1)


class RnnHead(VocabularyHead):
    """With h the target's last hidden state at position t: s_0 = W h, s_k+1 = cell(s_k, embedding of token t + 1 + k), and token
    t + 2 + k is predicted by the LM head from h + U s_k+1. U begins as zero, so that every step begins as the LM head. Without hidden
    states s_0 is zero before the text, and the LM head reads U s alone. Tokens after the root are those drafted.
    """

    kind = "rnn"
    lm_head_count = 1
    config: RnnConfig
    config_class = RnnConfig

    def __init__(self, config: RnnConfig):
        super().__init__(config)
        size = config.target.hidden_size
        with torch.device("meta"):
            self.rnn = CELLS[config.cell](config.embedding_size, config.width, config.layers, batch_first=True)
            self.out = nn.Linear(config.width, size, bias=False)
            self.start = nn.Linear(size, config.state_size, bias=False) if config.hidden_states else None

    @property
    def features(self) -> tuple[int, ...]:
        return (LAST,) if self.config.hidden_states else ()

    @classmethod
    def for_target(cls, model: PreTrainedModel, *, seed: int = 0, **options: Any) -> Self:
        """As of :class:`~foredraft.heads.vocabulary.VocabularyHead`; ``seed`` is that of the recurrent layers' weights."""
        options.setdefault("width", model.config.get_text_config().hidden_size)
        head = super().for_target(model, **options)
        drawn = [*head.rnn.parameters(), (head.start or head.out).weight]
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in drawn:
                bound = parameter.shape[-1] ** -0.5
                parameter.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator))
        return head

    def begin(self, hidden: Tensor | None, rows: int) -> Tensor:
        """``[M, state_size]`` before the root is read, from ``hidden`` ``[M, d]``, or zeros for so many ``rows``."""
        if self.start is None or hidden is None:
            return self.out.weight.new_zeros(rows, self.config.state_size)
        return self.start(hidden.to(self.dtype))

    def read(self, tokens: Tensor, state: Tensor, lengths: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """Outputs ``[M, T, width]`` after each of ``tokens`` ``[M, T]``, and the state ``[M, state_size]`` after the last one, or after
        ``lengths[m] >= 1`` tokens of each row; outputs are not to be used then."""
        given: Any = self.embed(tokens)
        if lengths is not None:
            given = pack_padded_sequence(given, torch.tensor(lengths), batch_first=True, enforce_sorted=False)
        outputs, after = self.rnn(given, self._unpacked(state))
        return (outputs if lengths is None else outputs.data), self._packed(after)

    def say(self, outputs: Tensor, hidden: Tensor | None) -> Tensor:
        """``[..., V]`` logits after ``outputs`` ``[..., width]``; ``hidden`` ``[..., d]`` where it begins at hidden states."""
        return self.logits(self._shown(outputs, hidden), 0)

    def guesses(self, batch: Batch) -> Iterator[Guess]:
        """From hidden states those of every step; without them the one of every token, given the text before it."""
        return self._from_hidden_states(batch) if self.config.hidden_states else self._as_language_model(batch)

    def _from_hidden_states(self, batch: Batch) -> Iterator[Guess]:
        hidden, ids = batch.hidden[:, :, 0].flatten(0, 1).to(self.dtype), batch.ids.flatten()
        wanted = [pairs(batch, k + 2) for k in range(self.config.steps)]
        sources = torch.unique(torch.cat([each for each, _ in wanted]))
        path = (sources[:, None] + torch.arange(1, self.config.steps + 1, device=ids.device)).clamp(max=len(ids) - 1)
        states = hidden[sources]
        if len(sources):
            outputs, _ = self.read(ids[path], self.begin(states, len(sources)))
        for k, (mine, places) in enumerate(wanted):
            rows = torch.searchsorted(sources, mine)
            shown = self._shown(outputs[rows, k], states[rows]) if len(sources) else states
            yield Guess(shown, places)

    def _as_language_model(self, batch: Batch) -> Iterator[Guess]:
        sources, places = pairs(batch, 1)
        outputs, _ = self.read(batch.ids, self.begin(None, len(batch.ids)))
        yield Guess(self._shown(outputs.flatten(0, 1)[sources], None), places)

    def _shown(self, outputs: Tensor, hidden: Tensor | None) -> Tensor:
        """What the LM head reads."""
        out: Tensor = self.out(outputs)
        return out if hidden is None else out + hidden.to(out.dtype)

    def _unpacked(self, state: Tensor) -> Any:
        """As torch's layers take it: ``[layers, M, width]``, a pair for an LSTM."""
        parts = state.view(len(state), -1, self.config.layers, self.config.width).permute(1, 2, 0, 3).contiguous()
        return (parts[0], parts[1]) if self.config.cell == "lstm" else parts[0]

    def _packed(self, after: Any) -> Tensor:
        parts = torch.stack(after) if self.config.cell == "lstm" else after[None]
        return parts.permute(2, 0, 1, 3).flatten(1)
