"""Logits processors at every node of a draft tree, each node with its own history.

`transformers` prepares one list of processors for a padded batch and calls it with ``[B, L]`` padded ids. Here every row
gets its own :class:`Pipeline`, rebased to the row alone, and :func:`process` gives each node of the row's tree the scores
that `transformers` would compute for the row alone, unpadded, whose ids so far are the node's history: the row's
committed ids (the root is the last of them) and the tokens on the path from the root to the node. The user's own code is an
exception: it sees one history at a time, with the row's padding in front, because it may count from the padded width.

Processors are called in their own order with full histories, never reimplemented. What is saved is the calls: those that
ignore the history run once over all nodes, those that look only at its length are skipped while they do nothing, and the
others run once per history length, or once in all where padding the histories changes nothing and it pays.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foredraft.device import one_thread, wait_for
from foredraft.errors import ConfigurationError

from .histories import NodeHistories, put, take
from .known_processors import FOREIGN, Kind, Processor, Row, kind_of

CACHED = 1 << 17  # float32 values that stay in a CPU's cache: larger blocks are quicker in parts, though that takes more calls
UNDERFLOW = -104.0  # exp(x) is 0 in float32 below this: a token this far under the best one is never chosen


class Warping(NamedTuple):
    """Scores over a temperature, cut to the likeliest tokens: in this order, each after what is left by those before."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


WARPERS = {f"{name}LogitsWarper": field for name, field in zip(("Temperature", "TopK", "TopP", "MinP"), Warping._fields)}


@dataclass(frozen=True)
class Stage:
    """One processor of one pipeline. Stages are equal when they can run in one call.

    Attributes:
        key: what equality means: the class and its parameters where these are plain numbers, else the processor's identity.
        processor: called with ``input_ids [G, L]`` and ``scores [G, V]`` float32, returns ``[G, V]``.
        kind: what it reads and how it is called.
        foreign: not one of `transformers`' own classes.
        padding: ids that the user's code sees in front of a history.
    """

    key: Hashable
    processor: Processor = field(compare=False)
    kind: Kind = field(compare=False)
    padding: tuple[int, ...] = ()

    @staticmethod
    def of(processor: Processor, kind: Kind, padding: tuple[int, ...] = ()) -> Stage:
        values = tuple(sorted(vars(processor).items())) if kind is not FOREIGN else ()
        plain = kind is not FOREIGN and all(value is None or isinstance(value, (int, float)) for _, value in values)
        return Stage((type(processor), values) if plain else id(processor), processor, kind, padding)

    @property
    def foreign(self) -> bool:
        return self.kind is FOREIGN

    def idle(self, length: int) -> bool:
        """Whether the processor leaves all scores alone at this history length."""
        return self.kind.active is not None and not self.kind.active(self.processor, length)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        shape = scores.shape
        if self.kind.call is not None:
            return self.kind.call(self.processor, input_ids, scores)
        if self.kind.bans is not None and scores.device.type == "cpu":  # transformers looks every token up in a list
            tokens = self.kind.bans(self.processor).to(scores.device, torch.long)  # transformers makes an empty list a float tensor
            return scores.index_fill(-1, tokens[(tokens >= 0) & (tokens < shape[-1])], -torch.inf)
        scores = self.processor(input_ids, scores)
        if self.foreign and (not isinstance(scores, Tensor) or scores.shape != shape):
            got = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise ConfigurationError(f"{type(self.processor).__name__} must return scores of shape {list(shape)}, got {got}")
        return scores


