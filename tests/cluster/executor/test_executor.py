"""An executor against acted aggregators and an acted coordinator: real processes, real sockets, real messages."""

from __future__ import annotations

import os
import signal
from itertools import pairwise
from pathlib import Path

import pytest

from dovetail.cluster.executor import recorder
from dovetail.cluster.executor.statistics import blamed
from dovetail.cluster.transport import messages as m
from tests.cluster.executor.acting import Acted, Head, ran, stage, wait

SHORT = Acted(iterations=1, seconds=(0.005,))


def test_one_task_at_a_time_by_rank_and_longest_first(tmp_path: Path) -> None:
    with stage(tmp_path) as at:
        at.executor(answer=5.0)  # patience: an acted aggregator may be slow to answer, and then others have their turn
        code = "import time\nwhile not (player.folder / 'go').exists(): time.sleep(0.01)"
        long = at.aggregator("1", Acted(iterations=1, seconds=(0.01,), hold=True), code=code)
        first = at.aggregator("2", Acted(iterations=1, seconds=(0.005, 0.01, 0.02), hold=True))
        second = at.aggregator("3", Acted(iterations=2, seconds=(0.005, 0.02), hold=True))
        for order, aggregator in ((3.0, long), (1.0, first), (2.0, second)):
            at.grant(aggregator, order=order)
        wait(lambda: long.joined and first.joined and second.joined, "all joined")
        long.hold = False
        wait(lambda: long.out, "the long task's start")
        second.hold = first.hold = False
        wait(lambda: first.releases and second.releases, "both ready while the device is busy")
        (at.home / "jobs" / "1" / "go").touch()
        assert second.finished.wait(20) and first.finished.wait(20)
        found = ran(at, 8)
        assert [(t.job, t.worker) for t in found][:4] == [("1", 0), ("2", 2), ("2", 1), ("2", 0)]
        assert [(t.job, t.iteration, t.worker) for t in found][4:] == [
            ("3", 0, 1), ("3", 0, 0), ("3", 1, 1), ("3", 1, 0),
        ]  # fmt: skip
        assert all(a.stop <= b.start for a, b in pairwise(found)), "two tasks at once"
        recorder.read(at.home).check()
        assert recorder.timeline(at.home).emulated


def test_a_lost_race_costs_a_round_trip_and_the_next_job_has_its_turn(tmp_path: Path) -> None:
    with stage(tmp_path) as at:
        at.executor(answer=5.0)
        code = "import time\nwhile not (player.folder / 'go').exists(): time.sleep(0.01)"
        busy = at.aggregator("1", Acted(iterations=1, seconds=(0.01,), hold=True), code=code)
        stolen = at.aggregator("2", Acted(iterations=1, hold=True))
        other = at.aggregator("3", Acted(iterations=1, hold=True))
        stolen.steal = lambda worker: True
        for order, aggregator in enumerate((busy, stolen, other)):
            at.grant(aggregator, order=order)
        wait(lambda: busy.joined and stolen.joined and other.joined, "all joined")
        busy.hold = False
        wait(lambda: busy.out, "the first task")
        stolen.hold = other.hold = False
        wait(lambda: stolen.releases and other.releases, "both ready while the device is busy")
        (at.home / "jobs" / "1" / "go").touch()
        assert stolen.finished.wait(20) and other.finished.wait(20)
        assert [t.job for t in ran(at, 2)] == ["1", "3"]
        assert len(stolen.all(m.Claim)) == 1, "a claim that was lost is not repeated"


def test_an_executor_that_joins_in_the_middle_takes_what_is_left_and_a_dead_ones_task_is_done_again(
    tmp_path: Path,
) -> None:
    with stage(tmp_path) as at:
        dying = at.executor(0)
        code = "import time\nwhile task.worker == 5 and not (player.folder / 'go').exists(): time.sleep(0.01)"
        job = at.aggregator("1", Acted(iterations=2, seconds=(0.01, 0.01, 0.01, 0.01, 0.01, 0.02)), code=code)
        at.grant(job)
        wait(lambda: job.out, "the first task")
        at.executor(1)
        at.grant(job)
        wait(lambda: sum(map(len, job.done.values())) >= 2, "the second executor's tasks")
        assert 5 in job.out, "the first executor still has the long one"
        dying.kill()
        dying.wait()
        (at.home / "jobs" / "1" / "go").touch()
        assert job.finished.wait(20)  # every task exactly once: see Aggregator._done
        assert {t.device for t in recorder.ran(at.home) if t.iteration == 0} <= {1}


