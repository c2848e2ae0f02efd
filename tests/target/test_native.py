"""The kernels in ``native`` against torch: products, layers, trees in ragged batches, windows, and what happens without them."""

from __future__ import annotations

import copy
import ctypes
import multiprocessing
import os
import re
import shutil
import subprocess
import time
from functools import cache
from pathlib import Path

import pytest
import torch
from cover import covered
from helpers import forked, generate
from kernel_cases import DTYPES, MODELS, TOLERANCE, build, needs_kernels
from kernel_cases import always as always  # a fixture

from foredraft import ConfigurationError, Speculator, TokenTree, caching, zoo
from foredraft.backends import native, packing
from foredraft.backends.kernel_pass import Direct, NativeModel, NativePass
from foredraft.backends.packing import HINTS
from foredraft.backends.products import NATIVE, Product, blocked, unblocked
from foredraft.target import Target

TREE = (-1, 0, 0, 1, 1, 2, 3, 3, 6)


def targets(name, dtype):
    plain = Target(build(name, dtype), execution="eager")
    kernels = Target(build(name, dtype), execution="native", owned=True)
    assert kernels.execution == "native" and kernels.backend.overrides.native == 3
    assert isinstance(vars(kernels.model.model).get("forward"), NativeModel)
    return plain, kernels


def assert_close(got, wanted, dtype):
    assert (got.float() - wanted.float()).abs().max() <= TOLERANCE[dtype] * wanted.float().abs().max()


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (100, 64), (192, 352), (17, 96), (448, 160)])
def test_products(outputs, inputs, bias, dtype):
    layer = torch.nn.Linear(inputs, outputs, bias=bias).to(dtype)
    product = Product([layer], NATIVE)
    with torch.inference_mode():
        for tokens in (1, 2, 3, 5, 6, 7, 8, 12, 13, 24, 25, 31):  # of two rows; up to 48 in all they share what is in the first cache
            x = torch.randn(2, tokens, inputs).to(dtype)
            assert_close(product(x), layer(x), dtype)
            assert_close(product(x.transpose(0, 1)), layer(x.transpose(0, 1)), dtype)
    (weight,) = product.weights()
    assert torch.equal(weight, layer.weight)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_gets_the_same_bits_among_any_number(dtype):
    """Also among so many that their inputs do not fit into a thread's memory at once."""
    product = Product([torch.nn.Linear(4096, 100, bias=False).to(dtype)], NATIVE)
    x = torch.randn(600, 4096).to(dtype)
    with torch.inference_mode():
        alone = torch.cat([product(token[None]) for token in x])
        for tokens in (2, 3, 4, 5, 6, 7, 11, 48, 49, 130, 600):
            assert torch.equal(product(x[:tokens]), alone[:tokens]), tokens


@needs_kernels
def test_the_name_of_an_execution_says_which_layout_is_taken():
    for execution, layers in (("packed", 0), ("native", 3), ("auto", 3)):
        target = Target(build("qwen3", torch.float32), execution=execution, owned=True)
        assert target.backend.overrides.native == layers and target.execution == ("native" if layers else "packed")


def test_passes_of_all_sizes_share_the_scratch_memory_of_the_largest():
    about, x, scratch = native.Layer(hidden=64, inner=96, heads=4, key_heads=2, size=32), torch.empty(0), NativePass()
    largest = scratch.room(about, x, 100, 2)
    for tokens, threads in ((1, 1), (99, 2), (100, 1)):
        assert scratch.room(about, x, tokens, threads) is largest
    wider = [list(each.shape) for each in scratch.room(about, x, 101, 1)]
    assert wider == [[101, 64], [101, 256], [101, 128], [101, 192], [101, 96], [2 * native.scratch(32)]]


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_refuses_another_dtype(dtype):
    other = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32}[dtype]
    with pytest.raises(RuntimeError, match=f"expected an input in {dtype}"):
        Product([torch.nn.Linear(32, 64).to(dtype)], NATIVE)(torch.ones(1, 32, dtype=other))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs", [64, 100, 17])
