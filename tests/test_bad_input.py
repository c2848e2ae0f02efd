"""Bad input ends in an error that names what is wrong, before or instead of wrong text; odd but valid input works."""

from __future__ import annotations

import dataclasses
import json
from functools import cache

import pytest
import torch
from architectures import build
from cover import by_turns, covered
from helpers import PAD, Oracle, added, alone, clone, generate, make_drafter, padded, perturbed, plainly, prompts, repetitive, tiny
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, LogitsProcessor

from foredraft import (
    CacheMemoryError,
    ConfigurationError,
    Drafter,
    DrafterError,
    DrafterInfo,
    ForedraftError,
    Speculator,
    TargetOutputError,
    TokenTree,
    UnsupportedModelError,
    drafters,
    rules,
)
from foredraft.device import default_device
from foredraft.drafters.draft_model import DraftModel
from foredraft.loading import load_model
from foredraft.models.layers import LayerRanges
from foredraft.planning import FixedPlanner
from foredraft.rows import RowParameters
from foredraft.session import Session
from foredraft.target import Target
from foredraft.testing import ProbabilityTable, TableTarget

ROWS = repetitive((23, 9, 15))
NEW = 10
pytestmark = pytest.mark.filterwarnings("ignore:.*dynamic rotary positions")


def small(context: int = 512, vocabulary: int = 128, **options) -> LlamaForCausalLM:
    """A tiny llama of another size."""
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=context, initializer_range=0.35, bos_token_id=None, eos_token_id=None, **options,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


def ending(context: int, **options) -> LlamaForCausalLM:
    """One that cannot go on beyond ``context`` tokens, because its frequencies would change."""
    return small(context, rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}, **options)


def usable(speculator, model=None) -> bool:
    """After an error the same Speculator writes what transformers writes."""
    model = tiny() if model is None else model
    return generate(speculator, ROWS, max_new_tokens=5) == [alone(model, row, max_new_tokens=5) for row in ROWS]


# -- prompts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "prompt is empty"),
        ({"input_ids": torch.zeros(0, 3, dtype=torch.long)}, "prompt is empty"),
        ({"input_ids": torch.ones(2, 3, dtype=torch.long), "attention_mask": torch.tensor([[1, 1, 1], [0, 0, 0]])}, "row 1.*empty"),
        ({"input_ids": torch.ones(1, 3, dtype=torch.long), "attention_mask": torch.tensor([[1, 0, 1]])}, "row 0.*hole"),
        ({"input_ids": torch.ones(2, 5, dtype=torch.long), "attention_mask": torch.tensor([[0, 1], [1, 1]])}, r"\[2, 5\], got \[2, 2\]"),
        ({"input_ids": torch.ones(2, 3, dtype=torch.long), "attention_mask": torch.tensor([[0, 1, 1]])}, r"\[2, 3\], got \[1, 3\]"),
        ({"input_ids": torch.tensor([[1.5, 2.0]])}, "must be integers, got torch.float32"),
        ({"input_ids": [[1, 2, 3]]}, "tensor"),
        ({"input_ids": torch.tensor([1, 2, 3])}, r"\[B, L\].*\[3\]"),
        ({"input_ids": torch.tensor([[1, 128]])}, "128.*vocabulary of 128"),
        ({"input_ids": torch.tensor([[1, -4]])}, "-4.*vocabulary of 128"),
    ],
)
def test_bad_prompts(inputs, message):
    speculator = Speculator(tiny(), drafter="ngram")
    with pytest.raises(ConfigurationError, match=message):
        speculator.generate(**inputs, max_new_tokens=3)
    assert usable(speculator)


@pytest.mark.parametrize("length", [60, 61, 90])
def test_a_prompt_longer_than_the_context(length):
    speculator = Speculator(ending(60), drafter="prompt-lookup")
    with pytest.raises(ConfigurationError, match=f"prompt has {length} tokens.*context holds only 60"):
        generate(speculator, prompts((length,)), max_new_tokens=3)
    with pytest.raises(ConfigurationError, match="context holds only 60"):
        generate(speculator, [ROWS[1], prompts((length,))[0]], max_new_tokens=3)
    assert usable(speculator, ending(60))


NEAR_THE_END = 51, 40, 59


@cache
def to_the_end() -> list[list[int]]:
    """What transformers adds to such rows in a context of 60 tokens."""
    return [alone(ending(60), row, max_new_tokens=60 - len(row)) for row in repetitive(NEAR_THE_END)]


