"""Ranks of gangs on an executor: their processes, words and ends, and fillers in the gaps that they announce."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from dovetail.cluster.executor import recorder
from dovetail.cluster.transport import messages as m
from dovetail.train.burst.gap_board import Gaps, Word
from tests.cluster.executor import burst_rank
from tests.cluster.executor.acting import Acted, Stage, stage, wait
from tests.ranks import run_ranks


def start(at: Stage, job: str, code: str, *, epoch: int = 1, **more: Any) -> m.StartRank:
    folder = at.home / "jobs" / job
    folder.mkdir(parents=True, exist_ok=True)
    message = m.StartRank(
        job=job,
        epoch=epoch,
        worker=1,
        argv=(sys.executable, "-c", code),
        environment={"WORLD_SIZE": "2", "PATH": os.environ["PATH"]},
        folder=str(folder),
        rank=(False, 0.0, 0.0, 0),
        **more,
    )
    at.head.say(message)
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


def test_a_rank_sees_what_it_was_given_and_its_end_is_told_with_its_last_lines(tmp_path: Path) -> None:
    with stage(tmp_path) as at:
        at.executor()
        code = (
            "import os, sys; print(sorted(os.environ), flush=True); print('last words', file=sys.stderr); sys.exit(3)"
        )
        start(at, "5", code)
        wait(lambda: at.head.all(m.RankEnded), "its end")
        (ended,) = at.head.all(m.RankEnded)
        assert (ended.job, ended.epoch, ended.worker, ended.code) == ("5", 1, 1, 3)
        assert ended.tail.endswith("last words")
        seen = {"DOVETAIL_GAP", "PATH", "RANK", "WORLD_SIZE"}
        allowed = seen | {"LC_CTYPE"}  # Python's own
        names = set(eval(ended.tail.splitlines()[0]))
        assert seen <= names <= allowed
        log = (at.home / "jobs" / "5" / "log.txt").read_text().splitlines()
        assert log[-1] == "rank 1: last words" and log[0].startswith("rank 1: ['DOVETAIL_GAP'")
        wait(lambda: [h for h in recorder.lines(at.home) if isinstance(h, recorder.Held)], "the lease")
        assert not list((at.home / "executors").glob("*.gap"))
        # A coordinator that has forgotten asks again: it hears the same, and nothing runs twice.
        start(at, "5", code)
        start(at, "6", "print('next')")
        wait(lambda: len(at.head.all(m.RankEnded)) == 2, "the next rank's end")
        assert [e.job for e in at.head.all(m.RankEnded)] == ["5", "6"]


def test_a_program_that_is_not_there_is_a_rank_that_has_ended(tmp_path: Path) -> None:
    with stage(tmp_path) as at:
        at.executor()
        (at.home / "jobs" / "5").mkdir(parents=True)
        at.head.say(
            m.StartRank(
                job="5", epoch=1, worker=0, argv=("/no/such/program",), environment={},
                folder=str(at.home / "jobs" / "5"), rank=(False, 0.0, 0.0, 0),
            )
        )  # fmt: skip
        wait(lambda: at.head.all(m.RankEnded), "its end")
        assert at.head.all(m.RankEnded)[0].code == 127 and "No such file" in at.head.all(m.RankEnded)[0].tail


@pytest.mark.parametrize("end", ["revoke", "kill the rank", "kill the executor"])
def test_nothing_of_a_rank_is_left(tmp_path: Path, end: str) -> None:
    """Not even a process that has taken itself out of the rank's group."""
    with stage(tmp_path) as at:
        executor = at.executor()
        start(at, "5", FAMILY)
        own, hidden = (number(at.home / "jobs" / "5" / name) for name in ("own", "hidden"))
        assert alive(own) and alive(hidden)
        if end == "revoke":
            at.head.say(m.Revoke(job="5", epoch=1))
            wait(lambda: at.head.all(m.RankEnded), "its end")
        elif end == "kill the rank":
            os.kill(own, 9)
            wait(lambda: at.head.all(m.RankEnded), "its end")
            assert at.head.all(m.RankEnded)[0].code == -9
        else:
            executor.kill()
            wait(lambda: not alive(own), "the rank's end with its executor")
            at.executor()  # the next one sweeps what has hidden
        wait(lambda: not alive(own) and not alive(hidden), "the end of all")


