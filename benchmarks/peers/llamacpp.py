"""llama.cpp through ``foredraft-tokens`` (llamacpp_tokens.cpp), a small program over its own library: token ids in, token ids out.

One such program per method; they share the mapped weights.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


class Engine:
    def __init__(self) -> None:
        self.programs: dict[str, tuple[subprocess.Popen[str], int]] = {}

    def start(self, threads: int, device: str, folder: str) -> dict[str, Any]:
        self.threads, self.folder = threads, Path(folder)
        self.program = self.folder / "foredraft-tokens"
        if not self.program.exists():
            raise FileNotFoundError(f"{self.program.name} is missing; make peers builds it")
        version = self.folder / "VERSION"
        return {"versions": {"llama-cpp-python": version.read_text().strip() if version.exists() else "unknown"}}

    def prepare(self, checkpoint: str, folder: str, dtype: str) -> str:
        """A GGUF file, by llama.cpp's own converter."""
        out = Path(folder) / f"{TYPES[dtype]}.gguf"
        if not out.exists():
            half = out.with_suffix(".part")
            command = [sys.executable, "-c", CONVERT, str(self.folder / "src/vendor/llama.cpp"), checkpoint, str(half), TYPES[dtype]]
            subprocess.run(command, check=True, stdout=sys.stderr)
            half.rename(out)
        return str(out)

    def load(
        self, name: str, checkpoint: str, draft: str | None, dtype: str, mode: str, length: int, ngram: int, options: dict[str, Any]
    ) -> dict[str, Any]:
        if mode not in ("plain", "draft", "lookup"):
            raise ValueError(f"llama.cpp has no mode {mode!r} here")
        kind, threads = TYPES[dtype], str(self.threads)
        command = [str(self.program), "-m", checkpoint, "-c", "1024", "-t", threads, "-tb", threads, "-ctk", kind, "-ctv", kind]
        command += ["--samplers", "top_k", "--top-k", "1", "--temp", "0", "-fa", options.get("fa", "auto")]
        if mode == "draft":
            command += ["-md", str(draft), "--spec-type", "draft-simple", "--spec-draft-n-max", str(length), "--spec-draft-p-min", "0"]
            command += ["-ctkd", kind, "-ctvd", kind, "-td", threads]
        elif mode == "lookup" and options.get("kind") == "ngram-simple":
            command += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "2", "--spec-ngram-simple-size-m", str(length)]
        elif mode == "lookup":
            command += ["--foredraft-lookup", "--spec-draft-n-max", str(length)]
        program = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr, text=True, preexec_fn=die_with_parent
        )
        self.programs[name] = (program, length)
        if self._line(program) != "ready":
            raise RuntimeError("the program did not get ready")
        return {}

    @staticmethod
    def _line(program: subprocess.Popen[str]) -> str:
        """The next line that is meant for us."""
        assert program.stdout is not None
        for line in program.stdout:
            if line.startswith("> "):
                return line[2:].strip()
        raise RuntimeError(f"the program ended with {program.wait()}")

    def generate(self, name: str, ids: list[list[int]], tokens: int, temperature: float, seed: int) -> dict[str, Any]:
        if len(ids) > 1 or temperature:
            raise ValueError("only one greedy row at a time is measured here")
        program, _ = self.programs[name]
        assert program.stdin is not None
        begin = time.perf_counter()
        program.stdin.write(f"{tokens} {' '.join(map(str, ids[0]))}\n")
        program.stdin.flush()
        got = json.loads(self._line(program))
        end = time.perf_counter()
        # Its pass over the prompt yields no token: what the others' does is its first round.
        return {
            "ids": [got["tokens"]],
            "seconds": end - begin,
            "times": got["times"],
            "passes": got["passes"] + 1,
            "rounds": got["passes"],
            "kept": len(got["tokens"]),
            "split": {name: got[name] for name in ("prefill", "draft", "target", "overhead")},
        }


def die_with_parent() -> None:
    """As in serve.py, for the programs that are started here."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, 9)


CONVERT = """
import sys
tree, checkpoint, out, kind = sys.argv[1:]
sys.path.insert(0, tree)
import convert_hf_to_gguf
from conversion.base import TextModel
known = TextModel.get_vocab_base_pre
def pre_tokenizer(self, tokenizer):
    try:
        return known(self, tokenizer)
    except NotImplementedError:  # a byte-level BPE that it has not met
        return "gpt-2"
TextModel.get_vocab_base_pre = pre_tokenizer
sys.argv = ["convert_hf_to_gguf.py", checkpoint, "--outfile", out, "--outtype", kind]
convert_hf_to_gguf.main()
"""
