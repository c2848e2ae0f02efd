"""Plain decoding as the yardstick: transformers' own passes, cache and processors on the model itself, nothing of the audited loop."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from foredraft.errors import ConfigurationError
from foredraft.logits.noise import Noise, Purpose, row_key
from foredraft.logits.sampler import fit_vocabulary
from foredraft.models.cache_names import cache_argument, cache_of
from foredraft.preparation import split_criteria
from foredraft.rows import read_lengths


@dataclass(frozen=True, eq=False)
class Reference:
    """One prompt as transformers would continue it.

    Attributes:
        model: a ``PreTrainedModel``.
        inputs: token ids that ``model.generate`` is given, unpadded: the prompt, or what an encoder reads.
        prompt: token ids that the text goes on from.
        processors: what ``model.generate`` would apply, warpers included.
        sampled: whether it would sample.
        eos: tokens that end the text.
    """

    model: Any
    inputs: list[int]
    prompt: list[int]
    processors: Any
    sampled: bool
    eos: frozenset[int]
    _read: dict[Any, Tensor] = field(default_factory=dict)  # by model, what its encoder makes of the inputs

    @staticmethod
    def of(model: Any, inputs: Sequence[int], arguments: dict[str, Any]) -> Reference:
        """Let ``model.generate`` prepare the call and stop it before the first pass.

        Raises:
            ConfigurationError: stopping criteria besides the end of text, which an audit does not follow.
        """

        def capture(model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **_: Any) -> Any:
            eos, others = split_criteria(read_lengths(stopping_criteria, input_ids.shape[1])[1])
            if others:
                raise ConfigurationError(f"audit does not support stopping criteria ({type(others[0]).__name__}); leave them out")
            return Reference(model, list(inputs), input_ids[0].tolist(), logits_processor, bool(generation_config.do_sample), eos)

        ids = torch.tensor([list(inputs)], device=model.device)
        found: Reference = type(model).generate(
            model, ids, attention_mask=torch.ones_like(ids), custom_generate=capture, **{"max_new_tokens": 1, **arguments}
        )
        return found

    @torch.inference_mode()
    def logits(self, texts: Tensor, *, model: Any = None) -> Tensor:
        """``[G, T, V]`` raw logits at the T positions of ``texts`` ``[G, T]``, each before its token is chosen: one pass over all.

        ``model`` asks another one, a draft; its vocabulary is fitted to ``texts``' own.
        """
        model = self.model if model is None else model
        ids = torch.cat([torch.tensor(self.prompt, device=texts.device).expand(len(texts), -1), texts[:, :-1]], 1).to(model.device)
        keep = {"logits_to_keep": texts.shape[1]} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        return model(**self._given(model, ids), use_cache=False, **keep).logits[:, -texts.shape[1] :]

    @torch.inference_mode()
    def logits_in_steps(self, text: Sequence[int], width: int) -> Tensor:
        """``[T, V]`` the same of one text, but through transformers' cache, ``width`` tokens in a pass."""
        ids = torch.tensor([[*self.prompt, *text[:-1]]], device=self.model.device)
        begins = [0, *range(len(self.prompt), ids.shape[1], width)]
        cache, found = None, []
        for begin, end in zip(begins, [*begins[1:], ids.shape[1]]):
            output = self._step(ids, begin, end, cache)
            cache = cache_of(output)
            found.append(output.logits[0, -1:] if begin == 0 else output.logits[0])
        return torch.cat(found)

    @torch.inference_mode()
    def decode(self, count: int, seed: tuple[int, int]) -> tuple[list[int], Tensor]:
        """At most ``count`` tokens by passes over one token each, and the raw logits ``[T, V]`` they were chosen from.

        Sampling is keyed as the match rule is: the text that a seed stands for.
        """
        text: list[int] = []
        logits: list[Tensor] = []
        cache, begin = None, 0
        while len(text) < count and not (text and text[-1] in self.eos):
            ids = torch.tensor([[*self.prompt, *text]], device=self.model.device)
            output = self._step(ids, begin, ids.shape[1], cache)
            cache, begin = cache_of(output), ids.shape[1]
            logits.append(output.logits[0, -1])
            text.append(self.choose(ids, logits[-1], seed))
        return text, torch.stack(logits)

    def scores(self, ids: Tensor, logits: Tensor) -> Tensor:
        """``[G, V]`` float32 processed ``logits`` ``[G, V]`` after the texts ``ids`` ``[G, L]``, prompt included."""
        return self.processors(ids, logits.to(torch.float32, copy=True))

    def distribution(self, ids: Tensor, logits: Tensor, *, vocab_size: int | None = None) -> Tensor:
        """``[G, V]`` float32 distribution of the next token after ``ids`` ``[G, L]``."""
        wide = logits.float().to(ids.device)
        return torch.softmax(self.scores(ids, wide if vocab_size is None else fit_vocabulary(wide, vocab_size)), -1)

    def choose(self, ids: Tensor, logits: Tensor, seed: tuple[int, int]) -> int:
        """The token that plain decoding takes after ``ids`` ``[1, L]`` from ``logits`` ``[V]``."""
        scores = self.scores(ids, logits[None])
        if not self.sampled:
            return int(scores.argmax(-1))
        return int(self._noise(ids, seed).race(torch.softmax(scores, -1)[None], torch.zeros(1, 1, dtype=torch.long, device=ids.device)))

    def lead(self, ids: Tensor, logits: Tensor, seed: tuple[int, int], token: int, other: int) -> float:
        """By how much ``token`` beats ``other`` after ``ids`` ``[1, L]``: in log p + noise, or in score if greedy; inf if the
        processors rule ``other`` out."""
        scores = self.scores(ids, logits[None])[0].cpu().double()  # MPS has no float64
        if self.sampled:
            noise = self._noise(ids, seed)
            scores = scores - noise.exponentials(noise.words(Purpose.MATCH, 1), scores.shape[-1])[0, 0].cpu().double().log()
        return float(scores[token] - scores[other])

    def _noise(self, ids: Tensor, seed: tuple[int, int]) -> Noise:
        return Noise(torch.tensor([row_key(seed)], device=ids.device), torch.tensor([ids.shape[1] - 1], device=ids.device))

    def _step(self, ids: Tensor, begin: int, end: int, cache: Any) -> Any:
        """A pass over ``ids[:, begin:end]`` behind what the cache holds."""
        return self.model(**self._given(self.model, ids[:, :end], begin), **{cache_argument(type(self.model)): cache}, use_cache=True)

    def _given(self, model: Any, ids: Tensor, begin: int = 0) -> dict[str, Any]:
        """What ``model`` takes for a pass over ``ids[:, begin:]``."""
        if not model.config.is_encoder_decoder:
            return {"input_ids": ids[:, begin:], "attention_mask": torch.ones_like(ids)}
        if model not in self._read:
            self._read[model] = model.get_encoder()(torch.tensor([self.inputs], device=ids.device)).last_hidden_state
        states = self._read[model].expand(len(ids), -1, -1)
        return {"decoder_input_ids": ids[:, begin:], "encoder_outputs": BaseModelOutput(last_hidden_state=states)}
