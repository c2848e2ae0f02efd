"""``attach``: from now on ``model.generate`` of one model object speculates, whoever calls it."""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from types import MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from foredraft.drafters.base import Drafter
from foredraft.errors import ConfigurationError
from foredraft.models.changes import ModelState, dropout_of
from foredraft.models.support import unwrap
from foredraft.speculator import Speculator, begin, ending
from foredraft.stats import Stats


def attach(model: PreTrainedModel, drafter: Drafter | PreTrainedModel | str = "prompt-lookup", **options: Any) -> Attached:
    """Make ``model.generate`` of this object speculate, so that programs which call it do so too, unchanged.

    ``model.generate`` takes the same arguments, applies the same defaults and returns the same as before: a tensor, or with
    ``return_dict_in_generate=True`` a :class:`~foredraft.SpeculativeOutput`. It also takes ``seed`` and ``output_logprobs``, as in
    :meth:`Speculator.generate`. A ``streamer`` gets each token of a single row, as from transformers. What cannot be honoured, such as
    ``num_beams``, ``assistant_model`` or ``synced_gpus``, raises :class:`ConfigurationError` and names the argument.

    Nothing else of the model changes. You can train it, save it, or change its adapters between calls. Copies and pickles of it are not
    attached. A model in training mode is put into evaluation mode for each call; one whose dropout is active is refused. Attaching
    again replaces what was attached before. One call runs at a time: another thread gets :class:`~foredraft.BusyError`, or waits with
    ``wait=True``.

    Args:
        model: a causal ``PreTrainedModel``, also within PEFT's wrapper or ``torch.compile``.
        drafter: as in :class:`Speculator`.
        options: those of :class:`Speculator`.

    Returns:
        What ``model.generate`` is now. ``stats`` holds the statistics of the last call, ``speculator`` is the :class:`Speculator`.

    Raises:
        ConfigurationError: as :class:`Speculator` does, or something else has replaced ``model.generate`` before.
    """
    if isinstance(model, str | Path):
        raise ConfigurationError(f"attach takes a model object, got {model!r}; load it first, or use foredraft.Speculator")
    model = _uncompiled(model)
    unwrap(model)  # refuses what is no model
    if _attached(model) is not None:
        detach(model)
    evaluation = Evaluation(model)
    with evaluation:
        model.generate = attached = Attached(model, Speculator(model, drafter, **options), evaluation)  # type: ignore[method-assign]
    return attached


def detach(model: PreTrainedModel) -> None:
    """Undo :func:`attach`: ``model.generate`` is transformers' own again, and the memory of the cache is freed.

    Raises:
        ConfigurationError: the model is not attached.
        BusyError: another thread is generating.
    """
    model = _uncompiled(model)
    attached = _attached(model)
    if attached is None:
        raise ConfigurationError(f"this {type(model).__name__} is not attached: foredraft.attach(model) was not called on this object")
    attached.speculator.close()
    del model.generate


class Attached:
    """``model.generate`` of an attached model. See :func:`attach`.

    Attributes:
        speculator: what generates.
        stats: the statistics of the last call (:class:`foredraft.Stats`), None before the first.
    """

    def __init__(self, model: PreTrainedModel, speculator: Speculator, evaluation: Evaluation):
        self._model, self.speculator, self._evaluation = model, speculator, evaluation
        self.stats: Stats | None = None
        self.__signature__ = inspect.signature(MethodType(type(speculator.target.model).generate, model))
        self.__doc__ = type(model).generate.__doc__

    def __call__(self, *args: Any, **arguments: Any) -> Any:
        given = self.__signature__.bind(*args, **arguments).arguments
        given |= given.pop("kwargs", {})
        with ExitStack() as inside:
            with ending(given.get("streamer")):
                inside.enter_context(self._evaluation)
            try:
                run = begin(self.speculator, as_asked=True, **given)
            except ConfigurationError as error:
                raise ConfigurationError(f"{error}. The model is attached; foredraft.detach(model) restores its own generate") from error
            self.stats = run.stats
            return run.finish_as_asked()

    def __reduce__(self) -> Any:
        """A copy of the model, or what is unpickled, has its class's ``generate``."""
        return getattr, (self._model, "generate")


def _uncompiled(model: Any) -> Any:
    """The module inside ``torch.compile``, whose attributes are this one's."""
    return getattr(model, "_orig_mod", model)


def _attached(model: PreTrainedModel) -> Attached | None:
    """What is attached to the model.

    Raises:
        ConfigurationError: something else was put in the place of ``model.generate``.
    """
    own = vars(model).get("generate")
    if own is None or own == MethodType(type(model).generate, model):
        return None
    if not isinstance(own, Attached):
        raise ConfigurationError(f"model.generate of this object was replaced by {own!r}; undo that first (del model.generate)")
    return own


class Evaluation:
    """The model in evaluation mode while any thread is inside, and afterwards as it was: trainers generate in training mode. Whoever enters
    sees what an optimizer has done: if the model was in training mode, its weights count as changed.

    Raises:
        ConfigurationError: dropout is active, so that every pass would differ.
    """

    def __init__(self, model: PreTrainedModel):
        self._model, self._base, self._lock = model, unwrap(model), Lock()
        self._inside, self._training = 0, list[nn.Module]()

    def __enter__(self) -> None:
        with self._lock:
            training = [module for module in self._model.modules() if module.training]
            for module in training:
                if (rate := dropout_of(module)) is not None:
                    raise ConfigurationError(
                        f"the model is in training mode and {type(module).__name__} has dropout ({rate}), so that every pass differs; "
                        "set its dropout to 0, or call model.eval() before generating"
                    )
            self._inside += 1
            self._training += training
            for module in training:
                module.training = False
            if training:  # by whatever optimizer: some write to weights without a trace
                ModelState.of(self._base).mark("weights")

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            while not self._inside and self._training:
                self._training.pop().training = True
