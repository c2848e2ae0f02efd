"""Programs that call ``model.generate``, unchanged, with an attached model: they get what they get from the model alone.

A library that is not installed skips its test by name; ``make compat`` installs them all, and there the test fails.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from libraries import library
from transformers import AutoModelForCausalLM, TextIteratorStreamer, TextStreamer, pipeline

import foredraft
from foredraft.backends.packing import onednn_lays_out

STACK = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        self.items"
PROMPTS = ["import os\n\ndef main(", STACK]
TEMPLATE = "{% for message in messages %}# {{ message['content'] }}\n{% endfor %}"
TWICE = ", ".join(["ctx"] * 9)  # what the model goes on with after the first prompt
GREEDY = {"max_new_tokens": 24, "do_sample": False}


@pytest.fixture
def tokenizer() -> Any:
    loaded = foredraft.zoo.load_tokenizer("python-1m")
    loaded.padding_side, loaded.chat_template = "left", TEMPLATE
    return loaded


def load() -> Any:
    return AutoModelForCausalLM.from_pretrained(foredraft.zoo.path("python-1m"), dtype=torch.float32).eval()


def attach(model: Any) -> Any:
    return foredraft.attach(model, drafter="ngram", shape="chain(4)")


def check(program: Callable[[Any], Any]) -> Any:
    """Run ``program`` on the model alone and on an attached one; both must return the same. Returns it."""
    expected, model = program(load()), load()
    attached = attach(model)
    assert program(model) == expected
    assert attached.stats.drafted > 0, "it went through attach"
    return expected


def inputs(tokenizer: Any, text: str = PROMPTS[0]) -> dict[str, Any]:
    return {**tokenizer(text, return_tensors="pt", return_token_type_ids=False), "pad_token_id": tokenizer.pad_token_id}


# -- transformers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2])
def test_pipeline(tokenizer, batch):
    texts = check(lambda model: pipeline("text-generation", model=model, tokenizer=tokenizer, batch_size=batch)(PROMPTS, **GREEDY))
    assert [text[0]["generated_text"].startswith(prompt) for text, prompt in zip(texts, PROMPTS)] == [True, True]


def test_pipeline_of_chat_messages(tokenizer):
    messages = [{"role": "user", "content": "write main"}]
    options = {**GREEDY, "return_full_text": False}
    assert check(lambda model: pipeline("text-generation", model=model, tokenizer=tokenizer)(messages, **options))


def test_pipeline_with_stop_strings(tokenizer):
    options = {**GREEDY, "stop_strings": ["def", TWICE], "tokenizer": tokenizer, "return_full_text": False}
    text = check(lambda model: pipeline("text-generation", model=model, tokenizer=tokenizer)(PROMPTS[0], **options))
    assert text[0]["generated_text"].endswith(TWICE)


def test_text_streamer(tokenizer, capsys):
    def program(model):
        model.generate(**inputs(tokenizer), **GREEDY, streamer=TextStreamer(tokenizer, skip_prompt=True))
        return capsys.readouterr().out

    assert check(program)


def test_text_iterator_streamer(tokenizer):
    def program(model):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
        thread = threading.Thread(target=model.generate, kwargs={**inputs(tokenizer), **GREEDY, "streamer": streamer})
        thread.start()
        pieces = list(streamer)
        thread.join()
        return pieces

    assert len(check(program)) > 1


def test_stop_strings(tokenizer):
    options = {**inputs(tokenizer), **GREEDY, "stop_strings": [TWICE, "return"], "tokenizer": tokenizer}
    assert tokenizer.decode(check(lambda model: model.generate(**options).tolist())[0]).endswith(TWICE)


# -- accelerate and PEFT ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(tokenizer, precision):
    accelerate = library("accelerate")
    if precision == "bf16" and not onednn_lays_out(torch.bfloat16):
        pytest.skip("on this CPU the rounding of a bfloat16 product depends on the number of its rows, and the self-test refuses that")

    def program(model):
        accelerator = accelerate.Accelerator(mixed_precision=precision, cpu=True)
        prepared = accelerator.prepare_model(model)
        return accelerator.unwrap_model(prepared).generate(**inputs(tokenizer), **GREEDY).tolist()

    assert check(program)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_accelerate_with_weights_that_are_loaded_when_needed(tokenizer):
    accelerate = library("accelerate")

    def program(model):
        return accelerate.cpu_offload(model, "cpu").generate(**inputs(tokenizer), **GREEDY).tolist()

    assert check(program)


def test_peft(tokenizer):
    peft = library("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")

    def adapted():
        torch.manual_seed(0)
        return peft.get_peft_model(load(), config).eval()

    def program(model):
        texts = [pipeline("text-generation", model=model, tokenizer=tokenizer)(PROMPTS[0], **GREEDY)]
        with model.disable_adapter():
            texts.append(model.generate(**inputs(tokenizer), **GREEDY).tolist())
        return [*texts, model.merge_and_unload().generate(**inputs(tokenizer), **GREEDY).tolist()]

    expected, model = program(adapted()), adapted()
    attached = attach(model)
    assert program(model) == expected and attached.stats.drafted > 0


# -- LangChain, LlamaIndex, smolagents ----------------------------------------------------------------------------------------


def test_langchain(tokenizer):
    huggingface = library("langchain_huggingface")

    def program(model):
        generator = pipeline("text-generation", model=model, tokenizer=tokenizer, return_full_text=False, **GREEDY)
        chain = huggingface.HuggingFacePipeline(pipeline=generator, batch_size=2)
        stopped = chain.invoke(PROMPTS[1], stop=["return"])
        return chain.invoke(PROMPTS[0]), stopped, chain.batch(PROMPTS), list(chain.stream(PROMPTS[0]))

    assert check(program)


def test_llama_index(tokenizer):
    huggingface = library("llama_index.llms.huggingface")

    def program(model):
        llm = huggingface.HuggingFaceLLM(
            model=model, tokenizer=tokenizer, context_window=512, max_new_tokens=24, generate_kwargs={"do_sample": False}
        )
        return llm.complete(PROMPTS[0]).text, "".join(each.delta for each in llm.stream_complete(PROMPTS[1]))

    assert check(program)


def test_smolagents(tokenizer, tmp_path):
    smolagents = library("smolagents")
    load().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    def program(attached):
        agent = smolagents.TransformersModel(str(tmp_path), device_map="cpu", max_new_tokens=24, do_sample=False)
        mine = attach(agent.model) if attached else None
        messages = [{"role": "user", "content": [{"type": "text", "text": "write main"}]}]
        texts = [agent.generate(messages).content, agent.generate(messages, stop_sequences=["(", "return"]).content]
        texts.append("".join(delta.content or "" for delta in agent.generate_stream(messages)))
        assert mine is None or mine.stats.drafted > 0
        return texts

    assert program(True) == program(False)


def test_outlines(tokenizer):
    """Its masks follow the order of calls, which drafts change: they are refused, and Foredraft's own take their place."""
    outlines = library("outlines")
    assert check(lambda model: outlines.from_transformers(model, tokenizer)(PROMPTS[0], **GREEDY))
    model = load()
    attach(model)
    with pytest.raises(foredraft.ConfigurationError, match="outlines is not supported"):
        outlines.from_transformers(model, tokenizer)(PROMPTS[0], outlines.types.Regex("[a-z]{3,9}"), **GREEDY)


