"""Where words go: results to stdout, everything else to stderr; progress only while somebody may be waiting."""

from __future__ import annotations

import contextlib
import json as encoder
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from dovetail.core.files import Noun

Json = Annotated[bool, typer.Option("--json", help="The result as JSON on stdout, and nothing else there.")]


class Tell(Protocol):
    """Called with what is being done and, where known, the fraction that is done."""

    def __call__(self, text: str, fraction: float | None = None, /) -> None: ...


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


def verbatim(*lines: str) -> None:
    """Prints lines to stdout that must not be broken, such as code."""
    for line in lines:
        console().print(line, soft_wrap=True)


def say(text: str) -> None:
    """Tells the user something that is not the result."""
    console(stderr=True).print(text, soft_wrap=True)


def builtins(noun: Noun) -> dict[str, Any]:
    """A noun as it stands in its file."""
    import msgspec

    return {"kind": noun.kind, "version": noun.version, **msgspec.to_builtins(noun)}


def emit(data: Any) -> None:
    """The machine-readable result."""
    sys.stdout.write(encoder.dumps(data, indent=1, allow_nan=False) + "\n")
    sys.stdout.flush()


def result(data: Any, json: bool, *lines: str) -> None:
    """The result as lines, or as JSON if that was asked for."""
    if json:
        emit(data)
    else:
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()


def wrote(path: Path) -> None:
    say(f"wrote {path}")


def browse(url: str) -> None:
    """Opens an address that the user has been told."""
    import webbrowser

    if not webbrowser.open(url):
        say("no browser found: open the address above")


@contextlib.contextmanager
def working(what: str, *, brief: bool = False) -> Iterator[Tell]:
    """Shows on stderr that work goes on: a bar and a clock on a terminal; elsewhere one line per thing begun.

    What is `brief` mostly ends within two seconds and shows nothing elsewhere.
    """
    err = console(stderr=True)
    if not err.is_terminal and brief:
        yield lambda text, fraction=None, /: None
        return
    if not err.is_terminal:
        say(f"{what} …")
        yield lambda text, fraction=None, /: say(f"{text} …") if fraction is None else None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(what, total=None)

        def tell(text: str, fraction: float | None = None, /) -> None:
            bar.update(task, description=text)
            if fraction is not None:
                bar.update(task, total=1.0, completed=fraction)

        yield tell


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """While the block runs, descriptor 1 is stderr: what the user's code or its children print is not the result."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def writable(path: Path) -> None:
    """Fails now, with the line that writing would end in, rather than after minutes of work."""
    from dovetail.core.files import replacing

    with contextlib.suppress(_Untouched), replacing(path):
        raise _Untouched


class _Untouched(Exception):
    """Leaves `replacing` before it replaces anything."""
