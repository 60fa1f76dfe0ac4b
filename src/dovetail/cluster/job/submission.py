"""What a user submits. It is checked in full before anything is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from dovetail.core.errors import Error

MOST_TEXT = 1 << 20
"""Most bytes of a job file."""
MOST_BODY = MOST_TEXT * 6 + (1 << 20)
"""Most bytes of a request: JSON may write a byte as six, and there are arguments."""
NAME = r"^[A-Za-z0-9][A-Za-z0-9 ._-]{0,63}$"

Share = Literal["foreground", "normal", "background"]
Kind = Literal["tasks", "gang"]
Width = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Argument = Annotated[str, msgspec.Meta(max_length=4096)]


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Values that replace those of the job file; None keeps the file's."""

    workers: Width | None = None
    steps: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    spb: Literal["off", "ladder", "balanced", "guard"] | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    batch: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    task_timeout: Annotated[float, msgspec.Meta(gt=0, le=86400)] | None = None
    """Seconds after which a task counts as endless."""


class Submission(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One submitted job."""

    text: Annotated[str, msgspec.Meta(min_length=1, max_length=MOST_TEXT)]
    """Text of the job file, or of a gang's script."""
    name: Annotated[str, msgspec.Meta(pattern=NAME)] = "job"
    kind: Kind = "tasks"
    share: Share = "normal"
    bound: Annotated[float, msgspec.Meta(gt=0, le=10)] = 0.05
    """Slow-down that a foreground job accepts, as a share of its time alone."""
    options: Options = Options()
    gang: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 0
    """Number of ranks of a gang."""
    arguments: Annotated[tuple[Argument, ...], msgspec.Meta(max_length=256)] = ()
    """Arguments of a gang's script."""
    request: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9-]{0,64}$")] = ""
    """Id chosen by the sender: the same id twice is one job, so that a request without answer can be retried."""

    def __post_init__(self) -> None:
        if len(self.text.encode("utf-8", "replace")) > MOST_TEXT:
            raise ValueError(f"text: expected at most {MOST_TEXT} bytes")
        if not _storable(self.text) or not all(map(_storable, self.arguments)):
            raise ValueError("text, arguments: expected text without zero bytes and half characters")
        if (self.kind == "gang") != (self.gang > 0):
            raise ValueError("gang: expected the number of ranks for a gang, and for nothing else")
        if self.arguments and self.kind != "gang":
            raise ValueError("arguments: only a gang's script takes any")


def _storable(text: str) -> bool:
    return "\0" not in text and not any(0xD800 <= ord(c) < 0xE000 for c in text)


def decode(body: bytes) -> Submission:
    """Reads a submission from JSON; an Error of one line names the wrong field."""
    try:
        return msgspec.json.decode(body, type=Submission)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise Error(explain(e)) from None


def explain(error: Exception) -> str:
    """The reason in msgspec's message as "field: what was expected"."""
    what, _, where = str(error).partition(" - at `$")
    field = where.rstrip("`").lstrip(".")
    what = " ".join(what.replace("`", "").split())[:300]
    return f"{field}: {what[:1].lower()}{what[1:]}" if field else what[:1].lower() + what[1:]


def to_file(submission: Submission) -> str:
    """Content of `submission.json` in the job's folder: everything but the text, which has its own file."""
    data: dict[str, Any] = msgspec.to_builtins(submission)
    del data["text"]
    return msgspec.json.format(msgspec.json.encode(data), indent=1).decode() + "\n"


class _Stored(msgspec.Struct):
    """The part of submission.json that the processes of a job need."""

    options: Options = Options()


def stored_options(folder: Path) -> Options:
    """The options that a job was submitted with, from its folder; the defaults if none were stored."""
    try:
        return msgspec.json.decode((folder / "submission.json").read_bytes(), type=_Stored).options
    except FileNotFoundError:
        return Options()
    except msgspec.MsgspecError as e:
        raise Error(f"{folder / 'submission.json'}: {e}") from None