ANNOUNCES = """
import os, sys, time
sys.path[:0] = {path!r}
from dovetail.train.burst.gap_board import announced
gaps = announced()
for step in range(40):
    gaps.begin("a place")
    time.sleep(0.05)
    gaps.end()
    with open("busy", "a") as out:
        begin = time.monotonic()
        time.sleep(0.03)
        out.write(f"{{begin}} {{time.monotonic()}}\\n")
time.sleep({rest})
"""


def test_fillers_run_in_announced_gaps_and_normal_jobs_wait_for_the_device(tmp_path: Path) -> None:
    with stage(tmp_path) as at:
        at.executor()
        filler = at.aggregator("2", Acted(iterations=10_000, seconds=(0.01,)))
        normal = at.aggregator("3", Acted(iterations=3, seconds=(0.01,)))
        code = ANNOUNCES.format(path=[p for p in sys.path if p], rest=1.0)
        start(at, "5", code, foreground=True)
        wait(lambda: (at.home / "jobs" / "5" / "busy").exists(), "the rank's first step")
        at.grant(filler, order=1.0, background=True)
        at.grant(normal, order=0.5)
        wait(lambda: at.head.all(m.RankEnded), "the rank's end")
        assert at.head.all(m.RankEnded)[0].code == 0, at.head.all(m.RankEnded)[0].tail
        assert normal.finished.wait(20), "the device is free again"
        wait(lambda: [x for x in recorder.lines(at.home) if isinstance(x, recorder.Held)], "the lease")
        lines = [line for line in recorder.lines(at.home) if isinstance(line, recorder.Ran)]
        (held,) = [line for line in recorder.lines(at.home) if isinstance(line, recorder.Held)]
        inside = [t for t in lines if t.start < held.stop]
        assert {t.job for t in inside} == {"2"}, "a job that is no filler ran beside a rank"
        assert len(inside) > 5, "the gaps stayed empty"
        beats = [b.slowdown["5"] for b in at.head.all(m.Beat) if "5" in b.slowdown]
        assert beats and all(s >= 0 for s in beats)


def test_a_gap_is_announced_once_its_length_is_known(tmp_path: Path) -> None:
    path = tmp_path / "gap"
    path.write_bytes(bytes(Word.BYTES))
    word, gaps = Word(path), Gaps(path)
    gaps.begin("a")
    assert word.until == 0.0, "nobody knows yet how long it will be"
    gaps.begin("b")  # within the same gap
    gaps.end()
    gaps.end()
    busy = word.since
    assert word.until == 0.0 and busy > 0.0
    gaps.begin("a")
    assert word.until >= word.since >= busy
    gaps.end()
    assert word.until == 0.0
    gaps.begin("b")
    assert word.until == 0.0, "another place in the step, another length"


def test_a_burst_rank_announces_the_stages_that_leave_it_out() -> None:
    """Layers 1 and 2 of 4 run on rank 0 alone: forward and backward, rank 1 is idle meanwhile, and says so."""
    whole, part = run_ranks(burst_rank.announces, plan=[2, 1, 1, 2], steps=4)
    assert whole == {"written": [], "places": [], "last": 0.0}, "a rank that is never left out has no gaps"
    # The first time nobody knows how long it takes; then idle, busy, for the way forth and the way back.
    assert part["written"] == ["busy", "busy"] + ["idle", "busy"] * 6
    assert part["places"] == ["('backward', 2)", "('forward', 0)"] and part["last"] == 0.0
