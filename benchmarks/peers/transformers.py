"""transformers' own generation: plain, compiled plain, with an assistant model, with its own lower layers, by prompt lookup. All share one
target."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any


class Engine:
    def __init__(self) -> None:
        self.models: dict[tuple[str, str], Any] = {}
        self.methods: dict[str, dict[str, Any]] = {}

    def start(self, threads: int, device: str, folder: str) -> dict[str, Any]:
        import torch
        import transformers

        torch.set_num_threads(threads)
        transformers.utils.logging.disable_progress_bar()
        self.torch, self.library, self.device = torch, transformers, device
        return {"versions": {"transformers": transformers.__version__, "torch": torch.__version__}}

    def load(
        self, name: str, checkpoint: str, draft: str | None, dtype: str, mode: str, length: int, ngram: int, options: dict[str, Any]
    ) -> dict[str, Any]:
        target, how = self.model(checkpoint, dtype), dict(options)
        if mode == "draft":
            how["assistant_model"] = self.model(str(draft), dtype)
        elif mode == "early-exit":
            how = {"assistant_early_exit": how["exit"]}
        elif mode == "lookup":
            how |= {"prompt_lookup_num_tokens": length, "max_matching_ngram_size": ngram}
        elif mode == "compiled":
            how["cache_implementation"] = "static"
        elif mode != "plain":
            raise ValueError(f"transformers has no mode {mode!r}")
        assistant = how.get("assistant_model", target if mode == "early-exit" else None)
        if assistant is not None:
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
            assistant.generation_config.assistant_confidence_threshold = 0.0
        self.methods[name] = {"target": target, "how": how, "assistant": assistant, "length": length}
        return {}

    def model(self, path: str, dtype: str) -> Any:
        """Loaded once for all methods; without end-of-sequence ids, so that every text is as long as asked, unless it has an encoder."""
        if (path, dtype) not in self.models:
            config = self.library.AutoConfig.from_pretrained(path, local_files_only=True)
            encoder, hears = config.is_encoder_decoder, config.model_type == "whisper"
            reading = self.library.AutoModelForSpeechSeq2Seq if hears else self.library.AutoModelForSeq2SeqLM
            kind = reading if encoder else self.library.AutoModelForCausalLM
            model = kind.from_pretrained(path, dtype=getattr(self.torch, dtype), local_files_only=True).to(self.device).eval()
            if not encoder:
                model.generation_config.eos_token_id = None
            self.models[path, dtype] = model
        return self.models[path, dtype]

    def generate(self, name: str, ids: list[list[int]], tokens: int, temperature: float, seed: int) -> dict[str, Any]:
        torch, method = self.torch, self.methods[name]
        target, how = method["target"], method["how"]
        if method["assistant"] is not None:  # another method may share it
            method["assistant"].generation_config.num_assistant_tokens = method["length"]
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        given = inputs(torch, target, ids)
        torch.manual_seed(seed)
        watch = Watch(target, how.get("assistant_model"))
        arrivals = Arrivals() if len(ids) == 1 else None
        self.wait()
        begin = time.perf_counter()
        with nullcontext() if "cache_implementation" in how else watch:  # hooks would be compiled as well
            out = target.generate(**given, max_new_tokens=tokens, streamer=arrivals, **sampling, **how)
        self.wait()
        end = time.perf_counter()
        rows = written(out, target, max(map(len, ids)))
        found: dict[str, Any] = {"ids": rows, "seconds": end - begin}
        if watch.target:
            prefill = watch.target[0]
            spent, drafts = sum(watch.target[1:]), sum(watch.draft)
            found |= {"passes": len(watch.target), "rounds": (len(watch.target) - 1) * len(ids)}
            if self.device == "cpu":  # elsewhere passes are over later than they return, and waiting for each would slow them down
                found["split"] = {"prefill": prefill, "draft": drafts, "target": spent, "overhead": end - begin - prefill - spent - drafts}
        if arrivals is not None and arrivals.counts:
            found["times"] = arrivals.times(begin)
            found["kept"] = len(rows[0]) - arrivals.counts[0]
        return found

    def wait(self) -> None:
        if self.device != "cpu":
            self.torch.cuda.synchronize()


def inputs(torch: Any, model: Any, ids: list[list[int]]) -> dict[str, Any]:
    """What ``model`` reads: rows padded on the left, or, where it reads sound, the noise of that number."""
    if model.main_input_name == "input_features":
        shape = model.config.num_mel_bins, 2 * model.config.max_source_positions
        noise = [torch.randn(shape, generator=torch.Generator().manual_seed(row[0])) for row in ids]
        return {"input_features": torch.stack(noise).to(model.device, model.dtype)}
    width = max(map(len, ids))
    padded = torch.tensor([[0] * (width - len(row)) + row for row in ids], device=model.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids], device=model.device)
    return {"input_ids": padded, "attention_mask": mask, "pad_token_id": 0}


def written(out: Any, model: Any, width: int) -> list[list[int]]:
    """The new tokens of each row behind a prompt of so many; a model with an encoder writes behind its start token, up to its end."""
    if not model.config.is_encoder_decoder:
        return list(out[:, width:].tolist())
    if model.main_input_name == "input_features":
        return list(out.tolist())
    rows, end = out[:, 1:].tolist(), model.generation_config.eos_token_id
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


class Watch:
    """Seconds of every forward pass of the target and of the assistant, by hooks that are taken off again. A pass of the target that has
    fewer layers for the time being is one of the assistant."""

    def __init__(self, target: Any, assistant: Any):
        self.target: list[float] = []
        self.draft: list[float] = []
        self.handles: list[Any] = []
        self.watched = [(target, self.target)] + ([] if assistant is None else [(assistant, self.draft)])

    def __enter__(self) -> None:
        for model, seconds in self.watched:
            self._watch(model, seconds)

    def _watch(self, model: Any, seconds: list[float]) -> None:
        begun, layers = [0.0], model.config.num_hidden_layers

        def before(module: Any, arguments: Any) -> None:
            begun[0] = time.perf_counter()

        def after(module: Any, arguments: Any, output: Any) -> None:
            early = module.config.num_hidden_layers < layers
            (self.draft if early else seconds).append(time.perf_counter() - begun[0])

        self.handles += [model.register_forward_pre_hook(before), model.register_forward_hook(after)]

    def __exit__(self, *failure: object) -> None:
        for handle in self.handles:
            handle.remove()


class Arrivals:
    """A streamer: when tokens came, and how many at a time. The prompt comes first."""

    def __init__(self) -> None:
        self.moments: list[float] = []
        self.counts: list[int] = []
        self.prompt = True

    def put(self, value: Any) -> None:
        if self.prompt:
            self.prompt = False
            return
        self.moments.append(time.perf_counter())
        self.counts.append(int(value.numel()))

    def end(self) -> None:
        pass

    def times(self, begin: float) -> list[float]:
        return [moment - begin for moment, count in zip(self.moments, self.counts) for _ in range(count)]
