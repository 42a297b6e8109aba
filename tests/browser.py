"""A page in a real browser without a screen: what it shows, what its console says, how it looks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Page, sync_playwright

from tests.servers import require


@contextmanager
def browser_page(*, width: int = 1280, height: int = 900, **context: Any) -> Iterator[tuple[Page, list[str]]]:
    """(page, complaints): errors and warnings of its console, and scripts that failed, are added as they come."""
    chromium = require("chromium")
    complaints: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(chromium), args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": width, "height": height}, **context)
        page.on("console", lambda said: complaints.append(said.text) if said.type in {"error", "warning"} else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        try:
            yield page, complaints
        finally:
            browser.close()