def test_a_job_goes_on_with_the_next_epoch_and_others_do_not_notice(tmp_path: Path) -> None:
    with stage(tmp_path) as at:
        at.executor()
        mortal = at.aggregator("1", Acted(iterations=10_000, seconds=(0.005, 0.005)))
        other = at.aggregator("2", Acted(iterations=10_000, seconds=(0.005,)))
        at.grant(mortal)
        at.grant(other, order=1.0)
        wait(lambda: mortal.iteration > 2 and other.releases, "both at work")
        mortal.end()
        before = other.iteration
        wait(lambda: other.iteration > before + 5, "the other job's progress")
        again = at.aggregator("1", Acted(iterations=5, seconds=(0.005, 0.005)), epoch=2, first=3)
        at.grant(again)
        assert again.finished.wait(20)
        at.grant(mortal)  # of the past: not heard
        assert (at.home / "jobs" / "1" / "closed").exists(), "the first epoch's model was kept"
        assert sorted(again.done) == [3, 4]


def test_without_a_coordinator_it_works_on_and_tells_the_next_one_whom_it_serves(tmp_path: Path) -> None:
    with stage(tmp_path) as at:
        at.executor()
        job = at.aggregator("7", Acted(iterations=10_000, seconds=(0.002,)), epoch=4)
        at.grant(job)
        wait(lambda: job.iteration > 2, "work")
        port = at.head.address[1]
        at.head.end()
        before = job.iteration
        wait(lambda: job.iteration > before + 50, "work without a coordinator")
        at.head = Head(port)
        at.head.start()
        wait(lambda: at.head.all(m.Hello), "Hello")
        (hello,) = at.head.all(m.Hello)
        assert hello.residents == (("7", 4),) and hello.emulated and hello.device == 0
        wait(lambda: at.head.all(m.Beat), "a beat")
        at.head.say(m.Revoke(job="7", epoch=4))
        wait(lambda: not job.joined, "leaving")
        assert job.all(m.Leave)
        wait((at.home / "jobs" / "7" / "closed").exists, "the model's end")


BAD = {
    "exit": "import sys; sys.exit('enough')",
    "keyboard": "raise KeyboardInterrupt",
    "base": "raise BaseException('of its own kind')",
    "error": "1 / 0",
    "memory": "raise MemoryError('no room')",
    "fork": "import os\nif os.fork() == 0: raise SystemExit(0)\nraise ValueError('the parent')",
}


def test_what_a_jobs_code_does_is_the_jobs_affair(tmp_path: Path) -> None:
    """Exits, interrupts, forks and closed streams: a strike for the job; the executor and the others go on."""
    with stage(tmp_path) as at:
        process = at.executor()
        bad = {name: at.aggregator(str(10 + i), SHORT, code=code) for i, (name, code) in enumerate(BAD.items())}
        rudeness = """import sys, os, signal; print('rude words'); sys.stdout.close(); os.close(2); sys.stdout = None
os.chdir("/"); signal.setitimer(signal.ITIMER_REAL, 600)"""
        rude = at.aggregator("20", SHORT, code=rudeness)
        words = """import signal, sys; print('good words', flush=True); print('aside', file=sys.stderr)
assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0), 'an alarm that another job has set'"""
        good = at.aggregator("30", Acted(iterations=3), code=words)
        for i, aggregator in enumerate([*bad.values(), rude, good]):
            at.grant(aggregator, order=float(i))
        assert all(aggregator.finished.wait(60) for aggregator in [good, rude, *bad.values()])
        reasons = {name: [f.reason for f in aggregator.all(m.TaskFailed)][:1] for name, aggregator in bad.items()}
        assert reasons == {
            "exit": ["SystemExit: enough"],
            "keyboard": ["KeyboardInterrupt"],
            "base": ["BaseException: of its own kind"],
            "error": ["ZeroDivisionError: division by zero"],
            "memory": ["MemoryError: no room"],
            "fork": ["ValueError: the parent"],
        }
        assert "ZeroDivisionError" in bad["error"].all(m.TaskFailed)[0].trace
        assert process.poll() is None
        assert (at.home / "jobs" / "30" / "log.txt").read_text().splitlines() == ["good words", "aside"] * 3
        assert (at.home / "jobs" / "20" / "log.txt").read_text() == "rude words\n"


def test_a_slow_answer_holds_nobody_up_and_counts_when_it_comes(tmp_path: Path) -> None:
    with stage(tmp_path) as at:
        at.executor()
        slow = at.aggregator("1", Acted(iterations=1, seconds=(0.001, 0.001), answers_after=1.0))
        quick = at.aggregator("2", Acted(iterations=10_000, seconds=(0.002,)))
        at.grant(slow, order=0.0)
        at.grant(quick, order=1.0)
        assert slow.finished.wait(20)
        claims = [t for t, message in slow.log if isinstance(message, m.Claim)]
        between = [t for t, message in quick.log if isinstance(message, m.Done) and claims[0] < t < claims[1]]
        assert len(between) > 3, "the other job waited for the slow aggregator"
        assert sum(map(len, slow.done.values())) == 2


