"""``foredraft tune``: what it prints, writes and draws, and what it refuses."""

from __future__ import annotations

import json
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

from foredraft import zoo
from foredraft.cli import app, tune
from foredraft.cli.tune import Candidate, Setting

CANDIDATE = Candidate(
    drafter="draft-model:small",
    rule="traversal",
    costs=[0.010 + 0.001 * nodes for nodes in range(13)],
    draft=[0.001 * length for length in range(1, 9)],
    acceptance=[0.8] * 8,
    available=1.0,
    choices={f"chain({length})": 1 + 0.2 * length - 0.03 * length**2 for length in range(13)},
    pick="chain(3)",
    predicted=1.4,
    plain=0.011,
    speculative=0.008,
    acceptance_length=2.2,
)


def cli(*arguments):
    return CliRunner().invoke(app, ["tune", *map(str, arguments)], prog_name="foredraft")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """Fewer tokens and repeats, and a cache of its own."""
    for name, value in (("NEW", 10), ("TRIALS", 1), ("REPEATS", 1)):
        monkeypatch.setattr(tune, name, value)
    prompts = zoo.prompts("audit")[:2]
    monkeypatch.setattr(zoo, "prompts", lambda name: prompts)
    monkeypatch.setattr("foredraft.planning.planner.BUDGET", 0.2)
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))


def test_help():
    result = cli("--help")
    assert result.exit_code == 0 and "--plot" in result.stdout and "--batch-size" in result.stdout


def test_a_run_on_the_embedded_models(quick, tmp_path):
    result = cli("--target", "zoo:python-1m", "--drafter", "prompt-lookup", "--json", tmp_path / "out.json", "--threads", 1)
    assert result.exit_code == 0, result.output
    assert "nodes per row" in result.stdout and "predicted" in result.stdout and "← pick" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("pick: --drafter ")
    document = json.loads((tmp_path / "out.json").read_text())
    (found,) = document["candidates"]
    assert document["pick"] == {"drafter": found["drafter"], "shape": found["pick"]}
    assert found["choices"]["chain(0)"] == 1 and found["predicted"] == max(found["choices"].values())
    assert found["costs"] == sorted(found["costs"]) and found["measured"] == pytest.approx(found["plain"] / found["speculative"])
    assert len(list((tmp_path / "cache" / "profiles").iterdir())) == 1


def test_the_report_names_the_pick_and_sets_measured_against_predicted():
    other = Candidate(**{**vars(CANDIDATE), "drafter": "prompt-lookup", "pick": "chain(0)", "predicted": 1.0, "speculative": 0.011})
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(tune.report(Setting("model"), [CANDIDATE, other]))
    text = console.export_text()
    assert "chain(3): measured 1.38× plain decoding" in text and "measured over predicted 0.98" in text
    assert "zero drafting: nothing pays here" in text
    assert text.rstrip().endswith("pick: --drafter draft-model:small --shape 'chain(3)'")
    assert text.count("← pick") == 2


def test_the_picture_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    tune.plotter()(tmp_path / "out.png", Setting("model"), [CANDIDATE])
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = cli("--plot", "out.png")
    assert result.exit_code == 2 and "pip install 'foredraft[plot]'" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "zoo:python-1m", "--drafter", "nonsense"], "unknown drafter 'nonsense'"),
        (["--target", "zoo:nothing"], "zoo:nothing"),
        (["--target", "zoo:python-1m", "--prompts", "/no/such/file"], "cannot read"),
    ],
)
def test_what_cannot_work_is_refused(arguments, message):
    result = cli(*arguments)
    assert result.exit_code == 2 and message in result.output.replace("\n", " ")
