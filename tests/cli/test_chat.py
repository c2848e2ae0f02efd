"""``foredraft chat``: a conversation with history, streamed, and what slashes, Ctrl-C and the end of the input do."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from foredraft import zoo
from foredraft.cli import app, chat
from foredraft.detokenizer import UNFINISHED
from foredraft.target import Target

HOW = ["--drafter", "prompt-lookup", "--shape", "chain(3)", "--dtype", "float32", "--max-new-tokens", "12"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """An embedded model with a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = zoo.load_tokenizer("python-1m")
    tokenizer.chat_template = (
        "{% for message in messages %}{% if message.content == 'forbidden' %}{{ raise_exception('no') }}{% endif %}"
        "# {{ message.role }}: {{ message.content }}\n{% endfor %}"
    )
    tokenizer.save_pretrained(folder)
    zoo.load("python-1m").save_pretrained(folder)
    return str(folder)


def talk(model, *said, options=()):
    result = CliRunner().invoke(app, ["chat", model, *HOW, *options], input="\n".join(said) + "\n", prog_name="foredraft")
    assert result.exit_code == 0, result.output
    return result


def saved(model, tmp_path, *said, options=()):
    """The messages of the conversation afterwards."""
    talk(model, *said, f"/save {tmp_path / 'chat.json'}", options=options)
    return json.loads((tmp_path / "chat.json").read_text())["messages"]


def generated(model, prompt):
    how = [*HOW, "--target", model, "--json"]
    return json.loads(CliRunner().invoke(app, ["generate", prompt, *how]).stdout)["text"]


def test_each_answer_follows_the_whole_conversation(model, tmp_path):
    messages = saved(model, tmp_path, "def add(a, b):", "", "import os", options=["--system", "be brief"])
    assert [each["role"] for each in messages] == ["system", "user", "assistant", "user", "assistant"]
    text = ""
    for each in messages:
        if each["role"] == "assistant":
            assert each["content"] == generated(model, text)
        text += f"# {each['role']}: {each['content']}\n"


def test_the_cache_of_the_turn_before_is_used_again(model, monkeypatch):
    read = []
    prefill = Target.prefill

    def counted(self, prompts, *, first, **given):
        read.append((len(prompts[0]), self.lengths[first]))
        return prefill(self, prompts, first=first, **given)

    monkeypatch.setattr(Target, "prefill", counted)
    talk(model, "def add(a, b): return the sum of two numbers that are given, and nothing else at all", "import os")
    (length, _), (_, kept) = read[-2:]
    assert kept >= length - 1


def test_commands(model, tmp_path):
    said = ("/help", "/nope", "/drafted on", "def add(a, b):", "/drafted off", "x", "/quit", "never asked")
    result = talk(model, *said, options=["--drafter", "draft-model:zoo:python-1m"])
    assert "/reset" in result.stderr and "error: unknown command '/nope'" in result.stderr
    shown, bare = result.stdout.rsplit("⟧", 1)
    assert "⟦" in shown and "⟦" not in bare and "drafted and accepted" in result.stderr
    assert result.stderr.count("greedy") == 2 or result.stderr.count("plain decoding") == 2, "one line of figures per answer"
    messages = saved(model, tmp_path, "first", "/reset", "/system be kind", "second")
    assert [each["content"] for each in messages if each["role"] != "assistant"] == ["be kind", "second"]


def test_interrupting_an_answer_keeps_what_there_is(model, tmp_path, monkeypatch):
    seen = []

    def interrupt(text):
        seen.append(text)
        if len(seen) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(chat, "write", interrupt)
    messages = saved(model, tmp_path, "def add(a, b):", "go on")
    assert [each["role"] for each in messages] == ["user", "assistant"] * 2
    assert messages[1]["content"] and UNFINISHED not in messages[1]["content"]


def test_a_message_that_is_refused_is_forgotten(model, tmp_path):
    messages = saved(model, tmp_path, "forbidden", "def add(a, b):")
    assert [each["content"] for each in messages if each["role"] == "user"] == ["def add(a, b):"]


def test_messages_that_are_no_text(model):
    result = CliRunner().invoke(app, ["chat", model, *HOW], input=b"\xff\n", prog_name="foredraft")
    assert result.exit_code == 2 and "stdin is not UTF-8 text" in result.stderr


def test_a_model_without_a_template_is_refused():
    result = CliRunner().invoke(app, ["chat", "zoo:python-1m"], prog_name="foredraft")
    assert result.exit_code == 2 and "has no chat template; give a text" in result.stderr
