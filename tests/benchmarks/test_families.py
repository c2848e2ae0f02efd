"""The suite of architectures: what random weights write, who meets whom, what is claimed, and a run."""

import importlib
import json
from dataclasses import replace
from statistics import median

import gguf
import numpy as np
import pytest
from cover import nightly_but
from typer.testing import CliRunner

from benchmarks import environment, families, families_shapes, report
from benchmarks.cli import app
from benchmarks.families import Families, Pass, Settings
from benchmarks.families_shapes import SHAPES, Made
from benchmarks.speed_calls import Measurement, Read
from benchmarks.speed_runner import Failure
from foredraft import ConfigurationError
from foredraft.backends.narrow import format_of

SMALL = Settings(targets=("qwen3", "gpt_oss"), repeats=2, tokens=8, contexts=(512,), threads=1)
OURS, LOOKUP, NARROW = "foredraft plain", "foredraft lookup, auto", "foredraft plain, int4"
HEAD = "int4, head in int8"


@pytest.mark.parametrize("name", nightly_but({("qwen3",), ("gemma3",), ("qwen3_moe",)}, [(name,) for name in SHAPES]))
def test_text_goes_along_the_walk_and_copies_where_it_has_been(name, work):
    made = families_shapes.written(f"{name}-test", work)
    prompts = {11: [*range(100, 140), made.walk[10]], 1: [*made.walk[:40], made.walk[0]]}
    for side in ("transformers", "foredraft"):
        peer = importlib.import_module(f"benchmarks.peers.{side}").Engine()
        peer.start(1, "cpu", "")
        for mode, length in (("plain", 0), ("lookup", 4)):
            peer.load(mode, str(made.path), None, "bfloat16", mode, length, 3, {})
            for begin, ids in prompts.items():
                told = peer.generate(mode, [ids], 12, 0.0, 0)
                assert told["ids"] == [list(made.walk[begin : begin + 12])]
        assert told["rounds"] <= 3, "all that is drafted is kept"


def test_an_output_layer_is_made_narrow_while_the_embedding_stays(work):
    peer = importlib.import_module("benchmarks.peers.foredraft").Engine()
    peer.start(1, "cpu", "")
    path = str(families_shapes.written("qwen3-test", work).path)
    told = peer.load("narrow", path, None, "bfloat16", "plain", 0, 3, {"quantization": "int4", "head": "int8"})
    model = peer.speculators["narrow"].model
    assert told["note"].startswith("native passes") and model.config.tie_word_embeddings
    layers = (model.get_input_embeddings(), model.get_output_embeddings(), model.model.layers[0].mlp.up_proj)
    found = [format_of(each.weight) for each in layers]
    assert [each.bits for each in found] == [0, 8, 4]


def test_a_pass_reads_the_experts_that_a_token_goes_through(work):
    routed, dense = (families_shapes.written(f"{name}-test", work) for name in ("qwen3_moe", "qwen3"))
    width, inner, layers, vocabulary = 256, 64, 2, 4096
    attention = layers * (4 * width * width + 2 * width + 2 * 64 + 16 * width)  # and its norms, and the router
    assert routed.pass_bytes == 2 * (attention + layers * 4 * 3 * width * inner + vocabulary * width + width)
    assert routed.touched[0] == 4 and 4 < routed.touched[1] <= 16 and dense.touched is None
    with pytest.raises(ConfigurationError, match="unknown shape 'gpt2'; choose from qwen3"):
        Settings(targets=("gpt2",))


def test_who_meets_whom():
    names = {each.name for each in families.plain_methods(SMALL)}
    assert names == {OURS, LOOKUP, "transformers plain", "vllm plain", "llamacpp plain", "openvino plain, PA", "openvino plain, SDPA"}
    made = Made("", None, "", tuple(range(256)), None, families_shapes.find("qwen3"))
    text, _, batch, first = families.plain_cells(SMALL, made, families.plain_methods(SMALL))
    assert set(text.methods) == names and LOOKUP not in first.methods and batch.methods == (OURS, "vllm plain")
    assert (len(first.ids[0]), first.tokens) == (512, 1) and len({row[-1] for row in batch.ids}) == families.ROWS
    copies = next(families.copying_cells(SMALL, made, families.copying_methods(SMALL)))
    assert copies.ids[0][-1] == copies.ids[0][0] and OURS not in copies.methods
    narrow = families.narrow_methods(SMALL)
    assert {(each.scenario, each.category, each.methods) for each in families.narrow_cells(SMALL, made, narrow)} == {
        (
            "int4",
            "int4",
            ("llamacpp plain, int4", OURS, NARROW, *(f"openvino plain, {way}, {HEAD}" for way in ("PA", "SDPA")), f"{OURS}, {HEAD}"),
        )
    }
    assert families.narrow_methods(replace(SMALL, peers=("transformers",))) == []


