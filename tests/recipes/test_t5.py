"""The parts of the recipe that makes the embedded encoder-decoder models."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from transformers import T5Config
from typer.testing import CliRunner

from foredraft import zoo
from recipes.t5 import __main__ as t5
from recipes.t5 import evaluation, fit, packaging, pairs, recipe, tokenization
from recipes.t5.pairs import Pair
from recipes.zoo.corpus import SourceFile
from recipes.zoo.fit import Schedule

STATEMENTS = [f"name_{a} = call_{b}({a}, key={b!r})" for a in range(20) for b in range(20)]
MADE = {task: [*(f"train {task} {size}" for size in ("target", "3m", "1m")), f"evaluate {task}"] for task in ("ast", "doc")}


@pytest.fixture(scope="module")
def encoded() -> tokenization.Encoded:
    found = [Pair("ast", each, pairs.s_expression(each)) for each in STATEMENTS]
    tokenizer = tokenization.train(text for pair in found for text in (pair.source, pair.text))
    for pair in found[:50]:
        assert tokenizer.decode(tokenizer(pair.text).input_ids, skip_special_tokens=True) == pair.text
    return tokenization.encode(tokenizer, found, recipe.TASKS["ast"])[0]


@pytest.mark.parametrize(
    ("code", "tree"),
    [
        ("x = f(a, b=1)", "(Assign x (Call f a (Keyword b 1)))"),
        ("return -a.b[1:] + 'c' \"d\"", "(Return (Add (USub (Subscript (Attribute a b) (Slice 1))) 'c' \"d\"))"),
        (
            "if not a < b <= c or d:\n    e, f = g\nelse:\n    pass",
            "(If (Or (Not (Compare a [Lt LtE] [b c])) d) [(Assign (Tuple e f) g)] [(Pass)])",
        ),
        ("from ..a import b as c, d", "(ImportFrom a [(As b c) d] 2)"),
        ("x: int", "(AnnAssign x int)"),
        ("print(*a, **b)", "(Call print (Starred a) (Keyword None b))"),
        ("x = [f'{i}' for i in y if i]", "(Assign x (ListComp f'{i}' [(Comprehension i y [i])]))"),
    ],
)
def test_trees_as_s_expressions(code, tree):
    assert pairs.s_expression(code) == tree


def test_a_constant_of_several_lines_is_left_out():
    with pytest.raises(pairs.Unprintable):
        pairs.s_expression('x = """a\nb"""')


def test_variables_are_renamed_and_other_words_are_not():
    assert pairs.renamed("x = xs[x] + y.z", "x", "new") == "new = xs[new] + y.z"
    for other in ("x = f(x=x)", "x.x = 1", "x = 'x'", "y = 1"):  # a keyword, an attribute, a word of a string, nothing at all
        assert pairs.renamed(other, "x", "new") is None


def test_pairs_of_a_file():
    body = '        """Says what it is worth. And more."""\n        value = self.compute(1)\n        return value  # no\n'
    text = f"class A:\n    def f(self):\n{body}\n    limit = 1\n"
    file = SourceFile("p", "p/a.py", text)
    found = [each for each in pairs.of_file(file, "ast", recipe.TASKS["ast"], ["b"], both=True) if "value" in each.source]
    assert {each.task for each in found} <= {"ast", "rename"}
    for each in found:  # dedented, without comments
        assert each.task == "rename" or each == Pair("ast", "value = self.compute(1)", "(Assign value (Call (Attribute self compute) 1))")
    documented = list(pairs.of_file(file, "doc", recipe.TASKS["doc"], []))
    assert documented == []  # it has a comment
    (pair,) = pairs.of_file(replace(file, text=text.replace("  # no", "")), "doc", recipe.TASKS["doc"], [])
    assert pair == Pair("doc", "def f(self):\n    value = self.compute(1)\n    return value", "Says what it is worth.")
    assert not list(pairs.of_file(replace(file, text="def f(:"), "ast", recipe.TASKS["ast"], ["b"]))


def test_steps_cover_an_epoch_and_resume_where_they_stopped(encoded):
    seen = list(islice(fit.groups(encoded, 300, 128, 0), 12))
    indices = [index for step in seen for batch in step for index in batch]
    assert len(indices) == len(set(indices))
    for batch in (batch for step in seen for batch in step):
        assert len(batch) * encoded.lengths[batch].max(0).sum() <= 128
    assert next(fit.groups(encoded, 300, 128, 7)) == seen[7]


def test_the_loss_is_the_librarys(encoded):
    model = fit.build(replace(recipe.MODELS["1m"], width=64, intermediate=32).config())
    source, text = fit.padded(encoded, [0, 50, 399])
    with torch.no_grad():
        theirs = model(input_ids=source, attention_mask=source != 0, labels=text.masked_fill(text == 0, -100)).loss
        mine = fit.cross_entropy(model, source, text, float((text != 0).sum()))
    assert mine.item() == pytest.approx(theirs.item(), rel=3e-3)  # bfloat16 products


def test_a_run_learns_stops_resumes_and_beats_both_baselines(encoded, tmp_path):
    small = replace(recipe.MODELS["1m"], width=64, intermediate=64, encoder=1, decoder=1, step_tokens=400, micro_tokens=200)

    def run(budget: int, resume: bool) -> fit.Run:
        run = fit.Run(small, tmp_path)
        if resume:
            run.resume()
        run.train(encoded, encoded, Schedule(budget, warmup=2000))
        return run

    assert 3_000 <= run(3_000, resume=False).progress.tokens < 3_800
    assert 8_000 <= run(8_000, resume=True).progress.tokens < 8_800
    losses = [json.loads(line)["held_out_nats_per_token"] for line in (tmp_path / "validation.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] - 0.5
    some = range(0, 400, 40)
    scores = [
        evaluation.score_model(fit.load_weights(tmp_path), encoded, some),
        evaluation.score_ngram(evaluation.ngram_model(encoded), encoded, some, 40),
        evaluation.score_copy(encoded, encoded, some),
    ]
    assert all(0 <= each.exact_match <= 1 and 0 <= each.accuracy <= 1 and each.pairs == 10 for each in scores)
    assert scores[0].nats_per_token < losses[0] and scores[2].nats_per_token > 1


@pytest.mark.parametrize("name", [zoo.T5, zoo.T5_DRAFT])
def test_the_cards_are_made_from_the_figures_beside_them(name):
    folder = zoo.path(name)
    figures, written = json.loads((folder / "metrics.json").read_text()), (folder / "README.md").read_text()
    manifest = {half: {**each, "packages": {}} for half, each in figures["corpus"].items()}
    run = "1m" if name == zoo.T5_DRAFT else "target"
    made = packaging.card("ast", run, "package", T5Config.from_pretrained(folder), figures, manifest)
    for part in ("# ", "Each package keeps"):  # all but the names of packages, which the figures leave out
        begin, end = made.index(part), made.index("## Data") if part == "# " else None
        assert made[begin:end] in written


def test_a_checkpoint_has_a_card_with_the_scores_of_the_model_and_of_the_baselines(encoded, tmp_path):
    small = replace(recipe.MODELS["3m"], width=64, intermediate=64, encoder=1, decoder=1, step_tokens=400, micro_tokens=200)
    base = tmp_path / "t5-doc"
    run = fit.Run(small, base / "3m")
    run.train(encoded, encoded, Schedule(800, warmup=400))
    trained = {"tokens": 800, "epochs": 0.1, "seconds": 60, "budget": 800, "cooldown": 0.3, "machine": "one core"}
    manifest = {half: {"files": 1, "bytes": 2, "sha256": "3", "packages": {}} for half in ("train", "held_out")}
    score = {"pairs": 50, "accuracy": 0.5, "exact_match": 0.125, "nats_per_token": 3.25}
    scores = {"3m": score, "copy": {**score, "nats_per_token": 7.5}, "n-gram": {**score, "nats_per_token": 4.75}}
    t5._write(base / "3m" / "training.json", trained)
    t5._write(tmp_path / "corpus" / "manifest.json", manifest)
    text = "Says what it is worth, and what that is worth to others."
    (base / "pairs").mkdir()
    (base / "pairs" / "held_out.jsonl").write_text(json.dumps(Pair("doc", "def f(): pass", text)._asdict()) + "\n")
    tokenization.train([text]).save_pretrained(tmp_path / "t5-tokenizer")
    given = ["checkpoint", "--task", "doc", "--model", "3m", "--width", "4", "--out", str(tmp_path)]
    missing = CliRunner().invoke(t5.app, given)
    assert missing.exit_code == 2 and "recipes.t5 evaluate --task doc" in " ".join(missing.output.replace("│", "").split())
    for name, each in scores.items():
        t5._write(base / f"scores-{name}.json", {"doc": each})
    made = CliRunner().invoke(t5.app, given)
    assert made.exit_code == 0, made.output
    card = (base / "3m-4x" / "README.md").read_text()
    assert card.startswith("# t5-doc-3m\n") and "statements of Python" not in card
    for name, nats in (("this model, bfloat16 weights as packaged", 3.25), ("copy baseline", 7.5), ("n-gram baseline", 4.75)):
        assert f"| {name} | first sentence | 12.5% | {nats:.4f} | 50.0% |" in card
    assert "recipes.t5 checkpoint --task doc --model 3m --width 4 --out RUN" in card and "recipes.t5 evaluate --task doc --out RUN" in card
    assert json.loads((base / "3m-4x" / "metrics.json").read_text())["held_out"] == {"doc": score}


def test_exact_match_is_of_greedy_texts(encoded, monkeypatch):
    class Says(torch.nn.Module):
        """The true texts, but for the last pair."""

        def forward(self, input_ids, attention_mask, decoder_input_ids):
            return type("Output", (), {"logits": torch.zeros(*decoder_input_ids.shape, recipe.VOCABULARY)})

        def generate(self, input_ids, **_):
            known = {encoded.pair(index)[0].tobytes(): encoded.pair(index)[1] for index in range(3)}
            rows = [known.get(row[row != 0].numpy().tobytes(), np.array([7, 1])) for row in input_ids]
            return torch.nn.utils.rnn.pad_sequence([torch.tensor([0, *row.tolist()]) for row in rows], batch_first=True)

    score = evaluation.score_model(Says(), encoded, [0, 1, 2, 3])
    assert score.exact_match == 0.75 and score.nats_per_token == pytest.approx(np.log(recipe.VOCABULARY))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], ["pairs ast", *MADE["ast"], "pairs doc", *MADE["doc"], "package"]),
        (["--task", "ast"], ["pairs ast", *MADE["ast"], "package"]),
        (["--task", "doc"], ["pairs ast", "pairs doc", *MADE["doc"]]),
    ],
)
def test_all_makes_the_target_and_both_drafts_of_each_task(flags, expected, monkeypatch, tmp_path):
    done = []
    for step in ("pairs", "train", "evaluate", "package"):
        monkeypatch.setattr(t5, step, lambda out, *what, step=step: done.append(" ".join([step, *(each.value for each in what)])))
    assert CliRunner().invoke(t5.app, ["all", "--out", str(tmp_path), *flags]).exit_code == 0
    assert done == expected
