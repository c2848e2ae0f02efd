"""The MTP layer of a target's own checkpoint as the drafter (multi-token prediction: Gloeckle et al. 2024; DeepSeek-V3, 2024).

Some models were trained with a further layer after the last one, which transformers ignores when it loads them. The step at position t
reads the target's last hidden state h at t and the embedding of the token at t + 1, and predicts the token at t + 2::

    x = eh_proj [enorm(embedding of token t + 1); hnorm(h)]      2d -> d
    h' = post_norm(decoder layer(x)), logits = LM head(h')

The next step reads h' in place of h. Embeddings and LM head are the target's. If a checkpoint has several such layers, the first one is
used for all steps.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from foredraft.backends.base import ForwardPass, Part
from foredraft.backends.packing import Packing
from foredraft.drafters.base import DraftRequest, Row
from foredraft.drafters.features import FeatureDrafter
from foredraft.drafters.growth import Expand
from foredraft.errors import ConfigurationError, UnsupportedModelError, first_line
from foredraft.heads.formats.folders import dtype_name
from foredraft.loading import name_of
from foredraft.models.cache import TreeCache, Window
from foredraft.models.features import LAST
from foredraft.models.paged_cache import PagedCache
from foredraft.quantization import check_quantization, quantize
from foredraft.target import Target
from foredraft.tree import TokenTree

COUNTS = ("num_mtp_layers", "num_nextn_predict_layers")  # what configurations call the number of MTP layers
VOCABULARY = 128  # of the model around the layer, whose embeddings and LM head are not used
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


class Mtp(FeatureDrafter):
    """Options:

    layers: the layers as transformers' ``MtpModel``, of which the first one is copied; those of the target's checkpoint unless given.
    siblings: how tokens are chosen when sampling: ``keyed`` (with the target's noise, for match), ``iid`` (from the layer's q, for the p/q
        rules), ``without-replacement`` (likewise, all different), ``top-k`` (the most likely), or ``auto``: whichever the rule in use
        accepts best in the shape in use.
    quantization: ``int8`` or ``int4`` makes the weights of a layer that is read from a checkpoint so many bits wide (torchao); the output
        distribution stays the target's.
    """

    name = "mtp"
    summary = "the MTP layer that the target's own checkpoint has, run autoregressively; chains and trees"

    _layers: MtpModel  # whose embeddings and LM head, the target's, are used
    _entry: Entry
    _inner: Target | None = None  # a model of the layer alone, whose passes run it
    _packing: Packing | None = None  # of the entry

    def __init__(self, layers: MtpModel | None = None, *, siblings: str = "auto", quantization: str | None = None):
        if layers is not None and not isinstance(layers, MtpModel):
            raise ConfigurationError(f"drafter 'mtp' takes layers as an MtpModel of transformers, not {layers!r}; leave layers out")
        if layers is not None and quantization is not None:
            raise ConfigurationError("drafter 'mtp' quantizes layers that it reads from a checkpoint; leave quantization or layers out")
        check_quantization(quantization, "")
        super().__init__(siblings=siblings)
        self.given, self.quantization = layers, quantization

    def bind(self, target: Target) -> None:
        layers = layers_of(target.model) if self.given is None else checked(self.given, target.model)
        layer: Any = layers.layers[0] if self.given is None else copy.deepcopy(layers.layers[0]).requires_grad_(False).eval()
        if self.quantization is not None:
            quantize(layer, self.quantization)
        self._target, self._layers, self._entry, self._packing = target, layers, Entry(layers, layer), None
        on_cpu = target.device.type == "cpu"
        self._inner = Target(
            model_of(layers, layer, target.model),
            owned=True,
            execution="eager" if on_cpu and not target.backend.hints else "auto",  # on kernels if the target is
            reuse_prefix=target.reuse_prefix,
            wait=target.wait,
            cache_memory=None,
            paged=isinstance(target.cache, PagedCache),
        )
        why = self._inner.chains_only
        if isinstance(target.cache, PagedCache) and not isinstance(self._inner.cache, PagedCache):
            why = f"its keys and values cannot lie in pages, as the target's do: {self._inner.reasons.get('pages')}"
        if why is not None:
            raise UnsupportedModelError(f"drafter 'mtp' cannot use the MTP layer of {name_of(target.model)}: {why}; use another drafter")
        if self._inner.backend.hints:
            self._packing = self._entry.packed(self._inner.backend.hints)
        self.info = replace(self.info, draft_model=self._inner, features=(LAST,))
        self._clear()
        target.read(self.info.features, whole=True, companion=self)

    def _fresh_cache(self) -> TreeCache:
        assert self._inner is not None
        self._inner.release()
        return self._inner.cache

    # -- a round --------------------------------------------------------------------------------------------------------------

    def _fill(self, tokens: Tensor, features: Tensor, window: Window) -> None:
        self._ran(TokenTree.from_chain(tokens), tokens, features, window)

    def _expand(self, request: DraftRequest) -> Expand:
        def expand(tree: TokenTree, first: int) -> Tensor:
            states = self._root(request.rows) if first == 0 else self._ran(tree, tree.tokens[:, first:], *self._above(tree, first))
            self._states = states if first == 0 else torch.cat([self._states, states], 1)
            return self._layers._project_to_logits(states.to(self._target.model.dtype))

        return expand

    def _root(self, rows: Sequence[Row]) -> Tensor:
        """``[R, 1, d]`` after the last step of each row's text, which is read first."""
        steps = self._missed(rows)
        states = self._ran(TokenTree.from_chain(steps.tokens), steps.tokens, steps.features, steps.window)
        self._cache.commit(None, steps.counts)
        return steps.last(states)

    def _ran(self, tree: TokenTree, tokens: Tensor, states: Tensor, window: Window) -> Tensor:
        """``[R, n, d]`` the output of the layer, after its norm, for ``tokens`` ``[R, n]``, the newest nodes of ``tree``, and ``states``
        ``[R, n, d]``. It keeps its dtype if that of the target changes."""
        assert self._inner is not None
        dtype = self._inner.model.dtype
        embedded: Any = self._layers.embed_tokens
        entered = self._entry(embedded(tokens).to(states.device, dtype), states.to(dtype))
        part = Part(0, 1, entered, logits=False)
        return self._inner.backend.forward(ForwardPass(tree, window, torch.zeros_like(tokens), part=part)).logits

    def close(self) -> None:
        super().close()
        if self._packing is not None:
            self._packing.undo()
            self._packing = None
        if self._inner is not None:
            self._inner.close()


