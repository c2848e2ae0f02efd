"""attach: model.generate speculates, equals transformers' own in text and form, and detach leaves nothing behind."""

from __future__ import annotations

import copy
import io
import pickle
import threading

import pytest
import torch
from architectures import build_wide
from helpers import PAD, added, clone, padded, perturbed, repetitive, tiny
from kernel_cases import needs_kernels
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig, StoppingCriteria, TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

import foredraft
from foredraft import ConfigurationError, SpeculativeOutput, Speculator
from foredraft.attachment import Attached, Evaluation
from foredraft.backends import packing
from foredraft.models.changes import ModelState

NEW = 14
ROWS = repetitive((23, 9, 15))
GREEDY = {"max_new_tokens": NEW, "pad_token_id": PAD, "do_sample": False}


def attached(model, **options) -> Attached:
    return foredraft.attach(model, **{"drafter": "ngram", "shape": "chain(4)", **options})


def trained(model, amount=0.06) -> None:
    """Change the weights as an optimizer does."""
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), perturbed(amount=amount).parameters()):
            mine.copy_(theirs)


# -- what is returned -----------------------------------------------------------------------------------------------------

CALLS = {
    "tensor": {},
    "batch": {"rows": ROWS},
    "dictionary": {"return_dict_in_generate": True},
    "scores": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
    "config": {"generation_config": GenerationConfig(max_new_tokens=5, return_dict_in_generate=True, do_sample=False, pad_token_id=PAD)},
    "ends": {"eos_token_id": [5, 61, 74]},
    "processors": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    "one candidate": {"do_sample": True, "top_k": 1, "num_return_sequences": 2},
}


@pytest.mark.parametrize("name", CALLS)
def test_generate_of_an_attached_model_is_transformers_own(name):
    options = {**GREEDY, **CALLS[name]} if name != "config" else dict(CALLS[name])
    inputs, model = padded(options.pop("rows", ROWS[:1])), clone(tiny())
    expected = model.generate(**inputs, **copy.deepcopy(options))
    mine = attached(model)
    found = model.generate(**inputs, **options)
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor) and torch.equal(found, expected)
    else:
        assert isinstance(found, SpeculativeOutput) and isinstance(found, GenerateDecoderOnlyOutput)
        assert torch.equal(found.sequences, expected.sequences) and found.stats is mine.stats
        for field in ("scores", "logits"):
            ours, theirs = getattr(found, field), getattr(expected, field)
            assert (ours is None) == (theirs is None)
            assert ours is None or torch.allclose(torch.stack(ours), torch.stack(theirs), atol=1e-4)
    assert mine.stats.drafted, "it speculated"


def test_positional_arguments_and_defaults_of_the_model():
    model = clone(tiny())
    model.generation_config.update(max_new_tokens=6, repetition_penalty=1.3, pad_token_id=PAD, bos_token_id=1)
    ids, config = torch.tensor(ROWS[:1]), GenerationConfig(max_new_tokens=9, pad_token_id=PAD)
    expected = model.generate(ids), model.generate(ids, config), model.generate()
    attached(model)
    found = model.generate(ids), model.generate(ids, config), model.generate()
    assert all(map(torch.equal, found, expected))
    with pytest.raises(TypeError, match="multiple values"):
        model.generate(ids, inputs=ids)


def test_seeds_and_log_probabilities():
    model = clone(tiny())
    options = {**padded(ROWS), "max_new_tokens": NEW, "pad_token_id": PAD, "do_sample": True}
    expected = Speculator(model, "ngram", shape="chain(4)").generate(**options, seed=3)
    attached(model)
    assert torch.equal(model.generate(**options, seed=3), expected.sequences)
    torch.manual_seed(1)
    first = model.generate(**options)
    torch.manual_seed(1)
    assert torch.equal(model.generate(**options), first)
    whole = model.generate(**options, output_logprobs=2, return_dict_in_generate=True)
    assert len(whole.logprobs) == len(ROWS)
    with pytest.raises(ConfigurationError, match="return_dict_in_generate"):
        model.generate(**options, output_logprobs=2)


# -- refusals and streamers -------------------------------------------------------------------------------------------------


class Collector(BaseStreamer):
    def __init__(self):
        self.got = []

    def put(self, value):
        self.got.append(value.tolist())

    def end(self):
        self.got.append("end")