# -- evaluation and training --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2])
def test_lm_eval(tokenizer, batch):
    huggingface = library("lm_eval.models.huggingface")
    from lm_eval.api.instance import Instance

    options = {"until": ["\n\n", "):"], "max_gen_toks": 24}
    questions = [Instance("generate_until", {}, (prompt, options), 0) for prompt in PROMPTS]
    likely = [Instance("loglikelihood", {}, (PROMPTS[0], "self):"), 0)]

    def program(model):
        model = huggingface.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch, device="cpu")
        return model.generate_until(questions, disable_tqdm=True), model.loglikelihood(likely, disable_tqdm=True)

    assert check(program)


def grpo(model: Any, tokenizer: Any, folder: Any, *, adapter: bool, **options: Any) -> list[Any]:
    """What GRPO generates in three steps; longer words are better."""
    import trl
    from datasets import Dataset

    torch.manual_seed(0)
    texts: list[Any] = []

    def reward(completions, **_):
        texts.append(completions)
        return [float(len(max(completion.split(), key=len, default=""))) for completion in completions]

    settings = trl.GRPOConfig(
        output_dir=str(folder), per_device_train_batch_size=4, num_generations=2, max_completion_length=16, max_steps=3, use_cpu=True,
        bf16=False, learning_rate=1e-2, report_to=[], save_strategy="no", disable_tqdm=True, **options,
    )  # fmt: skip
    data = Dataset.from_dict({"prompt": PROMPTS * 4})
    peft_config = None
    if adapter:
        from peft import LoraConfig

        peft_config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    trl.GRPOTrainer(model, reward, args=settings, train_dataset=data, processing_class=tokenizer, peft_config=peft_config).train()
    return texts


@pytest.mark.parametrize("adapter", [False, True])
def test_trl(tokenizer, tmp_path, adapter):
    """GRPO generates in training mode. The most likely texts are those of the model alone; and where it samples, each step changes the
    weights, which the next call uses."""
    library("trl")
    assert len(check(lambda model: grpo(model, tokenizer, tmp_path, adapter=adapter, top_k=1))) == 3
    model, scored = load(), {**GREEDY, "output_scores": True, "return_dict_in_generate": True}
    before = model.generate(**inputs(tokenizer), **scored)
    attached = attach(model)
    grpo(model, tokenizer, tmp_path, adapter=adapter)
    assert attached.stats.new_tokens == 64 and model.training
    after = model.generate(**inputs(tokenizer), **scored)
    foredraft.detach(model)
    assert torch.equal(model.eval().generate(**inputs(tokenizer), **GREEDY), after.sequences)
    assert not torch.equal(before.scores[0], after.scores[0])
