"""What ``/openapi.json`` says: bodies are read by :mod:`foredraft.serving.protect`, so FastAPI does not know them by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from foredraft.serving.failures import STATUSES

TEMPLATE = "#/components/schemas/{model}"
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": {"$ref": TEMPLATE.format(model="Error")}}}}
    for status, text in STATUSES.items()
}


STREAMED = {
    "description": "the answer; with `stream`, chunks of it as server-sent events, the last of which is `[DONE]`",
    "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": {"type": "string"}}},
}
KEYS = {"key": {"type": "http", "scheme": "bearer", "description": "where the server was started with `--api-key`"}}


def described(path: str, handler: Callable[..., Any], body: type[BaseModel] | None) -> dict[str, Any]:
    """Arguments of ``add_api_route`` for ``path``."""
    extra: dict[str, Any] = {}
    responses = ERRORS if body is None or "stream" not in body.model_fields else {200: STREAMED, **ERRORS}
    if "{name" in path:
        extra = {"parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]}
    if body is not None:
        schema = {"$ref": TEMPLATE.format(model=body.__name__)}
        extra = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
    return {"responses": responses, "response_model": None, "summary": (handler.__doc__ or "").strip(), "openapi_extra": extra}


def add_schemas(app: FastAPI, bodies: Sequence[type[BaseModel]]) -> None:
    """Give ``app`` an OpenAPI document that knows ``bodies``. It has no 422: what is wrong in a request is a 400."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=TEMPLATE)
            found["security"] = [{"key": []}, {}]  # with a key, or with none
            found.setdefault("components", {})["securitySchemes"] = KEYS
            known = found["components"].setdefault("schemas", {})
            known |= {**schemas.get("$defs", {}), "Error": ERROR}
            for name in ("HTTPValidationError", "ValidationError"):
                known.pop(name, None)
            for path in found["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            app.openapi_schema = found
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
