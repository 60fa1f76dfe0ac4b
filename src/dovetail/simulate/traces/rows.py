"""Strict reading of tables: the error of a bad row names the file, the line, the field and what was expected."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from dovetail.core.errors import Error, InputError
from dovetail.core.files import MOST_COUNT, MOST_SECONDS

T = TypeVar("T")
MOST_REPORTED = 20


class TraceError(Error):
    """Bad rows of a trace: the text is of the first, `rows` has the first twenty."""

    def __init__(self, rows: list[InputError], count: int) -> None:
        self.rows = rows
        more = f" (and {count - 1} more bad rows)" if count > 1 else ""
        super().__init__(f"{rows[0]}{more}")


class TraceRow:
    """One line of a table, by field."""

    __slots__ = ("cells", "line", "path")

    def __init__(self, path: Path, line: int, cells: dict[str, str]) -> None:
        self.path, self.line, self.cells = path, line, cells

    def bad(self, field: str, expected: str) -> InputError:
        got = self.cells[field]
        got = got if len(got) <= 40 else f"{got[:40]}…"
        return InputError(self.path, f"line {self.line}, {field}", f"expected {expected}, got {got!r}")

    def has(self, field: str) -> bool:
        return bool(self.cells.get(field))

    def text(self, field: str) -> str:
        if not self.cells[field]:
            raise self.bad(field, "a name")
        return self.cells[field]

    def whole(self, field: str, *, least: int, most: int = MOST_COUNT) -> int:
        try:
            value = int(self.cells[field])
        except ValueError:
            raise self.bad(field, f"a whole number of at least {least}") from None
        if value < least:
            raise self.bad(field, f"a whole number of at least {least}")
        if value > most:
            raise self.bad(field, f"a whole number of at most {most}")
        return value

    def number(self, field: str, *, least: float = 0.0, above: bool = False) -> float:
        wanted = f"a number above {least:g}" if above else f"a number of at least {least:g}"
        try:
            value = float(self.cells[field])
        except ValueError:
            raise self.bad(field, wanted) from None
        if not math.isfinite(value) or value < least or (above and value == least):
            raise self.bad(field, wanted)
        if value > MOST_SECONDS:
            raise self.bad(field, f"a number of at most {MOST_SECONDS:g}")
        return value

    def flag(self, field: str) -> bool:
        value = self.cells[field].lower()
        if value not in ("yes", "no", "true", "false", "1", "0"):
            raise self.bad(field, "yes or no")
        return value in ("yes", "true", "1")

    def moment(self, field: str) -> float:
        """A date and time as seconds since 2000."""
        try:
            return (datetime.fromisoformat(self.cells[field]) - datetime(2000, 1, 1)).total_seconds()
        except (ValueError, TypeError):
            raise self.bad(field, "a date and time such as 2017-10-09 07:01:55") from None


def lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:  # spreadsheets write a byte-order mark
            yield from file
    except OSError as e:
        raise InputError(path, "", f"cannot be read: {(e.strerror or str(e)).lower()}") from None
    except UnicodeDecodeError:
        raise InputError(path, "", "expected text in UTF-8, got something else") from None


def header(path: Path) -> list[str]:
    """The names in the first line of a CSV."""
    first = next(lines(path), "")
    if not first.strip():
        raise InputError(path, "line 1", "expected a header, got an empty line")
    try:
        return [name.strip() for name in next(csv.reader([first]))]
    except csv.Error as e:
        raise InputError(path, "line 1", f"expected comma-separated values: {e}") from None


def table(
    path: Path,
    parse: Callable[[TraceRow], T],
    *,
    fields: list[str] | None = None,
    needed: tuple[str, ...] = (),
    delimiter: str = ",",
) -> list[T]:
    """Parses every row of a table. Empty lines are allowed at the end only.

    `fields` names the columns of a table without a header, `needed` those that a header must have.
    """
    names = header(path) if fields is None else fields
    for name in needed:
        if name not in names:
            raise InputError(path, "line 1", f"expected a column {name}")
    if len(set(names)) < len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise InputError(path, "line 1", f"expected every column once, got {twice!r} twice")
    found: list[T] = []
    bad: list[InputError] = []
    count, empty = 0, 0
    # Quoting is off for tables without header: commands in them may hold quotes.
    reader = csv.reader(
        lines(path), delimiter=delimiter, quoting=csv.QUOTE_MINIMAL if fields is None else csv.QUOTE_NONE
    )
    try:
        for cells in reader:
            if fields is None and reader.line_num == 1:
                continue
            if not cells:
                empty = empty or reader.line_num
                continue
            try:
                if empty:
                    raise InputError(path, f"line {empty}", "expected a row, got an empty line")
                if len(cells) != len(names):
                    line = f"line {reader.line_num}"
                    raise InputError(path, line, f"expected {len(names)} fields, got {len(cells)}")
                found.append(
                    parse(TraceRow(path, reader.line_num, dict(zip(names, map(str.strip, cells), strict=True))))
                )
            except InputError as e:
                if e.file != str(path):
                    raise  # a file beside this one is wrong, not the row that needed it
                count, empty = count + 1, 0
                if len(bad) < MOST_REPORTED:
                    bad.append(e)
    except csv.Error as e:
        raise InputError(path, f"line {reader.line_num}", f"expected comma-separated values: {e}") from None
    if bad:
        raise TraceError(bad, count)
    if not found:
        raise InputError(path, "", "expected at least one row below the header, got none")
    return found
