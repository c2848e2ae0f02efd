"""The heads suite: what is compared, what explains a difference, and what the report claims. vLLM is played by ourselves here."""

from __future__ import annotations

import json
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
from helpers import eagle3_head, prompts, taught_head, tiny

from benchmarks import heads
from benchmarks.heads import Case, Compared, Heads, Settings, Text, compared, decoded
from benchmarks.peer_process import PeerError
from foredraft import ConfigurationError
from foredraft.heads import checkpoints
from foredraft.loading import load_model

TOKENS = 12


@cache
def trained():
    return {"medusa": taught_head("medusa", steps=8, heads=3), "eagle3": eagle3_head()}


class Itself:
    """Answers as vLLM's adapter does, with what Foredraft decodes from the exported folder."""

    def __init__(self, folder: Path, target: Path, length: int):
        self.model = load_model(str(target), dtype="float32")
        self.model.generation_config.eos_token_id = None
        self.head, self.length = checkpoints.load(folder, self.model), length

    def ask(self, op, *, limit, name, ids, tokens, temperature, seed):
        side = decoded(self.model, self.head, ids[0], f"chain({self.length})", tokens)
        begins = sorted(side.drafts)
        gained = [end - begin for begin, end in zip(begins, [*begins[1:], tokens])]
        drafts = [[*side.drafts[begin], *[0] * self.length][: self.length] for begin in begins]  # it drafts past the end of a row
        return {"ids": [list(side.ids)], "rounds": side.rounds, "kept": side.kept, "drafts": drafts, "gained": gained}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "target"
    tiny().save_pretrained(folder)
    return folder


@pytest.fixture
def begin(tmp_path: Path, target: Path, monkeypatch):
    """A run of both kinds of heads, with ``peer(folder, target, length)`` in vLLM's place."""

    def run(peer=Itself) -> Heads:
        given = [f"{kind}:{checkpoints.save(head, tmp_path / kind)}" for kind, head in trained().items()]
        settings = Settings(
            targets=(str(target),), heads=tuple(given), dtypes=("float32",), length=3, tokens=TOKENS, threads=1, work_path=tmp_path / "work"
        )
        made = Heads(settings)

        @contextmanager
        def engine(case, checkpoint, exported, length):
            made.versions["vllm"] = "played"
            yield peer(exported, checkpoint.path, length)

        monkeypatch.setattr(made, "_engine", engine)
        monkeypatch.setattr(made, "_texts", lambda checkpoint: [(f"p{n}", ids) for n, ids in enumerate(prompts((20,)))])
        made.run()
        return made

    return run


def document(run: Heads) -> dict:
    environment = {
        "packages": dict.fromkeys(("foredraft", "torch", "transformers"), "0"),
        "dirty": False,
        "commit": "c",
        "python": "3",
        "cpu": "x",
    }
    environment |= {"cpu_capability": "y", "cores": 2, "threads": 1, "device": "cpu", "load": 0, "date": "today"}
    made = json.loads(json.dumps(run.document(command="heads", environment=environment), allow_nan=False))
    assert Heads.read(made).report(made).markdown() == run.report(made).markdown()
    return made


def test_the_same_heads_on_both_sides_are_the_same_draft_by_draft(begin):
    run = begin()
    assert not run.failures and len(run.prompts) == 2
    for each in run.prompts:
        assert each.parted is None and each.alike == each.shared >= each.ours.rounds - 1  # the last round may have room for none
        assert each.difference == "none: every draft is the same"
        assert each.ours.kept == TOKENS - 1 and each.tree.rounds <= each.ours.rounds
    found = document(run)
    assert [each["verdict"] for each in found["figures"]] == ["met"] * 4 and found["versions"] == {"vllm": "played"}
    assert all(found["trees"].values()) and len(found["prompts"]) == 2
    assert [table.title for table in run.tables()] == ["Figures to reach", "Acceptance length", "By prompt: acceptance length (rounds)"]


def test_a_peer_that_drafts_something_else_is_found_out(begin):
    class Other(Itself):
        def ask(self, op, **options):
            found = super().ask(op, **options)
            return {**found, "drafts": [[(token + 1) % 128 for token in draft] for draft in found["drafts"]], "rounds": found["rounds"] * 2}

    run = begin(Other)
    assert all(each.alike == 0 < each.shared and "drafts in the same place differ" in each.difference for each in run.prompts)
    assert [each.verdict for each in run.figures()] == ["missed"] * 4


def test_a_peer_that_fails_is_a_failure_and_no_figure(begin):
    class Broken(Itself):
        def ask(self, op, **options):
            raise PeerError("it was ended")

    run = begin(Broken)
    assert [each.message for each in run.failures] == ["it was ended"] * 2 and not run.prompts
    assert [each.verdict for each in run.figures()] == ["not measured"] * 4
    assert run.tables()[-1].rows == [(each.name, "it was ended") for each in run.cases] and document(run)["failures"]


def case() -> Case:
    return Case("zoo:python-8m", "medusa", "float32")


def made(ids, drafts, rounds=2) -> Text:
    return Text(rounds, len(ids) - 1, tuple(ids), drafts)


def against(ours: Text, theirs: Text) -> Compared:
    return compared(case(), "p", prompts((10,))[0], tiny(), ours, theirs, ours)


def test_texts_that_part_are_compared_up_to_there():
    ids = prompts((10,))[0]
    with torch.no_grad():
        logits = tiny()(torch.tensor([[*ids, 5, 6]])).logits[0, -1]
    ours, theirs = made((5, 6, 7, 8), {1: (6,), 3: (8,)}), made((5, 6, 9, 8), {1: (6,), 2: (1,), 3: (8,)})
    found = against(ours, theirs)
    assert (found.parted, found.shared, found.alike) == (2, 1, 1)
    assert found.gap == pytest.approx(float((logits[7] - logits[9]).abs()), rel=1e-4) and "texts differ from token 2 on" in found.difference


def test_counts_that_nothing_explains_are_said_to_be():
    one, other = made((5, 6), {1: (6,)}, rounds=1), made((5, 6), {1: (6,)}, rounds=2)
    assert "not explained" in against(one, other).difference
    assert against(one, made((5, 6), {1: (6, 9)}, rounds=1)).difference.startswith("none")  # past the end nobody asks


def test_settings_name_what_vllm_has():
    with pytest.raises(ConfigurationError, match="vLLM has medusa and eagle3 heads; 'hydra' is none"):
        Settings(heads=("hydra",))
    assert case().source == "zoo:python-8m-medusa" and Case("t", "medusa:here/it:is", "float32").source == "here/it:is"
    assert heads.usual_tree(4) == "product(3,2,1,1)" and heads.usual_tree(1) == "product(3)"
