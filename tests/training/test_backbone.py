"""Heads that are trained together with the target, by adapters or as a whole; and kinds of heads other than Medusa."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import clone, tiny
from training_helpers import make_data, options, trainer

from foredraft import Speculator, heads
from foredraft.heads.base import Batch
from foredraft.training.data import Texts
from foredraft.training.learner import language_loss


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts") / "data"
    make_data(folder)
    return folder


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_a_frozen_backbone_stays_as_it_is(data, tmp_path):
    model = clone(tiny())
    before = state(model)
    trainer(data, tmp_path, model=model, steps=4).train()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("backbone", ["lora", pytest.param("full", marks=pytest.mark.nightly)])
def test_a_backbone_learns_beside_its_heads_and_resumes_exactly(data, tmp_path, backbone):
    def run(folder, **changed):
        return trainer(data, tmp_path / folder, model=clone(tiny()), backbone=backbone, steps=8, evaluate_every=4, lora_rank=2, **changed)

    whole = run("whole")
    begin = {name: value.clone() for name, value in whole.weights().items()}
    outcome = whole.train()
    trained = whole.weights()
    changed = {name for name, value in trained.items() if not torch.equal(value, begin[name])}
    assert any(name.startswith("head.") for name in changed) and any(name.startswith("backbone.") for name in changed)
    assert all(("lora_" in name) == (backbone == "lora") for name in trained if name.startswith("backbone."))
    first = run("parts")
    first.report = lambda line: setattr(first, "_asked", line["step"] == 5)
    first.train()
    again = run("parts", resume=True)
    again.train()
    assert all(torch.equal(value, again.weights()[name]) for name, value in trained.items())
    ids = torch.tensor([Texts(data).prompt(0)])
    speculative = Speculator(whole.model, "medusa", drafter_options={"source": outcome.head}, shape="chain(2)")
    plain = whole.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert speculative.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0).sequences.tolist() == plain.tolist()


def test_the_loss_with_a_backbone_is_its_own_and_a_share_of_the_heads(data, tmp_path):
    run = trainer(data, tmp_path, model=clone(tiny()), backbone="full", head_weight=0.2, head_warmup=0.5, steps=8)
    part = next(run.order.read(step=0))[1][0]
    own, _, parts = run.learner(part, 0, 8)
    both, _, _ = run.learner(part, 8, 8)
    own = own.detach()
    assert float(both.detach()) == pytest.approx(float(own) + 0.2 * float(parts["loss_heads"]), rel=1e-5)
    with torch.no_grad():
        logits = run.model(input_ids=part.ids).logits
    losses = [
        -float(logits[row, place - 1].log_softmax(-1)[part.ids[row, place]])
        for row in range(len(part.ids))
        for place in range(1, part.ids.shape[1])
        if part.counted[row, place]
    ]
    assert float(own) == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    shares = [options(head_weight=0.2, head_warmup=0.5, steps=8).head_share(step, 8) for step in range(8)]
    assert shares[0] == 0 and shares[2] == pytest.approx(0.2 * math.sin(math.pi / 4)) and shares[4:] == [pytest.approx(0.2)] * 4
    assert [group["peak"] for group in run.optimizer.param_groups] == [1e-2, 2.5e-3]
    both.backward()
    embedding = run.model.get_input_embeddings().weight
    assert embedding.grad is not None and float(embedding.grad.abs().sum()) > 0


def test_gradients_of_the_heads_reach_the_backbone(data, tmp_path):
    run = trainer(data, tmp_path, model=clone(tiny()), backbone="full")
    part = next(run.order.read(step=0))[1][0]
    hidden, logits = run.learner.reader(part)
    batch = Batch(part.ids, part.valid, part.counted, hidden, logits.detach())
    run.head.blocks[0].requires_grad_(True)
    run.head.loss(batch).total.backward()
    assert float(run.model.get_input_embeddings().weight.grad.abs().sum()) > 0
    assert float(language_loss(batch)) > 0


@pytest.mark.parametrize("kind", [kind for kind in heads.names() if kind != "medusa"])
def test_every_kind_of_head_is_trained(data, tmp_path, kind):
    given = {"eagle3": {"steps": 2, "draft_vocab_size": 64}, "hydra": {"heads": 2}}.get(kind, {})
    run = trainer(data, tmp_path, cls=heads.find(kind), kind=kind, head=given, steps=40, evaluate_every=40, batch_tokens=256)
    before = {name: value.clone() for name, value in run.weights().items()}
    outcome = run.train()
    assert outcome.finished and outcome.state.best_length >= 1
    assert any(not torch.equal(value, before[name]) for name, value in run.weights().items())
    from foredraft.training.journal import Journal

    losses = [line["loss"] for line in Journal.read(tmp_path) if "loss" in line]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
