"""The Session driven directly, as the suite ``serve`` compares the server with it: JSON lines in, JSON lines out."""

from __future__ import annotations

import json
import sys
import time
from typing import Any


class Direct:
    def __init__(self, target: str, drafter: str, dtype: str, threads: int, cache_memory: str):
        import torch

        from foredraft import Speculator
        from foredraft.loading import load_tokenizer

        torch.set_num_threads(threads)
        self.tokenizer = load_tokenizer(target)
        self.speculator = Speculator(target, drafter, rule="match", dtype=dtype, cache_memory=cache_memory)

    def closed(self, prompts: list[str], clients: int, tokens: int, temperature: float) -> dict[str, Any]:
        """As many rows at a time as there would be clients, greedily or at temperature 1; tokens and seconds."""
        from foredraft import RowParameters

        waiting = [
            (self.tokenizer(prompt)["input_ids"], RowParameters(max_new_tokens=tokens, do_sample=temperature > 0, seed=(number, 0)))
            for number, prompt in enumerate(prompts)
        ]
        session, count, begin = self.speculator.session(), 0, time.perf_counter()
        live = 0
        try:
            while waiting or live:
                while waiting and live < clients:
                    session.add(*waiting.pop(0))
                    live += 1
                for commit in session.step():
                    count += len(commit.tokens)
                    live -= commit.finish_reason is not None
        finally:
            session.close()
        return {"tokens": count, "seconds": time.perf_counter() - begin}


def main() -> None:
    direct = Direct(**json.loads(sys.stdin.readline()))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(direct.closed(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
