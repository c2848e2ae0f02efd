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
NEW = 24  # tokens of each row of the trace
QWEN3 = {"model_type": "qwen3", "max_position_embeddings": 40960, "tie_word_embeddings": True}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {**QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    "small": {**QWEN3, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
              "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 4096},
    "tiny": {**QWEN3, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 512},
    # a few layers each of gemma-3-1b (one in six is of full length), Phi-3-mini-128k, pythia-1.4b, and Qwen3-30B-A3B with fewer experts
    "gemma3": {"model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 6,
               "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256,
               "sliding_window": 512, "vocab_size": 32768},
    "phi3": {"model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 2, "num_attention_heads": 32,
             "num_key_value_heads": 32, "max_position_embeddings": 40960, "vocab_size": 8192},
    "gpt_neox": {"model_type": "gpt_neox", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4,
                 "num_attention_heads": 16, "max_position_embeddings": 40960, "vocab_size": 8192},
    "qwen3_moe": {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
                  "num_hidden_layers": 3, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 16,
                  "num_experts_per_tok": 4, "max_position_embeddings": 40960, "vocab_size": 8192},
    "windows": {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 26, "num_attention_heads": 1,
                "num_key_value_heads": 1, "head_dim": 32, "sliding_window": 512, "vocab_size": 512, "dtype": "float32"},  # is read faster
}  # fmt: skip


class Worker:
    def __init__(self, shape: str, threads: int):
        from transformers import AutoConfig, AutoModelForCausalLM

        import foredraft

        torch.set_num_threads(threads)
        torch.manual_seed(0)
        config = AutoConfig.for_model(**SHAPES[shape], bos_token_id=None, eos_token_id=None, pad_token_id=None)
        self.model = AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.bfloat16, attn_implementation="sdpa").eval()
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

        target = self.speculator(f"behind {tokens}", reuse_prefix=False).target
        if not target.lengths:
            lengthened(target, self.text(tokens, 1), tokens + 1024)
        length = target.lengths[0]
        seconds = self.passes(target, nodes, rounds)
        target.rewind([length])
        return {"tokens": rounds, "seconds": seconds}

    @torch.inference_mode()
    def family(self, tokens: int, nodes: int, rounds: int) -> dict[str, Any]:
        """The same of a model that the kernels do not run. All but the first page of the text is filler, written as a pass writes."""
        from foredraft.models.cache import Window

        target = self.speculator("family", reuse_prefix=False, execution="packed", self_test=True).target  # which pages depend on
        target.reset()
        text = self.text(PAGE, 1)
        target.open([text], reserve=[tokens + PAGE])
        target.prefill([text], first=0)
        cache, chance = target.cache, torch.Generator().manual_seed(1)
        while (start := cache.lengths[0]) < tokens:
            count = min(1024, tokens - start)
            cache.enter(Window(0, 1, (start,), count, counts=(count,)))
            for index, layer in enumerate(cache.layers):
                keys, values = (torch.randn(1, layer.keys.shape[1], count, layer.keys.shape[3], generator=chance) for _ in range(2))
                cache.update(keys.to(self.model.dtype), values.to(self.model.dtype), index)
            cache.commit(None, [count])
        self.passes(target, nodes, 2)  # the first may allocate
        return {"tokens": rounds, "seconds": self.passes(target, nodes, rounds), "pages": bool(pools_of(target))}

    def passes(self, target: Any, nodes: int, rounds: int) -> float:
        """Seconds of passes over a tree, of which one token is kept."""
        from foredraft import TokenTree

        tree = TokenTree.from_chain(torch.arange(3, 3 + nodes)[None])
        if nodes > 1:
            tree = TokenTree(tree.tokens, torch.tensor([[-1, *[(node - 1) // 4 for node in range(1, nodes)]]]))
        begin = time.perf_counter()
        for _ in range(rounds):
            target.score(tree)
            target.commit(None, [1])
        return time.perf_counter() - begin

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
        pools = pools_of(target)
        return int(sum(pool.held * size for pool, size in pools) if pools else target.cache.bytes)

    def token_bytes(self, target: Any) -> int:
        return sum(2 * layer.keys.shape[1] * layer.keys.shape[3] * layer.keys.element_size() for layer in target.cache.written)

    def trace_texts(self, long: int, rows: int, common: int) -> list[list[int]]:
        begin, chance = self.text(common, 99), random.Random(5)
        lengths = [long, *(chance.randint(200, 2000) for _ in range(rows))]
        return [(begin + self.text(length, index))[:length] for index, length in enumerate(lengths)]

    def written(self, folder: str, long: int, rows: int, common: int) -> dict[str, Any]:
        """The model in a folder, and the trace, for somebody else."""
        self.model.save_pretrained(folder)
        return {"ids": self.trace_texts(long, rows, common), "tokens": NEW}

    def trace(self, long: int, rows: int, common: int) -> dict[str, Any]:
        """Bytes held while trees are scored, over those of distinct tokens; the largest ratio after all rows were read."""
        speculator = self.speculator(shape="product(4,2,1)")
        session, target = speculator.session(), speculator.target
        for index, text in enumerate(self.trace_texts(long, rows, common)):
            session.add(text, self.row(NEW, index))
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
        return {"ratio": worst[0], "held": worst[1], "distinct": worst[2], "peak": max(peaks)}

    def windows(self, tokens: int, new: int) -> dict[str, Any]:
        """Bytes that a row holds behind so many tokens and ``new`` more, and the most while it was read, over those of layers that all keep
        every token."""
        speculator = self.speculator(execution="eager", self_test=True)  # which pages depend on
        session, target, peak = speculator.session(), speculator.target, 0
        enter = target.cache.enter

        def watched(window: Any) -> None:
            nonlocal peak
            enter(window)
            peak = max(peak, self.held(target))

        target.cache.enter = watched
        session.add(self.text(tokens, 1), self.row(new + 1, 0))
        while session.live and (not target.lengths or target.lengths[0] < tokens + new - 1):
            session.step()
        held = self.held(target)
        full = -(-target.lengths[0] // PAGE) * PAGE * self.token_bytes(target)
        session.close()
        del target.cache.enter
        return {"ratio": held / full, "peak ratio": peak / full, "held": held, "peak": peak, "full": full}

    def chat(self, pages: int, requests: int) -> dict[str, Any]:
        """Rows served at once within so many pages, or within as many bytes."""
        system, chance = self.text(1000, 98), random.Random(6)
        prompts = [system + self.text(chance.randint(100, 1500), index) for index in range(requests)]
        probe = self.speculator()
        probe.generate(torch.tensor([prompts[0][:80]]), max_new_tokens=2)
        size = pages * PAGE * self.token_bytes(probe.target)
        if not pools_of(probe.target):
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
        """Requests of random length that arrive and leave: pages and resident size after the first ``settled``, and at the end. The first
        fill the cache, which then keeps as much of finished texts as it may."""
        speculator = self.speculator(cache_memory="16MiB")
        session, chance, marks = speculator.session(), random.Random(8), []
        for index in range(requests):
            session.add(self.text(chance.randint(1, 400), index), self.row(chance.randint(1, 12), index))
            while len(session.rows) + len(session.waiting) > 15 or (index + 1 in (settled, requests) and session.live):
                session.step()
            if index + 1 in (settled, requests):
                gc.collect()
                resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
                pools = [pool for pool, _ in pools_of(speculator.target)]
                marks.append((sum(pool.made for pool in pools), sum(pool.held for pool in pools), resident))
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


def pools_of(target: Any) -> list[tuple[Any, int]]:
    """The pools of pages and the bytes of a page of each; none where the cache is one block."""
    pools = getattr(target, "pools", None)
    if pools is None:
        pool = getattr(target, "pool", None)
        return [] if pool is None else [(pool, target.page_bytes)]
    sizes = getattr(target, "page_bytes", None)
    return list(zip(pools, sizes if isinstance(sizes, (list, tuple)) else [pool.page_bytes for pool in pools]))


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
