"""Limits, stopping criteria and custom processors, against transformers' own generate on the same padded batch."""

from __future__ import annotations

import warnings
from functools import cache

import pytest
import torch
from architectures import ARCHITECTURES
from helpers import PAD, Oracle, added, alone, clone, generate, make_drafter, padded, perturbed, prompts, repetitive, tiny
from transformers import LogitsProcessor, MaxLengthCriteria, StoppingCriteria

import foredraft
from foredraft import RowParameters, Speculator
from foredraft.drafters.draft_model import DraftModel

NEW = 14
ROWS = repetitive((23, 9, 15))
WIDTH = 23


@cache
def texts() -> list[list[int]]:
    return [alone(tiny(), row, max_new_tokens=NEW) for row in ROWS]


@cache
def speculators() -> dict[str, Speculator]:
    """Chains, trees and every way to verify them; greedy texts do not depend on it."""
    oracle = Oracle([row + text for row, text in zip(ROWS, texts())])
    return {
        "known": Speculator(tiny(), oracle, draft_length=5),
        "chain": Speculator(tiny(), DraftModel(perturbed()), shape="chain(4)", rule="block"),
        "tree": Speculator(tiny(), DraftModel(perturbed(), siblings="iid"), shape="product(3,2,1)", rule="traversal"),
        "dynamic": Speculator(tiny(), DraftModel(perturbed()), shape="dynamic(depth=3,k=2,total=6)", rule="match"),
    }


def both(**options):
    """The sequences of transformers, and of every way to ask for the same here."""
    options = {**padded(ROWS), "do_sample": False, "pad_token_id": PAD, "max_new_tokens": NEW, **options}
    made = {name: each.generate(**options).sequences for name, each in speculators().items()}
    made["custom_generate"] = tiny().generate(**options, custom_generate=foredraft.custom_generate("prompt-lookup"))
    return tiny().generate(**options), made


def assert_alike(**options):
    expected, made = both(**options)
    for name, sequences in made.items():
        assert torch.equal(sequences, expected), name
    return expected


# -- lengths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [[4], [9, 6], [NEW + 6], [-5]], ids=["lower", "the lowest", "higher", "inside the prompt"])
def test_a_max_length_criterion_takes_the_place_of_max_new_tokens(limits):
    expected = assert_alike(stopping_criteria=[MaxLengthCriteria(WIDTH + each) for each in limits])
    assert expected.shape[1] == WIDTH + max(1, min(limits))


def test_a_row_that_a_max_length_criterion_ends_has_reached_its_length():
    out = speculators()["tree"].generate(
        **padded(ROWS), max_new_tokens=NEW, pad_token_id=PAD, stopping_criteria=[MaxLengthCriteria(WIDTH + 4)]
    )
    assert [row.finish_reason for row in out.stats.rows] == ["length"] * 3
    stream = speculators()["tree"].stream(
        **padded(ROWS), max_new_tokens=NEW, pad_token_id=PAD, stopping_criteria=[MaxLengthCriteria(WIDTH + 4)]
    )
    assert sum(len(tokens) for tokens in stream) == 12


class Halved(MaxLengthCriteria):
    """Of the user's own: asked, not read."""

    def __call__(self, input_ids, scores, **kwargs):
        return super().__call__(input_ids[:, ::2], scores, **kwargs)


def test_a_subclass_of_max_length_is_asked():
    assert assert_alike(stopping_criteria=[Halved(15)]).shape[1] == 29


def test_a_max_length_criterion_in_a_session():
    session = speculators()["known"].session()
    slots = [
        session.add(ROWS[0], RowParameters(max_new_tokens=NEW, criteria=[MaxLengthCriteria(WIDTH + limit)])) for limit in (4, NEW + 6, -5)
    ]
    rows, new = list(session.waiting), {slot: [] for slot in slots}
    while session.live:
        for commit in session.step():
            new[commit.slot] += commit.tokens
    assert list(new.values()) == [texts()[0][:4], texts()[0], texts()[0][:1]]
    assert [row.stats.finish_reason for row in rows] == ["length"] * 3


# -- criteria -----------------------------------------------------------------------------------------------------------


class Count(StoppingCriteria):
    """As the usual code evaluations do: looks at what follows the padded prompt. Ends a row whose new tokens hold one of ``tokens``."""

    def __init__(self, width, tokens):
        self.width, self.tokens, self.seen = width, torch.tensor(tokens), []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen += [(row, scores is None) for row in input_ids.tolist()]
        return torch.isin(input_ids[:, self.width :], self.tokens).any(1)


def test_criteria_may_slice_by_the_padded_width():
    tokens = [texts()[0][5], texts()[1][2], texts()[2][8]]
    expected = assert_alike(stopping_criteria=[Count(WIDTH, tokens)], eos_token_id=127)
    assert expected.shape[1] < WIDTH + NEW


