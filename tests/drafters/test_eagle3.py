"""EAGLE-3 heads and their drafter against a direct computation of what they are defined to be, in float64, one step after the other."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from cover import covered
from drafting import Row, request
from helpers import alone, eagle3_head, generate, padded, prompts, tiny
from paging import stored
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from foredraft import ConfigurationError, Speculator, drafters, inflate, zoo
from foredraft.drafters.base import Feedback
from foredraft.drafters.eagle3 import Eagle3
from foredraft.heads.base import Batch
from foredraft.heads.eagle3 import Eagle3Head, default_layers, draft_vocabulary
from foredraft.heads.eagle3_config import Eagle3Config
from foredraft.heads.eagle3_layer import ELSEWHERE
from foredraft.heads.inflation import inflate as inflate_head
from foredraft.target import Target
from foredraft.tree import TokenTree

COUNTS = torch.arange(128) * 37 % 128  # no two tokens are as frequent
FAVOURITES = [token for token in range(128) if COUNTS[token] >= 78]  # the 50 most frequent
VARIANTS = {
    "published": {},
    "one key each": {"num_key_value_heads": 4, "head_dim": 6, "num_attention_heads": 4},
    "residual normed": {"norm_before_residual": True},
    "features normed": {"norm_before_fc": True},
    "each feature normed": {"fc_norm": True, "rms_norm_eps": 0.1},
    "output normed": {"norm_output": True},
    "biased": {"attention_bias": True},
    "one feature": {"aux_layers": (1,)},
    "llama3 positions": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "yarn positions": {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16},
    },
    "few tokens": {"draft_vocab_size": 50},
}  # fmt: skip


@cache
def made(variant: str) -> Eagle3Head:
    """Its weights are as wide as a tiny model's, so that every part of it shows."""
    options = VARIANTS[variant]
    return eagle3_head.__wrapped__(**options, **({"counts": COUNTS} if "draft_vocab_size" in options else {}))


class Direct:
    """An EAGLE-3 head by its definition, in float64: one position after the other, every key kept apart."""

    def __init__(self, head: Eagle3Head):
        self.config = head.config
        self.weights = {name: each.double() if each.is_floating_point() else each for name, each in head.state_dict().items()}
        self.embeddings = tiny().get_input_embeddings().weight.detach().double()
        config = head.config
        self.rotary = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=32, num_attention_heads=config.num_attention_heads, head_dim=config.head_dim,
                rope_parameters=dict(config.rope_parameters), max_position_embeddings=config.max_position_embeddings,
            )
        )  # fmt: skip

    def norm(self, x, name):
        return x / (x.pow(2).mean() + self.config.rms_norm_eps).sqrt() * self.weights[name + ".weight"]

    def product(self, x, name):
        bias = self.weights.get(name + ".bias")
        return self.weights[name + ".weight"] @ x + (0 if bias is None else bias)

    def turn(self, x, position):
        """``[heads, h]``: pairs of coordinates half a head apart are rotated."""
        cosine, sine = (each[0, 0].double() for each in self.rotary(torch.zeros(1, dtype=torch.float64), torch.tensor([[position]])))
        half = x.shape[-1] // 2
        return x * cosine + torch.cat([-x[:, half:], x[:, :half]], -1) * sine

    def fused(self, features):
        size, config = 32, self.config
        if config.norm_before_fc:
            features = self.norm(features, "input_norm")
        parts = features.split(size)
        if config.fc_norm:
            parts = [self.norm(part, f"fc_norm.{number}") for number, part in enumerate(parts)]
        return self.product(torch.cat(list(parts)), "fc")

    def step(self, token, state, position, seen):
        """The state behind one step and the log-probabilities it gives; its key and value are added to what is ``seen``."""
        config, at = self.config, "midlayer.self_attn."
        normed = self.norm(state, "midlayer.hidden_norm")
        x = torch.cat([self.norm(self.embeddings[token], "midlayer.input_layernorm"), normed])
        heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        query = self.turn(self.product(x, at + "q_proj").view(heads, size), position)
        key = self.turn(self.product(x, at + "k_proj").view(groups, size), position)
        seen.append((key, self.product(x, at + "v_proj").view(groups, size)))
        attended = []
        for head in range(heads):
            group = head * groups // heads
            weights = torch.softmax(torch.stack([query[head] @ key[group] / math.sqrt(size) for key, _ in seen]), 0)
            attended.append(sum(weight * value[group] for weight, (_, value) in zip(weights, seen)))
        residual = normed if config.norm_before_residual else state
        a = residual + self.product(torch.cat(attended), at + "o_proj")
        normed = self.norm(a, "midlayer.post_attention_layernorm")
        inner = torch.nn.functional.silu(self.product(normed, "midlayer.mlp.gate_proj")) * self.product(normed, "midlayer.mlp.up_proj")
        out = a + self.product(inner, "midlayer.mlp.down_proj")
        normed = self.norm(out, "norm")
        return normed if config.norm_output else out, self.product(normed, "lm_head")

    def draft(self, ids, features, drafted):
        """``[1 + len(drafted), Vd]``: the logits after the text ``ids``, of whose last token there are no features yet, and after each of
        the tokens ``drafted``."""
        seen: list = []
        for position in range(len(ids) - 1):
            state, logits = self.step(ids[position + 1], self.fused(features[position].double()), position, seen)
        said = [logits]
        for place, token in enumerate(drafted):
            state, logits = self.step(token, state, len(ids) - 1 + place, seen)
            said.append(logits)
        return torch.stack(said)


