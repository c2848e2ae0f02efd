"""Where models come from, without torch: paths, hub ids, and whether the hub can be reached."""

from __future__ import annotations

import math
import os
import re
import time
from pathlib import Path
from threading import Thread
from typing import Any

from foredraft import zoo
from foredraft.errors import ConfigurationError, UnsupportedModelError, first_line
from foredraft.files import read_json

PATIENCE = 2.0  # seconds that the hub gets to answer
MEMORY = 60.0  # seconds for which it counts as silent then
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def named(source: Any) -> Any:
    """A path, also one that begins with ``~``, as the name of what is there; anything else as it is."""
    source = Path(source) if isinstance(source, str) and source.startswith("~") else source
    return str(source.expanduser().absolute()) if isinstance(source, Path) else source


def parted(source: str) -> tuple[str, str | None]:
    """A path or a hub id, and the name of the GGUF file there that ``source`` names, or None."""
    if not source.endswith(".gguf"):
        return source, None
    plain = source.replace(os.sep, "/")
    folder, _, name = plain.rpartition("/")
    parts = plain.split("/")
    if len(parts) > 3 and not plain.startswith((".", "/", "~")) and not Path(parts[0]).is_dir():  # in a folder of a hub repository
        return "/".join(parts[:2]), "/".join(parts[2:])
    return folder or ".", name


def check_path(source: str) -> None:
    """Say so plainly, where transformers would take a path that does not exist for a malformed hub id.

    Raises:
        ConfigurationError: ``source`` is a path, and there is nothing there.
    """
    source, file = parted(source)
    if file is not None and Path(source).expanduser().is_dir() and not (Path(source).expanduser() / file).exists():
        raise ConfigurationError(f"there is no file {file!r} in {source!r}")
    path = source.startswith((".", "/", "~")) or not HUB_ID.fullmatch(source)
    if path and not Path(source).expanduser().exists():
        raise ConfigurationError(f"there is no model at {source!r}: no such path")


def on_this_machine(source: str) -> bool:
    """Whether ``source`` is to be read without asking the hub: it is embedded, a path, or was downloaded before and the hub
    cannot be reached.

    Raises:
        ConfigurationError: no such path; or a hub id that was not downloaded before, and the hub cannot be reached.
    """
    if source.startswith(zoo.PREFIX):
        return zoo.find(source).path.exists()
    check_path(source)
    source, file = parted(source)
    if Path(source).expanduser().exists():
        return True
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(source)
    except HFValidationError as error:
        raise ConfigurationError(f"there is no model at {source!r}: no such path, and no id of the hub: {first_line(error)}") from error
    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else unreachable(constants.ENDPOINT)
    if why is None:
        return False
    if not any(isinstance(try_to_load_from_cache(source, name), str) for name in (file or "config.json", "tokenizer_config.json")):
        raise ConfigurationError(f"{source!r} is not on this machine, and {why}; give a path, or a model that was downloaded before")
    return True


def unreachable(endpoint: str) -> str | None:
    """Why the hub cannot be reached; None if it answers, whatever it says. A hub that answered is not asked again, another one after a
    while."""
    why, until = _asked.get(endpoint, (None, 0.0))
    if time.monotonic() >= until:
        why = _ask(endpoint)
        _asked[endpoint] = why, math.inf if why is None else time.monotonic() + MEMORY
    return why


_asked: dict[str, tuple[str | None, float]] = {}  # what came of it, and until when that counts


def _ask(endpoint: str) -> str | None:
    found: list[str | None] = []

    def ask() -> None:
        from huggingface_hub import get_session

        try:
            get_session().head(endpoint, timeout=PATIENCE)
            found.append(None)
        except Exception as error:  # of the HTTP library, which is huggingface_hub's choice
            found.append(f"{endpoint} cannot be reached ({str(error).strip() or type(error).__name__})")

    asking = Thread(target=ask, daemon=True)  # looking up a name knows no timeout
    asking.start()
    asking.join(PATIENCE + 1)
    return found[0] if found else f"{endpoint} does not answer within {PATIENCE:.0f} seconds"


def config_of(source: str) -> dict[str, Any]:
    """The ``config.json`` of a model, downloaded if need be; empty if it has none.

    Raises:
        ConfigurationError: there is no such model.
    """
    folder, _ = parted(source)
    if source.startswith(zoo.PREFIX):
        path = zoo.find(source).path / "config.json"
    elif (local := on_this_machine(source)) and Path(folder).expanduser().exists():
        path = Path(folder).expanduser() / "config.json"
    else:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

        try:
            path = Path(hf_hub_download(folder, "config.json", local_files_only=local))
        except EntryNotFoundError:
            return {}
        except HfHubHTTPError as error:
            raise ConfigurationError(f"{source!r} cannot be read from the hub: {first_line(error)}") from error
    if not path.exists():
        return {}
    config = read_json(path)
    if source.startswith(zoo.PREFIX) and (size := zoo.find(source).inflated):
        config |= {"hidden_size": size.hidden_size, "num_hidden_layers": size.layers}
    return config


def check_decoder(source: str, config: dict[str, Any]) -> None:
    """Raises:
    UnsupportedModelError: the model at ``source``, with this ``config``, has an encoder.
    """
    if config.get("is_encoder_decoder"):
        kind = config.get("model_type", "unknown")
        raise UnsupportedModelError(
            f"{source!r} ({kind}) is an encoder-decoder model, which is not taken here; foredraft.Speculator takes it"
        )
