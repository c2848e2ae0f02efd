"""Kernels of our own for CPUs with AVX-512, AVX2 or NEON, compiled on the machine that runs them.

``layer.c`` is compiled once per dtype with the C compiler at hand, in half a minute, for the instructions that the machine has
(``vectors.h``). The result is kept in the cache folder together with its hash; if that folder cannot be used, every process compiles
anew. If there is no compiler, what another process has kept there is used. If there is nothing, or the CPU is an x86-64 without AVX2,
:func:`library` says so and other layouts are used. The kernels have their own threads, as many as torch uses. On a busy machine these do
not wait for preempted ones (``crew.h``).
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from foredraft.caching import private_folder, warn_once
from foredraft.files import replacing
from foredraft.logits import noise
from foredraft.verification import match, ratios

SOURCE = Path(__file__).with_name("layer.c")
SOURCES = (SOURCE, *sorted(SOURCE.parent.glob("*.h")))
FLAGS = ("-O3", "-ffp-contract=off", "-pthread", "-shared", "-fPIC", "-std=c11", "-w")
ALL = {"x86_64": "-march=native", "aarch64": "-mcpu=native"}  # by machine: compile for all instructions that the CPU has
NEEDED = {"x86_64": ("avx2", "fma", "f16c"), "aarch64": ("asimd",)}
INSTRUCTIONS: dict[str, dict[str, tuple[str, ...]]] = {  # values of FOREDRAFT_INSTRUCTIONS, and their flags for the compiler
    "x86_64": {
        "amx": (),
        "avx512": ("-DNO_TILES",),
        "avx512-plain": ("-DNO_TILES", "-mno-avx512bf16", "-mno-avx512vnni"),
        "avx2": ("-DNO_TILES", "-mno-avx512f"),
    },
    "aarch64": {"bf16": (), "neon": ("-march=armv8-a",)},
}
ASKED = {
    "amx": "amx_bf16",
    "avx512": "avx512f",
    "avx512-plain": "avx512f",
    "bf16": "bf16",
}  # the CPU flags that these need, as Linux names them
CPUS = Path("/proc/cpuinfo")
USE_TILES = (158, 0x1023, 18)  # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) of Linux
LIMIT = 300  # seconds for the compiler, on a busy machine
DIGEST = 32  # bytes of the hash at the end of a file of kernels
LOADING = threading.Lock()
KEYS, QUERIES, FEWER, BATCH, KEY_SEGMENT, PIECES = 64, 256, 64, 4, 1024, 4  # of ``layer.c``
POINTERS = ("cos", "sin", "begins", "row_of", "slots", "states", "projected", "attended", "wide", "thin", "scratch")  # of its ``Pass``


class Unavailable(Exception):
    """There are no kernels for this machine; the message says why."""


class Matrix(ctypes.Structure):
    """``Matrix`` of ``products.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("values", "scale", "over", "mins", "bias", "zeros", "order")),
        *((name, ctypes.c_int64) for name in ("kind", "group", "zero", "scales", "nested")),
        ("next", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
    )


