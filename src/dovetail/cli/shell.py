"""Where words go: results to stdout, everything else to stderr; progress only while somebody may be waiting."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from dovetail.core.store import Noun

Json = Annotated[bool, typer.Option("--json", help="The result as JSON on stdout, and nothing else there.")]
Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction that is done."""


def console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    class Pipe(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # the application ends quietly

    return Pipe(stderr=stderr, highlight=False, emoji=False, markup=False)


def show(*things: Any) -> None:
    """Prints texts, tables and drawings to stdout."""
    out = console()
    for thing in things:
        out.print(thing)


def say(text: str) -> None:
    """Tells the user something that is not the result."""
    console(stderr=True).print(text, soft_wrap=True)


def builtins(noun: Noun) -> dict[str, Any]:
    """A noun as it stands in its file."""
    import msgspec

    return {"kind": noun.kind, "version": noun.version, **msgspec.to_builtins(noun)}


def emit(data: Any) -> None:
    """The machine-readable result."""
    sys.stdout.write(json.dumps(data, indent=1, allow_nan=False) + "\n")
    sys.stdout.flush()


def wrote(path: Path) -> None:
    say(f"wrote {path}")


@contextlib.contextmanager
def working(what: str) -> Iterator[Progress]:
    """Shows on stderr that work goes on: a bar on a terminal, one line elsewhere."""
    err = console(stderr=True)
    if not err.is_terminal:
        say(f"{what} …")
        yield lambda text, fraction: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(what, total=None)

        def step(text: str, fraction: float) -> None:
            bar.update(task, description=text or what, total=1.0, completed=fraction)

        yield step
