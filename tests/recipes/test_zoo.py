"""The parts of the recipe that makes the embedded models."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from foredraft.training import layerskip
from recipes.zoo import corpus, evaluation, fit, recipe, tokenization
from recipes.zoo.corpus import SourceFile


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


@pytest.mark.parametrize("early", [pytest.param(None, marks=pytest.mark.nightly), layerskip.Recipe(dropout=0.2, rotation=2, exit=1)])
def test_a_run_learns_stops_and_resumes(tmp_path, monkeypatch, early):
    monkeypatch.setattr(fit, "CONTEXT", 64)
    monkeypatch.setattr(fit, "VALIDATED", (64, 16))
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    tokens = np.tile(np.arange(16, dtype=np.uint16), 600)
    config = recipe.llama_config(hidden=32, heads=1, kv_heads=1, layers=3, intermediate=32, vocabulary=32)
    batch = fit.Batch(rows=4, lengths=(16, 32, 64), micro_tokens=64)

    def run(budget: int, resume: bool) -> fit.Run:
        run = fit.Run(config, tmp_path, batch=batch, rates=fit.Rates(), early=early)
        if resume:
            run.resume()
        run.train(tokens, tokens, fit.Schedule(budget, warmup=500))
        return run

    assert run(2_000, resume=False).progress.tokens == 2_048
    assert 4_000 <= run(4_000, resume=True).progress.tokens < 4_256
    losses = [json.loads(line)["held_out_nats_per_token"] for line in (tmp_path / "validation.jsonl").read_text().splitlines()]
    assert losses[1] < losses[0] < 4
    assert fit.load_weights(tmp_path).config._attn_implementation == "sdpa"


def test_recipe_command_line(tmp_path):
    from recipes.zoo.__main__ import app

    listing = CliRunner().invoke(app, ["--help"])
    assert listing.exit_code == 0
    for command in ("corpus", "tokenizer", "target", "draft", "deep", "deep-plain", "ngram", "evaluate", "package", "all"):
        assert command in listing.output
    refused = CliRunner().invoke(app, ["target", "--out", str(tmp_path)])
    assert refused.exit_code == 2 and "recipes.zoo tokenizer" in refused.output


def test_every_held_out_name_is_a_known_package():
    assert {name for name in corpus.HELD_OUT if not name.startswith("stdlib:")} <= set(corpus.DISTRIBUTIONS)
    assert isinstance(SourceFile("rich", "rich/a.py", "é").size, int) and SourceFile("rich", "a", "é").held_out


def test_the_early_loss_is_the_sum_of_its_exits():
    config = recipe.llama_config(hidden=64, heads=1, kv_heads=1, layers=3, intermediate=64)
    model, ids = fit.build(config).eval(), torch.randint(recipe.VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
    kept = torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]])  # both rows leave the second layer out
    found = fit.early_cross_entropy(model, ids, kept, [0, 2], torch.tensor([0.25, 0.75]))
    del model.model.layers[1]
    with torch.autocast("cpu", torch.bfloat16):
        states = model(ids[:, :-1], output_hidden_states=True).hidden_states
        logits = [model.lm_head(model.model.norm(states[1])), model.lm_head(states[2])]
    each = [torch.nn.functional.cross_entropy(part.float().flatten(0, 1), ids[:, 1:].flatten()) for part in logits]
    torch.testing.assert_close(found, 0.25 * each[0] + 0.75 * each[1], atol=1e-4, rtol=0)
    assert fit.cross_entropy(model, ids, behind=fit.behind).item() == pytest.approx(each[1].item(), abs=1e-4)


def test_exits_are_scored_against_the_last_layer():
    config = recipe.llama_config(hidden=64, heads=1, kv_heads=1, layers=3, intermediate=64)
    model = fit.build(config).eval()
    for weight in model.model.layers.parameters():
        weight.data.mul_(20)
    for name in ("self_attn.o_proj", "mlp.down_proj"):  # the second layer does nothing: the first exit is the second
        model.model.layers[1].get_submodule(name).weight.data.zero_()
    tokens = np.random.default_rng(0).integers(2, recipe.VOCABULARY, 300).astype(np.uint16)
    tokens[[0, 100]] = 0
    held_out = tokenization.Encoded(tokens, np.array([0, 100, 300]), np.array([1, 1]))
    first, second, last = evaluation.score_exits(model, held_out)
    assert first == second < last == 1


def test_the_foreign_tokenizer_writes_any_text_back():
    text = "def area(width):\n        return 1234 * width  # caf\u00e9 \U0001f642\n" * 20 + paragraph(3)
    learnt = tokenization.train_foreign([SourceFile("sympy", "a.py", text)], size=700)
    assert len(learnt) <= 700 and learnt.eos_token_id == 0
    ids = learnt.encode(text + "\u00df\u4e8c\n")
    assert learnt.decode(ids) == text + "\u00df\u4e8c\n"
    pieces = learnt.convert_ids_to_tokens(ids)
    assert {"1", "2", "3", "4"} <= set(pieces)
