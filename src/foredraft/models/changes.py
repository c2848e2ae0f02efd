"""Everything that the text of a model depends on, in one place: has any of it changed since the last look?

That is its modules and their classes, weights and buffers, hooks, overridden ``forward`` methods, adapters with their scales, the
configuration with its attention, and training mode. A look compares lists that are read in C and costs about 0.1 ms for a
model of 24 layers, so there is one before each call. All who run a model share one :class:`ModelState`; each asks what has changed since
*its* last look.

Two kinds of writes leave no trace: those through ``.data`` or to tensors of inference mode, and those to attributes of a module that
are none of the above. :meth:`foredraft.Speculator.release` is for them.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, compress, repeat
from operator import and_, attrgetter, is_
from types import NoneType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from transformers import PreTrainedConfig, PreTrainedModel

from foredraft.errors import UnsupportedModelError
from foredraft.models.features import stop_watching

Kind = Literal["modules", "configuration", "weights", "merged adapters", "adapters", "hooks", "mode"]
STRUCTURE: frozenset[Kind] = frozenset(("modules", "configuration"))  # what decides how passes are made
NUMBERS: frozenset[Kind] = frozenset(("weights", "merged adapters"))  # what copies of weights are made from

flatten = chain.from_iterable
VERSION, FORWARD = attrgetter("_version"), attrgetter("forward")
CHECKPOINTING = "gradient_checkpointing"  # the attribute that switches it on
TRIVIAL = ("use_cache", "_name_or_path")  # of a configuration; passes do not read them, nor the ids of tokens


class ModelState:
    """What one model was made of at the last look. Use :meth:`of`.

    Attributes:
        counts: how often each kind of thing was found changed.
        followers: objects that are told at once, whoever looks: replacements of the model's own layers. Their ``follow(changed)`` raises
            ConfigurationError if a change cannot be followed; they are then asked again at the next look.
    """

    def __init__(self, model: PreTrainedModel):
        self._model = weakref.ref(model)
        self.counts: Counter[Kind] = Counter()
        self.followers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.note()

    @staticmethod
    def of(model: PreTrainedModel) -> ModelState:
        """The one state of ``model``, for as long as anybody holds it."""
        state = STATES.get(id(model))
        if state is None or state._model() is not model:
            state = STATES[id(model)] = ModelState(model)
        return state

    def look(self, seen: Mapping[Kind, int]) -> set[Kind]:
        """What has changed since :attr:`counts` were ``seen``.

        Raises:
            UnsupportedModelError: the model, or a part of it that drops out, is in training mode.
            ConfigurationError: a follower cannot follow.
        """
        model = self._model()
        assert model is not None
        stop_watching(model)
        if self._snapshot.trains:
            check_mode(model)
        changed = self._snapshot.differences(model)
        if changed:
            with torch.inference_mode(False), torch.no_grad():
                for each in list(self.followers):
                    each.follow(changed)
            self.counts.update(changed)
            self.note()
        return {kind for kind, count in self.counts.items() if count != seen.get(kind, 0)}

    def note(self) -> None:
        """Take the model's state as known. For callers that have just changed the model in ways that its text does not depend on."""
        model = self._model()
        assert model is not None
        self._snapshot = Snapshot(model)

    def mark(self, *kinds: Kind) -> None:
        """Count ``kinds`` as changed, and also what nobody has looked for yet, which :meth:`note` would forget."""
        model = self._model()
        assert model is not None
        stop_watching(model)
        self.counts.update({*kinds, *self._snapshot.differences(model)})


STATES: weakref.WeakValueDictionary[int, ModelState] = weakref.WeakValueDictionary()


class Structure:
    """The modules inside ``module``, their classes, and what overrides their ``forward``. The dictionaries of the modules are kept and read
    again."""

    def __init__(self, module: nn.Module):
        modules = list(module.modules())
        self.children = [each._modules for each in modules]
        self.namespaces = [vars(each) for each in modules]
        self.classes = list({type(each): None for each in modules})
        self.known = self.read()

    def read(self) -> tuple[Any, ...]:
        children = [*contents(self.children)]
        return children, [*map(type, children)], [*map(FORWARD, self.classes)], [*map(dict.get, self.namespaces, repeat("forward"))]

    @property
    def changed(self) -> bool:
        return self.read() != self.known


