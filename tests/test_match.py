"""The match rule over a large vocabulary stops its races where the drafts end, and says the same as if it had not."""

import pytest
import torch

from foretoken.sampling import ALONE, Noise, row_key
from foretoken.tree import TokenTree
from foretoken.verification.match import Match, follow


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
