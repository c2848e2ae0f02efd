"""Adapters for the tests of the speed suite: they speak the protocol, compute nothing, and tell times of a clock of their own."""

ENGINE = '''
import os, signal, sys, time

class Engine:
    """Continues every row by a fixed rule, {per_pass} tokens per pass of {second} seconds, after 0.5 seconds for the prompt."""

    def start(self, threads, device, folder):
        print("this is no answer")
        return {{"versions": {{"fake": "{name} 1.0"}}}}

    def prepare(self, checkpoint, folder, dtype):
        return checkpoint + "." + dtype

    def load(self, name, checkpoint, draft, dtype, mode, length, ngram, options):
        self.modes = {{**getattr(self, "modes", {{}}), name: mode}}
        {on_load}
        return {{"note": f"{{mode}} of {name}"}}

    def forget(self, name):
        self.forgotten = [*getattr(self, "forgotten", []), name]

    def generate(self, name, ids, tokens, temperature, seed):
        self.calls = getattr(self, "calls", 0) + 1
        mode = self.modes[name]
        {on_generate}
        per_pass = 1 if mode == "plain" else {per_pass}
        times = [0.5 + {second} * (-(-index // per_pass)) for index in range(tokens)]
        rows = [[(sum(row) + index) % 50 + 5 for index in range(tokens)] for row in ids]
        {on_answer}
        rounds = -(-(tokens - 1) // per_pass)
        found = {{"ids": rows, "seconds": times[-1], "times": times, "rounds": rounds * len(ids), "kept": (tokens - 1) * len(ids)}}
        return {{**found, "passes": rounds + 1, "split": {{"prefill": 0.5, "draft": 0.0, "target": times[-1] - 0.5, "overhead": 0.0}},
            "drafted_by_depth": [4, 2], "accepted_by_depth": [2, 1], "predicted": None if mode == "plain" else per_pass / {second}}}

    def costs(self, name, rows, length, context, temperature):
        return {{"t1": {second}, "tn": {second}, "draft": 0.0, "target": {{"1": {second}, "5": {second}}}}}
'''


def engine(name: str, *, second: float = 0.01, per_pass: int = 3, on_load: str = "", on_generate: str = "", on_answer: str = "") -> str:
    """The source of an adapter; ``on_…`` are statements to run at those points."""
    said = {"on_load": on_load or "pass", "on_generate": on_generate or "pass", "on_answer": on_answer or "pass"}
    return ENGINE.format(name=name, second=second, per_pass=per_pass, **said)
