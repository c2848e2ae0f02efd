"""Heads that read what was drafted before: Hydra's, and a recurrent network; their maths, their losses, their drafts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cover import covered
from head_cases import SHAPES, off_by, on_table
from helpers import alone, batch_of, generate, make_drafter, padded, plainly, repetitive, taught_head, tiny
from torch import nn
from torch.nn.functional import log_softmax, silu

from foredraft import ConfigurationError, Speculator, drafters, heads
from foredraft.drafters.hydra import Hydra
from foredraft.drafters.rnn import Rnn
from foredraft.heads.base import LAST, Batch
from foredraft.heads.hydra import HydraConfig, HydraHead
from foredraft.heads.rnn import RnnConfig, RnnHead
from foredraft.models.identity import TargetShape
from foredraft.rows import RowParameters
from foredraft.testing import ProbabilityTable, TableTarget

KINDS = [("hydra", {}), ("rnn", {}), ("rnn", {"hidden_states": False})]
CELLS = [{"cell": "gru"}, {"cell": "lstm", "layers": 2, "width": 24}]


def shaken(kind: str, seed: int = 0, **options):
    """A head in which no weight is zero, in float64."""
    head, generator = heads.find(kind).for_target(tiny(), **options).double(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return head


def random_batch(head) -> Batch:
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [11, 12, 13, 14, 15, 0, 0]])
    valid = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]]).bool()
    counted = torch.tensor([[0, 0, 0, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1, 1]]).bool()
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(2, 7, len(head.features), head.config.target.hidden_size, generator=generator, dtype=torch.float64)
    return Batch(ids, valid, counted, hidden, torch.randn(2, 7, 128, generator=generator))


def defined_loss(head, batch: Batch, say, steps: int, ahead: int = 2):
    """Σ 0.8^(k+1) of the mean over counted tokens, one token at a time; ``say(row, source, k)`` gives logits."""
    total = 0.0
    for k in range(steps):
        each = [
            -log_softmax(say(row, place - ahead - k, k).float(), -1)[batch.ids[row, place]]
            for row in range(2)
            for place in range(ahead + k, 7)
            if batch.counted[row, place] and batch.valid[row, place]
        ]
        total = total + 0.8 ** (k + 1) * torch.stack(each).mean()
    return total


# -- hydra ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"layers": 3, "bias": True}])
def test_a_hydra_head_is_its_formula(options):
    head, embedding = shaken("hydra", heads=3, **options), tiny().get_input_embeddings().weight.detach().double()
    weights = dict(head.named_parameters())
    h = torch.randn(5, head.config.target.hidden_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for k in range(3):
        path = torch.randint(3, 128, (5, k + 1), generator=torch.Generator().manual_seed(k))
        read = torch.cat([h, *(embedding[path[:, each]] for each in range(k + 1))], -1)
        x = h + silu(read @ weights[f"blocks.{k}.first.weight"].T + weights.get(f"blocks.{k}.first.bias", 0))
        for layer in range(head.config.layers - 1):
            at = f"blocks.{k}.rest.layers.{layer}."
            x = x + silu(x @ weights[at + "weight"].T + weights.get(at + "bias", 0))
        torch.testing.assert_close(head(h, path), x @ weights[f"lm_heads.{k}.weight"].T, rtol=1e-9, atol=1e-9)


def test_the_loss_of_hydra_reads_the_texts_own_tokens():
    head = shaken("hydra", heads=3)
    batch = random_batch(head)

    def say(row, source, k):
        return head(batch.hidden[row, source, 0], batch.ids[row, source + 1 : source + 2 + k])

    torch.testing.assert_close(head.loss(batch).total, defined_loss(head, batch, say, 3))


# -- recurrent networks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("hidden_states", [True, False])
def test_reading_token_by_token_is_reading_at_once(cell, hidden_states):
    head = shaken("rnn", hidden_states=hidden_states, **cell)
    tokens = torch.randint(3, 128, (3, 6), generator=torch.Generator().manual_seed(2))
    h = torch.randn(3, head.config.target.hidden_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    begun = head.begin(h if hidden_states else None, 3)
    whole, after = head.read(tokens, begun)
    state, outputs = begun, []
    for place in range(6):
        output, state = head.read(tokens[:, place : place + 1], state)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, 1), whole)
    torch.testing.assert_close(state, after)
    _, ragged = head.read(tokens, begun, [6, 2, 4])
    torch.testing.assert_close(ragged[0], after[0])
    torch.testing.assert_close(ragged[1:2], head.read(tokens[1:2, :2], begun[1:2])[1])


@pytest.mark.parametrize("cell", CELLS)
def test_a_step_is_that_of_torchs_cell(cell):
    """One cell per layer, made of the same weights."""
    head = shaken("rnn", **cell)
    width, layers = head.config.width, head.config.layers
    h = torch.randn(2, head.config.target.hidden_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    token = torch.tensor([4, 9])
    parts = (h @ head.start.weight.T).view(2, -1, layers, width)
    x = tiny().get_input_embeddings()(token).double()
    for layer in range(layers):
        made = {"gru": nn.GRUCell, "lstm": nn.LSTMCell}[cell["cell"]](x.shape[1], width).double()
        made.load_state_dict({name: getattr(head.rnn, f"{name}_l{layer}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")})
        x = made(x, (parts[:, 0, layer], parts[:, 1, layer]))[0] if cell["cell"] == "lstm" else made(x, parts[:, 0, layer])
    outputs, _ = head.read(token[:, None], head.begin(h, 2))
    torch.testing.assert_close(outputs[:, 0], x)
    expected = (h + x @ head.out.weight.T) @ head.lm_heads[0].weight.T
    torch.testing.assert_close(head.say(outputs[:, 0], h), expected)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("hidden_states", [True, False])
def test_the_loss_of_a_recurrent_head_is_its_definition(cell, hidden_states):
    head = shaken("rnn", hidden_states=hidden_states, steps=3, **cell)
    batch = random_batch(head)

    def after_a_state(row, source, k):
        h = batch.hidden[row, source]
        outputs, _ = head.read(batch.ids[row, None, source + 1 : source + 2 + k], head.begin(h, 1))
        return head.say(outputs[0, -1], h[0])

    def of_the_text(row, source, k):
        outputs, _ = head.read(batch.ids[row, None, : source + 1], head.begin(None, 1))
        return head.say(outputs[0, -1], None)

    expected = defined_loss(head, batch, after_a_state, 3) if hidden_states else defined_loss(head, batch, of_the_text, 1, ahead=1)
    torch.testing.assert_close(head.loss(batch).total, expected)


def test_weights_that_are_drawn_come_from_the_seed_alone():
    torch.manual_seed(1)
    first = RnnHead.for_target(tiny(), seed=3).state_dict()
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second, third = RnnHead.for_target(tiny(), seed=3).state_dict(), RnnHead.for_target(tiny(), seed=4).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["rnn.weight_ih_l0"], third["rnn.weight_ih_l0"])


# -- both -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["hydra", "rnn"])
@pytest.mark.parametrize("lm_head", [{}, {"lm_head": "target"}, {"lm_head": "low-rank", "rank": 32}])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_heads_begin_as_the_lm_head(family, lm_head, kind):
    model = tiny(family)
    head = heads.find(kind).for_target(model, **lm_head)
    h = torch.randn(3, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model.get_output_embeddings()(h)
        if "rank" in lm_head and model.config.hidden_size > 32:
            pytest.skip("a low rank is not all of it")
        if kind == "hydra":
            said = head(h, torch.tensor([[3, 4], [5, 6], [7, 8]]))
        else:
            said = head.say(head.read(torch.tensor([[3], [5], [7]]), head.begin(h, 3))[0][:, 0], h)
    torch.testing.assert_close(said, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_what_is_stored_leaves_out_the_targets_own(kind, options):
    head = heads.find(kind).for_target(tiny(), lm_head="target", **options)
    assert not any("embed" in name or "lm_head" in name for name in head.state_dict())
    again = type(head)(head.config)
    again.load_state_dict(head.state_dict(), assign=True)
    again.attach(tiny())
    batch = batch_of(tiny(), head, repetitive())
    assert torch.equal(again.loss(batch).total, head.loss(batch).total)
    assert type(head.config).from_dict(head.config.to_dict()) == head.config


@pytest.mark.parametrize(("head", "shape"), covered(KINDS, SHAPES, ways=1))
def test_text_is_that_of_plain_decoding(head, shape):
    kind, options = head
    drafter = drafters.find(kind)(taught_head(kind, **options))
    speculator, rows = Speculator(tiny(), drafter, shape=shape, rule="match"), repetitive()
    greedy = speculator.generate(**padded(rows), max_new_tokens=20, pad_token_id=0)
    assert [row[-20:] for row in greedy.sequences.tolist()] == [alone(tiny(), row, max_new_tokens=20) for row in rows]
    assert greedy.stats.acceptance_length > 1.3
    for more in ({"top_k": 20}, {"repetition_penalty": 1.3}):
        sampled = {"do_sample": True, "temperature": 0.8, "seed": 4, "max_new_tokens": 16, **more}
        assert generate(speculator, rows, **sampled) == plainly(tiny(), rows, **sampled)


@pytest.mark.parametrize(
    ("head", "shape"), covered([*KINDS, ("rnn", {"cell": "lstm", "layers": 2, "hidden_states": False})], SHAPES, ways=1)
)
def test_every_node_is_drafted_from_its_own_path(head, shape):
    """The logits that a tree was grown from are those after each node's path alone, whatever was rejected in rounds before."""
    kind, options = head
    head, seen = taught_head(kind, steps=20, **options) if kind == "hydra" else taught_head(kind, **options), []

    class Watched(drafters.find(kind)):
        def _expand(self, request):
            expand, hidden = super()._expand(request), self._hidden

            def watched(tree, first):
                logits = expand(tree, first)
                seen.append((logits, tree, first, hidden, [list(row.ids) for row in request.rows]))
                return logits

            return watched

    generate(Speculator(tiny(), Watched(head), shape=shape), repetitive(), max_new_tokens=12)
    assert len({first for _, _, first, *_ in seen}) > 1
    for logits, tree, first, hidden, texts in seen:
        for row, text in enumerate(texts):
            for node in range(first, tree.nodes):
                path = tree.tokens[row, tree.path(row, node)]
                with torch.inference_mode():
                    expected = after(head, path, None if hidden is None else hidden[row], text)
                torch.testing.assert_close(logits[row, node - first], expected, rtol=1e-3, atol=1e-3)