@dataclass(frozen=True)
class Pipeline:
    """The processors of one row, in order, rebased to the row alone and unpadded.

    Equal pipelines do the same thing and hash alike, so they are dictionary keys for grouping rows. A pipeline must not
    see its processors' parameters change.
    """

    stages: tuple[Stage, ...] = ()

    @classmethod
    def alone(cls, processors: Iterable[Processor] | None, *, prompt_length: int, device: torch.device | None = None) -> Pipeline:
        """The pipeline of a row whose ``processors`` were prepared for it alone, unpadded (a server's request)."""
        return row_pipelines(processors, prompt_lengths=[prompt_length], padded_length=prompt_length, device=device)[0]

    def begun(self, prompt_length: int) -> Pipeline:
        """The pipeline of a row that begins after a prompt of that length: processors that keep a state get one of the row's own."""
        if not any(stage.kind.begin for stage in self.stages):
            return self
        own = (stage.kind.begin(stage.processor, prompt_length) if stage.kind.begin else None for stage in self.stages)
        return Pipeline(tuple(stage if state is None else Stage.of(state, stage.kind) for stage, state in zip(self.stages, own)))

    @property
    def empty(self) -> bool:
        return not self.stages

    @cached_property
    def warping(self) -> Warping | None:
        """What becomes of scores, where :class:`Warping` can say it; None where it cannot."""
        names, found = [type(stage.processor).__name__ for stage in self.stages], {}
        if any(stage.foreign for stage in self.stages) or names != [name for name in WARPERS if name in names]:
            return None
        for name, stage in zip(names, self.stages):
            settings = vars(stage.processor)
            if settings.get("min_tokens_to_keep", 1) != 1 or settings.get("filter_value", -math.inf) != -math.inf:
                return None
            found[WARPERS[name]] = settings[WARPERS[name]]
        return Warping(**found)

    @property
    def needs_history(self) -> bool:
        """Whether :func:`process` needs the node histories: to read tokens or lengths, or to leave out filler."""
        return any(stage.kind.reads != "nothing" for stage in self.stages)

    def banned(self, length: int) -> tuple[int, ...] | None:
        """The tokens that are ruled out at this history length; None if that is not all that happens to scores."""
        if any(stage.kind.bans is None for stage in self.stages):
            return None
        active = [stage for stage in self.stages if not stage.idle(length)]
        return tuple(token for stage in active if stage.kind.bans for token in stage.kind.bans(stage.processor).tolist())

    @property
    def removes_invalid(self) -> bool:
        """Whether NaN and infinite logits are replaced (`remove_invalid_values`), so that they are no error."""
        return any(type(stage.processor).__name__ == "InfNanRemoveLogitsProcessor" for stage in self.stages)

    @property
    def guarded(self) -> bool:
        """Whether a stage calls the user's code, which must only see histories that decoding can reach."""
        return any(stage.kind.guarded for stage in self.stages)

    @property
    def strict(self) -> bool:
        """Whether a stage raises on NaN scores."""
        return any(stage.kind.strict for stage in self.stages)


def row_pipelines(
    processors: Iterable[Processor] | None,
    *,
    prompt_lengths: Sequence[int],
    padded_length: int,
    min_new_tokens: int | None = None,
    prompts: Sequence[Tensor] | None = None,
    paddings: Sequence[Sequence[int]] | None = None,
    device: torch.device | None = None,
    sourced: bool = False,
) -> list[Pipeline]:
    """One pipeline per row from the list that `transformers` prepared for the padded batch.

    Every length that counts padding is rebased to the row; rows that end up with the same parameters share their stages.
    The processors passed in are copied where anything has to change, never changed.

    A processor that is not `transformers`' own (the user's, or a subclass) is taken as it is and called with the history of one node,
    ``input_ids [1, L]``, the row's padding in front: it must be a function of its arguments. One that looks at other rows, or keys
    state on the batch index or on the order of calls, is not supported.

    Args:
        processors: a `LogitsProcessorList`, or None.
        prompt_lengths: the unpadded prompt length of every row, after `num_return_sequences` repeated them.
        padded_length: the width of the padded prompts.
        min_new_tokens: as in the GenerationConfig. It tells a min_length derived from it, which counts padding, from the user's own.
        prompts: ``[length]`` int64 ids per row, unpadded; needed by the encoder_* penalties in a padded batch.
        paddings: ids of every row's padding; needed by the user's own code in a padded batch.
        sourced: the encoder_* penalties hold what an encoder has read, not the prompts.
        device: where scores will be; the tensors of `transformers`' processors are moved there. None leaves them.

    Raises:
        ConfigurationError: a processor is not supported; its class is named.
    """
    processors = list(processors or ())
    rows = len(prompt_lengths)
    known = [(processor, kind_of(processor)) for processor in processors]
    moved = [(processor if kind is FOREIGN else on_device(processor, device), kind) for processor, kind in known]
    forced_bos = any(type(processor).__name__ == "ForcedBOSTokenLogitsProcessor" for processor in processors)
    shared: dict[Hashable, Stage] = {}
    pipelines: dict[tuple[Stage, ...], Pipeline] = {}
    result = []
    for index, length in enumerate(prompt_lengths):
        prompt = None if prompts is None else prompts[index]
        shown = () if paddings is None else tuple(paddings[index])
        row = Row(index, rows, length, padded_length - length, min_new_tokens, forced_bos, prompt, shown, sourced)
        stages = tuple(row_stage(processor, kind, row, shared) for processor, kind in moved)
        result.append(pipelines.setdefault(stages, Pipeline(stages)))
    return result


