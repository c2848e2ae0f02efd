"""Token trees: what a drafter proposes and a verification rule walks.

Node 0 is the root: the last committed token, which is not in the target's cache yet. Every other node hangs below an
earlier one, so parents come before children and a chain is simply the tree in which node ``n`` hangs below ``n - 1``.
Plain decoding is the tree of one node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from foredraft.device import to_device
from foredraft.shapes import depths_of

Proposal = Literal["deterministic", "iid", "without-replacement", "keyed", "mixed"]
CPU = torch.device("cpu")
KEPT = 128  # most nodes of a chain whose ancestors are kept; prompts have many lengths
PROPOSALS: tuple[Proposal, ...] = ("deterministic", "iid", "without-replacement", "keyed", "mixed")
DRAWN: tuple[Proposal, ...] = ("iid", "without-replacement", "keyed", "mixed")  # that may have a q


@dataclass(frozen=True, eq=False)
class TokenTree:
    """Proposed continuations of B rows, N nodes each.

    Attributes:
        tokens: ``[B, N]`` int64 token ids; ``tokens[:, 0]`` is the root, the last committed token.
        parents: ``[B, N]`` int64 parent index of every node, -1 for the root; ``parents[b, n] < n``.
        valid: ``[B, N]`` bool; False marks filler nodes, which are scored but cannot be accepted. None: there are none.
        proposal: how siblings were chosen, which determines the rules that are exact.
        q: ``[B, M, V]`` float32, the draft's distribution at the first M nodes: children of node ``n`` were drawn from
            ``q[:, n]``. Rules that need q require it; else None. A ``mixed`` tree has it for traces: NaN in rows that were not drawn
            with the target's noise.
        pruned: nodes were dropped by their probability, so only ``match`` is exact.
        chain: every row is a path in node order. Set by :meth:`from_chain`, it lets the target skip the tree mask.
        static_parents: the parents of a static :class:`~foredraft.shapes.TreeShape`, root included, where all rows share them; None if
            they differ. Filler nodes are marked in ``valid``.
        extra: how many nodes at the end of every row are filler, scored only because the drafter wants the target's logits there. Rules
            see the tree without them, :attr:`proposed`. A chain has none.
    """

    tokens: Tensor
    parents: Tensor
    valid: Tensor | None = None
    proposal: Proposal = "deterministic"
    q: Tensor | None = None
    pruned: bool = False
    chain: bool = False
    static_parents: tuple[int, ...] | None = None
    extra: int = 0

    @staticmethod
    def root(tokens: Tensor) -> TokenTree:
        """The tree of plain decoding: only the roots ``tokens`` ``[B]``."""
        tree = TokenTree.from_chain(tokens[:, None])
        if tokens.device.type == "cpu":
            tree.__dict__["parent_lists"] = [[-1]] * len(tokens)
        return tree

    @staticmethod
    def from_chain(
        tokens: Tensor, *, valid: Tensor | None = None, proposal: Proposal = "deterministic", q: Tensor | None = None, pruned: bool = False
    ) -> TokenTree:
        """A chain per row: ``tokens`` ``[B, γ + 1]`` starts with the root. ``valid`` must be a prefix of each row."""
        rows, nodes = tokens.shape
        parents = static_parents_tensor(chain_layout(nodes), tokens.device).expand(rows, nodes)
        return TokenTree(tokens, parents, valid, proposal, q, pruned, chain=True)

    @staticmethod
    def from_parents(
        tokens: Tensor,
        parents: tuple[int, ...],
        *,
        valid: Tensor | None = None,
        proposal: Proposal = "deterministic",
        q: Tensor | None = None,
    ) -> TokenTree:
        """A tree per row, all with the same ``parents`` (root included): ``tokens`` ``[B, N]`` starts with the root."""
        shared = static_parents_tensor(parents, tokens.device).expand(tokens.shape)
        return TokenTree(tokens, shared, valid, proposal, q, static_parents=parents)

    @staticmethod
    def from_lists(
        tokens: list[list[int]],
        parents: list[list[int]],
        valid: list[list[bool]],
        *,
        device: torch.device = CPU,
        proposal: Proposal = "deterministic",
        q: Tensor | None = None,
        pruned: bool = False,
        extra: int = 0,
    ) -> TokenTree:
        """A tree per row, N nodes each, whose parents are known to come before their children, below the one root."""
        real = None if all(map(all, valid)) else torch.tensor(valid, device=device)
        given, above = torch.tensor(tokens, device=device), torch.tensor(parents, device=device)
        tree = TokenTree(given, above, real, proposal, q, pruned=pruned, extra=extra)
        if device.type == "cpu":
            tree.__dict__["parent_lists"] = parents
        return tree

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def nodes(self) -> int:
        return self.tokens.shape[1]

    @cached_property
    def layout(self) -> tuple[int, ...] | None:
        """The parents that all rows have, as the host knows them without looking; None where rows may differ."""
        return chain_layout(self.nodes) if self.chain else self.static_parents

    @cached_property
    def depths(self) -> Tensor:
        """``[B, N]`` int64 distance from the root."""
        if self.layout is not None:
            return static_depths(self.layout, self.tokens.device).expand(self.rows, self.nodes)
        known = self.depth_lists
        return self.ancestors.sum(-1) - 1 if known is None else torch.tensor(known)

    @cached_property
    def ancestors(self) -> Tensor:
        """``[B, N, N]`` bool; ``[b, i, j]`` says that ``j`` is ``i`` or lies on the path from the root to ``i``."""
        if self.layout is not None:
            layout, device = self.layout, self.tokens.device
            long = self.chain and self.nodes > KEPT
            found = reach_on_host([layout]).to(device) if long else static_ancestors(layout, device)
            return found.expand(self.rows, -1, -1)
        return reach(self.parents) if self.parent_lists is None else reach_on_host(self.parent_lists)

    @cached_property
    def parent_lists(self) -> list[list[int]] | None:
        """The parents of every row, where they are on a CPU and come before their children, below the one root; else None.

        A small tree is walked in less time than a few tensor calls take. On another device looking would wait for it.
        """
        if self.parents.device.type != "cpu":
            return None
        known: list[list[int]] = self.parents.tolist()
        for row in known:
            if row[0] != -1:
                return None
            for node in range(1, len(row)):
                if not 0 <= row[node] < node:
                    return None
        return known

    @cached_property
    def depth_lists(self) -> list[list[int]] | None:
        """:attr:`depths` where :attr:`parent_lists` are known, else None."""
        known = self.parent_lists
        return None if known is None else [depths_of(row) for row in known]

    @cached_property
    def known_well_formed(self) -> bool:
        """It is known without waiting for a device that no row is :attr:`malformed`."""
        known, declared = self.parent_lists, self.layout and list(self.layout)
        if known is None or (declared is not None and any(row != declared for row in known)):
            return False
        if self.valid is None:
            return True
        rows = self.valid.tolist()
        return all(valid[0] and all(valid[p] for p, real in zip(parents, valid) if real and p > 0) for parents, valid in zip(known, rows))

    @property
    def height(self) -> int:
        """How deep a node may lie, as far as the host knows without looking."""
        return self.nodes - 1 if self.layout is None else static_height(self.layout)

    @property
    def drafted(self) -> Tensor:
        """``[B]`` int64 number of proposed nodes, the root not counted."""
        if self.valid is None:
            return torch.full((self.rows,), self.nodes - 1, dtype=torch.long, device=self.tokens.device)
        return self.valid[:, 1:].sum(-1)

    @cached_property
    def proposed(self) -> TokenTree:
        """This tree without its ``extra`` nodes."""
        if not self.extra:
            return self
        count = self.nodes - self.extra
        cut = replace(
            self,
            tokens=self.tokens[:, :count],
            parents=self.parents[:, :count],
            valid=None if self.valid is None else self.valid[:, :count],
            static_parents=None if self.static_parents is None else self.static_parents[:count],
            extra=0,
        )
        if self.parent_lists is not None:
            cut.__dict__["parent_lists"] = [row[:count] for row in self.parent_lists]
        return cut

    def truncate(self, limits: Sequence[int]) -> TokenTree:
        """This tree with nodes deeper than ``limits[r]`` turned into filler; the depth alone decides, never a token's value."""
        if self.height <= min(limits):
            return self
        known = self.proposed.depth_lists  # what is extra is filler already
        if known is not None and all(max(depths) <= limit for depths, limit in zip(known, limits)):
            return self
        allowed = self.with_safe_parents().depths <= to_device(limits, self.tokens.device)[:, None]
        return replace(self, valid=allowed if self.valid is None else self.valid & allowed)

    def path(self, row: int, node: int) -> list[int]:
        """Node indices from the root to ``node``, both included."""
        parents, nodes = self.parents[row].tolist(), [node]
        while parents[nodes[-1]] >= 0:
            nodes.append(parents[nodes[-1]])
        return nodes[::-1]

    def check_shapes(self, vocab_size: int) -> None:
        """Raise ValueError unless the tensors fit together and into ``vocab_size`` (reads no values)."""
        if self.tokens.ndim != 2 or self.tokens.shape != self.parents.shape or self.nodes < 1:
            raise ValueError(f"tokens and parents must both be [B, N >= 1], got {list(self.tokens.shape)} and {list(self.parents.shape)}")
        if self.tokens.dtype != torch.long or self.parents.dtype != torch.long:
            raise ValueError(f"tokens and parents must be int64, got {self.tokens.dtype} and {self.parents.dtype}")
        if self.valid is not None and self.valid.shape != self.tokens.shape:
            raise ValueError(f"valid must be {list(self.tokens.shape)} like tokens, got {list(self.valid.shape)}")
        if self.valid is not None and self.valid.dtype != torch.bool:
            raise ValueError(f"valid must be bool, got {self.valid.dtype}")
        if not 0 <= self.extra < self.nodes or (self.extra and (self.chain or self.valid is None)):
            raise ValueError(f"extra must say how many of {self.nodes} nodes, of a tree with filler that is no chain, got {self.extra}")
        if self.static_parents is not None and len(self.static_parents) != self.nodes:
            raise ValueError(f"static_parents has {len(self.static_parents)} nodes, the tree {self.nodes}")
        if self.static_parents is not None:
            check_static_parents(self.static_parents)
        if self.proposal not in PROPOSALS:
            raise ValueError(f"unknown proposal {self.proposal!r}; one of {', '.join(PROPOSALS)}")
        needed = self.nodes - 1 if self.chain else 0
        if self.q is not None and (
            self.q.ndim != 3 or self.q.shape[0] != self.rows or self.q.shape[1] < needed or self.q.shape[2] != vocab_size
        ):
            raise ValueError(f"q must be [B={self.rows}, M >= {needed}, V={vocab_size}], got {list(self.q.shape)}")

    @property
    def counts(self) -> tuple[int, ...] | None:
        """Of a chain with filler, how many nodes of each row come before it; None for others. Reads values: it synchronises."""
        return tuple(self.valid.long().cumprod(1).sum(1).tolist()) if self.chain and self.valid is not None else None

    @property
    def declared_parents(self) -> Tensor | None:
        """``[1, N]`` int64 the parents that ``chain`` or ``static_parents`` say all rows have; None if only ``parents`` says."""
        return None if self.layout is None else static_parents_tensor(self.layout, self.parents.device)

    def with_safe_parents(self) -> TokenTree:
        """This tree with parents that come before their children, so that a malformed tree is never read out of bounds. A well-formed
        tree is returned as it is; :meth:`check` names what is wrong with another."""
        if self.known_well_formed:
            return self
        declared = self.declared_parents
        if declared is None and self.parent_lists is not None:
            return self
        if declared is not None:
            return replace(self, parents=declared.expand(self.rows, -1))
        before = torch.arange(-1, self.nodes - 1, device=self.parents.device)
        return replace(self, parents=torch.minimum(self.parents.clamp(min=0), before))

    def check(self, vocab_size: int) -> None:
        """Raise ValueError unless this is a well-formed tree over ``vocab_size`` tokens (reads values: it synchronises)."""
        self.check_shapes(vocab_size)
        if (declared := self.declared_parents) is not None and bool((wrong := self.parents != declared).any()):
            row, node = wrong.nonzero()[0].tolist()
            says = f"{'a chain' if self.chain else 'static_parents'} says {int(declared[0, node])}"
            raise ValueError(f"row {row}: node {node} has parent {int(self.parents[row, node])}; {says}")
        for row, line in enumerate(self.parents.tolist()):
            for node, parent in enumerate(line):
                if (parent != -1) if node == 0 else (parent < 0):
                    raise ValueError(f"row {row}: node {node} has parent {parent}; node 0 must be the only root (parent -1)")
                if parent >= node:
                    raise ValueError(f"row {row}: node {node} names parent {parent}, which does not come before it")
        outside = (self.tokens < 0) | (self.tokens >= vocab_size)
        if self.valid is not None:
            if not bool(self.valid[:, 0].all()):
                raise ValueError("the root must be valid in every row")
            if not bool(self.valid.gather(1, self.parents.clamp(min=0))[self.valid].all()):
                raise ValueError("a valid node hangs below a filler node")
            outside &= self.valid
        if bool(outside.any()):
            row, node = outside.nonzero()[0].tolist()
            raise ValueError(
                f"row {row}, node {node}: token {int(self.tokens[row, node])} is outside the target's vocabulary of {vocab_size}"
            )
        if self.q is not None and bool(self.wrong_q.any()):
            row, node = self.wrong_q.nonzero()[0].tolist()
            if node >= self.q.shape[1]:
                raise ValueError(f"row {row}, node {node}: q holds {self.q.shape[1]} nodes; it must cover every node with children")
            line = self.q[row, node]
            what = f"sums to {float(line.sum()):.6g}"
            if bool((line < 0).any()):
                what = f"is negative at token {int(line.argmin())}"
            if bool(line.isnan().any()):
                what = "holds NaN"
            raise ValueError(f"row {row}, node {node}: q {what}; it must be the distribution that the node's children were drawn from")

    @property
    def malformed(self) -> Tensor:
        """``[B]`` bool: rows in which the nodes make no tree, or hang below filler, or not where ``chain`` or ``static_parents`` says."""
        if self.known_well_formed:
            return torch.zeros(self.rows, dtype=torch.bool)
        declared = self.declared_parents
        wrong = (self.parents != (self.with_safe_parents().parents if declared is None else declared)).any(1)
        if self.valid is not None:
            above = self.valid.gather(1, self.with_safe_parents().parents.clamp(min=0))
            wrong = wrong | (self.valid & ~above).any(1) | ~self.valid[:, 0]
        return wrong

    @property
    def wrong_q(self) -> Tensor:
        """``[B, N]`` bool: nodes with children, whose ``q`` is no distribution, or missing."""
        assert self.q is not None
        inner = min(self.q.shape[1], self.nodes)
        real = torch.ones_like(self.tokens, dtype=torch.bool) if self.valid is None else self.valid
        used = torch.zeros_like(self.tokens).scatter_add(1, self.parents.clamp(min=0)[:, 1:], real[:, 1:].long()) > 0
        q = self.q[:, :inner]
        sound = ((q.sum(-1) - 1).abs() <= 1e-3) & (q.amin(-1) >= 0)  # False for NaN
        return used & ~torch.nn.functional.pad(sound, (0, self.nodes - inner))


