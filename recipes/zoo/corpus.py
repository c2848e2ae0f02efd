"""Python source that is already on this machine, as a training corpus.

Every machine that can run Foredraft has Python's standard library and Foredraft's own dependencies. Together they are some
hundred megabytes of good Python, which is enough to train a model of a few million parameters without a network. This module
finds those files, cleans them and splits them:

1. **discover** — the standard library through `sysconfig`, distributions through `importlib.metadata`; vendored copies and
   test suites are left out.
2. **filter** — generated tables, unreadable files and minified lines say little about how Python is written.
3. **deduplicate** — MinHash over five-word shingles (Broder 1997); of two near-duplicates the first stays, and held-out files
   come first, so no training file is a near copy of a held-out one.
4. **cap** — at most `PACKAGE_CAP` bytes of any one package, so that the largest do not drown the rest.

The split is by *package*: a held-out package contributes nothing to training, neither to the tokenizer nor to the models.
Everything is deterministic: the same installed versions give the same corpus, byte for byte.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import sysconfig
import tokenize
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

DISTRIBUTIONS = (
    "accelerate", "annotated-doc", "annotated-types", "anyio", "click", "filelock", "fsspec", "h11", "httpcore2", "httpx2",
    "huggingface_hub", "hypothesis", "iniconfig", "Jinja2", "markdown-it-py", "mpmath", "mypy", "networkx", "numpy", "packaging",
    "pathspec", "peft", "pip", "pluggy", "psutil", "pydantic", "Pygments", "pytest", "PyYAML", "regex", "rich", "safetensors",
    "scipy", "setuptools", "shellingham", "sortedcontainers", "sympy", "tokenizers", "torch", "tqdm", "transformers", "truststore",
    "typer", "typing_extensions", "typing-inspection",
)  # fmt: skip
"""The dependencies whose source is used, where installed: public distributions under permissive licences."""

HELD_OUT = frozenset({
    "accelerate", "h11", "pluggy", "rich", "tqdm",
    "stdlib:argparse", "stdlib:asyncio", "stdlib:configparser", "stdlib:dataclasses", "stdlib:email", "stdlib:heapq",
    "stdlib:json", "stdlib:statistics", "stdlib:tarfile",
})  # fmt: skip
"""Packages that no model and no tokenizer in the zoo has seen."""

SKIPPED_FOLDERS = frozenset({
    "__pycache__", "_vendor", "vendor", "_vendored_packages", "externals", "extern", "test", "tests", "idle_test", "site-packages",
    "dist-packages", "lib2to3", "test_utils",
})  # fmt: skip
PACKAGE_CAP = 12_000_000  # bytes
SMALLEST_FILE, LARGEST_FILE = 200, 300_000  # bytes
LONGEST_LINE = 400  # characters

SHINGLE = 5  # words
BANDS, ROWS = 16, 4  # two files at Jaccard similarity s meet with probability 1 - (1 - s^4)^16: one half at s = 0.45
DUPLICATE = 0.55  # estimated Jaccard similarity


@dataclass(frozen=True)
class SourceFile:
    package: str  # a distribution's name, or "stdlib:MODULE"
    path: str  # relative to the library folder, with forward slashes
    text: str

    @property
    def size(self) -> int:
        return len(self.text.encode())

    @property
    def held_out(self) -> bool:
        return self.package in HELD_OUT


@dataclass(frozen=True)
class Corpus:
    """The two halves of the split, in a fixed order, and an account of what was left out."""

    train: tuple[SourceFile, ...]
    held_out: tuple[SourceFile, ...]
    manifest: dict[str, Any]

    def save(self, folder: str | Path) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, files in (("train", self.train), ("held_out", self.held_out)):
            with open(folder / f"{name}.jsonl", "w", encoding="utf-8") as out:
                out.writelines(json.dumps(asdict(file)) + "\n" for file in files)
        (folder / "manifest.json").write_text(json.dumps(self.manifest, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> Corpus:
        folder = Path(folder)

        def files(name: str) -> tuple[SourceFile, ...]:
            with open(folder / f"{name}.jsonl", encoding="utf-8") as lines:
                return tuple(SourceFile(**json.loads(line)) for line in lines)

        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        return cls(files("train"), files("held_out"), manifest)


def build() -> Corpus:
    """Discover, filter, deduplicate, cap and split. Takes about a minute."""
    dropped: dict[str, int] = {}

    def drop(reason: str) -> None:
        dropped[reason] = dropped.get(reason, 0) + 1

    files = []
    for package, path, location in discover():
        text = read(location)
        if text is None:
            drop("unreadable")
        elif reason := rejection(text):
            drop(reason)
        else:
            files.append(SourceFile(package, path, text))

    # Held-out files first: a near-duplicate pair across the split then costs the training half, never the held-out one.
    # Within a half, the order is by hash, so that the cap takes a sample of a package and not the head of its alphabet.
    files.sort(key=lambda file: (not file.held_out, hashlib.sha256(file.path.encode()).digest()))
    kept: list[SourceFile] = []
    used: dict[str, int] = {}
    for file, duplicate in zip(files, near_duplicates(file.text for file in files)):
        top = "stdlib" if file.package.startswith("stdlib:") else file.package
        if duplicate:
            drop("near-duplicate")
        elif not file.held_out and used.get(top, 0) + file.size > PACKAGE_CAP:
            drop("package cap")
        else:
            used[top] = used.get(top, 0) + file.size
            kept.append(file)
    train = tuple(file for file in kept if not file.held_out)
    held_out = tuple(file for file in kept if file.held_out)
    return Corpus(train, held_out, _manifest(train, held_out, dropped))


def discover() -> Iterator[tuple[str, str, Path]]:
    """Yields (package, relative path, location) of every Python file of the standard library and of `DISTRIBUTIONS`."""
    root = Path(sysconfig.get_path("stdlib"))
    for location in sorted(root.rglob("*.py")):
        path = location.relative_to(root)
        if not SKIPPED_FOLDERS.intersection(path.parts[:-1]):
            yield f"stdlib:{path.parts[0].removesuffix('.py')}", f"stdlib/{path.as_posix()}", location
    for name in DISTRIBUTIONS:
        try:
            listed = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for member in sorted(member for member in listed if member.suffix == ".py"):
            if not SKIPPED_FOLDERS.intersection(member.parts[:-1]) and ".." not in member.parts:
                yield name, member.as_posix(), Path(str(member.locate()))


def read(location: Path) -> str | None:
    """The text with Unix line ends, or None if Python itself could not read it."""
    try:
        with tokenize.open(location) as file:  # honours the coding cookie and translates line ends
            return file.read()
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None


def rejection(text: str) -> str | None:
    """Why a file is not worth learning from, or None if it is."""
    if not SMALLEST_FILE <= len(text) <= LARGEST_FILE:
        return "size"
    if max(map(len, text.splitlines())) > LONGEST_LINE:
        return "long lines"
    ink = len(text) - text.count(" ") - text.count("\n")
    letters = len(_LETTERS.sub("", text))
    literals = sum(map(len, _LITERAL_LINE.findall(text)))
    if letters < 0.5 * ink or literals > 0.4 * len(text):
        return "table"
    return None


_LETTERS = re.compile(r"[^A-Za-z_]+")
_LITERAL_LINE = re.compile(r"^[ \t]*[\[({]*[ru]?[\d'\"].*[,\])}]$", re.MULTILINE)
_WORD = re.compile(r"\w+|[^\w\s]")


def near_duplicates(texts: Iterable[str]) -> Iterator[bool]:
    """For each text, whether it nearly repeats an earlier one that is not itself a duplicate.

    Signatures that agree in all rows of a band meet in a bucket; the share of equal entries in two signatures then estimates
    the Jaccard similarity of the shingle sets.
    """
    buckets: dict[tuple[int, bytes], list[np.ndarray]] = {}
    for text in texts:
        signature = minhash(text)
        keys = [(band, signature[band * ROWS : (band + 1) * ROWS].tobytes()) for band in range(BANDS)]
        rivals = (rival for key in keys for rival in buckets.get(key, ()))
        duplicate = any(np.mean(rival == signature) >= DUPLICATE for rival in rivals)
        if not duplicate:
            for key in keys:
                buckets.setdefault(key, []).append(signature)
        yield duplicate


def minhash(text: str) -> np.ndarray:
    """The smallest hash of the text's shingles under each of `BANDS * ROWS` hash functions."""
    words = np.array([zlib.crc32(word.encode()) for word in _WORD.findall(text)], dtype=np.uint64)
    count = max(len(words) - SHINGLE + 1, 1)
    shingles = np.zeros(count, dtype=np.uint64)
    for offset in range(min(SHINGLE, len(words))):
        shingles = shingles * np.uint64(0x9E3779B97F4A7C15) + words[offset : offset + count]
    shingles = np.unique(shingles ^ (shingles >> np.uint64(29)))
    multiply, add = _HASHES
    return np.array([((shingles * m + a) >> np.uint64(32)).min() for m, a in zip(multiply, add)], dtype=np.uint32)