def test_a_job_that_cannot_be_loaded_is_reported_until_the_coordinator_has_decided(tmp_path: Path) -> None:
    with stage(tmp_path) as at:
        at.executor()
        broken = at.aggregator("1", SHORT, load="raise SystemExit('not today')")
        good = at.aggregator("2", Acted(iterations=3))
        at.grant(broken)
        at.grant(good, order=1.0)
        assert good.finished.wait(20)
        wait(lambda: at.head.all(m.Failed), "the report")
        assert at.head.all(m.Failed) == [m.Failed(job="1", epoch=1, reason="SystemExit: not today")]
        port = at.head.address[1]
        at.head.end()
        at.head = Head(port)
        at.head.start()
        wait(lambda: at.head.all(m.Failed), "the report to the next coordinator")
        again = at.aggregator("1", SHORT, epoch=2)
        at.grant(again)
        assert again.finished.wait(20)


def test_whoever_runs_is_known_after_a_kill_and_a_stuck_task_shows_in_the_beats(tmp_path: Path) -> None:
    with stage(tmp_path) as at:
        process = at.executor(3)
        running = at.home / "executors" / "3.running"
        assert blamed(running) == ""
        idle = at.aggregator("1", SHORT)
        stuck = at.aggregator("2", Acted(iterations=1, seconds=(60.0,)))
        at.grant(idle)
        assert idle.finished.wait(20)
        wait(lambda: blamed(running) == "", "the end of the task")
        at.grant(stuck)
        wait(lambda: [b for b in at.head.all(m.Beat) if b.running == "2" and b.since > 0.4], "a beat from within")
        beat = at.head.all(m.Beat)[-1]
        assert beat.tasks == {"1": 1} and set(beat.busy) == {"1"} and beat.idle > 0
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert blamed(running) == "2"
        at.executor(3)
        assert blamed(running) == ""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores to tell them apart")
def test_a_cpu_device_stays_on_its_core(tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    with stage(tmp_path) as at:
        at.executor(kind="cpu", core=core)
        job = at.aggregator("1", SHORT, code="import os, sys; print(os.sched_getaffinity(0), flush=True)")
        at.grant(job)
        assert job.finished.wait(20)
        assert (at.home / "jobs" / "1" / "log.txt").read_text() == f"{{{core}}}\n"
        assert not at.head.all(m.Hello)[0].emulated
        ran(at, 1)
        assert not recorder.timeline(at.home).emulated


def test_overhead_is_recorded_for_every_task_and_its_median_is_in_the_beats(tmp_path: Path) -> None:
    with stage(tmp_path) as at:
        at.executor()
        job = at.aggregator("1", Acted(iterations=40, seconds=(0.002, 0.002), off_device=0.005))
        at.grant(job)
        assert job.finished.wait(20)
        ran(at, 80)
        found = [line for line in recorder.lines(at.home) if isinstance(line, recorder.Ran)]  # on the machine's clock
        for before, task in pairwise(found):
            could = max(before.stop, job.released_at[task.iteration])
            assert 0 <= task.overhead <= task.start - could + 1e-6
            assert task.waited == pytest.approx(task.start - job.released_at[task.iteration], abs=1e-6)
        wait(lambda: at.head.all(m.Beat)[-1].tasks == {"1": 80}, "a beat after the last task")
        kept = sorted(t.overhead for t in found)
        assert at.head.all(m.Beat)[-1].overhead == pytest.approx((kept[39] + kept[40]) / 2, abs=1e-6)


def test_the_wrong_secret_ends_it_with_a_line(tmp_path: Path) -> None:
    with stage(tmp_path) as at:
        process = at.executor()
        at.head.say(m.Refused(reason="wrong key"))
        assert process.wait(10) == 1


def test_it_ends_in_order_when_asked_to(tmp_path: Path) -> None:
    with stage(tmp_path) as at:
        process = at.executor()
        job = at.aggregator("1", Acted(iterations=10_000, seconds=(0.002,)))
        at.grant(job)
        wait(lambda: job.iteration > 5, "work")
        process.terminate()
        assert process.wait(10) == 0
        wait(lambda: job.all(m.Leave), "Leave")
        done = sum(map(len, job.done.values()))
        assert len(recorder.ran(at.home)) == done, "tasks were not recorded at the end"