def row_stage(processor: Processor, kind: Kind, row: Row, shared: dict[Hashable, Stage]) -> Stage:
    """The stage of ``processor`` in ``row``, taken from ``shared`` when another row has the same one."""
    changes = kind.rebase(processor, row) if kind.rebase else {}
    padding = row.shown if kind.guarded else ()
    if not all(value is None or isinstance(value, int) for value in changes.values()):
        return Stage.of(replaced(processor, changes), kind, padding)
    key = (id(processor), padding, *changes.items())
    if key not in shared:
        shared[key] = Stage.of(replaced(processor, changes), kind, padding)
    return shared[key]


def replaced(processor: Processor, changes: dict[str, Any]) -> Processor:
    """A shallow copy with other attributes; the processor itself when there are no changes."""
    if not changes:
        return processor
    clone = copy.copy(processor)
    vars(clone).update(changes)
    return clone


def on_device(processor: Processor, device: torch.device | None) -> Processor:
    tensors = {name: value for name, value in vars(processor).items() if isinstance(value, Tensor)}
    return processor if device is None else replaced(processor, {name: value.to(device) for name, value in tensors.items()})


@dataclass(eq=False)
class Stopwatch:
    """Seconds spent in the user's own code; what the device still had to do before it is not counted."""

    seconds: float = 0.0

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        wait_for(device)
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - begin


def process(
    pipelines: Sequence[Pipeline], logits: Tensor, histories: NodeHistories | None = None, *, watch: Stopwatch | None = None
) -> Tensor:
    """Scores at every node of ``histories``: those of each row's pipeline called with the node's own history.

    As in `transformers` the logits are cast to float32 first. Filler nodes, and below a stage that calls the user's code also
    nodes that decoding cannot reach (a token above them got probability 0, or ended the row), may keep raw logits: nothing that a
    rule says about them is kept. Where the parents' scores belong to an earlier call (``histories.first``) a valid node counts as
    reachable.

    Args:
        pipelines: one per row.
        logits: ``[R, N, V]`` in the model's dtype; never modified.
        histories: of the same R rows and N nodes; may be None when no pipeline needs it.
        watch: runs while the user's own processors do.

    Returns:
        ``[R, N, V]`` float32; the caller's own tensor when all pipelines are empty and it is float32 already.

    Raises:
        ConfigurationError: a processor of the user's own returned something else than scores.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)  # float64 stays, for exact enumeration
    if all(pipeline.empty for pipeline in pipelines):
        return logits.to(wide)
    plain = [row for row, pipeline in enumerate(pipelines) if not pipeline.guarded]
    guarded = [row for row, pipeline in enumerate(pipelines) if pipeline.guarded]
    watch = watch or Stopwatch()
    with one_thread(logits):
        scores = logits.to(wide, copy=True).contiguous()
        if histories is not None and histories.valid is not None and any(pipeline.strict for pipeline in pipelines):
            scores.masked_fill_(~histories.valid[..., None], 0)
        if plain:
            scores = run(scores, pipelines, histories, plain, watch)
    if guarded:
        assert histories is not None
        scores = run_guarded(scores, pipelines, histories, guarded, watch)
    return scores


def run(
    scores: Tensor,
    pipelines: Sequence[Pipeline],
    histories: NodeHistories | None,
    rows: Sequence[int],
    watch: Stopwatch,
    cells: Sequence[int] | None = None,
) -> Tensor:
    """Run the pipelines of ``rows`` over ``cells``, or over all their nodes; returns ``scores`` ``[R, N, V]``.

    The n-th stages of all rows run together where they are equal, so a stage that differs between the rows does not
    separate the others.
    """
    nodes = scores.shape[1]
    for position in range(max(len(pipelines[row].stages) for row in rows)):
        at_nodes: dict[Kind, list[tuple[Processor, list[int]]]] = {}
        for stage, members in rows_by_stage(pipelines, rows, position).items():
            if cells is None and stage.kind.reads == "nothing":
                scores = run_free(stage, scores, members)
                continue
            everything = (row * nodes + node for row in members for node in range(nodes))
            mine = list(everything) if cells is None else [cell for cell in cells if cell // nodes in members]
            if stage.kind.reads == "nothing":
                scores = run_free(stage, scores.flatten(0, 1), mine).view(scores.shape)
            elif stage.kind.at_nodes is not None:
                at_nodes.setdefault(stage.kind, []).append((stage.processor, mine))
            else:
                assert histories is not None
                run_reading(stage, scores.view(-1, scores.shape[-1]), histories, mine, watch)
        for kind, cells_of in at_nodes.items():
            assert histories is not None and kind.at_nodes is not None
            with watch.running(scores.device) if kind.library else nullcontext():
                kind.at_nodes(cells_of, histories, scores.view(-1, scores.shape[-1]))
    return scores


def rows_by_stage(pipelines: Sequence[Pipeline], rows: Sequence[int], position: int) -> dict[Stage, list[int]]:
    groups: dict[Stage, list[int]] = {}
    for row in rows:
        if position < len(pipelines[row].stages):
            groups.setdefault(pipelines[row].stages[position], []).append(row)
    return groups


def run_free(stage: Stage, block: Tensor, index: Sequence[int]) -> Tensor:
    """Run a stage that ignores the history over ``block[index]``, rows ``[r, N, V]`` or cells ``[g, V]``; returns the block."""
    part = take(block, index)
    flat = part.reshape(-1, part.shape[-1])  # [r * N, V]
    out = stage(flat.new_empty((len(flat), 0), dtype=torch.long), flat).reshape(part.shape)
    if len(index) == len(block):
        return out.contiguous()
    put(block, index, out)
    return block


def run_reading(stage: Stage, flat: Tensor, histories: NodeHistories, cells: Sequence[int], watch: Stopwatch) -> None:
    """Run a stage that looks at the history over ``flat[cells]``, ``[R * N, V]``, in place."""
    for group, input_ids in calls(stage, histories, cells, flat):
        with watch.running(flat.device) if stage.kind.guarded else nullcontext():
            scores = stage(input_ids, take(flat, group))
        put(flat, group, scores)


def calls(stage: Stage, histories: NodeHistories, cells: Sequence[int], flat: Tensor) -> Iterator[tuple[list[int], Tensor]]:
    """Cells, and their ``input_ids [G, L]``: one call per history length, or for all lengths where that is allowed and quicker. The
    user's code is called for one cell after the other."""
    groups = {length: group for length, group in histories.by_length(cells).items() if not stage.idle(length)}
    if stage.kind.guarded:
        front = torch.tensor([stage.padding], dtype=torch.long, device=histories.committed.device)
        for length, group in groups.items():
            for cell in group:
                yield [cell], torch.cat([front, histories.gather([cell], length)], 1)
        return
    padding = stage.kind.padding(stage.processor) if stage.kind.padding else None
    joined = [length for length in groups if stage.kind.alike or (padding and length >= padding.least)]
    if len(joined) > 1 and (flat.device.type != "cpu" or flat.numel() <= CACHED):
        group = sorted(cell for length in joined for cell in groups.pop(length))
        yield group, histories.padded(group, padding.fill) if padding else histories.blank(len(group), joined[0])
    for length, group in groups.items():
        yield group, histories.gather(group, length) if stage.kind.reads == "tokens" else histories.blank(len(group), length)


