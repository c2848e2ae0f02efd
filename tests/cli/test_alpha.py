"""``foredraft alpha``: its figures against probabilities computed by hand and against speculative decoding; what it reads and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import vocabularies
from helpers import known_costs
from rich.console import Console
from typer.testing import CliRunner

from foredraft import Speculator, zoo
from foredraft.auditing.reference import Reference
from foredraft.cli import alpha, app
from foredraft.cli.alpha import Compared, Setting
from foredraft.cli.prompts import Text, read_texts
from foredraft.cli.settings import Configuration
from foredraft.drafters.draft_model import DraftModel
from foredraft.drafters.vocabularies import Reading
from foredraft.errors import ConfigurationError, TargetOutputError
from foredraft.planning.costs import CostModel, StandIn
from foredraft.preparation import pad
from foredraft.training.generation import Answering, generate

TARGET, DRAFT = "zoo:python-8m", "zoo:python-1m"
TEXTS = [
    "import os\n\n\ndef size(path):\n    return os.stat(path).st_size\n",
    "class Point:\n    def __init__(self, x, y):\n        self.x = x\n",
]


def cli(*arguments: object):
    return CliRunner().invoke(app, ["alpha", *map(str, arguments)], prog_name="foredraft")


def written(path: Path, lines: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs that no clock decides."""

    def measured(speculator: Speculator) -> CostModel:
        return known_costs(pass_=1.0, level=0.1)

    monkeypatch.setattr(alpha, "measured", measured)


def test_a_run_on_the_embedded_models(quick: None, tmp_path: Path):
    lines = [{"text": TEXTS[0], "category": "files"}, {"text": TEXTS[1]}, {"prompt": TEXTS[1] * 3, "category": "files"}]
    data, out = written(tmp_path / "mixed.jsonl", lines), tmp_path / "out.json"
    result = cli("--target", TARGET, "--draft", DRAFT, "--data", data, "--threads", 1, "--json", out)
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    assert document["c"] == pytest.approx(0.1) and "c         0.100" in result.stdout
    assert [(each["name"], each["texts"]) for each in document["categories"]] == [("files", 2), ("mixed", 1)]
    assert document["categories"][1]["alpha"]["low"] is None and document["whole"]["texts"] == 3
    assert sum(each["tokens"] for each in document["positions"]) == document["whole"]["tokens"]
    assert 0 < document["whole"]["alpha"]["low"] < document["whole"]["alpha"]["value"] < document["whole"]["alpha"]["high"] <= 1
    for kind in ("sampled", "greedy"):
        found = document[kind]
        assert found["best"] == 1 + int(np.argmax(found["speedups"])) and f"best γ {found['best']}" in result.stdout
        assert found["speedup"]["value"] == pytest.approx(max(found["speedups"])) and found["lengths"] == sorted(found["lengths"])
    written_as = f"--threads 1 --temperature 1.0 --top-k 0 --shape 'chain({document['sampled']['best']})' \"PROMPT\""
    assert f"--drafter draft-model:zoo:python-1m {written_as}" in result.stdout
    assert "3 texts cannot tell much" in result.stdout


