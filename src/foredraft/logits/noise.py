"""Keyed randomness: every random number is a pure function of (row seed, position, purpose, node).

No global generator is touched and nothing depends on the batch, the drafter or the device. The match race is keyed by
the position of the token being chosen, so the text is a function of the seed alone (drafter-invariant speculative
decoding, Daliri et al. 2024). Everything a rule or a drafter draws freshly is keyed by the position of the round's root,
a purpose and a node: such noise is consumed beyond the accepted path, and reusing it in a later round would be biased.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from foredraft.device import one_thread

MASK64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
ALONE = 1 << 15  # values from which on work on a CPU is bound by memory, not by calls
Seed = int | tuple[int, int]
kernel: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
"""Once kernels are loaded, :func:`foredraft.backends.native.race` by these. None are compiled for races alone."""


class Purpose(IntEnum):
    """What a draw is for; two purposes never share noise."""

    MATCH = 1
    DRAFT = 2
    ACCEPT = 3
    RESIDUAL = 4


def row_key(seed: tuple[int, int]) -> int:
    """The 64-bit key of a row, as a signed integer that fits an int64 tensor."""
    key = 0
    for part in seed:
        key = _mix_int((key ^ (part & MASK64)) + GOLDEN & MASK64)
        key = _mix_int((key ^ (part >> 64 & MASK64)) + GOLDEN & MASK64)
    return _signed(key)


def _mix_int(x: int) -> int:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014) on a Python integer."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK64
    return x ^ x >> 31


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _spread(node: Tensor | int) -> Tensor | int:
    """Node numbers times an odd constant modulo 2^64, so that neighbours lie far apart."""
    if isinstance(node, int):
        return _signed(node * 0xABC98388FB8FAC03 & MASK64)
    return node * _signed(0xABC98388FB8FAC03)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 tensors, whose products wrap; shifts are made logical by masking."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * _signed(0x94D049BB133111EB)
    return x ^ (x >> 31 & (1 << 33) - 1)


def _mix_array(x: Any) -> Any:
    """The same on uint64 arrays."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9
    x = (x ^ x >> 27) * 0x94D049BB133111EB
    return x ^ x >> 31


@lru_cache(maxsize=8)
def _token_hashes(vocab_size: int, device: torch.device) -> Tensor:
    """``[V]`` int32: a well-mixed word per token id, the same for every vocabulary size.

    Every step is a bijection on 32 bits, so no two tokens have the same word: they would share all their noise, and the less
    likely of the two would never be drawn.
    """
    with torch.inference_mode(False):
        x = torch.arange(1, vocab_size + 1, device=device)
        x = (x ^ x >> 16) * 0x21F0AAAD & 0xFFFFFFFF
        x = (x ^ x >> 15) * 0x735A2D97 & 0xFFFFFFFF
        return (x ^ x >> 15).to(torch.int32)


