"""The files of the web page."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FOLDER = Path(__file__).parent / "page"
HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class Files(StaticFiles):
    """Files that a browser reads anew after an update, and in which nothing from elsewhere runs."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        if path.endswith(".js"):  # the registry of Windows may say text/plain, and no browser runs such a module
            response.headers["content-type"] = "text/javascript; charset=utf-8"
        return response


def add(app: FastAPI) -> None:
    """Serve the page at ``/``."""
    if not FOLDER.is_dir():
        return

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def index() -> FileResponse:
        return FileResponse(FOLDER / "index.html", headers=HEADERS)

    app.mount("/page", Files(directory=FOLDER), name="page")