def test_what_was_compared_before_ctrl_c_is_shown_and_written(quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compare = alpha.compare

    def interrupted(target: object, draft: object, category: str, *arguments: object, **options: object) -> Compared:
        if category == "second":
            raise KeyboardInterrupt
        return compare(target, draft, category, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(alpha, "compare", interrupted)
    data = written(tmp_path / "mixed.jsonl", [{"text": TEXTS[0], "category": "first"}, {"text": TEXTS[1], "category": "second"}])
    result = cli("--target", DRAFT, "--draft", DRAFT, "--data", data, "--threads", 1, "--json", tmp_path / "out.json")
    assert result.exit_code == 130 and "interrupted" in result.stderr and "Interrupted: only the texts" in result.stdout, result.output
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["complete"] is False and [each["name"] for each in document["categories"]] == ["first"]


def test_alpha_is_the_overlap_at_the_temperature_that_is_served():
    models, tokenizer = [zoo.load(name, dtype=torch.float32) for name in ("python-8m", "python-1m")], zoo.load_tokenizer("python-8m")
    ids = tokenizer(TEXTS[0])["input_ids"]
    found = alpha.compare(*models, "files", ids, 3, {"do_sample": True, "temperature": 0.7, "top_k": 5})
    for place in range(3, len(ids)):
        p, q = (model(torch.tensor([ids[:place]])).logits[0, -1].detach() / 0.7 for model in models)
        assert found.agrees[place - 3] == (p.argmax() == q.argmax())
        p, q = (torch.softmax(torch.where(each >= each.topk(5).values[-1], each, -torch.inf), -1) for each in (p, q))
        assert found.alpha[place - 3] == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-5)
    assert len(found) == len(ids) - 3


def test_a_target_that_answers_nan_is_said(monkeypatch: pytest.MonkeyPatch):
    model = zoo.load("python-1m")
    monkeypatch.setattr(Reference, "logits", lambda self, texts, model=None: torch.full((1, texts.shape[1], 4096), torch.nan))
    with pytest.raises(TargetOutputError, match="NaN or infinite in a text of 'files'"):
        alpha.compare(model, model, "files", [5, 6, 7], 1, {"do_sample": False})


@pytest.mark.nightly
def test_of_texts_that_the_target_wrote_the_prediction_is_what_decoding_keeps():
    """Rules that are exact write such texts; how long their drafts survive is what the two passes say, without any decoding."""
    models, tokenizer = [zoo.load(name, dtype=torch.float32) for name in ("python-8m", "python-1m")], zoo.load_tokenizer("python-8m")
    prompts = [tokenizer(text)["input_ids"][:24] for text in zoo.prompts("audit")] * 2
    sampled: dict[str, object] = {"do_sample": True, "temperature": 1.0, "top_k": 0}
    for sampling, rule, margin in ((sampled, "rejection", 0.08), ({"do_sample": False}, "match", 0.02)):
        speculator = Speculator(models[0], DraftModel(models[1]), shape="chain(4)", rule=rule, execution="eager", self_test=False)
        output = speculator.generate(**pad(prompts, "cpu"), max_new_tokens=40, seed=5, **sampling)
        written = [[*prompt, *line] for prompt, line in zip(prompts, output.sequences[:, max(map(len, prompts)) :].tolist())]
        found = [alpha.compare(*models, "", ids, len(prompt), sampling) for ids, prompt in zip(written, prompts)]
        report = alpha.report_of(found, known_costs(pass_=1.0, level=0.1), sampled=sampling["do_sample"])
        forecast = report.sampled or report.greedy
        assert forecast.lengths[3] == pytest.approx(output.stats.acceptance_length, rel=margin)


def test_the_best_length_and_the_speed_are_the_formulas():
    """With every token accepted with probability α and a draft of c passes: (1 - α^(γ + 1)) / ((1 - α) (1 + γ c))."""
    found = [Compared("all", 1, np.full(2000, 0.8), np.full(2000, 0.5)) for _ in range(3)]
    report = alpha.report_of(found, known_costs(pass_=0.02, level=0.002), sampled=True)
    speeds = [(1 - 0.8 ** (length + 1)) / (0.2 * (1 + 0.1 * length)) for length in range(1, 13)]
    assert report.sampled is not None and report.sampled.speedups == pytest.approx(speeds, rel=5e-3)
    assert report.sampled.best == 1 + int(np.argmax(speeds)) and report.greedy.best < report.sampled.best
    assert report.sampled.speedup.low == pytest.approx(report.sampled.speedup.value) and report.c == pytest.approx(0.1)
    assert [(each.name, each.tokens) for each in report.positions[:2]] == [("1–15", 45), ("16–63", 144)]
    dear = alpha.report_of(found, known_costs(pass_=0.02, level=0.03), sampled=True)
    assert (dear.sampled and dear.sampled.best, dear.greedy.best, dear.greedy.speedup.value) == (0, 0, 1.0)
    lines = alpha.answer(Setting(Configuration(TARGET), DRAFT, [], {}, 9, 9), dear)
    assert "drafting does not pay" in lines[1] and not any("write" in line for line in lines)


def test_greedy_alone_where_the_temperature_is_0(quick: None, tmp_path: Path):
    data = written(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    result = cli("--target", DRAFT, "--draft", DRAFT, "--data", data, "--temperature", 0, "--threads", 1)
    assert result.exit_code == 0, result.output
    assert "α" not in result.stdout and "greedy" in result.stdout and "1.000" in result.stdout and "sampled" not in result.stdout


def test_what_a_model_wrote_counts_without_its_prompts(quick: None, tmp_path: Path):
    model, tokenizer = zoo.load("python-1m"), zoo.load_tokenizer("python-1m")
    prompts = [tokenizer(text)["input_ids"][:6] for text in TEXTS]
    generate(model, prompts, Answering(max_new_tokens=9), tmp_path / "answers", source={})
    result = cli(
        "--target", DRAFT, "--draft", DRAFT, "--data", tmp_path / "answers", "--limit", 1, "--threads", 1, "--json", tmp_path / "o.json"
    )
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "o.json").read_text())
    assert document["whole"]["texts"] == 1 and document["whole"]["tokens"] <= 9 and document["left_out"] == 1
    assert "1 text left out: beyond --limit 1" in result.stdout


def test_texts_and_their_categories(tmp_path: Path):
    lines = [{"text": "a b", "kind": "one"}, {"messages": [{"role": "user", "content": "x"}]}]
    plain = tmp_path / "letter.txt"
    plain.write_text("dear x")
    found = read_texts([written(tmp_path / "some.jsonl", lines), plain, tmp_path], "kind")
    assert found[0] == Text("one", "a b") and found[1].category == "some" and found[2] == Text("letter", "dear x")
    assert found[3] == Text(tmp_path.name, tmp_path)
    with pytest.raises(ConfigurationError, match="line 1: expected an object with"):
        read_texts([written(tmp_path / "bad.jsonl", [{"turns": ["x"]}])], "kind")
    with pytest.raises(ConfigurationError, match="there is no text in"):
        read_texts([written(tmp_path / "none.jsonl", [])], "kind")