@pytest.mark.parametrize("name", by_turns([*drafters.names(), "oracle"], 1, always={"oracle"}))
def test_the_text_goes_on_to_the_end_of_the_context(name):
    """The draft shrinks; the last token that fits is written, and the statistics say why it ended."""
    model = ending(60)
    rows = repetitive(NEAR_THE_END)
    expected = to_the_end()
    drafter = Oracle([row + text for row, text in zip(rows, expected)]) if name == "oracle" else make_drafter(name)
    if name == "draft-model":
        drafter = DraftModel(ending(60, rms_norm_eps=1e-3))
    speculator = Speculator(model, drafter=drafter, draft_length=7)
    for count in (1, 3):
        out = speculator.generate(**padded(rows[:count]), max_new_tokens=40, pad_token_id=PAD)
        assert added(out, max(map(len, rows[:count]))) == expected[:count]
        assert [row.finish_reason for row in out.stats.rows] == ["context"] * count
    exact = speculator.generate(**padded(rows[:1]), max_new_tokens=9, pad_token_id=PAD)
    assert exact.stats.rows[0].finish_reason == "length"


def test_a_learned_position_table_is_not_overrun():
    """Filler of a ragged draft lies past the last position that the model knows."""
    config = GPT2Config(
        vocab_size=128, n_positions=40, n_embd=32, n_layer=2, n_head=4, initializer_range=0.35, bos_token_id=None, eos_token_id=None
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config).eval()
    rows = repetitive((38, 20))
    expected = [alone(model, row, max_new_tokens=40 - len(row)) for row in rows]
    oracle = Oracle([row + text for row, text in zip(rows, expected)])
    for drafter in (oracle, DraftModel(model)):
        assert generate(Speculator(model, drafter=drafter, draft_length=7), rows, max_new_tokens=50) == expected


def test_a_draft_model_with_a_shorter_context_stops_drafting():
    target, rows = tiny(), repetitive((35, 12))
    expected = [alone(target, row, max_new_tokens=30) for row in rows]
    drafter = DraftModel(small(40))
    out = Speculator(target, drafter=drafter, shape="chain(5)").generate(**padded(rows), max_new_tokens=30, pad_token_id=PAD)
    assert added(out, 35) == expected
    assert out.stats.rows[0].drafted < out.stats.rows[1].drafted


@pytest.mark.parametrize("arguments", [{"max_new_tokens": 0}, {"max_new_tokens": -1}, {"max_length": 5}])
def test_no_room_for_a_token(arguments):
    with pytest.raises(ValueError, match=r"max_new_tokens|max_length"):
        generate(Speculator(tiny(), drafter="none"), ROWS, **arguments)


# -- logits that are no numbers, and processors that leave nothing ---------------------------------------------------


class Spoil:
    """A forward hook that puts ``value`` into the logits of one row at the position of one token."""

    def __init__(self, model, value, row, position, token=5):
        self.value, self.row, self.position, self.token = value, row, position, token
        self.handle = model.register_forward_hook(self.hook, with_kwargs=True)

    def hook(self, module, args, kwargs, output):
        positions = kwargs["position_ids"]
        logits = output.logits
        nodes = (positions[min(self.row, len(positions) - 1)] == self.position).nonzero()[:, 0]
        if kwargs.get("logits_to_keep", 0) is not None and logits.shape[1] != positions.shape[1]:
            return
        for node in nodes:
            logits[self.row, node, self.token] = self.value

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.handle.remove()


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    covered(["none", "oracle", "draft-model"], ["NaN", "infinite"], [{}, {"do_sample": True, "seed": 1, "top_p": 0.9}]),
)
def test_logits_that_are_no_numbers_name_row_and_position(options, kind, name):
    value = {"NaN": float("nan"), "infinite": float("inf")}[kind]
    model = clone(tiny())
    plain = Speculator(model, drafter="none")
    texts = generate(plain, ROWS, max_new_tokens=NEW, **options)
    oracle = Oracle([row + text for row, text in zip(ROWS, texts)])
    drafter = {"none": "none", "oracle": oracle, "draft-model": make_drafter("draft-model")}[name]
    speculator = Speculator(model, drafter=drafter, rule="match", shape="chain(5)")
    # The logits after position 12 of row 1 choose its token 13.
    with Spoil(model, value, 1, 12), pytest.raises(TargetOutputError, match=f"{kind} for row 1, position 13"):
        generate(speculator, ROWS, max_new_tokens=NEW, **options)
    assert generate(speculator, ROWS, max_new_tokens=NEW, **options) == texts
    with Spoil(model, float("-inf"), 1, 12):  # a token that the model rules out is no fault
        assert len(generate(speculator, ROWS, max_new_tokens=NEW, **options)) == 3


