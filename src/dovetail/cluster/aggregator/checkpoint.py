"""What a job must not forget: checkpoints and its losses.

A checkpoint is an ordinary `torch.save`, which `torch.load(weights_only=True)` reads. It is written under another name,
forced to disk and renamed, so that whatever has its name is whole; the newest two are kept. Losses are one line per
iteration; when a job goes on from a checkpoint, lines beyond it are cut off and written again, with the same bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path
from typing import Any

import torch

from dovetail.core.errors import Error

KEPT = 2


class Damaged(Error):
    """A checkpoint that cannot be read."""


def folder_of(job_folder: Path) -> Path:
    return job_folder / "checkpoints"


def found(job_folder: Path) -> list[tuple[int, Path]]:
    """(iterations in it, file), the newest first."""
    files = [p for p in folder_of(job_folder).glob("*.pt") if p.stem.isdigit()]
    return sorted(((int(p.stem), p) for p in files), reverse=True)


def read(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
        if not isinstance(state, dict) or not {"iteration", "model", "optimizer"} <= set(state):
            raise ValueError("it lacks a part")
    except Exception as e:  # a torn file fails in many ways
        raise Damaged(
            f"{path}: cannot be read: {str(e).strip().splitlines()[0] if str(e) else type(e).__name__}"
        ) from e
    return state


def write(job_folder: Path, iteration: int, state: dict[str, Any]) -> Path:
    """Returns when it is on disk for good."""
    folder = folder_of(job_folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{iteration:08d}.pt"
    temporary = folder / f".{path.name}.{os.getpid()}"
    try:
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(folder)
    for _, old in found(job_folder)[KEPT:]:
        old.unlink(missing_ok=True)
    return path


def tidy(job_folder: Path) -> None:
    """Removes what killed processes have left half-written."""
    for path in folder_of(job_folder).glob(".*.pt.*"):
        path.unlink(missing_ok=True)


def copied(value: Any) -> Any:
    """A state with tensors of its own: training goes on while it is written."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        made = {key: copied(item) for key, item in value.items()}
        return made if type(value) is dict else type(value)(made)  # a Counter stays one
    if isinstance(value, list | tuple):
        return type(value)(copied(item) for item in value)
    return value


class Writer:
    """Writes checkpoints beside the training, one at a time, on a thread of its own."""

    def __init__(self, job_folder: Path) -> None:
        self._folder = job_folder
        self._thread: threading.Thread | None = None
        self.done = -1
        """Iterations in the newest checkpoint that is on disk; -1 for none."""
        self.error = ""
        """Why the last one could not be written."""

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def begin(self, iteration: int, state: dict[str, Any]) -> None:
        """The state must not change any more: see `copied`."""
        assert not self.busy, "one at a time"
        self._thread = threading.Thread(target=self._write, args=(iteration, state), name="checkpoint", daemon=True)
        self._thread.start()

    def finish(self, *, timeout: float = 120.0) -> None:
        """Waits for the one under way; an Error if it could not be written."""
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
            self.error = str(e).strip().splitlines()[0] if str(e) else type(e).__name__
        else:
            self.done, self.error = iteration, ""


class Losses:
    """`losses.jsonl`: {"iteration": 0, "loss": 2.3}, one line for each iteration from 0 on."""

    def __init__(self, job_folder: Path, iterations: int) -> None:
        """Goes on behind the first so many lines."""
        path = job_folder / "losses.jsonl"
        self.last = 0.0
        """Of the newest line."""
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
        """A disk that is full does not stop training; it is tried again with the next line."""
        self._unwritten += b'{"iteration": %d, "loss": %s}\n' % (iteration, repr(loss).encode())
        with contextlib.suppress(OSError):
            self._write()

    def sync(self) -> None:
        """Before a checkpoint: it must not be ahead of them. An OSError if that cannot be."""
        self._write()
        os.fsync(self._handle)

    def _write(self) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[os.write(self._handle, self._unwritten) :]


def losses(job_folder: Path) -> list[float]:
    """Those of all iterations so far."""
    with contextlib.suppress(FileNotFoundError):
        lines = (job_folder / "losses.jsonl").read_text(encoding="utf-8").split("\n")
        return [float(json.loads(line)["loss"]) for line in lines[:-1]]
    return []


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