class Snapshot:
    """What a model is made of. The dictionaries of its modules are kept and read again at each look."""

    def __init__(self, model: nn.Module):
        modules = list(model.modules())
        self._holders = [vars(module)[name] for module in modules for name in ("_parameters", "_buffers")]
        self._hooks = hooks_of(model)
        tuners = [module for module in modules if hasattr(type(module), "_disable_adapters")]
        self._tuners, self._scales = tuners, [each for module in tuners if isinstance(each := vars(module).get("scaling"), dict)]
        tensors = [*contents(self._holders)]
        self._tensors: list[Callable[[], Any]] = [NoneType if each is None else weakref.ref(each) for each in tensors]
        self._on_meta = [each is not None and each.is_meta for each in tensors]
        longrope = [module for module in modules if "longrope" in str(vars(module).get("rope_type"))]  # each pass writes their frequencies
        written = {id(each) for module in longrope for name, each in module._buffers.items() if not name.endswith("original_inv_freq")}
        versioned = [each is not None and id(each) not in written and not each.is_inference() for each in tensors]
        placed, resident = [*map(has_address, tensors)], [not meta for meta in self._on_meta]
        self._masks = {  # of placeholders, and of all others: which have a version, which have an address, and which they are
            meta: [[*map(and_, mask, mine)] for mask in (versioned, placed, mine)]
            for meta, mine in ((True, self._on_meta), (False, resident))
        }
        self._parts = {type(each): parts for each in tensors if (parts := parts_of(each)) is not None}
        self._config = vars(model).get("config")
        configs = {id(each): each for module in modules if isinstance(each := vars(module).get("config"), PreTrainedConfig)}
        self._configs = [*configs.values()]
        self._settings = [*map(copied, map(vars, self._configs))]
        self._structure = Structure(model)
        self._values, self._written = self._read_values(tensors, meta=False), self._read_values(tensors, meta=True)
        self._hooked, self._adapted = self._read_hooks(), self._read_adapters()
        self._dropping = [vars(model), *(vars(module) for module in modules if rates_of(module) or hasattr(module, CHECKPOINTING))]
        self._training = self._read_training()

    @property
    def trains(self) -> bool:
        """Some of the modules that drop out or checkpoint are in training mode, or the model is."""
        return True in self._read_training()

    def differences(self, model: nn.Module) -> set[Kind]:
        changed: set[Kind] = set()
        if self._structure.changed:
            changed.add("modules")
        if vars(model).get("config") is not self._config or any(map(differ, self._configs, self._settings)):
            changed.add("configuration")
        tensors = [*contents(self._holders)]
        known = [ref() for ref in self._tensors]
        exchanged = not same(tensors, known)
        kept = not exchanged or (
            len(tensors) == len(known)
            and all(new is old or (meta and new is not None and new.is_meta) for new, old, meta in zip(tensors, known, self._on_meta))
        )
        written = kept and not exchanged and self._read_values(tensors, meta=True) != self._written
        if not kept or written or self._read_values(tensors, meta=False) != self._values:
            changed.add("weights")
        if self._read_hooks() != self._hooked:
            changed.add("hooks")
        adapted = self._read_adapters()
        if adapted[0] != self._adapted[0]:
            changed.add("merged adapters")
        if adapted[1:] != self._adapted[1:]:
            changed.add("adapters")
        if self._read_training() != self._training:
            changed.add("mode")
        if exchanged and not changed:  # offloaded weights have other placeholders after each pass
            self.__init__(model)  # type: ignore[misc]
        return changed

    def _read_training(self) -> list[Any]:
        return [*map(dict.get, self._dropping, repeat("training"))]

    def _read_values(self, tensors: Sequence[Any], *, meta: bool) -> tuple[Any, ...]:
        """What a write to the placeholders among ``tensors`` would change, or to the others."""
        versioned, placed, every = self._masks[meta]
        versions = [*map(VERSION, compress(tensors, versioned))]
        addresses = [*map(Tensor.data_ptr, compress(tensors, placed))]
        mine = [*compress(tensors, every)] if self._parts else []
        parts = [each for kind, read in self._parts.items() for tensor in mine if type(tensor) is kind for each in read(tensor)]
        return versions, addresses, [(id(each), None if each.is_inference() else each._version) for each in parts]

    def _read_hooks(self) -> list[int]:
        """Their numbers, which torch never uses twice."""
        return [*flatten(filter(None, self._hooks))]

    def _read_adapters(self) -> tuple[Any, ...]:
        merged = [*map(tuple, map(attrgetter("merged_adapters"), self._tuners))]
        active = [*map(tuple, map(attrgetter("_active_adapter"), self._tuners))]
        disabled = [*map(attrgetter("_disable_adapters"), self._tuners)]
        return merged, active, disabled, [*flatten(map(dict.items, self._scales))]