@pytest.mark.parametrize("side", ["left", "right"])
def test_criteria_see_what_transformers_shows_of_each_row(side):
    theirs, ours = Count(WIDTH, [-1]), Count(WIDTH, [-1])
    options = {"max_new_tokens": NEW, "pad_token_id": PAD}
    tiny().generate(**padded(ROWS), do_sample=False, stopping_criteria=[theirs], **options)
    speculators()["tree"].generate(**padded(ROWS, side), stopping_criteria=[ours], **options)
    assert sorted(ours.seen) == sorted(theirs.seen)


def test_what_stood_in_the_place_of_padding_is_shown():
    inputs, criterion = padded(ROWS), Count(WIDTH, [-1])
    inputs["input_ids"][inputs["attention_mask"] == 0] = 99
    speculators()["tree"].generate(**inputs, max_new_tokens=1, pad_token_id=PAD, stopping_criteria=[criterion])
    assert [row[:WIDTH] for row, _ in criterion.seen] == inputs["input_ids"].tolist()


class Unsure(StoppingCriteria):
    """Ends a row when its last token was less likely than ``limit``, by the scores alone."""

    def __init__(self, limit):
        self.limit, self.steps = limit, set()

    def __call__(self, input_ids, scores, **kwargs):
        if scores is None:
            return torch.zeros(len(input_ids), dtype=torch.bool)
        self.steps.add((len(scores), input_ids.shape[1] - WIDTH))
        assert all(step.shape == (len(input_ids), 128) for step in scores)
        return scores[-1].softmax(-1).gather(1, input_ids[:, -1:])[:, 0] < self.limit


def test_criteria_get_the_scores_of_their_row():
    probable = tiny().generate(
        **padded(ROWS), max_new_tokens=NEW, do_sample=False, pad_token_id=PAD, output_scores=True, return_dict_in_generate=True
    )
    likely = torch.stack([step.softmax(-1).amax(1) for step in probable.scores])  # [NEW, R]
    limit = float(likely.min(0).values.max()) + 1e-4  # every row ends, each at a place of its own
    options = {"return_dict_in_generate": True, "output_scores": True, "eos_token_id": 127}
    criterion = Unsure(limit)
    expected = (
        tiny()
        .generate(**padded(ROWS), do_sample=False, pad_token_id=PAD, max_new_tokens=NEW, stopping_criteria=[criterion], **options)
        .sequences
    )
    assert len(criterion.steps) > 1 and expected.shape[1] < WIDTH + NEW
    for name, speculator in speculators().items():
        criterion = Unsure(limit)
        out = speculator.generate(**padded(ROWS), pad_token_id=PAD, max_new_tokens=NEW, stopping_criteria=[criterion], **options)
        assert torch.equal(out.sequences, expected), name
        assert all(count == new for count, new in criterion.steps)
    decode = foredraft.custom_generate("prompt-lookup")
    inputs = {**padded(ROWS), "pad_token_id": PAD, "max_new_tokens": NEW, "custom_generate": decode, "stopping_criteria": [Unsure(limit)]}
    assert torch.equal(tiny().generate(**inputs, **options).sequences, expected)
    unasked = tiny().generate(**inputs, output_scores=True)  # without return_dict_in_generate, transformers records none
    assert unasked.tolist() == tiny().generate(**padded(ROWS), pad_token_id=PAD, max_new_tokens=NEW).tolist()


def test_criteria_in_a_session_get_scores_where_it_records_them():
    asked = []

    def criterion(ids, scores):
        asked.append((ids.shape, None if scores is None else [tuple(step.shape) for step in scores]))
        return False

    for record in (frozenset(), frozenset({"scores"})):
        session = speculators()["known"].session(record=record)
        session.add(ROWS[1], RowParameters(max_new_tokens=3, criteria=[criterion]))
        while session.live:
            session.step()
    assert asked[:3] == [((1, 9 + count), None) for count in (1, 2, 3)]
    assert asked[3:] == [((1, 9 + count), [(1, 128)] * count) for count in (1, 2, 3)]


# -- processors of the user's own ---------------------------------------------------------------------------------------


class Alternating(LogitsProcessor):
    """Looks at what follows the padded prompt, one row at a time: even tokens at even places, odd ones at odd places."""

    def __init__(self, width):
        self.width, self.shapes = width, set()

    def __call__(self, input_ids, scores):
        self.shapes.add((input_ids.shape[0], scores.shape[0]))
        new = input_ids[:, self.width :].shape[1]
        return scores.masked_fill(torch.arange(scores.shape[1]) % 2 != (new + input_ids[:, 0:1] % 2) % 2, float("-inf"))


def test_processors_may_slice_by_the_padded_width():
    processor = Alternating(WIDTH)
    expected, made = both(logits_processor=[processor])
    assert processor.shapes == {(1, 1), (3, 3)}, "one row at a time here, the batch in transformers"
    for name, sequences in made.items():
        assert torch.equal(sequences, expected), name


def test_a_prefix_function_may_slice_by_the_padded_width():
    def allowed(row, ids):
        written = len(ids) - WIDTH
        assert 0 <= written < NEW
        return [token for token in range(3, 128) if token % 3 == (row + written) % 3]

    assert_alike(prefix_allowed_tokens_fn=allowed)


