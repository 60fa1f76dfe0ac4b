"""Reading and writing the nouns as JSON: strict on the way in, atomic on the way out.

A stored noun is one JSON object whose first two fields say what it is: ``"kind"`` ("profile", "network", …) and
``"version"``. A reader accepts its own version, and every older one that `UPGRADES` leads up from.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pwd
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec

from .errors import Error, InputError

# Upper limits far beyond anything real: sums and products of what they let through neither overflow nor become inf.
MOST_SECONDS = 1e12
MOST_BYTES = 2**48
MOST_COUNT = 2**31 - 1

Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=MOST_SECONDS)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=MOST_BYTES)]
Count = Annotated[int, msgspec.Meta(ge=1, le=MOST_COUNT)]
Index = Annotated[int, msgspec.Meta(ge=0, le=MOST_COUNT)]
Name = Annotated[str, msgspec.Meta(min_length=1)]


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a noun: frozen, compared by value, strict about its fields."""


class Noun(Record, frozen=True, kw_only=True):
    """A thing that is stored in a file of its own."""

    kind: ClassVar[str]
    version: ClassVar[int] = 1

    def check(self) -> None:
        """Raises ValueError("field: what was expected") for what types cannot say. Called by `read`."""


N = TypeVar("N", bound=Noun)

UPGRADES: dict[tuple[str, int], Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""(kind, version) → the function that turns the fields of that version into those of the next one.

Whoever changes the stored form of a noun raises its `version` and registers the way up from the old one here, so that
files of users stay readable (CONTRIBUTING.md, "Files").
"""


def read(path: str | Path, noun: type[N]) -> N:
    """The noun stored in `path`; an InputError that names file and field if it is not one."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as e:
        raise InputError(path, "", f"cannot be read: {(e.strerror or str(e)).lower()}") from None
    except UnicodeDecodeError:
        raise InputError(path, "", "expected JSON text in UTF-8, got something else") from None
    return decode(text, noun, path)


def decode(text: str, noun: type[N], path: str | Path = "<text>") -> N:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as e:
        # A string is "unterminated" only where the text ends inside it.
        cut_off = e.pos >= len(text.rstrip()) or e.msg.startswith("Unterminated string")
        what = "the file ends in the middle (truncated?)" if cut_off else e.msg.lower()
        raise InputError(path, f"line {e.lineno} column {e.colno}", f"expected valid JSON: {what}") from None
    except RecursionError:
        raise InputError(path, "", "expected a dovetail file, got JSON nested too deeply") from None
    except ValueError:  # Python reads no integer of more than 4300 digits
        raise InputError(path, "", "expected a dovetail file, got a number of thousands of digits") from None
    if not isinstance(data, dict):
        raise InputError(path, "", f"expected a JSON object with a {noun.kind}, got {type(data).__name__}")
    kind, version = data.pop("kind", None), data.pop("version", None)
    if kind != noun.kind:
        raise InputError(
            path, "kind", f"expected {noun.kind!r}, got {kind!r}" if kind else f"missing, expected {noun.kind!r}"
        )
    data = _upgraded(data, version, noun, path)
    for field, number in _not_finite(data):
        raise InputError(path, field, f"expected a finite number, got {number}")
    try:
        value = msgspec.convert(data, noun)
        value.check()
    except msgspec.ValidationError as e:
        field, expected = _explain(str(e))
        raise InputError(path, field, expected) from None
    except ValueError as e:
        field, _, expected = str(e).partition(": ")
        raise InputError(path, field, expected) from None
    return value


def _upgraded(data: dict[str, Any], version: Any, noun: type[Noun], path: str | Path) -> dict[str, Any]:
    """The fields of a stored noun in their present version; an InputError that says what to do where there is no way.

    ValueErrors of an upgrade ("field: what was expected") are reported like those of `Noun.check`.
    """
    if not isinstance(version, int) or isinstance(version, bool):
        got = "missing" if version is None else f"got {version!r}"
        raise InputError(path, "version", f"expected {noun.version}, {got}; is this a file that dovetail has written?")
    if version > noun.version:
        newer = f"expected {noun.version}, got {version}: a newer dovetail has written this file"
        raise InputError(path, "version", f"{newer}; upgrade with `pip install -U dovetail-train`")
    for step in range(version, noun.version):
        if (noun.kind, step) not in UPGRADES:
            older = f"expected {noun.version}, got {version}, which this dovetail cannot read"
            raise InputError(path, "version", f"{older}; write the file again with the command that made it")
        try:
            data = UPGRADES[noun.kind, step](data)
        except ValueError as e:
            field, _, expected = str(e).partition(": ")
            raise InputError(path, field, expected) from None
    return data


def encode(noun: Noun) -> str:
    data: dict[str, Any] = {"kind": noun.kind, "version": noun.version}
    data.update(msgspec.to_builtins(noun))
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def write(path: str | Path, noun: Noun) -> None:
    """Stores the noun; whatever happens, `path` holds the old content or the new, never a part."""
    write_text(path, encode(noun))


def write_text(path: str | Path, text: str) -> None:
    """Replaces a text file in one step."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replacing(path: str | Path, *, durable: bool = False, private: bool = False) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place if the block succeeds, and vanishes if it does not.

    `durable`: when this returns, the new content is on the disk, also after a power failure. `private`: nobody but the
    owner may read it.

    Through a symbolic link, the file that it points to. A device or a pipe (/dev/null, /dev/stdout) keeps its place and
    is written to: root would otherwise take it from everybody.
    """
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        with tempfile.TemporaryDirectory() as folder:
            yield (through := Path(folder) / path.name)
            with path.open("wb") as out:
                out.write(through.read_bytes())
        return
    path = path.resolve() if path.is_symlink() else path
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix)
    except OSError as e:
        raise Error(f"{path}: cannot be written: {(e.strerror or str(e)).lower()}") from None
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        if not private:
            umask = os.umask(0)
            os.umask(umask)
            temporary.chmod(0o666 & ~umask)  # mkstemp's 0600 would hide the file from the user's colleagues
        if durable:
            _sync(temporary)
        temporary.replace(path)
        if durable:
            _sync(path.parent)
    except IsADirectoryError:
        raise Error(f"{path}: cannot be written: is a directory") from None
    finally:
        temporary.unlink(missing_ok=True)


