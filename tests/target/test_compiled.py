"""Compiled layers: the same logits within rounding, no compiling once a target is built, and the model as it was afterwards.

How torch traces the layers does not depend on what compiles the traces, so most tests let nothing compile them (``traced``).
"""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config
from architectures import ARCHITECTURES, build
from helpers import alone, clone, generate, padded, perturbed, repetitive, tiny
from torch._dynamo.utils import counters
from tracing import trace

from foredraft import ConfigurationError, Speculator, TokenTree
from foredraft.backends import compilation, recorder
from foredraft.drafters.draft_model import DraftModel
from foredraft.target import Target

ROWS = repetitive((23, 9, 15))
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}
OTHERS = ["gemma3_text", "bloom", "gpt2", "gpt_oss", "cohere2", "ministral3", "qwen3_moe"]
NO_COMPILER = compilation._no_compiler()
needs_compiler = pytest.mark.skipif(NO_COMPILER is not None, reason=str(NO_COMPILER))


@pytest.fixture(scope="module")
def traced_once():
    """A Speculator for all tests that leave it as it is; its passes are all traced when it is built."""
    with pytest.MonkeyPatch.context() as patch:
        trace(patch)
        return Speculator(clone(tiny()), "prompt-lookup", shape="chain(3)", execution="compiled")


@pytest.fixture
def traced(monkeypatch):
    trace(monkeypatch)


def of(family, dtype=torch.float32):
    return clone(build(family, ARCHITECTURES[family].implementations[0])).to(dtype).eval()


def steps(target):
    """Passes of every sort: contexts short and long, single nodes, chains and trees, rows that stand alike and not, and commits."""
    found = []
    for lengths, parents in (
        ((10,), (-1,)), ((11,), (-1, 0, 1, 2, 3, 4)), ((20, 3), (-1, 0, 1)), ((30, 4, 9), (-1, 0, 0, 1, 1)), ((12,) * 3, (-1,)),
        ((33,), (-1, 0, 0, 0, 1, 2, 2)), ((90,), (-1,)), ((40, 30), (-1,)), ((17, 17), (-1, 0)),
    ):  # fmt: skip
        texts = [[3 + (7 * i + row) % 50 for i in range(length)] for row, length in enumerate(lengths)]
        target.open(texts)
        found.append(target.prefill(texts, first=0))
        tokens = torch.arange(5, 5 + len(parents)).expand(len(lengths), -1)
        found.append(target.score(TokenTree(tokens, torch.tensor([list(parents)] * len(lengths)))))
        target.commit(None, [1] * len(lengths))
        found.append(target.advance(tokens[:, 0]))
        target.reset()
    return found


def assert_close(found, wanted, dtype=torch.float32):
    for got, plain in zip(found, wanted):
        assert (got.float() - plain.float()).abs().max() <= TOLERANCE[dtype] * plain.float().abs().max()


@pytest.mark.parametrize("family", ["llama", *(pytest.param(name, marks=pytest.mark.nightly) for name in OTHERS)])
@torch.inference_mode()
def test_logits_are_the_same_and_no_step_compiles(family, traced):
    model, before = of(family), counters["stats"]["unique_graphs"]
    target = Target(model, execution="compiled")
    assert target.execution == "compiled" and target.backend.overrides.graphs == 4 and target.passes == 0
    compiled = counters["stats"]["unique_graphs"]
    if family == "llama":  # whose layers are alike, so that they share what is traced: one node and several, one row and several
        assert len(compilation.decoder_layers(model)) == 2 and compiled - before == 4
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = steps(target)
    assert counters["stats"]["unique_graphs"] == compiled
    plain = Target(of(family), execution="eager")
    assert_close(found, steps(plain))
    target.close()
    assert not any("forward" in vars(module) for module in model.modules())


