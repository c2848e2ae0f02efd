"""One side of the suite ``memory``: a process with one checkout of Foredraft, which answers JSON lines.

Runs in the present checkout and in the one before pages, so it uses what both have.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

PAGE = 64
SHAPES: dict[str, dict[str, int]] = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
             "head_dim": 128, "vocab_size": 151936},
    "small": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
              "head_dim": 64, "vocab_size": 4096},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
             "head_dim": 32, "vocab_size": 512},
}  # fmt: skip


class Worker:
    def __init__(self, shape: str, threads: int):
        from transformers import AutoModelForCausalLM, Qwen3Config

        import foredraft

        torch.set_num_threads(threads)
        torch.manual_seed(0)
        config = Qwen3Config(**SHAPES[shape], max_position_embeddings=40960, bos_token_id=None, eos_token_id=None, tie_word_embeddings=True)
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
        self.foredraft, self.vocabulary = foredraft, config.vocab_size
        self.kept: tuple[str, Any] = ("", None)  # what the last speculator is for, and that

    def speculator(self, use: str = "", shape: str = "none", **options: Any) -> Any:
        """A new one in the place of the last, unless that was made for the same ``use``."""
        former, found = self.kept
        if use and use == former:
            return found
        if found is not None:
            found.target.close()
        drafter = "none" if shape == "none" else "ngram"
        how: dict[str, Any] = {} if shape == "none" else {"shape": shape}
        how |= {"execution": "native", "self_test": False, "rule": "match", **options}
        self.kept = use, self.foredraft.Speculator(self.model, drafter, **how)
        return self.kept[1]

    def text(self, length: int, seed: int) -> list[int]:
        chance = random.Random(seed)
        return [chance.randrange(3, self.vocabulary) for _ in range(length)]

    def row(self, new: int, seed: int) -> Any:
        return self.foredraft.RowParameters(max_new_tokens=new, do_sample=True, seed=(7, seed))

    # -- speed --------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def behind(self, tokens: int, nodes: int, rounds: int) -> dict[str, Any]:
        """Rounds of one row behind a text, by passes of ``nodes`` nodes of which one is kept. Most of the text is filler."""
        from benchmarks.hosts import lengthened
        from foredraft import TokenTree

        target = self.speculator(f"behind {tokens}", reuse_prefix=False).target
        if not target.lengths:
            lengthened(target, self.text(tokens, 1), tokens + 1024)
        tree = TokenTree.from_chain(torch.arange(3, 3 + nodes)[None])
        if nodes > 1:
            tree = TokenTree(tree.tokens, torch.tensor([[-1, *[(node - 1) // 4 for node in range(1, nodes)]]]))
        length = target.lengths[0]
        begin = time.perf_counter()
        for _ in range(rounds):
            target.score(tree)
            target.commit(None, [1])
        seconds = time.perf_counter() - begin
        target.rewind([length])
        return {"tokens": rounds, "seconds": seconds}

    def batch(self, longest: int, rows: int, new: int, shape: str) -> dict[str, Any]:
        """Rounds of rows of unequal length, without what was read before the first round."""
        speculator = self.speculator(f"batch {shape}", shape)
        session, chance = speculator.session(), random.Random(3)
        for index in range(rows):
            session.add(self.text(chance.randint(longest // 15, longest), index), self.row(new, index))
        session.step()
        tokens, begin = 0, time.perf_counter()
        while session.live:
            tokens += sum(len(commit.tokens) for commit in session.step())
        return {"tokens": tokens, "seconds": time.perf_counter() - begin}

    def first_token(self, shared: int, own: int, seed: int) -> dict[str, Any]:
        """Seconds to the first token of a request whose beginning is new, and of one that shares it."""
        speculator, seconds = self.speculator("first token"), []
        for index in range(2):
            session = speculator.session()
            session.add(self.text(shared, seed) + self.text(own, 1000 + 2 * seed + index), self.row(1, 0))
            begin = time.perf_counter()
            session.step()
            seconds.append(time.perf_counter() - begin)
        return {"new": seconds[0], "shared": seconds[1]}

    # -- memory -------------------------------------------------------------------------------------------------------

    def held(self, target: Any) -> int:
        """Bytes that live rows hold: pages, or the block that was allocated for all of them."""
        pool = getattr(target, "pool", None)
        return int(target.cache.bytes if pool is None else pool.held * target.page_bytes)

    def token_bytes(self, target: Any) -> int:
        return sum(2 * layer.keys.shape[1] * layer.keys.shape[3] * layer.keys.element_size() for layer in target.cache.written)

    def trace(self, long: int, rows: int, common: int) -> dict[str, Any]:
        """Bytes held while trees are scored, over those of distinct tokens; the largest ratio after all rows were read."""
        speculator = self.speculator(shape="product(4,2,1)")
        session, target, chance = speculator.session(), speculator.target, random.Random(5)
        begin = self.text(common, 99)
        for index, length in enumerate([long, *(chance.randint(200, 2000) for _ in range(rows))]):
            session.add((begin + self.text(length, index))[:length], self.row(24, index))
        session.step()
        peaks: list[int] = []
        score = target.score

        def watched(tree: Any) -> Any:
            logits = score(tree)
            peaks.append(self.held(target))
            return logits

        target.score = watched
        worst = (0.0, 0, 0)
        while len(session.rows) == rows + 1:
            texts = [row.ids for row in session.rows]
            session.step()
            distinct = len({hash_ for text in texts for hash_ in prefixes(text)}) * self.token_bytes(target)
            worst = max(worst, (peaks[-1] / distinct, peaks[-1], distinct))
        session.close()
        del target.score
        return {"ratio": worst[0], "held": worst[1], "distinct": worst[2]}

    def chat(self, pages: int, requests: int) -> dict[str, Any]:
        """Rows served at once within so many pages, or within as many bytes."""
        system, chance = self.text(1000, 98), random.Random(6)
        prompts = [system + self.text(chance.randint(100, 1500), index) for index in range(requests)]
        probe = self.speculator()
        probe.generate(torch.tensor([prompts[0][:80]]), max_new_tokens=2)
        size = pages * PAGE * self.token_bytes(probe.target)
        if not hasattr(probe.target, "pool"):
            probe.release()
            session, rows = probe.session(), -1
            while probe.target.cache.bytes <= size:  # they arrive one after the other
                rows += 1
                session.add(prompts[rows], self.row(200, rows))
                session.step()
                session.step()
            session.close()
            return {"rows": rows, "set_aside": 0}
        session = self.speculator(cache_memory=f"{size}B").session()
        for index, prompt in enumerate(prompts):
            session.add(prompt, self.row(200, index))
        live = []
        while session.waiting:
            session.step()
            live.append(len(session.rows))
        while session.live:
            session.step()
        return {"rows": sum(live) / len(live), "most": max(live), "set_aside": session.memory.set_aside}

    def churn(self, requests: int, settled: int) -> dict[str, Any]:
        """Requests of random length that arrive and leave: pages and resident size after the first ``settled``, and at the end."""
        speculator = self.speculator(cache_memory="32MiB")
        session, chance, marks = speculator.session(), random.Random(8), []
        for index in range(requests):
            session.add(self.text(chance.randint(1, 400), index), self.row(chance.randint(1, 12), index))
            while len(session.rows) + len(session.waiting) > 15 or (index + 1 in (settled, requests) and session.live):
                session.step()
            if index + 1 in (settled, requests):
                gc.collect()
                resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
                marks.append((speculator.target.pool.made, speculator.target.pool.held, resident))
        (made, held, before), (made_then, held_then, after) = marks
        return {"pages": made_then - made, "held": held_then - held, "resident": after / before - 1}

    def short(self, rows: int, share: float) -> dict[str, Any]:
        """A trace whose rows would hold so many times the budget: tokens that are computed again, over prompts and new tokens."""
        chance = random.Random(9)
        lengths = [(chance.randint(50, 400), chance.randint(100, 400)) for _ in range(rows)]
        wanted = sum(-(-sum(pair) // PAGE) for pair in lengths)
        probe = self.speculator()
        probe.generate(torch.tensor([[5] * 8]), max_new_tokens=2)
        size = int(wanted * share) * PAGE * self.token_bytes(probe.target)
        speculator = self.speculator(cache_memory=f"{size}B")
        session = speculator.session()
        for index, (prompt, new) in enumerate(lengths):
            session.add(self.text(prompt, index), self.row(new, index))
        target, read = speculator.target, 0
        opened = target.open

        def counted(texts: Any, **options: Any) -> None:
            nonlocal read
            opened(texts, **options)
            read += sum(map(len, texts)) - sum(target.lengths[-len(texts) :])

        target.open, tokens = counted, 0
        while session.live:
            tokens += sum(len(commit.tokens) for commit in session.step())
        asked, written = sum(prompt for prompt, _ in lengths), sum(new for _, new in lengths)
        assert tokens == written, "a row was cut"
        return {"again": (read - asked) / (asked + written), "set_aside": session.memory.set_aside}


def prefixes(text: list[int]) -> list[int]:
    """A number for each beginning of ``text``."""
    found, value = [], 0
    for token in text:
        value = hash((value, token))
        found.append(value)
    return found


def main() -> None:
    worker: Worker | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        shape, what, threads = asked.pop("model"), asked.pop("what"), asked.pop("threads")
        if worker is None:
            worker = Worker(shape, threads)
        print(json.dumps(getattr(worker, what)(**asked)), flush=True)


if __name__ == "__main__":
    main()
