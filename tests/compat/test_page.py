"""Each snippet of docs/integrations.md runs as it stands; a section whose library is not installed is skipped by name."""

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from libraries import NEEDED
from transformers import AutoModelForCausalLM

import foredraft

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
SECTIONS = dict(re.findall(r"^##? (.*?)\n(.*?)(?=^## |\Z)", PAGE.read_text(encoding="utf-8"), re.S | re.M))
SNIPPETS = {
    f"{title} {number}": code
    for title, text in SECTIONS.items()
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", text, re.S))
}


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> str:
    """What stands for the model that the page names, which tests cannot download."""
    folder, tokenizer = tmp_path_factory.mktemp("model"), foredraft.zoo.load_tokenizer("python-1m")
    tokenizer.chat_template = "{% for message in messages %}# {{ message['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(foredraft.zoo.path("python-1m")).save_pretrained(folder)
    return str(folder)


def imported(code: str) -> set[str]:
    """The packages that the code imports."""
    nodes = list(ast.walk(ast.parse(code)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {name.partition(".")[0] for name in names | {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}}


@pytest.mark.parametrize("name", SNIPPETS)
def test_snippet_runs_as_it_stands(name, published, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    missing = sorted(package for package in imported(SNIPPETS[name]) if find_spec(package) is None)
    if missing:
        (pytest.fail if NEEDED else pytest.skip)(f"not installed: {', '.join(missing)}")
    exec(compile(SNIPPETS[name].replace("Qwen/Qwen3-0.6B", published), name, "exec"), {"__name__": "page"})


def test_the_page_has_a_snippet_for_every_library():
    packages = set().union(*map(imported, SNIPPETS.values()))
    assert packages >= {
        "transformers",
        "langchain_huggingface",
        "llama_index",
        "smolagents",
        "outlines",
        "lm_eval",
        "trl",
        "peft",
        "accelerate",
    }