def reach(parents: Tensor) -> Tensor:
    """``[B, N, N]`` bool ancestor-or-self relation of ``parents`` ``[B, N]``, by pointer doubling: log2(N) steps, no host read."""
    rows, nodes = parents.shape
    index = torch.arange(nodes, device=parents.device)
    sink = torch.where(parents < 0, torch.zeros_like(parents), parents)  # the root points at itself
    reached = torch.zeros(rows, nodes, nodes, dtype=torch.bool, device=parents.device)
    reached[:, index, index] = True
    reached.scatter_(2, sink[:, :, None], True)
    jump = sink
    for _ in range(max(1, (nodes - 1).bit_length())):
        reached = reached | reached.gather(1, jump[:, :, None].expand(-1, -1, nodes))
        jump = jump.gather(1, jump)
    return reached


def reach_on_host(parents: Sequence[Sequence[int]]) -> Tensor:
    """:func:`reach` of parents that come before their children, node by node."""
    nodes = len(parents[0])
    reached = np.zeros((len(parents), nodes, nodes), dtype=np.bool_)
    for lines, row in zip(reached, parents):
        lines[0, 0] = True
        for node in range(1, nodes):
            lines[node] = lines[row[node]]
            lines[node, node] = True
    return torch.from_numpy(reached)


@lru_cache(maxsize=256)
def chain_layout(nodes: int) -> tuple[int, ...]:
    return tuple(range(-1, nodes - 1))


@lru_cache(maxsize=256)
def check_static_parents(parents: tuple[int, ...]) -> None:
    """Raise ValueError unless parents come before their children, below the one root."""
    for node, parent in enumerate(parents):
        if (parent >= node or parent < 0) and (node, parent) != (0, -1):
            raise ValueError(f"static_parents: node {node} has parent {parent}; node 0 must be the only root (-1), and parents come first")


def children_of(parents: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The children of every node of ``parents``, in the order of the nodes."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    return tuple(map(tuple, children))


@lru_cache(maxsize=256)
def static_height(parents: tuple[int, ...]) -> int:
    return max(depths_of(parents))


@lru_cache(maxsize=256)
def static_parents_tensor(parents: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([parents], device=device)


@lru_cache(maxsize=256)
def static_depths(parents: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([depths_of(parents)], device=device)


@lru_cache(maxsize=256)
def static_ancestors(parents: tuple[int, ...], device: torch.device) -> Tensor:
    return reach_on_host([parents]).to(device)
