"""The match rule over a large vocabulary stops its races where the drafts end, and says the same as if it had not."""

import pytest
import torch

from foredraft.logits.noise import ALONE, Noise, row_key
from foredraft.tree import TokenTree
from foredraft.verification.match import Match, follow


class Counted(Noise):
    races = 0

    def race(self, p, depths):
        self.races += p.shape[1]
        return super().race(p, depths)


@pytest.mark.parametrize(
    ("right", "lengths", "races"), [((0, 0), (4, 4), 1), ((2, 1), (4, 4), 3), ((4, 0), (4, 4), 5), ((4, 4), (2, 3), 4)]
)
def test_races_stop_behind_the_longest_match(right, lengths, races):
    generator = torch.Generator().manual_seed(3)
    p = torch.softmax(3 * torch.randn(2, 5, ALONE, generator=generator), -1)
    keys, positions = torch.tensor([row_key((1, row)) for row in range(2)]), torch.tensor([10, 20])
    choices = Noise(keys, positions).race(p, torch.arange(5).expand(2, 5))
    tokens = torch.cat([torch.zeros(2, 1, dtype=torch.long), choices[:, :-1]], 1)
    for row, count in enumerate(right):
        tokens[row, count + 1 :] = (tokens[row, count + 1 :] + 1) % ALONE
    tree = TokenTree.from_chain(tokens, valid=torch.arange(5)[None] <= torch.tensor(lengths)[:, None])
    noise = Counted(keys, positions)
    verdict, whole = Match().verify(tree, p, noise), follow(tree, choices)
    assert verdict.accepted.tolist() == whole.accepted.tolist() == [min(pair) for pair in zip(right, lengths)]
    assert verdict.next_token.tolist() == whole.next_token.tolist()
    assert noise.races == races


@pytest.mark.parametrize(("reached", "races"), [(0, 1), (2, 2), (4, 3), (5, 4)])
@pytest.mark.parametrize("known", [True, False])
def test_trees_race_once_per_depth_that_is_reached(reached, races, known):
    """Nodes 1, 2 below the root, 3, 4 below 2, 5, 6 below 4; the target's own choice is drafted down to node ``reached``."""
    parents, way = (-1, 0, 0, 2, 2, 4, 4), [0, 2, 4, 5]
    p = torch.softmax(3 * torch.randn(1, 7, ALONE, generator=torch.Generator().manual_seed(3)), -1)
    keys, positions = torch.tensor([row_key((1, 0))]), torch.tensor([10])
    depths = torch.tensor([[0, 1, 1, 2, 2, 3, 3]])
    choices = Noise(keys, positions).race(p, depths)
    right = choices.gather(1, torch.tensor([parents]).clamp(min=0))
    tokens = (right + 1) % ALONE
    on_way = way[: way.index(reached) + 1]
    for node in on_way[1:]:
        tokens[0, node] = right[0, node]
    tree = TokenTree(tokens, torch.tensor([parents]), static_parents=parents if known else None)
    noise = Counted(keys, positions)
    verdict, whole = Match().verify(tree, p, noise), follow(tree, choices)
    assert int(verdict.accepted) == int(whole.accepted) == len(on_way) - 1
    assert verdict.path[0, : len(on_way)].tolist() == whole.path[0, : len(on_way)].tolist() == on_way
    assert verdict.next_token.tolist() == whole.next_token.tolist()
    assert noise.races == races


def test_rows_of_a_batch_of_trees_leave_at_depths_of_their_own():
    p = torch.softmax(torch.randn(3, 4, ALONE, generator=torch.Generator().manual_seed(4)), -1)
    keys, positions = torch.tensor([row_key((2, row)) for row in range(3)]), torch.tensor([5, 6, 7])
    parents = torch.tensor([[-1, 0, 0, 1], [-1, 0, 0, 2], [-1, 0, 1, 2]])
    depths = torch.tensor([[0, 1, 1, 2], [0, 1, 1, 2], [0, 1, 2, 3]])
    choices = Noise(keys, positions).race(p, depths)
    tokens = choices.gather(1, parents.clamp(min=0))
    tokens[0, 1] += 1
    tokens[1, 1] += 1
    tree = TokenTree(tokens % ALONE, parents, torch.tensor([[True] * 4, [True] * 4, [True, True, False, False]]))
    verdict, whole = Match().verify(tree, p, Noise(keys, positions)), follow(tree, choices)
    assert verdict.accepted.tolist() == whole.accepted.tolist() == [1, 2, 1]
    assert verdict.next_token.tolist() == whole.next_token.tolist()
    assert [line[: count + 1] for line, count in zip(verdict.path.tolist(), [1, 2, 1])] == [[0, 2], [0, 2, 3], [0, 1]]
