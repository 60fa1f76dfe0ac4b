"""An executor against fake aggregators and a fake coordinator: real processes, real sockets, real messages."""

from __future__ import annotations

import os
import signal
from itertools import pairwise
from pathlib import Path

import pytest

from dovetail.cluster.coordinator.executor_state import running_job
from dovetail.cluster.executor import recorder
from dovetail.cluster.home import Home
from dovetail.cluster.transport import messages as m
from tests.cluster.executor.fakes import LIMIT, Behaviour
from tests.cluster.executor.harness import harness, task_lines, wait, wait_for_tasks

SHORT = Behaviour(iterations=1, seconds=(0.005,))


def test_one_task_at_a_time_by_rank_and_longest_first(tmp_path: Path) -> None:
    with harness(tmp_path) as at:
        at.executor(answer=LIMIT)  # if an answer took longer, the next job would have its turn
        code = "import time\nwhile not (folder / 'go').exists(): time.sleep(0.01)"
        long = at.aggregator("1", Behaviour(iterations=1, seconds=(0.01,), hold=True), code=code)
        first = at.aggregator("2", Behaviour(iterations=1, seconds=(0.005, 0.01, 0.02), hold=True))
        second = at.aggregator("3", Behaviour(iterations=2, seconds=(0.005, 0.02), hold=True))
        for order, aggregator in ((3.0, long), (1.0, first), (2.0, second)):
            at.grant(aggregator, order=order)
        wait(lambda: long.joined and first.joined and second.joined, "all joined")
        long.hold = False
        wait(lambda: long.out, "the long task's start")
        second.hold = first.hold = False
        wait(lambda: first.releases and second.releases, "both ready while the device is busy")
        (at.home / "jobs" / "1" / "go").touch()
        assert second.finished.wait(LIMIT) and first.finished.wait(LIMIT)
        found = wait_for_tasks(at, 8)
        assert [(t.job, t.worker) for t in found][:4] == [("1", 0), ("2", 2), ("2", 1), ("2", 0)]
        assert [(t.job, t.iteration, t.worker) for t in found][4:] == [
            ("3", 0, 1), ("3", 0, 0), ("3", 1, 1), ("3", 1, 0),
        ]  # fmt: skip
        assert all(a.stop <= b.start for a, b in pairwise(found)), "two tasks at once"
        recorder.read(at.home).check()
        assert recorder.timeline(at.home).emulated


def test_after_a_task_was_lost_to_another_executor_the_next_job_has_its_turn(tmp_path: Path) -> None:
    with harness(tmp_path) as at:
        at.executor(answer=LIMIT)
        code = "import time\nwhile not (folder / 'go').exists(): time.sleep(0.01)"
        busy = at.aggregator("1", Behaviour(iterations=1, seconds=(0.01,), hold=True), code=code)
        stolen = at.aggregator("2", Behaviour(iterations=1, hold=True))
        other = at.aggregator("3", Behaviour(iterations=1, hold=True))
        stolen.steal = lambda worker: True
        for order, aggregator in enumerate((busy, stolen, other)):
            at.grant(aggregator, order=order)
        wait(lambda: busy.joined and stolen.joined and other.joined, "all joined")
        busy.hold = False
        wait(lambda: busy.out, "the first task")
        stolen.hold = other.hold = False
        wait(lambda: stolen.releases and other.releases, "both ready while the device is busy")
        (at.home / "jobs" / "1" / "go").touch()
        assert stolen.finished.wait(LIMIT) and other.finished.wait(LIMIT)
        assert [t.job for t in wait_for_tasks(at, 2)] == ["1", "3"]
        assert len(stolen.all(m.Claim)) == 1, "a claim that was lost is not repeated"


def test_an_executor_that_joins_late_takes_what_is_left_and_the_task_of_a_dead_one_is_done_again(
    tmp_path: Path,
) -> None:
    with harness(tmp_path) as at:
        dying = at.executor(0)
        code = "import time\nwhile task.worker == 5 and not (folder / 'go').exists(): time.sleep(0.01)"
        job = at.aggregator("1", Behaviour(iterations=2, seconds=(0.01, 0.01, 0.01, 0.01, 0.01, 0.02)), code=code)
        at.grant(job)
        wait(lambda: job.out, "the first task")
        at.executor(1)
        at.grant(job)
        wait(lambda: sum(map(len, job.done.values())) >= 2, "the second executor's tasks")
        assert 5 in job.out, "the first executor still has the long one"
        dying.kill()
        dying.wait()
        (at.home / "jobs" / "1" / "go").touch()
        assert job.finished.wait(LIMIT)  # every task exactly once: see Aggregator._done
        assert {t.device for t in recorder.recorded_tasks(at.home) if t.iteration == 0} <= {1}