def features_of(head, ids) -> torch.Tensor:
    """``[L, F * d]`` by transformers itself."""
    with torch.no_grad():
        states = tiny()(torch.tensor([list(ids)]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer] for layer in head.features], -1)[0]


def batch_of(head, rows, lengths=None) -> Batch:
    ids = torch.tensor(rows)
    with torch.no_grad():
        output = tiny()(ids, output_hidden_states=True)
    valid = torch.arange(ids.shape[1]) < torch.tensor(lengths or [ids.shape[1]] * len(rows))[:, None]
    hidden = torch.stack([output.hidden_states[layer] for layer in head.features], 2)
    return Batch(ids, valid, valid.clone(), hidden, output.logits)


def begun(head, texts) -> tuple[Eagle3, list[Row]]:
    """A drafter behind prompts and their first tokens: all of ``texts`` but its last one were prompts."""
    drafter = Eagle3(head)
    drafter.bind(Target(tiny()))
    rows = [Row(list(text), slot) for slot, text in enumerate(texts)]
    join(drafter, rows)
    return drafter, rows


def join(drafter, rows):
    drafter.read(rows, [features_of(drafter.head, row.ids[:-1]) for row in rows])
    drafter.begin(rows)


# -- what a head computes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_is_drafting_from_every_place_of_a_text(variant):
    head, ids = made(variant), prompts((9,))[0]
    features = features_of(head, ids)
    with torch.no_grad():
        layer = head.layer()
        steps = [layer.logits(each) for each in head.unroll(layer, torch.tensor([ids]), features[None], 4)]
    direct = Direct(head)
    for place in (0, 1, 4, 5, 7):
        drafted = ids[place + 2 : place + 5]
        expected = direct.draft(ids[: place + 2], features, drafted)
        found = torch.stack([each[0, place] for each in steps[: 1 + len(drafted)]])
        torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_the_drafter_says_at_depth_i_is_what_step_i_was_trained_to_say(variant):
    head, text = made(variant), prompts((16,))[0]
    drafter, rows = begun(head, [text[:9]])
    expand = drafter._expand(request(rows, shape="chain(5)"))
    said = [expand(TokenTree.from_chain(torch.tensor([text[8 : 9 + depth]])), depth)[0, -1] for depth in range(5)]
    with torch.no_grad():
        layer = head.layer()
        steps = head.unroll(layer, torch.tensor([text]), features_of(head, text)[None], 5)
        trained = [layer.full_logits(each)[0, 7] for each in steps]
    torch.testing.assert_close(torch.stack(said), torch.stack(trained), atol=1e-4, rtol=1e-4)


