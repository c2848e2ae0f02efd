"""Token recycling: the matrix against one kept in a dictionary, its trees against a slow filling, and the logits that a drafter is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cover import covered
from helpers import added, alone, generate, padded, plainly, prompts, repetitive, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import foredraft
from foredraft import ConfigurationError, RowParameters, Session, Speculator
from foredraft.backends import native
from foredraft.drafters import token_recycling
from foredraft.drafters.base import Drafter, DrafterInfo, DraftRequest, Feedback
from foredraft.drafters.token_recycling import TokenRecycling, laid_out, top_k
from foredraft.logits.sampler import Sampler
from foredraft.planning import FixedPlanner
from foredraft.shapes import TreeShape
from foredraft.testing import ProbabilityTable, TableTarget
from foredraft.tree import TokenTree
from foredraft.verification.match import Match

CPU = torch.device("cpu")
SHAPES = ["chain(4)", "product(3,2,2)", "paths(0,1,2,0.0,1.0,0.0.0)", "opt(total=12,depth=4,k=4)"]
SAMPLED = {"do_sample": True, "temperature": 1.1, "top_p": 0.95, "repetition_penalty": 1.2, "seed": 4}


def bound(vocab_size: int = 12, **options: Any) -> TokenRecycling:
    drafter = TokenRecycling(**options)
    drafter.bind(SimpleNamespace(vocab_size=vocab_size, device=CPU))
    return drafter


def request(roots: list[int], shape: TreeShape, limits: list[int] | None = None, vocab_size: int = 12) -> DraftRequest:
    rows = [SimpleNamespace(ids=[0, root], slot=slot, prompt_length=1, capacity=99) for slot, root in enumerate(roots)]
    limits = [shape.depth] * len(roots) if limits is None else limits
    sampler = Sampler([], [False] * len(roots), [2] * len(roots), None, lambda: torch.empty(0))
    return DraftRequest(rows, shape, max(limits), limits, "deterministic", False, vocab_size, CPU, sampler)


def texts(tree: TokenTree) -> list[list[tuple[int, ...]]]:
    """Per row the texts at all real nodes, root first, in alphabetical order."""
    tree.check(1000)
    real = torch.ones_like(tree.tokens, dtype=torch.bool) if tree.valid is None else tree.valid
    return [
        sorted(tuple(tree.tokens[row, tree.path(row, node)].tolist()) for node in range(tree.nodes) if real[row, node])
        for row in range(tree.rows)
    ]


# -- the k largest ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("nodes", "vocab_size", "k"), [(1, 40, 8), (3, 300, 8), (2, 1000, 1), (5, 4097, 8), (9, 20011, 8), (1, 8, 8)])
@pytest.mark.parametrize("kernel", [True, False])
def test_the_largest_are_the_largest(nodes, vocab_size, k, dtype, kernel, monkeypatch):
    monkeypatch.setattr(token_recycling, "SMALL", 0)
    if not kernel:
        monkeypatch.setattr(token_recycling.native, "largest", lambda *_: None)
    generator = torch.Generator().manual_seed(vocab_size)
    line = torch.randperm(vocab_size, generator=generator).float()
    logits = torch.stack([line[torch.randperm(vocab_size, generator=generator)] for _ in range(nodes)]).to(dtype)
    logits[0, -1] = 1e9  # behind the last whole column
    found = top_k(logits, k)
    assert found.shape == (nodes, k) and found[0, 0] == vocab_size - 1
    assert all(len(set(line)) == k for line in found.tolist())
    assert logits.gather(1, found).tolist() == logits.topk(k).values.tolist()


@pytest.mark.skipif(native.refusal(torch.float32) is not None, reason="no kernels here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_takes_the_earlier_of_equals_and_lines_that_lie_apart(dtype):
    if native.refusal(dtype) is not None:
        pytest.skip(f"no kernels for {dtype}")
    generator = torch.Generator().manual_seed(3)
    for width in (8, 63, 64, 65, 1000):
        values = torch.randint(-4, 5, (7, width + 3), generator=generator).to(dtype)[:, 1 : 1 + width]
        values[2], values[3] = float("-inf"), torch.arange(width)  # nothing is larger than anything; everything is larger than what was
        found = native.largest(values, 8)
        expected = [sorted(range(width), key=lambda place, line=line: (-line[place], place))[:8] for line in values.tolist()]
        assert found.tolist() == expected, width
    assert native.largest(values, 17) is None and native.largest(values.half(), 8) is None
    assert native.largest(torch.randn(40, 9).to(dtype).T, 8) is None  # its lines are no lines in memory


@pytest.mark.skipif(native.refusal(torch.float32) is not None, reason="no kernels here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 100, 20_001])
def test_the_kernel_gives_log_probabilities(dtype: torch.dtype, width: int):
    if native.refusal(dtype) is not None:
        pytest.skip(f"no kernels for {dtype}")
    logits = (4 * torch.randn(5, width, generator=torch.Generator().manual_seed(4))).to(dtype)
    logits[1, : width // 2] = float("-inf")
    logits[2] += 200.0
    logs, ids = native.likeliest(logits, 4)
    assert ids.tolist() == native.largest(logits, 4).tolist()
    torch.testing.assert_close(logs.double(), torch.log_softmax(logits.double(), -1).gather(1, ids), atol=1e-4, rtol=0)


def test_a_vocabulary_smaller_than_k():
    assert top_k(torch.tensor([[1.0, 3.0, 2.0]]), 5).tolist() == [[1, 2, 0, -1, -1]]


# -- the matrix and the trees -------------------------------------------------------------------------------------------


def refreshed(known: dict[int, list[int]], tree: TokenTree, logits: Tensor, k: int) -> None:
    """What a round teaches, node by node."""
    for row in range(tree.rows):
        for node in range(tree.nodes):
            if tree.valid is None or tree.valid[row, node]:
                line = logits[row, node].tolist()
                known[int(tree.tokens[row, node])] = sorted(range(len(line)), key=lambda token: -line[token])[:k]


def filled(known: dict[int, list[int]], root: int, shape: TreeShape, limit: int) -> list[tuple[int, ...]]:
    """The texts of a tree, from the root down, in alphabetical order."""
    shape = laid_out(shape)
    found: dict[int, tuple[int, ...]] = {0: (root,)}
    for node in range(1, len(shape.parents)):
        parent = shape.parents[node]
        rank = shape.parents[:node].count(parent)
        if parent in found and len(found[parent]) <= limit and rank < len(known.get(found[parent][-1], ())):
            found[node] = (*found[parent], known[found[parent][-1]][rank])
    return sorted(found.values())


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_many_rounds_against_a_dictionary(data):
    vocab_size, k, rows = 9, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    drafter, known = bound(vocab_size, k=k), dict[int, list[int]]()
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    for _ in range(6):
        shape = TreeShape.parse(data.draw(st.sampled_from(SHAPES)))
        roots = data.draw(st.lists(st.integers(0, vocab_size - 1), min_size=rows, max_size=rows))
        limits = data.draw(st.lists(st.integers(0, shape.depth), min_size=rows, max_size=rows))
        asked = request(roots, shape.truncate(max(limits)) if max(limits) else shape, limits, vocab_size)
        tree = drafter.draft(asked).truncate(limits)
        assert texts(tree) == [filled(known, root, asked.shape, limit) for root, limit in zip(roots, limits)]
        logits = torch.randn(rows, tree.nodes, vocab_size, generator=generator)
        drafter.observe(asked.rows, Feedback(tree, [0] * rows, None, logits))
        refreshed(known, tree, logits, k)
        expected = [known.get(token, [-1] * k) for token in range(vocab_size)]
        assert drafter.matrix.tolist() == expected


def test_nodes_that_nobody_has_are_left_out():
    drafter = bound()
    drafter.matrix[3, :2] = torch.tensor([5, 6])
    drafter.matrix[6, :1] = torch.tensor([7])
    tree = drafter.draft(request([3, 1], TreeShape.product(3, 2)))
    assert tree.static_parents == (-1, 0, 0, 2) and tree.tokens.tolist() == [[3, 5, 6, 7], [1, 0, 0, 0]]
    assert tree.valid.tolist() == [[True] * 4, [True, False, False, False]]
    assert drafter.draft(request([1, 2], TreeShape.product(3, 2))).nodes == 1
    assert drafter.draft(request([3, 1], TreeShape.product(3, 2), [1, 0])).nodes == 3, "none is deeper than any row's limit"
    assert drafter.draft(request([3, 6], TreeShape.chain(3))).drafted.tolist() == [1, 1]


def test_a_tree_for_shapes_that_grow():
    shape = laid_out(TreeShape.opt(total=60, depth=6, k=8))
    assert (shape.nodes, shape.depth) == (60, 6) and shape.parents.count(0) == 8
    assert laid_out(TreeShape.dynamic(depth=2, k=2, total=5)).parents == (-1, 0, 0, 1, 1, 2)


def test_it_is_small():
    drafter = bound(150_000)
    assert drafter.matrix.nbytes < 10_000_000


# -- in the loop --------------------------------------------------------------------------------------------------------


def test_rejected_nodes_teach_too_and_what_is_known_is_accepted():
    """Where a token alone decides what follows, every line of the matrix is the table's, and once all are known every draft holds."""
    table = ProbabilityTable.random(11, seed=4, order=1)
    target, drafter = TableTarget(table), bound(11, k=3)
    session = Session(target, drafter, Match(), proposal="deterministic", planner=FixedPlanner("product(3,2,1)"))
    slots = [session.add([1, 2, 3], RowParameters(max_new_tokens=60)), session.add([5, 4], RowParameters(max_new_tokens=9))]
    seen: set[int] = set()
    while session.live:
        for commit in session.step():
            seen |= set(commit.tokens)
    known = {token for token in range(11) if drafter.matrix[token, 0] >= 0}
    assert len(slots) == 2 and known > seen
    for token in known:
        assert drafter.matrix[token].tolist() == table((token,)).topk(3).indices.tolist()
    again = Session(target, drafter, Match(), proposal="deterministic", planner=FixedPlanner("chain(4)"))
    again.add([1, 2, 3], RowParameters(max_new_tokens=31))
    while again.live:
        again.step()
    assert again.stats.accepted == again.stats.drafted == 24 and again.stats.row_passes == 6