class Entry(nn.Module):
    """Combines a token's embedding and a hidden state ``[..., d]`` into the input of the decoder layer, ``[..., d]``."""

    def __init__(self, layers: MtpModel, layer: Any):
        super().__init__()
        self.enorm, self.hnorm, self.eh_proj = layer.enorm, layer.hnorm, layer.eh_proj
        self.states_first = bool(getattr(layers.config, "mtp_hidden_states_first", False))

    def forward(self, embedded: Tensor, states: Tensor) -> Tensor:
        parts = [self.enorm(embedded), self.hnorm(states)]
        return self.eh_proj(torch.cat(parts[::-1] if self.states_first else parts, -1))

    def packed(self, hints: Sequence[int]) -> Packing:
        """Lay the weights out for kernels."""
        some = self.hnorm.weight.new_zeros(1, self.hnorm.weight.shape[-1])
        with torch.inference_mode(False), torch.no_grad():
            return Packing(self, lambda: self(some, some), owned=True, hints=hints)


def layers_of(model: PreTrainedModel) -> MtpModel:
    """The MTP layers in the checkpoint of ``model``.

    Raises:
        ConfigurationError: it has none, or they cannot be read.
    """
    name, other = name_of(model), "use another drafter, such as suffix or a draft model"
    config = model.config.get_text_config()
    count = next((each for key in COUNTS if (each := getattr(config, key, None))), None)
    if count is None or not model._keys_to_ignore_on_load_unexpected:
        raise ConfigurationError(
            f"drafter 'mtp' drafts with the MTP layers of the target's own checkpoint, as those of DeepSeek-V3 and GLM-4.5 have, and "
            f"transformers knows of none for {name}; {other}"
        )
    if any(each.dtype in EIGHT_BITS for each in model.parameters()):
        raise ConfigurationError(
            f"{name} keeps weights in eight-bit floats, whose scales transformers does not apply to MTP layers; load it in bfloat16, "
            f"or {other}"
        )
    # What get_mtp_config() needs, and the configuration of GLM-4.7-Flash does not have
    missing = {"num_mtp_layers": count, "mtp_layer_types": None, "mtp_mlp_layer_types": ["sparse"] * count}
    given = {"dtype": model.dtype, **{name: value for name, value in missing.items() if not hasattr(config, name)}}
    try:
        with described(config, given):
            found = MtpModel.from_pretrained(model, device_map={"": model.device})
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigurationError(f"the MTP layers of {name} cannot be read from its checkpoint: {first_line(error)}; {other}") from error
    found.layers = found.layers[:1].requires_grad_(False).eval()  # embeddings and LM head beside them are the target's own
    return found