def cache_folder(name: str) -> Path:
    """The folder of programs that were compiled for this user, whatever HOME says: of the user this runs as.

    Root must not run what another user could have put there.
    """
    home = pwd.getpwuid(os.geteuid()).pw_dir
    where = Path(os.environ.get("XDG_CACHE_HOME") or Path(home, ".cache")) / "dovetail" / name
    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    if where.stat().st_uid != os.geteuid():
        raise Error(f"{where}: belongs to another user; set XDG_CACHE_HOME to a directory of your own")
    return where


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _not_finite(value: Any, at: str = "") -> Iterator[tuple[str, float]]:
    """Where in a JSON tree a NaN or an infinity stands: Python's reader lets both pass."""
    if isinstance(value, float) and not math.isfinite(value):
        yield at, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _not_finite(item, f"{at}.{key}" if at else str(key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _not_finite(item, f"{at}[{i}]")


def _explain(message: str) -> tuple[str, str]:
    """msgspec's "Expected `int`, got `str` - at `$.layers[0].name`" as (field, sentence)."""
    what, _, where = message.replace(" - at `key` in `$", " as a name - at `$").partition(" - at `$")
    field = where.rstrip("`").lstrip(".")
    if missing := re.search(r"missing required field `(\w+)`", what):
        return f"{field}.{missing[1]}" if field else missing[1], "missing"
    if unknown := re.search(r"unknown field `(\w+)`", what):
        return f"{field}.{unknown[1]}" if field else unknown[1], "unknown field"
    what = re.sub(r"of length >= 1$", "that is not empty", what.replace("`", ""))
    return field, what[:1].lower() + what[1:]