@pytest.mark.parametrize(("shape", "options"), covered(SHAPES, [{}, SAMPLED], ways=1))
def test_the_text_is_that_of_plain_decoding(shape, options):
    model, rows = tiny("gemma3_text"), repetitive((52, 41, 44, 1))
    expected = plainly(model, rows, max_new_tokens=20, **options)
    speculator = Speculator(model, drafter="token-recycling", shape=shape)
    assert speculator.rule.name == "match"
    for _ in range(2):
        out = speculator.generate(**padded(rows), max_new_tokens=20, pad_token_id=0, **options)
        assert out.sequences[:, 52:].tolist() == expected
        assert out.stats.drafted > out.stats.accepted
    assert options or out.stats.accepted > 0
    if not options:
        assert expected == [alone(model, row, max_new_tokens=20) for row in rows]


def test_what_was_learned_is_kept_from_request_to_request(tmp_path):
    model, rows = tiny(), prompts((30, 12))
    speculator = Speculator(model, drafter="token-recycling", shape="product(3,2,1)")
    options = {**padded(rows), "max_new_tokens": 20, "pad_token_id": 0}
    first, second = speculator.generate(**options), speculator.generate(**options)
    assert first.sequences.tolist() == second.sequences.tolist()
    assert second.stats.target_passes < first.stats.target_passes
    path = tmp_path / "deep" / "matrix.safetensors"
    speculator.drafter.save(path)
    third = Speculator(model, drafter=f"token-recycling:{path}", shape="product(3,2,1)").generate(**options)
    assert third.sequences.tolist() == first.sequences.tolist()
    assert third.stats.target_passes == speculator.generate(**options).stats.target_passes
    assert [each.name for each in path.parent.iterdir()] == ["matrix.safetensors"]


