"""``system_fingerprint``: with the same one, the same request and the same seed give the same bytes.

It is a hash of everything that a text depends on beside these: the model's numbers and configuration, its tokenizer and chat template, how
its passes are computed, and the rule. Drafter, shapes and load are left out, because nothing depends on them, but for how long a text may
get where the cache holds less than the context. Where they matter after all, it ends in ``-approx``: logits that depend on what is computed
together, a rule whose draws depend on the shapes, or a chat template that reads the clock. Where that reads the date, the fingerprint is
another one every day.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from foredraft.backends import native
from foredraft.backends.narrow import parts_of
from foredraft.errors import ConfigurationError
from foredraft.serving.settings import Settings
from foredraft.serving.sizes import cached
from foredraft.session import Session
from foredraft.speculator import Speculator
from foredraft.verification.match import Match

log = logging.getLogger("foredraft.serving")

PACKAGES = ("foredraft", "torch", "transformers", "tokenizers", "llguidance")
DATE = "strftime_now"  # what transformers lets chat templates call
CLOCK = re.compile(r"(?<!{)%-?[cfHIklMpPrRsSTXzZ+]")  # a format of the time, and not the beginning of a block
LONGEST = 1 << 21  # tokens of a text where nothing but memory limits it
LOOSE = ("_name_or_path", "transformers_version", "use_cache")  # of configurations; no number depends on them


def system_fingerprint(speculator: Speculator, session: Session, settings: Settings) -> str:
    """Of a server; it reads all weights once, some 1 GB per second and core."""
    longest = settings.longest(speculator.target)
    parts = {
        "weights": weights_digest(speculator),
        "model": configuration_of(speculator.model),
        "text": text_of(speculator, settings),
        "longest": [longest, cached(longest or LONGEST, session)],
        "computation": computation_of(speculator),
        "rule": f"{session.loop.rule.name} {vars(session.loop.rule)}",
        "packages": {name: version_of(name) for name in PACKAGES},
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    template = template_of(speculator, settings)
    loose = inexact(session) or (DATE in template and CLOCK.search(template))
    return f"fp_{hashlib.sha256(text.encode()).hexdigest()[:16]}{'-approx' if loose else ''}"


def dated(fingerprint: str, template: str) -> str:
    """``fingerprint`` of today, if the chat template ``template`` asks for the date."""
    if DATE not in template:
        return fingerprint
    name, *loose = fingerprint.split("-")
    found = hashlib.sha256(f"{name} {datetime.now():%Y-%m-%d}".encode())  # as the template sees it: by the machine's own time zone
    return "-".join([f"fp_{found.hexdigest()[:16]}", *loose])


def inexact(session: Session) -> str | None:
    """Why a text may depend on more than its request, its seed and the fingerprint; None if it does not. May make a few passes."""
    if not isinstance(session.loop.rule, Match):
        return f"the draws of rule {session.loop.rule.name!r} depend on the shapes of drafts"
    if getattr(session.target, "batch_invariant", False):
        return None
    reasons = getattr(session.target, "reasons", {})
    return f"logits may differ in their last bits with what is computed together: {reasons.get('batch_invariant', 'no kernels make sure')}"


def check_exact(session: Session, settings: Settings) -> None:
    """Warn where a text may depend on more than that.

    Raises:
        ConfigurationError: ``settings.deterministic`` was asked for, and cannot be had.
    """
    if (why := inexact(session)) is None:
        return
    if settings.deterministic:
        raise ConfigurationError(f"texts cannot be repeated bit for bit: {why}. Leave --deterministic out to serve all the same")
    log.warning("the same seed may give another text in rare near ties, and fingerprints end in -approx: %s", why)


def weights_digest(speculator: Speculator) -> str:
    """Of the numbers of all parameters and buffers by name, in whatever layout they are held."""
    overrides = speculator.target.backend.overrides
    packed = {
        id(placeholder): digest(numbers, *parts_of(placeholder)) for placeholder, numbers in getattr(overrides, "originals", lambda: ())()
    }
    named = dict(speculator.model.named_parameters()) | dict(speculator.model.named_buffers())
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        digests = pool.map(lambda tensor: packed.get(id(tensor)) or digest(*parts_of(tensor)), named.values())
        lines = [f"{name} {tensor.dtype} {tuple(tensor.shape)} {found}" for (name, tensor), found in zip(named.items(), digests)]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def digest(*tensors: Tensor) -> str:
    """Of their bytes; those whose numbers are elsewhere are left out."""
    found = hashlib.sha256()
    for each in tensors:
        if not each.is_meta:
            found.update(each.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def configuration_of(model: Any) -> dict[str, Any]:
    about = {"class": type(model).__name__, "training": model.training}
    for name in ("config", "generation_config"):
        plain = getattr(model, name).to_dict()
        about[name] = {key: value for key, value in plain.items() if key not in LOOSE}
    return about


def text_of(speculator: Speculator, settings: Settings) -> dict[str, Any]:
    """How texts become ids."""
    tokenizer = tokenizer_of(speculator)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    whole = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items()) if tokenizer is not None else None
    return {"tokenizer": hashlib.sha256(str(whole).encode()).hexdigest(), "chat_template": template_of(speculator, settings)}


def tokenizer_of(speculator: Speculator) -> Any:
    try:
        return speculator.tokenizer
    except (ConfigurationError, ImportError):
        return None  # requests have ids


def template_of(speculator: Speculator, settings: Settings) -> str:
    """The text of the chat template, or of all of them."""
    found = settings.chat_template or getattr(tokenizer_of(speculator), "chat_template", None) or ""
    return found if isinstance(found, str) else json.dumps(found)


def computation_of(speculator: Speculator) -> dict[str, Any]:
    """How logits are computed."""
    target, backend = speculator.target, speculator.target.backend
    device = target.device
    about = {
        "dtype": speculator.model.dtype,
        "execution": target.execution,
        "attention": speculator.model.config._attn_implementation,
        "cache": type(backend.cache).__name__,
        "pages": type(backend.pages).__name__,
        "layouts": getattr(backend.overrides, "layouts", {}),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
    }
    if device.type == "cpu":
        kernels = target.execution in ("native", "packed") or backend.pages is not None  # a draft model may have loaded some, too
        about |= {
            "kernels": native.revision(),
            "instructions": native.instructions(speculator.model.dtype) if kernels else "",
            "cpu": sorted(native.cpu_flags()),
            "torch": torch.backends.cpu.get_cpu_capability(),
        }
    return about


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