def test_blocks_are_undone(outputs, dtype):
    weight = torch.randn(outputs, 96).to(dtype)
    assert torch.equal(unblocked(blocked(weight), outputs), weight)


@needs_kernels
@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_ragged_prefills_chains_trees_and_commits(name, dtype, always):
    texts = [[(7 * i + row) % 100 for i in range(length)] for row, length in enumerate((40, 3, 17))]
    plain, kernels = targets(name, dtype)
    chain = torch.randint(0, 100, (3, 4), generator=torch.Generator().manual_seed(1))
    nodes = torch.randint(0, 100, (3, len(TREE)), generator=torch.Generator().manual_seed(2))
    valid = torch.ones_like(nodes, dtype=torch.bool)
    valid[1, 5:] = False  # filler
    path = torch.tensor([[0, 2, 5], [0, 1, 3], [0, 1, 4]])
    found = []
    for target in (plain, kernels):
        target.open(texts)
        steps = [target.prefill(texts, first=0)]
        steps.append(target.score(TokenTree.from_chain(chain)))
        target.commit(None, [4, 2, 1])
        tree = TokenTree(nodes, torch.tensor([TREE] * 3), valid)
        steps.append(target.score(tree)[valid])
        target.commit(path, [3, 1, 2])
        steps.append(target.advance(chain[:, 0]))
        target.compact([0, 2])
        steps.append(target.score(TokenTree.from_chain(chain[:2, :1])))
        steps.append(target.score(TokenTree.from_chain(chain[:2])))
        found.append(steps)
    for wanted, got in zip(*found):
        assert_close(got, wanted, dtype)


@needs_kernels
@torch.inference_mode()
@pytest.mark.parametrize(("name", "dtype"), covered(list(MODELS), DTYPES, ways=1))
def test_contexts_of_many_blocks_of_keys(name, dtype, always):
    """More keys than are taken together, more queries too, rows of very different lengths, and windows that leave whole blocks out."""
    texts = [[(7 * i * i + row) % 100 for i in range(length)] for row, length in enumerate((200, 64, 129))]
    plain, kernels = targets(name, dtype)
    nodes = torch.randint(0, 100, (3, len(TREE)), generator=torch.Generator().manual_seed(2))
    wide = torch.randint(0, 100, (3, 30), generator=torch.Generator().manual_seed(3))
    found = []
    for target in (plain, kernels):
        target.open(texts)
        steps = [target.prefill(texts, first=0)]
        steps += [target.score(TokenTree(nodes, torch.tensor([TREE] * 3))), target.score(TokenTree.from_chain(wide))]
        found.append(steps)
    for wanted, got in zip(*found):
        assert_close(got, wanted, dtype)


@needs_kernels
@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_pay_for_their_own_nodes(dtype, always, monkeypatch):
    texts = [[(7 * i + row) % 100 for i in range(length)] for row, length in enumerate((40, 3, 17))]
    plain, kernels = targets("qwen3", dtype)
    assert kernels.ragged and not plain.ragged
    tokens = torch.randint(0, 100, (3, 6), generator=torch.Generator().manual_seed(1))
    counts = torch.tensor([2, 6, 1])
    chain = TokenTree.from_chain(tokens, valid=torch.arange(6) < counts[:, None])
    computed = []
    run_over = NativeModel.run_over
    monkeypatch.setattr(NativeModel, "run_over", lambda self, x, *rest: computed.append(len(x)) or run_over(self, x, *rest))
    found = []
    for target in (plain, kernels):
        target.open(texts)
        steps = [target.prefill(texts, first=0), target.score(chain)[chain.valid]]
        target.commit(None, [2, 4, 1])
        steps += [target.advance(tokens[:, 0]), target.score(TokenTree.from_chain(tokens))]
        found.append(steps)
    assert computed == [40 + 3 + 17, 2 + 6 + 1, 3, 18]
    for wanted, got in zip(*found):
        assert_close(got, wanted, dtype)


