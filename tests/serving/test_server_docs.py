"""docs/server.md names every field, status and flag."""

from __future__ import annotations

import re
from pathlib import Path

from fastapi.routing import APIRoute
from served import tiny_chat
from typer.main import get_command

from foredraft.cli import app as command
from foredraft.serving import app
from foredraft.serving.failures import STATUSES
from foredraft.serving.schema import ChatRequest, CompletionRequest

PAGE = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
NAMED = set(re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", PAGE, flags=re.S)))


def test_every_field_is_there():
    assert {*CompletionRequest.model_fields, *ChatRequest.model_fields, "annotations", "index", "description", "strict"} - NAMED == set()


def test_every_status_and_path_is_there():
    assert {str(status) for status in STATUSES} - {row.split("|")[1].strip() for row in PAGE.splitlines() if row.startswith("| ")} == set()
    paths = {route.path for route in app(tiny_chat()).routes if isinstance(route, APIRoute)}
    assert [path for path in paths if path.partition("{")[0] not in " ".join(NAMED)] == []


def test_every_flag_of_its_own_is_there():
    serve, generate = (get_command(command).commands[name] for name in ("serve", "generate"))
    shared = {name for parameter in generate.params for name in parameter.opts}
    flags = {name for parameter in serve.params for name in parameter.opts if name.startswith("--")} - shared - {"--help"}
    assert flags - NAMED == set()
