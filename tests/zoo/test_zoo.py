"""The embedded models are there, are what they say, and the recipe's parts hold what its text promises."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

from foredraft import zoo
from foredraft.drafters.ngram_model import NGramModel
from foredraft.zoo import corpus, evaluation, fit, recipe, tokenization
from foredraft.zoo.corpus import SourceFile

SOURCE = 'import json\n\n\ndef load(path):\n    with open(path, encoding="utf-8") as file:\n        return json.load('
MODELS = [zoo.TARGET, zoo.DRAFT]


# The embedded models


def test_names_with_and_without_prefix():
    assert zoo.names()[:4] == ["python-8m", "python-1m", "python-300m", "python-ngram"]
    assert set(zoo.names()[4:]) <= {name for name, _ in zoo.HEADS.values()}
    assert zoo.path("zoo:python-8m") == zoo.path("python-8m")
    with pytest.raises(ValueError, match=r"no embedded model 'zoo:python-9m'.*zoo:python-8m.*zoo:python-ngram"):
        zoo.load("zoo:python-9m")
    with pytest.raises(ValueError, match="built from python-8m"):
        zoo.path("python-300m")


def test_importing_the_zoo_imports_neither_torch_nor_transformers():
    code = "import sys, foredraft.zoo as z; z.describe(); z.path('python-8m'); print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "set()"


@pytest.mark.parametrize("name", MODELS)
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


@pytest.mark.parametrize("name", [*MODELS, zoo.INFLATED, zoo.NGRAM])
def test_descriptions_are_true(name):
    row = next(row for row in zoo.describe() if row.name == name)
    model = zoo.load(name)
    size = model.ngrams if name == zoo.NGRAM else model.num_parameters()
    assert row.parameters == size
    assert row.kind == {zoo.INFLATED: "inflated", zoo.NGRAM: "ngram", zoo.TARGET: "target", zoo.DRAFT: "draft"}[name]
    assert ("benchmark instrument" in row.description) == (name == zoo.INFLATED)


def test_sizes():
    files = [file for file in zoo.MODELS.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 40_000_000
    assert zoo.path("python-ngram").joinpath("ngram.safetensors").stat().st_size <= recipe.NGRAM_BYTES
    target, draft = (zoo.load(name).num_parameters() for name in MODELS)
    assert 6e6 < target < 9e6 and 7 < target / draft < 13


def test_the_target_is_far_below_the_ngram_baseline_and_the_draft_between():
    figures = {name: json.loads((zoo.path(name) / "metrics.json").read_text()) for name in MODELS}
    target, draft = (figures[name]["held_out"]["bfloat16"]["bits_per_byte"] for name in MODELS)
    baseline = figures[zoo.TARGET]["baseline"]
    assert "Witten-Bell" in baseline["what"]
    assert target <= 0.7 * baseline["bits_per_byte"]
    assert target < draft < baseline["bits_per_byte"]


@pytest.mark.parametrize("name", [*MODELS, zoo.NGRAM])
def test_model_cards_name_data_split_and_recipe(name):
    card = (zoo.path(name) / "README.md").read_text()
    for words in ("Held out", "rich", "`asyncio`", "python -m foredraft.zoo.train", "bits per byte"):
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


def test_inflated_target_says_what_the_target_says():
    ids = zoo.load_tokenizer("python-8m")(SOURCE, return_tensors="pt").input_ids
    small, large = (zoo.load(name, dtype=torch.float32) for name in (zoo.TARGET, zoo.INFLATED))
    assert 2.5e8 < large.num_parameters() < 3.5e8 and large.config._name_or_path == "zoo:python-300m"
    with torch.no_grad():
        torch.testing.assert_close(large(ids).logits, small(ids).logits, atol=1e-4, rtol=0)


def test_options_reach_the_model():
    model = zoo.load("python-1m", dtype=torch.float32, device="cpu", attn_implementation="eager")
    assert model.dtype == torch.float32 and model.config._attn_implementation == "eager" and not model.training
    assert zoo.load("python-1m").dtype == torch.bfloat16
    with pytest.raises(ValueError, match="takes no dtype"):
        zoo.load("python-ngram", dtype=torch.float32)


def test_ngram_table_completes_python():
    tokenizer, table = zoo.load_tokenizer("python-ngram"), zoo.load("python-ngram")
    assert isinstance(table, NGramModel) and table.vocab_size == 4096
    assert tokenizer.decode([table.predict(tokenizer("if __name__ == '__main").input_ids)]) == "__"
    assert tokenizer.decode([table.predict(tokenizer("for i in").input_ids)]) == " range"


# The recipe


def paragraph(seed: int, words: int = 400) -> str:
    vocabulary = [f"name_{i}" for i in range(300)]
    chosen = np.random.default_rng(seed).choice(vocabulary, (words // 10, 10))
    return "\n".join(map(" ".join, chosen))


def test_near_duplicates_are_found_and_different_texts_are_not():
    first, second = paragraph(0), paragraph(1)
    edited = first.replace("name_7", "name_8")
    assert list(corpus.near_duplicates([first, second, edited, second, "", "x"])) == [False, False, True, True, False, False]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def f(x):\n    return x + 1\n" * 20, None),
        ("x = 1\n", "size"),
        ("word = word\n" * 50 + "x = " + "'a' + " * 100, "long lines"),
        ("TABLE = [\n" + "    (0x1F600, 17, 3.5),\n" * 50 + "]\n", "table"),
        ("NAMES = {\n" + "    'grinning': 'smile',\n" * 50 + "}\n", "table"),
    ],
)
def test_files_that_teach_little_are_left_out(text, reason):
    assert corpus.rejection(text) == reason


def test_discovery_finds_the_library_and_skips_tests_and_vendored_copies():
    found = {path: package for package, path, _ in corpus.discover()}
    assert found["stdlib/json/decoder.py"] == "stdlib:json" and found["stdlib/heapq.py"] == "stdlib:heapq"
    assert found["transformers/generation/utils.py"] == "transformers"
    assert not [path for path in found if "/tests/" in path or "/_vendor/" in path or path.startswith("..")]


def test_held_out_packages_stay_out_of_training(monkeypatch, tmp_path):
    files = {
        "h11/a.py": ("h11", paragraph(0)),
        "click/copy.py": ("click", paragraph(0)),  # a copy of a held-out file: must not train
        "click/b.py": ("click", paragraph(1)),
        "stdlib/json/c.py": ("stdlib:json", paragraph(2)),
    }
    for path, (_, text) in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(corpus, "discover", lambda: [(package, path, tmp_path / path) for path, (package, _) in files.items()])
    built = corpus.build()
    assert [file.path for file in built.train] == ["click/b.py"]
    assert {file.path for file in built.held_out} == {"h11/a.py", "stdlib/json/c.py"}
    assert built.manifest["dropped"] == {"near-duplicate": 1}
    built.save(tmp_path / "saved")
    assert corpus.Corpus.load(tmp_path / "saved") == built


def test_bits_per_byte_counts_every_token_once():
    """Against a model that knows nothing: log2(V) bits for each token, whatever the windows."""
    lengths = [1, 2, 130, evaluation.WINDOW, evaluation.WINDOW + 1, 3 * evaluation.WINDOW]
    starts = np.cumsum([0, *(length + 1 for length in lengths)])
    held_out = tokenization.Encoded(np.zeros(starts[-1], np.uint16), starts, np.array(lengths) * 2)

    class Uniform(torch.nn.Module):
        def forward(self, input_ids, use_cache):
            return type("Output", (), {"logits": torch.zeros(*input_ids.shape, 8)})

    score = evaluation.score_model(Uniform(), held_out)
    assert score.bits_per_byte == pytest.approx(3 / 2) and score.nats_per_token == pytest.approx(math.log(8))


def test_schedule_warms_up_holds_and_cools_down():
    schedule = fit.Schedule(budget=10_000_000)
    rates = [schedule.rate(tokens) for tokens in range(0, 10_000_001, 100_000)]
    assert rates[0] < 0.01 and rates[5] == 1.0 == rates[80] and rates[-1] == 0.0
    assert rates[80:] == sorted(rates[80:], reverse=True)


def test_groups_cover_an_epoch_once_and_resume_where_they_stopped():
    tokens = np.arange(9 * recipe.CONTEXT + 1, dtype=np.uint16)
    stream = fit.groups(tokens, 2, 0)
    seen = [next(stream) for _ in range(10)]
    first_epoch = torch.cat([group[:, 0] for group in seen[:4]])
    assert len(set(first_epoch.tolist())) == 8  # four groups of two of the nine blocks
    assert torch.equal(next(fit.groups(tokens, 2, 6)), seen[6])


def test_blocked_attention_is_attention():
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 600, 8), torch.randn(2, 2, 600, 8), torch.randn(2, 2, 600, 8)
    blocked, _ = fit.blocked_attention(None, query, key, value, None, scaling=0.3)
    plain = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(blocked.transpose(1, 2), plain, atol=1e-5, rtol=0)


def test_a_run_learns_stops_and_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr(fit, "CONTEXT", 64)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    tokens = np.tile(np.arange(16, dtype=np.uint16), 600)
    config = recipe.llama_config(hidden=64, heads=1, kv_heads=1, layers=1, intermediate=64)
    batch = fit.Batch(rows=4, lengths=(16, 32, 64), micro_tokens=64)

    def run(budget: int, resume: bool) -> fit.Run:
        run = fit.Run(config, tmp_path, batch=batch, rates=fit.Rates())
        if resume:
            run.resume()
        run.train(tokens, tokens, fit.Schedule(budget, warmup=500))
        return run

    assert run(2_000, resume=False).progress.tokens == 2_048
    assert run(12_000, resume=True).progress.tokens == 12_032
    losses = [json.loads(line)["held_out_nats_per_token"] for line in (tmp_path / "validation.jsonl").read_text().splitlines()]
    assert losses[1] < losses[0] < 9
    assert fit.load_weights(tmp_path).config._attn_implementation == "sdpa"


def test_recipe_command_line(tmp_path):
    from foredraft.zoo.train import app

    listing = CliRunner().invoke(app, ["--help"])
    assert listing.exit_code == 0
    for command in ("corpus", "tokenizer", "target", "draft", "ngram", "evaluate", "package", "all"):
        assert command in listing.output
    refused = CliRunner().invoke(app, ["target", "--out", str(tmp_path)])
    assert refused.exit_code == 2 and "foredraft.zoo.train tokenizer" in refused.output


def test_every_held_out_name_is_a_known_package():
    assert {name for name in corpus.HELD_OUT if not name.startswith("stdlib:")} <= set(corpus.DISTRIBUTIONS)
    assert isinstance(SourceFile("rich", "rich/a.py", "é").size, int) and SourceFile("rich", "a", "é").held_out
