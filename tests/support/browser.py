"""Chromium for the tests of the page: found on the machine, never downloaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync --no-first-run"
AXE = (Path(__file__).parents[1] / "serving" / "axe" / "axe.min.js").read_text(encoding="utf-8")


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser. Without one the test is skipped, but in CI it fails."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no chromium on PATH; install Debian's package chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS.split())
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Any, url: str, *, width: int = 1280, scheme: str = "light", motion: str = "no-preference") -> Iterator[Any]:
    """A page of a fresh browser profile; afterwards nothing may have been written to its console that the test did not take out of
    ``page.said``."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion=motion)
    context.set_default_timeout(20_000)
    page = context.new_page()
    page.said = []
    page.on("console", lambda message: page.said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: page.said.append(f"exception: {error}"))
    try:
        page.goto(url)
        yield page
        assert page.said == []
    finally:
        context.close()


def violations(page: Any) -> list[str]:
    """What axe finds wrong with the page as it is now."""
    if not page.evaluate("() => 'axe' in window"):
        page.evaluate(AXE)
    found = page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
    return [f"{each['id']}: {each['help']}: {each['nodes'][0]['html'][:200]}" for each in found["violations"]]
