"""The job store: one SQLite file. Every change is on disk when the call that makes it returns.

WAL with synchronous=FULL: a commit returns after its pages are synced, so kill -9 of any process, at any time, loses
nothing that was acknowledged. There is one writer, the coordinator; others may read at any time.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from dovetail.cluster.job.submission import Kind, Options, Share, Submission
from dovetail.core.errors import Error

VERSION = 1
"""Version of the schema."""
State = Literal["queued", "preparing", "running", "paused", "finished", "failed", "cancelled"]
STATES: tuple[State, ...] = get_args(State)
ENDED: frozenset[State] = frozenset(("finished", "failed", "cancelled"))
NEXT: dict[State, frozenset[State]] = {
    "queued": frozenset(("preparing", "running", "paused", "finished", "failed", "cancelled")),
    "preparing": frozenset(("queued", "running", "paused", "finished", "failed", "cancelled")),
    "running": frozenset(("queued", "preparing", "paused", "finished", "failed", "cancelled")),
    "paused": frozenset(("queued", "finished", "failed", "cancelled")),
    "finished": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
}
"""The states that may follow each state. A gang runs without being prepared; a job that lost its devices or is resumed
is queued again; one that is paused in its last iteration, or resumed after it, may finish from there."""

_SCHEMA = """
CREATE TABLE jobs (
  id INTEGER PRIMARY KEY AUTOINCREMENT, request TEXT UNIQUE, name TEXT NOT NULL, kind TEXT NOT NULL,
  share TEXT NOT NULL, bound REAL NOT NULL, gang INTEGER NOT NULL, options TEXT NOT NULL,
  state TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '', submitted REAL NOT NULL, started REAL, ended REAL,
  epoch INTEGER NOT NULL DEFAULT 0, iteration INTEGER NOT NULL DEFAULT 0, loss REAL,
  checkpoint INTEGER NOT NULL DEFAULT 0, slowdown REAL,
  described TEXT NOT NULL DEFAULT '', strikes TEXT NOT NULL DEFAULT ''
);
CREATE INDEX jobs_by_state ON jobs (state, id);
CREATE TABLE submissions (job INTEGER PRIMARY KEY REFERENCES jobs (id), body BLOB NOT NULL);
CREATE TABLE leases (
  id INTEGER PRIMARY KEY, job INTEGER NOT NULL REFERENCES jobs (id), devices TEXT NOT NULL, start REAL NOT NULL,
  stop REAL
);
CREATE INDEX open_leases ON leases (job) WHERE stop IS NULL;
"""


class InvalidTransition(Error):
    """The job cannot go from its present state to the one that was asked for."""


class StoredJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job as stored. Times are time.time()."""

    id: int
    name: str
    kind: Kind
    share: Share
    bound: float
    gang: int
    options: Options
    state: State
    reason: str
    submitted: float
    started: float | None
    ended: float | None
    attempt: int
    """Starts of the job so far; `epoch` in the file."""
    iteration: int
    loss: float | None
    checkpoint: int
    slowdown: float | None
    """Slow-down of a job that has ended, when it last ran; None where unknown."""
    described: str
    """JSON of the last `messages.Described`; empty before the first."""
    strikes: str
    """JSON of `strikes.StrikeRecord`; empty without strikes."""


_COLUMNS = {name: "epoch" if name == "attempt" else name for name in StoredJob.__struct_fields__}


class StoredLease(msgspec.Struct, frozen=True, kw_only=True):
    """A job's lease of devices, from `start` to `stop` (time.time()); `stop` is None while the job has them."""

    job: int
    devices: tuple[int, ...]
    start: float
    stop: float | None