def test_spoiled_logits_of_a_rejected_draft_do_no_harm():
    """Only what decides a token counts: the oracle's wrong tokens end paths, and what lies behind them is never looked at."""
    model = clone(tiny())
    texts = [alone(model, row, max_new_tokens=NEW) for row in ROWS]

    class Wrong(Drafter):
        name = "wrong"

        def draft(self, request):
            return request.chains([[(text[len(row.ids) - len(prompt)] + 1) % 128, 7, 7] for row, prompt, text in
                                   ((row, ROWS[row.slot], texts[row.slot]) for row in request.rows)])  # fmt: skip

    def behind(module, args, kwargs, output):
        if kwargs["input_ids"].shape[1] == 4:
            output.logits[:, 1:] = float("nan")

    speculator = Speculator(model, drafter=Wrong(), shape="chain(5)")
    handle = model.register_forward_hook(behind, with_kwargs=True)
    for options in ({}, {"repetition_penalty": 1.0000001}):
        assert generate(speculator, ROWS, max_new_tokens=NEW, **options) == texts
    handle.remove()


def spoil(logits):
    logits.fill_(float("nan"))


def test_spoiled_logits_in_the_prefill():
    model = clone(tiny())
    handle = model.register_forward_hook(lambda module, args, output: spoil(output.logits))
    speculator = Speculator(model, drafter="none", self_test=False)
    with pytest.raises(TargetOutputError, match=r"NaN for row 0, position 23.*dtype"):
        generate(speculator, ROWS, max_new_tokens=3)
    handle.remove()
    assert usable(speculator)


def test_remove_invalid_values_accepts_them():
    model = clone(tiny())
    expected = [alone(tiny(), row, max_new_tokens=4) for row in ROWS]
    handle = model.register_forward_hook(lambda module, args, output: spoil(output.logits[..., expected[0][0]]))
    speculator = Speculator(model, drafter="none", self_test=False)
    assert generate(speculator, ROWS, max_new_tokens=4, remove_invalid_values=True) != expected
    mine = generate(speculator, ROWS[:1], max_new_tokens=4, remove_invalid_values=True)
    assert mine == [alone(model, ROWS[0], max_new_tokens=4, remove_invalid_values=True)]
    handle.remove()


class Nothing(LogitsProcessor):
    """Leaves no token once a text is ``length`` long."""

    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores):
        return torch.full_like(scores, float("-inf")) if input_ids.shape[1] >= self.length else scores


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 1}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["none", "ngram", "draft-model"])
def test_processors_that_leave_no_token(name, options):
    speculator = Speculator(tiny(), drafter=make_drafter(name), rule="match")
    for length, position in ((5, 9), (26, 26)):
        with pytest.raises(TargetOutputError, match=f"forbid every token for row 0, position {position}"):
            generate(speculator, ROWS[1:2] if length == 5 else ROWS[:1], max_new_tokens=NEW, logits_processor=[Nothing(length)], **options)
    everything = list(range(128))
    with pytest.raises(TargetOutputError, match="forbid every token for row 0"):
        generate(speculator, ROWS, max_new_tokens=NEW, suppress_tokens=everything, **options)
    assert usable(speculator)


# -- configuration ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter": "prompt-lokup"}, "unknown drafter 'prompt-lokup'.*prompt-lookup"),
        ({"drafter": 7}, "drafter must be.*int"),
        ({"drafter": "ngram", "drafter_options": {"ordr": 3}}, "'ordr'.*order"),
        ({"drafter": Oracle([]), "drafter_options": {"order": 3}}, "drafter_options"),
        ({"drafter": "none", "rule": "mach"}, "unknown rule 'mach'.*match"),
        ({"drafter": "none", "rule": 3}, "rule must be"),
        ({"drafter": "prompt-lookup", "rule": "rejection"}, "rejection.*deterministic.*prompt-lookup.*auto"),
        ({"drafter": "suffix", "rule": "rejection"}, "rejection.*deterministic"),
        ({"drafter": "none", "draft_length": -1}, "draft_length"),
        ({"drafter": "none", "draft_length": 2.5}, "draft_length"),
        ({"drafter": "none", "draft_length": True}, "draft_length"),
        ({"drafter": "none", "dtype": "float32"}, "dtype"),
        ({"drafter": "draft-model:/no/such/place"}, "/no/such/place"),
        ({"drafter": "draft-model:zoo:nothing"}, "zoo:nothing"),
    ],
)
def test_bad_configurations(options, message):
    with pytest.raises(ValueError, match=message):
        Speculator(tiny(), **options)


def test_a_sampled_draft_is_refused_for_a_rule_it_does_not_fit():
    for siblings in ("keyed", "top-k"):
        with pytest.raises(ConfigurationError, match="rejection"):
            Speculator(tiny(), drafter=make_drafter("draft-model", siblings=siblings), rule="rejection")
    assert Speculator(tiny(), drafter=make_drafter("draft-model"), shape="chain(5)").rule.name == "block"
    assert Speculator(tiny(), drafter="ngram", shape="chain(5)").rule.name == "match"
    assert "rejection" in rules.names() and "draft-model" in drafters.names()


