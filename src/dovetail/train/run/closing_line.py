"""The line that `dovetail train` ends with: what was kept, or why nothing was.

Rank 0 keeps the line up to date in a file, because a training can end in ways in which no code of that rank runs any
more. The launcher prints it when everything has ended.
"""

from __future__ import annotations

import functools
import logging
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dovetail.train.data_parallel.tuning.tuning_report import TuningReport

FILE = "DOVETAIL_TRAIN_LINE"
"""Environment variable: the file that has the line."""

NOTHING = "no DistributedDataParallel was constructed: the script ended before that, or trains in another way"

_models: dict[int, weakref.ref[Any]] = {}
_lines: dict[int, str] = {}
"""By the number of the model, in the order of their construction; a model that is gone leaves its last line."""


def begin() -> None:
    """Called before the script runs: where no model is wrapped, this line stays."""
    if os.environ.get("RANK", "0") == "0":
        say(NOTHING)


def say(line: str) -> None:
    """Makes this the line, if a launcher wants to know it."""
    if path := os.environ.get(FILE):
        fresh = Path(f"{path}.{os.getpid()}")
        fresh.write_text(" ".join(line.split()), encoding="utf-8")
        fresh.replace(path)  # never half a line, whenever this process is killed


def left_alone(kind: type[Any]) -> None:
    """A class that is derived from torch's was constructed."""
    if not _lines and _first_rank():
        say(f"torch's own buckets stay: {kind.__qualname__} is derived from DistributedDataParallel and left alone")


def observe(wrapper: type[Any]) -> None:
    """From now on the line follows every object of this class, dovetail's DistributedDataParallel.

    What the tuner decides it logs. Its messages are looked at in a filter and then go where they would have gone.
    """
    original = wrapper.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if _first_rank():
            _models[len(_models)] = weakref.ref(self)
            refresh()

    wrapper.__init__ = init
    log = logging.getLogger("dovetail")
    quiet = log.level == logging.NOTSET
    if quiet:
        log.setLevel(logging.INFO)

    def look(record: logging.LogRecord) -> bool:
        refresh()
        return not quiet or record.levelno >= logging.getLogger().getEffectiveLevel()

    log.addFilter(look)


def refresh() -> None:
    """Writes the line anew, from what the models report now."""
    for number, reference in _models.items():
        model = reference()
        if model is not None:
            _lines[number] = f"{type(model.module).__name__}: {summary(model.report)}"
    if len(_lines) == 1:
        say(_lines[0].partition(": ")[2])
    elif _lines:
        say("; ".join(_lines.values()))


def summary(report: TuningReport) -> str:
    """What was kept of a model's plans, or why none, in one line."""
    if report.state == "off":
        if report.plan is not None:
            return f"followed the given plan {report.plan.policy} ({_buckets(len(report.plan.buckets))})"
        return f"torch's own buckets stay: {report.reason}"
    if report.state != "done" or report.kept is None:
        return "torch's own buckets stay: the training ended before planning was over"
    mark = "  result "
    result = next((line.removeprefix(mark).strip() for line in str(report).splitlines() if line.startswith(mark)), "")
    if report.kept.baseline or report.plan is None:
        return f"{report.trials[0].label} stay: {result}"
    return f"kept plan {report.kept.label} ({_buckets(len(report.kept.plan.buckets))}): {result}"


def _buckets(count: int) -> str:
    return f"{count} bucket{'s' if count > 1 else ''}"


def _first_rank() -> bool:
    import torch.distributed as dist

    return dist.is_initialized() and dist.get_rank() == 0