class Store:
    """The open file. One thread makes all calls."""

    def __init__(self, path: Path) -> None:
        try:
            self._db = sqlite3.connect(path, isolation_level=None, timeout=10.0)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute("PRAGMA foreign_keys=ON")
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
        except sqlite3.DatabaseError as e:
            raise Error(f"{path}: expected the cluster's store: {e}") from None
        if version > VERSION:
            self._db.close()
            raise Error(f"{path}: of a newer dovetail (schema {version}, this one reads {VERSION}): upgrade dovetail")
        if version == 0:
            with self._transaction():
                for statement in _SCHEMA.split(";"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version={VERSION}")

    def close(self) -> None:
        self._db.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    # -- jobs --

    def submit(self, submission: Submission) -> StoredJob:
        """Stores a new job, or finds the one of the same request."""
        s = submission
        with self._transaction():
            if s.request:
                found = self._db.execute("SELECT id FROM jobs WHERE request = ?", (s.request,)).fetchone()
                if found:
                    return self.job(found[0])
            cursor = self._db.execute(
                "INSERT INTO jobs (request, name, kind, share, bound, gang, options, state, submitted)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, 'queued', ?)",
                (s.request or None, s.name, s.kind, s.share, s.bound, s.gang, msgspec.json.encode(s.options).decode(),
                 time.time()),
            )  # fmt: skip
            assert cursor.lastrowid is not None
            body = msgspec.json.encode(s)
            self._db.execute("INSERT INTO submissions (job, body) VALUES (?, ?)", (cursor.lastrowid, body))
        return self.job(cursor.lastrowid)

    def submission(self, job: int) -> Submission:
        (body,) = self._db.execute("SELECT body FROM submissions WHERE job = ?", (job,)).fetchone()
        return msgspec.json.decode(body, type=Submission)

    def job(self, job: int) -> StoredJob:
        """The job of that number; an Error if there is none."""
        found = self._select("WHERE id = ?", (job,)) if 0 < job < 2**63 else []
        if not found:
            raise Error(f"job {job}: there is none of that number")
        return found[0]

    def jobs(self, states: Iterable[State] = STATES, *, limit: int = 1000, before: int = 0) -> list[StoredJob]:
        """Newest first; with `before`, only jobs of smaller numbers."""
        wanted = tuple(states)
        marks = ", ".join("?" * len(wanted))
        return self._select(
            f"WHERE state IN ({marks}) AND id < ? ORDER BY id DESC LIMIT ?", (*wanted, before or 2**63 - 1, limit)
        )

    def active(self) -> list[StoredJob]:
        """Every job that has not ended, oldest first."""
        return self._select("WHERE state NOT IN ('finished', 'failed', 'cancelled') ORDER BY id", ())

    def counts(self) -> dict[str, int]:
        return dict(self._db.execute("SELECT state, COUNT(*) FROM jobs GROUP BY state"))

    def _select(self, where: str, values: tuple[Any, ...]) -> list[StoredJob]:
        rows = self._db.execute(f"SELECT {', '.join(_COLUMNS.values())} FROM jobs {where}", values)
        found = []
        for row in rows:
            fields = dict(zip(_COLUMNS, row, strict=True))
            fields["options"] = msgspec.json.decode(fields["options"], type=Options)
            found.append(StoredJob(**fields))
        return found

    def move(self, job: int, state: State, *, reason: str = "", **fields: Any) -> None:
        """Stores the job's next state and the fields that change with it; InvalidTransition if it may not follow.

        Only a running job has a lease: in other states it ends.
        """
        with self._transaction():
            self._move(job, state, time.time(), fields | {"reason": reason})
            if state != "running":
                self._end_lease(job)

    def _move(self, job: int, state: State, now: float, fields: dict[str, Any]) -> None:
        present = self.job(job)
        if state not in NEXT[present.state]:
            raise InvalidTransition(f"job {job}: is {present.state}, cannot become {state}")
        if state == "running" and present.started is None:
            fields["started"] = now
        if state in ENDED:
            fields["ended"] = now
        self._update(job, {"state": state, **fields})

    def note(self, changes: dict[int, dict[str, Any]]) -> None:
        """Stores fields of several jobs in one transaction; their states stay."""
        if changes:
            with self._transaction():
                for job, fields in changes.items():
                    self._update(job, fields)

    def _update(self, job: int, fields: dict[str, Any]) -> None:
        names = ", ".join(f"{_COLUMNS[name]} = ?" for name in fields)
        self._db.execute(f"UPDATE jobs SET {names} WHERE id = ?", (*fields.values(), job))

    # -- leases --

    def lease(self, job: int, devices: Iterable[int], **fields: Any) -> None:
        """Gives the job a lease of these devices in place of the one it had. Its state becomes running."""
        with self._transaction():
            now = time.time()
            if self.job(job).state != "running":
                self._move(job, "running", now, fields | {"reason": ""})
            self._end_lease(job)
            values = (job, json.dumps(list(devices)), now)
            self._db.execute("INSERT INTO leases (job, devices, start) VALUES (?, ?, ?)", values)

    def _end_lease(self, job: int) -> None:
        self._db.execute("UPDATE leases SET stop = ? WHERE job = ? AND stop IS NULL", (time.time(), job))

    def end_leases(self) -> None:
        """Ends all leases: the cluster goes down."""
        with self._transaction():
            self._db.execute("UPDATE leases SET stop = ? WHERE stop IS NULL", (time.time(),))

    def leases(self, *, open_only: bool = False, limit: int = 100_000) -> list[StoredLease]:
        """Newest first."""
        where = "WHERE stop IS NULL" if open_only else ""
        query = f"SELECT job, devices, start, stop FROM leases {where} ORDER BY id DESC LIMIT ?"
        rows = self._db.execute(query, (limit,))
        return [StoredLease(job=j, devices=tuple(json.loads(d)), start=a, stop=b) for j, d, a, b in rows]