REFUSED = {
    "num_beams": {"num_beams": 2},
    "assistant_model": {"assistant_model": tiny()},
    "synced_gpus": {"synced_gpus": True},
    "custom_generate": {"custom_generate": lambda *_, **__: None},
    "adapter_names": {"adapter_names": ["default"]},
    "cache_implementation": {"cache_implementation": "paged"},
    "max_new_tokns": {"max_new_tokns": 4},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_honoured_is_refused_by_name_and_ends_the_stream(name):
    model, streamer = clone(tiny()), Collector()
    mine = attached(model)
    with pytest.raises(ValueError, match=name):
        model.generate(**padded(ROWS[:1]), **GREEDY, **REFUSED[name], streamer=streamer)
    assert streamer.got == ["end"] and mine.stats is None


def test_a_refusal_says_how_to_have_it_all_the_same():
    model = clone(tiny())
    attached(model)
    with pytest.raises(ConfigurationError, match=r"num_beams=2.*foredraft.detach\(model\) restores"):
        model.generate(**padded(ROWS[:1]), **GREEDY, num_beams=2)


def test_a_sharded_model_is_refused(monkeypatch):
    """Where transformers itself would set synced_gpus."""
    model = clone(tiny())
    attached(model)
    model._is_fsdp_managed_module = True
    model.generate(**padded(ROWS[:1]), **GREEDY)
    for name, value in {"is_initialized": True, "get_world_size": 2}.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    with pytest.raises(ConfigurationError, match="synced_gpus"):
        model.generate(**padded(ROWS[:1]), **GREEDY)
    model.generate(**padded(ROWS[:1]), **GREEDY, synced_gpus=False)


def test_a_streamer_gets_what_transformers_gives_it():
    model, theirs, ours = clone(tiny()), Collector(), Collector()
    model.generate(**padded(ROWS[:1]), **GREEDY, streamer=theirs)
    attached(model)
    model.generate(**padded(ROWS[:1]), **GREEDY, streamer=ours)
    assert ours.got == theirs.got


class Waiting(StoppingCriteria):
    """Stops the call in its middle until it is told to go on."""

    def __init__(self):
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self, input_ids, scores, **_):
        self.reached.set()
        assert self.go_on.wait(60)
        return False


def test_another_thread_is_told_that_the_model_is_in_use_or_waits():
    model, criterion, results = clone(tiny()), Waiting(), {}
    expected = model.generate(**padded(ROWS[:1]), **GREEDY)
    for wait in (False, True):
        attached(model, wait=wait)

        def call(name, **options):
            try:
                results[name] = model.generate(**padded(ROWS[:1]), **GREEDY, **options)
            except foredraft.BusyError as error:
                results[name] = error

        criterion.reached.clear(), criterion.go_on.clear()
        first = threading.Thread(target=call, args=["first"], kwargs={"stopping_criteria": [criterion]})
        second = threading.Thread(target=call, args=["second"])
        first.start()
        assert criterion.reached.wait(60)
        second.start()
        if not wait:
            second.join(60)
            assert isinstance(results["second"], foredraft.BusyError)
            with pytest.raises(foredraft.BusyError):
                foredraft.detach(model)
            assert isinstance(model.generate, Attached)
        criterion.go_on.set()
        first.join(60), second.join(60)
        assert torch.equal(results["first"], expected) and (not wait or torch.equal(results["second"], expected))


class Failing(StoppingCriteria):
    def __call__(self, input_ids, scores, **_):
        raise RuntimeError("a criterion failed")


def test_whoever_iterates_over_a_streamer_is_not_left_waiting_when_the_call_fails(monkeypatch):
    tokenizer = foredraft.zoo.load_tokenizer("python-8m")
    model = clone(tiny())
    attached(model)
    raised = []
    monkeypatch.setattr(threading, "excepthook", lambda failed: raised.append(str(failed.exc_value)))
    for wrong in ({"num_beams": 2}, {"stopping_criteria": [Failing()]}, {}):
        if not wrong:
            model.model.extra = torch.nn.Dropout(0.5)
            model.train()
        streamer = TextIteratorStreamer(tokenizer, timeout=20)
        thread = threading.Thread(target=model.generate, kwargs={**padded(ROWS[:1]), **GREEDY, **wrong, "streamer": streamer})
        thread.start()
        list(streamer)  # it ends, or raises Empty after its 20 seconds
        thread.join()
    assert "num_beams=2" in raised[0] and raised[1] == "a criterion failed" and "has dropout (p=0.5)" in raised[2]


# -- attach and detach ------------------------------------------------------------------------------------------------------


def test_detach_leaves_the_object_as_it_was():
    model = clone(tiny())
    before, state = dict(vars(model)), {name: value.clone() for name, value in model.state_dict().items()}
    for execution in ("auto", "eager"):
        attached(model, execution=execution)
        model.generate(**padded(ROWS), **GREEDY)
        foredraft.detach(model)
        assert vars(model) == before and "generate" not in vars(model)
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert not any("forward" in vars(module) or module._forward_hooks for module in model.modules())
    with pytest.raises(ConfigurationError, match="is not attached"):
        foredraft.detach(model)