def test_compiled_passes_are_used_in_the_loop_alone(traced_once, monkeypatch):
    model, target = traced_once.model, traced_once.target
    with pytest.raises(ConfigurationError, match="overrides of their own already"):
        Target(model, execution="compiled")
    ids = torch.tensor([ROWS[0]])
    assert torch.equal(model(input_ids=ids).logits, tiny()(input_ids=ids).logits)  # with gradients
    assert alone(model, ROWS[0], max_new_tokens=8) == alone(tiny(), ROWS[0], max_new_tokens=8)
    with torch.inference_mode():
        assert_compiled_passes(target, monkeypatch)


def assert_compiled_passes(target, monkeypatch):
    monkeypatch.setattr(compilation, "TreeCache", type("Other", (), {}))  # no cache is known as one: every pass is the model's own
    ran = []
    original = target.backend.overrides.run
    monkeypatch.setattr(target.backend.overrides, "run", lambda kind: ran.append(kind) or original(kind))
    target.open([[5, 6, 7]])
    target.prefill([[5, 6, 7]], first=0)
    target.score(TokenTree.root(torch.tensor([8])))
    assert ran == []
    monkeypatch.undo()
    monkeypatch.setattr(target.backend.overrides, "run", lambda kind: ran.append(kind) or original(kind))
    target.score(TokenTree.root(torch.tensor([8])))
    target.score(TokenTree.from_chain(torch.tensor([[8, 9]])))
    assert ran == [(True, True)] * 2 + [(True, False)] * 2
    long = torch.full((1, compilation.NODES + 1), 9)
    target.score(TokenTree.from_chain(long))
    assert len(ran) == 4


def test_a_cache_that_grows_and_rows_that_leave(traced_once):
    speculator, rows = traced_once, repetitive((40, 6), seed=3)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for row, count in zip(rows, (300, 40)):
            expected = alone(tiny(), row, max_new_tokens=count)
            assert generate(speculator, [row], max_new_tokens=count) == [expected]
        assert generate(speculator, rows, max_new_tokens=40) == [alone(tiny(), row, max_new_tokens=40) for row in rows]


@pytest.mark.nightly
@pytest.mark.parametrize("shape", ["chain(3)", "product(2,1,1)"])
def test_text_is_the_same_with_a_compiled_draft(shape, traced):
    target, draft = clone(tiny()), clone(perturbed())
    speculator = Speculator(target, DraftModel(draft, execution="compiled"), shape=shape, execution="eager")
    assert speculator.drafter.model.execution == "compiled"
    assert generate(speculator, ROWS, max_new_tokens=12) == [alone(tiny(), row, max_new_tokens=12) for row in ROWS]
    speculator.close()
    assert not any("forward" in vars(module) for model in (target, draft) for module in model.modules())


class Again:
    """Stands in for a :class:`foredraft.backends.recorder.CudaRecorder`, and runs a recorded function again, in Python."""

    def capture(self, run):
        outputs = run()

        def replay():
            for goal, found in zip(outputs, run()):
                goal.copy_(found)

        return replay, outputs

    def reset(self):
        pass


