"""The embedded models are what the catalogue and their cards say."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import zipfile

import pytest
import torch
from cover import by_turns
from safetensors import safe_open
from typer.testing import CliRunner

from foredraft import zoo
from foredraft.cli.checks import check
from foredraft.cli.commands import app
from foredraft.cli.settings import Configuration
from foredraft.drafters.ngram_model import NGramModel
from foredraft.errors import UnsupportedModelError
from foredraft.heads import checkpoints
from foredraft.loading import load_model

SOURCE = 'import json\n\n\ndef load(path):\n    with open(path, encoding="utf-8") as file:\n        return json.load('
PAIR = [zoo.TARGET, zoo.DRAFT]
MODELS = [*PAIR, zoo.DEEP]
INFLATED = {zoo.INFLATED: zoo.TARGET, zoo.WIDE: zoo.DEEP}
WITH_ENCODER = [zoo.T5, zoo.T5_DRAFT]


def table() -> NGramModel:
    return NGramModel.load(zoo.path("python-ngram") / "ngram.safetensors")


def test_names_with_and_without_prefix():
    assert zoo.names()[:6] == ["python-8m", "python-1m", "python-300m", "python-deep", "python-deep-100m", "python-ngram"]
    assert zoo.names()[6:] == ["python-8m-medusa", "python-8m-eagle3", "t5-ast", "t5-ast-1m", "t5-ast-130m"]
    assert zoo.path("zoo:python-8m") == zoo.path("python-8m")
    with pytest.raises(ValueError, match=r"no embedded model 'zoo:t5-doc'.*t5-doc is made by the recipe recipes/t5 of a checkout"):
        zoo.load("zoo:t5-doc")
    with pytest.raises(ValueError, match=r"no embedded model 'zoo:python-9m'.*zoo:python-8m.*zoo:python-ngram"):
        zoo.load("zoo:python-9m")
    with pytest.raises(ValueError, match="built from python-8m"):
        zoo.path("python-300m")


def test_importing_the_zoo_imports_neither_torch_nor_transformers():
    code = "import sys, foredraft.zoo as z; z.describe(); z.path('python-8m'); print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "set()"


@pytest.mark.parametrize("name", [*MODELS, *WITH_ENCODER])
def test_weights_are_bfloat16_and_the_head_is_tied(name):
    with safe_open(zoo.path(name) / "model.safetensors", framework="pt") as file:
        assert {file.get_slice(key).get_dtype() for key in file.keys()} == {"BF16"}  # noqa: SIM118
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118


@pytest.mark.parametrize("name", MODELS)
def test_architecture_converts_to_other_engines(name):
    config = zoo.load(name).config
    assert config.model_type == "llama" and config.head_dim == 64
    assert config.num_key_value_heads < config.num_attention_heads
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (0, 0, 1)


@pytest.mark.parametrize("name", [*MODELS, *INFLATED, *WITH_ENCODER, zoo.T5_INFLATED, zoo.NGRAM])
def test_descriptions_are_true(name):
    row = next(row for row in zoo.describe() if row.name == name)
    assert row.parameters == (table().ngrams if name == zoo.NGRAM else zoo.load(name).num_parameters())
    kinds = {zoo.NGRAM: "ngram", zoo.TARGET: "target", zoo.DRAFT: "draft", zoo.DEEP: "target", **dict.fromkeys(INFLATED, "inflated")}
    kinds |= {zoo.T5: "target", zoo.T5_DRAFT: "draft", zoo.T5_INFLATED: "inflated"}
    assert row.kind == kinds[name]
    assert ("benchmark instrument" in row.description) == (row.kind == "inflated")


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_descriptions_of_heads_are_true(kind):
    row = zoo.find(f"python-8m-{kind}")
    head = checkpoints.load(f"zoo:{row.name}")
    assert (head.kind, row.kind, row.drafter) == (kind, "head", kind)
    assert row.parameters == sum(weight.numel() for weight in head.parameters()) and row.bits_per_byte is None
    assert zoo.path(f"python-300m-{kind}") == row.path


def test_sizes():
    files = [file for file in zoo.root().rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 75_000_000
    assert zoo.path("python-ngram").joinpath("ngram.safetensors").stat().st_size <= 4_000_000
    target, draft = (zoo.load(name).num_parameters() for name in PAIR)
    assert 6e6 < target < 9e6 and 7 < target / draft < 13


@pytest.mark.nightly
def test_the_wheel_is_small_enough(tmp_path):
    with zipfile.ZipFile(tmp_path / "wheel.zip", "w", zipfile.ZIP_DEFLATED) as wheel:  # as wheels are
        for file in zoo.root().rglob("*"):
            wheel.write(file)
    assert (tmp_path / "wheel.zip").stat().st_size <= 60_000_000


def test_the_target_is_far_below_the_ngram_baseline_and_the_draft_between():
    figures = {name: json.loads((zoo.path(name) / "metrics.json").read_text()) for name in MODELS}
    target, draft, deep = (figures[name]["held_out"]["bfloat16"]["bits_per_byte"] for name in MODELS)
    baseline = figures[zoo.TARGET]["baseline"]
    assert "Witten-Bell" in baseline["what"]
    assert target <= 0.7 * baseline["bits_per_byte"]
    assert target < deep < draft < baseline["bits_per_byte"]


def test_the_deep_model_knows_early_what_it_will_say():
    exits = json.loads((zoo.path(zoo.DEEP) / "metrics.json").read_text())["held_out"]["exits"]
    assert len(exits) == zoo.load(zoo.DEEP).config.num_hidden_layers == 16 and exits[3] >= 0.5 and exits[-1] == 1


@pytest.mark.parametrize("name", [*MODELS, zoo.NGRAM])
def test_model_cards_name_data_split_and_recipe(name):
    card = (zoo.path(name) / "README.md").read_text()
    for words in ("Held out", "rich", "`asyncio`", "python -m recipes.zoo", "bits per byte"):
        assert words in card


def test_tokenizer_round_trips_any_text():
    tokenizer = zoo.load_tokenizer("python-1m")
    text = SOURCE + "\t\r\n é 日本 🚀  \x00 don't  x==1"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token_id) == ("<|endoftext|>", 0, 1)
    assert tokenizer.vocab_size == 4096 and len(tokenizer(SOURCE).input_ids) < len(SOURCE) / 2.5


def test_the_models_have_learnt_python():
    ids = zoo.load_tokenizer("python-8m")(SOURCE, return_tensors="pt").input_ids
    losses = {}
    for name in MODELS:
        with torch.no_grad():
            losses[name] = zoo.load(name, dtype=torch.float32)(ids, labels=ids).loss.item()
    assert losses[zoo.TARGET] < losses[zoo.DRAFT] < math.log(4096) / 2


def test_the_target_reads_its_whole_context():
    """A text of 2,000 tokens that repeats: late tokens are easy only for a model whose late positions work."""
    tokenizer = zoo.load_tokenizer("python-8m")
    ids = torch.tensor([(tokenizer(SOURCE).input_ids * 80)[:2000]])
    with torch.no_grad():
        logits = zoo.load("python-8m", dtype=torch.float32)(ids).logits[0]
    losses = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="none")
    assert losses[1500:].mean() < 0.5 * losses[: len(tokenizer(SOURCE).input_ids)].mean()


@pytest.mark.parametrize("name", by_turns(list(INFLATED), 1))
def test_inflated_targets_say_what_the_targets_say(name):
    ids = zoo.load_tokenizer("python-8m")(SOURCE, return_tensors="pt").input_ids
    small, large = (zoo.load(each, dtype=torch.float32) for each in (INFLATED[name], name))
    assert large.num_parameters() > 12 * small.num_parameters() and large.config._name_or_path == f"zoo:{name}"
    with torch.no_grad():
        torch.testing.assert_close(large(ids).logits, small(ids).logits, atol=1e-4, rtol=0)


def test_models_with_an_encoder_translate_and_rename():
    model, tokenizer = zoo.load(zoo.T5), zoo.load_tokenizer(zoo.T5_INFLATED)
    inputs = tokenizer(["x = f(a, b)", "rename x total: x = f(a, b)"], padding=True, return_tensors="pt")
    texts = tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=32, do_sample=False), skip_special_tokens=True)
    assert texts == ["(Assign x (Call f a b))", "total = f(a, b)"]


def test_the_t5_target_beats_both_baselines_and_its_draft():
    figures = [json.loads((zoo.path(name) / "metrics.json").read_text()) for name in WITH_ENCODER]
    for kind in ("ast", "rename"):
        target, draft = (each["held_out"][kind] for each in figures)
        baselines = [scores[kind]["nats_per_token"] for scores in figures[0]["baselines"].values()]
        assert target["nats_per_token"] < draft["nats_per_token"] < min(baselines) and target["exact_match"] > draft["exact_match"]
    card = (zoo.path(zoo.T5) / "README.md").read_text()
    for words in ("Held out", "rich", "`asyncio`", "python -m recipes.t5 train", "copy baseline", "n-gram baseline"):
        assert words in card


def test_held_out_sources_are_of_statements_that_no_model_saw():
    assert all(each.startswith("rename ") for each in zoo.prompts("rename")) and len(zoo.prompts("ast")) == len(zoo.prompts("rename")) == 48
    tokenizer = zoo.load_tokenizer(zoo.T5)
    for each in [*zoo.prompts("ast"), *zoo.prompts("rename")]:
        ids = tokenizer(each).input_ids
        assert len(ids) <= 96 and ids[-1] == tokenizer.eos_token_id and tokenizer.decode(ids, skip_special_tokens=True) == each


def test_the_inflated_t5_says_what_the_small_one_says():
    small, large = (zoo.load(each, dtype=torch.float32) for each in (zoo.T5, zoo.T5_INFLATED))
    assert 120e6 < large.num_parameters() < 140e6 and small.num_parameters() < 10e6
    inputs = zoo.load_tokenizer(zoo.T5)(zoo.prompts("ast")[:2], padding=True, return_tensors="pt")
    start = torch.tensor([[0, 9, 12], [0, 7, 8]])
    with torch.no_grad():
        texts = [each(**inputs, decoder_input_ids=start).logits for each in (small, large)]
    torch.testing.assert_close(texts[1], texts[0], atol=1e-3, rtol=0)


def test_where_a_model_with_an_encoder_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"'zoo:t5-ast' \(t5\) is an encoder-decoder model"):
        load_model("zoo:t5-ast")
    for command, said in (
        ("generate --target zoo:t5-ast x", "has an encoder: give what it reads as --source TEXT"),
        ("generate --target zoo:python-8m --drafter draft-model:zoo:t5-ast-1m x", "is an encoder-decoder model"),
    ):
        result = CliRunner().invoke(app, command.split())
        assert result.exit_code == 2 and said in result.stderr


def test_options_reach_the_model():
    model = zoo.load("python-1m", dtype=torch.float32, device="cpu", attn_implementation="eager")
    assert model.dtype == torch.float32 and model.config._attn_implementation == "eager" and not model.training
    assert zoo.load("python-1m").dtype == torch.bfloat16
    with pytest.raises(ValueError, match="is an n-gram table, not a model; use it as drafter 'ngram:zoo:python-ngram'"):
        zoo.load("python-ngram")


def test_ngram_table_completes_python():
    tokenizer, found = zoo.load_tokenizer("python-ngram"), table()
    assert found.vocab_size == 4096
    assert tokenizer.decode([found.predict(tokenizer("if __name__ == '__main").input_ids)]) == "__"
    assert tokenizer.decode([found.predict(tokenizer("for i in").input_ids)]) == " range"


@pytest.mark.parametrize("arguments", ["demo", "generate x", "audit", "tune", "models", "generate x --target zoo:python-1m"])
def test_without_the_distribution_one_line_says_how_to_get_it(arguments, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "foredraft_zoo", None)  # as if it were not installed
    result = CliRunner().invoke(app, arguments.split())
    assert result.exit_code == 2 and not result.stdout
    how = "pip install 'foredraft[zoo]', or ./zoo in a checkout"
    assert result.stderr == f"error: the embedded models (zoo:NAME) are not installed: {how}\n"
    check(Configuration(str(tmp_path), dtype="float32"), {"suffix": {}})  # who has a model of his own needs none of them
