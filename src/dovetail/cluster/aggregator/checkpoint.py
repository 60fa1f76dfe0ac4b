"""What a job keeps on disk: checkpoints and losses.

A checkpoint is an ordinary `torch.save`, which `torch.load(weights_only=True)` reads. It is written under another name,
forced to disk and renamed, so that a file with a checkpoint's name is complete; the newest two are kept. Losses are one
line per iteration; when a job resumes from a checkpoint, later lines are cut off and written again, byte for byte.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import torch

from dovetail.core.errors import Error, first_line
from dovetail.core.files import replacing

log = logging.getLogger("dovetail")
KEPT = 2
"""Number of checkpoints that are kept."""


class Damaged(Error):
    """A checkpoint that cannot be read."""


def folder_of(job_folder: Path) -> Path:
    return job_folder / "checkpoints"


def found(job_folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints as (number of iterations, file), the newest first."""
    files = [p for p in folder_of(job_folder).glob("*.pt") if p.stem.isdigit()]
    return sorted(((int(p.stem), p) for p in files), reverse=True)


def read(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
        if not isinstance(state, dict) or not {"iteration", "model", "optimizer"} <= set(state):
            raise ValueError("it lacks a part")
    except Exception as e:  # a torn file fails in many ways
        raise Damaged(f"{path}: cannot be read: {first_line(e)}") from e
    return state


def newest(job_folder: Path) -> dict[str, Any] | None:
    """The newest checkpoint that can be read."""
    for _, path in found(job_folder):
        try:
            return read(path)
        except Damaged as e:
            log.warning("%s", e)
    return None


def write(job_folder: Path, iteration: int, state: dict[str, Any]) -> Path:
    """Writes a checkpoint; returns when it is safely on disk."""
    folder = folder_of(job_folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{iteration:08d}.pt"
    with replacing(path, durable=True) as temporary, temporary.open("wb") as file:
        torch.save(state, file)
    for _, old in found(job_folder)[KEPT:]:
        old.unlink(missing_ok=True)
    return path


def tidy(job_folder: Path) -> None:
    """Removes half-written files of killed processes."""
    for path in folder_of(job_folder).glob(".*.pt.*"):
        path.unlink(missing_ok=True)


def copied(value: Any) -> Any:
    """A copy of a state with its own tensors, which can be written while training goes on."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        made = {key: copied(item) for key, item in value.items()}
        return made if type(value) is dict else type(value)(made)  # a Counter stays one
    if isinstance(value, list | tuple):
        return type(value)(copied(item) for item in value)
    return value


class Writer:
    """Writes checkpoints on a thread of its own, one at a time, while training goes on."""

    def __init__(self, job_folder: Path) -> None:
        self._folder = job_folder
        self._thread: threading.Thread | None = None
        self.done = -1
        """Number of iterations in the newest checkpoint on disk; -1 if there is none."""
        self.error = ""
        """The reason why the last checkpoint could not be written; empty if it was."""

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def begin(self, iteration: int, state: dict[str, Any]) -> None:
        """Begins to write a state, which must not change any more: see `copied`."""
        assert not self.busy, "one at a time"
        self._thread = threading.Thread(target=self._write, args=(iteration, state), name="checkpoint", daemon=True)
        self._thread.start()

    def finish(self, *, timeout: float = 120.0) -> None:
        """Waits for the checkpoint that is being written; an Error if it could not be."""
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise Error(f"checkpoint: could not be written within {timeout:.0f} s")
        if self.error:
            raise Error(f"checkpoint: {self.error}")

    def _write(self, iteration: int, state: dict[str, Any]) -> None:
        try:
            write(self._folder, iteration, state)
        except Exception as e:
            self.error = first_line(e)
        else:
            self.done, self.error = iteration, ""


class Losses:
    """`losses.jsonl`: {"iteration": 0, "loss": 2.3}, one line for each iteration from 0 on."""

    def __init__(self, job_folder: Path, iterations: int) -> None:
        """Keeps the first `iterations` lines and continues after them."""
        path = job_folder / "losses.jsonl"
        self.last = 0.0
        """Loss of the newest line."""
        self._unwritten = b""
        kept = 0
        path.touch()
        with path.open("rb") as file:
            for number, line in enumerate(file):
                if number >= iterations or not line.endswith(b"\n"):
                    break
                kept += len(line)
                self.last = float(json.loads(line)["loss"])
        self._handle = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.ftruncate(self._handle, kept)

    def add(self, iteration: int, loss: float) -> None:
        """Writes a line. If the disk is full, it is written with the next one; training goes on."""
        self._unwritten += b'{"iteration": %d, "loss": %s}\n' % (iteration, repr(loss).encode())
        with contextlib.suppress(OSError):
            self._write()

    def sync(self) -> None:
        """Forces the lines to disk; called before a checkpoint, which must not be ahead of them. Raises OSError."""
        self._write()
        os.fsync(self._handle)

    def _write(self) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[os.write(self._handle, self._unwritten) :]


def losses(job_folder: Path) -> list[float]:
    """The losses of all iterations so far."""
    with contextlib.suppress(FileNotFoundError):
        lines = (job_folder / "losses.jsonl").read_text(encoding="utf-8").split("\n")
        return [float(json.loads(line)["loss"]) for line in lines[:-1]]
    return []