@needs_kernels
@torch.inference_mode()
def test_whoever_watches_the_model_is_called(always):
    """A hook anywhere on the way means that the model's own code runs around the kernels, or in their place."""
    plain, kernels = targets("llama", torch.float32)
    logits, calls = [], []
    watched = (kernels.model, kernels.model.model, kernels.model.model.layers[1], kernels.model.model.embed_tokens)
    for target in (plain, kernels):
        target.open([[5, 6, 7, 8]])
        logits.append(target.prefill([[5, 6, 7, 8]], first=0))
    for module in watched:
        hook = module.register_forward_hook(lambda module, *rest: calls.append(type(module).__name__))
        logits.append(kernels.score(TokenTree.from_chain(torch.tensor([[9, 10]]))))
        hook.remove()
    assert calls == [type(module).__name__ for module in watched]
    wanted = plain.score(TokenTree.from_chain(torch.tensor([[9, 10]])))
    for got in logits[2:]:
        assert_close(got, wanted, torch.float32)


@needs_kernels
@torch.inference_mode()
@pytest.mark.parametrize("asked", ["output_attentions", "output_hidden_states", "output_router_logits"])
def test_whoever_asks_a_configuration_for_inner_outputs_is_given_them(always, asked):
    model = build("llama", torch.float32)
    model.set_attn_implementation("eager")  # which has attention weights to give
    target = Target(model, execution="native", owned=True)
    target.open([[5, 6, 7, 8]])
    target.prefill([[5, 6, 7, 8]], first=0)
    assert target.backend.direct is not None
    setattr(model.config, asked, True)
    assert target.backend.direct is None


@needs_kernels
@torch.inference_mode()
def test_a_long_prompt_in_chunks_and_a_cache_that_grows(always, monkeypatch):
    """Logits are computed after its last token alone."""
    text = [(11 * i * i + 5 * i) % 100 for i in range(400)]
    found, read, logits = [], [], Direct.logits
    monkeypatch.setattr(Direct, "logits", lambda self, hidden: read.append(len(hidden)) or logits(self, hidden))
    for execution in ("eager", "native"):
        target = Target(build("llama", torch.float32), execution=execution, owned=True, prefill_chunk=150)
        read.clear()  # of the self-test
        target.open([text])
        steps = [target.prefill([text], first=0)]
        steps += [target.advance(torch.tensor([token])) for token in range(5)]
        found.append(torch.stack(steps))
    assert_close(found[1], found[0], torch.float32)
    assert read == [1] * 6


@needs_kernels
@torch.inference_mode()
def test_threads_may_change_between_passes(always):
    plain, kernels = targets("llama", torch.float32)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3, 2):
            torch.set_num_threads(threads)
            logits = []
            for target in (plain, kernels):
                target.open([[5, 6, 7, 8]])
                target.prefill([[5, 6, 7, 8]], first=0)
                logits.append(target.score(TokenTree.from_chain(torch.tensor([[9, 10, 11]]))))
                target.reset()
            assert_close(logits[1], logits[0], torch.float32)
            found.append(logits[1].clone())
        assert all(torch.equal(each, found[0]) for each in found)
    finally:
        torch.set_num_threads(before)


@needs_kernels
def test_text_with_trees_is_that_of_the_plain_model(always):
    rows = [[(3 * i + row) % 100 for i in range(length)] for row, length in enumerate((23, 9, 15))]
    expected = generate(Speculator(build("qwen3", torch.float32), drafter="none", execution="eager"), rows, max_new_tokens=16)
    for shape in ("chain(4)", "product(2,1,1)"):
        speculator = Speculator(
            build("qwen3", torch.float32),
            drafter="prompt-lookup" if shape == "chain(4)" else "several:prompt-lookup,ngram",
            shape=shape,
            execution="native",
        )
        assert generate(speculator, rows, max_new_tokens=16) == expected
        speculator.close()
        assert type(speculator.model.model.layers[0]).forward == speculator.model.model.layers[0].forward.__func__