@pytest.mark.parametrize("source", ["/no/such/place", "no-such-model-here", "zoo:nothing", ""])
def test_a_path_that_is_no_model(source, tmp_path):
    with pytest.raises(ValueError, match=source or "model"):
        Speculator(source, drafter="none")
    with pytest.raises(ConfigurationError, match="cannot be loaded as a causal language model"):
        Speculator(str(tmp_path), drafter="none")
    with pytest.raises(ConfigurationError, match="flot32"):
        Speculator("zoo:python-8m", drafter="none", dtype="flot32")


def test_a_checkpoint_that_contradicts_its_config_or_lacks_weights(tmp_path):
    tiny().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    size = config["intermediate_size"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": size + 8}))
    message = rf"contradicts its config.json: model\.layers\.0\.mlp\.down_proj\.weight has shape \(\d+, {size}\) .* and \(\d+, {size + 8}\)"
    with pytest.raises(ConfigurationError, match=message):
        Speculator(str(tmp_path), drafter="none")
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": config["num_hidden_layers"] + 1}))
    with pytest.raises(
        ConfigurationError, match=r"lacks model\.layers\.\d\.input_layernorm\.weight, and \d+ others, which .* random numbers"
    ):
        Speculator(str(tmp_path), drafter="none")
    count = config["num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": count - 1, "layer_types": None}))
    with pytest.raises(
        ConfigurationError, match=rf"the files have model\.layers\.{count - 1}\..*, and a model of that .* has {count - 1} layers"
    ):
        Speculator(str(tmp_path), drafter="none")  # it would be another model
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": count - 1, "num_nextn_predict_layers": 1}))
    assert load_model(tmp_path).config.num_hidden_layers == count - 1  # the last layer predicts further tokens


@pytest.mark.parametrize(
    "wrong", [{"num_attention_heads": -1}, {"layer_types": ["full_attention"]}, {"hidden_size": "x"}, {"quantization_config": []}]
)
def test_a_configuration_that_transformers_stumbles_over(wrong, tmp_path):
    build("qwen3").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(json.loads((tmp_path / "config.json").read_text()) | wrong))
    with pytest.raises(ConfigurationError, match="cannot be loaded as a causal language model"):
        load_model(tmp_path)


def test_what_is_no_model():
    for thing in (7, torch.nn.Linear(2, 2), None):
        with pytest.raises(UnsupportedModelError, match=type(thing).__name__):
            Speculator(thing, drafter="none")
    with pytest.raises(UnsupportedModelError, match="causal language model, got LlamaModel"):
        Speculator(tiny().model, drafter="none")


def test_a_model_in_training_mode():
    model = clone(tiny()).train()
    with pytest.raises(UnsupportedModelError, match="eval"):
        Speculator(model, drafter="none")
    with pytest.raises(UnsupportedModelError, match="eval"):
        Speculator(tiny(), drafter=DraftModel(model))


def test_an_attention_that_takes_no_mask():
    model = clone(tiny())
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(UnsupportedModelError, match=r"flash_attention_2.*sdpa"):
        Speculator(model, drafter="none", self_test=False)


# -- drafters that misbehave ------------------------------------------------------------------------------------------


class Misbehaving(Drafter):
    name = "misbehaving"

    def __init__(self, make, proposal="deterministic"):
        self.make, self.info = make, DrafterInfo(proposals=(proposal,))

    def draft(self, request):
        return self.make(request.rows[0].ids[-1])


def chain(*tokens, **options):
    return TokenTree.from_chain(torch.tensor([tokens]), **options)


def tree(root, *parents, **options):
    return TokenTree(torch.tensor([[root, *range(5, 4 + len(parents))]]), torch.tensor([parents]), **options)


