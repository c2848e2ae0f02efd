"""Train Medusa heads for a model, on texts that it writes itself, and draft with them.

python 04_train_a_head.py [TARGET [PROMPTS [STEPS]]]

PROMPTS is a .jsonl file with a "prompt" per line. A useful head needs thousands of prompts and steps; the defaults only show the way.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from transformers import AutoTokenizer

import foredraft

target = sys.argv[1] if len(sys.argv) > 1 else str(foredraft.zoo.path("python-8m"))
prompts = sys.argv[2] if len(sys.argv) > 2 else None
steps = sys.argv[3] if len(sys.argv) > 3 else "4"


def run(*arguments: object) -> None:
    print("$ foredraft", *arguments)
    subprocess.run([sys.executable, "-m", "foredraft", *map(str, arguments)], check=True)


with tempfile.TemporaryDirectory() as folder:
    texts, head = Path(folder) / "texts", Path(folder) / "head"
    if prompts is None:
        prompts = Path(folder) / "prompts.jsonl"
        names = ["mean", "total", "first", "last", "largest", "smallest", "count", "unique"]
        lines = [{"prompt": f"def {name}(values):\n    "} for name in names]
        prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))

    run("data", "generate", prompts, "--target", target, "--out", texts, "--max-new-tokens", 32)
    run(
        "train", "medusa", "--target", target, "--data", texts, "--out", head, "--steps", steps, "--held-out", 2, "--head-option", "heads=3"
    )

    tokenizer = AutoTokenizer.from_pretrained(target)
    speculator = foredraft.Speculator(target, drafter=f"medusa:{head}", shape="chain(3)")
    out = speculator.generate(**tokenizer("def median(values):\n    ", return_tensors="pt"), max_new_tokens=32, do_sample=False)
    print(tokenizer.decode(out.sequences[0], skip_special_tokens=True))
    print(f"--- {out.stats.acceptance_length:.2f} tokens per pass")
