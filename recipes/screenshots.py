"""The screenshots of docs/page.md: ``python -m recipes.screenshots`` serves the embedded models and takes them with Chromium.

Needs the packages of the extra ``test``, Pillow, and a ``chromium`` on PATH.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).parents[1] / "docs" / "images"
SERVE = "serve zoo:python-8m --drafter draft-model:zoo:python-1m --shape chain(4) --port"


def write(page: Any) -> None:
    page.get_by_label("Max. tokens").fill("60")
    page.get_by_label("Seed").fill("5")
    page.get_by_role("button", name="Continue the text").click()
    page.locator(".answer p.note").wait_for()
    page.get_by_label("Hide refused guesses").uncheck()
    page.locator(".tokens .tok.rejected").nth(3).click()


def roll(page: Any) -> None:
    """Until a round keeps a guess and refuses one."""
    page.get_by_label("Rule").select_option("rejection")
    for _ in range(50):
        page.get_by_role("button", name="Roll").first.click()
        page.locator(".landed").wait_for()
        page.wait_for_timeout(500)
        if page.locator(".residual").count() and page.locator(".guesses tr.accepted").count():
            return


def many(page: Any) -> None:
    """Of a lossy rule."""
    page.get_by_label("Rule").select_option("lenient")
    page.get_by_role("button", name="Roll 500").click()
    page.get_by_role("heading", name="500 rolls", exact=True).wait_for(timeout=180_000)
    page.get_by_role("button", name="Roll 500").wait_for()


def race(page: Any) -> None:
    page.get_by_role("button", name="Run both").click()
    page.locator(".verdict").wait_for(timeout=120_000)


def live(page: Any) -> None:
    """Texts that overlap, more of them later."""
    body = {"prompt": "def mean(values):\n", "max_tokens": 200}
    ask = "(body) => { fetch('v1/completions', {method: 'POST', headers: {'Content-Type': 'application/json'}, body}) }"
    for second in range(14):
        for _ in range(1 + second // 5):
            page.evaluate(ask, json.dumps(body))
        page.wait_for_timeout(1000)


VIEWS = {"write": (write, ""), "roll": (roll, "roll"), "many": (many, "roll"), "race": (race, "race"), "live": (live, "live")}


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/"
    server = subprocess.Popen([sys.executable, "-m", "foredraft", *SERVE.split(), str(port)])
    try:
        while True:
            with suppress(httpx.TransportError):
                if httpx.get(f"{url}health").status_code == 200:
                    break
            if server.poll() is not None:
                raise SystemExit("the server did not start")
            time.sleep(0.2)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            for name, (act, view) in VIEWS.items():
                page = browser.new_page(viewport={"width": 1120, "height": 680}, reduced_motion="reduce")
                page.goto(f"{url}#{view}")
                page.get_by_role("heading", level=1).wait_for()
                act(page)
                take(page, name)
                page.close()
            browser.close()
    finally:
        server.terminate()
        server.wait(30)


def take(page: Any, name: str) -> None:
    """The whole view, or of many rolls their card alone; in 128 colours, which are enough for a page."""
    path = IMAGES / f"page-{name}.png"
    page.evaluate("() => { document.activeElement.blur(); scrollTo(0, 0); document.querySelector('.top').style.position = 'static'; }")
    if name == "many":
        page.set_viewport_size({"width": 1120, "height": 1600})
        page.locator(".many").screenshot(path=path)
    else:
        page.screenshot(path=path, full_page=True)
    with Image.open(path) as image:
        few = image.convert("RGB").quantize(128, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


if __name__ == "__main__":
    main()
