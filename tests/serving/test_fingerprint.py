"""The fingerprint stays as long as everything that a text depends on does, and changes with each of these."""

from __future__ import annotations

import copy
import json
import logging
import subprocess
import sys
from datetime import datetime
from inspect import getsource
from types import SimpleNamespace

import pytest
import torch
from architectures import build
from helpers import tiny
from kernel_cases import build as kernel_model
from kernel_cases import needs_kernels

from foredraft import ConfigurationError, Speculator
from foredraft.backends import choice, native
from foredraft.backends.packing import PLAIN, onednn_lays_out
from foredraft.drafters.draft_model import DraftModel
from foredraft.rows import RowParameters
from foredraft.serving.engine import Engine
from foredraft.serving.fingerprint import weights_digest
from foredraft.serving.settings import Settings
from foredraft.target import Target

PROGRAM = """
import torch
from helpers import tiny
from foredraft import Speculator
from foredraft.rows import RowParameters
from foredraft.serving.engine import Engine
from foredraft.serving.settings import Settings
torch.set_num_threads(1)
engine = Engine(Speculator(tiny().double(), "suffix", self_test=False, execution="eager"), Settings())
print(engine.fingerprint)
print(texts(engine))
"""


def texts(engine: Engine) -> list[list[int]]:
    """Of four seeds."""
    found: dict[int, list[int]] = {
        engine.session.add([3, 4, 5], RowParameters(max_new_tokens=30, do_sample=True, seed=(seed, 0))): [] for seed in range(4)
    }
    while engine.session.live:
        for commit in engine.session.step():
            found[commit.slot] += commit.tokens
    return [*found.values()]


def fingerprint(model=None, drafter="none", settings: Settings = Settings(), **options) -> str:  # noqa: B008
    speculator = Speculator(tiny() if model is None else model, drafter, **{"self_test": False, "execution": "eager", **options})
    try:
        return Engine(speculator, settings).fingerprint
    finally:
        speculator.close()


def test_it_is_the_same_after_a_restart_and_with_any_drafter():
    torch.set_num_threads(1)
    model = build("llama", "sdpa").double()  # its own, as saving a model changes its configuration; for float64 no kernels are compiled
    found = fingerprint(model)
    assert found == fingerprint(model, drafter="prompt-lookup", shape="chain(3)")
    paths = [path for path in sys.path if path.endswith(("support", "src"))]
    again = subprocess.run(
        [sys.executable, "-c", f"from __future__ import annotations\nimport sys; sys.path[:0] = {paths}\n{getsource(texts)}{PROGRAM}"],
        capture_output=True,
        text=True,
        check=True,
    )
    told, written = again.stdout.strip().split("\n")
    assert told == found
    speculator = Speculator(model, "prompt-lookup", self_test=False, execution="eager", shape="chain(3)")
    assert json.loads(written) == texts(Engine(speculator, Settings())) and len({*map(str, json.loads(written))}) == 4
    speculator.close()


def test_it_changes_with_all_that_a_text_depends_on(monkeypatch):
    def changed(change) -> str:
        model = copy.deepcopy(tiny())
        change(model)
        return fingerprint(model)

    def one_number(model) -> None:
        with torch.no_grad():
            next(model.parameters()).view(-1)[5] += 1e-3

    def swapped(model) -> None:
        with torch.no_grad():
            weight = next(model.parameters())
            weight[[3, 4]] = weight[[4, 3]].clone()

    found = [
        fingerprint(),
        changed(one_number),
        changed(swapped),
        changed(lambda model: model.double()),
        changed(lambda model: model.model.rotary_emb.inv_freq.mul_(1.01)),
        changed(lambda model: model.config.update({"rms_norm_eps": 1e-3})),
        changed(lambda model: model.generation_config.update(eos_token_id=7)),
        fingerprint(execution="packed"),
        fingerprint(drafter=DraftModel(tiny()), shape="chain(2)", rule="rejection"),
        fingerprint(drafter=DraftModel(tiny()), shape="chain(2)", settings=Settings(repeatable=False)),
        fingerprint(settings=Settings(chat_template="{{ messages }}")),
        fingerprint(settings=Settings(max_batch_tokens=20)),  # which cuts texts
    ]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    found.append(fingerprint())
    assert len(set(found)) == len(found), found