def test_attaching_again_replaces_what_was_attached():
    model = clone(tiny())
    first = attached(model)
    second = attached(model, drafter="prompt-lookup")
    assert model.generate is second is not first
    model.generate(**padded(ROWS[:1]), **GREEDY)
    assert first.stats is None and second.stats.drafter == "prompt-lookup"
    with pytest.raises(ConfigurationError, match="unknown drafter"):
        attached(model, drafter="promt-lookup")
    assert "generate" not in vars(model), "refused: transformers' own"


def test_what_cannot_be_attached_is_refused_by_name():
    with pytest.raises(ConfigurationError, match="attach takes a model object"):
        foredraft.attach("zoo:python-1m")
    model = clone(tiny())
    model.generate = lambda *_, **__: None
    with pytest.raises(ConfigurationError, match="was replaced by"):
        attached(model)
    with pytest.raises(ConfigurationError, match="was replaced by"):
        foredraft.detach(model)


def test_the_method_of_a_speculator_can_stand_in_its_place():
    model = clone(tiny())
    expected = model.generate(**padded(ROWS), **GREEDY)
    model.generate = Speculator(model, "ngram", shape="chain(4)").generate
    assert torch.equal(model.generate(**padded(ROWS), **GREEDY).sequences, expected)


def test_copies_pickles_and_saved_files_are_not_attached(tmp_path):
    model = clone(tiny())
    mine = attached(model)
    names = list(model.state_dict())
    expected = added(model.generate(**padded(ROWS[:1]), **GREEDY), 23)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    model.save_pretrained(tmp_path)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    twins.append(type(model).from_pretrained(tmp_path))
    mine.stats = None
    for twin in twins:
        assert list(twin.state_dict()) == names == list(model.state_dict())
        assert not isinstance(twin.generate, Attached)
        assert added(twin.generate(**padded(ROWS[:1]), **GREEDY), 23) == expected
        trained(twin)
        assert added(twin.generate(**padded(ROWS[:1]), **GREEDY), 23) == added(perturbed().generate(**padded(ROWS[:1]), **GREEDY), 23)
        assert mine.stats is None, "the copy does not run the original"
        theirs = attached(twin)
        twin.generate(**padded(ROWS[:1]), **GREEDY)
        assert theirs.stats is not None
        foredraft.detach(twin)
    assert added(model.generate(**padded(ROWS[:1]), **GREEDY), 23) == expected and mine.stats is not None


@pytest.mark.parametrize("execution", ["packed", pytest.param("native", marks=needs_kernels)])
def test_copies_of_a_model_whose_layers_are_replaced(execution, monkeypatch):
    """They have their own layers and weights, and their own changes."""
    if execution == "native":  # whatever is faster for layers as small as these
        monkeypatch.setattr(packing, "preferred_hint", lambda groups, hints: hints[-1])
    model, reference = build_wide("llama wide"), build_wide("llama wide")
    options = {**padded(ROWS[:1]), **GREEDY}
    expected = model.generate(**options)
    mine = attached(model, execution=execution)
    assert mine.speculator.target.execution == execution
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    assert all(torch.equal(each.generate(**options), expected) for each in (model, *twins))
    for each in (reference, *twins):
        with torch.no_grad():
            each.model.layers[0].mlp.down_proj.weight.neg_()
    changed = reference.generate(**options)
    assert all(torch.equal(each.generate(**options), changed) for each in twins) and not torch.equal(changed, expected)
    assert torch.equal(model.generate(**options), expected)
    foredraft.detach(model)
    assert not any(name in vars(module) for module in model.modules() for name in ("forward", "generate"))


def test_a_compiled_model():
    model = clone(tiny())
    expected = model.generate(**padded(ROWS), **GREEDY)
    compiled = torch.compile(model, backend="eager")
    mine = attached(compiled)
    assert torch.equal(compiled.generate(**padded(ROWS), **GREEDY), expected) and mine.stats is not None
    assert model.generate is mine
    foredraft.detach(compiled)
    assert "generate" not in vars(model)
    assert torch.equal(Speculator(compiled, "ngram", shape="chain(4)").generate(**padded(ROWS), **GREEDY).sequences, expected)


# -- trainers ---------------------------------------------------------------------------------------------------------------


