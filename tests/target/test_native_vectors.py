"""The kernels' C source on every instruction set that can be run here: ARM's with a cross compiler and qemu's user mode.

Python is not run there. ``native_vectors.c`` runs the vectors and most kernels on fixed numbers, prints the bits of the results, and fails
where a token has other bits than alone.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
from kernel_cases import needs_kernels

from foredraft.backends import native
from foredraft.backends.products import NATIVE, Product

SOURCE = Path(__file__).with_name("native_vectors.c")
KEPT = Path(__file__).parents[2] / "build" / "vectors"
FLAGS = ("-O1", "-ffp-contract=off", "-pthread", "-std=c11", "-I", str(native.SOURCE.parent), str(SOURCE))
STRICT = ("-Wall", "-Wextra", "-Wno-missing-field-initializers", "-Werror")
ARM = {"neon": "-march=armv8-a", "bf16": "-march=armv8.2-a+fp16+bf16+i8mm"}
X86 = {
    "avx2": "-march=haswell",
    "avx512": "-march=skylake-avx512",
    "vnni": "-march=cascadelake",
    "brain": "-march=cooperlake",
    "amx": "-march=sapphirerapids",
}
FLAG = {"avx512": "avx512dq", "vnni": "avx512_vnni", "brain": "avx512_bf16", "amx": "amx_bf16"}  # that a CPU has
OTHERS = ("bf16", "brain", "amx")  # their products of bfloat16 are rounded in ways of their own
ROUNDED = {"silu", "gelu", "exact_gelu"}  # by an instruction of AVX-512 that makes numbers below 2^-126 zero
# What only nightly tests run. In bfloat16, vnni has the same as avx512 but for weights in groups.
LEFT_OUT = {torch.float32: ("bf16", "vnni", "brain", "amx"), torch.bfloat16: ("avx512", "neon")}
SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
SANITIZED_EMULATED = ("-fsanitize=undefined", "-fno-sanitize-recover=all")  # AddressSanitizer does not run under qemu
CROSS, EMULATOR = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")


def here() -> list[str]:
    """The instruction sets that can be run, the plainest first."""
    if platform.machine() == "aarch64":
        return list(ARM)[: 2 if "bf16" in native.cpu_flags() else 1]
    own = [name for name, flag in FLAG.items() if flag in native.cpu_flags()]
    return ["avx2", *own, *(ARM if CROSS and EMULATOR else ())]


def kept_at(command: list[str], run: list[str]) -> Path:
    """Where what a program prints is kept for later runs of these tests: under everything that it depends on."""
    known = [*command, *run, *sorted(native.cpu_flags())]
    known += [subprocess.run([each, "--version"], capture_output=True, text=True, check=True).stdout for each in (command[0], *run[:1])]
    known += [file.read_text() for file in sorted([SOURCE, *native.SOURCE.parent.glob("*.[ch]")])]
    return KEPT / hashlib.sha256("\0".join(known).encode()).hexdigest()[:32]


def keep(kept: Path, text: str) -> None:
    KEPT.mkdir(parents=True, exist_ok=True)
    new = kept.with_suffix(f".{os.getpid()}")
    new.write_text(text)
    new.replace(kept)


@cache
def lines(instructions: str, dtype: torch.dtype, *more: str) -> list[list[str]]:
    """What ``native_vectors.c`` prints where it is compiled for ``instructions``: of each result its name, its hash and numbers of it."""
    emulated = instructions in ARM and platform.machine() != "aarch64"
    compiler, run = (CROSS, [EMULATOR, "-cpu", "max"]) if emulated else ("cc", [])
    flags = [(ARM | X86)[instructions], *FLAGS, *more, *(["-static"] if emulated else []), *(["-DBF16"] if dtype == torch.bfloat16 else [])]
    kept = kept_at([compiler, *flags], run)
    if not kept.exists():
        with tempfile.TemporaryDirectory() as folder:
            program = str(Path(folder) / instructions)
            subprocess.run([compiler, *flags, "-o", program, "-lm"], check=True, timeout=500)
            env = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}  # the program frees nothing
            done = subprocess.run([*run, program], capture_output=True, text=True, timeout=500, check=False, env=env)
        assert not done.returncode, [*done.stdout.splitlines()[-1:], done.stderr]
        keep(kept, done.stdout)
    return [line.split() for line in kept.read_text().splitlines()]


def numbers(line: list[str]) -> torch.Tensor:
    return torch.tensor([float(each) for each in line[2:]])


def assert_close(some: list[list[str]], others: list[list[str]], names: set[str]) -> None:
    """What ``names`` name is within a rounding or two; latent attention, which prints what two layers make of them, within a few."""
    for one, other in zip(some, others):
        if one[0] in names:
            share = 30 if one[0].startswith("latents") else 100
            atol = 2.0**-126 if one[0] in ROUNDED else numbers(one).abs().mean().item() / share
            torch.testing.assert_close(numbers(other), numbers(one), rtol=2**-7, atol=atol, equal_nan=True)


def differing(some: list[list[str]], others: list[list[str]]) -> set[str]:
    assert [line[0] for line in some] == [line[0] for line in others]
    return {one[0] for one, other in zip(some, others) if one[1] != other[1]}


@needs_kernels
@pytest.mark.skipif(len(here()) == 1, reason="nothing to compare with: plain AVX2, no aarch64-linux-gnu-gcc or no qemu-aarch64 on PATH")
@pytest.mark.parametrize(
    ("dtype", "left_out"),
    [
        *LEFT_OUT.items(),
        pytest.param(torch.float32, (), marks=pytest.mark.nightly),
        pytest.param(torch.bfloat16, (), marks=pytest.mark.nightly),
    ],
    ids=["float32", "bfloat16", "float32, all", "bfloat16, all"],
)
def test_instruction_sets_give_the_same_bits(dtype, left_out):
    """All of them in float32. In bfloat16, results of BFDOT, VDPBF16PS and TDPBF16PS are within a few roundings."""
    names = [name for name in here() if name == here()[0] or name not in left_out]
    made = {name: lines(name, dtype, *(STRICT if name in ARM else ())) for name in names}
    first = made[names[0]]
    assert len(first) > 300 and sum(len(line) > 60 for line in first) > 10
    for name in names:
        if name not in OTHERS or dtype == torch.float32:
            assert not differing(first, made[name]), name
            continue
        different = differing(first, made[name])
        assert different, "the same instructions"
        assert different - ROUNDED < {line[0] for line in first if len(line) > 60}, "results of products alone"
        assert_close(first, made[name], different)


@pytest.mark.nightly
@needs_kernels
@pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is x86-64's")
@pytest.mark.parametrize("name", ["avx2", "brain"])
def test_tiles_of_amx(name):
    """They are emulated, under sanitizers. Products are within a few roundings, and each token has the bits that it has alone. The
    instructions themselves give the same bits. Weights in groups are in tiles only beside products of bytes, which AVX2 lacks."""
    if name not in here():
        pytest.skip(f"this CPU has no {FLAG[name]}")
    plain, tiled = lines(name, torch.bfloat16), lines(name, torch.bfloat16, "-DEMULATED", *SANITIZED)
    different = differing(plain, tiled)
    assert different < {line[0] for line in plain if len(line) > 60}, "results of products alone"
    assert_close(plain, tiled, different)
    if name == "brain" and "amx" in here():
        assert lines("amx", torch.bfloat16) == lines("brain", torch.bfloat16, "-DEMULATED")


def not_run() -> list[tuple[str, torch.dtype]]:
    """What only nightly tests run, or none on this machine."""
    run = here() if len(here()) > 1 else []
    return [(name, dtype) for dtype, out in LEFT_OUT.items() for name in [*X86, *ARM] if name not in run or name in out]


@needs_kernels
@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86-64 has the compilers")
@pytest.mark.parametrize("name", list(X86))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compilers_do_not_warn(name, dtype):
    """Of a macro that is defined twice, for instance: with ``-w``, the last definition silently holds everywhere."""
    for brain in (["-DBF16"], ["-DBF16", "-DEMULATED"]) if dtype == torch.bfloat16 else ([],):
        subprocess.run(["cc", X86[name], *brain, "-std=c11", "-fsyntax-only", *STRICT, str(native.SOURCE)], check=True, timeout=100)


@needs_kernels
@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86-64 has the compilers")
@pytest.mark.parametrize(("name", "dtype"), not_run(), ids=str)
def test_it_compiles_for_what_is_not_run(name, dtype, tmp_path):
    if name in ARM and CROSS is None:
        pytest.skip("no aarch64-linux-gnu-gcc on PATH")
    brain = ["-DBF16"] if dtype == torch.bfloat16 else []
    compiler = [CROSS] if name in ARM else ["cc", "-O0"]  # in half the time
    build = [*compiler, (ARM | X86)[name], *brain, *FLAGS, *STRICT, "-c"]
    if not (kept := kept_at(build, [])).exists():
        subprocess.run([*build, "-o", str(tmp_path / "built.o")], check=True, timeout=500)
        keep(kept, "")


@pytest.mark.skipif("CI" not in os.environ or (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="for CI")
def test_the_tools_for_arm_are_there():
    """Without them the tests above are skipped."""
    assert CROSS and EMULATOR


@needs_kernels
@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are x86-64's")
@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ([X86["avx2"]], "avx2"),
        ([X86["avx512"]], "avx512"),
        ([X86["vnni"]], "avx512 bytes"),
        ([X86["brain"]], "avx512 bytes dots"),
        ([X86["amx"]], "avx512 bytes dots tiles"),
        ([X86["amx"], "-DNO_TILES"], "avx512 bytes dots"),
    ],
)
def test_kernels_name_the_instructions_that_the_compiler_used(flags, names):
    command = ["cc", *flags, "-DBF16", "-E", "-P", str(native.SOURCE)]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "".join(re.findall('"(.*?)"', code.split("instructions(void)")[1])) == names
    assert native.library(torch.float32) and native.instructions(torch.float32).split()[0] in ("avx2", "avx512")
    assert native.instructions(torch.float64) == ""


@needs_kernels
@pytest.mark.skipif(
    "avx512_bf16" not in native.cpu_flags(), reason="the CPU has no AVX-512 instructions for bfloat16 that could be left out"
)
@torch.inference_mode()
def test_whole_kernels_without_the_newer_instructions_of_avx512(monkeypatch):
    """These take numbers below 2^-126 as zero."""
    layer = torch.nn.Linear(352, 192, bias=False, dtype=torch.bfloat16)
    layer.weight.fill_(1)
    x = torch.full((9, 352), 2.0**-127, dtype=torch.bfloat16)
    assert not Product([layer], NATIVE)(x).any()
    monkeypatch.setenv("FOREDRAFT_INSTRUCTIONS", "avx512-plain")
    monkeypatch.setattr(native, "_known", {})
    monkeypatch.setattr(native, "FLAGS", tuple("-O1" if each == "-O3" else each for each in native.FLAGS))
    assert (Product([layer], NATIVE)(x) == 352 * 2.0**-127).all()


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("instructions", here())
def test_memory_and_undefined_behaviour(instructions, dtype):
    emulated = instructions in ARM and platform.machine() != "aarch64"
    lines(instructions, dtype, *(SANITIZED_EMULATED if emulated else SANITIZED))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is x86-64's")
@pytest.mark.parametrize("allowed", [True, False])
def test_tiles_are_used_where_the_system_allows_them(allowed, monkeypatch):
    flags = []
    monkeypatch.delenv("FOREDRAFT_INSTRUCTIONS", raising=False)
    monkeypatch.setattr(native, "cpu_flags", lambda: frozenset({"avx2", "fma", "f16c", "amx_bf16"}))
    monkeypatch.setattr(native, "_tiles_allowed", lambda: allowed)
    monkeypatch.setattr(native, "private_folder", lambda name: None)

    def compile(compiler, given):
        flags.extend(given)
        raise OSError("not compiled")

    monkeypatch.setattr(native, "_compile", compile)
    assert "not compiled" in native._library(torch.bfloat16)
    assert ("-DNO_TILES" in flags) != allowed
    monkeypatch.setenv("FOREDRAFT_INSTRUCTIONS", "amx")
    wanted = "not compiled" if allowed else "does not let this process use AMX; leave FOREDRAFT_INSTRUCTIONS out"
    assert wanted in native._library(torch.bfloat16)


@pytest.mark.parametrize(
    ("machine", "system", "features", "asked", "message"),
    [
        ("aarch64", "Linux", "fp asimd", "", None),
        ("aarch64", "Linux", "fp asimd", "neon", None),
        ("aarch64", "Linux", "fp asimd bf16 i8mm", "bf16", None),
        ("aarch64", "Linux", "fp asimd", "bf16", "asks for bf16, which this CPU does not have"),
        ("aarch64", "Linux", "fp asimd", "avx2", "'avx2'; set it to bf16 or neon"),
        ("aarch64", "Linux", "fp", "", "this CPU has no ASIMD"),
        ("arm64", "Darwin", "fp asimd", "", "for Linux on x86-64 or ARM (aarch64), and this is Darwin on arm64"),
        ("x86_64", "Linux", "avx2 fma f16c", "neon", "'neon'; set it to amx or avx512 or avx512-plain or avx2"),
        ("x86_64", "Linux", "avx2 fma f16c avx512f", "amx", "asks for amx, which this CPU does not have"),
        ("x86_64", "Linux", "avx2 fma f16c avx512f amx_tile amx_bf16", "amx", None),
    ],
)
def test_machines(machine, system, features, asked, message, monkeypatch, tmp_path):
    about = tmp_path / "cpuinfo"
    about.write_text(f"processor\t: 0\n{'flags' if machine == 'x86_64' else 'Features'}\t: {features}\n")
    monkeypatch.setattr(native, "CPUS", about)
    monkeypatch.setattr(native, "cpu_flags", native.cpu_flags.__wrapped__)
    monkeypatch.setattr(native.platform, "machine", lambda: machine)
    monkeypatch.setattr(native.platform, "system", lambda: system)
    monkeypatch.setenv("FOREDRAFT_INSTRUCTIONS", asked)
    if message is None:
        native._check_machine(torch.float32)
    else:
        with pytest.raises(native.Unavailable) as found:
            native._check_machine(torch.float32)
        assert message in str(found.value)
