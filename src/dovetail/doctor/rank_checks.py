"""One rank of the doctor: `python -m dovetail.doctor.rank_checks DEVICE SECONDS CHECKLIST`.

CHECKLIST is a JSON object, name → "module:function", of the checks to run, in this order. Before and after each one
the rank hands its launcher what it has (`launch.report`), so that a rank that dies or hangs leaves behind what was done
and what was going on. A check that takes longer than SECONDS ends the rank, with a traceback of all its threads.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import time
import warnings
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist

from dovetail.core.errors import Error, typed_line
from dovetail.emulate.channel import leave
from dovetail.emulate.launch import report

from .checklist import START, RankProgress
from .checks import COUNTED, TOLERANCE, Check, Finding
from .diagnosis import CheckResult
from .instruments import HostSyncs, prepare, races
from .trainings import Place

START_SECONDS = 60.0
"""What a rank may take to import torch, load its device and meet the others, on a busy machine."""


def main(device: str, seconds: float, checklist: dict[str, str]) -> None:
    progress = RankProgress(now=START)
    try:
        _tell(progress)
        faulthandler.dump_traceback_later(START_SECONDS, exit=True)
        checks = {name: _found(where) for name, where in checklist.items()}
        place = _join(device, seconds)
        for name, check in checks.items():
            progress = msgspec.structs.replace(progress, now=name)
            _tell(progress)
            faulthandler.dump_traceback_later(seconds, exit=True)
            progress = _checked(check, name, place, progress)
        progress = msgspec.structs.replace(progress, now="")
        _tell(progress)
        leave()
    except Exception as e:
        line = str(e) if isinstance(e, Error) else typed_line(e)
        _tell(msgspec.structs.replace(progress, error=line, ended=time.monotonic()))
        print(line, file=sys.stderr, flush=True)
        os._exit(1)  # destructors of a broken group would wait for the other ranks
    finally:
        faulthandler.cancel_dump_traceback_later()


def _found(where: str) -> Check:
    module, _, name = where.partition(":")
    check: Check = getattr(importlib.import_module(module), name)
    return check


def _join(device: str, seconds: float) -> Place:
    """Takes this rank's device and meets the others."""
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # products of ten bits differ from the CPU's by far more than rounding
    torch.backends.cudnn.deterministic = True  # two trainings side by side must not differ by themselves
    prepare(device)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = Place(torch.device("cpu") if device == "cpu" else torch.device(device, rank), rank, ranks)
    if device != "cpu":
        torch.accelerator.set_device_index(rank)
    backend = dist.get_default_backend_for_device(device)
    # Longer than a check may take: a group that gives up first would tell less, and NCCL's would abort the process.
    dist.init_process_group(backend, timeout=timedelta(seconds=2 * seconds))
    dist.barrier()
    return place


def _checked(check: Check, name: str, place: Place, progress: RankProgress) -> RankProgress:
    """Runs a check and adds its result."""
    begin = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report has what matters
        found = check(place)
    if place.device.type != "cpu":
        torch.accelerator.synchronize(place.device)
    result = _result(name, found, races(place.device), time.monotonic() - begin)
    network = found.network or progress.network
    return msgspec.structs.replace(progress, done=(*progress.done, result), network=network)


def _result(name: str, found: Finding, raced: list[str], seconds: float) -> CheckResult:
    wrong = f"{len(raced)} races between streams, the first: {raced[0]}" if raced else ""
    if not found.passed and not wrong:
        wrong = f"parameters differ by {found.difference:.1e}, expected at most {TOLERANCE:.0e}: {found.line}"
    syncs = found.syncs or HostSyncs()
    return CheckResult(
        name=name,
        outcome="failed" if wrong else "passed",
        line=wrong or found.line,
        seconds=seconds,
        difference=None if found.difference is None else min(found.difference, sys.float_info.max),
        tolerance=None if found.difference is None else TOLERANCE,
        host_syncs=None if syncs.total is None else syncs.total / COUNTED,
        sync_places=syncs.places,
    )


def _tell(progress: RankProgress) -> None:
    report(msgspec.to_builtins(progress))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), json.loads(sys.argv[3]))
