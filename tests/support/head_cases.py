"""Heads of every kind with weights that all matter, and the output distribution of heads over a table."""

from __future__ import annotations

import torch
from architectures import VOCABULARY
from helpers import tiny

from foredraft import Session, verification
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.hydra import HydraHead
from foredraft.heads.medusa import MedusaConfig, MedusaHead
from foredraft.heads.rnn import RnnHead
from foredraft.models.identity import TargetShape
from foredraft.planning import FixedPlanner
from foredraft.testing import continuation_law, distance, plain_law

SHAPES = ("chain(4)", "product(3,2,1)", "paths(0,1,2,0.0,0.1,1.0,0.0.0)", "dynamic(depth=4,k=4,total=12)")
COUNTS = torch.arange(VOCABULARY, 0, -1)
HEADS = {
    "medusa": (MedusaHead, {"heads": 3}),
    "medusa-biased": (MedusaHead, {"heads": 2, "layers": 2, "bias": True}),
    "medusa-shared": (MedusaHead, {"heads": 2, "lm_head": "target"}),
    "medusa-low-rank": (MedusaHead, {"heads": 2, "lm_head": "low-rank", "rank": 7}),
    "hydra": (HydraHead, {"heads": 2}),
    "rnn": (RnnHead, {"steps": 3}),
    "eagle3": (Eagle3Head, {"draft_vocab_size": 50, "counts": COUNTS}),
    "eagle3-whole": (Eagle3Head, {"norm_before_residual": True, "attention_bias": True}),
    "eagle3-normed": (Eagle3Head, {"norm_before_fc": True, "fc_norm": True, "norm_output": True, "head_dim": 12}),
}


def make(name: str, *, dtype: torch.dtype = torch.float32):
    """A head in which no two weights are alike."""
    made, options = HEADS[name]
    head, generator = made.for_target(tiny(), **options), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return head.to(dtype)


def says(head) -> torch.Tensor:
    """What it computes, of fixed hidden states and tokens."""
    generator = torch.Generator().manual_seed(5)
    size = head.config.target.hidden_size
    hidden, ids = (
        torch.randn(2, 6, len(head.features) * size, generator=generator),
        torch.randint(3, VOCABULARY, (2, 6), generator=generator),
    )
    with torch.no_grad():
        if head.kind == "eagle3":
            layer = head.layer()
            return torch.stack([layer.full_logits(each) for each in head.unroll(layer, ids, hidden, 3)])
        if head.kind == "hydra":
            return head(hidden[:, 0], ids[:, :2])
        if head.kind == "rnn":
            outputs, _ = head.read(ids, head.begin(hidden[:, 0], 2))
            return head.say(outputs, hidden)
        return head(hidden)


def shaken_medusa(seed: int = 0, **options) -> MedusaHead:
    """A head in which no weight is zero and no two are alike, in float64."""
    head, generator = MedusaHead.for_target(tiny(), **options).double(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return head


def shaken(head):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in head.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator).to(weight.dtype)
    return head


def table_head() -> MedusaHead:
    head = MedusaHead(MedusaConfig(TargetShape(3, 3, 1), heads=2, layers=2))
    generator = torch.Generator().manual_seed(3)
    state = {name: torch.randn(slot.shape, generator=generator, dtype=torch.float64) for name, slot in head.state_dict().items()}
    head.load_state_dict(state, assign=True)
    return head.requires_grad_(False)


def on_table(kind, head, target, siblings):
    """A drafter over a table, which has no model that it could be bound to."""
    drafter = kind(head, siblings=siblings)
    drafter._adopt(head)
    target.read(drafter.info.features)
    return drafter


def off_by(drafter, target, rule, shape) -> float:
    """How far the law of what is generated is from the target's."""

    def session(randomness):
        made = verification.create(rule)
        return Session(target, drafter, made, proposal=drafter.info.proposals[0], planner=FixedPlanner(shape), randomness=randomness)

    return distance(continuation_law(session, [0], 3), plain_law(target.table, [0], 3))