def test_no_text_is_long_enough(tmp_path: Path):
    result = cli("--target", DRAFT, "--draft", DRAFT, "--data", written(tmp_path / "a.jsonl", [{"text": "x"}]), "--threads", 1)
    assert result.exit_code == 2 and "no text has two tokens" in result.stderr


def test_the_report_says_what_it_left_out():
    found = [Compared(name, 1, np.full(30, 0.5), np.full(30, 0.5)) for name in ("code", "chat")]
    report = alpha.report_of(found, known_costs(pass_=0.02, level=0.002), sampled=True, left_out=7)
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(alpha.report(Setting(Configuration(TARGET), DRAFT, [], {"do_sample": True, "temperature": 1.0}, 9, 9), report))
    text = console.export_text()
    assert "2 texts, 60 tokens, temperature 1.0" in text and "7 texts left out" in text and "category" in text and "16–30" in text


# -- a draft with another tokenizer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "draft"), [("byte-level", "unigram"), ("unigram", "byte-level"), ("byte-level", "wordpiece")])
def test_one_pass_says_what_a_draft_with_another_tokenizer_says_after_every_beginning(target: str, draft: str):
    drafter = DraftModel(vocabularies.model(draft, 1), tokenizer=vocabularies.tokenizer(draft), execution="eager")
    own = vocabularies.tokenizer(target)
    made = Speculator(vocabularies.model(target), drafter, tokenizer=own, execution="eager", shape="chain(1)")
    assert drafter.foreign is not None and made.drafter is drafter
    ids = own("def area(width, height):\n    return width * caf\u00e9 # \U0001f642 the end, 6789")["input_ids"]
    for first in (1, 5):
        found = alpha.in_other_tokens(drafter.model, drafter.foreign, ids, first)
        reading, rewritten = Reading(drafter.foreign.vocabularies, StandIn(0, ids[:first], len(ids))), 0
        for place, line in enumerate(found, first):
            before = list(reading.ids)
            reading.follow(ids[:place])
            rewritten += reading.ids[: len(before)] != before
            if reading.behind:
                assert not line.isfinite().any()
                continue
            said = drafter.model.model(torch.tensor([reading.ids])).logits[0, -1].detach()
            torch.testing.assert_close(line, drafter.foreign.intersection.scattered(said.float()), atol=1e-4, rtol=1e-4)
        assert rewritten or draft == "wordpiece"  # else a line of tokens would do


@pytest.fixture
def other(tmp_path: Path) -> tuple[object, ...]:
    """Arguments for a draft with another tokenizer."""
    for kind in ("byte-level", "unigram"):
        vocabularies.model(kind).save_pretrained(tmp_path / kind)
        vocabularies.tokenizer(kind).save_pretrained(tmp_path / kind)
    data = written(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    return "--target", tmp_path / "byte-level", "--draft", tmp_path / "unigram", "--data", data, "--threads", 1


@pytest.mark.parametrize("enough", [0.0, 2.0])
def test_a_run_with_another_tokenizer(other: tuple[object, ...], enough: float, monkeypatch: pytest.MonkeyPatch):
    """What is timed and written down drafts as it was compared, also where another vocabulary would be chosen."""
    timed = []

    def measured(speculator: Speculator) -> CostModel:
        assert isinstance(speculator.drafter, DraftModel) and speculator.drafter.foreign is not None
        timed.append(speculator.drafter.foreign.by)
        return known_costs(pass_=1.0, level=0.01)

    monkeypatch.setattr(alpha, "measured", measured)
    monkeypatch.setattr("foredraft.drafters.foreign.ENOUGH", enough)
    result = cli(*other)
    assert result.exit_code == 0 and timed == ["intersection"], result.output
    assert "the target knows" in result.stdout and "of the draft's tokens" in result.stdout
    assert "--drafter-option vocabulary=intersection" in result.stdout and "cut" not in result.stdout


def test_texts_beyond_the_context_of_a_draft_with_another_tokenizer_are_cut(quick: None, other: tuple[object, ...], tmp_path: Path):
    config, out, found = tmp_path / "unigram" / "config.json", tmp_path / "out.json", []
    for context in (512, 40):
        config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": context}))
        result = cli(*other, "--length", 40, "--json", out)
        assert result.exit_code == 0, result.output
        found.append(json.loads(out.read_text()))
    assert "2 texts cut where the draft's context ends" in result.stdout
    assert [each["cut"] for each in found] == [0, 2] and 0 < found[1]["whole"]["tokens"] < found[0]["whole"]["tokens"]
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 2}))
    result = cli(*other)
    assert result.exit_code == 2 and "no text fits the draft's context" in " ".join(result.stderr.split())


def test_a_draft_that_only_takes_chains_is_refused_before_anything_is_measured(other: tuple[object, ...], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("foredraft.target.passes.Passes.chains_only", "it is recurrent")
    monkeypatch.setattr(alpha, "measured", None)
    result = cli(*other)
    assert result.exit_code == 2 and "another tokenizer: it is recurrent" in " ".join(result.stderr.split())
