"""Mixtures of experts on the kernels in ``native``.

transformers keeps the weights of all experts of a layer in two tensors of three dimensions. They are packed once, expert by expert, like
linear layers in :mod:`foredraft.backends.packing`; those of four and eight bits
(:class:`~foredraft.quantization.grouped.GroupedTensor`) keep their bits. ``forward`` of such a module then computes the experts that the
model's own router chose. In the families of :data:`ROUTERS` the kernels route as well, and a whole layer is one call.

A pass reads only the experts that it uses, each of them once.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.backends import huge_pages, narrow, native
from foredraft.backends.narrow import LEAST, Format, format_of
from foredraft.backends.packing import DTYPES, Packing, held_elsewhere, placeholder
from foredraft.backends.products import BLOCK, NATIVE, Product, Rows, Source, in_blocks, in_order, padded_size, sources_of, unblocked
from foredraft.models.changes import Override, hooks_of, take_back
from foredraft.quantization.grouped import GroupedTensor

WEIGHTS = ("gate_up_proj", "down_proj")
ACTIVATIONS = {
    "SiLUActivation": native.SILU, "SiLU": native.SILU, "GELUTanh": native.GELU, "NewGELUActivation": native.GELU, "ReLU": native.RELU,
    "GELUActivation": native.EXACT,
}  # fmt: skip
INTERLEAVED = ("GptOssExperts",)  # rows of gate and `up` alternate, and their activation is clamped
SUMS = ("eager", "grouped_mm", "batched_mm")  # implementations whose order of sums is known


class Mixture(Override):
    """``forward`` of a module of experts, by a kernel. A copy of the module keeps it if it has replaced the module's weights.

    Attributes:
        about: the experts as the kernel sees them.
        taken: the placeholders of weights that packed ones have replaced.
    """

    def __init__(self, experts: Any):
        self.layer = experts
        gate_up, down = (self._matrices(name) for name in WEIGHTS)
        self.count, self.hidden, self.inner = len(experts.down_proj), len(down(0)), down(0).shape[1]
        self.dtype, self.padded = experts.down_proj.dtype, padded_size(self.inner)
        self.interleaved = type(experts).__name__ in INTERLEAVED
        self.gate_up = laid_out(self.count, lambda expert: changed(gate_up(expert), self._turns))
        self.down = laid_out(self.count, lambda expert: self._widened(down(expert)))
        self.biases: list[Tensor | None] = [None, None]
        if experts.has_bias:
            self.biases = [self._turns(experts.gate_up_proj_bias.detach().T).T.contiguous(), experts.down_proj_bias.detach().contiguous()]
        self.sources, self.taken, self._hooks = sources_of(experts), list[Source](), hooks_of(experts, inside=True)
        self.library = native.library(self.dtype)
        self.about = native.Experts(
            count=self.count,
            inner=self.padded,
            gate_up=self.gate_up.matrix,
            down=self.down.matrix,
            width=self.inner if self.down.format.grouped else self.padded,
            gate_up_bias=None if self.biases[0] is None else self.biases[0].data_ptr(),
            down_bias=None if self.biases[1] is None else self.biases[1].data_ptr(),
            by_number=experts.config._experts_implementation == "eager",
            activation=native.CLAMPED if self.interleaved else ACTIVATIONS[type(experts.act_fn).__name__],
            alpha=getattr(experts, "alpha", 0.0),
            limit=getattr(experts, "limit", 0.0),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all experts."""
        return sum(part.nbytes for stack in (self.gate_up, self.down) for part in (stack.packed, *stack.parts.values()))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__reduce_ex__(self, protocol) if self.taken else super().__reduce_ex__(protocol)

    def _matrices(self, name: str) -> Callable[[int], Tensor]:
        """``[outputs, inputs]`` of each expert."""
        weight = getattr(self.layer, name).detach()
        if isinstance(weight, GroupedTensor):
            return lambda expert: weight.mapped(lambda each: each[expert], transposed=False)
        return lambda expert: weight[expert].T if self.layer.is_transposed else weight[expert]

    def _turns(self, rows: Tensor) -> Tensor:
        """The rows of gate and `up` ``[2 * inner, ...]`` as ``[2 * padded, ...]``, in alternating blocks of 64."""
        gate, up = (rows[::2], rows[1::2]) if self.interleaved else rows.chunk(2)
        parts = [each.new_zeros(self.padded, each.shape[1]) for each in (gate, up)]
        for part, each in zip(parts, (gate, up)):
            part[: self.inner] = each
        return torch.stack([part.view(-1, BLOCK, part.shape[1]) for part in parts], 1).flatten(0, 2)

    def _widened(self, rows: Tensor) -> Tensor:
        """``[hidden, inner]`` padded with zeros; group-quantised weights need no padding."""
        return rows if isinstance(rows, GroupedTensor) else nn.functional.pad(rows, (0, self.padded - self.inner))

    def _in_order(self, rows: Tensor) -> Tensor:
        """The inverse of :meth:`_turns`."""
        parts = rows.view(-1, 2, BLOCK, rows.shape[1]).transpose(0, 1).flatten(1, 2)[:, : self.inner]
        return parts.transpose(0, 1).flatten(0, 1) if self.interleaved else parts.flatten(0, 1)

    def weights(self) -> Iterator[Tensor]:
        """The original weights, one tensor after the other; the integers of group-quantised ones."""
        for stack, ordered in ((self.gate_up, self._in_order), (self.down, lambda rows: rows[:, : self.inner])):
            turned = self.layer.is_transposed and not stack.format.grouped
            yield torch.stack([ordered(each).T if turned else ordered(each) for each in stack.weights()])

    def take(self, free: Callable[[nn.Parameter], bool]) -> None:
        """Replace those weights by placeholders that ``free`` allows."""
        names = [name for name in WEIGHTS if free(getattr(self.layer, name))]
        self.sources = [source for source in self.sources if source.name not in names]
        for name in names:
            if isinstance(weight := getattr(self.layer, name), GroupedTensor):
                narrow.take(weight)
            else:
                setattr(self.layer, name, placeholder(weight))
        self.taken = [source for source in sources_of(self.layer) if source.name in names]

    def originals(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Every placeholder, and the numbers of the weight that it stands for."""
        if self.taken:
            names = [source.name for source in self.taken]
            yield from ((getattr(self.layer, name), weight) for name, weight in zip(WEIGHTS, self.weights()) if name in names)

    def undo(self) -> None:
        """Give the module its own ``forward`` and weights back; weights that were replaced meanwhile stay."""
        take_back(self.layer, Mixture)
        placeholders = {source.name for source in self.taken if source.parameters.get(source.name) is source.parameter}
        for name, weight in zip(WEIGHTS, self.weights() if placeholders else ()):
            if name in placeholders and isinstance(parameter := getattr(self.layer, name), GroupedTensor):
                narrow.give_back(parameter, weight)
            elif name in placeholders:
                setattr(self.layer, name, nn.Parameter(weight, requires_grad=getattr(self.layer, name).requires_grad))

    @property
    def outdated(self) -> bool:
        """As :attr:`~foredraft.backends.products.Product.outdated`."""
        return bool(self.sources) and (torch.is_grad_enabled() or not all(source.kept for source in self.sources))

    def __call__(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor | None = None,
        top_k_weights: Tensor | None = None,
        *,
        router_indices: Tensor | None = None,
        routing_weights: Tensor | None = None,
    ) -> Tensor:
        """``[T, hidden]`` for inputs of that shape, and for each token the numbers and the weights of its experts, ``[T, k]``."""
        chosen, scores = (router_indices, routing_weights) if top_k_index is None else (top_k_index, top_k_weights)
        assert chosen is not None and scores is not None
        held = all(narrow.is_held(getattr(self.layer, name)) for name in WEIGHTS)
        if held and (self.outdated or any(self._hooks) or chosen.shape[-1] > native.MOST_CHOSEN):
            return type(self.layer).forward(self.layer, hidden_states, chosen, scores)
        if hidden_states.device.type != "cpu" or hidden_states.shape[-1] != self.hidden:
            found = f"{list(hidden_states.shape)} on {hidden_states.device}"
            raise RuntimeError(f"expected an input [..., {self.hidden}] on the CPU, got {found}")
        tokens = hidden_states.numel() // self.hidden
        if chosen.shape != scores.shape or chosen[..., 0].numel() != tokens:
            raise RuntimeError(f"expected experts and weights for {tokens} tokens, got {list(chosen.shape)} and {list(scores.shape)}")
        if (stray := chosen[(chosen < 0) | (chosen >= self.count)]).numel():  # of a hook, or of a router that drops tokens
            if held:
                return type(self.layer).forward(self.layer, hidden_states, chosen, scores)
            raise RuntimeError(f"a token is given expert {int(stray[0])}, and there are {self.count}: 0 to {self.count - 1}")
        x, ids, parts = hidden_states.to(self.dtype).contiguous(), chosen.long().contiguous(), scores.float().contiguous()
        out, threads = torch.zeros_like(x), torch.get_num_threads()
        about = native.Experts.from_buffer_copy(self.about)
        about.chosen, about.exact = chosen.shape[-1], int(scores.dtype != self.dtype)
        memory = torch.empty(self.library.experts_room(about, tokens, self.hidden, threads), dtype=torch.uint8, device="cpu")
        pointers = ids.data_ptr(), parts.data_ptr(), memory.data_ptr()
        self.library.experts_over(about, x.data_ptr(), out.data_ptr(), tokens, self.hidden, *pointers, threads)
        return out


@dataclass(frozen=True)
class Stack:
    """The matrices of all experts, one below the other, as ``experts.h`` reads them.

    Attributes:
        format: that of all.
        outputs: of each, a multiple of 64.
        packed: ``[E, ...]``.
        parts: what is read besides the weights, as :class:`native.Matrix` names it.
    """

    format: Format
    outputs: int
    packed: Tensor
    parts: dict[str, Tensor]

    @property
    def matrix(self) -> native.Matrix:
        pointers = {name: part.data_ptr() for name, part in {"values": self.packed, **self.parts}.items()}
        return native.Matrix(**pointers, **self.format.told, outputs=len(self.packed) * self.outputs)

    def weights(self) -> Iterator[Tensor]:
        """``[outputs, inputs]`` of each expert; the integers of group-quantised ones."""
        for each in self.packed:
            yield narrow.integers_from(each, self.outputs) if self.format.grouped else unblocked(each, self.outputs)


def laid_out(count: int, matrix: Callable[[int], Tensor]) -> Stack:
    """The stack of ``matrix(expert)`` of each expert."""
    packed, parts = None, list[dict[str, Tensor]]()
    for expert in range(count):
        weight = matrix(expert)
        words = narrow.words_of([weight.qdata]) if isinstance(weight, GroupedTensor) else in_order(weight)
        packed = huge_pages.room((count, *words.shape), words.dtype) if packed is None else packed
        packed[expert] = words
        parts.append(narrow.by_group([weight]) if isinstance(weight, GroupedTensor) else {})
    assert packed is not None
    together = {name: huge_pages.moved(torch.cat([each[name] for each in parts])) for name in parts[0]}
    packed = packed if isinstance(weight, GroupedTensor) else in_blocks(packed, weight.dtype)
    return Stack(format_of(weight, LEAST) or Format(), len(weight), packed, together)


def changed(weight: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """``weight`` with its rows changed."""
    return weight.mapped(change) if isinstance(weight, GroupedTensor) else change(weight)


def pack(packing: Packing) -> None:
    """Lay out the experts of the model of ``packing``, as far as there is a kernel for them."""
    shared = held_elsewhere(packing.model)
    for module in packing.model.modules():
        if packable(module):
            mixture = Mixture(module)
            packing.add(mixture)
            vars(module)["forward"] = mixture
            if packing.owned:
                mixture.take(lambda weight: id(weight) not in shared)


def packable(module: Any) -> bool:
    """Whether ``module`` has experts that transformers keeps and computes in a known way, of sizes that the kernel takes."""
    if not all(hasattr(module, name) for name in (*WEIGHTS, "_apply_gate", "is_transposed", "has_bias")) or "forward" in vars(module):
        return False
    weights = [getattr(module, name) for name in WEIGHTS]
    if any(not readable(each) or each.ndim != 3 for each in weights):
        return False
    interleaved = type(module).__name__ in INTERLEAVED
    plain = type(module)._apply_gate.__name__ == "_default_apply_gate" and type(getattr(module, "act_fn", None)).__name__ in ACTIVATIONS
    known = type(module).__module__.startswith("transformers.models.") and (interleaved or plain) and module.has_gate
    special = getattr(module, "has_post_expert_norm", False) or getattr(module, "_is_expert_parallel", False)
    hidden, inner = weights[1].shape[1:][:: -1 if module.is_transposed else 1]
    return (
        known
        and not special
        and module.config._experts_implementation in SUMS
        and len(weights[1]) <= native.MOST_EXPERTS
        and hidden % BLOCK == 0
        and weights[0].numel() == len(weights[1]) * 2 * inner * hidden
    )


def readable(weight: Any) -> bool:
    """Whether ``weight`` is in memory, in a dtype or format that the kernels multiply."""
    known = type(weight) is nn.Parameter or (isinstance(weight, GroupedTensor) and format_of(weight) is not None)
    return known and weight.dtype in DTYPES and narrow.is_held(weight)


@dataclass(frozen=True)
class Router:
    """How a class of routers chooses.

    Attributes:
        name: of the router in the mixture.
        routing: whether scores are the probabilities of all experts, those of the chosen, or the sigmoid of each logit.
        normed: whether the chosen scores are divided by their sum; None if the attribute ``norm_topk_prob`` says so.
        exact: scores stay in float32.
        float32: logits are computed in float32, also in models of another dtype.
        correction: the attribute that is added to scores for the choice only; None for nothing.
        unsorted: the chosen experts stay in the order in which ``torch.topk`` found them.
        by_best: groups of experts are judged by their best one, rather than by the sum of their best two.
    """

    name: str = "gate"
    routing: int = native.OF_ALL
    normed: bool | None = None
    exact: bool = False
    float32: bool = False
    correction: str | None = None
    unsorted: bool = False
    by_best: bool = False


BY_SIGMOID = Router(routing=native.OF_EACH, exact=True, float32=True, correction="e_score_correction_bias", unsorted=True)
ROUTERS = {
    "Qwen3MoeTopKRouter": Router(),
    "Qwen2MoeTopKRouter": Router(),
    "OlmoeTopKRouter": Router(),
    "MellumTopKRouter": Router(),
    "Mistral4TopkRouter": Router(unsorted=True),
    "MixtralTopKRouter": Router(normed=True, exact=True),
    "GptOssTopKRouter": Router("router", native.OF_CHOSEN, normed=False),
    **dict.fromkeys(
        (f"{each}TopkRouter" for each in ("Glm4Moe", "Glm4MoeLite", "DeepseekV3", "Dots1", "SolarOpen", "ExaoneMoe")), BY_SIGMOID
    ),
    "DeepseekV2TopkRouter": Router(normed=False, exact=True, float32=True, unsorted=True, by_best=True),
    "Ernie4_5_MoeTopKRouter": Router(normed=True, float32=True, correction="moe_statics.e_score_correction_bias"),
}
SHARED = ("shared_expert", "shared_experts")  # names of an expert that every token uses


class Experts:
    """The mixture of experts of a layer whose router is known, as the kernel of the layer sees it.

    Attributes:
        mixture: its experts.
        shared: the products of an expert that every token uses; None if there is none.
    """

    def __init__(self, mixture: Mixture, router: Any, known: Router, shared: tuple[Product, Product] | None, gate: Product | None):
        self.mixture, self.shared = mixture, shared
        weights = [router.weight.detach()]
        if gate is not None:
            (own,), (layer,) = gate.weights(), gate.layers
            weights.append(narrow.dequantized(layer.weight, own) if gate.quantised else own)
        weight, bias = torch.cat(weights), getattr(router, "bias", None)
        weight = weight.float() if known.float32 else weight
        self.router = Product([Rows(weight, None if bias is None else bias.detach(), *weight.shape)], NATIVE)
        self.router.sources = [source for module in router.modules() for source in sources_of(module)]
        self.router.sources += [] if gate is None else gate.sources
        self.correction = known.correction and operator.attrgetter(known.correction)(router).detach().float().flatten().contiguous()
        self.about = native.Experts.from_buffer_copy(mixture.about)
        self.about.router, self.about.chosen = self.router.matrix, router.top_k
        self.about.router32 = self.router.matrix.values if known.float32 else None
        self.about.correction = self.correction.data_ptr() if isinstance(self.correction, Tensor) else None
        grouped = getattr(router, "topk_method", "") != "greedy"  # of DeepSeek-V2
        self.about.groups, self.about.open = (getattr(router, "num_group", 1), getattr(router, "topk_group", 1)) if grouped else (1, 1)
        self.about.by_best = int(known.by_best)
        self.about.unsorted, self.about.least = int(known.unsorted), getattr(router, "norm_min", 0.0)
        self.about.factor = getattr(router, "routed_scaling_factor", 1.0)
        self.about.routing, self.about.exact = known.routing, int(known.exact)
        self.about.normed = int(router.norm_topk_prob if known.normed is None else known.normed)
        self.about.shared = native.GATED if gate is not None else native.UNGATED if shared is not None else 0

    @staticmethod
    def of(mlp: Any, packing: Packing) -> Experts | str:
        """The mixture of ``mlp``, or why the kernel of a layer does not take it."""
        mixture = vars(mlp.experts).get("forward")
        if not isinstance(mixture, Mixture):
            return f"the class, sizes or format of its experts ({type(mlp.experts).__name__}) are none that the kernels take"
        router = next((each for each in mlp.children() if type(each).__name__ in ROUTERS), None)
        if router is None:
            return f"how {type(mlp).__name__} chooses experts is not known to the kernels"
        if not 0 < router.top_k <= min(native.MOST_CHOSEN, mixture.count):
            return f"its router chooses {router.top_k} of {mixture.count} experts, and the kernels take up to {native.MOST_CHOSEN}"
        known = ROUTERS[type(router).__name__]
        names = {"experts", known.name}
        shared, gate = None, None
        for name in [each for each in SHARED if each in mlp._modules]:
            expert = getattr(mlp, name)
            gate_up, down = packing.product(expert.gate_proj, expert.up_proj), packing.product(expert.down_proj)
            if gate_up is None or down is None:
                return f"its {name} is not packed in the kernels' layout"
            shared, names = (gate_up, down), {*names, name}
        if "shared_expert_gate" in mlp._modules:
            gate = packing.product(mlp.shared_expert_gate)
            if gate is None:
                return "its shared_expert_gate is not packed in the kernels' layout"
            names.add("shared_expert_gate")
        if gate is not None and (known.float32 or getattr(router, "bias", None) is not None):
            return "its router has a bias or computes in float32, and its shared expert has a gate: the kernels do not take both"
        if odd := mlp._modules.keys() ^ names:
            return f"its mixture has or lacks parts that the kernels do not know: {', '.join(sorted(odd))}"
        if router.weight.dtype != mixture.dtype and not known.float32:
            return f"its router is in {router.weight.dtype}, its experts are in {mixture.dtype}"
        return Experts(mixture, router, known, shared, gate)

    @property
    def outdated(self) -> bool:
        return self.mixture.outdated or self.router.outdated


def worst(errors: Tensor, dtype: torch.dtype, *, routed: bool) -> Tensor:
    """The largest of ``errors`` ``[..., V]``. If tokens are ``routed`` to experts in half precision, a quarter of the tokens is left
    out, since rounding alone may choose other experts."""
    share = 0.75 if routed and dtype != torch.float32 else 1.0
    return errors.float().abs().amax(-1).flatten().quantile(share, interpolation="lower")


def room(experts: list[native.Experts], library: Any, tokens: int, hidden: int, threads: int) -> int:
    """Bytes of scratch that a pass over so many tokens needs for any of ``experts``."""
    return max((library.experts_room(ctypes.byref(each), tokens, hidden, threads) for each in experts), default=0)
