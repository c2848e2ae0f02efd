"""Runs one adapter: ``python serve.py ADAPTER.py``, JSON lines in on stdin, JSON lines out on stdout.

Started with the interpreter of the method's environment, so this file and the adapters use the standard library and the
method's own packages only. Whatever the method prints goes to stderr. Each request is an object with ``op``, the name of a
method of the adapter's ``Engine``; its other members are that method's arguments. Each answer is ``{"ok": true, "result": …}`` or
``{"ok": false, "error": "…"}``. The process ends with its stdin, and is stopped in between.

    start(threads, device, folder)                     what is in use: {"versions": {…}, "note": …}
    prepare(checkpoint, folder, dtype)                 the path of the checkpoint in the method's own format
    load(name, checkpoint, draft, dtype, mode, length, ngram, options)
                                                       a method under ``name``: {"note": …}
    generate(name, ids, tokens, temperature, seed)     rows of prompt ids in, continued by ``tokens`` each:
        ids      the new ids, row by row
        seconds  of the whole call
        times    seconds from the call to each token of the first row, where they are known
        rounds, kept   target passes after the one that read the prompt, and the tokens that came from them, summed over rows
        passes   all target passes
        split    seconds of prefill, draft, target, overhead, as far as they are known
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any


def adapter(path: Path) -> Any:
    """The ``Engine`` of the adapter at ``path``, whose file may bear the name of what it adapts."""
    spec = importlib.util.spec_from_file_location("adapter_" + path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Engine()


def answer(engine: Any, line: str) -> dict[str, Any]:
    """What one request comes to. Whatever goes wrong is an answer too: the driver makes a row of it."""
    try:
        request = json.loads(line)
        method = getattr(engine, request.pop("op"))
        return {"ok": True, "result": method(**request)}
    except Exception as error:
        import traceback

        traceback.print_exc()
        lines = (str(error).strip() or "no message").splitlines()
        text = next((line for line in lines if not line.endswith(":")), lines[0])  # not where it was raised, which some say first
        return {"ok": False, "error": f"{type(error).__name__}: {text}"}


def die_with_parent() -> None:
    """A stopped process does not notice that its stdin has ended; on Linux the kernel can be asked to see to it."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL


def main() -> None:
    die_with_parent()
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [entry for entry in sys.path if not entry or str(Path(entry).resolve()) != here]  # vllm.py is not vllm
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever is printed is not part of the conversation
    engine = adapter(Path(sys.argv[1]))
    for line in sys.stdin:
        replies.write(json.dumps(answer(engine, line)) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
