"""Ranks of gangs on an executor: their processes and ends, and background tasks in the gaps that they announce."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from dovetail.cluster.transport import messages as m
from dovetail.train.burst.gap_board import GapBoard, SharedGap
from tests.cluster.executor import burst_rank
from tests.cluster.executor.fakes import LIMIT, Behaviour
from tests.cluster.executor.harness import Harness, harness, lease_lines, task_lines, wait
from tests.ranks import run_ranks


def start(at: Harness, job: str, code: str, *, attempt: int = 1, **more: Any) -> m.StartRank:
    folder = at.home / "jobs" / job
    folder.mkdir(parents=True, exist_ok=True)
    message = m.StartRank(
        job=job,
        attempt=attempt,
        worker=1,
        argv=(sys.executable, "-c", code),
        environment={"WORLD_SIZE": "2", "PATH": os.environ["PATH"]},
        folder=str(folder),
        priority=(False, 0.0, 0.0, 0),
        **more,
    )
    at.coordinator.say(message)
    return message


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def number(path: Path) -> int:
    wait(lambda: path.exists() and path.read_text().strip(), path.name)
    return int(path.read_text())


FAMILY = """
import os, subprocess, sys, time
hidden = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open("hidden", "w").write(str(hidden.pid))
open("own", "w").write(str(os.getpid()))
time.sleep(600)
"""


def test_a_rank_sees_only_its_environment_and_its_end_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    with harness(tmp_path) as at:
        at.executor()
        code = "import os, sys; print(sorted(os.environ), flush=True); print('last line', file=sys.stderr); sys.exit(3)"
        start(at, "5", code)
        wait(lambda: at.coordinator.all(m.RankEnded), "its end")
        (ended,) = at.coordinator.all(m.RankEnded)
        assert (ended.job, ended.attempt, ended.worker, ended.code) == ("5", 1, 1, 3)
        assert ended.tail.endswith("last line")
        seen = {"DOVETAIL_GAP", "PATH", "RANK", "WORLD_SIZE"}
        allowed = seen | {"LC_CTYPE"}  # Python's own
        names = set(eval(ended.tail.splitlines()[0]))
        assert seen <= names <= allowed
        log = (at.home / "jobs" / "5" / "log.txt").read_text().splitlines()
        assert log[-1] == "rank 1: last line" and log[0].startswith("rank 1: ['DOVETAIL_GAP'")
        wait(lambda: lease_lines(at), "the recorded lease")
        assert not list((at.home / "executors").glob("*.gap"))
        # A coordinator that asks again does not make it run twice.
        start(at, "5", code)
        start(at, "6", "print('next')")
        wait(lambda: len(at.coordinator.all(m.RankEnded)) == 2, "the next rank's end")
        assert [e.job for e in at.coordinator.all(m.RankEnded)] == ["5", "6"]


def test_a_program_that_does_not_exist_is_reported_as_a_rank_that_has_ended(tmp_path: Path) -> None:
    with harness(tmp_path) as at:
        at.executor()
        (at.home / "jobs" / "5").mkdir(parents=True)
        at.coordinator.say(
            m.StartRank(
                job="5", attempt=1, worker=0, argv=("/no/such/program",), environment={},
                folder=str(at.home / "jobs" / "5"), priority=(False, 0.0, 0.0, 0),
            )
        )  # fmt: skip
        wait(lambda: at.coordinator.all(m.RankEnded), "its end")
        assert (
            at.coordinator.all(m.RankEnded)[0].code == 127 and "No such file" in at.coordinator.all(m.RankEnded)[0].tail
        )


@pytest.mark.parametrize("end", ["revoke", "kill the rank", "kill the executor"])
def test_no_process_of_a_rank_is_left(tmp_path: Path, end: str) -> None:
    """Not even one that has left the rank's process group."""
    with harness(tmp_path) as at:
        executor = at.executor()
        start(at, "5", FAMILY)
        own, hidden = (number(at.home / "jobs" / "5" / name) for name in ("own", "hidden"))
        assert alive(own) and alive(hidden)
        if end == "revoke":
            at.coordinator.say(m.RevokeLease(job="5", attempt=1))
            wait(lambda: at.coordinator.all(m.RankEnded), "its end")
        elif end == "kill the rank":
            os.kill(own, 9)
            wait(lambda: at.coordinator.all(m.RankEnded), "its end")
            assert at.coordinator.all(m.RankEnded)[0].code == -9
        else:
            executor.kill()
            wait(lambda: not alive(own), "the rank's end with its executor")
            at.executor()  # the next one kills what is left outside the group
        wait(lambda: not alive(own) and not alive(hidden), "the end of all")


