"""The job store: what it has acknowledged is there after kill -9; states follow their rules."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.cluster.coordinator.job_store import ENDED, NEXT, STATES, InvalidTransition, State, Store
from dovetail.cluster.job.submission import Options, Submission
from dovetail.cluster.transport.messages import Described
from dovetail.core.errors import Error

WRITERS = """
import mmap, os, pathlib, random, signal, sys, time
from dovetail.cluster.coordinator.job_store import Store
from dovetail.cluster.job.submission import Submission

lines = mmap.mmap(-1, 1)  # shared with the writers: how many lines the present one has written, 255 at most

def tell(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
    lines[0] = min(lines[0] + 1, 255)

def write(turn):
    store, n = Store(pathlib.Path(sys.argv[1])), 0
    while True:
        n += 1
        job = store.submit(Submission(text=f"# {turn} {n}", request=f"r-{turn}-{n}")).id
        tell("job", job, n)
        store.move(job, "preparing", attempt=1)
        store.lease(job, (0, n % 7))
        tell("running", job, n % 7)
        if n % 3 == 0:
            store.move(job, "failed", reason="because")
            tell("failed", job, 0)

spread = random.Random(7)
for turn in range(40):
    lines[0] = 0
    pid = os.fork()
    if pid == 0:
        write(turn)
    while lines[0] < turn % 5:  # some are killed early, all others when they have got somewhere
        time.sleep(0.001)
    time.sleep(spread.uniform(0.0, 0.03))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
"""


def submitted(store: Store, **fields: object) -> int:
    return store.submit(Submission(text="x = 1", **fields)).id  # type: ignore[arg-type]


def test_a_killed_writer_loses_nothing_it_has_acknowledged(tmp_path: Path) -> None:
    """Writers print every commit after it returned; each is killed at a random moment, and the next one continues."""
    path = tmp_path / "cluster.db"
    Store(path).close()
    printed = subprocess.run(
        [sys.executable, "-c", WRITERS, str(path)], stdout=subprocess.PIPE, text=True, timeout=600, check=True
    ).stdout
    acknowledged: dict[int, tuple[str, str]] = {}
    for line in printed.splitlines():
        what, number, detail = line.split()
        acknowledged[int(number)] = (what, detail)
    assert {what for what, _ in acknowledged.values()} >= {"job", "running"}, "killed at different moments"
    store = Store(path)
    leases = {lease.job: lease for lease in store.leases(limit=10**6)}
    for job, (what, detail) in acknowledged.items():
        row = store.job(job)  # the last commit may have come too late to be printed
        if what == "job":
            assert store.submission(job).text.endswith(f" {detail}")
        elif what == "running":
            assert row.state in ("running", "failed") and leases[job].devices[1] == int(detail)
        else:
            assert (row.state, row.reason) == ("failed", "because") and leases[job].stop is not None
    store.close()


@given(st.lists(st.sampled_from(STATES), max_size=12))
@settings(max_examples=60)
def test_a_state_only_follows_one_that_allows_it(wishes: list[State]) -> None:
    store = Store(Path(":memory:"))
    job = submitted(store)
    present: State = "queued"
    for wish in wishes:
        if wish in NEXT[present]:
            store.move(job, wish) if wish != "running" else store.lease(job, (0,))
            present = wish
        else:
            with pytest.raises(InvalidTransition, match=f"is {present}, cannot become {wish}"):
                store.move(job, wish)
        row = store.job(job)
        assert row.state == present
        assert (row.ended is not None) == (present in ENDED)
        assert bool(store.leases(open_only=True)) == (present == "running")  # only a running job has a lease
    store.close()


def test_no_state_follows_an_end_and_every_other_can_be_cancelled() -> None:
    for state in STATES:
        assert not NEXT[state] if state in ENDED else "cancelled" in NEXT[state]


def test_the_same_request_twice_is_one_job(tmp_path: Path) -> None:
    store = Store(tmp_path / "cluster.db")
    first, second = submitted(store, request="a-1"), submitted(store, request="a-1")
    assert first == second
    assert submitted(store) != submitted(store)  # without a request, each submission is a job
    store.close()


def test_numbers_are_never_given_twice(tmp_path: Path) -> None:
    path = tmp_path / "cluster.db"
    store = Store(path)
    last = max(submitted(store) for _ in range(3))
    store.close()
    with sqlite3.connect(path) as other:
        other.execute("DELETE FROM submissions")
        other.execute("DELETE FROM jobs")
    other.close()
    store = Store(path)
    assert submitted(store) > last
    store.close()


def test_what_was_stored_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "cluster.db"
    store = Store(path)
    given = Submission(
        text="print('ä')\n", name="n", kind="gang", gang=3, arguments=("--x", "1"), share="foreground", bound=0.1,
        options=Options(task_timeout=5.0),
    )  # fmt: skip
    job = store.submit(given).id
    store.note({job: {"iteration": 7, "loss": 0.5, "checkpoint": 5}})
    store.close()
    store = Store(path)
    row = store.job(job)
    assert store.submission(job) == given
    assert (row.share, row.bound, row.gang, row.options) == ("foreground", 0.1, 3, Options(task_timeout=5.0))
    assert (row.iteration, row.loss, row.checkpoint) == (7, 0.5, 5)
    assert [r.id for r in store.active()] == [job]
    store.close()


def test_pages_of_jobs_are_newest_first(tmp_path: Path) -> None:
    store = Store(tmp_path / "cluster.db")
    jobs = [submitted(store) for _ in range(5)]
    store.move(jobs[1], "cancelled")
    assert [r.id for r in store.jobs(limit=2)] == [jobs[4], jobs[3]]
    assert [r.id for r in store.jobs(limit=2, before=jobs[3])] == [jobs[2], jobs[1]]
    assert [r.id for r in store.jobs(("cancelled",))] == [jobs[1]]
    assert store.counts() == {"queued": 4, "cancelled": 1}
    store.close()


def test_a_store_of_version_1_opens_and_keeps_its_jobs(tmp_path: Path) -> None:
    path = tmp_path / "cluster.db"
    store = Store(path)
    job = submitted(store)
    store.close()
    with sqlite3.connect(path) as old:  # by the names that the file has had from the beginning
        described = '{"type":"Described","job":"1","epoch":3,"workers":2,"iterations":10}'
        old.execute("UPDATE jobs SET epoch = 3, described = ?", (described,))
        assert old.execute("PRAGMA user_version").fetchone() == (1,)
    old.close()
    store = Store(path)
    assert store.job(job).attempt == 3
    assert msgspec.json.decode(store.job(job).described, type=Described).attempt == 3
    store.move(job, "preparing", attempt=4)
    assert store.job(job).attempt == 4
    store.close()


def test_a_newer_store_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "cluster.db"
    Store(path).close()
    with sqlite3.connect(path) as other:
        other.execute("PRAGMA user_version=99")
    other.close()
    with pytest.raises(Error, match=r"cluster\.db: of a newer dovetail \(schema 99, this one reads 1\)"):
        Store(path)


def test_a_file_that_is_no_store_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "cluster.db"
    path.write_bytes(b"something else " * 100)
    with pytest.raises(Error, match="expected the cluster's store"):
        Store(path)


@pytest.mark.parametrize("number", [0, -1, 2**70, 5])
def test_a_job_that_is_not_there_is_named(tmp_path: Path, number: int) -> None:
    store = Store(tmp_path / "cluster.db")
    with pytest.raises(Error, match=f"job {number}: there is none of that number"):
        store.job(number)
    store.close()