@needs_kernels
def test_what_the_kernels_are_not_made_for_goes_the_other_way(always):
    """A float mask, an embedding without a cache, gradients."""
    plain, kernels = targets("llama", torch.float32)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    wanted = plain.model(input_ids=ids, use_cache=False).logits
    assert_close(kernels.model(input_ids=ids, use_cache=False).logits.detach(), wanted.detach(), torch.float32)
    with torch.inference_mode():
        mask = torch.zeros(1, 1, 5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
        assert_close(kernels.model(input_ids=ids, attention_mask=mask, use_cache=False).logits, wanted, torch.float32)
        assert (
            kernels.model.generate(ids, max_new_tokens=8, do_sample=False).tolist()
            == plain.model.generate(ids, max_new_tokens=8, do_sample=False).tolist()
        )


@needs_kernels
def test_layers_of_unequal_sizes(always):
    """As pruning leaves them. A pass has scratch memory for the largest."""
    model = build("llama", torch.float32)
    mlp = model.model.layers[0].mlp
    mlp.gate_proj, mlp.up_proj, mlp.down_proj = (torch.nn.Linear(*sizes, bias=False) for sizes in ((64, 32), (64, 32), (32, 64)))
    texts = [[7 * i % 100 for i in range(length)] for length in (40, 3)]
    plain, kernels = Target(copy.deepcopy(model), execution="eager"), Target(model, execution="native", owned=True)
    assert kernels.backend.overrides.native == 3 and vars(kernels.model.model)["forward"].shared.inner == 96
    with torch.inference_mode():
        wanted, got = ((target.open(texts), target.prefill(texts, first=0))[1] for target in (plain, kernels))
    assert_close(got, wanted, torch.float32)


# -- without them ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """No library has been loaded or compiled yet."""
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    forget()
    yield tmp_path
    forget()


@pytest.fixture
def quick(fresh, monkeypatch):
    """What was compiled once, here or by an earlier test, is what the compiler gives."""
    monkeypatch.setattr(native, "_compile", lambda compiler, flags: compiled(compiler, tuple(flags)))
    return fresh


@cache
def compiled(*given, make=native._compile):
    return make(*given)


def forget():
    native._known.clear()
    caching.warn_once.cache_clear()


@needs_kernels
def test_kernels_are_compiled_once(quick, monkeypatch):
    native.library(torch.float32)
    (made,) = (quick / "kernels").iterdir()
    forget()
    monkeypatch.setattr(native, "_compile", lambda *_: pytest.fail("compiled again"))
    native.library(torch.float32)
    assert list((quick / "kernels").iterdir()) == [made]


@needs_kernels
def test_without_a_compiler_the_newest_intact_file_is_used(quick, monkeypatch, caplog):
    """Whatever compiler made it, but for the same source, flags and CPU."""
    native.library(torch.float32)
    (made,) = (quick / "kernels").iterdir()
    (_, key, compiler), content = made.stem.split("-"), made.read_bytes()
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    others = [made.with_name(f"kernels-{key}-{name}.so") for name in ("newest", "newer")]
    (made.parent / f"kernels-other-{compiler}.so").write_bytes(content)
    for path, age, left in zip((*others, made), (1, 2, 3), (content[:-1], content, content)):
        path.unlink(missing_ok=True)
        path.write_bytes(left)
        os.utime(path, (time.time() - age,) * 2)
    loaded = []
    monkeypatch.setattr(native, "_declared", lambda kernels, dtype: loaded.append(kernels._name) or kernels)
    for expected in (others[1], made, None):
        forget()
        caplog.clear()
        why = native.refusal(torch.float32)
        assert "newest.so is damaged" in caplog.text and len(caplog.records) == 1
        if expected is None:
            assert "no C compiler" in why
        else:
            assert why is None and loaded.pop() == str(expected)
            expected.unlink()
    forget()
    (made.parent.chmod(0o777), made.write_bytes(content))
    assert "no C compiler" in native.refusal(torch.float32), "others can write to the folder"


@needs_kernels
def test_a_file_that_another_process_has_kept_meanwhile_stays(quick, monkeypatch):
    """A third one may be about to load it."""
    native.library(torch.float32)
    (made,) = (quick / "kernels").iterdir()
    content, compiling = made.read_bytes(), native._compile
    made.unlink()
    forget()
    monkeypatch.setattr(native, "_compile", lambda *given: made.write_bytes(content) and compiling(*given))
    monkeypatch.setattr(native, "replacing", lambda *_, **__: pytest.fail("replaced"))
    assert native.library(torch.float32).linear
    assert made.read_bytes() == content


@needs_kernels
@pytest.mark.parametrize("left", [lambda content: b"", lambda content: content[: len(content) // 2], lambda content: content[:-1] + b"?"])
def test_a_damaged_file_is_compiled_again(left, quick, caplog):
    native.library(torch.float32)
    (made,) = (quick / "kernels").iterdir()
    whole = made.read_bytes()
    made.unlink()  # it is in use: cut a copy
    made.write_bytes(left(whole))
    for expected in ("is damaged", ""):
        forget()
        caplog.clear()
        assert native.library(torch.float32).linear
        assert expected in caplog.text and len(caplog.records) == bool(expected)
    assert native._whole(made) and made.stat().st_mode & 0o777 == 0o600


def not_writable(folder, patch):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    patch.setattr(native, "replacing", refused)  # chmod does not stop root


def full(folder, patch):
    def no_room(*_):
        raise OSError(28, "No space left on device")

    patch.setattr("foredraft.files.to_disk", no_room)


def a_file(folder, patch):
    folder.write_text("")


def of_another(folder, patch):
    folder.mkdir()
    patch.setattr("os.geteuid", lambda: folder.stat().st_uid + 1)


def open_to_all(folder, patch):
    folder.mkdir()
    folder.chmod(0o777)


@needs_kernels
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (not_writable, "cannot be kept in .*: Permission denied"),
        (full, "cannot be kept in .*: No space left on device"),
        (a_file, "nothing is kept in"),
        (of_another, "belongs to another user"),
        (open_to_all, "can be written to by others"),
    ],
)
def test_a_folder_that_cannot_be_used(spoil, message, quick, monkeypatch, caplog):
    """Kernels are compiled for this process alone, with one message; nothing is read from the folder nor left in it."""
    spoil(quick / "kernels", monkeypatch)
    for _ in range(2):
        assert native.refusal(torch.float32) is None
        native._known.clear()
    assert re.search(message, caplog.text) and len(caplog.records) == 1
    assert not (quick / "kernels").is_dir() or not list((quick / "kernels").iterdir())


@needs_kernels
def test_no_room_to_compile(fresh, monkeypatch, caplog):
    def no_room(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(native.tempfile, "mkdtemp", no_room)
    for _ in range(3):
        assert "No space left on device" in native.refusal(torch.float32)
    assert len(caplog.records) == 1 and "slower" in caplog.text


def _asking_for_avx512(patch):
    patch.setenv("FOREDRAFT_INSTRUCTIONS", "avx512")
    patch.setattr(native, "cpu_flags", lambda: frozenset({"avx2", "fma", "f16c"}))


@needs_kernels
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda patch: patch.setattr(native.shutil, "which", lambda name: None), "no C compiler"),
        (lambda patch: patch.setattr(native, "FLAGS", ("-fno-such-flag",)), "could not be compiled or loaded: .* failed"),
        (lambda patch: patch.setattr(native, "cpu_flags", lambda: frozenset({"avx"})), "no AVX2 and no FMA"),
        (lambda patch: patch.setenv("FOREDRAFT_INSTRUCTIONS", "avx3"), "'avx3'; set it to amx or avx512 or avx512-plain or avx2"),
        (_asking_for_avx512, "asks for avx512, which this CPU does not have"),
        (lambda patch: patch.setattr(native.platform, "machine", lambda: "arm64"), "Linux on arm64"),
        (lambda patch: patch.setattr(native.subprocess, "run", _hang), "could not be compiled or loaded: .* timed out"),
    ],
)
def test_without_kernels_other_layouts_are_used(change, message, fresh, monkeypatch, caplog):
    model = build("llama", torch.float32)
    with monkeypatch.context() as patch:
        change(patch)
        why = native.refusal(torch.float32)
        assert re.search(message, why)
        assert "FOREDRAFT_INSTRUCTIONS" not in why or why in caplog.text, "what was asked for and is not done is said"
        with pytest.raises(ConfigurationError, match=f"native kernels cannot be used: .*{message}"):
            Target(model, execution="native")
        target = Target(model, owned=True)
    assert target.execution == "packed" and NATIVE not in target.backend.overrides.hints and target.backend.overrides.hints == HINTS


