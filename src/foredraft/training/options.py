"""What a training run is asked to do."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from foredraft.errors import ConfigurationError

PRECISIONS = ("bf16", "float32")
BACKBONES = ("frozen", "lora", "full")
LAYERSKIP = "layerskip"  # no head: the model itself is trained, by the LayerSkip recipe
DRAFT = "draft"  # no head either: a model that drafts is distilled from the target
ALONE = {LAYERSKIP: "layerskip trains the model itself", DRAFT: "draft trains the draft model"}  # kinds that train a model and no head
WITHOUT_ENCODER = (*ALONE, "exit")  # kinds that are for targets without an encoder
# What changes nothing about the weights that come out: a resumed run may have others.
FREE = ("report_every", "save_every")
LATER = ("dtype", "target", "held-out prompts")  # what a run is resumed with as well; older runs do not know them


@dataclass(frozen=True)
class Options:
    """Settings of a run; all of them but those in ``FREE`` decide what comes out, and a run is resumed with the same ones only.

    Attributes:
        kind, head: which head, and the options of its ``for_target``; "layerskip", which trains the model alone, or "draft", which trains
            a draft model, and their recipes.
        steps, epochs: how long; ``steps`` counts where both are given.
        batch_tokens: tokens of a micro-batch per process, padding included; ``accumulate`` micro-batches make a step.
        learning_rate, warmup, weight_decay, clip: AdamW's peak rate after ``warmup`` steps, from where it falls to 0 as a cosine; largest
            gradient norm.
        precision: "bf16": products in bfloat16 and weights in float32; or "float32".
        max_length: texts are cut off behind so many tokens.
        count_prompts: heads learn to predict prompts too, not only answers.
        held_out, answer_tokens: prompts that acceptance is measured with, and how many tokens they are answered with.
        evaluate_every, patience: steps between measurements of acceptance; stop after so many that bring nothing, 0 for never.
        backbone: "frozen", or trained too: "lora" with adapters, "full" as a whole; ``backbone_rate`` is its learning rate, by default a
            quarter of ``learning_rate``, or all of it for a model alone. For "draft", the backbone is the draft.
        head_weight, head_warmup: c and r of the loss with a backbone, L_LM + c s(t) L_heads with s(t) = sin(pi/2 min(1, t/(r T))).
        lora_rank: of the adapters.
    """

    kind: str
    head: Mapping[str, Any] = field(default_factory=dict)
    steps: int | None = None
    epochs: float = 1.0
    batch_tokens: int = 4096
    accumulate: int = 1
    learning_rate: float = 1e-3
    warmup: int = 100
    weight_decay: float = 0.0
    clip: float = 1.0
    seed: int = 0
    precision: str = "bf16"
    max_length: int | None = None
    count_prompts: bool = False
    held_out: int = 32
    answer_tokens: int = 64
    evaluate_every: int = 500
    patience: int = 0
    backbone: str = "frozen"
    backbone_rate: float | None = None
    head_weight: float = 0.2
    head_warmup: float = 0.2
    lora_rank: int = 16
    report_every: int = 20
    save_every: int = 200

    def __post_init__(self) -> None:
        for name, valid in (("precision", PRECISIONS), ("backbone", BACKBONES)):
            if getattr(self, name) not in valid:
                raise ConfigurationError(f"unknown {name} {getattr(self, name)!r}; choose {', '.join(valid)}")
        if self.kind in ALONE and not self.trains_backbone:
            raise ConfigurationError(f"{ALONE[self.kind]}: pass --backbone full, or lora for adapters")
        counts = ("batch_tokens", "accumulate", "held_out", "answer_tokens", "evaluate_every", "report_every", "save_every", "lora_rank")
        for name in (*counts, "steps", "max_length"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigurationError(f"{name} must be at least 1, got {value}")
        for name in ("learning_rate", "epochs", "clip", "backbone_rate"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ConfigurationError(f"{name} must be above 0, got {value}")

    @property
    def trains_backbone(self) -> bool:
        return self.backbone != "frozen"

    @property
    def own_rate(self) -> float:
        """The peak learning rate of the backbone."""
        return self.backbone_rate or self.learning_rate / (1 if self.kind in ALONE else 4)

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of step ``step`` of ``steps``, relative to its peak."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        return 0.5 * (1 + math.cos(math.pi * (step - self.warmup) / max(1, steps - self.warmup)))

    def head_share(self, step: int, steps: int) -> float:
        """c s(t), what the heads' loss counts beside the language model's (Cai et al. 2024, Medusa-2)."""
        return self.head_weight * math.sin(math.pi / 2 * min(1.0, step / max(1e-9, self.head_warmup * steps)))

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return json.loads(json.dumps(asdict(self)))