@needs_kernels
def test_it_covers_the_kernels(monkeypatch):
    """Their layouts, source, and the instructions that the CPU has and that the compiler used. It ends in -approx unless they compute
    everything, as the target's own test finds."""

    def computed(execution: str) -> str:
        return fingerprint(kernel_model("llama", torch.float32), execution=execution)

    exact, packed = computed("native"), computed("packed")
    assert exact == computed("native") and not exact.endswith("-approx") and packed.endswith("-approx")
    found = {exact, packed.removesuffix("-approx")}
    changes = [
        lambda patched: patched.setattr(native, "instructions", lambda dtype: f"less for {dtype}"),
        lambda patched: patched.setattr(native, "revision", lambda: "another"),
        lambda patched: patched.setattr(native, "cpu_flags", lambda: frozenset({"avx2"})),
    ]
    if onednn_lays_out(torch.float32):  # which comes first where it can
        changes.append(lambda patched: patched.setattr(choice, "HINTS", (PLAIN,)))
    for change in changes:
        with monkeypatch.context() as patched:
            change(patched)
            found.add(computed("packed").removesuffix("-approx"))
    assert len(found) == 2 + len(changes)
    plain = fingerprint()
    monkeypatch.setattr(native, "instructions", lambda dtype: "those of a draft model")
    assert fingerprint() == plain


def test_it_changes_with_a_cache_that_cuts_texts(monkeypatch):
    """One that holds the whole context does not, however large it is."""
    monkeypatch.setattr(Target, "batch_invariant", True, raising=False)
    how = {"self_test": True}  # without it there are no pages
    speculator = Speculator(tiny(), "none", execution="eager")
    page = sum(speculator.target.page_bytes)
    speculator.close()
    found = [fingerprint(cache_memory=size, **how) for size in (f"{page}B", "1GiB", "2GiB")]
    assert found[0] != found[1] == found[2]


def test_it_changes_with_the_day_where_the_chat_template_asks_for_that(monkeypatch):
    """And promises nothing where that reads the clock."""
    speculator = Speculator(tiny(), "none", self_test=False)
    monkeypatch.setattr(Target, "batch_invariant", True, raising=False)
    found: dict[str, list[str]] = {"plain": [], "date": [], "time": []}
    templates = {
        "plain": "{%for m in messages %}{{ m.content }}%H{% endfor %}",
        "date": "{%for m in messages %}{{ strftime_now('%d %b %Y') }}{% endfor %}{%if x %}{% endif %}",
        "time": "{% set form = '%H:%M' %}{{ strftime_now(form) }}",
    }
    engines = {name: Engine(speculator, Settings(chat_template=template)) for name, template in templates.items()}
    for day in (1, 2, 2):
        monkeypatch.setattr("foredraft.serving.fingerprint.datetime", SimpleNamespace(now=lambda day=day: datetime(2026, 1, day)))
        for name, engine in engines.items():
            found[name].append(engine.fingerprint)
    speculator.close()
    assert len(set(found["plain"])) == 1 and not found["plain"][0].endswith("-approx")
    assert found["date"][0] != found["date"][1] == found["date"][2] and not found["date"][0].endswith("-approx")
    assert all(each.endswith("-approx") for each in found["time"])


@pytest.mark.parametrize("execution", ["packed", "native"])
def test_packed_weights_are_read_as_they_were(execution):
    """A model that the Speculator owns has placeholders in place of most weights."""
    plain, packed = (Speculator(copy.deepcopy(tiny()), "none", self_test=False, execution=each) for each in ("eager", execution))
    expected = weights_digest(plain)
    packed.target._how["owned"] = packed.target.backend.overrides.owned = True
    packed.target.backend.overrides.unpack()
    packed.target.backend.overrides.pack()
    assert any(each.is_meta for each in packed.model.parameters())
    assert weights_digest(packed) == expected
    plain.close()
    packed.close()


def test_where_logits_depend_on_the_load_it_says_so_and_deterministic_refuses(caplog, monkeypatch):
    speculator = Speculator(tiny(), "none", self_test=False)
    for invariant in (True, False):
        monkeypatch.setattr(Target, "batch_invariant", invariant, raising=False)
        with caplog.at_level(logging.WARNING, "foredraft.serving"):
            caplog.clear()
            found = Engine(speculator, Settings()).fingerprint
        assert found.startswith("fp_") and found.endswith("-approx") != invariant and bool(caplog.records) != invariant
        if invariant:
            assert Engine(speculator, Settings(deterministic=True)).fingerprint == found
        else:
            with pytest.raises(ConfigurationError, match="--deterministic"):
                Engine(speculator, Settings(deterministic=True))
    speculator.close()
