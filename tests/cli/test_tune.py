"""``foredraft tune``: what it prints, writes and draws, and what it refuses."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from foredraft import zoo
from foredraft.cli import app, tune
from foredraft.cli.tune import Candidate, Contender, Setting, Tuning
from foredraft.errors import ConfigurationError
from foredraft.stats import Stats

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
    low=1.3,
    high=1.45,
    acceptance_length=2.2,
    batches=2,
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
    assert "nodes per row" not in result.stdout
    words = [line.split()[0] for line in result.stdout.splitlines() if line.strip()]
    assert words[:3] == ["drafter", "none", "prompt-lookup"] and words[3] == "write" and {"gain", "sure"} < set(words)
    document = json.loads((tmp_path / "out.json").read_text())
    (found,) = document["candidates"]
    assert document["complete"] is True and document["pick"]["drafter"] == found["drafter"] and document["pick"]["shape"] == found["pick"]
    assert document["pick"]["command"] in result.stdout and found["low"] <= found["measured"] <= found["high"]
    assert found["choices"]["chain(0)"] == 1 and found["predicted"] == max(found["choices"].values())
    assert found["costs"] == sorted(found["costs"]) and found["measured"] == pytest.approx(found["plain"] / found["speculative"])
    assert len(list((tmp_path / "cache" / "profiles").iterdir())) == 1


@pytest.mark.parametrize(("runs", "compared"), [(3, False), (4 * 2 + 3, True)])
def test_what_was_measured_before_ctrl_c_is_shown_and_written(quick, tmp_path, monkeypatch, runs: int, compared: bool):
    """On two prompts: two runs of the drafter alone, then both sides on each prompt, first to warm up; the last repeat is cut short."""
    monkeypatch.setattr(tune, "REPEATS", 3)
    given, time = [], Tuning._time

    def timed(self, *arguments):
        if len(given) == runs:
            raise KeyboardInterrupt
        given.append(arguments)
        return time(self, *arguments)

    monkeypatch.setattr(Tuning, "_time", timed)
    result = cli("--target", "zoo:python-1m", "--drafter", "prompt-lookup", "--json", tmp_path / "out.json", "--threads", 1)
    assert result.exit_code == 130 and "interrupted" in result.stderr, result.output
    document = json.loads((tmp_path / "out.json").read_text())
    (found,) = document["candidates"]
    assert document["complete"] is False and found["drafter"] == "prompt-lookup" and found["choices"]["chain(0)"] == 1
    assert ("measured" in found) == ("write " in result.stdout) == (document["pick"] is not None) == compared
    assert ("none was measured" in result.stdout) == (not compared)


def test_the_report_names_the_pick_and_sets_measured_against_predicted():
    other = Candidate(**{**vars(CANDIDATE), "drafter": "prompt-lookup", "pick": "chain(0)", "predicted": 1.0, "speculative": 0.011})
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(tune.report(Setting("model"), [CANDIDATE, other], verbose=True))
    text = console.export_text()
    assert "chain(3): measured 1.38× plain decoding" in text and "measured over predicted 0.98" in text
    assert "zero drafting: nothing pays here" in text
    assert text.count("← pick") == 2


def said(*found, spread=1.0, **setting):
    return tune.answer(Setting("org/model", **setting), found, spread)


def test_the_answer_says_what_to_write_how_much_it_gains_and_how_sure_that_is():
    command, python, gain, sure = said(CANDIDATE, dtype="bfloat16", threads=2)
    assert command == (
        "write   foredraft generate --target org/model --drafter draft-model:small --shape 'chain(3)' "
        '--dtype bfloat16 --temperature 0 --threads 2 "PROMPT"'
    )
    assert python.strip() == 'foredraft.Speculator("org/model", drafter="draft-model:small", shape="chain(3)", dtype="bfloat16")'
    assert gain == "gain    1.38× plain decoding, 95 % interval 1.30 to 1.45" and sure == "sure    yes"
    assert "no, the interval includes 1" in said(replace(CANDIDATE, low=0.9))[3]
    assert "no, a single batch of texts tells nothing of others" in said(replace(CANDIDATE, batches=1))[3]
    assert "ngram may be as fast (1.34×)" in said(CANDIDATE, replace(CANDIDATE, drafter="ngram", speculative=0.0082))[3]


def test_where_nothing_pays_it_says_to_decode_plainly():
    command, python, gain, sure = said(replace(CANDIDATE, pick="chain(0)", speculative=0.0111))
    assert "--drafter none" in command and 'drafter="none"' in python and "drafting does not pay here" in gain and sure == "sure    yes"


def test_a_noisy_machine_is_said():
    assert said(CANDIDATE, spread=1.9)[-1].startswith("noise   the machine was too noisy: the same plain decoding took up to 1.9 times")


def test_the_picture_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    tune.draw(tmp_path / "out.png", Setting("model"), [CANDIDATE])
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_costs_no_figures(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(tune, "Tuning", lambda setting, progress: SimpleNamespace(run=lambda: [CANDIDATE], spread=1.0, complete=True))
    result = cli("--target", "zoo:python-1m", "--plot", tmp_path / "out.nope")
    assert result.exit_code == 2 and "cannot write" in result.stderr and "1.38× plain decoding" in result.stdout


def test_texts_that_end_at_once_are_said():
    with pytest.raises(ConfigurationError, match="model ends every text at once; give other --prompts"):
        Tuning._candidate(SimpleNamespace(setting=Setting("model")), Contender("suffix", None, kept=[Stats()]))


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
