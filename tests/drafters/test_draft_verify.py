"""draft-verify: the text is plain decoding's, what lies below the first sublayer that is left out is computed once, and the cache holds
what a fresh prefill would."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, build, build_wide
from cover import nightly_but
from helpers import PAD, generate, padded, prompts
from kernel_cases import build as build_with_kernels
from model_changes import add_adapter
from own_layers import LAYERS, NEW, ROWS, SAMPLED, SHAPES, check_cache, check_text, error, model, tokens_read

from foredraft import ConfigurationError, Speculator, UnsupportedModelError
from foredraft.drafters.draft_verify import DraftVerify
from foredraft.models.skips import SkipSet
from foredraft.quantization import quantize
from foredraft.target import Target
from foredraft.tree import TokenTree

pytestmark = pytest.mark.filterwarnings("ignore:.*longrope")

FAMILIES = [name for name, entry in ARCHITECTURES.items() if entry.support == "tree" and name != "gemma3n_text"]
SKIPS = [
    SkipSet((3,), (2, 4)),
    SkipSet((1, 2, 3), (2, 4)),  # layer 2 is left out as a whole
    SkipSet((), (0, 3)),  # nothing is kept
    SkipSet((2, 4), (2, 4)),
]
MIDDLE = SKIPS[1]
TREE = TokenTree.from_parents(torch.tensor(prompts((5, 5, 5))), (-1, 0, 0, 1, 1))


@pytest.mark.parametrize(("shape", "options"), [(SHAPES[0], {"do_sample": False}), (SHAPES[1], SAMPLED)], ids=["greedy", "sampled"])
def test_lower_layers_read_every_token_once_and_the_others_once_more(shape: str, options: dict):
    for seen in tokens_read(lambda: DraftVerify(skip=MIDDLE), shape, options):
        assert seen[0] == seen[2] < seen[1] == seen[3] == seen[4]


EVERY_SHAPE = list(itertools.product(("eager", "packed", "native"), SHAPES))


@pytest.mark.parametrize(("execution", "shape"), nightly_but([*EVERY_SHAPE[:2], EVERY_SHAPE[4], *EVERY_SHAPE[7:]], EVERY_SHAPE))
def test_text_is_plain_while_the_set_changes(execution: str, shape: str):
    drafter = DraftVerify(skip=MIDDLE)
    check_text(drafter, shape, execution, lambda rounds: setattr(drafter, "skip", SKIPS[rounds % len(SKIPS)]))


def test_what_the_planner_measures_is_not_counted():
    speculator = Speculator(model(), DraftVerify(skip=SkipSet((4,), (3, 4))), execution="eager")
    stats = generate_stats(speculator, ROWS[0])
    assert stats.layer_tokens[0] == len(ROWS[0]) + stats.row_passes + stats.drafted
    costs = speculator.planner.costs  # type: ignore[attr-defined]
    assert list(costs.level.points[1]) == [1]  # a level was timed before the first round


@pytest.mark.nightly
def test_compiled_layers_without_some_sublayers():
    plain = Speculator(model(), "none", rule="match", execution="eager")
    speculator = Speculator(model(), DraftVerify(skip=MIDDLE), rule="match", shape=SHAPES[1], execution="compiled")
    assert generate(speculator, ROWS, max_new_tokens=NEW, **SAMPLED) == generate(plain, ROWS, max_new_tokens=NEW, **SAMPLED)


def generate_stats(speculator: Speculator, row: list[int]) -> Any:
    return speculator.generate(**padded([row]), max_new_tokens=NEW, pad_token_id=PAD, **SAMPLED).stats


def hooked() -> Any:
    """Somebody watches its LM head, so that the kernels make no pass as a whole."""
    made = model()
    made.lm_head.register_forward_hook(lambda *given: None)
    return made


def adapted() -> Any:
    made = model()
    add_adapter(made)
    return made


def of_eight_bits() -> Any:
    pytest.importorskip("torchao")
    made = model()
    quantize(made)
    return made


SUBJECTS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "float32": (model, ("packed", "native")),
    "bfloat16": (lambda: model(num_key_value_heads=2).bfloat16(), ("packed", "native")),
    "windows": (lambda: build_with_kernels("mistral-window", torch.float32), ("packed", "native")),
    "norms before and behind": (lambda: build_with_kernels("gemma3", torch.float32), ("native",)),
    "attention beside the MLP": (lambda: build_with_kernels("cohere2", torch.float32), ("native",)),
    "hooked": (hooked, ("native",)),
    "eight bits": (of_eight_bits, ("native",)),
    "adapters": (adapted, ("packed",)),
}


CASES = [(name, how) for name, (_, executions) in SUBJECTS.items() for how in executions]


@pytest.mark.parametrize(("subject", "execution"), nightly_but([case for case in CASES if case[0] != "eight bits"], CASES))
def test_passes_without_sublayers_are_those_of_the_model(subject: str, execution: str):
    """Draft logits, the states that are kept and verified logits, over chains of ragged rows and a tree."""
    chain = TokenTree.from_chain(TREE.tokens)
    plain, fast = (Target(SUBJECTS[subject][0](), execution=how, test=False) for how in ("eager", execution))
    assert fast.execution == execution
    for target in (plain, fast):
        target.open(ROWS)
        target.prefill(ROWS, first=0)
    for skip, drafted in itertools.product((SkipSet((1, 2), (2,)), SkipSet((2,), (0, 1))), (chain, TREE)):
        with torch.inference_mode():
            drafts, states, verified = zip(
                *[
                    (target.score_early(drafted, skip), target._early.states[skip.first], target.score(drafted))  # type: ignore[union-attr]
                    for target in (plain, fast)
                ]
            )
        for a, b in (drafts, states, verified):
            torch.testing.assert_close(b, a, rtol=0, atol=(0.06 if a.dtype == torch.bfloat16 else 1e-4) * float(a.abs().max()))


FAST = [(name, "product(2,2)") for name in (*FAMILIES[:4], "gemma3_text", "gpt2", "bloom", "opt")]


@pytest.mark.parametrize(("family", "shape"), nightly_but(FAST, itertools.product(FAMILIES, SHAPES[:2])))
def test_every_family_keeps_its_text_and_its_cache(family: str, shape: str):
    subject, rows = build(family, ARCHITECTURES[family].implementations[0]), prompts((45, 41, 52))
    drafter = DraftVerify()
    speculator = Speculator(subject, drafter, rule="match", shape=shape, execution="eager")
    plain = Speculator(subject, "none", rule="match", execution="eager")
    sets = [drafter.skip, SkipSet((1,)), SkipSet((0,), drafter.skip.mlp)]
    for options, skip in zip(({"do_sample": False}, SAMPLED), sets):
        drafter.skip = skip
        assert generate(speculator, rows, max_new_tokens=6, **options) == generate(plain, rows, max_new_tokens=6, **options)
    check_cache(speculator, rows, [partial(setattr, drafter, "skip", skip) for skip in sets])


@pytest.mark.parametrize(
    ("rule", "siblings", "shape"),
    [
        ("match", "keyed", "chain(2)"),
        ("rejection", "iid", "chain(2)"),
        ("block", "iid", "chain(2)"),
        ("traversal", "without-replacement", "product(2,1)"),
        ("multi-candidate", "iid", "product(2,1)"),
        ("match", "top-k", "dynamic(2,2,3)"),
    ],
)
def test_the_law_is_the_targets(rule: str, siblings: str, shape: str):
    assert error(DraftVerify(skip=SkipSet((0,)), siblings=siblings), rule, shape) < 1e-9


def test_greedy_equals_transformers():
    subject, options = model(), {"skip": "attention=2 mlp=1,3", "threshold": 0.4}
    speculator = Speculator(subject, "draft-verify", drafter_options=options, shape="chain(4)", execution="eager")
    for row in ROWS[:2]:
        ids = torch.tensor([row])
        expected = subject.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=PAD)
        assert generate(speculator, [row], max_new_tokens=NEW, do_sample=False) == [expected[0, len(row) :].tolist()]


def test_a_file_says_what_is_left_out(tmp_path: Path):
    subject, path = model(), tmp_path / "skips.json"
    MIDDLE.save(path, subject)
    speculator = Speculator(subject, f"draft-verify:{path}", shape="chain(4)", execution="eager")
    assert speculator.drafter.skip == MIDDLE
    with pytest.raises(ConfigurationError, match=r"made for .* with layers 5; .* has 3"):
        Speculator(model(num_hidden_layers=3), f"draft-verify:{path}", execution="eager")
    with pytest.raises(ConfigurationError, match="leave skip out"):
        DraftVerify(path, skip=MIDDLE)


def test_its_own_set_is_that_of_the_model_it_is_bound_to():
    drafter = DraftVerify()
    with pytest.raises(ConfigurationError, match="before the drafter is bound"):
        drafter.skip  # noqa: B018
    for layers, mlp in ((9, (1, 3, 5, 7)), (3, (1,)), (2, (1,)), (1, (0,))):
        drafter.bind(Target(model(num_hidden_layers=layers), execution="eager"))
        assert drafter.skip == SkipSet((), mlp)


@pytest.mark.parametrize("name", ["attention", "mlp", "target", "trials"])
def test_a_file_that_lacks_something_is_refused_in_words(name: str, tmp_path: Path):
    path = tmp_path / "set.json"
    MIDDLE.save(path, model())
    held = json.loads(path.read_text())
    del held[name]
    path.write_text(json.dumps(held))
    with pytest.raises(ConfigurationError, match=f"it has no '{name}'"):
        SkipSet.load(path, model())
    path.write_text("[1, 2]")
    with pytest.raises(ConfigurationError, match="it holds no object"):
        SkipSet.load(path, model())


@pytest.mark.parametrize(
    ("skip", "message"),
    [
        ("attention=5", f"names layer 5, but .* has layers 0 to {LAYERS - 1}"),
        (f"attention={','.join(map(str, range(LAYERS)))} mlp={','.join(map(str, range(LAYERS)))}", "leaves out every sublayer"),
        (SkipSet(), "at least one sublayer"),
        ("attention", "is written as"),
        ("attention=1 attention=2", "is written as"),
        ("mlps=1", "is written as"),
        ("", "is written as"),
        (5, "is a SkipSet, or words such as"),
        ({"mlp": [1]}, "is a SkipSet, or words such as"),
    ],
)
def test_sets_that_cannot_be_are_refused(skip: Any, message: str):
    with pytest.raises(ConfigurationError, match=message):
        Speculator(model(), "draft-verify", drafter_options={"skip": skip}, execution="eager")
    drafter = DraftVerify(skip=MIDDLE)
    Speculator(model(), drafter, execution="eager")
    with pytest.raises(ConfigurationError, match=message):
        drafter.skip = skip if isinstance(skip, SkipSet) else SkipSet.parse(skip)


def test_models_that_cannot_be_run_in_part_are_refused_by_name():
    family = next(name for name, entry in ARCHITECTURES.items() if entry.support == "chain")
    for refused in (build("gemma3n_text"), build_wide(family)):
        with pytest.raises(UnsupportedModelError, match="cannot be run in part"):
            Speculator(refused, "draft-verify")


def test_a_model_that_has_lost_layers_is_refused_by_name():
    subject = model()
    speculator = Speculator(subject, DraftVerify(skip=MIDDLE), shape="chain(4)", execution="eager")
    generate(speculator, ROWS, max_new_tokens=4)
    subject.model.layers = subject.model.layers[:3]
    subject.config.num_hidden_layers = 3
    with pytest.raises(ConfigurationError, match=r"names layer 3, but .* has layers 0 to 2"):
        generate(speculator, ROWS, max_new_tokens=4)


def test_it_is_refused_among_several():
    with pytest.raises(ConfigurationError, match="use it alone"):
        Speculator(model(), "several:prompt-lookup,draft-verify", execution="eager")