MISTAKES = {
    "a cycle": (lambda root: tree(root, -1, 2, 1), "row 0: node 1 names parent 2, which does not come before it"),
    "a parent after its child": (lambda root: tree(root, -1, 2, 0), "row 0: node 1 names parent 2"),
    "a parent that is none": (lambda root: tree(root, -1, 0, 99), "row 0: node 2 names parent 99"),
    "two roots": (lambda root: tree(root, -1, -1, 0), "row 0: node 1 has parent -1; node 0 must be the only root"),
    "a layout with two roots": (
        lambda root: TokenTree.from_parents(torch.tensor([[root, 5, 6]]), (-1, -1, 0)),
        "static_parents: node 1 has parent -1",
    ),
    "a layout of another size": (
        lambda root: TokenTree(torch.tensor([[root, 5]]), torch.tensor([[-1, 0]]), static_parents=(-1, 0, 0)),
        "static_parents has 3 nodes",
    ),
    "a parent that is none, against a layout": (
        lambda root: tree(root, -1, 0, 99, static_parents=(-1, 0, 0)),
        "parent 99; static_parents says 0",
    ),
    "a parent that is none, against a layout with filler": (
        lambda root: tree(root, -1, 0, 99, static_parents=(-1, 0, 0), valid=torch.tensor([[True, True, False]])),
        "parent 99; static_parents says 0",
    ),
    "a parent that is none, in a chain": (lambda root: tree(root, -1, 0, 99, chain=True), "parent 99; a chain says 1"),
    "a chain that branches": (lambda root: tree(root, -1, 0, 0, chain=True), "node 2 has parent 0; a chain says 1"),
    "above the vocabulary": (lambda root: chain(root, 5, 128), "5, 128.*vocabulary of 128"),
    "negative": (lambda root: chain(root, -1), "-1.*vocabulary of 128"),
    "another root": (lambda root: chain((root + 1) % 128, 5), "root"),
    "too many rows": (lambda root: TokenTree.from_chain(torch.tensor([[root, 5], [root, 5]])), "1 rows, got a tree of 2"),
    "a list": (lambda root: [[root, 5]], "TokenTree.*list"),
    "nothing": (lambda root: None, "TokenTree.*NoneType"),
    "one dimension": (lambda root: TokenTree(torch.tensor([root]), torch.tensor([-1])), "must both be"),
    "no parents": (lambda root: TokenTree(torch.tensor([[root, 5, 6]]), torch.tensor([[-1, 0]])), "must both be"),
    "fractions": (lambda root: TokenTree.from_chain(torch.tensor([[float(root), 5.0]])), "int64"),
    "a short validity": (lambda root: chain(root, 5, valid=torch.ones(1, 1, dtype=torch.bool)), "valid"),
}


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 1, "repetition_penalty": 1.2}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_drafter_that_returns_no_proposal(mistake, options):
    make, message = MISTAKES[mistake]
    speculator = Speculator(tiny(), drafter=Misbehaving(make), shape="chain(5)")
    with pytest.raises(DrafterError, match=f"'misbehaving'.*{message}"):
        generate(speculator, ROWS[:1], max_new_tokens=NEW, **options)
    assert Speculator(tiny(), drafter="none").generate(**padded(ROWS[:1]), max_new_tokens=2, **options).stats.new_tokens == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: chain(root, 5, proposal="iid"), "no q"),
        (lambda root: chain(root, 5, proposal="iid", q=torch.full((1, 1, 99), 1 / 99)), "V=128"),
        (lambda root: chain(root, 5, 6, proposal="iid", q=torch.full((1, 1, 128), 1 / 128)), "M >= 2"),
        (lambda root: chain(root, 500, proposal="iid", q=torch.full((1, 1, 128), 1 / 128)), "vocabulary"),
        (lambda root: chain(root, 5), "deterministic"),
        (lambda root: chain(root, 5, proposal="iid", pruned=True, q=torch.full((1, 1, 128), 1 / 128)), "dropped"),
        (lambda root: chain(root, 5, proposal="random"), "random"),
        (lambda root: chain(root, 5, proposal="iid", q=torch.full((1, 1, 128), 1 / 127)), "row 0, node 0: q sums to 1.00787"),
        (lambda root: chain(root, 5, proposal="iid", q=torch.full((1, 1, 128), float("nan"))), "row 0, node 0: q holds NaN"),
        (lambda root: tree(root, -1, 0, 0, proposal="iid", q=torch.full((1, 1, 128), 1 / 128)), "chains only"),
    ],
)
def test_a_sampled_proposal_that_the_rule_cannot_verify(make, message):
    speculator = Speculator(tiny(), drafter=Misbehaving(make, "iid"), rule="block", shape="chain(5)")
    with pytest.raises(DrafterError, match=message):
        generate(speculator, ROWS[:1], max_new_tokens=NEW, do_sample=True)


def test_a_draft_that_is_too_long_is_cut():
    """It costs a wide pass; it neither crosses a limit nor changes the text."""
    long = Misbehaving(lambda root: chain(root, *[7] * 40))
    texts = [alone(ending(60), ROWS[0], max_new_tokens=37)]
    assert generate(Speculator(ending(60), drafter=long, shape="chain(5)"), ROWS[:1], max_new_tokens=50) == texts
    options = {"do_sample": True, "seed": 3, "max_new_tokens": NEW, "repetition_penalty": 1.2}
    expected = plainly(tiny(), ROWS[:1], **options)
    out = Speculator(tiny(), drafter=long, shape="chain(5)").generate(**padded(ROWS[:1]), **options)
    assert added(out, 23) == expected
    assert len(out.stats.drafted_by_depth) == 5, "what lies deeper than draft_length was never proposed"
    text = alone(tiny(), ROWS[0], max_new_tokens=7)
    assert len(set(text)) == 7
    right = Misbehaving(lambda root: chain(*text[text.index(root) :]))
    out = Speculator(tiny(), drafter=right, draft_length=2).generate(**padded(ROWS[:1]), max_new_tokens=7, pad_token_id=PAD)
    assert added(out, 23) == [text]
    assert out.stats.accepted_by_depth == out.stats.drafted_by_depth == [2, 2]


