"""`dovetail view --html`, `--serve` and `--open`: the page."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from . import console, inputs

if TYPE_CHECKING:
    from dovetail.core.network import Network
    from dovetail.core.plan import Plan
    from dovetail.core.profile import Profile
    from dovetail.view.page import Contents, Source


def show(
    files: Sequence[Path],
    *,
    cluster: Path | None,
    fabric: str | None,
    html: Path | None,
    serve: bool,
    port: int,
    browser: bool,
) -> None:
    from dovetail.view import page
    from dovetail.view.page.html import bundle

    bundle()  # a page that is not built is reported before minutes of reading
    given = [page.Given(read(files))] if files else []
    if html:
        page.export(page.Several([*given, *_running(cluster, fabric, live=False)]).contents(), html)
        console.wrote(html)
    if not serve:
        return
    source = page.Several([*given, *_running(cluster, fabric, live=True)])
    # From the moment somebody can read the address, an interrupt is the ordinary end.
    with contextlib.suppress(KeyboardInterrupt), page.serving(source, port=port) as server:
        typer.echo(server.url)
        console.say("serving the page to this machine only; Ctrl-C ends")
        if browser:
            console.browse(server.url)
        while True:
            time.sleep(3600)


def _running(cluster: Path | None, fabric: str | None, *, live: bool) -> Iterator[Source]:
    """Yields sources of the running cluster and the running fabric, where the user named one."""
    if cluster:
        from dovetail.cluster.client import Client
        from dovetail.cluster.web.cluster_section import ClusterSource

        yield ClusterSource(Client(cluster), live)
    if fabric:
        from dovetail.fabric.page_source import FabricSource

        yield FabricSource(fabric, live)


def read(files: Sequence[Path]) -> Contents:
    """Reads nouns and reports of commands, and for each plan the profile and network beside it."""
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