def _hang(command, **options):
    if "-o" in command:
        raise subprocess.TimeoutExpired(command, 1)
    return subprocess.CompletedProcess(command, 0, stdout="", stderr="")


@needs_kernels
@pytest.mark.parametrize(
    ("printed", "why"),
    [
        (r"\374bersetzung fehlgeschlagen", "\N{REPLACEMENT CHARACTER}bersetzung fehlgeschlagen"),
        (r"In file included from a.c:1:\na.h:5:2: error: $LC_ALL\n    5 | ;\n      |  ^\n", "a.h:5:2: error: C"),
        (r"first\nlast", "last"),
        ("", "no message"),
    ],
)
def test_why_a_compiler_failed(printed, why, fresh, monkeypatch, caplog):
    """In its first line about an error, whatever encoding and language it has."""
    compiler = fresh / "compiler"
    compiler.write_text(f'#!/bin/sh\nprintf "{printed}" >&2\nexit 1\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("LC_ALL", "de_DE.ISO-8859-1")
    assert native.refusal(torch.float32) == f"they could not be compiled or loaded: {compiler} failed: {why}"
    assert len(caplog.records) == 1


def test_there_are_none_for_other_dtypes():
    assert native.refusal(torch.float64) is not None


# -- threads ------------------------------------------------------------------------------------------------------------------


def on_one_core(send):
    """Seconds of passes on two and on five threads, as a share of those on one; all of them on the same core."""
    packing.preferred_hint = lambda groups, hints: NATIVE
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    tree, best, logits = TokenTree.from_chain(torch.arange(8)[None]), {}, {}
    with torch.inference_mode():
        target = Target(build("llama", torch.float32), execution="native", owned=True)
        assert target.execution == "native"
        target.open([[1, 2, 3]], reserve=[64])
        target.prefill([[1, 2, 3]], first=0)
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            times = []
            for _ in range(30):
                begin = time.perf_counter()
                logits[threads] = target.score(tree).clone()
                times.append(time.perf_counter() - begin)
            best[threads] = sum(sorted(times)[:20])
        assert all(torch.equal(logits[1], each) for each in logits.values())
        child = os.fork()
        if not child:
            os._exit(0 if torch.equal(target.score(tree), logits[1]) else 1)
    assert os.waitpid(child, 0)[1] == 0
    send.send((best[2] / best[1], best[5] / best[1]))


@needs_kernels
def test_threads_that_share_a_core_do_not_wait_for_each_other():
    receive, send = multiprocessing.Pipe(duplex=False)
    process = forked(on_one_core, send)
    assert receive.poll(100)
    two, five = receive.recv()
    process.join(10)
    assert process.exitcode == 0
    assert two < 50 and five < 50  # threads that wait for each other's time slices: hundreds


JUDGING = """
#define _GNU_SOURCE
#include "crew.h"
static uint64_t now;
/* Windows of work, so many, with so many cores for all together or for the caller alone: how many of them the caller did alone */
int windows(int count, double together, double alone) {
    int found = 0;
    for (int i = 0; i < count; i++) {
        now += crew->clock = WINDOW;
        crew->processor = WINDOW * (crew->alone ? alone : together);
        found += crew->alone;
        judge(crew, now);
    }
    return found;
}
"""


@needs_kernels
def test_on_a_busy_machine_the_caller_works_alone_where_that_is_no_slower(tmp_path):
    source, library = tmp_path / "judging.c", tmp_path / "judging.so"
    source.write_text(JUDGING)
    command = ["cc", *native.FLAGS, "-I", str(native.SOURCE.parent), str(source), "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    windows = ctypes.CDLL(str(library)).windows
    windows.argtypes = [ctypes.c_int, ctypes.c_double, ctypes.c_double]
    assert windows(100, 1.9, 1.0) == 0, "a quiet machine"
    assert windows(1, 0.2, 1.0) == windows(9, 1.9, 1.0) == 0, "one bad window"
    windows(10, 0.9, 0.9)
    assert 90 <= windows(100, 0.9, 0.9) < 100, "both on one core: alone, with a trial of the helpers now and then"
    windows(50, 0.8, 0.5)
    assert 0 < windows(100, 0.8, 0.5) <= 10, "among many other threads, where each has its share"
    windows(10, 0.9, 0.9)
    windows(34, 1.9, 1.0)  # a second
    assert windows(100, 1.9, 1.0) == 0, "quiet again"


FLUSHING = """
#define _GNU_SOURCE
#include "crew.h"
#ifdef __aarch64__
#define FLUSH (1u << 24)
#else
#define FLUSH 0x8040
#endif
#define COUNT 64
static void multiply(Worker *w, const void *job) {
    volatile float small = 1e-30f;
    for (int i = first(w, COUNT); i >= 0; i = next(w)) {
        float found = 0.0f;
        for (int j = 0; j < 5000; j++) found = small * 1e-10f;
        if (mine(w)) (*(float *const *)job)[i] = found;
    }
}
/* How many of the results of so many jobs on two threads are not 0, in a thread that flushes denormal numbers to 0, or not */
int kept(int flush, int jobs) {
    float out[COUNT], *job = out;
    int found = 0;
    const uint64_t mode = float_mode();
    if (flush) set_float_mode(mode | FLUSH);
    for (; jobs; jobs--) {
        together(2, multiply, &job);
        for (int i = 0; i < COUNT; i++) found += *(uint32_t *)&out[i] != 0;
    }
    set_float_mode(mode);
    return found;
}
"""


@needs_kernels
def test_helpers_treat_denormal_numbers_as_the_caller_does(tmp_path):
    """Else a result would depend on who computes it. The helper is there before the caller changes its mind."""
    source, library = tmp_path / "flushing.c", tmp_path / "flushing.so"
    source.write_text(FLUSHING)
    command = ["cc", *native.FLAGS, "-fno-strict-aliasing", "-I", str(native.SOURCE.parent), str(source), "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    kept = ctypes.CDLL(str(library)).kept
    assert [kept(flush, 50) for flush in (0, 1, 0)] == [50 * 64, 0, 50 * 64]


@pytest.mark.skipif(not all(map(shutil.which, ("sh", "cc", "flock", "sha256sum"))), reason="needs a C compiler")
def test_the_compiler_of_the_tests_serves_others_too(tmp_path):
    """Triton, which compiles FlexAttention for a GPU, has the name of the output in the middle."""
    (tmp_path / "main.c").write_text("int main(void) { return 0; }\n")
    compiler, output = Path(__file__).parents[1] / "support" / "cc", tmp_path / "out"
    subprocess.run([compiler, tmp_path / "main.c", "-o", output, f"-I{tmp_path}"], check=True)
    assert output.exists()


@needs_kernels
def test_an_input_of_another_width_is_refused():
    """It would be written beyond the end of the output."""
    speculator = Speculator(zoo.load("python-1m"), "none", execution="native")
    head = speculator.target.model.lm_head
    for width in (256, 64):
        with torch.inference_mode(), pytest.raises(RuntimeError, match=r"expected an input in .* on the CPU, \[..., 128\]"):
            head(torch.zeros(2, width, dtype=speculator.target.model.dtype))
    speculator.close()
