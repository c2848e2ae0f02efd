"""Heads on the states of a decoder behind an encoder: texts are those of plain decoding, and every draft is what the head makes of the
states that transformers computes for the row's own source and text."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
import transformers
from cover import nightly_but
from encoder_decoders import FAMILIES, START, build, rows_of, sources, texts
from head_cases import shaken
from helpers import random_tree
from kernel_cases import always as always  # a fixture
from kernel_cases import needs_kernels

from foredraft import ConfigurationError, RowParameters, Source, Speculator
from foredraft import heads as kinds
from foredraft.heads.base import embeddings_of
from foredraft.models.features import LAST
from foredraft.target import Target

SHAPES = ("chain(3)", "product(2,2)", "dynamic(depth=3,k=2,total=5)")
OPTIONS = {"max_new_tokens": 12, "do_sample": False, "repetition_penalty": 1.6}
SAMPLED = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.2, "seed": 5}
HEADS = {"medusa": {"heads": 3}, "eagle3": {}, "hydra": {"heads": 3}, "rnn": {}}
NAMES = [name for name, family in FAMILIES.items() if family.support == "tree" and family.reads == "ids"]
DENSE = [(name,) for name in NAMES if name not in ("switch", "nllb-moe")]  # experts count the tokens of a prompt
EVERY = [(name, kind, shape) for name in NAMES for kind in HEADS for shape in SHAPES]


@cache
def head_for(name, kind):
    return shaken(kinds.find(kind).for_target(build(name), **HEADS[kind]))


def drafting(name, kind, shape, model=None, **options):
    more = {"successors": "off"} if kind == "medusa" else {}
    given = {"source": head_for(name, kind), **more}
    return Speculator(build(name) if model is None else model, kind, drafter_options=given, shape=shape, rule="match", **options)


WIDE = {**FAMILIES["t5"].options, "d_model": 64, "d_kv": 32, "d_ff": 128}
ALWAYS = {
    ("t5", "medusa", SHAPES[0]), ("t5", "eagle3", SHAPES[1]), ("bart", "medusa", SHAPES[2]), ("bart", "eagle3", SHAPES[0]),
}  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "shape"), nightly_but(ALWAYS, EVERY))
def test_texts_are_those_of_plain_decoding(name, kind, shape):
    model, given = build(name), sources(name)
    speculator, plain = drafting(name, kind, shape), Speculator(model, "none")
    expected = model.generate(**given, **OPTIONS)
    output = speculator.generate(**given, **OPTIONS)
    assert torch.equal(output.sequences, expected) and output.stats.drafted > 0
    assert torch.equal(speculator.generate(**rows_of(given, 1), **OPTIONS).sequences[0], expected[1])
    for batch in (given, rows_of(given, 2)):
        assert torch.equal(speculator.generate(**batch, **SAMPLED).sequences, plain.generate(**batch, **SAMPLED).sequences)


# -- what heads read ----------------------------------------------------------------------------------------------------------


@cache
def watched(name):
    """Another copy, for transformers' own hidden states, whose hooks stay."""
    return copy.deepcopy(build(name))


@torch.no_grad()
def states_of(model, source, ids, features):
    """``[L, F * d]`` by transformers itself."""
    read = []
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda module, given: read.append(given[0]))
    given = {"input_ids": torch.tensor([list(source)]), "decoder_input_ids": torch.tensor([list(ids)])}
    states = model(**given, use_cache=False, output_hidden_states=True).decoder_hidden_states
    handle.remove()
    return torch.cat([read[-1] if number == LAST else states[number] for number in features], -1)[0]


@pytest.mark.parametrize("name", nightly_but({("t5",), ("umt5",), ("m2m_100",), ("bert2bert",)}, DENSE))
def test_hidden_states_are_those_of_a_plain_pass(name):
    """Ragged prompts in chunks, two rows with one source, trees, rows that leave, and a row that joins with a source that is there."""
    model, target = watched(name), Target(build(name), test=False, prefill_chunk=4)
    read, prompts = texts((13, 6, 13)), [[START, *text] for text in texts((6, 1, 3), seed=7)]
    read[2] = read[0]

    def close(found, wanted):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-4)

    def join(new, first):
        target.open(new, sources=[Source.of(source) for source in read[first:]])
        target.prefill(new, first=first)
        for source, prompt, found in zip(read[first:], new, target.prompt_hidden, strict=True):
            close(found, states_of(model, source, prompt, (LAST, 0, 1)))

    def score(seed):
        tree = random_tree(len(prompts), 6, seed)
        target.score(tree)
        for row, (source, prompt) in enumerate(zip(read, prompts)):
            path = tree.path(row, 5)
            ids = [*prompt, *tree.tokens[row, path].tolist()]
            close(target.hidden[row, path], states_of(model, source, ids, (LAST, 0, 1))[len(prompt) :])

    with torch.inference_mode():
        target.read((LAST, 0, 1), whole=True)
        join(prompts, 0)
        score(1)
        target.compact([1, 2])
        read, prompts = [*read[1:], read[0], texts((9,), seed=4)[0]], [*prompts[1:], [START, 5], [START, 8, 9]]
        join(prompts[2:], 2)
        score(2)


