"""Medusa: what the heads compute, what they learn from, and drafts that leave the output distribution as it is."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from cover import covered
from head_cases import SHAPES, off_by, on_table, shaken_medusa, table_head
from helpers import alone, batch_of, clone, generate, make_drafter, padded, plainly, prompts, repetitive, taught_head, tiny
from torch.nn.functional import log_softmax, silu

from foredraft import ConfigurationError, Speculator, drafters
from foredraft.drafters.growth import grow
from foredraft.drafters.medusa import Medusa
from foredraft.heads import losses
from foredraft.heads.base import LAST, Batch
from foredraft.heads.medusa import MedusaConfig, MedusaHead
from foredraft.testing import ProbabilityTable, TableTarget

STATIC = SHAPES[:3]


def fresh(**options) -> MedusaHead:
    return MedusaHead.for_target(tiny(), **options)


@cache
def hidden(rows: int = 2, length: int = 12) -> torch.Tensor:
    ids = torch.tensor([prompt[:length] for prompt in prompts((40,) * rows)])
    with torch.no_grad():
        return tiny()(ids, output_hidden_states=True).hidden_states[LAST]


# -- the heads --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"heads": 3, "layers": 3, "bias": True}, {"layers": 2, "lm_head": "low-rank", "rank": 5}])
def test_a_head_is_its_formula(options):
    head, h = shaken_medusa(**options), hidden().double()
    weights = {name: weight.detach() for name, weight in head.named_parameters()}
    logits = head(h)
    assert logits.shape == (*h.shape[:2], head.config.heads, 128)
    for k in range(head.config.heads):
        x = h
        for layer in range(head.config.layers):
            at = f"blocks.{k}.layers.{layer}."
            x = x + silu(x @ weights[at + "weight"].T + weights.get(at + "bias", 0))
        if "rank" in options:
            expected = x @ weights["down.weight"].T @ weights["up.weight"].T
        else:
            expected = x @ weights[f"lm_heads.{k}.weight"].T
        torch.testing.assert_close(logits[:, :, k], expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(head(h, 2), logits[:, :, :2])


@pytest.mark.parametrize("options", [{}, {"lm_head": "target"}, {"lm_head": "low-rank", "rank": 64}, {"layers": 2, "bias": True}])
@pytest.mark.parametrize("family", ["llama", "gpt2", "phi"])
def test_heads_begin_as_the_lm_head(family, options):
    model = tiny(family)
    options = {**options, "rank": min(options["rank"], model.config.hidden_size)} if "rank" in options else options
    head = MedusaHead.for_target(model, **options)
    h = torch.randn(3, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model.get_output_embeddings()(h)
        torch.testing.assert_close(head(h), expected[:, None].expand(-1, 4, -1), rtol=1e-4, atol=1e-4)
    head.requires_grad_(False)
    head.blocks[0].layers[0].weight.fill_(0.1)  # the copies are copies
    assert torch.equal(model.get_output_embeddings()(h), expected)


def test_a_low_rank_lm_head_begins_as_the_nearest_one():
    weight, head = tiny().get_output_embeddings().weight.detach().double(), fresh(lm_head="low-rank", rank=7)
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    nearest = u[:, :7] * s[:7] @ v[:7]
    torch.testing.assert_close((head.up.weight @ head.down.weight).double().detach(), nearest, rtol=1e-3, atol=1e-3)


def test_neither_heads_nor_layers_share_weights():
    head = shaken_medusa(heads=3, layers=2)
    assert len({parameter.data_ptr() for parameter in head.parameters()}) == len(list(head.parameters())) == 3 * 2 + 3
    h = hidden().double()
    for name, parameter in head.named_parameters():
        before = head(h)
        with torch.no_grad():
            parameter.mul_(1.5)
            changed = (head(h) != before).any(-1).any(0).any(0).tolist()
            parameter.div_(1.5)
        assert changed == [k == int(name.split(".")[1]) for k in range(3)]


def test_the_targets_lm_head_is_shared_and_stays_as_it_is():
    model = clone(tiny()).requires_grad_(True)
    head = MedusaHead.for_target(model, lm_head="target")
    assert {name.split(".")[0] for name in head.state_dict()} == {"blocks"}
    head.loss(batch_of(model, head, repetitive())).total.backward()
    assert all(parameter.grad is not None for parameter in head.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    loose = MedusaHead(head.config)
    loose.load_state_dict(head.state_dict(), assign=True)
    with pytest.raises(ConfigurationError, match="attach"):
        loose(hidden())
    loose.attach(model)
    assert torch.equal(loose(hidden()), head(hidden()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": 3}, "no option 'head'.*heads"),
        ({"embedding_size": 3}, "no option"),
        ({"heads": 0}, "heads must be a whole number of at least 1"),
        ({"layers": 1.5}, "layers"),
        ({"bias": 1}, "bias must be True or False"),
        ({"lm_head": "shared"}, "own, target, low-rank"),
        ({"lm_head": "low-rank"}, "rank must be"),
        ({"rank": 4}, "goes with lm_head='low-rank'"),
        ({"decay": 1.2}, "decay"),
        ({"labels": "soft"}, "text, target"),
        ({"tree": "tree(3)"}, "unknown shape"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ConfigurationError, match=message):
        fresh(**options)


def test_a_configuration_survives_json():
    import json

    config = replace(fresh(heads=2, layers=3, decay=0.7).config, tree="paths(0,1,0.0)", accuracies=((0.5, 0.25), (0.25, 0.125)))
    assert MedusaConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


# -- the loss ---------------------------------------------------------------------------------------------------------------


def small_batch(labels: str) -> tuple[MedusaHead, Batch]:
    head = shaken_medusa(3, heads=3, decay=0.8, labels=labels)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 0, 0]])
    valid = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]).bool()
    counted = torch.tensor([[0, 0, 0, 1, 1, 0], [0, 0, 1, 1, 1, 1]]).bool()
    generator = torch.Generator().manual_seed(4)
    states = torch.randn(2, 6, 1, head.config.target.hidden_size, generator=generator, dtype=torch.float64)
    return head, Batch(ids, valid, counted, states, torch.randn(2, 6, 128, generator=generator))


@pytest.mark.parametrize("labels", ["text", "target"])
def test_the_loss_is_its_definition(labels):
    """Pairs written down by hand: which place predicts which token, for every head."""
    head, batch = small_batch(labels)
    wanted = {0: [(0, 1, 3), (0, 2, 4), (1, 0, 2), (1, 1, 3)], 1: [(0, 0, 3), (0, 1, 4), (1, 0, 3)], 2: [(0, 0, 4)]}
    expected = 0.0
    found = head.loss(batch)
    for k, triples in wanted.items():
        each = []
        for row, source, place in triples:
            q = log_softmax(head(batch.hidden[row, source, 0])[k].float(), -1)
            p = torch.softmax(batch.logits[row, place - 1], -1)
            each.append(-q[batch.ids[row, place]] if labels == "text" else -(p * q).sum())
        torch.testing.assert_close(found.parts[f"loss_{k}"], torch.stack(each).mean().detach())
        expected = expected + 0.8 ** (k + 1) * torch.stack(each).mean()
    torch.testing.assert_close(found.total, expected)
    assert float(found.weight) == 4


@pytest.mark.parametrize("labels", ["text", "target"])
def test_a_loss_in_parts_is_the_same_and_so_is_its_gradient(labels, monkeypatch):
    head, batch = small_batch(labels)
    found = []
    for at_once in (1 << 25, 256):
        monkeypatch.setattr(losses, "AT_ONCE", at_once)
        head.zero_grad()
        total = head.loss(batch).total
        total.backward()
        found.append([total.detach(), *(parameter.grad.clone() for parameter in head.parameters())])
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("in_cache", [1 << 20, 40])
def test_soft_labels_have_the_loss_and_the_gradient_of_autograd(in_cache, monkeypatch):
    monkeypatch.setattr(losses, "IN_CACHE", in_cache)
    generator = torch.Generator().manual_seed(2)
    logits, target = (3 * torch.randn(7, 19, generator=generator) for _ in range(2))
    target[2, 5:] = float("-inf")
    found = []
    for loss in (
        lambda x: losses.soft_cross_entropy(x, target),
        lambda x: torch.nn.functional.cross_entropy(x, torch.softmax(target, -1), reduction="sum"),
    ):
        x = logits.clone().requires_grad_()
        total = loss(x)
        (0.7 * total).backward()
        found.append((total.detach(), x.grad))
    torch.testing.assert_close(found[0], found[1])


def test_no_more_logits_are_held_than_are_meant_to_be(monkeypatch):
    head, batch = small_batch("text")
    monkeypatch.setattr(losses, "AT_ONCE", 256)
    sizes = []
    for lm_head in head.lm_heads:
        lm_head.register_forward_hook(lambda module, given, output: sizes.append(output.numel()))
    head.loss(batch).total.backward()
    assert max(sizes) <= 256


def test_lm_heads_learn_where_products_are_in_bfloat16():
    """Older versions of torch keep a weight that autocast has cast under no_grad, without its gradient."""
    head, batch = small_batch("text")
    head.float()
    with torch.autocast("cpu", torch.bfloat16):
        total = head.loss(batch).total
    total.backward()
    assert all(float(lm_head.weight.grad.abs().sum()) > 0 for lm_head in head.lm_heads)


def test_a_batch_that_counts_nothing_has_a_loss_of_zero():
    head, batch = small_batch("text")
    found = head.loss(replace(batch, counted=torch.zeros_like(batch.counted)))
    found.total.backward()
    assert float(found.total.detach()) == float(found.weight) == 0
    assert all(float(parameter.grad.abs().sum()) == 0 for parameter in head.parameters())


# -- drafts -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "shape"), covered(["llama", "gemma3_text"], SHAPES, ways=1))
def test_greedy_text_is_that_of_transformers(family, shape):
    rows = repetitive()
    expected = [alone(tiny(family), row, max_new_tokens=16) for row in rows]
    out = Speculator(tiny(family), make_drafter("medusa", family), shape=shape).generate(**padded(rows), max_new_tokens=16, pad_token_id=0)
    assert [row[-16:] for row in out.sequences.tolist()] == expected
    assert out.stats.acceptance_length > 1.3


@pytest.mark.parametrize(("siblings", "shape"), covered(["keyed", "top-k"], SHAPES, ways=1))
def test_sampled_text_is_that_of_plain_decoding(siblings, shape):
    options = {"do_sample": True, "temperature": 0.8, "seed": 4, "max_new_tokens": 16}
    speculator = Speculator(tiny(), make_drafter("medusa", siblings=siblings), shape=shape, rule="match")
    for more in ({"top_k": 20}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}):
        plain = plainly(tiny(), repetitive(), **options, **more)
        assert generate(speculator, repetitive(), **options, **more) == plain


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sampled", [{}, {"do_sample": True, "temperature": 0.7, "top_k": 2, "seed": 1}])
def test_trees_that_are_looked_up_are_those_that_are_grown(shape, sampled):
    """Where two tokens are left a third sibling cannot be, nor what hangs below it; and rows near their end have less room than others."""
    seen = []

    class Watched(Medusa):
        def _grow(self, request, *, chain):
            grown = super()._grow(request, chain=chain)
            plain = grow(request, self._expand(request)).tree
            trees = [grown.tree.truncate(request.limits), plain.truncate(request.limits)]
            seen.append(
                [(tree.tokens[real].tolist(), tree.parents[real].tolist()) for tree in trees for real in [valid_of(tree)]]
                + [tree.proposal for tree in trees]
            )
            return grown

    speculator = Speculator(tiny(), Watched(taught_head("medusa")), shape=shape, rule="match")
    generate(speculator, repetitive(), max_new_tokens=16, **sampled)
    assert len(seen) >= 3
    for ours, theirs, our_proposal, their_proposal in seen:
        assert ours == theirs and our_proposal == their_proposal


def valid_of(tree) -> torch.Tensor:
    return torch.ones_like(tree.tokens, dtype=torch.bool) if tree.valid is None else tree.valid


@pytest.mark.parametrize("shape", SHAPES)
def test_the_heads_run_once_per_round(shape, monkeypatch):
    drafter = make_drafter("medusa")
    speculator = Speculator(tiny(), drafter, shape=shape)
    calls = []
    hook = drafter.head.register_forward_pre_hook(lambda module, given: calls.append(given[0].shape))
    stats = speculator.generate(**padded(repetitive()[:1]), max_new_tokens=16).stats
    hook.remove()
    assert len(calls) in (stats.row_passes, stats.row_passes - 1)  # the last round may have no room for a draft


@pytest.mark.parametrize("rule", ["typical", "rejection", "block", "traversal", "multi-candidate", "k-seq"])
def test_every_rule_takes_its_proposals(rule):
    shape = "chain(3)" if rule in ("rejection", "block") else "product(2,2)"
    speculator = Speculator(tiny(), make_drafter("medusa"), rule=rule, shape=shape, lossless=rule != "typical")
    out = speculator.generate(**padded(repetitive()), max_new_tokens=12, do_sample=True, temperature=0.5, seed=2, pad_token_id=0)
    assert out.stats.rule == rule and out.stats.accepted > 0


@pytest.mark.parametrize(
    ("siblings", "rule", "shape"),
    [
        ("iid", "rejection", "chain(2)"),
        ("iid", "block", "chain(2)"),
        ("iid", "traversal", "product(2,1)"),
        ("without-replacement", "multi-candidate", "product(2,1)"),
        ("without-replacement", "traversal", "product(2,1)"),
        ("keyed", "match", "product(2,1)"),
        ("keyed", "match", "dynamic(depth=2,k=2,total=3)"),
        ("top-k", "match", "product(2,1)"),
    ],
)
def test_the_law_is_the_targets(siblings, rule, shape):
    """Every outcome of every draw, over several rounds; the hidden states of a table are its distributions."""
    target = TableTarget(ProbabilityTable.random(3, seed=1))
    drafter = on_table(Medusa, table_head(), target, siblings)
    assert off_by(drafter, target, rule, shape) < 1e-9


def test_what_does_not_fit_is_refused():
    head = taught_head("medusa")
    with pytest.raises(ConfigurationError, match=r"drafts 8 tokens in a row .* 9 deep.*chain\(8\)"):
        Speculator(tiny(), Medusa(head), draft_length=9)
    with pytest.raises(ConfigurationError, match="hidden_size"):
        Speculator(tiny("gpt2"), Medusa(MedusaHead(replace(head.config, target=replace(head.config.target, hidden_size=8)))))
    with pytest.raises(ConfigurationError, match="takes a medusa head"):
        Medusa(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigurationError, match=r"no medusa head is embedded.*medusa:SOURCE"):
        Speculator(tiny(), "medusa")
    with pytest.raises(ConfigurationError, match="siblings"):
        Medusa(head, siblings="most")
    with pytest.raises(ConfigurationError, match="is not bound to a Speculator"):
        Medusa(head).head  # noqa: B018
    assert set(drafters.options("medusa")) == {"learn", "quantization", "siblings", "source", "successors"}


def test_a_head_of_another_dtype_is_copied_not_changed():
    head = MedusaHead.for_target(tiny()).to(torch.bfloat16)
    drafter = Medusa(head)
    Speculator(tiny(), drafter, draft_length=4)
    assert head.dtype == torch.bfloat16 and drafter.head.dtype == torch.float32
    same = Medusa(taught_head("medusa"))
    Speculator(tiny(), same)
    assert same.head is taught_head("medusa"), "what fits is used as it is, so that training shows"


# -- learning ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("labels", "share"), [("text", 0.5), ("target", 0.8)])  # the target is never sure
def test_training_lowers_the_loss_and_makes_guesses_right(labels, share):
    rows, model = repetitive(), tiny()
    head = MedusaHead.for_target(model, heads=3, labels=labels)
    batch = batch_of(model, head, [row + alone(model, row, max_new_tokens=24) for row in rows])
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)

    def kept() -> float:
        out = Speculator(model, Medusa(head), shape="chain(3)").generate(**padded(rows), max_new_tokens=20, pad_token_id=0)
        return out.stats.acceptance_length

    before, first = kept(), float(head.loss(batch).total.detach())
    for _ in range(25):
        optimizer.zero_grad()
        head.loss(batch).total.backward()
        optimizer.step()
    last = head.loss(batch)
    assert float(last.total.detach()) < share * first
    assert kept() > before + 0.2
    assert float(last.parts["accuracy_0"]) > 0.1