def test_a_drafter_that_raises_leaves_the_speculator_usable():
    oracle = Oracle([])
    speculator = Speculator(tiny(), drafter=oracle, shape="chain(5)")

    def fail(request):
        raise ZeroDivisionError

    oracle.draft = fail
    with pytest.raises(ZeroDivisionError):
        generate(speculator, ROWS, max_new_tokens=NEW)
    del oracle.draft
    assert usable(speculator)


# -- other vocabularies, dtypes, wrappers and devices ----------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [120, 128, 160])
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 2}], ids=["greedy", "sampled"])
def test_a_draft_with_another_padded_vocabulary_works(vocabulary, options):
    draft = small(vocabulary=vocabulary)
    expected = plainly(tiny(), ROWS, max_new_tokens=NEW, **options)
    speculator = Speculator(tiny(), drafter=DraftModel(draft), rule="match", shape="chain(5)")
    assert generate(speculator, ROWS, max_new_tokens=NEW, **options) == expected
    if options:
        out = Speculator(tiny(), drafter=DraftModel(draft), rule="rejection", shape="chain(5)").generate(
            **padded(ROWS), max_new_tokens=NEW, pad_token_id=PAD, **options
        )
        assert out.stats.new_tokens == 3 * NEW and int(out.sequences.max()) < 128


def test_a_draft_with_another_vocabulary_needs_both_tokenizers():
    from types import SimpleNamespace

    from foredraft import zoo

    with pytest.raises(ConfigurationError, match=r"target has 128 tokens, the draft 5000.*pass it as Speculator\(\.\.\., tokenizer"):
        Speculator(tiny(), drafter=DraftModel(small(vocabulary=5000)))
    tokenizer = zoo.load_tokenizer("python-8m")
    with pytest.raises(ConfigurationError, match=r"pass it as drafter_options=\{'tokenizer'"):
        Speculator(tiny(), drafter=DraftModel(small(vocabulary=5000)), tokenizer=tokenizer)
    with pytest.raises(ConfigurationError, match=r"needs fast tokenizers.*got SimpleNamespace"):
        Speculator(tiny(), drafter=DraftModel(small(vocabulary=5000), tokenizer=SimpleNamespace(get_vocab=dict)), tokenizer=tokenizer)


def test_the_tokenizers_are_compared_where_they_can_be_found(tmp_path):
    from foredraft import zoo

    tokenizer = zoo.load_tokenizer("python-8m")
    draft = small(vocabulary=4200)
    for name, extra in (("same", []), ("other", ["<odd>"])):
        tokenizer.add_tokens(extra)
        draft.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    row = prompts((6,), vocabulary=4000)
    target = Speculator("zoo:python-8m", drafter="none")
    same = Speculator("zoo:python-8m", drafter=f"draft-model:{tmp_path}/same")
    assert same.drafter.model.vocab_size == 4200
    assert generate(same, row, max_new_tokens=5) == generate(target, row, max_new_tokens=5)
    other = Speculator("zoo:python-8m", drafter=f"draft-model:{tmp_path}/other")
    assert generate(other, row, max_new_tokens=5) == generate(target, row, max_new_tokens=5)
    assert "another tokenizer" not in str(same.drafter.details()) and "knows 100%" in other.drafter.details()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 2}], ids=["greedy", "sampled"])
def test_a_draft_in_another_dtype_works(dtype, options):
    draft = clone(perturbed()).to(dtype)
    expected = plainly(tiny(), ROWS, max_new_tokens=NEW, **options)
    speculator = Speculator(tiny(), drafter=DraftModel(draft), rule="match", shape="chain(5)")
    out = speculator.generate(**padded(ROWS), max_new_tokens=NEW, pad_token_id=PAD, **options)
    assert added(out, 23) == expected and out.stats.accepted > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_target_in_half_precision_works(dtype):
    model = clone(tiny()).to(dtype)
    speculator = Speculator(model, drafter=DraftModel(model), draft_length=3)
    out = speculator.generate(**padded(ROWS[:1]), max_new_tokens=NEW)
    assert out.stats.accepted > 0
    assert Speculator(model, drafter="none").generate(**padded(ROWS[:1]), max_new_tokens=NEW).sequences[0, 23:].tolist() == alone(
        model, ROWS[0], max_new_tokens=NEW
    )