def call(method, seconds, scenario, category="", repeat=0, target="qwen3", first=1.0):
    """Nine tokens, the ``first`` after so many seconds."""
    times = (first, *[seconds] * 8)
    about = (target, "bfloat16", scenario, 1, 0, category or scenario, method, repeat)
    return Measurement(*about, tokens=9, seconds=seconds, times=times, rounds=8, kept=8)


@pytest.fixture
def claimed():
    run = Families(SMALL)
    run.methods = run.everyone()
    run.bytes_per_pass = {"qwen3 bfloat16": 10**9, "gpt_oss bfloat16": 10**9}
    run.narrow_bytes = {"qwen3": 4 * 10**8}
    run.touched = {"gpt_oss": [4.0, 13.5]}
    for repeat, slow in enumerate((1.0, 2.0)):  # the machine is half as fast in the second repeat
        for target in SMALL.targets:
            spent = {OURS: 1.0, LOOKUP: 1.0, "transformers plain": 4.0, "vllm plain": 2.0}
            run.measurements += [call(name, 1 + slow * each, "text", repeat=repeat, target=target) for name, each in spent.items()]
            run.reads.append(Read(target, "bfloat16", 0, repeat, 1e10 / slow))
            run.passes += [Pass(target, OURS, nodes, repeat, slow * seconds) for nodes, seconds in ((1, 0.1), (8, 0.12))]
        lookups = {LOOKUP: 2.0, "vllm lookup, γ=5": 4.0, "vllm lookup, γ=10": 3.0}
        run.measurements += [call(name, slow * each, "copies", repeat=repeat, first=slow) for name, each in lookups.items()]
        run.measurements += [call(name, slow * each, "first token", "512", repeat) for name, each in ((OURS, 2.2), ("vllm plain", 2.0))]
        narrow = {OURS: 1.0, NARROW: 0.5, "llamacpp plain, int4": 0.6, f"{OURS}, {HEAD}": 0.6}
        narrow |= {f"openvino plain, PA, {HEAD}": 0.72, f"openvino plain, SDPA, {HEAD}": 0.9}
        run.measurements += [call(name, 1 + slow * each, "int4", repeat=repeat) for name, each in narrow.items()]
    return run


def test_figures(claimed):
    found = {each.name: (each.spread.median, each.verdict) for each in claimed.figures()}
    like = pytest.approx
    assert found == {
        "qwen3: plain tokens/s behind the first token, over the best peer": (like(2), "met"),
        "qwen3: share of read bandwidth, plain": (like(0.8), "met"),
        "qwen3: a pass over 8 nodes, over one": (like(1.2), "met"),
        "qwen3: prompt lookup on text that copies, over the best peer's": (like(1.5), "met"),
        "qwen3: prompt lookup on text that copies, behind the first token, over the best peer's": (like(2), "met"),
        "qwen3: seconds to the first token behind 512 tokens, over the best peer": (like(1.1), "missed"),
        "qwen3: int4 over bfloat16, plain tokens/s, of the quotient of bytes read (2.50)": (like(0.8), "missed"),
        "qwen3: int4 over llama.cpp's, plain tokens/s, same file": (like(1.2), "met"),
        "qwen3: int4 over OpenVINO's, plain tokens/s, same groups, head in int8": (like(1.2), "met"),
        "qwen3: auto drafting over plain, text that cannot be guessed": (like(1), "met"),
        "gpt_oss: plain tokens/s behind the first token, over the best peer": (like(2), "met"),
        "gpt_oss: share of read bandwidth, plain": (like(0.8), "met"),
        "gpt_oss: auto drafting over plain, text that cannot be guessed": (like(1), "met"),
    }
    assert all(each.spread.low == like(each.spread.high) for each in claimed.figures()), "each turn is compared with itself"


def test_a_peer_that_reads_nearly_as_fast_as_memory_can(claimed):
    claimed.measurements = [
        replace(each, seconds=1 + (each.seconds - 1) * 0.55) for each in claimed.measurements if each.scenario == "text"
    ]
    claimed.measurements += [call("llamacpp plain", 1 + slow * 0.6, "text", repeat=repeat) for repeat, slow in enumerate((1.0, 2.0))]
    for each in claimed.reads:
        object.__setattr__(each, "rate", each.rate * 2)
    plain, share = list(claimed.figures())[:2]
    assert (plain.low, share.low) == (families.NEVER, families.ENOUGH)
    assert plain.verdict == "met" and share.spread.median == pytest.approx(0.8 / 0.55 / 2) and share.verdict == "missed"


