"""``foredraft memory``: what it says of an embedded model and of folders with a configuration, the forms it writes, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from typer.testing import CliRunner

from foredraft.cli import app

PAGE = Path(__file__).parents[2] / "docs" / "memory.md"
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {  # of models that people know; what a cache does not depend on is small
    "Llama-3.1-8B": ("LlamaConfig", {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}),
    "Qwen3-0.6B": ("Qwen3Config", {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}),
    "Gemma-3-1B": (
        "Gemma3TextConfig",
        {"num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512},
    ),
    "Phi-3-mini": ("Phi3Config", {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_size": 3072}),
    "gpt-oss-20b": (
        "GptOssConfig",
        {"num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128},
    ),
}


def cli(*arguments: object):
    return CliRunner().invoke(app, ["memory", *map(str, arguments)], prog_name="foredraft")


def write_shapes(folder: Path) -> None:
    for name, (kind, options) in SHAPES.items():
        small = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "dtype": "bfloat16"}
        ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        getattr(transformers, kind)(**{**small, **ids, **options}).save_pretrained(folder / name)


def shown(output: str) -> list[list[str]]:
    """The cells of each line."""
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in output.splitlines() if line.strip()]


def test_an_embedded_model():
    """2 layers of 1 head of 64 numbers, keys and values in 2 bytes."""
    result = cli("zoo:python-1m", "--tokens", 64, "--tokens", 100, "--cache-memory", "1MiB")
    assert result.exit_code == 0, result.output
    assert shown(result.stdout)[1:] == [
        ["zoo:python-1m", "2", "full attention", "512 B", "32 KiB", "–"],
        ["llama, bfloat16", "2", "all", "512 B", "32 KiB", "–"],
        ["model", "tokens", "a row takes", "if window pages are freed", "rows in 1MiB", "rows if window pages are freed"],
        ["zoo:python-1m", "64", "32 KiB", "–", "32", "–"],
        ["100", "64 KiB", "–", "16", "–"],
    ]


def test_folders_with_a_configuration_and_the_forms_that_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write_shapes(tmp_path)
    files = ["--json", "o.json", "--markdown", "o.md"]
    result = cli("gpt-oss-20b", "zoo:t5-ast", "--cache-memory", "1GB", "--dtype", "float32", "--source", 10, "--tree", 100, *files)
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "o.json").read_text())
    assert {name: document[name] for name in ("schema", "report", "page", "source", "tree", "cache_memory")} == {
        "schema": 1, "report": "memory", "page": 64, "source": 10, "tree": 100, "cache_memory": 10**9
    }  # fmt: skip
    oss, t5 = document["models"]
    layer = 8 * 64 * 2 * 4
    assert oss["token_bytes"] == 24 * layer and oss["page_bytes"] == 64 * 24 * layer and oss["dtype"] == "float32"
    assert [(each["name"], each["layers"], each["window"]) for each in oss["kinds"]] == [
        ("sliding window", 12, 128),
        ("full attention", 12, None),
    ]
    assert [each["tokens"] for each in oss["rows"]] == [1000, 4000, 30000]
    row, kept = 1024 * 24 * layer, (1024 + 384) * 12 * layer  # 128, 64 and 100 tokens are five pages, and one more may be begun
    assert oss["rows"][0] == {"tokens": 1000, "bytes": row, "bytes_windows": kept, "fit": 10**9 // row, "fit_windows": 10**9 // kept}
    assert t5["rows"][0]["bytes"] == 1024 * t5["token_bytes"] + 10 * t5["source_token_bytes"]
    assert "1,000 + 10 of the source" in result.stdout and "sliding window of 128 tokens" in result.stdout
    told = (tmp_path / "o.md").read_text()
    assert "| gpt-oss-20b | 12 | sliding window of 128 tokens | 48 KiB | 3 MiB | – |\n" in told
    assert told.count("\n\n") == 1 and all(line.count("|") in (7, 0) for line in told.splitlines())


def test_without_a_memory_nothing_is_said_to_fit(tmp_path: Path):
    result = cli("zoo:python-1m", "--json", tmp_path / "o.json")
    assert result.exit_code == 0 and "rows in" not in result.stdout
    assert json.loads((tmp_path / "o.json").read_text())["models"][0]["rows"][0]["fit"] is None


def test_the_tables_of_the_page_are_what_the_command_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write_shapes(tmp_path)
    result = cli(*SHAPES, "--cache-memory", "6GiB", "--markdown", "o.md")
    assert result.exit_code == 0, result.output
    assert f"foredraft memory {' '.join(SHAPES)} --cache-memory 6GiB --markdown" in PAGE.read_text()
    for table in (tmp_path / "o.md").read_text().split("\n\n"):
        assert table.strip() in PAGE.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "Missing argument 'MODEL'"),
        ("zoo:nope", "there is no embedded model 'zoo:nope'; there are zoo:python-8m"),
        ("zoo:python-ngram", "is an n-gram table, not a model"),
        ("./none", "there is no model at './none': no such path"),
        ("some/model", "'some/model' is not on this machine, and HF_HUB_OFFLINE is set; give a path"),
        ("./empty", "'./empty' has no config.json with a model_type; give a model in the format of transformers"),
        ("./vit", "(vit) cannot be built as a causal language model; give a model that generates text"),
        ("zoo:python-1m ./vit", "./vit"),
        ("zoo:python-1m --dtype bfloat", "unknown dtype 'bfloat', did you mean 'bfloat16'?"),
        ("zoo:python-1m --tokens 0", "--tokens"),
        ("zoo:python-1m --cache-memory 6gigs", "'6gigs' is not an amount of memory; write a size such as '6GiB', '500MiB' or '2GB'"),
        ("zoo:python-1m --cache-memory 6", "'6' has no unit, and is no fraction; write a size"),
        ("zoo:python-1m --cache-memory 0.5", "--cache-memory takes a size here, such as 6GiB, 500MiB or 2GB; '0.5' depends on the machine"),
        ("zoo:python-1m --cache-memory auto", "'auto' depends on the machine"),
        ("zoo:python-1m --json /none/o.json", "there is no folder '/none'"),
        ("zoo:python-1m --markdown /none/o.md", "there is no folder '/none'"),
    ],
)
def test_what_cannot_work_is_refused(arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name, config in (("empty", None), ("vit", {"model_type": "vit"})):
        (tmp_path / name).mkdir()
        if config is not None:
            (tmp_path / name / "config.json").write_text(json.dumps(config))
    result = cli(*arguments.split())
    assert result.exit_code == 2 and message in " ".join(result.output.split()), result.output
    assert "error:" not in result.output or result.output.count("\n") == 1


if __name__ == "__main__":
    write_shapes(Path(sys.argv[1]))
