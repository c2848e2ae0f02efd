"""The model cards of the embedded heads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import foredraft_zoo
import pytest

from foredraft import zoo
from foredraft.heads import checkpoints
from recipes.zoo import heads, packaging, recipe


def test_time_to_quality_stands_beside_what_had_been_done():
    lines = [
        {"acceptance_length": 1.0, "step": 0},
        {"loss": 3.0, "step": 20, "tokens": 100, "seconds": 4.4},
        {"loss": 2.5, "step": 40, "tokens": 210, "seconds": 9.6},
        {"acceptance_length": 2.34567, "step": 40},
        {"loss": 2.0, "step": 60, "tokens": 300, "seconds": 15.0},
    ]
    assert heads.time_to_quality(lines) == [
        {"step": 0, "tokens": 0, "seconds": 0, "acceptance_length": 1.0},
        {"step": 40, "tokens": 210, "seconds": 10, "acceptance_length": 2.346},
    ]


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_the_cards_are_made_from_the_figures_beside_them(kind):
    name = f"python-8m-{kind}"
    folder = zoo.path(name)
    figures = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    written = (folder / "README.md").read_text(encoding="utf-8")
    assert written.startswith(heads.card(name, kind, figures))
    assert figures["held_out"]["chain"]["acceptance_length"] > 1.5
    changed = heads.card(name, kind, {**figures, "parameters": 7})
    assert changed != heads.card(name, kind, figures) and "7 parameters" in changed


def test_texts_are_written_a_head_is_trained_and_packaged(tmp_path, monkeypatch):
    """All steps for Medusa heads, with few texts."""
    sizes = {"data": 6, "held_out": 2, "corpus_texts": 2, "probabilities": 4}
    small = {name: replace(each, windows=sizes[name], tokens=16, answer=min(each.answer, 4)) for name, each in recipe.TEXT_SETS.items()}
    monkeypatch.setattr(recipe, "TEXT_SETS", small)
    options = {"steps": 4, "report_every": 1, "held_out": 2, "answer_tokens": 4}
    head = {"heads": 2, "lm_head": "low-rank", "rank": 8}
    distilled = {"kind": "draft", "backbone": "full", "head": recipe.HEADS["draft"]["head"], "evaluate_every": 4, **options}
    monkeypatch.setattr(recipe, "HEADS", {"medusa": {"kind": "medusa", "head": head, **options}, "draft": distilled})
    texts = [text * 3 for text in zoo.prompts("benchmarks")]
    monkeypatch.setattr(zoo, "root", lambda: tmp_path / "zoo")
    (tmp_path / "zoo").mkdir()
    (tmp_path / "zoo" / "python-8m").symlink_to(Path(foredraft_zoo.__file__).parent / "python-8m")
    monkeypatch.setattr(packaging, "root", zoo.root)
    (tmp_path / "corpus").mkdir()
    for half in ("train", "held_out"):
        files = [{"text": text} for text in texts]
        (tmp_path / "corpus" / f"{half}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in files))
    assert len(list(heads.write_texts(tmp_path))) == 4
    assert heads.train(tmp_path, "medusa", resume=False, report=lambda line: None)
    manifest = {half: {"files": 1, "bytes": 2, "sha256": "3"} for half in ("train", "held_out")}
    folder = heads.package(tmp_path, "medusa", manifest)
    figures = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    assert (folder / "README.md").read_text(encoding="utf-8") == heads.card(folder.name, "medusa", figures)
    assert figures["prompts"] == 2 and figures["training"]["texts"] == [6, 2] and figures["training"]["steps"] == 4
    assert checkpoints.load("zoo:python-8m-medusa", zoo.load("python-8m")).kind == "medusa"

    (heads.folder(tmp_path, "draft-begun")).symlink_to(Path(foredraft_zoo.__file__).parent / "python-1m")
    assert heads.train(tmp_path, "draft", resume=False, report=lambda line: None)
    made, found = heads.weights(tmp_path, "draft"), heads.distilled(tmp_path)
    assert found["steps"] == 4 and {"alpha", "agreement", "greedy_length", "sampled_length"} <= found["after"].keys()
    held_out = {"bits_per_byte": 1.4, "nats_per_token": 3.3, "accuracy": 0.35}
    training = {"budget": 1e6, "cooldown": 0.3, "tokens": 10**6, "epochs": 0.1, "seconds": 60, "machine": "one", "lengths": [1, 2, 3]}
    known = {
        "held_out": {"bfloat16": held_out, "sample": dict.fromkeys(("float32", "bfloat16"), held_out)},
        "baseline": {**held_out, "what": "x"},
    }
    tokenizer = zoo.load_tokenizer("python-8m")
    manifest = {half: {**each, "packages": {}} for half, each in manifest.items()}
    folder = packaging.package_model("python-1m", made, tokenizer, {"training": training, "distilled": found, **known}, manifest)
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert (
        "then distilled from it" in card
        and "python -m recipes.zoo distill" in card
        and f"| after | {found['after']['alpha']:.3f} |" in card
    )
