"""The doctor's own side: starts ranks, lets them run the checks, and starts others where some died or hung.

One launch runs all checks as long as nothing breaks. A check that raises, hangs or kills its rank ends that launch: it
has failed, with one line, and the checks behind it run in a launch of their own. So one broken mode hides no other.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from dovetail.core.errors import Error
from dovetail.emulate.launch import LaunchError, RankResult, launch

from .checklist import CHECKLIST, START, RankProgress
from .diagnosis import EMULATED, AllReduceFit, CheckResult, Diagnosis, Machine

LIMIT = 300.0
"""Seconds for everything, but for building the emulated accelerator where that is not built yet."""
CHECK_LIMIT = 60.0
"""Seconds for one check; a rank that takes longer counts as hung."""
LOOK_LIMIT = 600.0
"""Seconds for looking at the machine, in which the emulated accelerator may be built."""
LEAST_LEFT = 15.0
"""Seconds that must be left for a launch to make sense: starting torch takes some of them."""
MOST_RANKS = 64

_FRAME = re.compile(r'^  File "([^"]+)", line (\d+) in (\S+)')

Tell = Callable[[str], None]


def examine(
    *,
    device: str | None = None,
    ranks: int = 2,
    checklist: Mapping[str, str] = CHECKLIST,
    limit: float = LIMIT,
    check_limit: float = CHECK_LIMIT,
    tell: Tell = lambda _: None,
) -> Diagnosis:
    """Runs the checks with `ranks` ranks on devices of a type, and returns the report whatever they find.

    Without `device` it takes torch's accelerator, or else the CPU. `tell` is given a line whenever something begins.
    Raises an Error where no check can run at all: a device that is not there, or fewer devices than ranks.
    """
    if not 2 <= ranks <= MOST_RANKS:
        raise Error(f"ranks: expected 2 to {MOST_RANKS}, got {ranks}")
    tell(
        "looking at the machine" + (", building the accelerator if this is its first use" if device == EMULATED else "")
    )
    machine = look(device, ranks)
    begin = time.monotonic()
    if machine.device != "cpu" and len(machine.devices) < ranks:
        raise Error(
            f"{ranks} ranks need {ranks} devices, found {len(machine.devices)} of type {machine.device!r}: "
            "`--device cpu` and `--device emu` run on any machine"
        )
    left, done, network = dict(checklist), list[CheckResult](), None
    while left:
        seconds = limit - (time.monotonic() - begin)
        if seconds < LEAST_LEFT:
            done += _not_run(left, f"the {limit:.0f} s for all checks were over")
            break
        tell(f"{ranks} ranks on {machine.device}: {', '.join(left)}")
        ended, fit = _launched(machine.device, ranks, left, seconds, check_limit)
        network = fit or network
        done += ended
        left = {name: where for name, where in left.items() if name not in {check.name for check in ended}}
    return Diagnosis(
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        machine=machine,
        ranks=ranks,
        network=network,
        checks=tuple(done),
        seconds=time.monotonic() - begin,
    )


def look(device: str | None, ranks: int) -> Machine:
    """What is here, from a process of its own. An Error in one line where torch or the device cannot be used."""
    argv = ["-m", "dovetail.doctor.machine", *([device] if device is not None else [])]
    try:
        found = launch(argv, ranks=1, timeout=LOOK_LIMIT, env=_environment(ranks))
    except LaunchError as e:
        said = [line.strip() for line in e.results[0].stderr if line.strip()]
        raise Error(said[-1] if said and e.results[0].code == 1 else f"looking at the machine failed: {e}") from None
    return msgspec.convert(found[0].report, Machine)


def _launched(
    device: str, ranks: int, checks: Mapping[str, str], seconds: float, check_limit: float
) -> tuple[list[CheckResult], AllReduceFit | None]:
    """Runs checks in one launch: the results of those that ended, at least one of them, and of the network."""
    argv = ["-m", "dovetail.doctor.rank_checks", device, str(min(check_limit, seconds)), json.dumps(dict(checks))]
    try:
        results = launch(argv, ranks=ranks, timeout=seconds, env=_environment(ranks))
        failure = None
    except LaunchError as e:
        results, failure = e.results, e
    come = [_progress(result) for result in results]
    network = next((rank.network for rank in come if rank.network is not None), None)
    ended = [_worst(alike) for alike in zip(*(rank.done for rank in come), strict=False)]
    if failure is None:
        return ended, network
    now = next((name for name in checks if name not in {check.name for check in ended}), None)
    if now is None:
        # All have passed, and the ranks failed at leaving.
        last = msgspec.structs.replace(ended[-1], outcome="failed", line=f"at the end {_reason(failure, come)}")
        return [*ended[:-1], last], network
    reason = _reason(failure, come)
    if all(rank.now == START for rank in come):
        return [*ended, *_not_run(checks, f"the ranks could not start: {reason}")], network
    return [*ended, CheckResult(name=now, outcome="failed", line=reason)], network


def _environment(ranks: int) -> dict[str, str]:
    """Variables that the caller's environment may set otherwise: NCCL on loopback, an emulated device for each rank."""
    ours = {"NCCL_SOCKET_IFNAME": "lo", "DOVETAIL_EMULATED_DEVICES": str(ranks)}
    return {name: value for name, value in ours.items() if name not in os.environ}