ANNOUNCES = """
import os, sys, time
sys.path[:0] = {path!r}
from dovetail.train.burst.gap_board import announced
gaps = announced()
while not os.path.exists("enough"):
    gaps.begin("a place")
    time.sleep(0.05)
    gaps.end()
    with open("busy", "a") as out:
        begin = time.monotonic()
        time.sleep(0.03)
        out.write(f"{{begin}} {{time.monotonic()}}\\n")
"""


def test_background_tasks_run_in_announced_gaps_and_normal_jobs_wait_for_the_device(tmp_path: Path) -> None:
    with harness(tmp_path) as at:
        at.executor()
        background = at.aggregator("2", Behaviour(iterations=10_000, seconds=(0.01,)))
        normal = at.aggregator("3", Behaviour(iterations=3, seconds=(0.01,)))
        code = ANNOUNCES.format(path=[p for p in sys.path if p])
        start(at, "5", code, foreground=True)
        wait(lambda: (at.home / "jobs" / "5" / "busy").exists(), "the rank's first step")
        at.grant(background, order=1.0, background=True)
        at.grant(normal, order=0.5)
        wait(lambda: len(task_lines(at)) > 5, "tasks in the gaps")
        (at.home / "jobs" / "5" / "enough").touch()
        wait(lambda: at.coordinator.all(m.RankEnded), "the rank's end")
        assert at.coordinator.all(m.RankEnded)[0].code == 0, at.coordinator.all(m.RankEnded)[0].tail
        assert normal.finished.wait(LIMIT), "the device is free again"
        wait(lambda: lease_lines(at), "the recorded lease")
        (lease,) = lease_lines(at)
        inside = [t for t in task_lines(at) if t.start < lease.stop]
        assert {t.job for t in inside} == {"2"}, "a normal job ran beside a rank"
        assert len(inside) > 5, "the gaps stayed empty"
        beats = [b.slowdown["5"] for b in at.coordinator.all(m.Heartbeat) if "5" in b.slowdown]
        assert beats and all(s >= 0 for s in beats)


def test_a_gap_is_announced_once_its_length_is_known(tmp_path: Path) -> None:
    path = tmp_path / "gap"
    path.write_bytes(bytes(SharedGap.BYTES))
    gap, gaps = SharedGap(path), GapBoard(path)
    gaps.begin("a")
    assert gap.until == 0.0, "its length is not known yet"
    gaps.begin("b")  # within the same gap
    gaps.end()
    gaps.end()
    busy = gap.since
    assert gap.until == 0.0 and busy > 0.0
    gaps.begin("a")
    assert gap.until >= gap.since >= busy
    gaps.end()
    assert gap.until == 0.0
    gaps.begin("b")
    assert gap.until == 0.0, "another place in the iteration has another length"


def test_a_burst_rank_announces_the_stages_in_which_it_is_idle() -> None:
    """Layers 1 and 2 of 4 run on rank 0 alone: rank 1 is idle meanwhile, forward and backward, and announces it."""
    whole, part = run_ranks(burst_rank.announces, plan=[2, 1, 1, 2], steps=4)
    assert whole == {"written": [], "places": [], "last": 0.0}, "a rank that is never idle has no gaps"
    # The length is not known in the first iteration; then idle and busy, forward and backward.
    assert part["written"] == ["busy", "busy"] + ["idle", "busy"] * 6
    assert part["places"] == ["('backward', 2)", "('forward', 0)"] and part["last"] == 0.0
