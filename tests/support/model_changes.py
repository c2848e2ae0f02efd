"""Changes to a small Llama that its text shows. Each is applied to a model, and returns what takes it back."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import build
from torch import nn


def hooked(where):
    def change(model):
        def negate(module, given, output):
            return (-output[0], *output[1:]) if isinstance(output, tuple) else -output

        return model.get_submodule(where).register_forward_hook(negate).remove

    return change


def pre_hooked(where):
    def change(model):
        return model.get_submodule(where).register_forward_pre_hook(lambda module, given: (given[0].flip(-1), *given[1:])).remove

    return change


def in_place(where, factor=-1.0):
    """A parameter or a buffer."""

    def change(model):
        module, _, name = where.rpartition(".")

        def times(factor):
            with torch.no_grad():
                getattr(model.get_submodule(module), name).mul_(factor)

        times(factor)
        return lambda: times(1 / factor)

    return change


def replaced(where):
    def change(model):
        module, _, name = where.rpartition(".")
        module = model.get_submodule(module)
        before = getattr(module, name)
        setattr(module, name, nn.Parameter(-before.detach().clone(), requires_grad=False))
        return lambda: setattr(module, name, before)

    return change


def other_mlp(model):
    layer, before = model.model.layers[1], model.model.layers[1].mlp
    layer.mlp = build("llama", torch.float32).model.layers[0].mlp
    return lambda: setattr(layer, "mlp", before)


def overridden(model):
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x: -type(mlp).forward(mlp, x)
    return lambda: delattr(mlp, "forward")


def fewer_layers(model):
    model.config.num_hidden_layers = 2
    return lambda: setattr(model.config, "num_hidden_layers", 3)


CHANGES = {
    "a hook on a layer": hooked("model.layers.0"),
    "a hook on the model": pre_hooked("model.norm"),
    "a hook inside a layer": hooked("model.layers.1.mlp"),
    "a hook on a product": hooked("model.layers.0.self_attn.k_proj"),
    "a hook before a product": pre_hooked("model.layers.0.mlp.up_proj"),
    "a hook on a norm": hooked("model.layers.2.input_layernorm"),
    "a hook on the head": pre_hooked("lm_head"),
    "a buffer in place": in_place("model.rotary_emb.inv_freq", 0.5),
    "a weight in place": in_place("model.layers.1.mlp.up_proj.weight"),
    "a norm in place": in_place("model.norm.weight"),
    "an embedding in place": in_place("model.embed_tokens.weight"),
    "a weight replaced": replaced("model.layers.1.self_attn.o_proj.weight"),
    "a norm replaced": replaced("model.layers.0.input_layernorm.weight"),
    "a module replaced": other_mlp,
    "a forward overridden": overridden,
    "the configuration": fewer_layers,
}


def adapter(**options):
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **options)


def add_adapter(model, name="default"):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model.add_adapter(adapter(), name)
    model.eval()


def tuners(model):
    return [module for module in model.modules() if hasattr(module, "set_scale")]