def test_long_texts_are_looked_at_in_parts(monkeypatch):
    head = eagle3_head()
    batch = batch_of(head, prompts((30, 30)), [30, 21])
    whole = head.loss(batch)
    gradient = torch.autograd.grad(whole.total, list(head.parameters()))
    monkeypatch.setattr("foredraft.heads.eagle3_loss.QUERIES", 7)
    monkeypatch.setattr("foredraft.heads.losses.AT_ONCE", 128 * 5)
    parts = head.loss(batch)
    torch.testing.assert_close(parts.total, whole.total)
    torch.testing.assert_close(torch.autograd.grad(parts.total, list(head.parameters())), gradient, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", ["published", "few tokens"])
def test_the_loss_is_what_the_paper_says(variant):
    head = made(variant)
    head = replaced(head, steps=3, decay=0.5)
    batch = batch_of(head, prompts((10, 10)), [10, 7])
    batch.counted[0, :4] = False
    losses, direct = head.loss(batch), Direct(head)
    kept = list(range(128)) if variant == "published" else FAVOURITES
    total, counted = 0.0, []
    for step in range(3):
        spent, right = [], []
        for row, length in enumerate([10, 7]):
            ids, features = batch.ids[row].tolist(), features_of(head, batch.ids[row].tolist())
            for place in range(length):
                predicted = place + 2 + step
                if predicted >= length or not batch.counted[row, predicted] or batch.logits[row, predicted - 1].argmax() not in kept:
                    continue
                said = direct.draft(ids[: place + 2], features, ids[place + 2 : place + 2 + step])[-1]
                p = torch.softmax(batch.logits[row, predicted - 1, kept].double(), -1)
                spent.append(-(p * torch.log_softmax(said, -1)).sum())
                right.append(kept[said.argmax()] == batch.logits[row, predicted - 1].argmax())
        mean = sum(spent) / len(spent)
        total, counted = total + 0.5**step * mean, [*counted, len(spent)]
        assert losses.parts[f"loss_{step}"].item() == pytest.approx(mean.item(), rel=1e-4)
        assert losses.parts[f"accuracy_{step}"].item() == pytest.approx(sum(right) / len(right))
    assert losses.total.item() == pytest.approx(total.item(), rel=1e-4) and losses.weight.item() == counted[0]
    assert counted[0] >= counted[2] > 0 and (variant == "few tokens") == (counted[0] < 13 - 2)


def replaced(head: Eagle3Head, **changes) -> Eagle3Head:
    other = Eagle3Head(replace(head.config, **changes))
    other.load_state_dict(head.state_dict(), assign=True)
    other.attach(tiny())
    return other


def test_nothing_to_predict_is_a_loss_of_zero_with_a_gradient():
    head = eagle3_head()
    batch = batch_of(head, prompts((6,)))
    batch.counted[:] = False
    losses = head.loss(batch)
    losses.total.backward()
    assert losses.total.item() == 0 and losses.weight.item() == 0
    head.zero_grad()


def test_the_most_frequent_tokens_are_the_draft_vocabulary():
    d2t, t2d = draft_vocabulary(torch.tensor([5, 0, 7, 5, 9, 5]), 4)
    assert (d2t + torch.arange(4)).tolist() == [0, 2, 3, 4]  # of three that occur five times the first two
    assert t2d.tolist() == [True, False, True, True, True, False] and d2t.tolist() == [0, 1, 1, 1]
    head = made("few tokens")
    assert head.target_ids().tolist() == FAVOURITES and set(head.state_dict()) >= {"d2t", "t2d", "fc.weight", "midlayer.hidden_norm.weight"}
    torch.testing.assert_close(head.lm_head.weight, tiny().get_output_embeddings().weight[FAVOURITES])
    assert "d2t" not in eagle3_head().state_dict() and not any("embed" in name for name in eagle3_head().state_dict())


def test_a_configuration_comes_back_from_its_plain_form():
    for variant in VARIANTS:
        config = made(variant).config
        plain = {**config.to_dict(), "aux_layers": list(config.aux_layers)}
        assert Eagle3Config.from_dict(plain) == config


def test_layers_that_are_read():
    assert [default_layers(layers) for layers in (32, 8, 7, 6, 4, 3, 2)] == [
        (2, 16, 29), (2, 4, 5), (2, 3, 4), (1, 3, 5), (1, 2, 3), (0, 1, 2), (0, 1),
    ]  # fmt: skip


# -- the drafter -----------------------------------------------------------------------------------------------------------


def paths(tree: TokenTree, row: int) -> list[list[int]]:
    """The drafted tokens down to each node."""
    return [tree.tokens[row, tree.path(row, node)[1:]].tolist() for node in range(tree.nodes)]


@pytest.mark.parametrize("shape", ["chain(3)", "product(2,2,1)", "dynamic(3,2,6)", "opt(total=6,depth=3,delta=0.01,k=2)"])
@pytest.mark.parametrize("lengths", [(9,), (9, 5, 7), (6, 6)])
def test_every_node_of_a_draft_is_what_its_path_says(shape, lengths):
    head = eagle3_head()
    drafter, rows = begun(head, prompts(lengths, seed=4))
    levels = heard(drafter)
    tree = drafter.draft(request(rows, shape=shape))
    direct, count = Direct(head), 0
    for index, row in enumerate(rows):
        features, said = features_of(head, row.ids), {}
        for fed, first, logits in levels:
            for node, path in list(enumerate(paths(fed, index)))[first:]:
                if fed.valid is None or fed.valid[index, node]:
                    said[tuple(path)] = direct.draft(row.ids, features, path)[-1]
                    torch.testing.assert_close(logits[index, node - first].double(), said[tuple(path)], atol=1e-4, rtol=1e-4)
                    count += 1
        for path in paths(tree, index)[1:]:
            assert path[-1] in said[tuple(path[:-1])].topk(1 if "chain" in shape else 2).indices
    assert count >= 3 * len(rows)


def heard(drafter) -> list:
    """From now on the trees that the head is asked about, where their new nodes begin, and what it says after these."""
    levels, plain = [], drafter._expand

    def _expand(request):
        expand = plain(request)

        def listening(tree, first):
            levels.append((tree, first, expand(tree, first)))
            return levels[-1][2]

        return listening

    drafter._expand = _expand
    return levels


@pytest.mark.parametrize(("proposal", "shape"), [("iid", "chain(3)"), ("iid", "product(2,2)"), ("without-replacement", "product(3,2)")])
@pytest.mark.parametrize("variant", ["published", "few tokens"])
def test_q_is_what_the_head_says_at_every_node(proposal, shape, variant):
    head = made(variant)
    drafter, rows = begun(head, prompts((9, 5), seed=4))
    tree = drafter.draft(request(rows, shape=shape, proposal=proposal))
    direct, kept = Direct(head), list(range(128)) if variant == "published" else FAVOURITES
    assert tree.q is not None and tree.proposal == proposal
    for index, row in enumerate(rows):
        features = features_of(head, row.ids)
        for node, path in enumerate(paths(tree, index)[: tree.q.shape[1]]):
            expected = torch.zeros(128, dtype=torch.float64)
            expected[kept] = torch.softmax(direct.draft(row.ids, features, path)[-1], -1)
            torch.testing.assert_close(tree.q[index, node].double(), expected, atol=2e-5, rtol=1e-3)
            assert not tree.q[index, node, [token for token in range(128) if token not in kept]].any()


def test_a_processor_that_forbids_the_draft_vocabulary_leaves_a_distribution():
    drafter, rows = begun(made("few tokens"), prompts((9,)))
    logits = drafter._expand(request(rows, shape="chain(1)"))(TokenTree.root(torch.tensor([rows[0].ids[-1]])), 0)[0, 0]
    assert (logits == ELSEWHERE).sum() == 78
    logits[FAVOURITES] = float("-inf")
    assert torch.softmax(logits, -1).sum().item() == pytest.approx(1)


class Checked(Eagle3):
    """Compares what it keeps of every text with what a drafter keeps that sees the text for the first time."""

    rounds = 0

    def _root(self, rows):
        states = super()._root(rows)
        fresh, others = begun(self.source, [row.ids for row in rows])
        torch.testing.assert_close(Eagle3._root(fresh, others), states, atol=2e-4, rtol=1e-4)
        assert self._cache.lengths == fresh._cache.lengths == [len(row.ids) - 1 for row in rows]
        for index, length in enumerate(self._cache.lengths):
            for mine, theirs in zip(*(stored(each._cache, index, length) for each in (self, fresh))):
                torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=1e-4)
        self.rounds += 1
        return states