# -- files --------------------------------------------------------------------------------------------------------------


def test_a_file_of_another_target_is_refused(tmp_path):
    path = tmp_path / "matrix.safetensors"
    bound(12, k=3).save(path)
    with pytest.raises(ConfigurationError, match="12 tokens and the target has 128"):
        Speculator(tiny(), drafter=f"token-recycling:{path}")
    with pytest.raises(ConfigurationError, match="3 successors of a token, not 8"):
        TokenRecycling(source=path, k=8)
    drafter = bound(12)
    with pytest.raises(ConfigurationError, match="learned successors of 12 tokens and the target has 128"):
        Speculator(tiny(), drafter=drafter)
    with pytest.raises(ConfigurationError, match="no file"):
        TokenRecycling(source=tmp_path / "nothing")
    with pytest.raises(ConfigurationError, match="nothing to save"):
        TokenRecycling().save(path)
    with pytest.raises(ConfigurationError, match="k must be a whole number of at least 1, got 0"):
        TokenRecycling(k=0)


def test_a_damaged_file_is_refused(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "matrix.safetensors"
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(ConfigurationError, match="not a safetensors file"):
        TokenRecycling(source=path)
    about = {"format": token_recycling.FILE.format, "version": token_recycling.FILE.version, "vocab_size": "4", "k": "2"}
    good = torch.tensor([[1, 2], [0, -1], [-1, -1], [3, 0]], dtype=torch.int32)
    for wrong, message, said in (
        (good, "not written by", {"format": "other"}),
        (good[:3], "damaged", about),
        (good.long(), "damaged", about),
        (good.clone().index_fill_(0, torch.tensor(0), 4), "no tokens of the vocabulary", about),
        (good.clone().index_fill_(0, torch.tensor(0), 1), "twice", about),
    ):
        save_file({"successors": wrong.clone()}, path, said)
        with pytest.raises(ConfigurationError, match=message):
            TokenRecycling(source=path)
    save_file({"successors": good}, path, about)
    assert TokenRecycling(source=path).k == 2


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "matrix.safetensors"
    bound(12, k=3).save(path)
    before = path.read_bytes()

    def interrupted(tensors, where, about):
        with open(where, "wb") as file:
            file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("safetensors.numpy.save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bound(12, k=3).save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


# -- what a drafter is told ---------------------------------------------------------------------------------------------


class Listening(Drafter):
    """Proposes a tree with gaps, and extra nodes on request, and compares what it is told with passes of its own."""

    name, summary = "listening", "for tests"

    def __init__(self, model: Any, extra: int = 0, wants: bool = True):
        self.model, self.extra, self.heard = model, extra, 0
        self.info = DrafterInfo(branches=True, needs_logits=wants, extra_nodes=extra)
        self.before: list[list[int]] = []

    def draft(self, request: DraftRequest) -> TokenTree:
        parents = [-1, 0, 0, 1, 2, 2, 5, *[0, 7, 1][: self.extra]]
        tokens = [[row.ids[-1], *((row.ids[-1] * 7 + node * node) % 120 for node in range(1, len(parents)))] for row in request.rows]
        self.before = [row.ids[:-1] for row in request.rows]
        real = [[True, True, index == 0, True, False, False, False] + [False] * self.extra for index in range(len(tokens))]
        return TokenTree(torch.tensor(tokens), torch.tensor([parents] * len(tokens)), torch.tensor(real), extra=self.extra)

    def observe(self, rows: Any, feedback: Feedback) -> None:
        assert (feedback.logits is not None) == self.info.needs_logits
        if feedback.logits is None:
            return
        tree = feedback.tree
        assert feedback.logits.shape[:2] == tree.tokens.shape
        for row in range(tree.rows) if tree.nodes > 1 else ():
            for node in range(tree.nodes):
                path = tree.tokens[row, tree.path(row, node)].tolist()
                alone = self.model(torch.tensor([self.before[row] + path])).logits[0, -1]
                torch.testing.assert_close(feedback.logits[row, node], alone, rtol=1e-4, atol=1e-4)
                self.heard += 1


@pytest.mark.parametrize(("family", "count", "extra"), covered(["llama", "gemma3_text"], [1, 3], [0, 3], ways=1))
def test_logits_of_every_node_reach_a_drafter_that_wants_them(family, count, extra):
    model, rows = tiny(family), prompts((30, 17, 3))[:count]
    drafter = Listening(model, extra)
    speculator = Speculator(model, drafter=drafter, shape="product(2,2,2)")
    out = speculator.generate(**padded(rows), max_new_tokens=9, pad_token_id=0, repetition_penalty=1.3)
    assert drafter.heard >= 4 * count * (7 + extra)
    assert out.stats.drafted_by_depth[2:] == [] or not any(out.stats.drafted_by_depth[2:])
    expected = plainly(model, rows, max_new_tokens=9, repetition_penalty=1.3)
    assert added(out, max(map(len, rows))) == expected


def test_logits_are_for_those_who_ask():
    drafter = Listening(tiny(), wants=False)
    generate(Speculator(tiny(), drafter=drafter, shape="product(2,2,2)"), prompts((9,)), max_new_tokens=4)
    assert drafter.heard == 0 and not foredraft.Drafter.info.needs_logits and Feedback(None, [], None).logits is None


def test_the_planner_sees_nodes_that_were_scored_and_hits_among_those_that_were_proposed():
    """A layout whose missing nodes were left out: no sibling that was not proposed counts as one that was rejected."""

    class Planner(FixedPlanner):
        learns = True

        def observe(self, rows, done):
            rounds.append(done)

    rounds: list[Any] = []
    drafter = bound(11, k=2)
    session = Session(
        TableTarget(ProbabilityTable.random(11, seed=4, order=1)),
        drafter,
        Match(),
        proposal="deterministic",
        planner=Planner(TreeShape.product(3, 2)),
    )
    session.add([1, 2, 3], RowParameters(max_new_tokens=40))
    while session.live:
        session.step()
    assert {done.nodes for done in rounds} >= {1, 7}  # k = 2 of three siblings, both children of each
    for done in rounds:
        assert done.nodes == 1 + sum(done.drafted[0])
        assert done.static_parents is None or len(done.static_parents) == done.nodes


def test_a_row_that_failed_teaches_nothing():
    """Its logits are zeros."""
    drafter, row = bound(), SimpleNamespace(ids=[3, 4], slot=0)
    tree = TokenTree.from_chain(torch.tensor([[4, 5]]))
    for failed in (frozenset({0}), frozenset()):
        drafter.observe([row], Feedback(tree, [0], None, torch.zeros(1, 2, 12), failed=failed))
        assert drafter.matrix is not None and bool((drafter.matrix >= 0).any()) != bool(failed)


def test_isolated_rows_of_another_speculator_begin_as_the_file_is():
    drafter = bound()
    assert drafter.matrix is not None
    drafter.matrix[:] = 7  # it has learnt
    drafter.bind(SimpleNamespace(vocab_size=12, device=CPU))
    assert (drafter._matrix_of(SimpleNamespace(isolation="x")) == -1).all()  # type: ignore[arg-type]
    assert (drafter._matrix_of(SimpleNamespace(isolation=None)) == 7).all()  # type: ignore[arg-type]
