"""`dovetail view --html`, `--serve` and `--open`: the page."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from . import inputs, shell

if TYPE_CHECKING:
    from dovetail.core.network import Network
    from dovetail.core.plan import Plan
    from dovetail.core.profile import Profile
    from dovetail.view.page import Contents


def show(files: Sequence[Path], *, html: Path | None, serve: bool, port: int, browser: bool) -> None:
    from dovetail.view import page
    from dovetail.view.page.html import bundle

    bundle()  # a page that is not built is told before minutes of reading
    contents = read(files)
    if html:
        page.export(contents, html)
        shell.wrote(html)
    if not serve:
        return
    # From the moment somebody can read the address, an interrupt is the ordinary end.
    with contextlib.suppress(KeyboardInterrupt), page.serving(page.Given(contents), port=port) as server:
        typer.echo(server.url)
        shell.say("serving the page to this machine only; Ctrl-C ends")
        if browser:
            import webbrowser

            if not webbrowser.open(server.url):
                shell.say("no browser found: open the address above")
        while True:
            time.sleep(3600)


def read(files: Sequence[Path]) -> Contents:
    """Nouns, answers of commands, and beside plans what they were made from."""
    from dovetail.core.plan import Plan
    from dovetail.view.page import reports, sort

    things = [reports.read(path) or inputs.read_any(path) for path in files]
    plans = [(path, thing) for path, thing in zip(files, things, strict=True) if isinstance(thing, Plan)]
    beside = [found for path, plan in plans for found in _beside(path, plan)]
    return sort(things, files=[path.name for path in files], beside=beside)


def _beside(path: Path, plan: Plan) -> Iterator[Profile | Network]:
    from dovetail.core.errors import Error

    for find in (inputs.profile_of, inputs.network_of):
        with contextlib.suppress(Error):  # the page says what is missing
            yield find(path, plan)