@pytest.mark.parametrize("shape", ["chain(4)", pytest.param("product(3,2,1)", marks=pytest.mark.nightly), "dynamic(3,3,8)", "auto"])
def test_nothing_of_rejected_branches_stays(shape):
    drafter, rows = Checked(trained()), [*prompts([12] * 2, seed=6), *prompts((5,))]
    speculator = Speculator(tiny(), drafter=drafter, shape=shape)
    assert generate(speculator, rows, max_new_tokens=9, do_sample=False) == [alone(tiny(), row, max_new_tokens=9) for row in rows]
    assert drafter.rounds > 0
    speculator.close()


def test_rows_come_and_go_at_any_round_and_rounds_without_a_draft_are_caught_up():
    head, texts = eagle3_head(), prompts((30, 25, 28, 31), seed=8)
    drafter, rows = begun(head, [text[:9] for text in texts[:3]])
    drafter.draft(request(rows, shape="product(2,2)"))
    observe(drafter, rows, texts, [3, 1, 2])
    observe(drafter, rows, texts, [1, 2, 1])  # nothing was drafted
    agrees(drafter, rows)
    drafter.end([rows[1]])
    late = Row(texts[3][:20], slot=7)
    join(drafter, [late])
    rows, texts = [rows[0], rows[2], late], [texts[0], texts[2], texts[3]]
    agrees(drafter, rows)
    observe(drafter, rows, texts, [2, 2, 2])
    agrees(drafter, rows)
    agrees(drafter, rows)  # the same text once more
    drafter.end(rows)
    assert drafter._cache.lengths == [] and drafter._rows == []
    drafter.reset()
    drafter, rows = begun(head, [texts[0]])
    agrees(drafter, rows)


