"""What a session does not take from a drafter or a target: trees that are none, tokens that cannot be, scores that say nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.drafters.base import DraftRequest
from foredraft.errors import DrafterError, TargetOutputError
from foredraft.outcome import EMPTY, INFINITE, NAN, OVERFLOW, Outcome, RowOutcome
from foredraft.rows import SessionRow
from foredraft.target import Target
from foredraft.tree import TokenTree
from foredraft.verification import Rule


class NotFiniteError(TargetOutputError):
    """The model itself gave NaN or infinity, which may lie in the cache as well."""


def check_tree(tree: TokenTree, request: DraftRequest, name: str, target: Target, rule: Rule) -> None:
    """What can be said of a tree of drafter ``name`` without reading values; :func:`failures` says the rest.

    Raises:
        DrafterError: it does not answer the ``request``, or the ``rule`` is not exact for it.
    """
    rows, drafter, greedy = len(request.rows), f"drafter {name!r}", request.sampler.greedy
    if not isinstance(tree, TokenTree) or tree.rows != rows:
        got = f"a tree of {tree.rows} rows" if isinstance(tree, TokenTree) else type(tree).__name__
        raise DrafterError(f"{drafter} must return a TokenTree of {rows} rows, got {got}")
    try:
        tree.check_shapes(target.vocab_size)
    except ValueError as error:
        raise DrafterError(f"{drafter} returned a malformed tree: {error}") from None
    if target.chains_only and not tree.chain:
        raise DrafterError(f"{drafter} returned a tree, and the target can only verify chains: {target.chains_only}")
    if greedy or tree.nodes == 1:
        return
    refusal = rule.refusal(tree.proposal, chain=tree.chain, pruned=tree.pruned)
    if refusal:
        raise DrafterError(f"{drafter} made a draft that the rule cannot verify: {refusal}")
    if rule.needs_q and tree.q is None:
        raise DrafterError(f"{drafter} returned no q, and rule {rule.name!r} needs the draft's distribution q")


def failures(rows: Sequence[SessionRow], tree: TokenTree, outcome: Outcome, name: str, vocab_size: int) -> list[Failure | None]:
    """What is wrong with the verdicts on a tree of drafter ``name``, before anything is committed: of each row the first token that
    cannot be chosen, if it would be kept.

    Raises:
        DrafterError: the tree is none, or holds tokens outside ``vocab_size``, or another root than a row's last token.
    """
    found = []
    for row, line in zip(rows, outcome.rows):
        failure = None
        if line.failures or any(line.faults[: line.accepted + 1]):
            failure = next((Failure(d, error) for d in range(line.accepted + 1) if (error := error_at(row, line, d)) is not None), None)
        if failure is None:
            check_draft(row, tree, line, name, vocab_size)
        found.append(failure)
    return found


@dataclass(frozen=True)
class Failure:
    """No token can be chosen after the first ``depth`` drafted ones."""

    depth: int
    error: Exception


def check_draft(row: SessionRow, tree: TokenTree, line: RowOutcome, name: str, vocab_size: int) -> None:
    """Raise DrafterError unless drafter ``name`` has proposed something for ``row``."""
    drafter = f"drafter {name!r}"
    if line.broken:
        try:
            tree.check(vocab_size)
        except ValueError as error:
            raise DrafterError(f"{drafter} returned a malformed tree: {error}") from None
    if line.outside:
        raise DrafterError(
            f"{drafter} proposed {line.tokens[1:]} for row {row.slot}, with a token outside the target's vocabulary of {vocab_size}"
        )
    if line.tokens[0] != row.ids[-1]:
        raise DrafterError(
            f"{drafter} returned a tree for row {row.slot} whose root is {line.tokens[0]}; node 0 must be the last committed token, "
            f"{row.ids[-1]}"
        )


def error_at(row: SessionRow, line: RowOutcome, depth: int) -> Exception | None:
    """What is wrong with the scores at ``depth`` of the path, unless a processor of the row replaces NaN and infinity."""
    fault, where = line.faults[depth], f"row {row.slot}, position {len(row.ids) + depth}"
    if fault & (NAN | INFINITE) and not row.parameters.pipeline.removes_invalid:
        return NotFiniteError(
            f"the target's logits are {'NaN' if fault & NAN else 'infinite'} for {where}; try a wider dtype (float32 or "
            "bfloat16), or remove_invalid_values=True to replace them"
        )
    if depth in line.failures:
        return line.failures[depth]
    if fault & EMPTY:
        return TargetOutputError(f"the logits processors forbid every token for {where}; loosen the constraints")
    if fault & OVERFLOW:
        return TargetOutputError(f"the logits processors made scores infinite or NaN for {where}; is the temperature too small?")
    return None
