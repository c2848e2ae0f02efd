"""Foredraft's side: any drafter, shape and rule. Methods share one target, packed where that was found faster; those whose drafter reads
its hidden states have one each."""

from __future__ import annotations

import time
from typing import Any

CURVE_DEPTH = 16  # tokens of the longest chain whose pass is timed
BEGINNINGS = 6
SECONDS = 2.0  # for timing a cost curve
READ = ("medusa", "hydra", "rnn", "eagle3")  # drafters that read the target's hidden states


class Engine:
    def __init__(self) -> None:
        self.speculators: dict[str, Any] = {}
        self.models: dict[tuple[str, str, str], Any] = {}
        self.sources = 0  # made up so far

    def start(self, threads: int, device: str, folder: str) -> dict[str, Any]:
        import torch
        import transformers

        import foredraft

        torch.set_num_threads(threads)
        transformers.utils.logging.disable_progress_bar()
        self.torch, self.device = torch, device
        packages = {"foredraft": foredraft.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
        return {"versions": packages}

    def load(
        self, name: str, checkpoint: str, draft: str | None, dtype: str, mode: str, length: int, ngram: int, options: dict[str, Any]
    ) -> dict[str, Any]:
        """``options``: ``drafter`` ``NAME[:SOURCE][;KEY=VALUE...]`` where the mode is none of plain, draft and lookup, ``shape``,
        ``rule``, ``execution``, ``gguf_file``, and ``quantization``, also of the ``head``."""
        from foredraft import Speculator
        from foredraft.cli.settings import parse_options

        drafters = {"plain": "none", "draft": f"draft-model:{draft}", "lookup": "prompt-lookup"}
        drafter, *pairs = (drafters.get(mode) or options["drafter"]).split(";")
        how: dict[str, Any] = {"rule": options.get("rule", "auto"), "reuse_prefix": False}
        if mode == "lookup":
            how["drafter_options"] = {"max_ngram": ngram}
        if mode != "plain":
            how["shape"] = options.get("shape") or (f"chain({length})" if length else None)
        if pairs:
            how["drafter_options"] = parse_options(pairs, "the drafter")
        reads = drafter.partition(":")[0] in READ  # passes that hand out hidden states; heads are laid out as their target is
        file = options.get("gguf_file")
        key = checkpoint, dtype, drafter if reads else file or options.get("quantization", "")
        execution = options.get("execution", "auto")
        if not reads and key in self.models:  # on a CPU, its layers are as they were first laid out
            speculator = Speculator(self.models[key], drafter, execution="eager" if self.device == "cpu" else execution, **how)
        else:
            if "head" in options:
                model: Any = self.narrow(checkpoint, dtype, options["quantization"], options["head"])
                execution = "native"  # a model given by name is laid out like that, too
            else:
                model, how = checkpoint, {**how, "dtype": dtype, "device": self.device, "gguf_file": file}
            speculator = Speculator(model, drafter, execution=execution, **how)
            self.execution = getattr(speculator.target, "execution", None)
            if not speculator.model.config.is_encoder_decoder:
                speculator.model.generation_config.eos_token_id = None
            self.models[key] = speculator.model
        self.speculators[name] = speculator
        return {"note": f"{self.execution} passes, rule {speculator.rule.name}, shape {speculator.shape}"}

    def narrow(self, checkpoint: str, dtype: str, layers: str, head: str) -> Any:
        """A model whose output layer is quantized as well, which its embedding is not."""
        from foredraft.loading import load_model
        from foredraft.quantization import quantized

        model = load_model(checkpoint, dtype=dtype, device=self.device, quantization=layers)
        layer = model.get_output_embeddings()
        layer.weight = self.torch.nn.Parameter(quantized(layer.weight.detach().clone(), head), requires_grad=False)
        return model

    def forget(self, name: str) -> None:
        """What texts so far taught its drafter."""
        self.speculators[name].drafter.forget()

    def passes(self, name: str, nodes: int, seconds: float) -> float:
        """Mean seconds of a pass over a chain of ``nodes`` behind a short text, over at least so many seconds."""
        from foredraft import TokenTree

        torch, target = self.torch, self.speculators[name].target
        times: list[float] = []
        with torch.inference_mode():
            target.open([list(range(5, 37))], reserve=[33 + nodes])
            target.prefill([list(range(5, 37))], first=0)
            tree = TokenTree.from_chain(torch.arange(nodes)[None].contiguous())
            target.score(tree)
            begin = time.perf_counter()
            while not times or times[-1] - begin < seconds:
                target.score(tree)
                times.append(time.perf_counter())
            target.reset()
        return (times[-1] - begin) / len(times)

    def generate(self, name: str, ids: list[list[int]], tokens: int, temperature: float, seed: int) -> dict[str, Any]:
        speculator = self.speculators[name]
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {"do_sample": False}
        encoder = speculator.model.config.is_encoder_decoder
        predicted = self._predicted(speculator, ids, tokens) if len(ids) == 1 and not temperature and not encoder else None
        given = inputs(self.torch, speculator.model, ids)
        begin = time.perf_counter()
        out = speculator.generate(**given, max_new_tokens=tokens, seed=seed, repeatable=False, **sampling)
        end = time.perf_counter()
        stats = out.stats
        return {
            "ids": written(out.sequences, speculator.model, max(map(len, ids))),
            "seconds": end - begin,
            "times": [moment + max(0.0, end - begin - stats.seconds["total"]) for moment in stats.rows[0].token_times],
            "passes": stats.target_passes,
            "rounds": stats.row_passes,
            "kept": stats.kept,
            "split": {part: stats.seconds[part] for part in ("prefill", "draft", "target", "overhead")},
            "drafted_by_depth": stats.drafted_by_depth,
            "accepted_by_depth": stats.accepted_by_depth,
            "shapes": stats.shapes,
            "planning": stats.seconds.get("planning", 0.0),
            "predicted": predicted,
        }

    @staticmethod
    def _predicted(speculator: Any, ids: list[list[int]], tokens: int) -> float | None:
        """Tokens per second that the planner expects of the text to come, where it chooses."""
        from foredraft.planning import AutomaticPlanner
        from foredraft.planning.costs import StandIn

        planner = speculator.planner
        if not isinstance(planner, AutomaticPlanner) or not planner.costs.target.known:
            return None
        rows = [StandIn(slot, list(row), len(row) + tokens) for slot, row in enumerate(ids)]
        return float(planner.forecast(rows, greedy=True).best.rate)

    def costs(
        self, name: str, rows: int, length: int, context: int, temperature: float = 0.0, seconds: float = SECONDS, sizes: bool = True
    ) -> dict[str, Any]:
        """The measured cost curve, for ``rows`` rows at ``context`` tokens: seconds ``t1`` of a plain pass, ``draft`` of ``length`` tokens,
        and ``tn`` of the pass that verifies them, one after the other as in a loop; what a round takes besides is not in them. ``begin`` is
        what a drafter does before its first draft of a text: its encoder reads a source that is new to it. ``target``
        has seconds of passes by nodes per row, if ``sizes`` are asked for, where drafts do not run layers of the target: ``tn`` is then
        what is left to do. Takes ``seconds``."""

        speculator = self.speculators[name]
        found: dict[str, Any] = self._turns(speculator, rows, length, context, temperature, seconds)
        if sizes and not speculator.drafter.info.shares_target:
            curve = self._curve(speculator, rows, CURVE_DEPTH, context)
            found["target"] = {str(size): seconds for size, seconds in sorted(curve.target.points[rows].items())}
        return found

    def _turns(self, speculator: Any, rows: int, length: int, context: int, temperature: float, seconds: float) -> dict[str, float]:
        from foredraft.planning.costs import StandIn
        from foredraft.shapes import TreeShape

        run, deadline = self._measurement(speculator, rows, length, context), time.perf_counter() + seconds
        try:
            with self.torch.inference_mode():
                run._open(run.texts)
                sources = speculator.target.some_sources(rows)
                live = [StandIn(slot, list(text), context + length + 1, sources[slot]) for slot, text in enumerate(run.texts)]
                for _ in range(BEGINNINGS):
                    speculator.drafter.end(live)
                    for row in live:  # each text has a source that the draft's encoder has not read, if it has one of its own
                        row.source = row.source if getattr(speculator.drafter, "_states", None) else self._fresh(row.source)
                    run.timed("begin", lambda: run._begin(live))
                how = self._sampling(speculator, live, temperature) if temperature else {}
                draft = run._drafting(live, TreeShape.chain(length), **how)
                turn = {"t1": run._scoring(1), "draft": draft, "tn": run._scoring(length + 1)}
                while len(run.times.get("tn", ())) <= run.warm_ups or time.perf_counter() < deadline:
                    for part, call in turn.items():
                        run.timed(part, call)
        finally:
            speculator.target.reset()
            speculator.drafter.reset()
        return {part: self.torch.tensor(run.times[part][run.warm_ups :]).median().item() for part in ("begin", *turn)}

    def _fresh(self, source: Any) -> Any:
        """Another source of the same size; None for none."""
        if source is None:
            return None
        self.sources += 1
        ids = self.torch.randint(3, 100, source.inputs["input_ids"].shape, generator=self.torch.Generator().manual_seed(self.sources))
        return type(source).of(ids[0].tolist())

    def _sampling(self, speculator: Any, rows: list[Any], temperature: float) -> dict[str, Any]:
        """How drafts are drawn for ``rows``: as in calls with that temperature alone, and without a seed that is to be repeated."""
        from transformers import TemperatureLogitsWarper

        from foredraft.logits.noise import Noise
        from foredraft.logits.processors import Pipeline
        from foredraft.logits.sampler import Sampler

        warpers = [] if temperature == 1 else [TemperatureLogitsWarper(temperature)]
        keys, roots = (self.torch.tensor(each) for each in (list(range(len(rows))), [len(row.ids) - 1 for row in rows]))
        sampler = Sampler(
            pipelines=[Pipeline.alone(warpers, prompt_length=len(row.ids)) for row in rows],
            sampled=[True] * len(rows),
            lengths=[len(row.ids) for row in rows],
            noise=Noise(keys, roots),
            committed=lambda: self.torch.tensor([row.ids for row in rows]),
        )
        return {
            "sampler": sampler,
            "proposal": "iid" if "iid" in speculator.drafter.info.proposals else speculator.drafter.info.proposals[0],
        }

    def _measurement(self, speculator: Any, rows: int, depth: int, context: int) -> Any:
        """As the planner measures costs before its first round, but at ``context`` tokens."""
        from foredraft.planning.costs import Measurement
        from foredraft.shapes import TreeShape

        target = speculator.target
        run = Measurement(target, speculator.drafter, rows, TreeShape.chain(depth), time.perf_counter)
        run.prompt = run.longer = context
        ids = self.torch.randint(0, target.vocab_size, (rows, context), generator=self.torch.Generator().manual_seed(0))
        run.texts = ids.tolist()
        return run

    def _curve(self, speculator: Any, rows: int, depth: int, context: int) -> Any:
        from foredraft.planning.costs import CostModel

        run, target, drafter = self._measurement(speculator, rows, depth, context), speculator.target, speculator.drafter
        try:
            with self.torch.inference_mode():
                run.passes(time.perf_counter() + SECONDS)
                run.drafts(time.perf_counter() + SECONDS / 2)
        finally:
            target.reset()
            drafter.reset()
        model = CostModel()
        run.fill(model)
        return model


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


def written(sequences: Any, model: Any, width: int) -> list[list[int]]:
    """The new tokens of each row; a model with an encoder writes behind its start token, up to its end."""
    if not model.config.is_encoder_decoder:
        return list(sequences[:, width:].tolist())
    if model.main_input_name == "input_features":
        return list(sequences.tolist())
    rows, end = sequences[:, 1:].tolist(), model.generation_config.eos_token_id
    return [row[: row.index(end) + 1] if end in row else row for row in rows]
