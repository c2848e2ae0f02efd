"""Libraries that speak to OpenAI's servers speak to this one: langchain-openai, litellm, and lm-eval's local-completions."""

from __future__ import annotations

from pathlib import Path

import pytest
from libraries import library
from served import served, tiny_chat

from foredraft import Speculator, zoo

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,  # or a model without sense may write others without end
        },
    },
}


@pytest.fixture(scope="module")
def url():
    with served(tiny_chat()) as address:
        yield address


def test_langchain(url: str):
    langchain = library("langchain_openai")
    chat = langchain.ChatOpenAI(base_url=url + "/v1", api_key="none", model="tiny", max_tokens=12, temperature=0, seed=1, max_retries=0)
    whole = chat.invoke("hello")
    assert whole.content == "".join(part.content for part in chat.stream("hello"))
    assert whole.usage_metadata["output_tokens"] == whole.response_metadata["token_usage"]["completion_tokens"]
    forced = langchain.ChatOpenAI(base_url=url + "/v1", api_key="none", model="tiny", max_tokens=200).bind_tools(
        [TOOL], tool_choice="weather"
    )
    (call,) = forced.invoke("hello").tool_calls
    assert call["name"] == "weather" and call["args"]["city"] in ("Paris", "Rome")


def test_litellm(url: str):
    litellm = library("litellm")
    arguments = {"model": "openai/tiny", "api_base": url + "/v1", "api_key": "none", "max_tokens": 12, "temperature": 0, "seed": 1}
    messages = [{"role": "user", "content": "hello"}]
    whole = litellm.completion(messages=messages, **arguments)
    parts = litellm.completion(messages=messages, stream=True, **arguments)
    assert whole.choices[0].message.content == "".join(part.choices[0].delta.content or "" for part in parts)


def test_lm_eval_as_its_own_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Log-likelihoods of the server are those of lm-eval's ``hf``, to 1e-4, in float32."""
    library("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    path = str(zoo.path("python-1m"))
    pairs = [("def f(x):\n    return", " x + 1\n"), ("import", " os\n"), ("for i in range(10", "):\n    print(i)\n")]
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    own = HFLM(pretrained=path, dtype="float32", device="cpu", batch_size=1).loglikelihood(requests)
    with served(Speculator("zoo:python-1m", "prompt-lookup", dtype="float32"), model="m") as url:
        client = LocalCompletionsAPI(
            base_url=url + "/v1/completions", model="m", tokenizer=path, tokenizer_backend="huggingface", num_concurrent=1, batch_size=2
        )
        served_ones = client.loglikelihood(requests)
    for (mine, greedy), (theirs, their_greedy) in zip(served_ones, own, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4) and greedy == their_greedy