def _progress(result: RankResult) -> RankProgress:
    """A rank's report; one that has not come to its first line has none."""
    return msgspec.convert(result.report, RankProgress) if result.report is not None else RankProgress(now=START)


def _worst(ranks: Sequence[CheckResult]) -> CheckResult:
    """One check's result over all ranks: the first that failed, with the largest figures of all."""
    first = next((rank for rank in ranks if rank.outcome == "failed"), ranks[0])

    def largest(values: Sequence[float | None]) -> float | None:
        return max((value for value in values if value is not None), default=None)

    return msgspec.structs.replace(
        first,
        seconds=max(rank.seconds for rank in ranks),
        difference=largest([rank.difference for rank in ranks]),
        host_syncs=largest([rank.host_syncs for rank in ranks]),
        sync_places=tuple({place: None for rank in ranks for place in rank.sync_places}),
    )


def _not_run(checks: Mapping[str, str], why: str) -> list[CheckResult]:
    return [CheckResult(name=name, outcome="not run", line=why) for name in checks]


def _reason(failure: LaunchError, come: Sequence[RankProgress]) -> str:
    """Why a launch failed, in one line: how a rank died, where ranks hung, or what the first one raised.

    In this order, since a rank that dies or hangs makes others raise. The launcher itself ends ranks with SIGTERM.
    """
    died = next((r for r in failure.results if r.code < 0 and r.code != -signal.SIGTERM), None)
    if died is not None:
        return f"rank {died.rank} was killed by {signal.Signals(-died.code).name}"
    if hung := [f"rank {r.rank} {place}" for r in failure.results if (place := _hung(r.stderr))]:
        return "; ".join(hung)
    raised = [(rank.ended, number) for number, rank in enumerate(come) if rank.error]
    if raised:
        _, first = min(raised)
        return _without_folders(f"rank {first}: {come[first].error}")
    return _without_folders(str(failure))


def _hung(stderr: Sequence[str]) -> str:
    """What a rank that took too long was doing: the innermost frame of its main thread; empty where it did not hang."""
    start = next((i for i, line in enumerate(stderr) if line.startswith("Timeout (")), None)
    if start is None:
        return ""
    frames: list[str] = []
    for line in stderr[start:]:
        if line.startswith(("Thread ", "Current thread ")):
            frames = []  # the main thread comes last
        elif match := _FRAME.match(line):
            frames.append(f"{'/'.join(match[1].split('/')[-2:])}:{match[2]} in {match[3]}")
    waited = stderr[start].partition("(")[2].partition(")")[0]
    return f"hung for {waited}, at {frames[0]}" if frames else f"hung for {waited}"


def _without_folders(line: str) -> str:
    """Paths in a line that will be sent to others, less the folders of this machine."""
    return re.sub(r"(?<![\w.])/(?:[^\s/'\":]+/)+(?=[^\s/'\":]+)", "", line)
