"""Job files: a Python file that defines `job = TrainingJob(...)`. Loading one works or fails with a one-line reason.

    from dovetail import TrainingJob

    job = TrainingJob(model=..., data=..., loss=..., optimizer=..., steps=1000, batch=64, workers=4)

Nothing here imports torch: `objects` checks what a file's functions return, in the processes that run them.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dovetail.core.errors import Error, InputError, typed_line
from dovetail.core.profile import Profile
from dovetail.planning.depth.guard import Guard

from .submission import Options

__all__ = ["Options", "TrainingJob", "load"]

if TYPE_CHECKING:
    import torch
    from torch import nn

Spb = Literal["off", "ladder", "balanced", "guard"]
SPB = ("off", "ladder", "balanced", "guard")
_REQUIRED = ("model", "data", "loss", "optimizer", "steps", "batch")
_OVERRIDDEN = ("workers", "steps", "spb", "seed", "batch")
_MISSING: Any = object()


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """A training that devices share task by task.

    In every iteration the global batch is cut into one part per worker. A task is one worker's part: it takes the
    weights, runs forward and as much of backward as its depth says, and hands over its gradients; any device may run
    it. When all have ended, gradients are averaged over the workers that computed them, weighted by samples, and the
    optimiser steps, off the devices.

    Tasks are seeded from (seed, iteration, worker) and samples are shuffled from (seed, epoch), so the losses do not
    depend on which device ran which task, and a training that resumes from a checkpoint gives the same bits as one that
    never stopped.
    """

    model: Callable[[], nn.Module] = _MISSING
    data: Callable[[], Any] = _MISSING
    """Makes a map-style dataset: `len(data)` and `data[i]`."""
    loss: Callable[[nn.Module, Any], torch.Tensor] = _MISSING
    """From the model and a collated batch to a scalar: the mean over the batch's samples."""
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = _MISSING
    steps: int = _MISSING
    """Number of iterations."""
    batch: int = _MISSING
    """Samples per iteration, of all workers together."""
    workers: int = 1
    seed: int = 0
    spb: Spb = "off"
    """How deep workers backpropagate: "off" all the way, "ladder" by the ladder, "balanced" by the ladder with batches
    such that all tasks take equally long, "guard" as deep as the gradients' noise requires."""
    guard: Guard = dataclasses.field(default_factory=Guard)
    """For `spb="guard"`: how much progress partial depth may cost."""
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    """Makes a learning-rate scheduler, which steps after every iteration."""
    collate: Callable[[list[Any]], Any] | None = None
    checkpoint_every: int = 50
    """Iterations from one checkpoint to the next; there is one at least every 30 seconds."""
    name: str = ""
    """The job's name in its own log; elsewhere it has its file's name, or that of `submit --name`."""
    profile: Profile | None = None
    """Layer times: they decide where segments are cut and, on emulated devices, how long tasks last. An even share of
    the batch takes as long as the profile's own batch."""
    task_seconds: tuple[float, float] | None = None
    """In place of a profile: seconds of a worker's forward and whole backward pass on an even share of the batch."""
    off_device: float = 0.0
    """Emulated seconds between the last task of an iteration and the next iteration, for work off the devices."""
    default_dtype: str = dataclasses.field(default="", init=False, repr=False)
    """torch's default dtype as the job file set it; kept here, since jobs share processes."""

    def __post_init__(self) -> None:
        for field in _REQUIRED:
            if getattr(self, field) is _MISSING:
                raise Error(f"{field}: missing")
        for field in ("model", "data", "loss", "optimizer"):
            if not callable(getattr(self, field)):
                raise Error(f"{field}: expected a function, got {_of(getattr(self, field))}")
        for field in ("scheduler", "collate"):
            if getattr(self, field) is not None and not callable(getattr(self, field)):
                raise Error(f"{field}: expected a function or None, got {_of(getattr(self, field))}")
        for field in ("steps", "batch", "workers", "checkpoint_every"):
            _whole(field, getattr(self, field), least=1)
        _whole("seed", self.seed, least=0)
        if self.workers > 4096:
            raise Error(f"workers: expected at most 4096, got {self.workers}")
        if self.batch < self.workers:
            raise Error(f"batch: expected at least one sample for each of {self.workers} workers, got {self.batch}")
        if self.spb not in SPB:
            raise Error(f"spb: expected one of {', '.join(SPB)}, got {self.spb!r}")
        if not isinstance(self.guard, Guard):
            raise Error(f"guard: expected a dovetail.Guard, got {_of(self.guard)}")
        if not isinstance(self.name, str) or len(self.name) > 200 or not self.name.isprintable():
            raise Error(f"name: expected a line of at most 200 letters, got {_of(self.name)}")
        if self.profile is not None and not isinstance(self.profile, Profile):
            raise Error(f"profile: expected a dovetail.Profile (dovetail.read reads one), got {_of(self.profile)}")
        self._check_seconds()

    def _check_seconds(self) -> None:
        if self.task_seconds is not None:
            given = self.task_seconds
            if not isinstance(given, tuple | list) or len(given) != 2 or not all(_is_seconds(s) for s in given):
                raise Error(f"task_seconds: expected (forward, backward) in seconds, got {given!r}")
            if sum(given) <= 0:
                raise Error("task_seconds: expected forward and backward above 0 together, got 0")
            object.__setattr__(self, "task_seconds", (float(given[0]), float(given[1])))
        if not _is_seconds(self.off_device):
            raise Error(f"off_device: expected seconds, at least 0, got {self.off_device!r}")


