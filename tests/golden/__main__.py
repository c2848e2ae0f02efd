"""The golden record: what every drafter, rule and execution did at fixed shapes, round by round.

    python tests/golden check             compare with the record; exit code 1 where anything differs
    python tests/golden write             make the record anew
    python tests/golden check eager/suffix ...   only the groups whose names contain one of these; `write` replaces those alone

A step that only moves code must leave the record equal. Text alone would not show a broken drafter: under the match rule the text is the
target's whatever is drafted. A group is one Speculator over ``zoo:python-8m`` in float32, one thread, at a fixed shape; its calls are
greedy and sampled with two seeds, each for one row and for three rows of unequal lengths. A call keeps, per round and row, the proposed
nodes as ``token^parent``, a hash of q at the nodes that have children, and the number of accepted tokens; then the new tokens of each row.

Outside eager execution q is not hashed, because how weights are laid out there is chosen by a trial when a model is loaded.

The record holds for one kind of processor, since kernels round differently elsewhere; the head of the file names it.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["FOREDRAFT_CACHE"] = "off"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers

import foredraft
from foredraft import ConfigurationError, Speculator
from foredraft.drafters.datastore import Datastore
from foredraft.heads import checkpoints
from foredraft.heads.hydra import HydraHead
from foredraft.heads.rnn import RnnHead

FILE = Path(__file__).parent / "record.json.xz"
TARGET, DRAFT = "zoo:python-8m", "zoo:python-1m"
TOKENS = 24
PROMPTS = [
    "def read_lines(path):\n    ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        self.items",
    "for name in names:\n    print(name)\nfor name in names:\n    ",
]
DOCUMENTS = [
    "def write_lines(path, lines):\n    with open(path, 'w') as file:\n        for line in lines:\n            file.write(line + '\\n')\n",
    "class Queue:\n    def __init__(self):\n        self.items = []\n\n    def pop(self):\n        return self.items.pop(0)\n",
    "for name in names:\n    if name is None:\n        continue\n    print(name)\n",
]
CHAIN, TREE, GROWN = "chain(5)", "product(4,2,1)", "dynamic(depth=4,k=3,total=10)"
SIBLINGS = ("top-k", "iid", "without-replacement", "keyed")
RULES = ("auto", "match", "rejection", "block", "multi-candidate", "k-seq", "traversal", "typical")
EXECUTIONS = ("eager", "packed", "native", "compiled")


def drafters(folder: Path) -> dict[str, tuple[str, dict[str, object], tuple[str, ...], bool]]:
    """Per name: the drafter, its options, the shapes it is asked for, and whether it takes ``siblings``."""
    every = (CHAIN, TREE, GROWN)
    return {
        "none": ("none", {}, ("chain(0)",), False),
        "prompt-lookup": ("prompt-lookup", {}, (CHAIN, TREE), False),
        "suffix": ("suffix", {}, every, False),
        "suffix-learning": ("suffix", {"learn": True}, (CHAIN, GROWN), False),
        "ngram": ("ngram:zoo:python-ngram", {}, every, True),
        "ngram-learning": ("ngram", {}, (CHAIN, TREE), False),
        "rest": (f"rest:{folder / 'datastore'}", {}, every, False),
        "token-recycling": ("token-recycling", {}, (CHAIN, TREE), False),
        "lookahead": ("lookahead", {}, (CHAIN, TREE), False),
        "draft-model": (f"draft-model:{DRAFT}", {}, every, True),
        "medusa": ("medusa:zoo:python-8m-medusa", {}, ("chain(4)", TREE, GROWN), True),
        "medusa-alone": ("medusa:zoo:python-8m-medusa", {"successors": "off"}, ("chain(4)", TREE), False),
        "hydra": (f"hydra:{folder / 'hydra'}", {}, every, True),
        "rnn": (f"rnn:{folder / 'rnn'}", {}, every, True),
        "eagle3": ("eagle3:zoo:python-8m-eagle3", {}, every, True),
        "several": (f"several:prompt-lookup,suffix,draft-model:{DRAFT}", {}, (CHAIN, TREE), False),
    }


def groups(folder: Path) -> Iterator[tuple[str, str, str, dict[str, object], str, str]]:
    """Name, execution, drafter, its options, shape and rule of every group; not all exist."""
    for execution in EXECUTIONS:
        for name, (drafter, options, shapes, siblings) in drafters(folder).items():
            if execution == "compiled" and name not in ("none", "draft-model"):
                continue  # compiling takes long, and the draft loops are those of eager passes
            for shape in shapes:
                for kind in ("auto", *SIBLINGS) if siblings and execution == "eager" else ("auto",):
                    for rule in RULES if execution == "eager" and name in ("draft-model", "eagle3", "ngram") else ("auto",):
                        if kind == "auto" and rule != "auto":
                            continue
                        chosen = {**options, "siblings": kind} if kind != "auto" else options
                        yield f"{execution}/{name}/{shape}/{kind}/{rule}", execution, drafter, chosen, shape, rule


class Watch:
    """Keeps what a drafter is told after each round."""

    def __init__(self, speculator: Speculator, *, exact: bool):
        self.rounds: list[list[str]] = []
        self.exact = exact
        self._observe = speculator.drafter.observe
        speculator.drafter.observe = self.observe  # type: ignore[method-assign]

    def observe(self, rows, feedback) -> None:
        tree = feedback.tree
        count = tree.nodes - tree.extra
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        valid = [[True] * tree.nodes] * tree.rows if tree.valid is None else tree.valid.tolist()
        lines = []
        for row in range(tree.rows):
            nodes = [node for node in range(count) if node == 0 or valid[row][node]]
            drawn = " ".join(f"{tokens[row][node]}^{parents[row][node]}" for node in nodes)
            lines.append(f"{drawn} q{self._hash(tree.q, row, sorted({parents[row][n] for n in nodes[1:]}))} +{feedback.accepted[row]}")
        self.rounds.append(lines)
        self._observe(rows, feedback)

    def _hash(self, q, row: int, inner: list[int]) -> str:
        if q is None or not inner:
            return "-"
        if not self.exact:
            return ""
        values = (q[row, inner].double() * 1e5).round().to(torch.int32).contiguous()
        return hashlib.sha256(values.numpy().tobytes()).hexdigest()[:10]


def calls(tokenizer) -> Iterator[tuple[str, dict[str, object]]]:
    one = tokenizer(PROMPTS[1:2], return_tensors="pt")
    three = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    for batch, inputs in (("1", one), ("3", three)):
        yield f"greedy/{batch}", {**inputs, "do_sample": False}
        for seed in (1, 2):
            yield f"seed {seed}/{batch}", {**inputs, "do_sample": True, "temperature": 0.8, "top_p": 0.95, "seed": seed}


def run(group, model, tokenizer) -> dict[str, object] | None:
    """The calls of a group; None if the combination is refused."""
    _, execution, drafter, options, shape, rule = group
    try:
        speculator = Speculator(
            model,
            drafter,
            rule=rule,
            shape=shape,
            drafter_options=dict(options),
            execution=execution,
            self_test=False,
            lossless=rule != "typical",
        )
    except ConfigurationError as error:
        if rule == "auto" and options.get("siblings", "auto") == "auto":
            print(f"{group[0]}: {error}")
        return None
    speculator._seeded = speculator.rule, speculator.proposal  # with a seed "auto" would mean match, which has groups of its own
    found: dict[str, object] = {}
    try:
        for name, arguments in calls(tokenizer):
            watch = Watch(speculator, exact=execution == "eager")
            out = speculator.generate(**arguments, max_new_tokens=TOKENS, min_new_tokens=1)
            speculator.drafter.observe = watch._observe  # type: ignore[method-assign]
            width = arguments["input_ids"].shape[1]
            found[name] = {"rounds": watch.rounds, "text": out.sequences[:, width:].tolist()}
    finally:
        speculator.close()
    return found


def prepare(folder: Path, model, tokenizer) -> None:
    """A datastore and two untrained heads."""
    documents = [tokenizer(text)["input_ids"] for text in DOCUMENTS]
    Datastore.build(documents, vocab_size=model.config.vocab_size).save(folder / "datastore")
    generator = torch.Generator().manual_seed(3)
    for name, made in (("hydra", HydraHead.for_target(model, heads=4)), ("rnn", RnnHead.for_target(model, steps=4))):
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        checkpoints.save(made, folder / name)


def machine() -> dict[str, str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return {"processor": model, "torch": torch.__version__, "transformers": transformers.__version__}


def main(verb: str, *only: str) -> int:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    stored = json.loads(lzma.decompress(FILE.read_bytes())) if FILE.exists() else {"machine": {}, "groups": {}}
    known = stored["groups"]
    tokenizer = foredraft.zoo.load_tokenizer(TARGET)
    tokenizer.padding_side = "left"
    load = transformers.AutoModelForCausalLM.from_pretrained
    different, seen, begin = 0, set(), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = load(foredraft.zoo.path(TARGET.removeprefix("zoo:")), dtype=torch.float32)
        prepare(folder, model, tokenizer)
        for group in groups(folder):
            if only and not any(part in group[0] for part in only):
                continue
            found = run(group, model, tokenizer)
            if found is None:
                if verb == "check" and group[0] in known:
                    different += 1
                    print(f"{group[0]}: refused, and was not")
                known.pop(group[0], None)
                continue
            seen.add(group[0])
            if verb == "write":
                known[group[0]] = found
            elif group[0] not in known:
                different += 1
                print(f"{group[0]}: not in the record")
            else:
                wrong = [call for call in found if found[call] != known[group[0]].get(call)]
                if wrong:
                    different += 1
                    first = wrong[0]
                    pairs = zip(found[first]["rounds"], known[group[0]][first]["rounds"])
                    where = next((index for index, (new, old) in enumerate(pairs) if new != old), None)
                    print(f"{group[0]}: {', '.join(wrong)}; first in round {where}")
                    if where is not None:
                        print(f"  now {found[first]['rounds'][where]}\n  was {known[group[0]][first]['rounds'][where]}")
    gone = {name for name in known if name not in seen and (not only or any(part in name for part in only))}
    if verb == "write":
        for name in gone:
            del known[name]
        with lzma.open(FILE, "wt") as file:
            json.dump({"machine": machine(), "groups": dict(sorted(known.items()))}, file, separators=(",", ":"))
    elif gone:
        different += len(gone)
        print("in the record, but not made any more:", *sorted(gone), sep="\n  ")
    if stored["machine"] and stored["machine"] != machine():
        print(f"the record was made with {stored['machine']}, this is {machine()}")
    print(f"{len(seen)} groups in {time.monotonic() - begin:.0f} s: {'written' if verb == 'write' else f'{different} differ'}")
    return 1 if verb == "check" and different else 0


if __name__ == "__main__":
    if sys.argv[1:2] not in (["check"], ["write"]):
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