def after(head, path: torch.Tensor, hidden: torch.Tensor | None, text: list[int]) -> torch.Tensor:
    if isinstance(head, HydraHead):
        return head(hidden, path)
    if hidden is None:
        whole = torch.tensor([text[:-1] + path.tolist()])
        return head.say(head.read(whole, head.begin(None, 1))[0][0, -1], None)
    return head.say(head.read(path[None], head.begin(hidden[None], 1))[0][0, -1], hidden)


@pytest.mark.parametrize(("head", "shape"), covered([("medusa", {}), *KINDS], ["chain(4)", "product(3,2,1)"], ways=1))
def test_what_is_kept_of_a_row_is_of_its_own_text(head, shape):
    """Rows leave at different rounds, from the front and from between, and another one joins."""
    kind, options = head
    seen = []

    class Watched(drafters.find(kind)):
        def draft(self, request):
            tree = super().draft(request)
            kept = self._states if self._hidden is None else self._hidden
            seen.append((kept.clone(), [list(row.ids) for row in request.rows]))
            return tree

    head = taught_head(kind, **options)
    session = Speculator(tiny(), Watched(head), shape=shape).session()
    for row, tokens in zip(repetitive((30, 24, 27, 21)), (6, 14, 3, 18)):
        session.add(row, RowParameters(max_new_tokens=tokens))
    session.step()
    session.add(repetitive((33,), seed=4)[0], RowParameters(max_new_tokens=9))
    while session.live:
        session.step()
    assert {len(texts) for _, texts in seen} > {1, 2}
    for kept, texts in seen:
        assert len(kept) == len(texts)
        for state, text in zip(kept, texts):
            with torch.inference_mode():
                read = torch.tensor([text[:-1]])
                if head.features:
                    expected = tiny()(read, output_hidden_states=True).hidden_states[LAST][0, -1]
                else:
                    expected = head.read(read, head.begin(None, 1))[1][0]
            torch.testing.assert_close(state, expected, rtol=1e-3, atol=1e-3)