def test_a_long_row_beside_one_that_lacks_much():
    texts = prompts((250, 60), seed=8)
    drafter, rows = begun(eagle3_head(), [texts[0][:240], texts[1][:9]])
    for _ in range(5):
        observe(drafter, rows, texts, [1, 6])
    agrees(drafter, rows)


def observe(drafter, rows, texts, counts):
    """A round in which ``counts[r]`` tokens of the texts came true, along the last nodes of a tree."""
    width, depth = 8, max(counts)
    hidden, path = torch.randn(len(rows), width, 64), torch.zeros(len(rows), depth, dtype=torch.long)
    for index, (row, text, count) in enumerate(zip(rows, texts, counts)):
        path[index, 1:count] = torch.arange(width - count + 1, width)
        begin = len(row.ids) - 1
        hidden[index, path[index, :count]] = features_of(drafter.head, text)[begin : begin + count]
        row.ids += text[len(row.ids) : len(row.ids) + count]
    tree = TokenTree(torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long))
    drafter.observe(rows, Feedback(tree, [count - 1 for count in counts], path, None, hidden))


def agrees(drafter, rows):
    fresh, others = begun(drafter.source, [row.ids for row in rows])
    mine, theirs = drafter.draft(request(rows, shape="product(2,2)")), fresh.draft(request(others, shape="product(2,2)"))
    assert torch.equal(mine.tokens, theirs.tokens)
    torch.testing.assert_close(drafter._states, fresh._states, atol=2e-4, rtol=1e-4)


