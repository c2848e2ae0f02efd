"""Passes that leave out some attention and MLP sublayers, so that only the residual stream goes on past them (Draft & Verify, Zhang et
al. 2023).

A sublayer that is left out is replaced, for the length of a pass, by a module that returns zeros in the form that its layer expects. A
layer without either sublayer is not entered at all.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from foredraft.errors import ConfigurationError, UnsupportedModelError
from foredraft.files import read_text, replacing
from foredraft.models.features import first_tensor
from foredraft.models.identity import TargetShape, refuse_another_model, shape_of
from foredraft.models.layers import LayerRanges, Passing, outputs_of
from foredraft.models.support import describe, input_device

FORMAT = "foredraft skip set 1"


@dataclass(frozen=True)
class SkipSet:
    """The decoder layers, from 0 and ascending, whose attention and whose MLP is left out."""

    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("attention", "mlp"):
            given = getattr(self, name)
            if not isinstance(given, Sequence) or not all(isinstance(each, int) and not isinstance(each, bool) for each in given):
                raise ConfigurationError(f"{name} must list layers by number, from 0 on, got {given!r}")
            object.__setattr__(self, name, tuple(sorted(set(given))))

    @staticmethod
    def parse(text: str) -> SkipSet:
        """The set in words such as ``attention=1,3 mlp=2``.

        Raises:
            ConfigurationError: ``text`` is not of this form.
        """
        if not isinstance(text, str):
            raise ConfigurationError(f"a set of sublayers is a SkipSet, or words such as 'attention=1,3 mlp=2,4'; got {text!r}")
        parts = [part.partition("=")[::2] for part in text.split()]
        try:
            if sorted(name for name, _ in parts) not in (["attention"], ["mlp"], ["attention", "mlp"]):
                raise ValueError
            return SkipSet(**{name: tuple(map(int, layers.split(","))) for name, layers in parts})
        except ValueError:
            raise ConfigurationError(f"a set of sublayers is written as 'attention=1,3 mlp=2,4', layers from 0 on, got {text!r}") from None

    def __str__(self) -> str:
        """As :meth:`parse` reads it."""
        return " ".join(f"{name}={','.join(map(str, layers))}" for name, layers in asdict(self).items() if layers)

    @property
    def first(self) -> int:
        """The first layer with a sublayer that is left out: what comes before is the same in every pass."""
        return min((*self.attention, *self.mlp))

    @property
    def whole(self) -> tuple[int, ...]:
        """The layers without either sublayer."""
        return tuple(sorted({*self.attention} & {*self.mlp}))

    def save(self, path: str | Path, model: PreTrainedModel, trials: Sequence[Any] = (), **about: Any) -> None:
        """Write the set, the shape and vocabulary of ``model``, ``trials``, and what else is known ``about`` them: any values of JSON."""
        held = {"format": FORMAT, "target": asdict(shape_of(model)), **asdict(self), "trials": list(trials), **about}
        with replacing(path) as new:
            new.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path, model: PreTrainedModel) -> SkipSet:
        """The set in a file that :meth:`save` wrote for ``model``.

        Raises:
            ConfigurationError: there is no such file, it holds something else, or it was written for another model.
        """
        held = read(path)
        refuse_another_model(f"the skip set in {str(path)!r} was made", held["target"], model, "search one (foredraft skip search)")
        return SkipSet(held["attention"], held["mlp"])


def read(path: str | Path) -> dict[str, Any]:
    """What :meth:`SkipSet.save` wrote: ``target``, a :class:`TargetShape`, ``attention``, ``mlp`` and ``trials``.

    Raises:
        ConfigurationError: there is no such file, or it holds something else.
    """
    try:
        held = json.loads(read_text(Path(path)))
        if not isinstance(held, dict):
            raise ValueError("it holds no object")
        if held["format"] != FORMAT:
            raise ValueError(f"its format is {held['format']!r}, not {FORMAT!r}")
        own = {name: held[name] for name in ("attention", "mlp")}
        return {**held, **own, "target": TargetShape(**held["target"]), "trials": list(held["trials"])}
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigurationError):
            raise
        why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigurationError(f"{str(path)!r} is no file of 'foredraft skip search': {why}") from error


class LeftOut(nn.Module):
    """Stands in for a sublayer, and has its attributes. Of ``outputs`` values it returns the first as zeros and the others as None; for
    a sublayer that adds the residual itself (BLOOM), it returns the residual rather than zeros."""

    def __init__(self, sublayer: nn.Module, outputs: int | None):
        super().__init__()
        names = list(inspect.signature(type(sublayer).forward).parameters)[1:]
        residual = names.index("residual") if "residual" in names else None
        vars(self).update(sublayer=sublayer, outputs=outputs, residual=residual)  # not as a submodule

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["sublayer"], name)

    def forward(self, *given: Any, **named: Any) -> Any:
        if self.residual is None:
            out = torch.zeros_like(first_tensor(given, named))
        else:
            out = named["residual"] if "residual" in named else given[self.residual]
        return out if self.outputs is None else (out, *[None] * (self.outputs - 1))


class Sublayers:
    """The attention and the MLP of each decoder layer, and passes without some of them.

    A mixture of experts is an MLP. Layers whose MLP is no module of its own (OPT, XGLM, BioGPT) can leave out their attention alone.

    Args:
        ranges: those of ``model``, if they are known.

    Attributes:
        attention: the module of each layer.
        mlp: likewise, None where there is none.

    Raises:
        UnsupportedModelError: its layers or their sublayers cannot be left out; the message says why.
    """

    def __init__(self, model: PreTrainedModel, ranges: LayerRanges | None = None):
        self.model, self.ranges = model, ranges or LayerRanges(model)
        self.count = self.ranges.count
        self._names = [self._found(layer) for layer in self.ranges.layers]
        self.attention: list[nn.Module] = [getattr(layer, names[0]) for layer, names in zip(self.ranges.layers, self._names)]
        self.mlp: list[nn.Module | None] = [
            None if names[1] is None else getattr(layer, names[1]) for layer, names in zip(self.ranges.layers, self._names)
        ]
        outputs = outputs_of(model, [each for each in (*self.attention, *self.mlp) if each is not None])
        self._stand_ins = {id(each): LeftOut(each, None if isinstance(out, Tensor) else len(out)) for each, out in outputs.items()}
        self._test()

    @property
    def most(self) -> SkipSet:
        """Every sublayer that can be left out."""
        return SkipSet(tuple(range(self.count)), tuple(index for index, mlp in enumerate(self.mlp) if mlp is not None))

    @property
    def spread(self) -> SkipSet:
        """A set for models of which nothing is known: the MLP of every second layer but the first and the last; attention where there
        are no MLPs."""
        layers = tuple(range(min(1, self.count - 1), max(2, self.count - 1), 2))
        return SkipSet(layers) if None in self.mlp else SkipSet((), layers)

    def check(self, skip: SkipSet) -> None:
        """
        Raises:
            ConfigurationError: nothing is left out, or everything, or a sublayer that the model does not have; the message says which.
        """
        name = describe(self.model)
        if not skip.attention and not skip.mlp:
            raise ConfigurationError("a skip set must leave out at least one sublayer; for a draft of the whole model use drafter 'none'")
        wrong = [layer for layer in (*skip.attention, *skip.mlp) if not 0 <= layer < self.count]
        if wrong:
            raise ConfigurationError(f"the skip set names layer {wrong[0]}, but {name} has layers 0 to {self.count - 1}")
        missing = [layer for layer in skip.mlp if self.mlp[layer] is None]
        if missing:
            raise ConfigurationError(f"the MLP of layer {missing[0]} of {name} is no module of its own; leave out attention alone")
        if skip == self.most:
            raise ConfigurationError(f"the skip set leaves out every sublayer of {name} that can be; keep at least one")

    @contextmanager
    def left_out(self, skip: SkipSet) -> Iterator[Passing]:
        """Inside, a pass of the model leaves ``skip`` out, which :meth:`check` has nothing against; ``found`` is what layer ``skip.first``
        is given."""
        whole, layers = set(skip.whole), self.ranges.layers
        with self.ranges.only(0, self.count, aside=skip.whole) as passing, ExitStack() as undone:

            def note(layer: nn.Module, given: Any, named: Any) -> None:
                passing.found = first_tensor(given, named)

            undone.enter_context(self._replaced(*([each for each in part if each not in whole] for part in (skip.attention, skip.mlp))))
            undone.callback(layers[skip.first].register_forward_pre_hook(note, with_kwargs=True).remove)
            yield passing

    @contextmanager
    def _replaced(self, attention: Iterable[int], mlp: Iterable[int]) -> Iterator[None]:
        """Inside, modules that return zeros stand in for these sublayers."""
        layers = list(self.ranges.layers)
        kept = [(layer, dict(layer._modules)) for layer in layers]
        try:
            for place, indices in enumerate((attention, mlp)):
                for index in indices:
                    name = self._names[index][place]
                    assert name is not None
                    layers[index]._modules[name] = self._stand_ins[id(kept[index][1][name])]
            yield
        finally:
            for layer, modules in kept:
                layer._modules.update(modules)

    def _found(self, layer: nn.Module) -> tuple[str, str | None]:
        """The names of the attention and of the MLP of ``layer``: the children that are made of modules themselves."""
        children = {name: child for name, child in layer.named_children() if next(child.children(), None) is not None}
        attention = [name for name, child in children.items() if "att" in name and hasattr(child, "layer_idx")]
        others = [name for name in children if name not in attention]
        if len(attention) != 1:
            raise self._refusal(f"{type(layer).__name__} has no module that is its attention alone")
        return attention[0], others[0] if len(others) == 1 else None

    def _test(self) -> None:
        """Without its sublayers, each layer must return its input."""
        if not getattr(self.model.config.get_text_config(), "do_layer_norm_before", True):
            raise self._refusal("they norm what comes out of their sublayers, so that more than the residual would be left")
        if None in self.mlp:
            return
        states: list[Tensor] = []
        with ExitStack() as undone:
            undone.enter_context(self._replaced(self.most.attention, self.most.mlp))
            for layer in self.ranges.layers:
                before = layer.register_forward_pre_hook(lambda _, *given: states.append(first_tensor(*given)), with_kwargs=True)
                after = layer.register_forward_hook(lambda _, given, output: states.append(first_tensor(output)))
                undone.callback(before.remove)
                undone.callback(after.remove)
            try:
                with torch.inference_mode():
                    self.model(input_ids=torch.arange(2, device=input_device(self.model))[None], use_cache=False)
            except (TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise self._refusal(f"without them a pass fails with {error}") from error
        if not all(torch.allclose(given, output, atol=1e-3) for given, output in zip(states[::2], states[1::2])):
            raise self._refusal("without them, their layers still change what they are given")

    def _refusal(self, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"sublayers of {describe(self.model)} cannot be left out: {why}; use another drafter")
