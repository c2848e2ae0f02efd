"""Prompt files of the speed suite."""

import json

import pytest

from benchmarks import datasets, prompts
from benchmarks.datasets import Prompt
from foredraft.errors import ConfigurationError


def written(tmp_path, *entries, name="file.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in entries) + "\n", encoding="utf-8")
    return str(path)


def test_embedded_prompts():
    assert [each.turns[0] for each in datasets.read("embedded")] == list(prompts.PYTHON)
    assert len(datasets.read("embedded", 2)) == 2


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"prompt": "a é"}, Prompt("file-1", "file", ("a é",))),
        ({"question_id": 81, "category": "writing", "turns": ["a", "b"]}, Prompt("81", "writing", ("a", "b"))),
        ({"task_id": "HumanEval/0", "prompt": "def f():", "test": "…"}, Prompt("HumanEval/0", "file", ("def f():",))),
        ({"question": "1 + 1?", "answer": "#### 2"}, Prompt("file-1", "file", ("1 + 1?",))),
    ],
)
def test_formats(tmp_path, entry, expected):
    assert datasets.read(written(tmp_path, entry)) == [expected]


def test_a_text_file_has_a_prompt_per_line(tmp_path):
    (tmp_path / "some.txt").write_text("def a():\n\nimport b\n")
    assert [(each.name, each.turns) for each in datasets.read(str(tmp_path / "some.txt"))] == [
        ("some-1", ("def a():",)),
        ("some-2", ("import b",)),
    ]


def test_the_limit_is_per_category(tmp_path):
    entries = [{"question_id": index, "category": "ab"[index % 2], "turns": ["t"]} for index in range(6)]
    assert [each.name for each in datasets.read(written(tmp_path, *entries), 2)] == ["0", "1", "2", "3"]


def test_blank_lines_are_no_prompts(tmp_path):
    assert [each.name for each in datasets.read(written(tmp_path, {"prompt": "a"}, "", {"prompt": "b"}))] == ["file-1", "file-2"]


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([{"prompt": "a"}, "{"], r"file\.jsonl, line 2: this is not JSON"),
        ([{"prompt": "a"}, {"text": "b"}], r'file\.jsonl, line 2: expected "prompt"'),
        ([{"prompt": ""}], r'file\.jsonl, line 1: expected "prompt"'),
        ([["a"]], r"file\.jsonl, line 1: expected an object, got list"),
        ([{"other": 1}], r'file\.jsonl, line 1: no known format; .*"turns"'),
        ([{"category": "c", "turns": "t"}], r'file\.jsonl, line 1: expected "turns"'),
        ([{"turns": ["t"]}], r'file\.jsonl, line 1: expected "category"'),
        ([{"question": 3}], r'file\.jsonl, line 1: expected "question"'),
        ([""], "contains no prompt"),
    ],
)
def test_malformed_files(tmp_path, entries, said):
    with pytest.raises(ConfigurationError, match=said):
        datasets.read(written(tmp_path, *entries))


def test_files_that_can_not_be_read(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot read"):
        datasets.read(str(tmp_path / "none.jsonl"))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(ConfigurationError, match="not UTF-8"):
        datasets.read(str(tmp_path / "latin.jsonl"))


def test_separators_of_lines_inside_a_text_are_text(tmp_path):
    path = tmp_path / "file.jsonl"
    path.write_bytes('{"prompt": "a\u2028b\u0085c"}\r\n{"prompt": "d"}\n'.encode())
    assert [each.turns for each in datasets.read(str(path))] == [("a\u2028b\u0085c",), ("d",)]
