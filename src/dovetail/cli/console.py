"""Output of the commands: results go to stdout, progress and messages to stderr."""

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
    """Reports progress: what is being done and, where known, the fraction that is done (0 to 1)."""

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
    """Prints a message to stderr: something that is not the result."""
    console(stderr=True).print(text, soft_wrap=True)


def builtins(noun: Noun) -> dict[str, Any]:
    """Converts a noun to the JSON object that its file holds."""
    import msgspec

    return {"kind": noun.kind, "version": noun.version, **msgspec.to_builtins(noun)}


def emit(data: Any) -> None:
    """Prints the machine-readable result to stdout."""
    sys.stdout.write(encoder.dumps(data, indent=1, allow_nan=False) + "\n")
    sys.stdout.flush()


def result(data: Any, json: bool, *lines: str) -> None:
    """Prints the result as lines, or as JSON if that was asked for."""
    if json:
        emit(data)
    else:
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()


def wrote(path: Path) -> None:
    say(f"wrote {path}")


def browse(url: str) -> None:
    """Opens an address, which has been printed already, in a browser."""
    import webbrowser

    if not webbrowser.open(url):
        say("no browser found: open the address above")


@contextlib.contextmanager
def working(what: str, *, brief: bool = False) -> Iterator[Tell]:
    """Shows on stderr that work goes on: a bar and a clock on a terminal; elsewhere one line per thing begun.

    `brief` is for work that mostly ends within two seconds: it prints nothing where stderr is no terminal.
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
    """Checks that a file can be written, so that a wrong path fails now and not after minutes of work."""
    from dovetail.core.files import replacing

    with contextlib.suppress(_Untouched), replacing(path):
        raise _Untouched


class _Untouched(Exception):
    """Leaves `replacing` before it replaces anything."""