@pytest.mark.parametrize("memory", ["auto", pytest.param("4MiB", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3_text", marks=pytest.mark.nightly)])
@torch.inference_mode()
def test_recorded_passes_are_those_of_compiled_layers(family, memory, traced, monkeypatch):
    monkeypatch.setattr(recorder, "recorder_for", lambda device: Again())
    target = Target(of(family), execution="compiled", cache_memory=memory)
    assert target.execution == "compiled" and "graphs" not in target.reasons and bool(target.pools) == (memory != "auto")
    before, ran, overrides = counters["stats"]["unique_graphs"], [], target.backend.overrides
    monkeypatch.setattr(overrides, "run", lambda kind, run=overrides.run: ran.append(kind) or run(kind))
    texts = [[3 + (7 * i + row) % 50 for i in range(length)] for row, length in enumerate((20, 13))]
    plain = Target(of(family), execution="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (1, 2):
            for each in (target, plain):
                each.open(texts[:rows])
            found = [[each.prefill(texts[:rows], first=0) for each in (target, plain)]]
            for turn in range(6):
                for parents in ((-1,), (-1, 0, 0, 1)):
                    tokens = (torch.arange(len(parents)) + turn).expand(rows, -1) % 50
                    tree, ran[:] = TokenTree(tokens, torch.tensor([list(parents)] * rows)), []
                    found.append([each.score(tree) for each in (target, plain)])
                    assert ran
                for each in (target, plain):
                    each.commit(None, [1] * rows)
            assert_close(*zip(*found))
            for each in (target, plain):
                each.reset()
    assert target.backend.recordings.refused is None and target.backend.recordings.replays
    assert counters["stats"]["unique_graphs"] == before
    target.close()
    assert not any("forward" in vars(module) for module in target.model.modules())


def test_what_can_not_be_compiled_says_why(traced):
    for family, why in (("gpt_neo", "keeps a cache of its own"), ("llama4_text", "temperature"), ("gemma3n_text", "take the cache")):
        with pytest.raises(ConfigurationError, match=rf"cannot be compiled: .*{why}.*use execution='auto'"):
            Target(of(family), execution="compiled")


@pytest.mark.parametrize("fault", [lambda out: out * 1.5, lambda out: 1 / 0])
def test_what_goes_wrong_leaves_the_model_as_it_was(traced, monkeypatch, fault):
    real = compilation.step
    monkeypatch.setattr(compilation.Compilation, "run", lambda self, kind: self._runs.setdefault(kind, lambda *given: fault(real(*given))))
    model = clone(tiny())
    with pytest.raises(ConfigurationError, match=r"logits that differ|torch\.compile failed: division by zero"):
        Target(model, execution="compiled")
    assert not any("forward" in vars(module) for module in model.modules())


def test_without_a_compiler():
    with (
        torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(ConfigurationError, match=r"cannot be compiled: torch\.compile needs a C\+\+ compiler.*use execution='auto'"),
    ):
        Target(clone(tiny()), execution="compiled")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.cuda
@torch.inference_mode()
def test_on_a_gpu_recordings_are_of_compiled_layers():
    torch._dynamo.reset()
    model, draft = clone(tiny()).cuda(), clone(perturbed()).cuda()
    batch = {name: each.cuda() for name, each in padded(ROWS).items()}
    expected = Speculator(model, "none").generate(**batch, max_new_tokens=40, pad_token_id=0, do_sample=False).sequences
    speculator = Speculator(model, DraftModel(draft, execution="compiled"), shape="product(2,1,1)", execution="compiled")
    output = speculator.generate(**batch, max_new_tokens=40, pad_token_id=0, do_sample=False)
    assert torch.equal(output.sequences, expected) and 0 < output.stats.accepted < output.stats.drafted
    for target in (speculator.target, speculator.drafter.model):
        assert target.execution == "compiled" and "graphs" not in target.reasons
        assert target.backend.recordings.refused is None and target.backend.recordings.replays


@needs_compiler
@pytest.mark.parametrize(
    ("family", "dtype", "memory"),
    [
        ("llama", torch.float32, "auto"), ("llama", torch.bfloat16, "auto"), ("qwen3_moe", torch.float32, "auto"),
        ("gemma3_text", torch.bfloat16, "auto"), ("deepseek_v2", torch.float32, "auto"), ("gemma3_text", torch.float32, "64MiB"),
    ],
)  # fmt: skip
@pytest.mark.nightly
@torch.inference_mode()
def test_compiled_for_this_machine(family, dtype, memory):
    torch._dynamo.reset()
    target = Target(of(family, dtype), execution="compiled", cache_memory=memory)
    assert bool(target.pools) == (memory != "auto")
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = steps(target)
    assert_close(found, steps(Target(of(family, dtype), execution="eager")), dtype)