def test_a_window_bounds_what_is_read_of_a_prompt():
    head = taught_head("rnn", hidden_states=False)
    drafter, read = Rnn(head, window=4), []
    speculator = Speculator(tiny(), drafter, shape="chain(3)")
    drafter.head.read, own = (lambda tokens, *rest: (read.append(tokens.shape[1]), own(tokens, *rest))[1]), drafter.head.read
    try:
        rows = repetitive()
        expected = [alone(tiny(), row, max_new_tokens=10) for row in rows]
        out = speculator.generate(**padded(rows), max_new_tokens=10, pad_token_id=0)
    finally:
        del drafter.head.read
    assert [row[-10:] for row in out.sequences.tolist()] == expected
    assert read[0] == 4 + 0 and max(read) <= 4


@pytest.mark.parametrize(
    ("siblings", "rule", "shape"),
    [
        ("iid", "block", "chain(2)"),
        ("iid", "traversal", "product(2,1)"),
        ("without-replacement", "traversal", "product(2,1)"),
        ("keyed", "match", "product(2,1)"),
        ("keyed", "match", "dynamic(depth=2,k=2,total=3)"),
    ],
)
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_the_law_is_the_targets(kind, options, siblings, rule, shape):
    target = TableTarget(ProbabilityTable.random(3, seed=1))
    drafter = on_table(drafters.find(kind), table_head(kind, **options), target, siblings)
    assert off_by(drafter, target, rule, shape) < 1e-9