def test_a_cache_that_does_not_fit(monkeypatch):
    speculator = Speculator(tiny(), drafter="prompt-lookup", self_test=False)  # so that its cache has no pages
    speculator.release()
    zeros = torch.zeros

    def full(*shape, **options):
        if shape and isinstance(shape[0], tuple) and len(shape[0]) == 4 and shape[0][0] > 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return zeros(*shape, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", full)
        with pytest.raises(CacheMemoryError, match=r"MiB per layer \(3 rows x 256 tokens.*cpu.*max_new_tokens"):
            generate(speculator, ROWS, max_new_tokens=NEW)
        assert generate(speculator, ROWS[:1], max_new_tokens=NEW) == [alone(tiny(), ROWS[0], max_new_tokens=NEW)]  # as the message says
    assert usable(speculator)


def test_a_lora_adapter_works():
    peft = pytest.importorskip("peft")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = peft.get_peft_model(
            clone(tiny()), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        ).eval()
    expected = [alone(model, row, max_new_tokens=NEW) for row in ROWS]
    assert expected != [alone(tiny(), row, max_new_tokens=NEW) for row in ROWS]
    speculator = Speculator(model, drafter=make_drafter("draft-model"))
    assert generate(speculator, ROWS, max_new_tokens=NEW) == expected
    import foredraft

    through = model.generate(
        **padded(ROWS), max_new_tokens=NEW, pad_token_id=PAD, do_sample=False, custom_generate=foredraft.custom_generate("ngram")
    )
    assert added(through, 23) == expected
    one = ROWS[:1]
    assert generate(speculator, one, max_new_tokens=NEW) == expected[:1]
    with model.disable_adapter():  # no cache of the adapted model may be reused here
        assert generate(speculator, one, max_new_tokens=NEW) == [alone(tiny(), ROWS[0], max_new_tokens=NEW)]
    assert generate(speculator, one, max_new_tokens=NEW) == expected[:1]


def test_virtual_tokens_are_refused():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(clone(tiny()), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    with pytest.raises(UnsupportedModelError, match="LoRA"):
        Speculator(model, drafter="none")


def test_a_device_map_works():
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.dispatch_model(clone(tiny()), {"model.embed_tokens": "cpu", "model.layers": "cpu", "": "cpu"}, force_hooks=True)
    speculator = Speculator(model, drafter="ngram")
    assert usable(speculator)


def test_offloaded_weights_work(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(clone(tiny()), execution_device=torch.device("cpu"))
    assert next(model.parameters()).device.type == "meta"
    assert usable(Speculator(model, drafter="ngram"))
    assert LayerRanges(model).count == model.config.num_hidden_layers


# -- the target, used by hand -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parents", [[-1, 0, 99, 1, 2, 3], [-1, 0, -5, 1, 2, 3], [-1, 0, 4, 1, 2, 3], [0, 0, 1, 1, 2, 3]])
def test_parents_that_make_no_tree_are_named_where_a_row_has_little_room(parents):
    class Broken(Drafter):
        name, info = "broken", DrafterInfo(branches=True)

        def draft(self, request):
            tokens = torch.ones(len(request.rows), len(parents), dtype=torch.long)
            return TokenTree(tokens, torch.tensor([parents] * len(request.rows)))

    speculator = Speculator(tiny(), drafter=Broken(), shape="product(2,1)")
    with pytest.raises(DrafterError, match=r"row 0.*(parent|root)"):
        generate(speculator, ROWS, max_new_tokens=NEW)


def test_trees_and_paths_that_do_not_fit_the_rows():
    target = Target(tiny(), test=False)
    target.open(ROWS)
    target.prefill(ROWS, first=0)
    with pytest.raises(ValueError, match="tree has 1 rows and the cache 3"):
        target.score(TokenTree.from_chain(torch.ones(1, 3, dtype=torch.long)))
    for kept in ([4, 1, 1], [1, 1]):
        target.score(TokenTree.from_chain(torch.ones(3, 3, dtype=torch.long)))
        with pytest.raises(ValueError, match="kept must say for each of 3 rows how many of 3 nodes"):
            target.commit(None, kept)


def test_a_q_that_misses_a_node_with_children():
    tree = TokenTree(torch.tensor([[0, 1, 2]]), torch.tensor([[-1, 0, 1]]), proposal="iid", q=torch.full((1, 1, 3), 1 / 3))
    with pytest.raises(ValueError, match="row 0, node 1: q holds 1 nodes"):
        tree.check(3)


# -- the model changes underneath ---------------------------------------------------------------------------------------


def test_replaced_weights_are_noticed_and_a_cache_of_another_dtype():
    model = clone(tiny())
    speculator = Speculator(model, drafter="none")
    generate(speculator, ROWS, max_new_tokens=NEW)
    weight = model.model.layers[0].self_attn.v_proj.weight
    weight.data = -weight.data
    assert generate(speculator, ROWS, max_new_tokens=NEW) == [alone(model, row, max_new_tokens=NEW) for row in ROWS]
    model.double()
    assert generate(speculator, ROWS, max_new_tokens=NEW) == [alone(model, row, max_new_tokens=NEW) for row in ROWS]


def test_training_mode_is_noticed_at_every_call():
    model = clone(tiny())
    speculator = Speculator(model, drafter="none")
    model.train()
    with pytest.raises(UnsupportedModelError, match=r"call model.eval\(\)"):
        generate(speculator, ROWS, max_new_tokens=NEW)
    model.eval()
    assert usable(speculator)


@pytest.mark.parametrize("context", [4, 7, 20, 31, 32, 40])
def test_a_context_too_small_for_the_self_test(context):
    (row,) = prompts((3,))
    speculator = Speculator(ending(context), drafter="prompt-lookup", draft_length=2)
    assert generate(speculator, [row], max_new_tokens=100) == [alone(ending(context), row, max_new_tokens=context - 3)]


def test_a_drafter_handed_from_one_speculator_to_another():
    drafter = make_drafter("draft-model")
    first = Speculator(tiny(), drafter=drafter, shape="chain(5)")
    stream = first.stream(**padded(ROWS), max_new_tokens=NEW, pad_token_id=PAD)
    next(stream)
    second = Speculator(clone(tiny()), drafter=drafter, shape="chain(5)")
    assert generate(second, ROWS, max_new_tokens=NEW) == [alone(tiny(), row, max_new_tokens=NEW) for row in ROWS]
    with pytest.raises(ForedraftError, match="another generation"):
        list(stream)
    assert usable(first) and usable(second)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"valid": torch.tensor([[True, False, True, True]])}, "hangs below a filler"),
        ({"valid": torch.tensor([[False, True, True, True]])}, "root must be valid"),
        ({"valid": torch.ones(1, 4)}, "valid must be bool"),
        ({"static_parents": (-1, 0, 0, 2)}, "node 3 has parent 1; static_parents says 2"),
        ({"static_parents": (-1, 0, 0, 1), "parents": torch.tensor([[-1, 0, 0, 9]])}, "node 3 has parent 9; static_parents says 1"),
        ({"q": torch.tensor([[[1.5, -0.5, 0.0]] * 4])}, "node 0: q is negative"),
        ({"q": torch.full((1, 1, 3), 1 / 3)}, "node 1: q holds 1 nodes"),
    ],
)
@pytest.mark.parametrize("rule", ["traversal", "multi-candidate", "k-seq"])
def test_a_tree_that_is_none_is_refused_by_every_rule(change, message, rule):
    """Each of these would change the law of the text without a sign."""
    good = TokenTree(torch.tensor([[0, 1, 2, 0]]), torch.tensor([[-1, 0, 0, 1]]), proposal="iid", q=torch.full((1, 4, 3), 1 / 3))
    table = TableTarget(ProbabilityTable.random(3, seed=1))

    class Fixed(Drafter):
        name, info = "fixed", DrafterInfo(branches=True, proposals=("iid",))
        tree = good

        def draft(self, request):
            return dataclasses.replace(self.tree, tokens=torch.cat([request.roots()[:, None], self.tree.tokens[:, 1:]], 1))

    def run(tree):
        Fixed.tree = tree
        session = Session(table, Fixed(), rules.create(rule), proposal="iid", planner=FixedPlanner("product(2,1)"))
        session.add([0], RowParameters(max_new_tokens=9, do_sample=True))
        session.step()
        session.step()

    run(good)
    with pytest.raises(DrafterError, match=message):
        run(dataclasses.replace(good, **change))