_HASHES = np.random.Generator(np.random.PCG64(0)).integers(0, 2**64, size=(2, BANDS * ROWS), dtype=np.uint64) | np.uint64(1)


def _manifest(train: tuple[SourceFile, ...], held_out: tuple[SourceFile, ...], dropped: dict[str, int]) -> dict[str, Any]:
    def account(files: tuple[SourceFile, ...]) -> dict[str, Any]:
        packages: dict[str, dict[str, Any]] = {}
        for file in files:
            entry = packages.setdefault(file.package, {"files": 0, "bytes": 0, **_provenance(file.package)})
            entry["files"] += 1
            entry["bytes"] += file.size
        digest = hashlib.sha256("".join(file.text for file in files).encode()).hexdigest()
        total = sum(entry["bytes"] for entry in packages.values())
        return {"files": len(files), "bytes": total, "sha256": digest, "packages": dict(sorted(packages.items()))}

    missing = [name for name in DISTRIBUTIONS if not _provenance(name)]
    return {"train": account(train), "held_out": account(held_out), "dropped": dropped, "not_installed": missing}


def _provenance(package: str) -> dict[str, str]:
    """Version and licence of a distribution; nothing for standard-library modules, which come with Python."""
    if package.startswith("stdlib:"):
        return {}
    try:
        metadata: Mapping[str, str] = importlib.metadata.metadata(package)  # type: ignore[assignment]
    except importlib.metadata.PackageNotFoundError:
        return {}
    licence = metadata.get("License-Expression") or (metadata.get("License") or "").partition("\n")[0]
    return {"version": metadata["Version"], "licence": licence or "see its metadata"}