def contents(dictionaries: Iterable[dict[str, Any]]) -> Iterable[Any]:
    """The values of all of them; most are empty and cost little."""
    return flatten(map(dict.values, filter(None, dictionaries)))


def same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether these are the very same objects; they are not compared, which for tensors would take time."""
    return len(some) == len(others) and all(map(is_, some, others))


def has_address(tensor: Tensor | None) -> bool:
    """Whether ``tensor`` has an address; some tensors, such as quantised weights, have none."""
    try:
        return tensor is not None and tensor.data_ptr() is not None
    except RuntimeError:
        return False


def parts_of(tensor: Any) -> Any:
    """A function that reads the inner tensors of a subclass of tensors, such as a quantised weight; None for others."""
    if tensor is None or not hasattr(tensor, "__tensor_flatten__"):
        return None
    names = tensor.__tensor_flatten__()[0]
    return attrgetter(*names, names[0])


def differ(config: PreTrainedConfig, before: dict[str, Any]) -> bool:
    now = vars(config)
    return now != before and read_by_passes(now) != read_by_passes(before)


def read_by_passes(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in TRIVIAL and not name.endswith("_token_id")}


def copied(value: Any) -> Any:
    """``value`` with copies of lists and dictionaries, which may be written to."""
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    return [*map(copied, value)] if isinstance(value, list) else value


def check_mode(model: nn.Module) -> None:
    """Refuse a model in which something drops out at random.

    Raises:
        UnsupportedModelError: names it.
    """
    if model.training:
        raise UnsupportedModelError("the model is in training mode (dropout would make every pass different); call model.eval()")
    for name, module in model.named_modules():
        if module.training and dropout_of(module) is not None:
            raise UnsupportedModelError(f"{name} is in training mode (dropout would make every pass different); call model.eval()")
        if module.training and getattr(module, CHECKPOINTING, False):
            raise UnsupportedModelError(f"{name} is in training mode (gradient checkpointing keeps it from caching); call model.eval()")


def dropout_of(module: nn.Module) -> str | None:
    """The rate that ``module`` itself drops with in training mode, and its name; None if it drops nothing."""
    return next((f"{key}={value}" for key, value in rates_of(module).items() if isinstance(value, float) and value > 0), None)


def rates_of(module: nn.Module) -> dict[str, Any]:
    """What ``module`` itself has as rates of dropout."""
    return {key: value for key, value in vars(module).items() if "drop" in key or (key == "p" and "Dropout" in type(module).__name__)}


# -- hooks, which may be looked for in every pass -------------------------------------------------------------------------------


def hooks_of(module: nn.Module, *, inside: bool = False) -> list[Mapping[int, Any]]:
    """The dictionaries of hooks of ``module`` and of everything in it (``inside``: without its own), and of those for all modules:
    ``any`` of them says whether there are hooks now."""
    modules = [each for each in module.modules() if not (inside and each is module)]
    own = [hooks for each in modules for hooks in (each._forward_pre_hooks, each._forward_hooks)]
    return [*own, module_hooks._global_forward_pre_hooks, module_hooks._global_forward_hooks]


# -- overrides ------------------------------------------------------------------------------------------------------------------


class Override:
    """A replacement of the ``forward`` of ``layer``. Copied and unpickled layers have the ``forward`` of their class."""

    layer: Any

    def __reduce_ex__(self, protocol: Any) -> Any:
        return getattr, (self.layer, "forward")


def take_back(module: nn.Module, kind: type | tuple[type, ...]) -> None:
    """Give ``module`` the ``forward`` of its class back, unless somebody else has overridden it since."""
    if isinstance(vars(module).get("forward"), kind):
        del module.forward