@pytest.mark.parametrize(
    ("rule", "shape"), [("match", "product(3,2,1)"), ("traversal", "product(3,2,1)"), ("block", "chain(4)"), ("rejection", "chain(4)")]
)
def test_sampled_rows_keep_to_a_processor_that_slices(rule, shape):
    speculator = Speculator(tiny(), DraftModel(perturbed(), siblings="iid"), shape=shape, rule=rule)
    out = speculator.generate(
        **padded(ROWS), max_new_tokens=NEW, do_sample=True, pad_token_id=PAD, seed=3, logits_processor=[Alternating(WIDTH)]
    )
    for row, text in zip(padded(ROWS)["input_ids"], added(out, WIDTH)):
        assert [token % 2 for token in text] == [(int(row[0]) + place) % 2 for place in range(NEW)]


# -- positions ----------------------------------------------------------------------------------------------------------

LONGROPE = "phi3_longrope"  # stops where its frequencies change
HARD = {
    "gpt2",
    "opt",
    "gpt_bigcode",
    "biogpt",
    "gptj",
    "codegen",
    "gpt_neo",
    "mpt",
}  # a table of positions, which transformers overruns too
GOES_ON = ["llama", "gpt_neox", "gemma2", "falcon", "llama4_tuned", "qwen3_next"]


def trained_for(positions, name="llama"):
    model = clone(tiny(name, ARCHITECTURES[name].implementations[0]))
    model.config.get_text_config().max_position_embeddings = positions
    return model


def as_transformers_beyond_its_positions(name, **options):
    rows, model = repetitive((37, 29)), trained_for(40, name)
    expected = [alone(model, row, max_new_tokens=14) for row in rows]
    oracle = Oracle([row + text for row, text in zip(rows, expected)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        speculator = Speculator(model, oracle, **{"draft_length": 5, **options})
        assert generate(speculator, rows[1:], max_new_tokens=11) == [expected[1][:11]]
    with pytest.warns(UserWarning, match="trained for 40 tokens") as record:
        out, _ = [speculator.generate(**padded(rows), max_new_tokens=14, pad_token_id=PAD) for _ in range(2)]
    assert len(record) == 1, "one warning"
    assert added(out, 37) == expected
    assert [row.finish_reason for row in out.stats.rows] == ["length"] * 2
    assert out.stats.accepted > 0


@pytest.mark.parametrize("name", GOES_ON)
def test_a_rope_model_goes_on_beyond_its_positions(name):
    as_transformers_beyond_its_positions(name)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", [name for name, each in ARCHITECTURES.items() if each.support != "refused" and name not in (*HARD, LONGROPE)]
)
def test_every_rope_model_goes_on(name):
    if getattr(tiny(name, ARCHITECTURES[name].implementations[0]).config.get_text_config(), "rope_parameters", None) is None:
        pytest.skip("no rotary positions")
    as_transformers_beyond_its_positions(name)


@pytest.mark.parametrize("options", [{"shape": "auto"}, {"shape": "product(2,2,1)"}, {"execution": "eager"}], ids=["auto", "tree", "eager"])
@pytest.mark.filterwarnings("ignore:.*trained for 40 tokens")
def test_trees_and_planned_shapes_go_on_too(options):
    rows, model = repetitive((37, 29, 45)), trained_for(40)
    expected = [alone(model, row, max_new_tokens=14) for row in rows]
    for drafter in ("prompt-lookup", make_drafter("draft-model")):
        shape = {**options, "shape": "chain(3)"} if drafter == "prompt-lookup" and "product" in options.get("shape", "") else options
        assert generate(Speculator(model, drafter, **shape), rows, max_new_tokens=14) == expected
    theirs = model.generate(
        **padded(rows[2:]), max_new_tokens=14, pad_token_id=PAD, custom_generate=foredraft.custom_generate("prompt-lookup")
    )
    assert theirs[:, 45:].tolist() == expected[2:]


@pytest.mark.parametrize("name", ["gpt2", "opt", "gptj"])
def test_a_table_of_positions_ends_the_row(name):
    model, (row,) = tiny(name, ARCHITECTURES[name].implementations[0]), prompts((509,))
    out = Speculator(model, "prompt-lookup", draft_length=3).generate(**padded([row]), max_new_tokens=9, pad_token_id=PAD)
    assert added(out, 509) == [alone(model, row, max_new_tokens=3)] and out.stats.rows[0].finish_reason == "context"


def test_a_dynamic_ntk_model_ends_where_its_frequencies_would_change():
    """Beyond, every pass would turn the keys in another way than those that are cached."""
    config = clone(tiny()).config
    config.max_position_embeddings = 40
    config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = type(tiny())(config).eval()
    model.load_state_dict(tiny().state_dict())
    with pytest.warns(UserWarning, match="dynamic.*beyond 40 tokens"):
        speculator = Speculator(model, make_drafter("draft-model"), shape="product(2,2,1)")
    rows = repetitive((37, 29))
    out = speculator.generate(**padded(rows), max_new_tokens=14, pad_token_id=PAD)
    assert added(out, 37) == [alone(model, row, max_new_tokens=40 - len(row)) for row in rows]
    assert [row.finish_reason for row in out.stats.rows] == ["context"] * 2