def test_a_method_that_left_has_no_figure(claimed):
    claimed.measurements = [each for each in claimed.measurements if (each.method, each.repeat) != ("vllm plain", 1)]
    plain = next(iter(claimed.figures()))
    assert plain.spread.median == pytest.approx(4) and "transformers plain" in plain.how


def test_a_report_is_written_again_from_its_document(claimed):
    claimed.failures.append(Failure("gpt_oss", "bfloat16", "openvino plain, PA", "set-up", "KeyError: 'gpt_oss'"))
    document = json.loads(json.dumps(claimed.document(command="families", environment={**environment.describe(), "threads": 1})))
    page = Families.read(document).report(document).markdown()
    assert page == claimed.report(document).markdown()
    assert "| gpt_oss, bfloat16 | 150.0 | 180.0 | 1.20 (1.20–1.20) | 4.0 and 13.5 |" in page and "KeyError: 'gpt_oss'" in page


def test_what_a_peer_says_of_how_it_runs(claimed):
    claimed.method_notes = {"llamacpp plain, int4, bfloat16": "with --no-repack", f"{OURS}, bfloat16": "native passes"}
    assert "Not as usual: llamacpp plain, int4, bfloat16: with --no-repack." in claimed.notes({})


def test_long_prompts_come_last(work, monkeypatch):
    """So do their warm-ups. A method that fails there has made its other calls, and is not asked again."""
    made = families_shapes.written("qwen3-test", work)
    settings = replace(SMALL, contexts=(8, families.LONG), repeats=3)
    block = families.FamilyBlock(Families(settings), made, families.plain_methods(settings), families.plain_cells)
    block.at = {OURS: None, "vllm plain": None}
    seen = []

    def measure(self, name, cell, repeat):
        seen.append((name, len(cell.ids[0]), repeat))
        if (name, seen[-1][1]) == ("vllm plain", families.LONG):
            del self.at[name]

    monkeypatch.setattr(families.Block, "_measure", measure)
    monkeypatch.setattr(families.Block, "_ask", lambda self, name, ids, *rest: seen.append((name, len(ids[0]), "warm-up")))
    for repeat in range(3):
        for cell in block.cells([], 0)[-2:]:
            for name in list(block.at):
                block._measure(name, cell, repeat)
    long = [(OURS, "warm-up"), (OURS, 0), (OURS, 1), ("vllm plain", "warm-up"), ("vllm plain", 0)]
    short = [(name, repeat) for repeat in range(3) for name in (OURS, "vllm plain")]
    assert seen == [*((name, 8, turn) for name, turn in short), *((name, families.LONG, turn) for name, turn in long)]


def test_bytes_of_a_file(tmp_path):
    """Layers and the output layer, which the embedding may be; of experts the active ones."""
    for names, layer in ((("token_embd",), "ffn_up"), (("token_embd", "output"), "ffn_up"), (("token_embd",), "ffn_up_exps")):
        writer = gguf.GGUFWriter(tmp_path / "q4_0.gguf", "qwen3moe" if "exps" in layer else "qwen3")
        if "exps" in layer:
            writer.add_expert_count(4)
            writer.add_expert_used_count(1)
        for name in (*names, f"blk.0.{layer}"):
            rows = gguf.quantize(np.ones((8, 64), dtype=np.float32), gguf.GGMLQuantizationType.Q4_0)
            writer.add_tensor(f"{name}.weight", rows, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
        for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
            write()
        whole = 8 * 64 // 32 * 18
        assert families.narrow_bytes(tmp_path / "q4_0.gguf") == whole + (whole // 4 if "exps" in layer else whole)


def test_a_run_that_is_interrupted_reports_what_it_has(work, monkeypatch):
    def run(block):
        if block.make is families.copying_cells:
            raise KeyboardInterrupt
        block.run_.measurements.append(call(OURS, 2.0, "text", target="qwen3-test"))

    monkeypatch.setattr(families.FamilyBlock, "run", run)
    found = Families(replace(SMALL, targets=("qwen3-test",), work_path=work))
    found.run()
    assert len(found.measurements) == 1 and "interrupted" in found.failed()[0].message


@pytest.mark.nightly
def test_a_quick_run(work, tmp_path):
    given = ["families", "--quick", "--shape", "qwen3_moe-test", "--peer", "transformers", "--peers", str(tmp_path), "--work", str(work)]
    result = CliRunner().invoke(app, [*given, "--threads", "1", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    run = Families.read(report.load(tmp_path / "families.json.gz"))
    assert {each.scenario for each in run.measurements} == {"text", "first token", "batch", "copies"} and run.failures == []
    assert all(each.same for each in run.measurements if each.scenario == "text")
    assert median(each.seconds for each in run.passes) > 0 and "qwen3_moe-test: prompt lookup" in (tmp_path / "families.md").read_text()
