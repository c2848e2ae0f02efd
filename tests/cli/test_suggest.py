"""``foredraft suggest``: by the configuration alone, without torch; and the table of pairs in the documentation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foredraft.cli import app
from foredraft.cli.pairs import PAIRS, markdown, pair_for
from foredraft.cli.suggest import parameters

QWEN3 = {
    "model_type": "qwen3", "vocab_size": 151936, "num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
}  # fmt: skip


def suggest(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return CliRunner().invoke(app, ["suggest", str(folder)], prog_name="foredraft")


def test_a_model_of_a_known_family(tmp_path):
    result = suggest(tmp_path, QWEN3)
    assert result.exit_code == 0 and "qwen3, 36 layers, a vocabulary of 151,936, about 8.2 B parameters" in result.stdout
    _, _, _, draft, _, head, *others = result.stdout.splitlines()
    assert draft.startswith("draft-model:") and head.startswith("The same for every model") and "suffix" in others[0]
    assert "draft-model:Qwen/Qwen3-0.6B" in result.stdout and "not tried here" in result.stdout and "chains and trees" in result.stdout
    assert f"foredraft tune --target {tmp_path} --drafter draft-model:Qwen/Qwen3-0.6B --drafter suffix" in result.stdout


def test_a_model_that_is_too_small_and_an_unknown_family(tmp_path):
    small = suggest(tmp_path, {**QWEN3, "num_hidden_layers": 4, "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 64})
    assert "is too large for this model" in small.stdout and "--drafter draft-model" not in small.stdout
    other = suggest(tmp_path, {**QWEN3, "model_type": "unheard_of"})
    assert "no draft is known for this family" in other.stdout and "--drafter suffix" in other.stdout


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "(t5) is an encoder-decoder model"),
        ({"model_type": "falcon_mamba"}, "keeps a recurrent state"),
        ({}, "has no config.json with a model_type"),
    ],
)
def test_what_cannot_be_a_target(tmp_path, config, message):
    result = suggest(tmp_path, config)
    assert result.exit_code == 2 and message in result.stderr


def test_chains_only_and_text_models_inside_others(tmp_path):
    assert "Drafts may be chains only." in suggest(tmp_path, {**QWEN3, "model_type": "mamba2"}).stdout
    nested = suggest(tmp_path, {"model_type": "gemma3", "text_config": {**QWEN3, "model_type": "gemma3_text", "vocab_size": 262208}})
    assert "draft-model:google/gemma-3-1b-it" in nested.stdout


def test_it_needs_no_torch_and_knows_the_embedded_models():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom foredraft.cli import app\n"
        "print(CliRunner().invoke(app, ['suggest', 'zoo:python-300m']).output)\nprint({'torch', 'numpy'} & set(sys.modules))"
    )
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "draft-model:zoo:python-1m  any text; 0.001 B parameters, tried" in text and text.endswith("set()\n")
    assert "24 layers" in text


@pytest.mark.parametrize(
    ("name", "kind", "vocab", "draft"),
    [
        ("Qwen/Qwen2.5-72B-Instruct", "qwen2", 152064, "Qwen/Qwen2.5-0.5B-Instruct"),
        ("Qwen/Qwen2.5-Coder-32B-Instruct", "qwen2", 152064, "Qwen/Qwen2.5-Coder-0.5B-Instruct"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama", 128256, "meta-llama/Llama-3.2-1B-Instruct"),
        ("meta-llama/Llama-2-7b-hf", "llama", 32000, "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
        ("mistralai/Mistral-7B-v0.1", "mistral", 32000, None),
    ],
)
def test_pairs_by_family(name, kind, vocab, draft):
    found = pair_for(name, {"model_type": kind, "vocab_size": vocab})
    assert (None if found is None else found.draft) == draft


def test_parameters_of_published_shapes():
    assert parameters("Qwen/Qwen3-8B", QWEN3) == pytest.approx(8.19, rel=0.02)
    mixture = {
        **QWEN3,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "moe_intermediate_size": 768,
    }
    assert parameters("Qwen/Qwen3-30B-A3B", mixture) == pytest.approx(30.5, rel=0.02)


def test_the_table_in_the_documentation_is_this_one():
    assert markdown() in (Path(__file__).parents[2] / "docs" / "drafters.md").read_text() and len(PAIRS) > 10
