"""``registry.json`` says of every drafter and rule what its class says."""

import json
from dataclasses import asdict

import pytest

from foredraft import drafters, registry, verification

UPDATE = "python tests/test_registry.py"


def found() -> str:
    homes = [*drafters.REGISTRY.values(), *verification.REGISTRY.values()]
    return json.dumps([asdict(registry.Entry.of(home)) for home in homes if home.startswith("foredraft.")], indent=1) + "\n"


def test_the_stored_registry_is_what_the_classes_say():
    assert registry.STORED.read_text() == found(), f"run {UPDATE!r}"


def test_what_is_not_stored_is_imported(monkeypatch):
    home = "foredraft.testing:ScriptedDrafter"
    assert registry.entry(home) == registry.Entry.of(home)
    monkeypatch.setattr(registry.Entry, "of", lambda home: pytest.fail(f"{home} was imported"))
    assert [registry.entry(home).home for home in drafters.REGISTRY.values()] == list(drafters.REGISTRY.values())


if __name__ == "__main__":
    registry.STORED.write_text(found())
