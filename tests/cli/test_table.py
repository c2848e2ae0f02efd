"""``foredraft table``: against drafts of known α on a clock of its own, the forms that it writes, and what it refuses."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vocabularies
from helpers import known_costs
from typer.testing import CliRunner

from foredraft import theory, verification
from foredraft.cli import app, table
from foredraft.cli.settings import Contest
from foredraft.cli.table import Cell, Way
from foredraft.cli.theory import read_cells
from foredraft.errors import ConfigurationError
from foredraft.planning import Round
from foredraft.planning.teacher_forced import Share
from foredraft.rows import RowParameters
from foredraft.session import Session
from foredraft.shapes import TreeShape
from foredraft.stats import Stats
from foredraft.testing import ProbabilityTable, ScriptedDrafter, TableTarget

PASS, C = 0.01, 0.125  # seconds of a pass, and of a drafted token over these
P, Q = (0.5, 0.5), (0.7, 0.3)  # α is their overlap, 0.8
SETTING = table.Setting(Contest("t"), ["t"], {}, [1.0], [3], None, tokens=40, repeats=2)
CELL = Cell(
    target="a_b",
    draft="draft-model:d",
    task="code",
    temperature=1.0,
    gamma=3,
    rule="rejection",
    alpha=Share(0.8, 0.75, 0.85),
    c=0.1,
    c_operations=0.02,
    tokens_per_pass=2.9,
    speedup=Share(2.2, 2.0, 2.4),
    predicted=2.27,
    predicted_by_costs=2.1,
    operations=1.4,
    predicted_operations=1.37,
    best=True,
)


def cli(*arguments):
    return CliRunner().invoke(app, ["table", *map(str, arguments)], prog_name="foredraft")


class TimedTarget(TableTarget):
    """On a clock of its own a pass takes as long as any other."""

    now = 0.0

    def score(self, tree, *, first=0):
        self.now += PASS
        return super().score(tree, first=first)


class TimedDrafter(ScriptedDrafter):
    def draft(self, request):
        self.target.now += C * PASS * max(request.limits)
        return super().draft(request)

    def bind(self, target):
        self.target = target


def scripted(target: TimedTarget) -> Any:
    """What a way needs of a Speculator, on tables."""
    drafter = TimedDrafter(ProbabilityTable(lambda context: Q, 2, order=1))
    drafter.bind(target)  # type: ignore[arg-type]

    def generate(input_ids, *, max_new_tokens, do_sample, seed, **others):
        loop = (target, drafter, verification.create("rejection"))
        session = Session(*loop, proposal="iid", planner=speculator.planner, keep_stats=True, stats=Stats(started=target.now))  # type: ignore[arg-type]
        session.add(
            input_ids[0].tolist(), RowParameters(max_new_tokens=max_new_tokens, do_sample=do_sample, seed=(seed, len(input_ids[0])))
        )
        while session.live:
            session.step()
        return SimpleNamespace(stats=session.stats)

    speculator = SimpleNamespace(drafter=drafter, generate=generate, planner=None, model=torch.nn.Linear(2, 2))
    return speculator


def test_a_draft_of_known_acceptance_on_a_clock_of_its_own(monkeypatch: pytest.MonkeyPatch):
    target = TimedTarget(ProbabilityTable(lambda context: P, 2, order=1))
    monkeypatch.setattr(time, "perf_counter", lambda: target.now)
    prompts = [{"input_ids": torch.ones(1, length, dtype=torch.long)} for length in range(3, 7)]
    plain, way = Way("plain", 0, scripted(target)), Way("scripted", 3, scripted(target))
    table.take_turns([plain, way], prompts, SETTING, 1.0)
    cell = table.cell_of(way, plain, known_costs(pass_=PASS, level=9.0), "t", "code", 1.0)  # rounds say what such a draft costs
    assert [len(runs) for runs in way.seconds] == [2] * 4 and plain.seconds[0] == pytest.approx([PASS] * 2)
    assert cell.c == pytest.approx(C) and cell.alpha.low < cell.alpha.value < cell.alpha.high
    rounds = [each for own in way.rounds for each in own]
    assert cell.tokens_per_pass == pytest.approx(sum(1 + each.accepted[0] for each in rounds) / len(rounds), rel=0.01)
    assert cell.predicted == pytest.approx(theory.speedup(cell.alpha.value, 3, C)) == pytest.approx(cell.predicted_by_costs, rel=1e-4)
    assert cell.predicted_operations == pytest.approx(theory.operations(cell.alpha.value, 3, 0)) and cell.c_operations == 0
    assert cell.alpha.low < 0.8 < cell.alpha.high and cell.alpha.value == pytest.approx(0.8, abs=0.05)
    assert cell.speedup.value == pytest.approx(theory.speedup(0.8, 3, C), rel=0.1) and cell.speedup.low < cell.speedup.value
    assert cell.operations == pytest.approx(theory.operations(0.8, 3, 0), rel=0.1) and (cell.rule, cell.gamma) == ("", 3)


def test_acceptance_is_of_what_was_asked_for():
    def done(asked: int, drafted: int, accepted: int) -> Round:
        return Round(TreeShape.chain(asked), [asked], [[1] * drafted], [accepted], 1 + drafted, 9, 0.0, 0.0, 0.0)

    first = [done(3, 3, 3), done(3, 3, 1), done(3, 0, 0), done(0, 0, 0)]  # misses: none, one, one; no room
    assert table.acceptance([first]) == Share(4 / 6, None, None)
    share = table.acceptance([first, [done(2, 2, 2)], [done(0, 0, 0)]])
    assert share.value == 6 / 8 and share.low is not None


def test_costs_of_rounds_without_a_draft_are_those_of_plain_rounds():
    rounds = [Round(TreeShape.chain(3), [3], [[1] * count], [0], 1.0, 16, 0.0, 0.0, 0.0) for count in (3, 0)]
    costs = known_costs(pass_=PASS, level=C * PASS)
    for size in (4, 13):
        costs.target.measured(1, size, 2 * PASS)
    seconds = (PASS + 2 * PASS) / 2 + 3 * C * PASS
    assert table.by_costs(0.5, 3, rounds, costs) == pytest.approx(theory.expected_tokens(0.5, 3) * PASS / seconds, rel=1e-3)
    assert table.by_costs(0.0, 3, rounds[1:], costs) == 1.0


def test_a_star_where_drafting_pays():
    slow, fast = replace(CELL, speedup=Share(0.9, 0.8, 1.0)), replace(CELL, speedup=Share(1.4, 1.2, 1.5))
    assert [each.best for each in table.starred([slow, fast])] == [False, True]
    assert [each.best for each in table.starred([slow, slow])] == [False, False]


def test_forms(tmp_path: Path):
    head, rule, line = table.markdown([CELL]).splitlines()
    assert head.startswith("| target | draft | task | T | γ | α |") and rule.count("---:") == 11
    assert line.startswith(
        "| a_b | draft-model:d | code | 1 | 3 | 0.800 | 0.750 to 0.850 | 0.100 | 2.20× ★ | 2.00 to 2.40 | 2.27× | 2.10× |"
    )
    text = table.latex([CELL])
    assert text.startswith(r"\begin{tabular}{lllrrrrrrrrrrr}") and text.endswith("\\end{tabular}\n")
    assert r"a\_b & draft-model:d & code & 1 & 3 & 0.800" in text and r"2.20$\times$ $\star$" in text and r"95 \%" in text
    assert all(line.count(" & ") == 13 for line in text.splitlines() if line.endswith(r"\\"))
    out = tmp_path / "table.json"
    out.write_text(json.dumps(table.document(SETTING, [CELL])))
    (point,) = read_cells(out)
    assert (point.alpha, point.speedup, point.gamma, point.operations) == (0.8, 2.2, 3, 1.4)
    assert json.loads(out.read_text())["cells"] == [asdict(CELL)]


def test_names_in_latex():
    """In the order of the text: what LaTeX would read as a command, or print as something else."""
    line = table.latex([replace(CELL, target=r"~/a^b\c{d}$", task="<x|y>")]).splitlines()[4]
    assert line.startswith(r"$\sim$/a\^{}b$\backslash$c\{d\}\$ & draft-model:d & $<$x$|$y$>$ & ")


def test_a_rule_that_does_not_fit_a_draft_is_left_to_others():
    def rule(asked: str | None, *proposals: str) -> str:
        drafter: Any = SimpleNamespace(proposals_for=lambda shape: proposals)
        return table.rule_of(replace(SETTING, rule=asked), drafter, 3)

    assert [rule(each, "iid", "keyed") for each in (None, "block", "match", "auto")] == ["rejection", "block", "match", "auto"]
    assert [rule(each, "deterministic") for each in (None, "block", "match", "auto")] == ["auto", "auto", "match", "auto"]


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (ConfigurationError("ends every text"), 2)])
def test_what_was_measured_is_kept(error: BaseException, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def run(setting: Any, progress: Any):
        yield [CELL]
        raise error

    monkeypatch.setattr(table, "run", run)
    files = {name: tmp_path / f"o.{name}" for name in ("json", "markdown", "latex")}
    result = cli("--target", "zoo:python-1m", *(part for name, path in files.items() for part in (f"--{name}", path)))
    assert result.exit_code == code and "2.20×" in result.stdout
    document = json.loads(files["json"].read_text())
    assert document["cells"] == [asdict(CELL)] and document["complete"] is False
    assert files["markdown"].read_text() == table.markdown([CELL]) and files["latex"].read_text() == table.latex([CELL])


def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two tasks, a draft model and the bigram, greedy and sampled, on a tiny model."""
    monkeypatch.setattr("foredraft.cli.table.measured", lambda speculator, most: known_costs(pass_=PASS, level=C * PASS))
    vocabularies.model("byte-level").save_pretrained(tmp_path / "model")
    vocabularies.tokenizer("byte-level").save_pretrained(tmp_path / "model")
    for task in ("one", "two"):
        (tmp_path / f"{task}.txt").write_text(f"def {task}(width):\nleft out\n")
    tasks = ["--task", tmp_path / "one.txt", "--task", tmp_path / "two.txt", "--limit", 1]
    drafts = ["--drafter", f"draft-model:{tmp_path / 'model'}", "--gamma", 2]
    files = ["--json", tmp_path / "o.json", "--markdown", tmp_path / "o.md", "--latex", tmp_path / "o.tex"]
    result = cli("--target", tmp_path / "model", *tasks, *drafts, *files, "--max-new-tokens", 8, "--repeats", 1, "--threads", 1)
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "o.json").read_text())
    cells = document["cells"]
    assert document["complete"] is True
    assert [(each["task"], each["temperature"]) for each in cells] == [(t, k) for t in ("one", "two") for k in (0, 1) for _ in range(2)]
    assert [each["draft"].partition(":")[0] for each in cells[:2]] == ["draft-model", "bigram"]
    assert [each["rule"] for each in cells[:4]] == ["match", "match", "rejection", "rejection"]
    own = [each for each in cells if each["draft"].startswith("draft-model")]
    assert all(each["alpha"]["value"] == 1 and each["c_operations"] == 1 for each in own)
    assert all(each["speedup"]["low"] is None for each in cells), "one run has no interval"
    assert (tmp_path / "o.md").read_text().count("\n") == 10 and "bigram" in result.stdout and "bigram" in (tmp_path / "o.tex").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--target zoo:nope", "no embedded model 'zoo:nope'"),
        ("--target zoo:python-8m --drafter sufix", "did you mean 'suffix'?"),
        ("--target zoo:python-8m --rule rejecton", "did you mean 'rejection'?"),
        ("--target zoo:python-8m --rule typical", "rule 'typical' is lossy"),
        ("--target zoo:python-8m --task none.txt", "cannot read 'none.txt'"),
        ("--target zoo:python-8m --task empty.txt", "'empty.txt' contains no prompt"),
        ("--target zoo:python-8m --task some.txt --task other/some.txt", "two tasks are called 'some'"),
        ("--target zoo:python-8m --latex /none/out.tex", "there is no folder '/none'"),
        ("--target zoo:python-8m --gamma 0", "--gamma"),
        ("--target zoo:python-8m --drafter-option templte=x", "none of the drafters has an option 'templte', did you mean 'template'?"),
        ("--target zoo:python-8m --drafter suffix --drafter-option template=x", "none of the drafters has an option 'template'"),
        ("--target zoo:python-8m --drafter-option template=3", "template must be str or None, got 3"),
        ("--target zoo:t5-ast --drafter draft-model:zoo:python-1m --task some.txt", "--drafter-option 'template="),
    ],
)
def test_what_cannot_work_is_refused(arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    for name, text in (("empty.txt", "\n"), ("some.txt", "x"), ("other/some.txt", "y")):
        (tmp_path / name).write_text(text)
    result = cli(*arguments.split())
    assert result.exit_code == 2 and message in " ".join(result.output.split()), result.output


def test_drafter_options_go_to_the_drafters_that_have_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("foredraft.cli.table.measured", lambda speculator, most: known_costs(pass_=PASS, level=C * PASS))
    (tmp_path / "task.txt").write_text("x = f(a)\n")
    drafts = ["--drafter", "draft-model:zoo:python-1m", "--drafter", "prompt-lookup", "--drafter-option", "template={source}"]
    short = ["--gamma", 2, "--temperature", 0, "--max-new-tokens", 6, "--repeats", 1, "--threads", 1]
    result = cli("--target", "zoo:t5-ast", "--task", tmp_path / "task.txt", *drafts, *short, "--json", tmp_path / "o.json")
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "o.json").read_text())
    assert [each["draft"] for each in document["cells"]] == ["draft-model:zoo:python-1m", "prompt-lookup", "bigram"]
    assert document["drafter_options"] == {"template": "{source}"}


def test_texts_that_end_at_once_are_said():
    way = SimpleNamespace(rounds=[[]], speculator=SimpleNamespace(drafter=None), gamma=3)
    with pytest.raises(ConfigurationError, match="ends every text of task 'code' at once"):
        table.cell_of(way, way, known_costs(pass_=PASS, level=C * PASS), "t", "code", 0.0)  # type: ignore[arg-type]
