"""Pages as tests look at them: in a real headless Chromium, from a file, with every request counted."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dovetail.view.page import Contents, export
from dovetail.view.page.html import BUNDLE

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--no-first-run"),
]


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; skips, with the reason, where something that it needs is absent."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="the page is tested with playwright (pip)")
    if CHROMIUM is None:
        pytest.skip("the page is tested in Chromium, which is not installed (Debian: apt-get install chromium)")
    if not (BUNDLE / "app.js").exists():
        pytest.skip("the page is not built (make page)")
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Seen:
    """A page that is open, and what it did besides showing itself."""

    page: Any
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def pixel(self, track: int, time: float, *, down: int = 20, timeline: int = 0) -> str:
        """The colour on a track at a time, so many pixels below the row's top, as "#rrggbb"; "" for nothing drawn."""
        found: str = self.page.evaluate(PIXEL, [timeline, track, time, down])
        return found

    def view(self, timeline: int = 0) -> tuple[float, float]:
        data = self.page.locator(".timeline .body canvas").nth(timeline).evaluate("c => ({...c.dataset})")
        return float(data["from"]), float(data["to"])

    def settle(self) -> None:
        """Until what was asked for has been drawn: two frames."""
        self.page.evaluate("() => new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)
        self.settle()

    def said(self, timeline: int = 0) -> str:
        text: str = self.page.locator(".timeline .detail").nth(timeline).inner_text()
        return text


PIXEL = """([timeline, track, time, down]) => {
  const figure = document.querySelectorAll('.timeline')[timeline];
  const canvas = figure.querySelector('.body canvas');
  const {from, to} = canvas.dataset;
  const top = figure.querySelectorAll('.label')[track].offsetTop - figure.querySelector('.scroller').scrollTop;
  const ratio = canvas.width / canvas.clientWidth;
  const x = (time - from) / (to - from) * canvas.width;
  const [r, g, b, a] = canvas.getContext('2d').getImageData(Math.floor(x), Math.floor((top + down) * ratio), 1, 1).data;
  return a < 128 ? '' : '#' + [r, g, b].map(v => v.toString(16).padStart(2, '0')).join('');
}"""


@contextmanager
def opened(browser: Any, contents: Contents, folder: Path, **options: Any) -> Iterator[Seen]:
    """The exported page, opened from its file with the network switched off; fails if it asked for anything."""
    path = folder / "page.html"
    export(contents, path)
    with opened_file(browser, path, **options) as seen:
        yield seen


@contextmanager
def opened_file(browser: Any, path: Path, **options: Any) -> Iterator[Seen]:
    with watched(browser, **options) as seen:
        seen.page.context.set_offline(True)
        seen.page.goto(path.as_uri())
        seen.settle()
        yield seen
        assert seen.requests == [path.as_uri()], "the page asked for something"


@contextmanager
def watched(browser: Any, **options: Any) -> Iterator[Seen]:
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
    context.set_default_timeout(60_000)
    try:
        seen = Seen(context.new_page())
        seen.page.on("request", lambda r: seen.requests.append(r.url))
        seen.page.on("pageerror", lambda e: seen.errors.append(str(e)))
        seen.page.on("console", lambda m: seen.errors.append(m.text) if m.type == "error" else None)
        yield seen
        assert not seen.errors
    finally:
        context.close()
