"""Errors for users: one sentence, no stack trace."""

from __future__ import annotations

import re
from pathlib import Path


class Error(Exception):
    """Base of everything dovetail raises for its users. Its text is one complete line."""


class InputError(Error):
    """A file or a value is not what it should be: names the file, the field and what was expected."""

    def __init__(self, file: str | Path, field: str, expected: str) -> None:
        self.file, self.field, self.expected = str(file), field, expected
        place = f"{file}: {field}" if field else f"{file}"
        super().__init__(f"{place}: {expected}")


class MissingExtra(Error):
    """An optional part is not installed."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs dovetail-train[{extra}]: pip install 'dovetail-train[{extra}]'")


def first_line(said: BaseException | str) -> str:
    """What a foreign error, or a program's standard error, says in one line: its first, of at most 300 characters.

    Without the place in gloo's sources and gloo's advice. An error that says nothing gives the name of its type.
    """
    lines = str(said).strip().splitlines()
    if not lines:
        return "" if isinstance(said, str) else type(said).__name__
    return re.sub(r"^\[[^]]*\.cc:\d+\] ", "", lines[0]).partition(". This is typically")[0].strip()[:300]


def typed_line(error: BaseException) -> str:
    """A foreign error in one line, "ValueError: its first line", for code that is not ours (a model, a job)."""
    return f"{type(error).__name__}: {first_line(str(error)) or 'no reason given'}"