def checked(layers: MtpModel, model: PreTrainedModel) -> MtpModel:
    """``layers``, if they were made for a model like ``model``.

    Raises:
        ConfigurationError: they have other decoder layers, or another width, dtype or device.
    """
    layer: Any = layers.layers[0]
    last: Any = model.get_decoder().layers[-1]
    weight, width = layer.eh_proj.weight, model.config.get_text_config().hidden_size
    made = type(layer.mtp_block).__name__, len(weight), dtype_name(weight.dtype), str(weight.device)
    wanted = type(last).__name__, width, dtype_name(model.dtype), str(model.device)
    if made != wanted:
        form = "{} of width {} in {} on {}"
        raise ConfigurationError(
            f"the MtpModel has {form.format(*made)}, and {name_of(model)} {form.format(*wanted)}; make it of this model, and convert it "
            "with layers.to(dtype)"
        )
    return layers


@contextmanager
def described(config: Any, given: Mapping[str, Any]) -> Iterator[None]:
    """Inside, ``config`` has the attributes ``given``."""
    before = {name: getattr(config, name) for name in given if hasattr(config, name)}
    try:
        for name, value in given.items():
            setattr(config, name, value)
        yield
    finally:
        for name in given:
            if name in before:
                setattr(config, name, before[name])
            else:
                delattr(config, name)


def model_of(layers: MtpModel, layer: Any, model: PreTrainedModel) -> PreTrainedModel:
    """A model of the class of ``model`` whose only decoder layer is that of ``layer``, an MTP layer of ``layers``. Passes give it inputs
    and read its last hidden states, so its embeddings and LM head are small.

    Raises:
        ConfigurationError: ``model`` is not a text-only model.
    """
    if model.config is not model.config.get_text_config():
        raise ConfigurationError(f"drafter 'mtp' takes language models, and {name_of(model)} reads more than text; use another drafter")
    config = copy.deepcopy(layers.config)
    config.num_hidden_layers, config.vocab_size = 1, VOCABULARY
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    config.tie_word_embeddings = False
    for kinds in ("layer_types", "mlp_layer_types"):
        if getattr(config, kinds, None) is not None:
            setattr(config, kinds, getattr(config, kinds)[:1])
    like = {"device": model.device, "dtype": layer.hnorm.weight.dtype}
    with torch.device("meta"):
        made: Any = type(model)._from_config(config, dtype=like["dtype"], attn_implementation=model.config._attn_implementation)
    for module in layer.mtp_block.modules():
        if hasattr(module, "config"):  # attention asks it for the implementation
            module.config = made.config
    decoder = made.get_decoder()
    decoder.layers[0], decoder.norm = layer.mtp_block, layer.post_norm or getattr(layers, "shared_post_norm", nn.Identity())
    decoder.rotary_emb = type(decoder.rotary_emb)(made.config).to(model.device)
    made.set_input_embeddings(nn.Embedding(VOCABULARY, config.hidden_size, **like))
    made.set_output_embeddings(nn.Linear(config.hidden_size, VOCABULARY, bias=False, **like))
    return made.eval()