def run_guarded(scores: Tensor, pipelines: Sequence[Pipeline], histories: NodeHistories, rows: Sequence[int], watch: Stopwatch) -> Tensor:
    """Run pipelines that call the user's code, depth by depth, only at nodes that decoding could reach.

    A draft may break the rule that such a stage enforces. Plain decoding never asks it what follows a broken rule, and a
    `prefix_allowed_tokens_fn` that walks a trie has no answer. Costs one host read per depth.
    """
    kept: set[int] = set()
    for level in histories.levels(rows):
        parents = {cell: histories.parent(cell) for cell in level}
        cells = [cell for cell, parent in parents.items() if parent is None]
        cells += reachable(
            scores.view(-1, scores.shape[-1]),
            histories,
            {cell: parent for cell, parent in parents.items() if parent is not None and parent in kept},
        )
        if cells:
            cells.sort()
            scores = run(scores, pipelines, histories, sorted({cell // histories.nodes for cell in cells}), watch, cells)
            kept.update(cells)
    return scores


def reachable(flat: Tensor, histories: NodeHistories, parents: Mapping[int, int]) -> list[int]:
    """The cells, given with their ``parents``, whose token has a probability above 0 under the parent's scores in ``flat [R * N, V]``."""
    if not parents:
        return []
    cells, above = list(parents), take(flat, list(parents.values()))  # [G, V]
    gap = above.gather(1, histories.token(cells)[:, None]) - above.amax(-1, keepdim=True)
    return [cell for cell, possible in zip(cells, (gap > UNDERFLOW).squeeze(1).tolist(), strict=True) if possible]
