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
Q4_0 = 2  # of llama_ftype


class QuantizeParameters(ctypes.Structure):
    """llama_model_quantize_params: what is set here, and room for the rest, which is as llama.cpp fills it."""

    _fields_ = (("threads", ctypes.c_int32), ("kind", ctypes.c_int), ("rest", ctypes.c_char * 248))


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
        """A GGUF file, by llama.cpp's own converter; one of q4_0 by its own quantizer as well."""
        out = Path(folder) / f"{TYPES.get(dtype, dtype)}.gguf"
        if dtype == "q4_0" and not out.exists():
            self.quantize(self.prepare(checkpoint, folder, "bfloat16"), out)
        elif not out.exists():
            half = out.with_suffix(".part")
            command = [sys.executable, "-c", CONVERT, str(self.folder / "src/vendor/llama.cpp"), checkpoint, str(half), TYPES[dtype]]
            done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
            sys.stderr.write(done.stderr)
            if done.returncode:
                raise RuntimeError(f"its converter fails: {done.stderr.strip().splitlines()[-1]}")
            half.rename(out)
        return str(out)

    def quantize(self, given: str, out: Path) -> None:
        library = ctypes.CDLL(str(self.folder / "build/bin/libllama.so"))
        library.llama_model_quantize_default_params.restype = QuantizeParameters
        how, half = library.llama_model_quantize_default_params(), out.with_suffix(".part")
        how.threads, how.kind = self.threads, Q4_0
        if library.llama_model_quantize(given.encode(), str(half).encode(), ctypes.byref(how)):
            raise RuntimeError("llama.cpp could not quantize the file")
        half.rename(out)

    def load(
        self, name: str, checkpoint: str, draft: str | None, dtype: str, mode: str, length: int, ngram: int, options: dict[str, Any]
    ) -> dict[str, Any]:
        if mode not in ("plain", "draft", "lookup"):
            raise ValueError(f"llama.cpp has no mode {mode!r} here")
        kind, threads = TYPES[dtype], str(self.threads)
        room = str(options.get("context", 1024))
        command = [str(self.program), "-m", checkpoint, "-c", room, "-b", room]  # a prompt is one batch
        command += ["-t", threads, "-tb", threads, "-ctk", kind, "-ctv", kind]
        command += ["--samplers", "top_k", "--top-k", "1", "--temp", "0", "-fa", options.get("fa", "auto")]
        if mode == "draft":
            command += ["-md", str(draft), "--spec-type", "draft-simple", "--spec-draft-n-max", str(length), "--spec-draft-p-min", "0"]
            command += ["-ctkd", kind, "-ctvd", kind, "-td", threads]
        elif mode == "lookup" and options.get("kind") == "ngram-simple":
            command += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "2", "--spec-ngram-simple-size-m", str(length)]
        elif mode == "lookup":
            command += ["--foredraft-lookup", "--spec-draft-n-max", str(length)]
        try:
            program, note = self._started(command), {}
        except RuntimeError as error:  # with AMX, llama.cpp 0.3.36 crashes on Q4_0 weights that it has repacked
            program, note = self._started([*command, "--no-repack"]), {"note": f"with --no-repack, since without that {error}"}
        self.programs[name] = (program, length)
        return note

    def _started(self, command: list[str]) -> subprocess.Popen[str]:
        program = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr, text=True, preexec_fn=die_with_parent
        )
        if self._line(program) != "ready":
            program.kill()
            raise RuntimeError("the program did not get ready")
        return program

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
found = convert_hf_to_gguf.get_model_class
def model_class(*given, **how):
    made = found(*given, **how)
    own = made.set_vocab
    def set_vocab(self):
        try:
            own(self)
        except (FileNotFoundError, ValueError):  # its family has another tokenizer
            self._set_vocab_gpt2()
    made.set_vocab = set_vocab
    changed = made.modify_tensors
    def modify_tensors(self, tensor, name, bid):
        for to, each in changed(self, tensor, name, bid):
            yield to, tensor if "embed_tokens" in name else each  # Gemma's is cut to the tokens that the tokenizer has
    made.modify_tensors = modify_tensors
    return made
convert_hf_to_gguf.get_model_class = model_class
sys.argv = ["convert_hf_to_gguf.py", checkpoint, "--outfile", out, "--outtype", kind]
convert_hf_to_gguf.main()
"""