def load(path: str | Path, options: Options = Options()) -> TrainingJob:
    """The job that a file defines, with the options of its submission. Runs the file, which is the user's code.

    Whatever is wrong, the file's own exceptions included, becomes one InputError that names the file and the field.
    """
    path = Path(path)
    try:
        text = path.read_bytes()
    except OSError as e:
        raise InputError(path, "", f"cannot be read: {(e.strerror or str(e)).lower()}") from None
    # A module of its own name, findable: dataclasses and pickles of the file look it up.
    module = types.ModuleType(f"dovetail_job_{path.parent.name}".replace("-", "_").replace(".", "_"))
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    default = _default_dtype()
    try:
        exec(compile(text, str(path), "exec"), module.__dict__)
    except Error as e:
        raise InputError(path, "job", str(e)) from None
    except SyntaxError as e:
        raise InputError(path, f"line {e.lineno}", f"expected valid Python: {e.msg}") from None
    except (Exception, SystemExit) as e:
        raise InputError(path, _line_of(e, path), typed_line(e)) from e
    finally:
        chosen = _default_dtype(default)
    if "job" not in module.__dict__:
        raise InputError(path, "job", "missing: expected `job = TrainingJob(...)`")
    job = module.__dict__["job"]
    if not isinstance(job, TrainingJob):
        raise InputError(path, "job", f"expected a dovetail.TrainingJob, got {_of(job)}")
    given = {field: value for field in _OVERRIDDEN if (value := getattr(options, field)) is not None}
    try:
        job = dataclasses.replace(job, name=job.name or path.stem, **given)
    except Error as e:
        raise InputError(path, "job with the submission's options" if given else "job", str(e)) from None
    object.__setattr__(job, "default_dtype", chosen)
    return job


def _default_dtype(new: str = "") -> str:
    """torch's default dtype, empty while torch is not imported. `new` replaces it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return ""
    before = str(torch.get_default_dtype()).removeprefix("torch.")
    if new and new != before:
        torch.set_default_dtype(getattr(torch, new))
    return before


def _line_of(error: BaseException, path: Path) -> str:
    """The last line of the file itself in the exception's stack trace."""
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return f"line {line}" if line else ""


def _whole(field: str, value: Any, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        raise Error(f"{field}: expected a whole number of at least {least}, got {value!r}")


def _is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _of(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"[:80]