def _unit(bits: Tensor) -> Tensor:
    """float32 in the open interval (-1, 0) from int32 words, fine near 0: a number that rounded to 0 or -1 would let an
    arbitrary token win the race."""
    return bits.bitwise_and(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(-(2.0**-31)).clamp_(min=2.0**-24 - 1)


def on_host(values: Tensor) -> bool:
    """NumPy and kernels may work on ``values``: they are on the CPU, and nobody records tensor operations."""
    return values.device.type == "cpu" and not torch._C._len_torch_dispatch_stack()


class Randomness(Protocol):
    """The draws that rules and drafters may make; :class:`Noise` in use, an enumerator in tests."""

    def race(self, p: Tensor, depths: Tensor) -> Tensor: ...

    def accept(self, probability: Tensor, node: int | Tensor = 0) -> Tensor: ...

    def draw(self, weights: Tensor, purpose: Purpose, node: int = 0) -> Tensor: ...

    def rank(self, weights: Tensor, k: int, purpose: Purpose, nodes: Tensor) -> Tensor: ...

    def race_order(self, p: Tensor, depths: Tensor, k: int) -> Tensor: ...


class Noise:
    """The randomness of R rows in one round.

    Args:
        keys: ``[R]`` int64 row keys (:func:`row_key`).
        positions: ``[R]`` int64 unpadded index of each row's root token.
    """

    def __init__(self, keys: Tensor, positions: Tensor):
        self.keys, self.positions = keys, positions
        self._accepts: Tensor | None = None  # [R, K] uniforms of nodes 0 … K - 1, once asked for

    def words(self, purpose: Purpose, offsets: Tensor | int, node: Tensor | int = 0) -> Tensor:
        """``[R, K]`` int64 words for positions ``root + offsets`` (``[R, K]``, ``[1, K]`` or int) and nodes likewise."""
        if on_host(self.keys):
            return self._words_on_host(int(purpose), *(each.numpy() if isinstance(each, Tensor) else each for each in (offsets, node)))
        word = _mix(self.keys[:, None] + (self.positions[:, None] + offsets) * _signed(GOLDEN))
        return _mix(word + _signed(int(purpose) * 0xD1B54A32D192ED03 & MASK64) + _spread(node))

    def _words_on_host(self, purpose: int, offsets: Any, node: Any) -> Tensor:
        """The same by NumPy, whose calls take a fraction of the time."""
        keys, positions = (each.numpy()[:, None] for each in (self.keys, self.positions))
        word = _mix_array(keys.view(np.uint64) + (positions + offsets).view(np.uint64) * GOLDEN)
        spread = np.asarray(node).astype(np.uint64) * 0xABC98388FB8FAC03
        return torch.from_numpy(_mix_array(word + purpose * 0xD1B54A32D192ED03 % (1 << 64) + spread).view(np.int64))

    def exponentials(self, words: Tensor, vocab_size: int) -> Tensor:
        """``[R, K, V]`` float32 Exp(1) noise, one stream per word of ``words`` ``[R, K]``."""
        return _negative_exponentials(words, vocab_size).neg_()

    def race(self, p: Tensor, depths: Tensor) -> Tensor:
        """``[R, N]`` tokens y = argmin E / p for ``p`` ``[R, N, V]`` at ``depths`` ``[R or 1, N or 1]`` below the root.

        The noise depends on the position of the token being chosen, root + depth + 1, and on nothing else.
        """
        return _run(p, self.words(Purpose.MATCH, depths + 1))

    def draw(self, weights: Tensor, purpose: Purpose, node: int = 0) -> Tensor:
        """``[R]`` tokens drawn in proportion to ``weights`` ``[R, V]`` with fresh noise."""
        return _run(weights[:, None], self.words(purpose, 0, node))[:, 0]

    def rank(self, weights: Tensor, k: int, purpose: Purpose, nodes: Tensor) -> Tensor:
        """``[R, K, k]`` tokens drawn without replacement in proportion to ``weights`` ``[R, K, V]``, in the order of the draw.

        Gumbel-top-k (Kool et al. 2019): the k largest weights / E are such a draw. The noise is fresh, one stream for each of
        ``nodes`` ``[K]``. Tokens of weight 0 come last.
        """
        return _first(weights, self.words(purpose, 0, nodes[None]), k)

    def chain_words(self, depth: int, *, keyed: bool) -> Tensor:
        """``[R, depth]`` the words that the tokens of chains are drawn with: those of :meth:`race`, or else of :meth:`draw`."""
        index = torch.arange(depth, device=self.keys.device)[None]
        return self.words(Purpose.MATCH, index + 1) if keyed else self.words(Purpose.DRAFT, 0, index)

    def hashes(self, vocab_size: int) -> Tensor:
        """``[V]`` int32, what tells the noise of one token from that of another."""
        return _token_hashes(vocab_size, self.keys.device)

    def race_order(self, p: Tensor, depths: Tensor, k: int) -> Tensor:
        """``[R, N, k]`` the first k tokens of :meth:`race`, the winner first; ``depths`` ``[1, 1]`` stand for all nodes."""
        return _first(p, self.words(Purpose.MATCH, depths + 1), k)

    def accept(self, probability: Tensor, node: int | Tensor = 0) -> Tensor:
        """``[R, K]`` bool, True with ``probability`` ``[R, K]``: u < probability, strictly, so that 0 never passes.

        The draws are for nodes ``node``, ``node + 1``, …, one number for all rows or ``[R]``.
        """
        count = probability.shape[1]
        if isinstance(node, Tensor):
            return self._uniforms(node[:, None] + torch.arange(count, device=node.device)) < probability
        if self._accepts is None or self._accepts.shape[1] < node + count:  # many at once: rules ask node by node
            self._accepts = self._uniforms(torch.arange(1 << (node + count - 1).bit_length() + 1, device=probability.device)[None])
        return self._accepts[:, node : node + count] < probability

    def _uniforms(self, nodes: Tensor) -> Tensor:
        """``[R, K]`` float32 in (0, 1) for ``nodes`` ``[R or 1, K]``."""
        return _unit(self.words(Purpose.ACCEPT, 0, nodes).to(torch.int32)).neg_()


def _negative_exponentials(words: Tensor, vocab_size: int) -> Tensor:
    low, high = words.to(torch.int32)[..., None], (words >> 32).to(torch.int32)[..., None]
    bits = _token_hashes(vocab_size, words.device) ^ low
    bits.mul_(high | 1)
    bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF)).mul_(0x2C1B3C6D)
    bits.bitwise_xor_((bits >> 12).bitwise_and_(0xFFFFF)).mul_(0x297A2D39)
    bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF))  # without this step words that differ in a high bit stay alike
    return _unit(bits).log1p_()


