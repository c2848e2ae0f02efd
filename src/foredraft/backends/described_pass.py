"""Decoders in one call of the kernels, by a description of their layers.

Families differ in few ways: where their norms are, what RoPE applies to, how far a layer sees, which modules are joined. A
:class:`Family` states what cannot be read from the modules, and most families need one line. The kinds of norms and activations are found
by calling them. Each layer is compared with its own class when the model is loaded, so that a wrong description is not used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from foredraft.backends import narrow, native
from foredraft.backends.base import Part, Routing
from foredraft.backends.experts import Experts, Mixture, laid_out, worst
from foredraft.backends.families import FAMILIES, Family, family_of, heads_of, interleaves
from foredraft.backends.kernel_pass import BY_POSITION, Direct, Kernel, NativeModel, NativePass, Places, eps_of, passes_are_known
from foredraft.backends.narrow import UNIT
from foredraft.backends.packing import Packing
from foredraft.backends.products import BLOCK, NATIVE, Product
from foredraft.backends.rounding import explained
from foredraft.models.cache import TreeCache, Window
from foredraft.models.features import first_tensor
from foredraft.models.masks import MaskInputs
from foredraft.models.page_stores import Kind
from foredraft.models.windows import windows_of

ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # relative to what a layer adds: error that another order of summation explains
LAST_BIT = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-7}  # the same, relative to what it is added to
WIDEST = 8192  # most numbers that are normed in place, ``TAKEN`` of ``layer.c``
VECTOR = 16  # head sizes must be multiples of this


BY_POSITION_ALONE = (*BY_POSITION, "ntk_alpha")  # RoPE types whose angles depend on the position alone
ACTIVATIONS: dict[int, Callable[[Tensor], Tensor]] = {
    native.SILU: functional.silu,
    native.GELU: lambda x: functional.gelu(x, approximate="tanh"),
    native.EXACT: functional.gelu,
    native.RELU: functional.relu,
    native.SQUARED: lambda x: functional.relu(x).square(),
}
NORMS = (0, native.ONCE, native.ONCE | native.PLUS_ONE, native.ONCE | native.CENTRED)


Angles = tuple[Tensor, Tensor, Tensor | None]  # cos, sin ``[tokens, D]``, and the factor of queries ``[tokens]``


class Unfit(Exception):
    """The kernels do not support a model; the message says why."""


@dataclass(frozen=True)
class Turning:
    """What layers of one kind have in common: their ``window``, whether they use RoPE (``turns``), and the type of layer by which a model
    with several kinds of RoPE selects their angles."""

    window: int | None
    layer_type: str | None
    turns: bool


class DescribedModel(NativeModel):
    """A decoder of a family that is described.

    Attributes:
        head: the class of the language model.
        kinds: of its layers.
        divided, scaled, cap: divisor, factor and soft cap of the logits.
    """

    @staticmethod
    def of(base: Any, packing: Packing) -> DescribedModel | str | None:
        """The kernel for ``base``, or the reason that there is none; None if it is no decoder of a known family."""
        name = family_of(packing.model, base)
        if name is None:
            return None
        if not passes_are_known(packing.model):
            return f"{type(packing.model).__name__} has a forward of its own"
        others = (each for each in base.modules() if not isinstance(each, nn.Linear))
        if any(not isinstance(vars(each).get("forward", None), (Mixture, type(None))) for each in others):
            return "somebody has overridden a module of it"
        try:
            return DescribedModel(base, FAMILIES[name], packing)
        except Unfit as error:
            return str(error)
        except (AttributeError, KeyError) as error:  # adapters and other versions of transformers have other parts
            return f"it lacks a part that its description names: {error}"

    def __init__(self, base: Any, family: Family, packing: Packing):
        config, self.family, self.head = base.config, family, type(packing.model).__name__
        layers = list(getattr(base, family.layers))[: config.num_hidden_layers]
        if (why := family.refused(config)) is not None:
            raise Unfit(why)
        attentions = [getattr(layer, family.attention) for layer in layers]
        types = getattr(config, "layer_types", None) if isinstance(rope_types(base), dict) else None
        each = [
            Turning(window, types[index] if types else None, family.turns(attention))
            for index, (window, attention) in enumerate(zip(windows_of(base), attentions))
        ]
        self.kinds, shared = list(dict.fromkeys(each)), SimpleNamespace(experts=[], inner=0)
        self._embedding = embedding = base.get_input_embeddings()
        like = embedding.weight
        angles = [angles_of(base, family, kind, like, torch.zeros(1, 1, dtype=torch.long)) for kind in self.kinds]
        kernels = []
        for index, (layer, kind) in enumerate(zip(layers, each)):
            number = self.kinds.index(kind)
            about, held = described(layer, config, family, angles[number], packing)
            about.kind, about.window = number, kind.window or 0
            latents = [part for part in held if isinstance(part, Latents)]
            shared.inner = max(shared.inner, int(about.inner), *(part.scratch for part in latents))
            shared.experts += [part.about for part in held if isinstance(part, Experts)]
            kernels.append(Kernel(about, index, native.library(held[0].dtype), shared, held))
        if (
            {kernel.held[0].dtype for kernel in kernels} != {like.dtype}
            or len({id(kernel.library) for kernel in kernels}) > 1
            or len({sizes_of(kernel.about) for kernel in kernels}) > 1
        ):
            raise Unfit("its layers have different sizes or formats")
        if len({layout_of(each) for each in shared.experts}) > 1:
            raise Unfit("its mixtures of experts have different sizes or formats")
        last = getattr(base, family.last)
        norm, held = described_norm(last, family.last, like.dtype)
        self._sizes = latents[0].sizes if latents else None
        super().__init__(base, layers, kernels, (), eps_of(last))
        self.routing = routing_of(kernels, packing)
        self._touched = ctypes.c_int64()
        self.norm, self._norm_held = norm, held
        types_of_rope = rope_types(base)
        known = {*types_of_rope.values()} if isinstance(types_of_rope, dict) else {types_of_rope}
        self.by_position = known <= {*BY_POSITION_ALONE}
        self._lines: dict[int, Angles] = {}  # by kind
        scale = getattr(embedding, "embed_scale", 1.0)
        self._multiplier = getattr(base, "embedding_multiplier", 1.0)
        self.embedded.scale = float(torch.as_tensor(scale).to(like.dtype)) * self._multiplier
        factor = getattr(config, "logits_scaling", None) or 1.0
        self.divided = 1.0 if family.multiplied else factor
        self.scaled = factor if family.multiplied else getattr(packing.model, "logit_scale", None) or 1.0
        self.cap = getattr(config, "final_logit_softcapping", None) or 0.0
        self.finishes = (self.divided, self.scaled, self.cap) != (1.0, 1.0, 0.0)
        if self.finishes and self.head not in heads_of(base):
            raise Unfit(f"its logits are scaled or capped, and whether {self.head} does so is not known")

    # -- what Direct and drafts ask --------------------------------------------------------------------------------------

    @property
    def page_kinds(self) -> list[Kind]:
        found: dict[int | None, list[Kernel]] = {}
        for kernel in self.kernels:
            found.setdefault(self.kinds[int(kernel.about.kind)].window, []).append(kernel)
        return [Kind(self.page_bytes(some), window, frozenset(each.index for each in some)) for window, some in found.items()]

    @property
    def touched(self) -> float | None:
        return self._touched.value / len(self.shared.experts) if self.routing is not None else None  # type: ignore[attr-defined]

    @property
    def sizes(self) -> tuple[int, ...]:
        return self._sizes or super().sizes

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        embedding = self._embedding
        # What the class does, with fewer calls.
        if type(embedding) is nn.Embedding and embedding.max_norm is None:
            found = functional.embedding(ids, embedding.weight)
        else:
            found = embedding(ids[None])[0]
        return found if self._multiplier == 1.0 else found * self._multiplier

    def finished(self, logits: Tensor) -> Tensor:
        logits = logits if self.divided == 1.0 else logits / self.divided
        logits = logits if self.scaled == 1.0 else logits * self.scaled
        return torch.tanh(logits / self.cap) * self.cap if self.cap else logits

    def about(
        self, x: Tensor, positions: Tensor, where: MaskInputs | None, cache: TreeCache, window: Window, places: Places | None
    ) -> native.Pass:
        about = NativePass.over(cache, self.shared).of(self.kernels[0], x, window, places)
        if self.routing is not None:
            self._touched.value, about.touched = 0, ctypes.addressof(self._touched)
        if self.by_position:
            angles, at = [self._table(number, window.width) for number in range(len(self.kinds))], positions.contiguous()
        else:
            made = [angles_of(self.base, self.family, kind, x, positions[None]) for kind in self.kinds]
            angles, at = [self._read(each) for each in made], torch.arange(positions.numel())
        self._enter(about, cache, angles)
        about.places, about.beside = at.data_ptr(), (at, about.beside)
        return about

    def place(self, about: native.Growth, given: native.Pass, cache: TreeCache, like: Tensor, most: int) -> bool:
        if not self.by_position:
            return False
        self._enter(given, cache, [self._table(number, most) for number in range(len(self.kinds))])
        about.logit_scale = 0.0 if self.divided == self.scaled == 1.0 else self.scaled / self.divided
        about.logit_cap = self.cap
        if any(kind.window for kind in self.kinds):
            cache.positions = torch.arange(cache.capacity, dtype=torch.int32)[None]
        return True

    def _enter(self, about: native.Pass, cache: TreeCache, angles: Sequence[Angles | None]) -> None:
        """Set for each kind of layer where its keys are, and its ``angles``."""
        made = (native.Kind * len(self.kinds))()
        for number, (kind, own) in enumerate(zip(made, angles)):
            cache.place(kind, next(each.index for each in self.kernels if each.about.kind == number))
            if own is not None:
                kind.cos, kind.sin, kind.factor = (None if each is None else each.data_ptr() for each in own)
        about.kinds, about.beside = ctypes.addressof(made), (made, angles)

    def _table(self, number: int, needed: int) -> Angles | None:
        """The angles of a kind of layers at ``needed`` positions or more, as the kernels read them."""
        known = self._lines.get(number)
        if self.kinds[number].turns and (known is None or len(known[0]) < needed):
            like, positions = self.base.get_input_embeddings().weight, torch.arange(max(1024, 2 * needed))
            known = self._read(angles_of(self.base, self.family, self.kinds[number], like, positions[None]))
            assert known is not None
            self._lines[number] = known
        return known

    def _read(self, given: Angles | None) -> Angles | None:
        """Angles in the form that the kernels read."""
        if given is None:
            return None
        *angles, factor = given
        if interleaves(self.family, self.base.config) and torch.equal(*angles[0].chunk(2, -1)):  # angles by halves, pairs adjacent
            angles = [each.chunk(2, -1)[0].repeat_interleave(2, -1) for each in angles]
        cos, sin = (each.float().contiguous() for each in angles)
        return cos, sin, factor

    # -- the comparison --------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def wrong(self, model: Any, sample: Callable[[], Tensor]) -> str | None:
        """Compare each layer with its class while ``sample`` runs ``model``, and then the logits. What differs, or None."""
        by_position, self.by_position = self.by_position, False  # the positions of a sample may lie behind any table of angles
        try:
            return self._wrong(model, sample)
        finally:
            self.by_position = by_position

    def _wrong(self, model: Any, sample: Callable[[], Tensor]) -> str | None:
        given: dict[int, Tensor] = {}
        made: dict[int, Tensor] = {}

        def note(index: int) -> Callable[..., None]:
            def hook(layer: nn.Module, args: Any, named: Any, out: Any) -> None:
                given[index], made[index] = first_tensor(args, named).clone(), (out if isinstance(out, Tensor) else out[0]).clone()
                if isinstance(named.get("position_ids"), Tensor):
                    places.append(named["position_ids"].flatten())

            return hook

        ids: list[Tensor] = []
        places: list[Tensor] = []
        hooks = [layer.register_forward_hook(note(index), with_kwargs=True) for index, layer in enumerate(self.layers)]
        hooks.append(self.base.get_input_embeddings().register_forward_hook(lambda module, args, out: ids.append(args[0])))
        try:
            expected = sample()
        finally:
            for hook in hooks:
                hook.remove()
        dtype, cache, count = expected.dtype, TreeCache(), ids[0].numel()
        routed = bool(self.shared.experts)  # type: ignore[attr-defined]

        positions = places[0] if places and len(places[0]) == count else torch.arange(count)
        window = Window(0, 1, (0,), count)
        cache.open([0])
        cache.enter(window)

        def run(x: Tensor, part: Part | None) -> Tensor:
            return self.run_over(x, positions, None, None, cache, Places(window, ragged=False), None, part)

        for index in range(len(self.layers)):
            x = given[index].reshape(count, -1).clone()
            run(x, Part(index, index + 1))
            before, wanted = (each.reshape(count, -1).float() for each in (given[index], made[index]))
            allowed = ROUNDING[dtype] * (wanted - before).abs().max()
            off = worst(((x.float() - wanted).abs() - LAST_BIT[dtype] * wanted.abs()).clamp(min=0), dtype, routed=routed)
            if not bool(off <= allowed):
                name = type(self.layers[index]).__name__
                times = f"{float(off / allowed):.1e} times what rounding explains"
                return f"layer {index} ({name}) computes something else than its description says: it is off by {times}"
        logits = Direct(model, self).logits(run(self.embed(ids[0].reshape(-1), positions), None)).view(expected.shape)
        off = worst(logits.float() - expected.float(), dtype, routed=routed) / expected.float().abs().max().clamp(min=1e-6)
        if bool(off <= ROUNDING[dtype]) or bool(off <= explained(model)):
            return None
        return f"the kernels gave logits that differ by {float(off):.1e} of their scale"


class Latents:
    """The latent attention of a layer, as the kernel of the layer sees it.

    Attributes:
        sizes: numbers that are cached of a token: of its latent, and of its RoPE key.
        scratch: the ``inner`` of an MLP whose scratch memory is enough for the kernel.
        dtype, inputs: of its products.

    Raises:
        Unfit: its sizes or layouts are not those that the kernel is made for.
    """

    def __init__(self, attention: Any, heads: int, packing: Packing):
        names = {
            "kept": "kv_a_proj_with_mqa",
            **({"query": "q_proj"} if attention.q_lora_rank is None else {"query_in": "q_a_proj", "query": "q_b_proj"}),
        }
        layers = {name: getattr(attention, each) for name, each in names.items()}
        matrices = {name: packing.matrix(layer) for name, layer in layers.items()}
        expand = packing.product(attention.kv_b_proj)
        for name, layer in layers.items():
            if layer.out_features % BLOCK:
                raise Unfit(f"its {names[name]} has {layer.out_features} outputs, and the kernels take multiples of {BLOCK}")
        if expand is None or None in matrices.values():
            raise Unfit("its products for latents are not packed in the kernels' layout")
        rank, turned, plain, values = (
            int(getattr(attention, name)) for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        )
        if rank % BLOCK or values % BLOCK or plain % UNIT or turned % VECTOR or max(rank, int(attention.q_lora_rank or 0)) > WIDEST:
            raise Unfit(
                f"it has latents of {rank} numbers, values of {values} and keys of {plain} and {turned}, which the kernels do not take"
            )
        (weight,) = expand.weights()
        if expand.quantised:  # it becomes two stacks of matrices, which are little beside the rest of a model
            weight = narrow.dequantized(attention.kv_b_proj.weight, weight)
        to_keys, to_values = torch.split(weight.view(heads, plain + values, rank), [plain, values], 1)
        self._held = laid_out(heads, lambda head: to_keys[head].T), laid_out(heads, lambda head: to_values[head])
        self.sizes, self.dtype, self.inputs = (rank, turned), expand.dtype, int(layers["kept"].in_features)
        low = int(attention.q_lora_rank or 0)
        self.scratch = max(rank + turned, low, heads * max(plain + turned, values) // 2)
        about = {"rank": rank, "turned": turned, "plain": plain, "values": values, "query_rank": low, **matrices}
        self.about = native.Latent(**about, to_latents=self._held[0].packed.data_ptr(), to_values=self._held[1].packed.data_ptr())


def described(layer: Any, config: Any, family: Family, angles: Angles | None, packing: Packing) -> tuple[native.Layer, tuple[Any, ...]]:
    """``layer`` as the kernels see it, and what their pointers refer to, products first. ``angles`` are the decoder's at some positions.

    Raises:
        Unfit: its sizes or layouts are not those that the kernels are made for.
    """
    inside, attention = dict(layer.named_modules()), getattr(layer, family.attention)
    own = [f"{family.attention}.{name}" for name in (*family.qkv, family.output)]
    groups = {"output": own[-1:], "gate_up": family.wide, "down": (family.down,)} | ({} if family.latent else {"qkv": own[:-1]})
    experts = Experts.of(layer.mlp, packing) if isinstance(getattr(inside.get("mlp.experts"), "down_proj", None), Tensor) else None
    groups = groups if experts is None else {name: names for name, names in groups.items() if name in ("qkv", "output")}
    products = {name: taken(packing, name, [inside[each] for each in names]) for name, names in groups.items()}
    if isinstance(experts, str):
        raise Unfit(experts)
    products |= {} if experts is None or experts.shared is None else dict(zip(("gate_up", "down"), experts.shared))
    qkv, down, output = products.get("qkv"), products.get("down"), products["output"]
    if experts is not None and output.dtype != experts.mixture.dtype:
        raise Unfit("its experts have another format than its linear layers")
    if experts is not None and (family.mlp_given or family.parallel or getattr(layer, "residual_multiplier", 1.0) != 1.0):
        raise Unfit("something is done with what its experts give that the kernels do not do")
    inner = 0 if down is None else down.inputs
    if len({each.dtype for each in products.values()}) > 1:
        raise Unfit("its linear layers have different formats")
    parallel = family.parallel if isinstance(family.parallel, bool) else bool(getattr(layer, family.parallel))
    heads = config.num_attention_heads
    latents = Latents(attention, heads, packing) if family.latent else None
    key_heads = 1 if latents else getattr(config, "num_key_value_heads", None) or heads
    size: int = sum(latents.sizes) if latents else getattr(attention, "head_dim", None) or attention.head_size
    if (qkv is not None and qkv.outputs != (heads + 2 * key_heads) * size) or size % VECTOR or heads * size % UNIT or inner % UNIT:
        sizes = f"heads of {size} numbers and an MLP of {inner}"
        raise Unfit(f"it has {sizes}; the kernels take multiples of {VECTOR} and {UNIT}, and keys and values of one size")
    places = {
        **{name: getattr(family, name) for name in ("before", "after", "attention_given", "mlp_given")},
        **{name: f"{family.attention}.{each}" for name, each in zip(("query_norm", "key_norm"), family.head_norms)},
    }
    found: dict[str, Any] = {name: inside[each] for name, each in places.items() if each is not None and each in inside}
    norms = {name: described_norm(norm, name, output.dtype) for name, norm in found.items()}
    eps = {name: eps_of(norm) for name, norm in found.items()}
    of_heads = {value for name, value in eps.items() if name in ("query_norm", "key_norm")}
    around = {value for name, value in eps.items() if name not in ("query_norm", "key_norm")}
    if len(around) != 1 or len(of_heads) > 1:
        raise Unfit("its norms have different epsilons")
    head_norms = native.BEHIND if family.turned_first else 0
    if latents is None and "query_norm" in norms and (width := found["query_norm"].weight.numel()) != size:
        if width != heads * size or width > WIDEST:
            raise Unfit("its norms of queries and keys are of another shape")
        head_norms = native.WHOLE_HEADS
    activation = native.SILU if experts is not None else activation_of(inside[family.activation])
    gated = down is None or products["gate_up"].outputs == 2 * inner
    sinks = None if getattr(attention, "sinks", None) is None else attention.sinks.detach().float().contiguous()
    rotation = (native.INTERLEAVED if interleaves(family, config) else 0) | (native.IN_PAIRS if family.in_pairs else 0)
    if family.once or (angles is not None and angles[0].dtype != output.dtype):
        rotation |= native.TURNED_ONCE
    about = native.Layer(
        hidden=output.outputs,
        inner=inner,
        heads=heads,
        key_heads=key_heads,
        size=size,
        eps=around.pop(),
        head_eps=of_heads.pop() if of_heads else 0.0,
        scaling=attention.scaling,
        activation=activation | (0 if gated else native.ALONE),
        cap=(getattr(attention, family.layer_cap) or 0.0) if family.layer_cap else 0.0,
        residual=0.0 if (factor := getattr(layer, "residual_multiplier", 1.0)) == 1.0 else factor,
        rotary=0 if angles is None else angles[0].shape[-1],
        rotation=rotation,
        head_norms=head_norms,
        parallel=parallel,
        grouped=family.grouped,
        sinks=None if sinks is None else sinks.data_ptr(),
        experts=None if experts is None else ctypes.addressof(experts.about),
        latent=None if latents is None else ctypes.addressof(latents.about),
        **{name: product.matrix for name, product in products.items()},
        **{name: norm for name, (norm, _) in norms.items()},
    )
    return about, (*products.values(), *norms.values(), sinks, experts, latents)


def angles_of(base: Any, family: Family, kind: Turning, like: Tensor, positions: Tensor) -> Angles | None:
    """The angles of the class at ``positions`` ``[1, tokens]`` for layers of ``kind``; None without RoPE."""
    if not kind.turns:
        return None
    given = {} if kind.layer_type is None else {"layer_type": kind.layer_type}
    found = base.rotary_emb(like, position_ids=positions, **given)
    cos, sin = (found.real, found.imag) if isinstance(found, Tensor) else found  # complex numbers, in DeepSeek-V2
    if family.halves:
        cos, sin = (torch.cat((each, each), -1) for each in (cos, sin))
    factor = family.tempered(base.config, positions[0])
    return cos[0], sin[0], None if factor is None else factor.to(like.dtype).float()


def taken(packing: Packing, name: str, layers: Sequence[Any]) -> Product:
    """The packed product of ``layers``.

    Raises:
        Unfit: they are not packed together in the kernels' layout, or have outputs of a size that the kernels do not take.
    """
    found = packing.product(*layers)
    if found is None or found.hint != NATIVE:
        raise Unfit(f"its linear layers for {name} are not packed together in the kernels' layout")
    if found.outputs % BLOCK:
        raise Unfit(f"its linear layers for {name} have {found.outputs} outputs, and the kernels take multiples of {BLOCK}")
    return found


def routing_of(kernels: Sequence[Kernel], packing: Packing) -> Routing | None:
    """The mixtures of experts in ``kernels``; None if there are none, or if they differ."""
    mixtures = [each for kernel in kernels for each in kernel.held if isinstance(each, Experts)]
    sizes = {(each.mixture.count, int(each.about.chosen)) for each in mixtures}
    if len(sizes) != 1:
        return None
    count, chosen = sizes.pop()
    others = packing.nbytes + sum(each.router.nbytes for each in mixtures)
    return Routing(count, chosen, sum(each.mixture.nbytes for each in mixtures) / count / others)


def described_norm(norm: Any, name: str, dtype: torch.dtype) -> tuple[native.Norm, tuple[Tensor, ...]]:
    """``norm`` as the kernels see it, of the kind whose results are those of ``norm``; and what its pointers refer to.

    Raises:
        Unfit: it is of no such kind.
    """
    if not isinstance(getattr(norm, "weight", None), Tensor):
        raise Unfit(f"the norm {name} has no weights of its own")
    weight, bias = norm.weight.detach(), getattr(norm, "bias", None)
    if weight.dtype != dtype or weight.ndim > 1 or (bias is not None and bias.dtype != dtype):
        raise Unfit(f"the norm {name} has weights of another dtype or shape")
    x = (torch.randn(4, len(weight), generator=torch.Generator().manual_seed(0)) + 0.5).to(dtype)
    made = norm(x).float()
    plus = weight + 1  # rounded to the dtype, as some classes do
    tries = [(weight, kind) for kind in NORMS] + [(plus, native.ONCE | native.CENTRED)]
    off = [float((normed(x, each, bias, eps_of(norm), kind).float() - made).abs().sum()) for each, kind in tries]
    if not min(off) <= 1e-2 * float(made.abs().sum()):
        raise Unfit(f"the norm {name}, {type(norm).__name__}, is of no kind that the kernels know")
    weight, kind = tries[off.index(min(off))]
    return native.Norm.of(weight, bias, kind), (weight,) if bias is None else (weight, bias)


def normed(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kind: int) -> Tensor:
    y = x.float()
    y = y - y.mean(-1, keepdim=True) if kind & native.CENTRED else y
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if not kind:
        return weight * y.to(x.dtype)
    y = y * (weight.float() + 1 if kind & native.PLUS_ONE else weight.float())
    return (y if bias is None else y + bias.float()).to(x.dtype)


def activation_of(function: Any) -> int:
    """
    Raises:
        Unfit: the kernels do not know it.
    """
    x = torch.cat([torch.linspace(-most, most, 65, dtype=torch.float32) for most in (4, 40)])  # some are clipped at 6 or 10
    made = function(x)
    found = next((known for known, each in ACTIVATIONS.items() if torch.allclose(made, each(x), rtol=1e-6, atol=2e-6)), None)
    if found is None:
        raise Unfit(f"its activation is {type(function).__name__}")
    return found


def rope_types(base: Any) -> Any:
    """The RoPE type: a name, or one for each type of layer."""
    return getattr(base.rotary_emb, "rope_type", None)


def layout_of(about: native.Experts) -> tuple[int, ...]:
    """What says how the work of a mixture is divided: a thread that is late may look at that of the layer before."""
    return (*(int(getattr(about, name)) for name in ("count", "chosen", "inner", "width", "shared")), bool(about.router32))


def sizes_of(about: native.Layer) -> tuple[int, ...]:
    return tuple(int(getattr(about, name)) for name in ("hidden", "heads", "key_heads", "size", "activation"))