class Norm(ctypes.Structure):
    """``Norm`` of ``layer.c``."""

    _fields_ = [(name, kind) for name, kind in (("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("kind", ctypes.c_int64))]

    @staticmethod
    def of(weight: Tensor | None, bias: Tensor | None = None, kind: int = 0) -> Norm:
        """From parameters, which the caller keeps alive; no norm without a weight."""
        return Norm(*(None if each is None else each.data_ptr() for each in (weight, bias)), kind)


class Layer(ctypes.Structure):
    """``Layer`` of ``attention.h``."""

    _fields_: ClassVar[list[Any]] = (
        [(name, ctypes.c_int64) for name in ("hidden", "inner", "heads", "key_heads", "size")]
        + [(name, ctypes.c_double) for name in ("eps", "head_eps", "scaling")]
        + [(name, Matrix) for name in ("qkv", "output", "gate_up", "down")]
        + [(name, Norm) for name in ("before", "after", "query_norm", "key_norm", "between")]
        + [(name, Matrix) for name in ("cross_query", "cross_output")]
        + [("bias", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("reach", "activation", "behind"))]
        + [("sinks", ctypes.c_void_p), ("cap", ctypes.c_double)]
        + [("attention_given", Norm), ("mlp_given", Norm), ("residual", ctypes.c_double)]
        + [(name, ctypes.c_int64) for name in ("kind", "window", "rotary", "rotation", "head_norms", "parallel", "grouped")]
        + [("experts", ctypes.c_void_p), ("latent", ctypes.c_void_p)]
    )


class Kind(ctypes.Structure):
    """``Kind`` of ``attention.h``."""

    _fields_ = [(name, ctypes.c_int64) for name in ("row_stride", "head_stride", "table_stride", "page_stride", "spare")] + [
        (name, ctypes.c_void_p) for name in ("table", "cos", "sin", "factor")
    ]


class Pass(ctypes.Structure):
    """``Pass`` of ``attention.h``."""

    _fields_ = (
        [(name, ctypes.c_int64) for name in ("threads", "rows", "tokens", "nodes", "width", "row_stride", "head_stride")]
        + [(name, ctypes.c_int64) for name in ("table_stride", "page_stride", "spare")]
        + [(name, ctypes.c_int64) for name in ("mask_row_stride", "mask_stride")]
        + [(name, ctypes.c_void_p) for name in (*POINTERS, "positions", "ends", "cross_keys", "cross_values", "cross_head_strides")]
        + [(name, ctypes.c_void_p) for name in ("table", "kinds", "places", "experts", "segments")]
        + [("segments_room", ctypes.c_int64), ("touched", ctypes.c_void_p)]
    )
    sums: Any = None  # what `segments` points to
    beside: Any = None  # keeps alive what the pointers refer to


class Experts(ctypes.Structure):
    """``Experts`` of ``experts.h``."""

    _fields_ = (
        [(name, ctypes.c_int64) for name in ("count", "chosen", "inner")]
        + [("router", Matrix), ("gate_up", Matrix), ("down", Matrix), ("width", ctypes.c_int64)]
        + [(name, ctypes.c_void_p) for name in ("gate_up_bias", "down_bias")]
        + [(name, ctypes.c_int64) for name in ("routing", "normed", "exact", "by_number", "activation", "shared")]
        + [(name, ctypes.c_double) for name in ("alpha", "limit")]
        + [(name, ctypes.c_void_p) for name in ("router32", "correction")]
        + [(name, ctypes.c_int64) for name in ("groups", "open", "by_best", "unsorted")]
        + [(name, ctypes.c_double) for name in ("least", "factor")]
    )
    beside: Any = None  # keeps alive what the pointers refer to


class Latent(ctypes.Structure):
    """``Latent`` of ``latent.h``."""

    _fields_ = (
        [(name, ctypes.c_int64) for name in ("rank", "turned", "plain", "values", "query_rank")]
        + [(name, Matrix) for name in ("kept", "query_in", "query")]
        + [(name, ctypes.c_void_p) for name in ("to_latents", "to_values")]
    )


class States(ctypes.Structure):
    """``States`` of ``layer.c``."""

    _fields_ = [(name, kind) for name, kind in (("count", ctypes.c_int64), ("numbers", ctypes.c_void_p), ("out", ctypes.c_void_p))]


class Embedded(ctypes.Structure):
    """``Embedded`` of ``layer.c``."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("tokens", "positions")]
        + [("norm", Norm), *((name, ctypes.c_int64) for name in ("hidden", "before", "padding"))]
        + [(name, ctypes.c_double) for name in ("scale", "eps")]
    )


class Growth(ctypes.Structure):
    """``Growth`` of ``growth.h``."""

    _fields_ = (
        [("layers", ctypes.c_void_p), ("embedded", Embedded), ("norm", Norm)]
        + [(name, ctypes.c_void_p) for name in ("cos", "sin", "head", "keys", "values")]
        + [(name, ctypes.c_int64) for name in ("count", "vocab", "columns", "offset", "start", "missed", "most", "depth", "k", "total")]
        + [(name, ctypes.c_double) for name in ("eps", "delta", "least")]
        + [(name, ctypes.c_void_p) for name in ("prices", "x", "out", "logits", "angles", "mask")]
        + [("stride", ctypes.c_int64)]
        + [(name, ctypes.c_void_p) for name in ("slots", "begins", "candidates", "scores", "order", "eagle", "medusa")]
        + [(name, ctypes.c_double) for name in ("logit_scale", "logit_cap")]
    )


class Eagle(ctypes.Structure):
    """``Eagle`` of ``growth.h``."""

    _fields_ = (
        [("fuse", Matrix)]
        + [(name, ctypes.c_void_p) for name in ("of_embedding", "of_state", "features", "ids", "inputs", "states")]
        + [(name, ctypes.c_int64) for name in ("width", "residual_normed", "output_normed")]
    )


class Draws(ctypes.Structure):
    """``Draws`` of ``growth.h``."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("words", "hashes", "q")]
        + [(name, ctypes.c_int64) for name in ("apart", "columns", "top_k")]
        + [(name, ctypes.c_double) for name in ("temperature", "top_p", "min_p")]
    )


class Chains(ctypes.Structure):
    """``Chains`` of ``rules.h``."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("p", "q", "tokens", "drafted", "keys", "positions", "hashes")]
        + [(name, ctypes.c_int64) for name in ("rows", "nodes", "width", "apart", "blocks")]
        + [(name, ctypes.c_void_p) for name in ("survival", "chances", "wrong", "accepted", "chosen")]
    )


class Lists(ctypes.Structure):
    """``Lists`` of ``growth.h``."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("contexts", "first", "tokens", "odds")] + [("count", ctypes.c_int64)]


class Medusa(ctypes.Structure):
    """``Medusa`` of ``growth.h``."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("state", "layers", "lm_heads")]
        + [(name, ctypes.c_int64) for name in ("hidden", "count", "vocabulary")]
        + [(name, ctypes.c_void_p) for name in ("lists", "weights")]
        + [("reach", ctypes.c_int64), ("text", ctypes.c_void_p)]
        + [(name, ctypes.c_int64) for name in ("length", "heed")]
        + [(name, ctypes.c_void_p) for name in ("shares", "x", "y", "own", "read", "above")]
        + [("level", ctypes.c_int64)]
    )


def _unlock() -> None:
    """In a process that was forked, nobody gives back the lock that another thread held."""
    global LOADING
    LOADING = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)


def library(dtype: torch.dtype) -> ctypes.CDLL:
    """The functions of ``layer.c`` for ``dtype`` and every kind of weights.

    Raises:
        Unavailable: there are none for this machine or dtype.
    """
    found = _known.get(dtype)  # who has it does not wait for another thread that compiles
    if found is None:
        with LOADING:
            found = _known[dtype] = _known.get(dtype) or _library(dtype)
    if isinstance(found, str):
        raise Unavailable(found)
    return found


def loaded(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The same if this process has loaded them already."""
    found = _known.get(dtype)
    return None if isinstance(found, str) else found


def instructions(dtype: torch.dtype) -> str:
    """What the compiler used for the kernels that this process has loaded for ``dtype``, which an older one may not know; "" if none."""
    kernels = loaded(dtype)
    return "" if kernels is None else kernels.instructions().decode()


_known: dict[torch.dtype, ctypes.CDLL | str] = {}  # a failure is not tried again in this process


def _library(dtype: torch.dtype) -> ctypes.CDLL | str:
    """The same, or the reason that there are none."""
    try:
        _check_machine(dtype)
        return _declared(_loaded(dtype), dtype)
    except Unavailable as error:
        return str(error)
    except (OSError, subprocess.TimeoutExpired) as error:
        why = f"they could not be compiled or loaded: {error}"
        warn_once(f"the native kernels are not used, which is slower: {why}")
        return why


def _loaded(dtype: torch.dtype) -> ctypes.CDLL:
    """Load the kernels from the cache folder if an intact file is there; otherwise compile them, and keep them there if possible."""
    named = os.environ.get("CC", "")
    compiler = shutil.which(named) or shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    if compiler and named and shutil.which(named) is None:
        warn_once(f"CC={named!r} is no program, so {compiler} compiles the native kernels")
    machine = platform.machine()
    asked = os.environ.get("FOREDRAFT_INSTRUCTIONS", "")
    flags = [*FLAGS, ALL[machine], *INSTRUCTIONS[machine].get(asked, ()), *(["-DBF16"] if dtype == torch.bfloat16 else [])]
    if "avx512f" in cpu_flags() and "avx512bw" not in cpu_flags():
        flags.append("-mno-avx512f")  # the kernels need both, or AVX2
    if ASKED["amx"] in cpu_flags() and "-DNO_TILES" not in flags and not _tiles_allowed():
        if asked == "amx":
            raise Unavailable("the system does not let this process use AMX; leave FOREDRAFT_INSTRUCTIONS out")
        flags.append("-DNO_TILES")
    folder = private_folder("kernels")
    key = _hash(revision(), " ".join(flags), " ".join(sorted(cpu_flags())))
    if compiler is None:
        return _newest(folder, key)
    kept = None if folder is None else folder / f"kernels-{key}-{_hash(_run(compiler, '--version').stdout)}.so"
    if kept is not None and _whole(kept):
        try:
            return ctypes.CDLL(str(kept))
        except OSError as error:  # such as from a folder from which nothing may be executed; the one that is compiled into may allow it
            warn_once(f"compiled kernels cannot be loaded from {folder}, so every process compiles them anew: {error}")
    try:
        made = _compile(compiler, flags)
    except (OSError, subprocess.TimeoutExpired):
        if kept is None or not _whole(kept):
            raise
        return ctypes.CDLL(str(kept))  # another process has compiled them meanwhile
    if kept is not None and not _whole(kept):  # another process may have kept it meanwhile, and a third one may be about to load it
        try:
            kept.unlink(missing_ok=True)  # it may be damaged, and have any mode
            with replacing(kept, private=True) as new:
                new.write_bytes(made.read_bytes() + hashlib.sha256(made.read_bytes()).digest())
        except OSError as error:
            warn_once(f"compiled kernels cannot be kept in {folder}, so every process compiles them anew: {error.strerror or error}")
    try:
        return ctypes.CDLL(str(made))
    except OSError:
        if kept is None or not _whole(kept):
            raise
        return ctypes.CDLL(str(kept))


def _newest(folder: Path | None, key: str) -> ctypes.CDLL:
    """The kernels that any compiler has made for ``key``, as in an image to which no compiler was copied."""
    found = [] if folder is None else sorted(folder.glob(f"kernels-{key}-*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
    if (newest := next(filter(_whole, found), None)) is None:
        raise Unavailable("there is no C compiler (gcc, cc or clang)")
    return ctypes.CDLL(str(newest))


def _tiles_allowed() -> bool:
    """Whether the system lets this process use the tiles of AMX; every process has to ask for that once."""
    return not ctypes.CDLL(None).syscall(*USE_TILES)


def _whole(path: Path) -> bool:
    """Whether the file of kernels at ``path`` is intact: its hash follows its content. Loading a truncated file kills the process."""
    try:
        content = path.read_bytes()
    except OSError:  # there is no file, or an attempt to replace it reports why it cannot be read
        return False
    if hashlib.sha256(content[:-DIGEST]).digest() == content[-DIGEST:]:
        return True
    warn_once(f"{path} is damaged and not used")
    return False


def _declared(kernels: ctypes.CDLL, dtype: torch.dtype) -> ctypes.CDLL:
    """``kernels`` for ``dtype`` with the types of arguments and results declared."""
    pointer, number = ctypes.c_void_p, ctypes.c_int
    kernels.linear.argtypes = [ctypes.POINTER(Matrix), pointer, pointer, number, number, number, number]
    kernels.layer.argtypes = [ctypes.POINTER(Layer), ctypes.POINTER(Pass), pointer, pointer, pointer, pointer, number]
    kernels.layer_over.argtypes = [ctypes.POINTER(Layer), ctypes.POINTER(Pass), pointer, pointer, pointer, number, pointer, pointer]
    several, size = ctypes.POINTER(pointer), ctypes.c_int64
    kernels.attend_over.argtypes = [ctypes.POINTER(Layer), ctypes.POINTER(Pass), pointer, pointer, pointer]
    copied: list[Any] = [pointer, size, size, size, pointer]
    kernels.write_over.argtypes = [ctypes.POINTER(Pass), number, number, *copied, *copied]
    held: list[Any] = [several, several, size, ctypes.POINTER(Norm), ctypes.c_double, pointer, ctypes.POINTER(States), pointer]
    kernels.model.argtypes = [several, number, ctypes.POINTER(Pass), pointer, pointer, *held]
    kernels.embed.argtypes = [ctypes.POINTER(Embedded), pointer, pointer, pointer, number]
    kernels.grow.argtypes = [ctypes.POINTER(Growth), ctypes.POINTER(Pass), *[pointer] * 7]
    kernels.fill.argtypes = [ctypes.POINTER(Growth), ctypes.POINTER(Pass), *[pointer] * 3, number, pointer, ctypes.POINTER(Draws)]
    kernels.decode.argtypes = [ctypes.POINTER(Growth), ctypes.POINTER(Pass), pointer, number, pointer, number, *[pointer] * 3]
    kernels.largest.argtypes = [pointer, size, size, size, number, pointer, pointer, number]
    kernels.race.argtypes = [pointer, pointer, pointer, size, size, pointer, number]
    kernels.choose_all.argtypes = [pointer, pointer, size, size, pointer, number]
    kernels.chains.argtypes, kernels.chains.restype = [ctypes.POINTER(Chains), number], None
    kernels.draw.argtypes, kernels.draw.restype = [ctypes.POINTER(Draws), number, number, pointer, size, number, pointer, number], None
    kernels.instructions.restype = ctypes.c_char_p
    kernels.grow.restype = kernels.fill.restype = kernels.decode.restype = number
    for each in (kernels.linear, kernels.layer, kernels.layer_over, kernels.model, kernels.embed, kernels.largest, kernels.race):
        each.restype = None
    kernels.attend_over.restype = kernels.write_over.restype = kernels.choose_all.restype = None
    kernels.experts_room.argtypes, kernels.experts_room.restype = [ctypes.POINTER(Experts), number, number, number], size
    kernels.experts_over.argtypes = [ctypes.POINTER(Experts), pointer, pointer, number, number, *[pointer] * 3, number]
    kernels.experts_over.restype = None
    kernels.share.argtypes, kernels.share.restype = [pointer], pointer
    _crew[:] = [kernels.share(_crew[0] if _crew else None)]
    match.kernels[dtype] = partial(choices, kernels)
    if noise.kernel is None:
        noise.kernel = partial(race, kernels)
        ratios.kernel = partial(chains, kernels)
    return kernels


_crew: list[int] = []  # address of the thread pool that all kernels of this process share: that of the library that was loaded first


@lru_cache(maxsize=1)
def revision() -> str:
    """A hash of the kernels' source, which changes with it; so may the time that they take."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()[:12]


ATTENTION, MLP = 1, 2  # of ``layer.c``
VALUES, EIGHTS, GROUPS_OF_FOUR, GROUPS_OF_EIGHT, GROUPS_OF_E2M1, GROUPS_OF_SIX = range(6)  # kinds of weights, likewise
SCALES = (torch.float16, torch.bfloat16, torch.float32, torch.int8)  # dtypes of the scales of groups, likewise
SILU, GELU, RELU, EXACT, ALONE = range(5)  # likewise
SQUARED = 8
CENTRED, PLUS_ONE, ONCE = 1, 2, 4  # kinds of norms
INTERLEAVED, TURNED_ONCE, IN_PAIRS = 1, 2, 4  # kinds of rotation
WHOLE_HEADS, BEHIND = 1, 2  # kinds of norms of queries and keys
OF_ALL, OF_CHOSEN, OF_EACH, CLAMPED, UNGATED, GATED = 0, 1, 2, 16, 1, 2  # of ``experts.h``
MOST_EXPERTS, MOST_CHOSEN = 1024, 32  # likewise
MOST_OF_LARGEST = 16  # ``MOST`` of ``growth.h``


def largest(values: Tensor, k: int) -> Tensor | None:
    """``[N, k]`` int64 indices of the k largest numbers in each line of ``values`` ``[N, V]``, V >= k, on the CPU: largest first, the first
    of equal ones first. None if there is no kernel for that."""
    return _largest(values, k, None)


def likeliest(logits: Tensor, k: int) -> tuple[Tensor, Tensor] | None:
    """``[N, k]`` log-probabilities, float32, of the k likeliest tokens of ``logits`` ``[N, V]``, and these, as :func:`largest` has them."""
    logs = torch.empty(len(logits), k, dtype=torch.float32, device="cpu")
    found = _largest(logits, k, logs)
    return None if found is None else (logs, found)


def _largest(values: Tensor, k: int, logs: Tensor | None) -> Tensor | None:
    if not 1 <= k <= MOST_OF_LARGEST or values.stride(1) != 1 or refusal(values.dtype) is not None:
        return None
    out = torch.empty(len(values), k, dtype=torch.int64, device="cpu")  # whatever the default device is
    lines, width = values.shape
    threads, place = min(torch.get_num_threads(), lines), None if logs is None else logs.data_ptr()
    library(values.dtype).largest(values.data_ptr(), lines, width, values.stride(0), k, out.data_ptr(), place, threads)
    return out


def choices(kernels: ctypes.CDLL, scores: Tensor, nodes: Sequence[tuple[int, int]]) -> list[int]:
    """Index of the first largest number of ``scores`` ``[R, N, V]`` at each ``(row, node)``, -1 where that is not finite or one is NaN. The
    scores are on the CPU, in the kernels' dtype."""
    scores = scores if scores.stride(2) == 1 else scores.contiguous()
    count, (by_row, by_node, _) = len(nodes), scores.stride()
    places, found = (ctypes.c_int64 * count)(*(row * by_row + node * by_node for row, node in nodes)), (ctypes.c_int64 * count)()
    kernels.choose_all(scores.data_ptr(), places, count, scores.shape[2], found, min(torch.get_num_threads(), count))
    return list(found)


def race(kernels: ctypes.CDLL, weights: Tensor, words: Tensor, hashes: Tensor) -> Tensor:
    """``[N]`` int64 winners of the races of ``weights`` ``[N, V]`` float32 on the CPU, as :meth:`~foredraft.logits.noise.Noise.race` has
    them; -1 where two tokens are so close that rounding decides. ``words`` ``[N]`` int64 and ``hashes`` ``[V]`` int32 make the noise."""
    weights, words = weights.contiguous(), words.contiguous()
    out = torch.empty(len(weights), dtype=torch.int64, device="cpu")
    where = (each.data_ptr() for each in (weights, words, hashes))
    kernels.race(*where, *weights.shape, out.data_ptr(), min(torch.get_num_threads(), len(weights)))
    return out


def chains(
    kernels: ctypes.CDLL, tokens: Tensor, drafted: Tensor, p: Tensor, q: Tensor, drawn: noise.Noise, blocks: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """How chains of ``tokens`` ``[R, N]`` end, by ``blocks`` or token by token: ``[R]`` how many are accepted; ``[R]`` the next token,
    -1 where rounding decides; ``[R, N - 1]`` whether q is no distribution; ``[R, N - 1]`` P_1 … of :mod:`foredraft.verification.block`."""
    (rows, nodes, width), q_lines = p.shape, q.stride(2) == 1 and q.stride(1) == q.shape[2]
    q = q if q_lines else q.contiguous()  # other nodes may lie behind those of a row
    given = [p.contiguous(), q, *(each.contiguous() for each in (tokens, drafted, drawn.keys, drawn.positions)), drawn.hashes(width)]
    edges = rows * (nodes - 1)
    found = torch.empty(2 * rows + edges, dtype=torch.int64, device="cpu")
    chances = torch.empty(2 * edges, dtype=torch.float32, device="cpu")
    at, here = found.data_ptr(), chances.data_ptr()
    made = here, here + 4 * edges, at + 16 * rows, at, at + 8 * rows
    job = Chains(*(each.data_ptr() for each in given), rows, nodes, width, q.stride(0), blocks, *made)
    kernels.chains(job, min(torch.get_num_threads(), edges))
    return found[:rows], found[rows : 2 * rows], found[2 * rows :].view(rows, -1), chances[:edges].view(rows, -1)


def scratch(size: int) -> int:
    """Floats of scratch per thread for attention over heads of ``size``: ``SCRATCH`` of ``layer.c``."""
    return QUERIES * KEYS + ((BATCH + 1) * KEYS + 3 * QUERIES) * size + 34 * QUERIES


def make_room_for_segments(about: Pass, layer: Layer, tokens: int, width: int) -> None:
    """Allocate scratch for dividing attention over ``width`` slots by segments, in passes over ``tokens`` tokens, filler included."""
    segments = -(-width // KEY_SEGMENT)
    if segments == 1 or about.threads == 1:
        return
    queries = min(PIECES * int(about.threads) * FEWER, 2 * tokens * int(layer.heads))
    needed = segments * queries * (int(layer.size) + 17)
    if about.segments_room < needed:
        about.sums = torch.empty(needed, dtype=torch.float32)
        about.segments, about.segments_room = about.sums.data_ptr(), needed


def refusal(dtype: torch.dtype) -> str | None:
    """Why there are no kernels for ``dtype`` here, or None."""
    try:
        library(dtype)
    except Unavailable as error:
        return str(error)
    return None


def _check_machine(dtype: torch.dtype) -> None:
    machine = platform.machine()
    if platform.system() != "Linux" or machine not in INSTRUCTIONS:
        raise Unavailable(f"they are for Linux on x86-64 or ARM (aarch64), and this is {platform.system()} on {machine}")
    if dtype not in (torch.float32, torch.bfloat16):
        raise Unavailable(f"they are for float32 and bfloat16, not {dtype}")
    has, known = cpu_flags(), INSTRUCTIONS[machine]
    if missing := [name.upper() for name in NEEDED[machine] if name not in has]:
        raise Unavailable(f"this CPU has no {' and no '.join(missing)}")
    asked = os.environ.get("FOREDRAFT_INSTRUCTIONS", "")
    why = None
    if asked and asked not in known:
        why = f"FOREDRAFT_INSTRUCTIONS is {asked!r}; set it to {' or '.join(known)}, or leave it out"
    elif asked in ASKED and ASKED[asked] not in has:
        why = f"FOREDRAFT_INSTRUCTIONS asks for {asked}, which this CPU does not have; leave it out"
    if why is not None:
        warn_once(f"the native kernels are not used, which is slower: {why}")
        raise Unavailable(why)


@lru_cache(maxsize=1)
def cpu_flags() -> frozenset[str]:
    """The names of the instruction sets that the CPU has, as Linux lists them."""
    lines = CPUS.read_text().splitlines() if CPUS.exists() else []
    line = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(line.split())


@lru_cache(maxsize=1)
def _temporary() -> str:
    """A folder that others cannot read, removed when the process ends, and not when one that it has forked does."""
    folder = tempfile.mkdtemp(prefix="foredraft-kernels-")
    atexit.register(_remove, folder, os.getpid())
    return folder


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def _hash(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]


def _compile(compiler: str, flags: list[str]) -> Path:
    """The file with the compiled kernels, which lasts as long as the process."""
    whole = Path(tempfile.mkdtemp(dir=_temporary()), "layer.so")
    done = _run(compiler, *flags, str(SOURCE), "-lm", "-o", str(whole))
    if done.returncode:
        lines = (done.stderr.strip() or "no message").splitlines()
        why = next((line for line in lines if "error" in line), lines[-1])  # notes and the source follow
        raise OSError(f"{compiler} failed: {why}")
    return whole


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    """What ``command`` of a compiler prints, in English; its encoding may be any."""
    plain = {**os.environ, "LC_ALL": "C"}
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=LIMIT, env=plain)