def trained() -> Eagle3Head:
    """A head that has seen what the tiny model says to some prompts, so that some of its guesses are right."""
    return _fitted()[0]


def losses_of_training() -> list[float]:
    return _fitted()[1]


@cache
def _fitted() -> tuple[Eagle3Head, list[float]]:
    return fit(Eagle3Head.for_target(tiny(), aux_layers=(1,)), 80)


def fit(head: Eagle3Head, rounds: int) -> tuple[Eagle3Head, list[float]]:
    texts = [prompt + alone(tiny(), prompt, max_new_tokens=20) for prompt in prompts([12] * 8, seed=6)]
    batch, spent = batch_of(head, texts), []
    batch.counted[:, :12] = False
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    for _ in range(rounds):
        losses = head.loss(batch)
        optimizer.zero_grad()
        losses.total.backward()
        optimizer.step()
        spent.append(losses.total.item())
    return head, spent


def kept(head, shape="chain(4)", **options) -> float:
    speculator = Speculator(tiny(), drafter=Eagle3(head, **options), shape=shape)
    output = speculator.generate(**padded(prompts([12] * 8, seed=6)), pad_token_id=0, max_new_tokens=20, do_sample=False)
    speculator.close()
    return output.stats.acceptance_length


def test_training_lowers_the_loss_and_lengthens_what_is_accepted():
    before = kept(Eagle3Head.for_target(tiny(), aux_layers=(1,)))
    head, spent = trained(), losses_of_training()
    assert spent[-1] < 0.7 * spent[0]  # what the target itself leaves open remains
    assert kept(head) > before + 1
    assert kept(head, "product(3,2,1)") > before + 1


@pytest.mark.parametrize(
    ("variant", "shape"), covered(["trained", "few tokens"], ["chain(3)", "product(3,2,1)", "dynamic(4,3,10)", "opt(4,3,0.05)"], ways=1)
)
def test_text_is_the_target_s_own(shape, variant):
    head, rows = trained() if variant == "trained" else made(variant), prompts((12, 30, 7), seed=6)
    speculator = Speculator(tiny(), drafter=Eagle3(head), shape=shape)
    assert generate(speculator, rows, max_new_tokens=20, do_sample=False) == [alone(tiny(), row, max_new_tokens=20) for row in rows]
    speculator.close()
    options = {"max_new_tokens": 16, "do_sample": True, "temperature": 0.9, "top_k": 30, "seed": 3}
    plain = Speculator(tiny(), rule="match")
    keyed = Speculator(tiny(), drafter=Eagle3(head, siblings="keyed"), rule="match", shape=shape)
    assert generate(keyed, rows, **options) == generate(plain, rows, **options)
    plain.close()
    keyed.close()


def test_bfloat16():
    model = tiny().__class__(tiny().config).to(torch.bfloat16).eval()
    model.load_state_dict(tiny().state_dict())
    head = Eagle3Head.for_target(model)
    assert head.fc.weight.dtype == torch.bfloat16
    speculator = Speculator(model, drafter=Eagle3(eagle3_head()), shape="product(2,2)")  # stored in float32
    assert generate(speculator, prompts((9, 5)), max_new_tokens=8, do_sample=False)
    assert speculator.drafter.layer.fc.dtype == torch.bfloat16 and eagle3_head().fc.weight.dtype == torch.float32
    speculator.close()


def test_float16_tells_what_is_outside_the_draft_vocabulary():
    layer = made("few tokens").layer().to(torch.device("cpu"), torch.float16)
    logits = layer.full_logits(torch.zeros(1, 32, dtype=torch.float16))[0]
    p = torch.softmax(logits.float(), -1)
    assert logits.isfinite().all() and p.count_nonzero() == 50 and p[FAVOURITES].tolist() == pytest.approx([1 / 50] * 50)