def table_head(kind: str, **options):
    """A head for a table over three tokens, all weights random, in float64."""
    shape, generator = TargetShape(3, 3, 1), torch.Generator().manual_seed(3)
    if kind == "hydra":
        head: HydraHead | RnnHead = HydraHead(HydraConfig(shape, heads=2, embedding_size=2))
    else:
        head = RnnHead(RnnConfig(shape, width=4, embedding_size=2, **options))
    state = {name: torch.randn(slot.shape, generator=generator, dtype=torch.float64) for name, slot in head.state_dict().items()}
    head.load_state_dict(state, assign=True)
    embeddings = nn.Embedding.from_pretrained(torch.randn(3, 2, generator=generator, dtype=torch.float64))
    head._embeddings = (embeddings,)
    return head.requires_grad_(False)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("hydra", {"steps": 3}, "a hydra head has no option 'steps'.*heads"),
        ("hydra", {"heads": True}, "heads"),
        ("rnn", {"heads": 3}, "a rnn head has no option 'heads'.*steps"),
        ("rnn", {"cell": "elman"}, "gru, lstm"),
        ("rnn", {"width": 0}, "width"),
        ("rnn", {"hidden_states": "yes"}, "True or False"),
    ],
)
def test_options_are_checked(kind, options, message):
    with pytest.raises(ConfigurationError, match=message):
        heads.find(kind).for_target(tiny(), **options)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigurationError, match="window"):
        Rnn(taught_head("rnn"), window=0)
    with pytest.raises(ConfigurationError, match="takes a hydra head"):
        Hydra(taught_head("medusa"))
    with pytest.raises(ConfigurationError, match="9 deep"):
        Speculator(tiny(), make_drafter("hydra"), draft_length=9)
    head = taught_head("rnn")
    stranger = RnnHead(replace(head.config, target=replace(head.config.target, layers=99)))
    with pytest.raises(ConfigurationError, match="layers 99"):
        Speculator(tiny(), Rnn(stranger))
    assert set(drafters.options("rnn")) == {"learn", "quantization", "siblings", "source", "window"}


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_training_lowers_the_loss_and_makes_guesses_right(kind, options):
    head, fresh = taught_head(kind, **options), heads.find(kind).for_target(tiny(), **{"steps" if kind == "rnn" else "heads": 8, **options})
    batch = batch_of(tiny(), head, [row + alone(tiny(), row, max_new_tokens=30) for row in repetitive()])
    with torch.no_grad():
        assert float(head.loss(batch).total) < 0.5 * float(fresh.loss(batch).total)
    out = Speculator(tiny(), drafters.find(kind)(head), shape="chain(4)").generate(
        **padded(repetitive()), max_new_tokens=20, pad_token_id=0
    )
    assert out.stats.acceptance_length > 1.8