def _run(weights: Tensor, words: Tensor) -> Tensor:
    """``[R, K]`` winners argmax weights / E over ``[R, K, V]``; weight 0 never wins while any weight is positive.

    On a CPU a kernel tells the winners of most races. It rounds the noise differently, so it leaves out the few in which that could decide.
    """
    if words.shape != weights.shape[:2]:  # one word for all nodes
        words = words.expand(weights.shape[:2])
    if kernel is None or not on_host(weights) or weights.dtype != torch.float32:
        return _computed(weights, words)
    found = kernel(weights.flatten(0, 1), words.flatten(), _token_hashes(weights.shape[-1], weights.device)).view(words.shape)
    for row, race in (found < 0).nonzero().tolist():
        found[row, race] = _computed(weights[row, race, None, None], words[row, race, None, None])
    return found


def _computed(weights: Tensor, words: Tensor) -> Tensor:
    """The same by tensor operations. On a CPU large vocabularies run one race at a time, so that the noise stays in the processor's
    cache."""
    rows, races, vocab_size = weights.shape
    if rows * races > 1 and weights.device.type == "cpu" and vocab_size >= ALONE:
        winners = [_computed(weights[row, race, None, None], words[row, race, None, None]) for row in range(rows) for race in range(races)]
        return torch.cat(winners).view(rows, races)
    with one_thread(weights):
        noise = _negative_exponentials(words, vocab_size)
        return argmin(torch.div(weights, noise, out=noise) if weights.dtype == torch.float32 else weights / noise)


def _first(weights: Tensor, words: Tensor, k: int) -> Tensor:
    """``[R, K, k]`` the first k of each race."""
    if k == 1 and words.shape == weights.shape[:2]:
        return _run(weights, words)[..., None]
    with one_thread(weights):
        ratios = weights / _negative_exponentials(words, weights.shape[-1])
        return argmin(ratios)[..., None] if k == 1 else ratios.topk(k, largest=False).indices


def argmax(values: Tensor) -> Tensor:
    """``[...]`` index of the first largest value of ``[..., V]``, a NaN counting as largest.

    As ``values.argmax(-1)``; on a CPU NumPy's is vectorised and an order of magnitude faster over a large vocabulary.
    """
    return torch.from_numpy(np.argmax(values.numpy(), -1)) if _for_numpy(values) else values.argmax(-1)


def argmin(values: Tensor) -> Tensor:
    """The same for the smallest value."""
    return torch.from_numpy(np.argmin(values.numpy(), -1)) if _for_numpy(values) else values.argmin(-1)


def _for_numpy(values: Tensor) -> bool:
    floats = values.dtype in (torch.float32, torch.float64)
    return values.device.type == "cpu" and floats and values.ndim > 1 and values.numel() >= ALONE


def row_seeds(seed: int | Sequence[Seed] | None, rows: int) -> tuple[list[tuple[int, int]], int | list[Seed] | None]:
    """One pair per row, and the seed as it should be reported.

    An int ``s`` gives row ``i`` the pair ``(s, i)``; a list has one entry per row, each an int ``s`` (meaning ``(s, 0)``)
    or a pair; None draws an int from torch's global generator.

    Raises:
        ValueError: a list of the wrong length, or an entry that is neither an int nor a pair of ints.
    """
    if seed is None:
        seed = int(torch.randint(0, 2**62, (), device="cpu").item())
    if isinstance(seed, int) and not isinstance(seed, bool):
        return [(seed, row) for row in range(rows)], seed
    if isinstance(seed, (str, bytes)) or not isinstance(seed, Sequence):
        raise ValueError(f"seed must be an int, a list with one entry per row, or None; got {seed!r}")
    if len(seed) != rows:
        raise ValueError(f"seed has {len(seed)} entries for {rows} rows (rows are counted after num_return_sequences)")
    return [_pair(entry) for entry in seed], list(seed)


def _pair(entry: Seed) -> tuple[int, int]:
    pair = entry if isinstance(entry, (tuple, list)) else (entry, 0)
    if len(pair) == 2 and all(isinstance(part, int) and not isinstance(part, bool) for part in pair):
        return (pair[0], pair[1])
    raise ValueError(f"a row's seed must be an int or a pair of ints; got {entry!r}")