def test_weights_that_an_optimizer_wrote_to_without_a_trace():
    """As those do that have a kernel of their own."""
    texts = []
    for attach in (False, True):
        model = clone(tiny()).train(attach)
        if attach:
            attached(model)
        for amount in (0.0, 0.3):
            for mine, theirs in zip(model.parameters(), perturbed(amount=amount).parameters()):
                mine.data.copy_(theirs)
            texts.append(model.generate(**padded(ROWS), **GREEDY).tolist())
    assert texts[:2] == texts[2:] and texts[0] != texts[1]


def test_the_mode_is_put_back_when_the_last_thread_is_done():
    """One waits for the other, inside a call of its own."""
    model = clone(tiny()).train()
    one, two = [Evaluation(model)] * 2
    for each in (one, two):
        each.__enter__()
    one.__exit__()
    assert not any(module.training for module in model.modules())
    two.__exit__()
    assert all(module.training for module in model.modules())


def test_whoever_enters_after_training_finds_the_weights_changed():
    """A second thread may begin at once, and finds the model in evaluation mode already."""
    model = clone(tiny()).train()
    state = ModelState.of(model)
    with Evaluation(model):
        assert state.look({}) >= {"weights"}
        seen = dict(state.counts)
        with Evaluation(model):
            assert not state.look(seen)


def test_training_between_calls_is_seen_and_goes_on():
    """As with a plain model that is put into evaluation mode for each call. (In training mode, gradient checkpointing makes
    transformers' own drop its cache.)"""

    def run(attach: bool):
        model = clone(tiny()).requires_grad_().train()
        model.gradient_checkpointing_enable()
        if attach:
            attached(model)
        optimizer, texts = torch.optim.AdamW(model.parameters(), lr=3e-3), []
        for _ in range(4):
            texts.append(model.train(attach).generate(**padded(ROWS), **GREEDY))
            assert all(module.training == attach for module in model.modules())
            model.train()
            model(input_ids=texts[-1], labels=texts[-1]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [text.tolist() for text in texts]

    plain = run(False)
    assert run(True) == plain and len({str(text) for text in plain}) == 4


def test_mixed_modes_are_put_back_and_dropout_is_refused():
    model = clone(tiny()).train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    attached(model)
    with pytest.raises(ConfigurationError, match="num_beams"):
        model.generate(**padded(ROWS), **GREEDY, num_beams=2)
    model.generate(**padded(ROWS), **GREEDY)
    assert [module.training for module in model.modules()] == modes
    model.model.layers[1].self_attn.attention_dropout = 0.1
    with pytest.raises(ConfigurationError, match=r"attention_dropout=0.1"):
        model.generate(**padded(ROWS), **GREEDY)
    assert [module.training for module in model.modules()] == modes
    model.eval()
    model.generate(**padded(ROWS), **GREEDY)


@pytest.mark.parametrize("where", ["wrapper", "inside", "before"])
def test_a_peft_model(where):
    torch.manual_seed(0)
    base = clone(tiny())
    if where == "before":
        mine = attached(base)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"))
    twin = copy.deepcopy(model)
    if where != "before":
        mine = attached(model if where == "wrapper" else model.get_base_model())

    def same(expected_passes=True):
        mine.stats = None
        found, expected = (each.generate(**padded(ROWS), **GREEDY) for each in (model, twin))
        assert torch.equal(found, expected) and mine.stats is not None
        return found.tolist()

    texts = [same()]
    with model.disable_adapter(), twin.disable_adapter():
        texts.append(same())
    for each in (model, twin):
        each.generation_config = GenerationConfig(repetition_penalty=1.8)
    texts.append(same())
    assert texts[0] != texts[1] and texts[2] != texts[0]
    assert list(model.state_dict()) == list(twin.state_dict())


def test_activated_lora_is_refused_by_name():
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[5, 6])
    model = get_peft_model(clone(tiny()), config)
    with pytest.raises(foredraft.UnsupportedModelError, match="activated LoRA"):
        attached(model)


def test_a_criterion_that_counts_the_rows_of_its_batch():
    """lm-eval's counts which rows of the batch have ended, and is called for each row alone."""

    class Counts(StoppingCriteria):
        def __init__(self, rows):
            self.done_tracker = [False] * rows

        def __call__(self, input_ids, scores, **_):
            for row in range(len(self.done_tracker)):
                self.done_tracker[row] |= bool(input_ids[row, -1] in (5, 61, 74))
            return all(self.done_tracker)

    model = clone(tiny())
    attached(model)
    found = model.generate(**padded(ROWS), **GREEDY, stopping_criteria=[Counts(3)])
    expected = tiny().generate(**padded(ROWS), **GREEDY, eos_token_id=[5, 61, 74])
    assert torch.equal(found, expected)
