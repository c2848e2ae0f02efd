"""The kernels' C source on every instruction set that can be run here: ARM's with a cross compiler and qemu's user mode.

Python is not run there. ``native_vectors.c`` runs the vectors and most kernels on fixed numbers, prints the bits of the results, and fails
where a token has other bits than alone.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from kernel_cases import needs_kernels

from foredraft.backends import native

SOURCE = Path(__file__).with_name("native_vectors.c")
FLAGS = ("-O1", "-ffp-contract=off", "-pthread", "-std=c11", "-I", str(native.SOURCE.parent), str(SOURCE))
STRICT = ("-Wall", "-Wextra", "-Wno-missing-field-initializers", "-Werror")
ARM = {"neon": "-march=armv8-a", "bf16": "-march=armv8.2-a+fp16+bf16+i8mm"}
X86 = {"avx2": "-march=haswell", "avx512": "-march=skylake-avx512"}
SANITIZED = ("-fsanitize=undefined", "-fno-sanitize-recover=all")
CROSS, EMULATOR = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
needs_arm = pytest.mark.skipif(
    platform.machine() != "aarch64" and not (CROSS and EMULATOR), reason="no aarch64-linux-gnu-gcc or no qemu-aarch64 on PATH"
)


def here() -> list[str]:
    """The instruction sets that can be run, the plainest first."""
    if platform.machine() == "aarch64":
        return list(ARM)[: 2 if "bf16" in native.cpu_flags() else 1]
    return ["avx2", *(["avx512"] if "avx512dq" in native.cpu_flags() else []), *ARM]


def lines(instructions: str, dtype: torch.dtype, folder: Path, *more: str) -> list[list[str]]:
    """What ``native_vectors.c`` prints where it is compiled for ``instructions``: of each result its name, its hash and numbers of it."""
    emulated = instructions in ARM and platform.machine() != "aarch64"
    compiler, run = (CROSS, [EMULATOR, "-cpu", "max"]) if emulated else ("cc", [])
    program = folder / instructions
    flags = [(ARM | X86)[instructions], *FLAGS, *more, *(["-static"] if emulated else []), *(["-DBF16"] if dtype == torch.bfloat16 else [])]
    subprocess.run([compiler, *flags, "-o", str(program), "-lm"], check=True, timeout=500)
    done = subprocess.run([*run, str(program)], capture_output=True, text=True, timeout=500, check=False)
    assert not done.returncode, [*done.stdout.splitlines()[-1:], done.stderr]
    return [line.split() for line in done.stdout.splitlines()]


def numbers(line: list[str]) -> torch.Tensor:
    return torch.tensor([float(each) for each in line[2:]])


def differing(some: list[list[str]], others: list[list[str]]) -> set[str]:
    assert [line[0] for line in some] == [line[0] for line in others]
    return {one[0] for one, other in zip(some, others) if one[1] != other[1]}


@needs_arm
@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_instruction_sets_give_the_same_bits(dtype, tmp_path):
    """All of them in float32, and in bfloat16 those without BFDOT, which rounds in its own way: results are within a rounding or two."""
    made = {name: lines(name, dtype, tmp_path, *(STRICT if name in ARM else ())) for name in here()}
    first = made[here()[0]]
    assert len(first) > 300 and sum(len(line) > 60 for line in first) > 10
    for name in here():
        if name != "bf16" or dtype == torch.float32:
            assert not differing(first, made[name]), name
            continue
        different = differing(first, made[name])
        assert different < {line[0] for line in first if len(line) > 60}, "results of products alone"
        for one, other in zip(first, made[name]):
            if one[0] in different:
                size = numbers(one).abs().mean().item()
                torch.testing.assert_close(numbers(other), numbers(one), rtol=2**-7, atol=size / 100)


@needs_kernels
@pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is x86-64's")
def test_tiles_of_amx(tmp_path):
    """They are emulated, and products are within a rounding or two; each token has the bits that it has alone. The instructions themselves
    are compiled, and not run."""
    plain, tiled = lines("avx2", torch.bfloat16, tmp_path), lines("avx2", torch.bfloat16, tmp_path, "-DTILES", "-DEMULATED")
    different = differing(plain, tiled)
    assert different and different < {line[0] for line in plain if len(line) > 60}, "results of products alone"
    for one, other in zip(plain, tiled):
        if one[0] in different:
            torch.testing.assert_close(numbers(other), numbers(one), rtol=2**-7, atol=numbers(one).abs().mean().item() / 100)
    built = ["cc", "-march=sapphirerapids", "-DTILES", "-DBF16", *FLAGS, *STRICT, "-c", "-o", str(tmp_path / "built.o")]
    subprocess.run(built, check=True, timeout=500)
    found = subprocess.run(["objdump", "-d", str(tmp_path / "built.o")], capture_output=True, text=True, check=True).stdout
    assert "tdpbf16ps" in found and "ldtilecfg" in found


@needs_arm
@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("instructions", here())
def test_undefined_behaviour(instructions, dtype, tmp_path):
    lines(instructions, dtype, tmp_path, *SANITIZED)


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
        ("x86_64", "Linux", "avx2 fma f16c", "neon", "'neon'; set it to amx or avx512 or avx2"),
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
