"""What dovetail tells people when something is wrong: one sentence, no stack trace."""

from __future__ import annotations

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
        super().__init__(f"{what} needs dovetail[{extra}]: pip install 'dovetail[{extra}]'")
