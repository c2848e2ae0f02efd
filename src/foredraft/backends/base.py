"""The interface of a backend: one forward pass in, logits and hidden states out. Nothing here knows how a pass is made.

A backend owns the cache that its passes read and write. :attr:`Backend.reasons` says which other ways to make passes are not in use, and
why.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from foredraft.backends.rounding import explained
from foredraft.errors import first_line
from foredraft.models.cache import Window
from foredraft.models.encoder_decoder import Source
from foredraft.models.features import Features
from foredraft.models.skips import SkipSet
from foredraft.models.support import ModelFacts, is_half, tolerance
from foredraft.tree import TokenTree


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """The request for one pass.

    Attributes:
        tree: all nodes so far; the newest ``window.nodes`` of them are read now.
        window: the rows and slots that the pass reads and writes.
        tokens: ``[R, nodes]`` of the nodes that are read now, inside the vocabulary.
        keep: the one node per row whose logits are wanted, in the prefill of prompts; None for all nodes.
        prompts: how many nodes of each row, from the first on, are of a prompt that plain decoding would read in one pass; None for none.
        part: the layers that are run; None for all of them.
        ends: a prompt ends in this pass. If not, nobody reads its logits, and backends may leave them out.
    """

    tree: TokenTree
    window: Window
    tokens: Tensor
    keep: Sequence[int] | None = None
    prompts: Sequence[int] | None = None
    part: Part | None = None
    ends: bool = True

    @property
    def uniform_chain(self) -> bool:
        """A chain in which all rows start at the same slot, so that every node sees the slots up to its own."""
        return self.tree.chain and self.window.uniform


@dataclass(frozen=True, eq=False)
class Part:
    """Layers ``begin`` up to ``end`` (exclusive) of a pass.

    Attributes:
        states: ``[R, nodes, d]`` the output of layer ``begin`` - 1, or what the first layer reads in place of the embeddings; None for
            these.
        logits: whether to apply the model's final norm and LM head to the output.
        skip: sublayers that are left out; for a part with all layers only.
    """

    begin: int
    end: int
    states: Tensor | None = None
    logits: bool = True
    skip: SkipSet | None = None


@dataclass(frozen=True, eq=False)
class PassOutput:
    """The output of a pass.

    Attributes:
        logits: ``[R, nodes, V]``, or ``[R, 1, V]`` if one node per row was asked for; for a part without logits, ``[R, nodes, d]`` its last
            states after the final norm.
        hidden: for a part, ``[R, nodes, d]`` the output of its last layer (None if that is the model's last), or with ``skip`` the input of
            layer ``skip.first``; otherwise
            ``[R, nodes, F * d]`` the wanted hidden states (``[R, 1, F * d]`` with ``keep``, unless they are wanted for whole texts);
            None if there are none. Values at filler are arbitrary.
    """

    logits: Tensor
    hidden: Tensor | None = None


@dataclass(frozen=True)
class Routing:
    """A mixture of experts whose kernels count the experts that a pass touches.

    Attributes:
        experts: of a layer.
        chosen: of these, by each token.
        weight: bytes of one expert of every layer, relative to what a pass reads besides experts.
    """

    experts: int
    chosen: int
    weight: float


class Overrides(Protocol):
    """Faster replacements of a model's layers, and how to take them back."""

    @property
    def name(self) -> str:
        """``packed``, ``native`` or ``compiled``."""

    @property
    def hints(self) -> Sequence[int]:
        """The layouts of :mod:`foredraft.backends.packing` that weights were packed in; none if they were not packed."""

    def pack(self) -> None:
        """Replace the layers again, after :meth:`unpack`."""

    def unpack(self) -> None:
        """Give the model its own weights back, if they are held in another form."""

    def unfuse(self, why: str) -> bool:
        """Leave decoders that are one call to their own layers from now on, because of ``why``. False if there are none."""

    def undo(self) -> None:
        """Leave the model as it was found."""


class Backend:
    """Base of backends; a subclass has a ``cache`` and writes :meth:`forward`.

    Args:
        facts: the model, and what is known of it.
        overrides: what its layers were replaced by; None if they are its own.
        reasons: why other ways to make passes are not in use, by their names.

    Attributes:
        passes: how many were made.
        features: the hidden states that passes return; None for none.
        ragged: nothing is computed for the filler of rows of a chain.
        direct: the model as one call of a kernel, or None; draft loops use it.
        pages: the model's attention over a cache in pages (:mod:`foredraft.backends.paged_attention`); None if layers read what the
            cache returns, or are kernels.
        warm_up: passes of one kind until they reach their full speed.
        settling: how many passes took longer than later ones of their kind will.
        touched: how many experts of a layer, on average, some token of the last pass took; None as of :attr:`routing`, or if only some
            layers were run.
    """

    cache: Any
    ragged = False
    direct: Any = None
    pages: Any = None
    warm_up = 0
    settling = 0
    touched: float | None = None

    def __init__(self, facts: ModelFacts, overrides: Overrides | None, reasons: dict[str, str]):
        self.facts, self.overrides, self.reasons = facts, overrides, reasons
        self.passes = 0
        self.features: Features | None = None

    @property
    def name(self) -> str:
        return "eager" if self.overrides is None else self.overrides.name

    @property
    def hints(self) -> Sequence[int]:
        """As :attr:`Overrides.hints`."""
        return () if self.overrides is None else self.overrides.hints

    def encode(self, sources: Sequence[Source], keys: Sequence[Hashable]) -> None:
        """The rows that are opened next have these ``sources``. The encoder reads those that it has not read for rows of equal ``keys``.

        Raises:
            ConfigurationError: it cannot read one.
            CacheMemoryError: there is no room for them; nothing has changed.
        """
        raise TypeError(f"{type(self).__name__} makes no passes of models with an encoder")

    def source_length(self, source: Source) -> int:
        """How many states the encoder makes of a source, at most."""
        raise TypeError(f"{type(self).__name__} makes no passes of models with an encoder")

    def open(self, lengths: Sequence[int], sources: Sequence[Source] = ()) -> None:
        """Append rows that hold ``lengths`` tokens already. If the model has an encoder and they were not given to :meth:`encode`, they
        have one of ``sources`` each."""
        if sources:
            self.encode(sources, [source.key for source in sources])
        self.cache.open(lengths)

    @property
    def routing(self) -> Routing | None:
        """The mixtures of experts of the model; None if there are none, or if nothing counts the experts that a pass touches."""
        return None

    def forward(self, given: ForwardPass) -> PassOutput:
        """Make one pass."""
        raise TypeError(f"{type(self).__name__} must define forward(given)")

    def decode(self, ids: Sequence[int], *, most: int, ends: Collection[int], draws: Any) -> tuple[list[int], Tensor] | None:
        """Several plain passes in one call, as ``NativeGrowth.decode`` makes them, or None."""
        return None

    def read(self, features: Features | None) -> None:
        """Have passes return these hidden states from now on."""
        self.features = features

    def roomy(self, tokens: int) -> int:
        """The capacity to reserve for rows of so many tokens."""
        return tokens

    def forget_model(self) -> None:
        """The model has changed: drop what passes have stored, and pack weights again. Replacements of layers learn of changes on their own
        (:mod:`foredraft.models.changes`)."""
        self.release()
        if self.overrides is not None:
            self.overrides.pack()

    def release(self) -> None:
        """Give the memory back."""
        self.cache.forget()

    def close(self) -> None:
        """Release everything and leave the model as it was found; no more passes after this."""
        self.release()
        if self.overrides is not None:
            self.overrides.undo()
            self.overrides = None


def tree_window(tree: TokenTree, lengths: Sequence[int], first: int = 0) -> Window:
    """The window of a pass over the nodes of ``tree`` from ``first`` on, in all rows."""
    counts = None if first or tree.rows == 1 or tree.tokens.device.type != "cpu" else tree.counts
    return Window(0, len(lengths), tuple(length + first for length in lengths), tree.nodes - first, first, counts)


def failure(error: BaseException) -> str:
    return f"a pass failed with {type(error).__name__}: {first_line(error)}"


def differs(model: Any, found: Tensor, expected: Tensor, what: str = "logits") -> str | None:
    """How ``found`` ``[R, N, V]`` differs from ``expected``, which an eager pass of ``model`` returned; None if it is close. NaN is not.

    In half precision a quarter of the nodes may differ by more: experts are chosen by scores that rounding may reorder.
    """
    errors = (found.float() - expected.float()).abs().amax(-1).flatten() / expected.float().abs().max().clamp(min=1e-6)
    difference = float(errors.quantile(0.75 if is_half(model) else 1.0, interpolation="lower"))
    if difference <= tolerance(model) or difference <= explained(model):
        return None
    return f"its {what} differ from those of an eager pass by {difference:.1e} of their scale"
