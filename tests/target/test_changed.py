"""A model that changes between two calls: the text is that of the model as it is now, or the change is refused by name."""

from __future__ import annotations

import pytest
import torch
from helpers import alone, generate, repetitive
from kernel_cases import build, needs_kernels
from model_changes import CHANGES, add_adapter, tuners
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from foredraft import ConfigurationError, RowParameters, Speculator, UnsupportedModelError
from foredraft.backends import choice
from foredraft.backends import kernels as kernels_module
from foredraft.backends import packing as packing_module
from foredraft.backends import products as products_module
from foredraft.backends.described_pass import DescribedModel
from foredraft.drafters.draft_model import DraftModel
from foredraft.models.changes import ModelState
from foredraft.target import Target

ROWS = [[token % 97 + 3 for token in row] for row in repetitive((23, 9, 15))]
NEW = 6
NIGHTLY = pytest.mark.nightly
PACKED = [pytest.param("packed", marks=NIGHTLY), pytest.param("native", marks=needs_kernels)]
EXECUTIONS = [pytest.param("eager", marks=NIGHTLY), *PACKED]


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Tiny layers are not worth packing; here every one is packed that can be."""

    def chosen(groups, hints):
        return hints[-1] if groups[0][0].in_features % packing_module.UNIT == 0 else None

    monkeypatch.setattr(packing_module, "preferred_hint", chosen)


def pair(execution="eager", drafter="prompt-lookup", **options):
    """A Speculator over a model, and another copy of the model, that nobody packs."""
    model = build("llama", torch.float32)
    return Speculator(model, drafter, execution=execution, shape="chain(3)", **options), build("llama", torch.float32)


@pytest.fixture
def named(tmp_path):
    """The same, of a model that was loaded by name."""

    def make(execution, **options):
        build("llama", torch.float32).save_pretrained(tmp_path)
        return Speculator(str(tmp_path), execution=execution, shape="chain(3)", **options), build("llama", torch.float32)

    return make


def texts(model, rows=ROWS):
    return [alone(model, row, max_new_tokens=NEW) for row in rows]


def follows(speculator, plain, rows=ROWS):
    """The Speculator's text for a batch, and for one row twice over, is transformers' own with ``plain``; returned."""
    expected = texts(plain, rows)
    for some in (1, len(rows), 1):
        assert generate(speculator, rows[:some], max_new_tokens=NEW) == expected[:some]
    return expected


SOME = ("a hook on a layer", "a hook inside a layer", "a buffer in place", "a weight replaced", "the configuration")
MANY = [change if change in SOME else pytest.param(change, marks=NIGHTLY) for change in CHANGES]


@pytest.mark.parametrize("change", MANY)
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_the_next_call_has_the_model_as_it_is(execution, change):
    speculator, plain = pair(execution)
    before = follows(speculator, plain)
    undo = [CHANGES[change](model) for model in (speculator.model, plain)]
    assert follows(speculator, plain) != before
    for each in undo:
        each()
    assert follows(speculator, plain) == before


@pytest.mark.parametrize("change", ["a hook inside a layer", "a buffer in place", "a norm replaced", "an embedding in place"])
@NIGHTLY
@pytest.mark.parametrize("execution", PACKED)
def test_likewise_where_the_model_was_loaded_by_name(named, execution, change):
    speculator, plain = named(execution)
    before = follows(speculator, plain)
    for model in (speculator.model, plain):
        CHANGES[change](model)
    assert follows(speculator, plain) != before


def test_a_hook_on_every_module():
    speculator, plain = pair("packed")
    before = follows(speculator, plain)
    handle = register_module_forward_hook(lambda module, given, output: -output if "SiLU" in type(module).__name__ else None)
    try:
        assert follows(speculator, plain) != before
    finally:
        handle.remove()
    assert follows(speculator, plain) == before


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_another_attention(execution):
    """An eager model adds its mask to the scores, which a mask of bools of the other kind would spoil."""
    speculator, plain = pair(execution)
    follows(speculator, plain)
    for implementation in ("eager", "sdpa"):
        speculator.model.set_attn_implementation(implementation)
        follows(speculator, plain)
        assert speculator.target.execution == execution
    speculator.model.config._attn_implementation = "flex_attention"
    with pytest.raises(UnsupportedModelError, match="takes no tree mask"):
        generate(speculator, ROWS, max_new_tokens=NEW)
    speculator.model.set_attn_implementation("sdpa")
    follows(speculator, plain)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_another_vocabulary_is_refused_by_name(execution):
    speculator, plain = pair(execution)
    follows(speculator, plain)
    speculator.model.resize_token_embeddings(103)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"vocabulary.*100.*103.*resize_token_embeddings.*new Speculator"):
            generate(speculator, ROWS, max_new_tokens=NEW)
    speculator.close()
    plain.resize_token_embeddings(103)
    for mine, other in zip(speculator.model.parameters(), plain.parameters()):
        mine.data.copy_(other)  # the new rows are random
    follows(Speculator(speculator.model, execution=execution, shape="chain(3)"), plain)


def test_dropout_in_a_part_of_the_model_is_refused_by_name():
    speculator, plain = pair()
    follows(speculator, plain)
    speculator.model.model.layers[1].self_attn.attention_dropout = 0.1
    speculator.model.model.layers[1].train()
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.1\.self_attn is in training mode.*model\.eval\(\)"):
        generate(speculator, ROWS, max_new_tokens=NEW)
    speculator.model.eval()
    follows(speculator, plain)


def test_a_layer_that_would_use_no_cache_is_refused_by_name():
    speculator, plain = pair()
    layer = speculator.model.model.layers[1]
    layer.gradient_checkpointing = True
    follows(speculator, plain)
    layer.train()
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.1 is in training mode.*checkpointing.*model\.eval\(\)"):
        generate(speculator, ROWS, max_new_tokens=NEW)
    speculator.model.eval()
    follows(speculator, plain)


def test_a_text_is_read_again_where_autocast_has_changed():
    speculator, _ = pair()
    target, ids = speculator.target, list(range(3, 40))

    @torch.inference_mode()
    def read():
        before = target.layer_tokens[0]
        target.open([ids])
        logits = target.prefill([ids], first=0).float()
        target.reset()
        return logits, target.layer_tokens[0] - before

    plain, tokens = read()
    assert tokens == len(ids) and read()[1] < tokens
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, tokens = read()
        assert tokens == len(ids) and not torch.equal(cast, plain)
        assert read()[1] < tokens
    again, tokens = read()
    assert tokens == len(ids) and torch.equal(again, plain)


@pytest.mark.parametrize("execution", PACKED)
def test_a_packed_model_in_another_dtype(named, execution):
    speculator, plain = pair(execution)
    follows(speculator, plain)
    for model in (speculator.model, plain):
        model.to(torch.bfloat16)
    assert texts(speculator.model) == texts(plain)
    speculator, plain = named(execution)
    follows(speculator, plain)
    speculator.model.to(torch.bfloat16)
    with pytest.raises(ConfigurationError, match=r"loaded by name.*packed.*release\(\)"):
        generate(speculator, ROWS, max_new_tokens=NEW)
    speculator.model.to(torch.float32)
    generate(speculator, ROWS, max_new_tokens=NEW)


# -- adapters -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_an_adapter_that_is_added_scaled_disabled_and_exchanged(execution):
    speculator, plain = pair(execution)
    found = [follows(speculator, plain)]
    for change in (
        add_adapter,
        lambda model: [each.set_scale("default", 3.0) for each in tuners(model)],
        lambda model: [each.scale_layer(0.5) for each in tuners(model)],
        lambda model: model.disable_adapters(),
        lambda model: model.enable_adapters(),
        lambda model: add_adapter(model, "other"),
        lambda model: model.set_adapter("default"),
        lambda model: [each.merge() for each in tuners(model)],
        lambda model: [each.unmerge() for each in tuners(model)],
    ):
        for model in (speculator.model, plain):
            change(model)
        found.append(follows(speculator, plain))
    assert found[0] == found[4] and len({str(each) for each in found}) >= 4


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_an_adapter_for_a_model_that_was_loaded_by_name(named, execution):
    """Its packed weights have replaced its own, so an adapter finds nothing to adapt before they are given back."""
    speculator, plain = named(execution)
    before = follows(speculator, plain)
    if execution != "eager":
        add_adapter(speculator.model)
        with pytest.raises(ConfigurationError, match=r"q_proj.*loaded by name.*packed.*release\(\)"):
            generate(speculator, ROWS, max_new_tokens=NEW)
        speculator.model.delete_adapter("default")
    speculator.release()
    for model in (speculator.model, plain):
        add_adapter(model)
    assert follows(speculator, plain) != before


@pytest.mark.parametrize("execution", PACKED)
def test_what_is_written_to_weights_that_are_gone_is_refused_by_name(named, execution):
    speculator, plain = named(execution)
    follows(speculator, plain)
    change = CHANGES["a weight in place"]
    change(speculator.model)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*loaded by name.*release\(\)"):
            generate(speculator, ROWS, max_new_tokens=NEW)
    speculator, plain = named(execution)
    before = follows(speculator, plain)
    speculator.release()
    for model in (speculator.model, plain):
        change(model)
    assert follows(speculator, plain) != before


# -- somebody else has packed the model ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change", ["a weight in place", *(pytest.param(each, marks=NIGHTLY) for each in CHANGES if each != "a weight in place")]
)
@pytest.mark.parametrize("execution", PACKED)
def test_others_who_run_a_packed_model_have_it_as_it_is(execution, change):
    speculator, plain = pair(execution)
    other = Speculator(speculator.model, "prompt-lookup", execution="eager", shape="chain(3)")
    for each in (other, speculator):
        follows(each, plain)
    for model in (speculator.model, plain):
        CHANGES[change](model)
    assert texts(speculator.model) == texts(plain)
    follows(other, plain)
    follows(speculator, plain)
    assert texts(speculator.model) == texts(plain)


@pytest.mark.parametrize("execution", PACKED)
def test_a_packed_model_can_be_trained(execution):
    speculator, plain = pair(execution)
    follows(speculator, plain)
    for model in (speculator.model, plain):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        ids = torch.tensor([ROWS[0]])
        model(input_ids=ids, labels=ids).loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
    follows(speculator, plain)


@pytest.mark.parametrize("who", ["itself", "another"])
@pytest.mark.parametrize("execution", PACKED)
def test_giving_weights_back_forgets_no_change_that_nobody_has_looked_for(execution, who):
    speculator, plain = pair(execution)
    other = speculator if who == "itself" else Speculator(speculator.model, "prompt-lookup", execution="eager", shape="chain(3)")
    for each in (speculator, other):
        follows(each, plain)
    speculator.model.set_attn_implementation("eager")
    speculator.release() if who == "itself" else speculator.close()
    follows(other, plain)


STOPS = {
    "a layout": (products_module, "blocked", MemoryError),
    "the decoder": (DescribedModel, "of", KeyboardInterrupt),
    "comparing": (kernels_module, "difference", KeyboardInterrupt),
    "the self-test": (choice, "self_test", UnsupportedModelError),
}


@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("stop", STOPS)
@needs_kernels
def test_a_model_that_could_not_be_packed_is_as_it_was(monkeypatch, stop, owned):
    """Memory ran out, Ctrl-C came, or the model is refused at last."""
    model, plain = build("llama", torch.float32), build("llama", torch.float32)
    module, name, error = STOPS[stop]
    calls, original = [], getattr(module, name)

    def failing(*args, **options):
        calls.append(args)
        if len(calls) == (9 if stop == "a layout" else 1):
            raise error("here")
        return original(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, staticmethod(failing) if isinstance(module, type) else failing)
        with pytest.raises(error, match="here"):
            Target(model, execution="native", owned=owned)
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))
    assert Target(model, execution="native", owned=owned).execution == "native"


# -- what cannot be seen -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_release_forgets_what_was_made_of_the_model(named, execution):
    for speculator, plain in (pair(execution), named(execution)):
        before = follows(speculator, plain)
        speculator.release()
        assert not any("forward" in vars(module) for module in speculator.model.modules())
        for model in (speculator.model, plain):
            model.model.layers[1].mlp.up_proj.weight.data.mul_(-1.0)
        assert follows(speculator, plain) != before
        assert speculator.target.execution == execution


# -- rows under way, and draft models ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "drafter", ["draft-model", *(pytest.param(each, marks=NIGHTLY) for each in ("none", "prompt-lookup", "token-recycling"))]
)
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_rows_under_way_go_on_with_the_model_as_it_is(execution, drafter):
    if drafter == "draft-model":
        drafter = DraftModel(build("llama", torch.float32), execution=execution)
    speculator, plain = pair(execution, drafter)
    session = speculator.session()
    for row in ROWS[:2]:
        session.add(row, RowParameters(max_new_tokens=30))
    rows = list(session.waiting)
    session.step()
    session.step()
    for model in (speculator.model, plain):
        CHANGES["a hook inside a layer"](model)
    begun = [list(row.ids) for row in rows]
    session.add(ROWS[0], RowParameters(max_new_tokens=NEW))  # which begins like a row that the model read before
    rows.append(session.waiting[0])
    while session.live:
        session.step()
    for row, ids in zip(rows, [*begun, ROWS[0]]):
        assert row.ids == ids + alone(plain, ids, max_new_tokens=len(row.ids) - len(ids))


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_draft_model_is_followed_as_well(execution):
    draft = build("llama", torch.float32)
    speculator, plain = pair(drafter=DraftModel(draft, execution=execution))
    follows(speculator, plain)

    def rounds():
        return speculator.generate(torch.tensor(ROWS[:1]), max_new_tokens=NEW).stats.target_passes

    assert rounds() == 3  # the prefill, and four tokens each
    undo = CHANGES["a hook inside a layer"](draft)
    assert rounds() > 3
    undo()
    assert rounds() == 3
    draft.resize_token_embeddings(103)
    with pytest.raises(ConfigurationError, match=r"vocabulary.*100.*103"):
        rounds()


# -- the look itself -----------------------------------------------------------------------------------------------------------


def test_a_model_that_stays_as_it_is_keeps_its_cache(monkeypatch):
    """And looking at it does not walk through its modules."""
    speculator, plain = pair("packed")
    follows(speculator, plain)
    walked, copied, begin = [], [], speculator.target.cache.open
    monkeypatch.setattr(nn.Module, "modules", lambda module: walked.append(module) or iter(()))
    monkeypatch.setattr(speculator.target.cache, "open", lambda lengths: copied.append(lengths) or begin(lengths))
    speculator.generate(torch.tensor(ROWS[:1]), max_new_tokens=NEW)
    assert copied == [[len(ROWS[0]) - 1]] and not walked


@pytest.mark.parametrize("change", ["a hook on a layer", "a norm in place"])
def test_a_change_is_seen_where_weights_are_offloaded(change):
    """They have other placeholders after each pass."""
    model = build("llama", torch.float32)
    mlp = model.model.layers[0].mlp

    def fetch():
        mlp.up_proj.weight = nn.Parameter(torch.empty_like(mlp.up_proj.weight, device="meta"))

    fetch()
    state = ModelState.of(model)
    for _ in range(2):
        fetch()
        assert state.look({}) == set()
    fetch()
    undo = CHANGES[change](model)
    assert state.look({}) == {"hooks" if "hook" in change else "weights"}
    seen = dict(state.counts)
    fetch()
    assert state.look(seen) == set()
    undo()


def test_tokens_led_through_layers_are_counted_on_while_layers_are_exchanged():
    speculator, _ = pair()
    session = speculator.session()
    session.add(ROWS[0], RowParameters(max_new_tokens=NEW))
    session.step()
    CHANGES["a module replaced"](speculator.model)
    while session.live:
        session.step()
    assert min(session.stats.layer_tokens) >= 2 * len(ROWS[0]), "the text was read twice"
