"""Passes without some sublayers: only the residual goes past them. Skip sets, and the files that hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, build
from torch import nn

from foredraft import ConfigurationError, UnsupportedModelError
from foredraft.models.skips import SkipSet, Sublayers, read

IDS = torch.arange(3, 15)[None]
FAMILIES = [name for name, entry in ARCHITECTURES.items() if entry.support == "tree" and name != "gemma3n_text"]
FAST = ("llama", "gpt2", "bloom", "gpt_neox", "falcon", "gemma3_text", "gpt_oss", "opt")
WITHOUT_MLP = ("opt", "xglm", "biogpt")


def zeroed(sublayer: nn.Module) -> None:
    """Have ``sublayer`` return zeros: its last product gives none."""
    names = ("o_proj", "c_proj", "dense", "out_proj", "down_proj", "dense_4h_to_h", "fc2", "fc_out", "w2")
    for name, weight in sublayer.named_parameters():
        if any(part in name.split(".") or part in name for part in names):
            nn.init.zeros_(weight)


@pytest.mark.parametrize("family", [name if name in FAST else pytest.param(name, marks=pytest.mark.nightly) for name in FAMILIES])
def test_what_is_left_out_adds_nothing(family: str):
    implementation = ARCHITECTURES[family].implementations[0]
    model, changed = build(family, implementation), build(family, implementation)
    sublayers, theirs = Sublayers(model), Sublayers(changed)
    zeroed(theirs.attention[1])
    skip = SkipSet((1,))
    if family not in WITHOUT_MLP:
        mlp = theirs.mlp[0]
        assert mlp is not None
        zeroed(mlp)
        skip = SkipSet((1,), (0,))
    sublayers.check(skip)
    with torch.inference_mode():
        whole = model(IDS).logits
        with sublayers.left_out(skip) as passing:
            found = model(IDS).logits
        torch.testing.assert_close(found, changed(IDS).logits, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(found, whole, atol=1e-3) and torch.equal(model(IDS).logits, whole)
    assert passing.found is not None and passing.found.shape[:2] == IDS.shape


def test_a_layer_without_sublayers_is_not_entered():
    model = build("llama")
    sublayers, calls = Sublayers(model), []
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda *_, index=index: calls.append(index))
    with torch.inference_mode(), sublayers.left_out(SkipSet((0, 1), (1,))):
        model(IDS)
    assert calls == [0]


@pytest.mark.parametrize("family", WITHOUT_MLP)
def test_without_mlp_modules_attention_alone_can_be_left_out(family: str):
    sublayers = Sublayers(build(family, ARCHITECTURES[family].implementations[0]))
    sublayers.check(SkipSet((1,)))
    with pytest.raises(ConfigurationError, match="no module of its own; leave out attention alone"):
        sublayers.check(SkipSet((), (1,)))


@pytest.mark.parametrize(
    ("skip", "message"),
    [
        (SkipSet(), "at least one sublayer"),
        (SkipSet((2,)), "names layer 2, but .* has layers 0 to 1"),
        (SkipSet((), (-1,)), "names layer -1"),
        (SkipSet((0, 1), (0, 1)), "leaves out every sublayer"),
    ],
)
def test_sets_that_cannot_be_are_refused(skip: SkipSet, message: str):
    with pytest.raises(ConfigurationError, match=message):
        Sublayers(build("llama")).check(skip)


@pytest.mark.parametrize("given", ["12", 3, (0.5,), (True,), ("1",)])
def test_a_set_lists_layers_by_number(given: Any):
    with pytest.raises(ConfigurationError, match="attention must list layers by number"):
        SkipSet(given)


def test_layers_that_norm_what_they_add_to_are_refused():
    model = build("opt")
    model.config.do_layer_norm_before = False
    with pytest.raises(UnsupportedModelError, match="norm what comes out"):
        Sublayers(model)


def test_layers_that_do_more_than_add_are_refused():
    class Doubled(type(build("llama").model.layers[0])):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().forward(*args, **kwargs)

    model = build("llama")
    model.model.layers[1].__class__ = Doubled
    with pytest.raises(UnsupportedModelError, match="still change what they are given"):
        Sublayers(model)


def test_a_file_holds_the_set_the_trials_and_whose_it_is(tmp_path: Path):
    model, path = build("llama"), tmp_path / "skips.json"
    SkipSet((1, 0), (1,)).save(path, model, [{"attention": [0], "agreement": 0.9}])
    assert SkipSet.load(path, model) == SkipSet((0, 1), (1,)) and SkipSet((0, 1), (1,)).first == 0
    held = read(path)
    assert held["trials"] == [{"attention": [0], "agreement": 0.9}] and held["target"].layers == 2
    with pytest.raises(ConfigurationError, match=r"skips.json' was made for .* with layers 2; .* has 3: .*foredraft skip search"):
        SkipSet.load(path, build("smollm3"))
    for content in ("[]", "{}", "nothing", json.dumps({**json.loads(path.read_text()), "format": "other"})):
        path.write_text(content)
        with pytest.raises(ConfigurationError, match="is no file of 'foredraft skip search'"):
            SkipSet.load(path, model)
    with pytest.raises(ConfigurationError, match="cannot read"):
        SkipSet.load(tmp_path / "none.json", model)