def test_a_chain_with_a_hole():
    holes = torch.tensor([[True, False, True]])
    drafter = Misbehaving(lambda root: TokenTree.from_chain(torch.tensor([[root, 5, 6]]), valid=holes))
    with pytest.raises(DrafterError, match="hangs below a filler"):
        generate(Speculator(tiny(), drafter=drafter, shape="chain(2)"), ROWS[:1], max_new_tokens=NEW, do_sample=True, seed=1)


def test_scores_that_the_temperature_blew_up():
    with pytest.raises(TargetOutputError, match=r"infinite or NaN.*temperature too small"):
        generate(Speculator(tiny(), drafter="none"), ROWS, max_new_tokens=NEW, do_sample=True, temperature=1e-40)


def test_a_wrapped_draft_model_and_the_configuration_of_a_wrapper():
    from peft import LoraConfig, get_peft_model
    from transformers import GenerationConfig

    def wrapped():
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        return get_peft_model(clone(tiny()), config).eval()

    speculator = Speculator(wrapped(), wrapped(), shape="chain(2)")
    speculator.model.generation_config = GenerationConfig(max_new_tokens=3, pad_token_id=PAD, do_sample=False)
    assert speculator.drafter.name == "draft-model"
    assert len(added(speculator.generate(**padded(ROWS[:1])), len(ROWS[0]))[0]) == 3


def test_a_model_of_the_zoo_goes_to_the_device_that_is_there():
    assert Speculator("zoo:python-1m", "none", device="auto", self_test=False).target.device == torch.empty(()).to(default_device()).device