def test_a_job_continues_with_its_next_attempt_and_others_are_not_disturbed(tmp_path: Path) -> None:
    with harness(tmp_path) as at:
        at.executor()
        mortal = at.aggregator("1", Behaviour(iterations=10_000, seconds=(0.005, 0.005)))
        other = at.aggregator("2", Behaviour(iterations=10_000, seconds=(0.005,)))
        at.grant(mortal)
        at.grant(other, order=1.0)
        wait(lambda: mortal.iteration > 2 and other.releases, "both at work")
        mortal.end()
        before = other.iteration
        wait(lambda: other.iteration > before + 5, "the other job's progress")
        again = at.aggregator("1", Behaviour(iterations=5, seconds=(0.005, 0.005)), attempt=2, first=3)
        at.grant(again)
        assert again.finished.wait(LIMIT)
        at.grant(mortal)  # an old attempt: ignored
        assert (at.home / "jobs" / "1" / "closed").exists(), "the first attempt's model was kept"
        assert sorted(again.done) == [3, 4]


def test_it_works_without_a_coordinator_and_tells_the_next_one_which_leases_it_holds(tmp_path: Path) -> None:
    with harness(tmp_path) as at:
        at.executor()
        job = at.aggregator("7", Behaviour(iterations=10_000, seconds=(0.002,)), attempt=4)
        at.grant(job)
        wait(lambda: job.iteration > 2, "work")
        at.coordinator.end()
        before = job.iteration
        wait(lambda: job.iteration > before + 50, "work without a coordinator")
        at.restart_coordinator()
        wait(lambda: at.coordinator.all(m.Hello), "Hello")
        (hello,) = at.coordinator.all(m.Hello)
        assert hello.leases == (("7", 4),) and hello.emulated and hello.device == 0
        wait(lambda: at.coordinator.all(m.Heartbeat), "a heartbeat")
        at.coordinator.say(m.RevokeLease(job="7", attempt=4))
        wait(lambda: not job.joined, "the end of the connection")
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


def test_whatever_a_jobs_code_does_harms_that_job_only(tmp_path: Path) -> None:
    """Exits, interrupts, forks and closed streams are a strike for the job; the executor and other jobs go on."""
    with harness(tmp_path) as at:
        process = at.executor()
        bad = {name: at.aggregator(str(10 + i), SHORT, code=code) for i, (name, code) in enumerate(BAD.items())}
        code = """import sys, os, signal; print('loud output'); sys.stdout.close(); os.close(2); sys.stdout = None
os.chdir("/"); signal.setitimer(signal.ITIMER_REAL, 600)"""
        loud = at.aggregator("20", SHORT, code=code)
        code = """import signal, sys; print('good output', flush=True); print('aside', file=sys.stderr)
assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0), 'an alarm that another job has set'"""
        good = at.aggregator("30", Behaviour(iterations=3), code=code)
        for i, aggregator in enumerate([*bad.values(), loud, good]):
            at.grant(aggregator, order=float(i))
        assert all(aggregator.finished.wait(LIMIT) for aggregator in [good, loud, *bad.values()])
        reasons = {name: [f.reason for f in aggregator.all(m.TaskFailed)][:1] for name, aggregator in bad.items()}
        assert reasons == {
            "exit": ["SystemExit: enough"],
            "keyboard": ["KeyboardInterrupt: no reason given"],
            "base": ["BaseException: of its own kind"],
            "error": ["ZeroDivisionError: division by zero"],
            "memory": ["MemoryError: no room"],
            "fork": ["ValueError: the parent"],
        }
        assert "ZeroDivisionError" in bad["error"].all(m.TaskFailed)[0].trace
        assert process.poll() is None
        assert (at.home / "jobs" / "30" / "log.txt").read_text().splitlines() == ["good output", "aside"] * 3
        assert (at.home / "jobs" / "20" / "log.txt").read_text() == "loud output\n"


def test_a_slow_answer_delays_no_other_job_and_counts_when_it_comes(tmp_path: Path) -> None:
    with harness(tmp_path) as at:
        at.executor()
        slow = at.aggregator("1", Behaviour(iterations=1, seconds=(0.001, 0.001)))
        slow.hold_answers = True
        quick = at.aggregator("2", Behaviour(iterations=10_000, seconds=(0.002,)))
        at.grant(slow, order=0.0)
        at.grant(quick, order=1.0)
        wait(lambda: slow.all(m.Claim), "a claim")
        before = len(quick.done)
        wait(lambda: len(quick.done) > before + 3, "the other job's progress while an answer is due")
        assert len(slow.all(m.Claim)) == 1 and not slow.done
        slow.hold_answers = False
        assert slow.finished.wait(LIMIT)
        assert sum(map(len, slow.done.values())) == 2


