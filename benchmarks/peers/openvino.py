"""OpenVINO GenAI: plain on either attention backend, with a draft model, by prompt lookup; the cache kept in the weights' dtype, or in
float32 where it computes in that: on CPUs without instructions for bfloat16."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class Engine:
    def __init__(self) -> None:
        self.methods: dict[str, tuple[Any, str, int, int]] = {}
        self.pipelines: dict[str, Any] = {}

    def start(self, threads: int, device: str, folder: str) -> dict[str, Any]:
        import numpy
        import openvino  # type: ignore[import-not-found]
        import openvino_genai  # type: ignore[import-not-found]

        self.numpy, self.runtime, self.library, self.threads = numpy, openvino, openvino_genai, threads
        return {"versions": {"openvino-genai": openvino_genai.__version__, "openvino": openvino.__version__}}

    def prepare(self, checkpoint: str, folder: str, dtype: str) -> str:
        """The model as OpenVINO IR in float32; the precision is chosen when it is loaded. Or in int4, which is made of it."""
        if dtype == "int4":
            return self.narrow(self.prepare(checkpoint, folder, "float32"), Path(folder) / "ir-int4")
        out = Path(folder) / "ir"
        if not (out / "openvino_model.bin").exists():
            tool = Path(sys.executable).parent / "optimum-cli"
            half = out.with_name("ir.part")
            command = [str(tool), "export", "openvino", "--model", checkpoint, "--task", "text-generation-with-past"]
            command += ["--weight-format", "fp32", str(half)]
            done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
            sys.stderr.write(done.stderr)
            if done.returncode:
                raise RuntimeError(f"its exporter fails: {done.stderr.strip().splitlines()[-1]}")
            half.rename(out)
        return str(out)

    def narrow(self, given: str, out: Path) -> str:
        """Four bits in groups of 32; the first and the last layer are left in eight, with a scale per row."""
        if not out.exists():
            import nncf  # type: ignore[import-not-found]

            half = out.with_suffix(".part")
            half.mkdir(exist_ok=True)
            for file in Path(given).iterdir():
                if not file.name.startswith("openvino_model."):
                    shutil.copy(file, half)
            model = self.runtime.Core().read_model(Path(given) / "openvino_model.xml")
            model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT4_SYM, group_size=32, ratio=1.0)
            self.runtime.save_model(model, half / "openvino_model.xml")
            half.rename(out)
        return str(out)

    def load(
        self, name: str, checkpoint: str, draft: str | None, dtype: str, mode: str, length: int, ngram: int, options: dict[str, Any]
    ) -> dict[str, Any]:
        if mode not in ("plain", "draft", "lookup"):
            raise ValueError(f"OpenVINO GenAI has no mode {mode!r} here")
        backend = options.get("backend", "PA")
        key = f"{checkpoint} {draft if mode == 'draft' else ''} {mode} {backend}"
        if key not in self.pipelines:
            self.pipelines[key] = self._pipeline(checkpoint, draft, dtype, mode, backend)
        self.methods[name] = (self.pipelines[key], mode, length, ngram)
        return {}

    def _pipeline(self, checkpoint: str, draft: str | None, dtype: str, mode: str, backend: str) -> Any:
        kind = {"float32": self.runtime.Type.f32, "bfloat16": self.runtime.Type.bf16, "float16": self.runtime.Type.f16}[dtype]
        narrow = "BF16" in self.runtime.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        cache = kind if narrow or dtype != "bfloat16" else self.runtime.Type.f32
        common = {"INFERENCE_PRECISION_HINT": kind, "KV_CACHE_PRECISION": cache, "INFERENCE_NUM_THREADS": self.threads}
        extra: dict[str, Any] = {"ATTENTION_BACKEND": "SDPA"} if backend == "SDPA" else {"scheduler_config": self._scheduler()}
        if mode == "draft":
            extra["draft_model"] = self.library.draft_model(draft, "CPU", scheduler_config=self._scheduler(), **common)
        if mode == "lookup":
            extra["prompt_lookup"] = True
        return self.library.LLMPipeline(checkpoint, "CPU", **common, **extra)

    def _scheduler(self) -> Any:
        scheduler = self.library.SchedulerConfig()
        scheduler.cache_size = 1  # GB
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = 2048
        return scheduler

    def generate(self, name: str, ids: list[list[int]], tokens: int, temperature: float, seed: int) -> dict[str, Any]:
        if len(ids) > 1 or temperature:
            raise ValueError("only one greedy row at a time is measured here")
        pipeline, mode, length, ngram = self.methods[name]
        config = self.library.GenerationConfig(max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, ignore_eos=True)
        config.apply_chat_template = False
        if mode != "plain":
            config.num_assistant_tokens = length
        if mode == "lookup":
            config.max_ngram_size = ngram
        row = self.numpy.array(ids, dtype=self.numpy.int64)
        inputs = self.library.TokenizedInputs(self.runtime.Tensor(row), self.runtime.Tensor(self.numpy.ones_like(row)))
        begin = time.perf_counter()
        result = pipeline.generate(inputs, config)
        end = time.perf_counter()
        found: dict[str, Any] = {"ids": [list(result.tokens[0])], "seconds": end - begin}
        raw = result.perf_metrics.raw_metrics
        counts, moments = list(raw.m_batch_sizes), list(raw.m_new_token_times)
        if counts and sum(counts) == tokens:
            found |= {"passes": len(counts), "rounds": len(counts) - 1, "kept": tokens - counts[0]}
        first = result.perf_metrics.get_ttft().mean / 1e3
        if len(moments) == len(counts) and sum(counts) == tokens:
            moments = [first + (moment - moments[0]) * _unit(moments, end - begin) for moment in moments]
            found["times"] = [moment for moment, count in zip(moments, counts) for _ in range(count)]
        else:
            found["first"] = first
        return found


def _unit(moments: list[float], seconds: float) -> float:
    """Seconds per unit of ``moments``: they are documented as microseconds, and have been milliseconds."""
    return 1e-3 if (moments[-1] - moments[0]) * 1e-3 <= seconds * 1.01 and (moments[-1] - moments[0]) * 1e-3 > 0.1 * seconds else 1e-6
