"""N-gram log-odds: how much likelier tokens are after a certain token, or after two, than they are anywhere.

Medusa's heads guess a token from a state that saw none of the tokens drafted before it, not even the root. Counts of short n-grams know
exactly that. Their log-odds, added to a head's logits, make guesses that fit each other (rescoring with an n-gram model: Kim et al. 2024,
*Exploring and Improving Drafts in Blockwise Parallel Decoding*). The result is logits, so drafting, the rules and the output distribution
do not change.

With n_c(y) the number of times that y followed context c, N_c their sum and T_c the number of different tokens among them, the
interpolation is Witten and Bell's,

    p(y | x c) = (n(y) + T p(y | c)) / (N + T),

down to p(y), the frequency of y. Tokens that are not listed after a context share what the listed ones leave, in proportion to
p(y | c). Relative to them a listed token has log-odds log(1 + n(y) / ((N - n_listed + T) p(y | c))). So every list holds what its
context adds, and a token in no list gets 0.

The text so far counts too: :func:`mix_in_text` mixes in what followed the last two, three and four tokens earlier in the same text.

In files this is called ``successors``, its first name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foredraft.errors import ConfigurationError
from foredraft.files import current_name

FORMAT, VERSION = "foredraft-successors", "1"
REACH = 2  # tokens of the longest contexts
LISTED = (128, 8)  # tokens per context of one token, of two
SEEN = (2, 8)  # times that a token must have followed to be listed
MOST = 500_000  # listed tokens of all contexts of two together
UNITS = 16  # stored log-odds are whole numbers of this part of a nat
PATH = 4  # tokens of the longest context that is looked for in the text
SHARES = (0.2, 0.4, 0.6)  # of what followed the last 2, 3, 4 tokens, in the mixture with what is likely otherwise
MATCHES = 32  # the latest places of each length that count
REMEMBERED = 8192  # tokens of the text that are looked at

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Lists:
    """For contexts of one length: which tokens each makes likelier, and by how much.

    Attributes:
        contexts: ``[C]`` int64, ascending; a context of tokens a b is the number a V + b.
        first: ``[C + 1]`` int32, where each list begins.
        tokens: ``[n]`` int64. odds: ``[n]`` float32, log-odds of at least 0.
    """

    contexts: Tensor
    first: Tensor
    tokens: Tensor
    odds: Tensor

    @cached_property
    def longest(self) -> int:
        return int((self.first[1:] - self.first[:-1]).max()) if len(self.contexts) else 0

    def to(self, device: torch.device) -> Lists:
        return Lists(*(getattr(self, name).to(device) for name in ("contexts", "first", "tokens", "odds")))


@dataclass(frozen=True, eq=False)
class NgramLogOdds:
    """Lists for contexts of one token, of two, and so on; ``weights`` ``[K]`` say what log-odds count for head k, relative to its logits.

    ``vocab_size`` is the target's.
    """

    lists: tuple[Lists, ...]
    weights: tuple[float, ...]
    vocab_size: int

    @classmethod
    def count(cls, texts: Sequence[Array], vocab_size: int, *, heads: int, listed: Sequence[int] = LISTED) -> NgramLogOdds:
        """Count n-grams in texts, arrays of token ids; none spans two texts. Weights are 1; see :meth:`weighed`."""
        if not sum(map(len, texts)):
            raise ConfigurationError("there is no text whose tokens could be counted")
        stream = np.concatenate([np.asarray(text, dtype=np.int64) for text in texts])
        if stream.min() < 0 or stream.max() >= vocab_size:
            raise ConfigurationError(f"the texts hold tokens outside the vocabulary of {vocab_size}")
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        history = np.arange(len(stream)) - np.repeat(np.cumsum(lengths) - lengths, lengths)  # tokens before each, in its text
        anywhere = (np.bincount(stream, minlength=vocab_size) + 1.0) / (len(stream) + vocab_size)
        levels: list[_Level] = []
        for reach, (most, least) in enumerate(zip(listed, SEEN), 1):
            places = np.flatnonzero(history >= reach)
            context = np.zeros(len(places), np.int64)
            for back in range(reach, 0, -1):
                context = context * vocab_size + stream[places - back]
            while True:
                level = _counted(context, stream[places], anywhere, levels, most, least)
                if reach == 1 or len(level.tokens) <= MOST:
                    break
                least *= 2
            levels.append(level)
        return cls(tuple(level.lists() for level in levels), (1.0,) * heads, vocab_size)

    def to(self, device: torch.device) -> NgramLogOdds:
        return NgramLogOdds(tuple(each.to(device) for each in self.lists), self.weights, self.vocab_size)

    def added(self, logits: Tensor, tokens: Tensor, k: int) -> Tensor:
        """``logits`` ``[..., V]`` of head ``k`` plus the log-odds after ``tokens`` ``[..., REACH]``, the last one last; -1 for none.

        V may be smaller than the vocabulary; listed tokens beyond it are left out. After the first call nothing waits for the device.
        """
        weight = self.weights[min(k, len(self.weights) - 1)]
        if not weight:
            return logits
        shape, logits = logits.shape, logits.reshape(-1, logits.shape[-1]).clone()
        before = tokens.reshape(len(logits), -1)
        for reach, lists in enumerate(self.lists, 1):
            if not len(lists.contexts):
                continue
            context, known = before.new_zeros(len(before)), torch.ones(len(before), dtype=torch.bool, device=before.device)
            for back in range(reach, 0, -1):
                context, known = context * self.vocab_size + before[:, -back], known & (before[:, -back] >= 0)
            place = torch.searchsorted(lists.contexts, context).clamp_(max=len(lists.contexts) - 1)
            known &= lists.contexts[place] == context
            begin, end = lists.first[place], lists.first[place + 1]
            where = begin[:, None] + torch.arange(lists.longest, device=before.device)
            inside = known[:, None] & (where < end[:, None])
            where = where.clamp_(max=len(lists.tokens) - 1)
            tokens_there = lists.tokens[where]
            inside &= tokens_there < logits.shape[-1]
            odds = torch.where(inside, lists.odds[where] * weight, 0.0).to(logits.dtype)
            logits.scatter_add_(1, torch.where(inside, tokens_there, 0), odds)
        return logits.view(shape)

    def weighed(self, weights: Sequence[float]) -> NgramLogOdds:
        return NgramLogOdds(self.lists, tuple(map(float, weights)), self.vocab_size)

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """What a file holds, and its metadata; log-odds are rounded to a ``UNITS``-th, 15.9 at most."""
        small = torch.uint16 if self.vocab_size <= 1 << 16 else torch.int32
        number = torch.uint32 if self.vocab_size ** len(self.lists) <= 1 << 32 else torch.int64
        found = {"weights": torch.tensor(self.weights, dtype=torch.float32)}
        for reach, lists in enumerate(self.lists, 1):
            found[f"contexts_{reach}"] = lists.contexts.cpu().to(number)
            found[f"lengths_{reach}"] = (lists.first[1:] - lists.first[:-1]).to(torch.int16).cpu()
            found[f"tokens_{reach}"] = lists.tokens.cpu().to(small)
            found[f"odds_{reach}"] = (lists.odds.cpu() * UNITS).round().clamp(0, 255).to(torch.uint8)
        return found, named(self.vocab_size)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], said: Mapping[str, str], where: str) -> NgramLogOdds:
        """The inverse of :meth:`tensors`.

        Raises:
            ConfigurationError: the file is something else, of another version, or damaged.
        """
        if current_name(said.get("format")) != FORMAT or said.get("version") != VERSION:
            raise ConfigurationError(f"{where} holds no n-gram log-odds of version {VERSION}; count them again (foredraft train)")
        reaches = range(1, 1 + sum(name.startswith("contexts_") for name in tensors))
        expected = {"weights", *(f"{name}_{reach}" for name in ("contexts", "lengths", "tokens", "odds") for reach in reaches)}
        if len(reaches) > REACH:
            raise ConfigurationError(f"{where} has lists for contexts of {len(reaches)} tokens; this version reads up to {REACH}")
        if differing := sorted(expected ^ tensors.keys()):
            raise ConfigurationError(f"{where} is damaged: {', '.join(differing)} missing or unknown; count n-grams again")
        vocab_size, found = int(said.get("vocab_size", 0)), []
        for reach in reaches:
            contexts, lengths = tensors[f"contexts_{reach}"].long(), tensors[f"lengths_{reach}"].long()
            tokens, odds = tensors[f"tokens_{reach}"].long(), tensors[f"odds_{reach}"].float() / UNITS
            first = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
            fits = len(contexts) == len(lengths) and int(first[-1]) == len(tokens) == len(odds) and bool((lengths > 0).all())
            inside = not len(tokens) or (int(tokens.min()) >= 0 and int(tokens.max()) < vocab_size)
            if not fits or not inside or not bool((contexts[1:] > contexts[:-1]).all()):
                raise ConfigurationError(f"{where} is damaged: its lists for contexts of {reach} do not fit each other")
            found.append(Lists(contexts, first, tokens, odds))
        return cls(tuple(found), tuple(tensors["weights"].tolist()), vocab_size)


def named(vocab_size: int) -> dict[str, str]:
    """The metadata of a file."""
    return {"format": FORMAT, "version": VERSION, "vocab_size": str(vocab_size)}


def mix_in_text(logits: Tensor, paths: Tensor, texts: Tensor) -> Tensor:
    """``logits`` ``[R, n, V]`` mixed with what followed the same tokens in the text so far.

    q <- (1 - w) q + w f, for the shares f of what followed the last two tokens, then three, then four, as far as they were seen, and w
    of :data:`SHARES`.

    Args:
        paths: ``[R, n, PATH]`` the last tokens before each place, drafted ones included, the last one last; -1 for none.
        texts: ``[R, W]`` what was committed, ending in the root; -2 in front of shorter ones.
    """
    texts = torch.nn.functional.pad(texts, (PATH, 0), value=-2)
    width = texts.shape[1]
    alike: Tensor | None = None
    seen: list[Tensor] = []  # for contexts of 2, 3, 4 tokens
    for back in range(1, PATH + 1):
        same = texts[:, None, PATH - back : width - back] == paths[:, :, None, PATH - back]
        alike = same if alike is None else alike & same
        if back > 1:
            seen.append(alike)
    after = texts[:, PATH:]
    if logits.device.type == "cpu":  # few places are like any of these, and looking costs nothing
        some = seen[0].flatten(0, 1).any(0).nonzero()[:, 0]
        if not len(some):
            return logits
        seen, after = [each[..., some] for each in seen], after[:, some]
    possible = (after >= 0) & (after < logits.shape[-1])
    seen = [each & possible[:, None] for each in seen]
    exact = [each & ~longer for each, longer in pairwise(seen)] + [seen[-1]]
    latest = [(each & (each.flip(-1).cumsum(-1).flip(-1) <= MATCHES)).float() for each in exact]
    weight, left = torch.zeros_like(latest[0]), torch.ones(logits.shape[:2], device=logits.device)
    long_enough = torch.zeros_like(weight)  # the places that are of this length at least
    for share, places in zip(reversed(SHARES), reversed(latest)):
        long_enough = long_enough + places
        count = long_enough.sum(-1)
        weight = weight + long_enough * torch.where(count > 0, left * share / count, 0.0)[..., None]
        left = torch.where(count > 0, left * (1 - share), left)
    where = torch.where(possible, after, 0)[:, None].expand(weight.shape)
    found = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device).scatter_add_(2, where, weight) / left[..., None]
    whole = torch.logsumexp(logits.float(), -1, keepdim=True)
    return torch.where(found > 0, torch.logaddexp(logits.float(), whole + found.log()), logits.float()).to(logits.dtype)


@dataclass(frozen=True, eq=False)
class _Level:
    """Lists while they are counted, and per context the share of its probability that is left to tokens that are not listed."""

    contexts: Array
    first: Array
    keys: Array  # [n] context and token as one number, ascending within a context's place; for looking pairs up
    tokens: Array
    odds: Array
    left: Array  # [C]

    def lists(self) -> Lists:
        if not len(self.tokens):
            empty = torch.zeros(0, dtype=torch.int64)
            return Lists(empty, torch.zeros(1, dtype=torch.int32), empty, torch.zeros(0))
        odds = torch.from_numpy(np.minimum(np.round(self.odds * UNITS), 255) / UNITS).float()  # as they are stored
        return Lists(torch.from_numpy(self.contexts), torch.from_numpy(self.first).int(), torch.from_numpy(self.tokens), odds)


def _interpolated(contexts: Array, tokens: Array, anywhere: Array, levels: Sequence[_Level]) -> Array:
    """``[n]`` p(y | c) by the ``levels`` that are counted already, for contexts, as numbers, one token longer than the newest level's;
    ``anywhere`` is p(y) ``[V]``."""
    p, vocab_size = anywhere[tokens], len(anywhere)
    for reach, level in enumerate(levels, 1):
        shorter = contexts % vocab_size**reach
        place = np.minimum(np.searchsorted(level.contexts, shorter), len(level.contexts) - 1)
        p = np.where(level.contexts[place] == shorter, p * level.left[place], p)
        key = shorter * vocab_size + tokens
        pair = np.minimum(np.searchsorted(level.keys[:, 0], key), len(level.keys) - 1)
        listed = level.keys[pair, 0] == key
        p = np.where(listed, p * np.exp(level.odds[level.keys[pair, 1]]), p)
    return p


def _counted(context: Array, token: Array, anywhere: Array, levels: Sequence[_Level], most: int, least: int) -> _Level:
    """The ``most`` tokens that followed each context most often, ``least`` times at least."""
    vocab_size, empty = len(anywhere), np.zeros(0, np.int64)
    nothing = _Level(np.full(1, -1), np.zeros(2, np.int64), np.full((1, 2), -1), empty, empty.astype(float), np.ones(1))
    if not len(context):
        return nothing
    keys, counts = np.unique(context * vocab_size + token, return_counts=True)
    contexts, tokens = np.divmod(keys, vocab_size)
    order = np.lexsort((-counts, contexts))
    contexts, tokens, counts = contexts[order], tokens[order], counts[order]
    begin = np.flatnonzero(np.r_[True, contexts[1:] != contexts[:-1]])
    types = np.diff(np.r_[begin, len(contexts)])
    every = np.repeat(np.arange(len(begin)), types)
    total = np.add.reduceat(counts, begin)
    kept = (counts >= least) & (np.arange(len(contexts)) - begin[every] < most)
    listed = np.bincount(every[kept], counts[kept], minlength=len(begin))
    left = (total - listed + types) / (total + types)
    contexts, tokens, counts, every = contexts[kept], tokens[kept], counts[kept], every[kept]
    if not len(contexts):
        return nothing
    odds = np.log1p(counts / ((total + types)[every] * left[every] * _interpolated(contexts, tokens, anywhere, levels)))
    begin = np.flatnonzero(np.r_[True, contexts[1:] != contexts[:-1]])
    pairs = contexts * vocab_size + tokens
    order = np.argsort(pairs, kind="stable")
    return _Level(contexts[begin], np.r_[begin, len(contexts)], np.stack([pairs[order], order], 1), tokens, odds, left[every[begin]])