def test_a_job_that_cannot_be_loaded_is_reported_until_the_coordinator_has_decided(tmp_path: Path) -> None:
    with harness(tmp_path) as at:
        at.executor()
        broken = at.aggregator("1", SHORT, load="raise SystemExit('not today')")
        good = at.aggregator("2", Behaviour(iterations=3))
        at.grant(broken)
        at.grant(good, order=1.0)
        assert good.finished.wait(LIMIT)
        wait(lambda: at.coordinator.all(m.Failed), "the report")
        assert at.coordinator.all(m.Failed) == [m.Failed(job="1", attempt=1, reason="SystemExit: not today")]
        at.coordinator.end()
        at.restart_coordinator()
        wait(lambda: at.coordinator.all(m.Failed), "the report to the next coordinator")
        again = at.aggregator("1", SHORT, attempt=2)
        at.grant(again)
        assert again.finished.wait(LIMIT)


def test_the_running_job_is_known_after_a_kill_and_a_stuck_task_shows_in_heartbeats(tmp_path: Path) -> None:
    with harness(tmp_path) as at:
        process = at.executor(3)
        home = Home(at.home)
        assert running_job(home, 3) == 0
        idle = at.aggregator("1", SHORT)
        stuck = at.aggregator("2", Behaviour(iterations=1, seconds=(2 * LIMIT,)))
        at.grant(idle)
        assert idle.finished.wait(LIMIT)
        wait(lambda: running_job(home, 3) == 0, "the end of the task")
        at.grant(stuck)
        wait(
            lambda: [b for b in at.coordinator.all(m.Heartbeat) if b.running == "2" and b.since > 0.4],
            "a heartbeat during the task",
        )
        heartbeat = at.coordinator.all(m.Heartbeat)[-1]
        assert heartbeat.tasks == {"1": 1} and set(heartbeat.busy) == {"1"} and heartbeat.idle > 0
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert running_job(home, 3) == 2
        at.executor(3)
        assert running_job(home, 3) == 0


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores to tell them apart")
def test_a_cpu_device_stays_on_its_core(tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    with harness(tmp_path) as at:
        at.executor(kind="cpu", core=core)
        job = at.aggregator("1", SHORT, code="import os, sys; print(os.sched_getaffinity(0), flush=True)")
        at.grant(job)
        assert job.finished.wait(LIMIT)
        assert (at.home / "jobs" / "1" / "log.txt").read_text() == f"{{{core}}}\n"
        assert not at.coordinator.all(m.Hello)[0].emulated
        wait_for_tasks(at, 1)
        assert not recorder.timeline(at.home).emulated


def test_overhead_is_recorded_for_every_task_and_its_median_is_in_heartbeats(tmp_path: Path) -> None:
    with harness(tmp_path) as at:
        at.executor()
        job = at.aggregator("1", Behaviour(iterations=40, seconds=(0.002, 0.002), off_device=0.005))
        at.grant(job)
        assert job.finished.wait(LIMIT)
        wait_for_tasks(at, 80)
        found = task_lines(at)
        for before, task in pairwise(found):
            could = max(before.stop, job.released_at[task.iteration])
            assert 0 <= task.overhead <= task.start - could + 1e-6
            assert task.waited == pytest.approx(task.start - job.released_at[task.iteration], abs=1e-6)
        wait(lambda: at.coordinator.all(m.Heartbeat)[-1].tasks == {"1": 80}, "a heartbeat after the last task")
        kept = sorted(t.overhead for t in found)
        assert at.coordinator.all(m.Heartbeat)[-1].overhead == pytest.approx((kept[39] + kept[40]) / 2, abs=1e-6)


def test_a_refused_executor_ends_with_an_exit_code(tmp_path: Path) -> None:
    with harness(tmp_path) as at:
        process = at.executor()
        at.coordinator.say(m.Refusal(reason="wrong key"))
        assert process.wait(LIMIT) == 1


def test_it_ends_cleanly_on_a_signal(tmp_path: Path) -> None:
    with harness(tmp_path) as at:
        process = at.executor()
        job = at.aggregator("1", Behaviour(iterations=10_000, seconds=(0.002,)))
        at.grant(job)
        wait(lambda: job.iteration > 5, "work")
        process.terminate()
        assert process.wait(LIMIT) == 0
        wait(lambda: job.all(m.Leave), "Leave")
        done = sum(map(len, job.done.values()))
        assert len(recorder.recorded_tasks(at.home)) == done, "tasks were not recorded at the end"