def said(head, model, source, ids, path):
    """``[V]`` what the head makes of plain states after the text ``ids``, of whose last token there are none yet, and ``path``."""
    states = states_of(model, source, ids[:-1], head.features)
    with torch.no_grad():
        if head.kind == "medusa":
            return head(states[-1])[len(path)]
        layer = head.layer()
        filler = torch.zeros(1 + len(path), states.shape[1])
        steps = head.unroll(layer, torch.tensor([[*ids, *path]]), torch.cat([states, filler])[None], len(path) + 1)
        return layer.full_logits(list(steps)[-1][0, len(ids) - 2])


def run(speculator, model, head):
    """Rows that join and leave, the last one with a source that is there already; each draft is what the head says of ``model``."""
    read, lengths = texts((12, 5, 30)), (9, 3, 12, 7)
    read.append(read[2])
    draft, seen = speculator.drafter.draft, []

    def checked(request):
        tree = draft(request)
        for index, row in enumerate(request.rows):
            for node in range(tree.nodes):
                below = [
                    each
                    for each in range(tree.nodes)
                    if tree.parents[index, each] == node and (tree.valid is None or tree.valid[index, each])
                ]
                if below:
                    path = tree.tokens[index, tree.path(index, node)].tolist()[1:]
                    logits = said(head, model, row.source.ids, row.ids, path)
                    tokens = tree.tokens[index, below]
                    assert set(tokens.tolist()) == set(logits.topk(len(below)).indices.tolist()), "another draft"
                    seen.append(len(request.rows))
        return tree

    speculator.drafter.draft = checked
    session, found = speculator.session(), {}
    for ids, length in zip(read, lengths):
        slot = session.add([START], RowParameters(max_new_tokens=length, source=Source.of(ids)))
        found[slot] = []
        if ids is not read[0]:  # the first two at once
            for commit in session.step():
                found[commit.slot] += commit.tokens
    while session.live:
        for commit in session.step():
            found[commit.slot] += commit.tokens
    expected = [
        model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=length)[0, 1:].tolist() for ids, length in zip(read, lengths)
    ]
    assert list(found.values()) == expected
    assert len(set(seen)) > 2
    session.close()


PACKED = [("medusa", "native"), ("eagle3", "native"), ("eagle3", "packed")]
DRAFTS = [(name, kind, shape) for name in ("t5", "bart") for kind in ("medusa", "eagle3") for shape in SHAPES[:2]]


@pytest.mark.parametrize(("name", "kind", "shape"), nightly_but({DRAFTS[0], DRAFTS[3], DRAFTS[6]}, DRAFTS))
def test_drafts_are_what_the_head_says_of_plain_states(name, kind, shape):
    run(drafting(name, kind, shape), watched(name), head_for(name, kind))


@needs_kernels
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("kind", "execution"), nightly_but({PACKED[1]}, PACKED))
def test_drafts_of_packed_decoders(kind, execution):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**WIDE)).eval()
        for weight in model.parameters():
            weight.data = 1 + 0.3 * torch.randn(weight.shape) if weight.ndim == 1 else 0.2 * torch.randn(weight.shape)
    head = shaken(kinds.find(kind).for_target(model, **HEADS[kind]))
    options = {"source": copy.deepcopy(head), **({"successors": "off"} if kind == "medusa" else {})}
    speculator = Speculator(copy.deepcopy(model), kind, drafter_options=options, shape=SHAPES[1], execution=execution)
    assert speculator.target.execution == execution
    run(speculator, model, head)
    speculator.close()


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
@pytest.mark.parametrize("dim", [0, 1], ids=["another row", "another position"])
def test_states_that_are_anothers_are_found(kind, dim, monkeypatch):
    score = Target.score

    def wrong(self, *given, **named):
        logits = score(self, *given, **named)
        self.hidden = self.hidden.roll(1, dim)
        return logits

    monkeypatch.setattr(Target, "score", wrong)
    with pytest.raises(AssertionError, match="another draft"):
        run(drafting("t5", kind, SHAPES[0]), watched("t5"), head_for("t5", kind))


# -- what is refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_what_is_refused(kind):
    with pytest.raises(ConfigurationError, match="behind an encoder cannot learn while it serves yet: leave learn out"):
        Speculator(build("t5"), kind, drafter_options={"source": head_for("t5", kind), "learn": True})
    deeper = transformers.T5ForConditionalGeneration(transformers.T5Config(**{**FAMILIES["t5"].options, "num_decoder_layers": 3}))
    with pytest.raises(ConfigurationError, match=r"with layers 2; this target has 3"):
        Speculator(deeper.eval(), kind, drafter_options={"source": head_for("t5", kind)})


def test_embeddings_are_those_of_the_decoder():
    assert embeddings_of(build("bart")) is build("bart").model.decoder.embed_tokens