# -- refusals ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 1}, "no option 'layers'.*aux_layers"),
        ({"aux_layers": (1, 0)}, "different and ascending, from 0 to 1"),
        ({"aux_layers": (0, 2)}, "different and ascending"),
        ({"aux_layers": ()}, "different and ascending"),
        ({"draft_vocab_size": 129}, "between 1 and 128"),
        ({"draft_vocab_size": 20}, "pass counts"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope_type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"steps": 0}, "steps of an EAGLE-3 head"),
        ({"decay": 1.5}, "decay"),
    ],
)
def test_heads_that_can_not_be(options, message):
    with pytest.raises(ConfigurationError, match=message):
        Eagle3Head.for_target(tiny(), **options)


def test_what_the_drafter_refuses():
    with pytest.raises(ConfigurationError, match=r"no eagle3 head is embedded.*eagle3:SOURCE"):
        Speculator(tiny(), drafter="eagle3")
    with pytest.raises(ConfigurationError, match="unknown siblings"):
        Eagle3(eagle3_head(), siblings="odd")
    with pytest.raises(ConfigurationError, match="hidden_size 32"):
        Speculator(zoo.load("python-1m"), drafter=Eagle3(eagle3_head()))
    with pytest.raises(ConfigurationError, match="call attach"):
        Eagle3Head(eagle3_head().config).layer()
    assert drafters.find("eagle3") is Eagle3


# -- inflated ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", [name for name in VARIANTS if "positions" not in name])
def test_an_inflated_head_says_the_same_of_the_inflated_target(variant):
    small, ids = made(variant), torch.tensor(prompts((12,)))
    model = inflate(tiny(), hidden_size=128, layers=5)
    head = inflate_head(small, model)
    assert head.features == tuple(layer * 5 // 2 for layer in small.features)
    assert head.config.num_attention_heads == 4 * small.config.num_attention_heads
    assert sum(each.numel() for each in head.midlayer.parameters()) > 10 * sum(each.numel() for each in small.midlayer.parameters())
    said = []
    for each, target in ((small, tiny()), (head, model)):
        with torch.no_grad():
            states = target(ids, output_hidden_states=True).hidden_states
            layer, features = each.layer(), torch.cat([states[number] for number in each.features], -1)
            said.append([layer.logits(normed) for normed in each.unroll(layer, ids, features, 4)])
    torch.testing.assert_close(said[1], said[0], atol=2e-4, rtol=1e-4)


def test_an_inflated_head_drafts_the_same_and_in_bfloat16_its_weights_are_exact():
    model = inflate(tiny(), hidden_size=128, layers=5)
    text = prompts([12] * 2, seed=6)
    outputs = []
    for target, head in ((tiny(), trained()), (model, inflate_head(trained(), model))):
        speculator = Speculator(target, drafter=Eagle3(head), shape="product(2,2,1)")
        outputs.append(speculator.generate(**padded(text), pad_token_id=0, max_new_tokens=16, do_sample=False))
        speculator.close()
    assert torch.equal(outputs[0].sequences, outputs[1].sequences) and outputs[0].stats.accepted == outputs[1].stats.accepted > 0
    half = inflate_head(copy.deepcopy(trained()).to(torch.bfloat16), copy.deepcopy(model).to(torch.bfloat16))
    for name, weight in half.state_dict().items():
        old = trained().state_dict()[name].to(torch.bfloat16)
        assert weight.dtype == torch.bfloat16
        if "norm" in name:  # the ratio is a power of four
            assert torch.equal(weight[:32] * 2, old)


def test_what_is_no_inflation():
    with pytest.raises(ConfigurationError, match="4096 tokens"):
        inflate_head(eagle3_head(), zoo.load("python-1m"))
    with pytest.raises(ConfigurationError, match="was not inflated from the head's target"):
        inflate_head(inflate_head(eagle3_head(), inflate(tiny(), hidden_size=128, layers=5)), tiny())
