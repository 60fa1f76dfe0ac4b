"""The executors as the coordinator sees them: which runs, what it has been granted, what it said last."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dovetail.cluster.engines.base import Device
from dovetail.cluster.home import Home
from dovetail.cluster.transport.messages import Beat, Grant, Hello, Revoke, StartRank

from .job_state import Live
from .peers import Link

HELLO_LIMIT = 60.0
"""Seconds from an executor's start to its first word, and from a lost connection to the next."""
UNWANTED = 10.0
"""Seconds that a task may run whose job has been cancelled or has failed: others wait for the device."""
BEAT_LIMIT = 30.0
AWAY_LIMIT = 10.0
"""Seconds after which the jobs of a device that is away are placed elsewhere."""
_LONGEST_PAUSE = 10.0
Key = tuple[int, int]
"""Job and epoch."""


@dataclass
class Executor:
    """One device's."""

    device: Device
    process: bool = False
    link: Link | None = None
    granted: dict[Key, Grant | StartRank | None] = field(default_factory=dict)
    """What it was told last; None where it had it before this coordinator began."""
    beat: Beat = field(default_factory=Beat)
    heard: float = 0.0
    """time.monotonic() of its last beat."""
    welcomed: float = 0.0
    """time.monotonic() of its last Hello."""
    deadline: float = 0.0
    away: float = 0.0
    """time.monotonic() since when it has not been there."""
    started: float = 0.0
    restart: float = 0.0
    pause: float = 0.0
    struck: bool = False
    """Whether its coming end has been laid at a job's door."""
    window: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Of the beats some seconds ago: time, busy and idle device-seconds."""
    utilization: float = 0.0

    @property
    def index(self) -> int:
        return self.device.index

    @property
    def key(self) -> str:
        return f"executor {self.index}"

    @property
    def ready(self) -> bool:
        return self.link is not None

    def welcome(self, hello: Hello, link: Link, now: float) -> None:
        """It is there, for the first time or again."""
        self.link, self.process, self.heard, self.welcomed = link, True, now, now
        self.granted = {(int(job), epoch): None for job, epoch in hello.residents}
        self.beat = Beat()
        self.window = (now, 0.0, 0.0)

    def gone(self, now: float) -> None:
        """No connection; the process may live."""
        if self.link is not None:
            self.away = now
        self.link = None
        self.deadline = now + HELLO_LIMIT

    def ended(self, now: float) -> None:
        """The process has ended; it is started again, later if it did not live long."""
        self.gone(now)
        self.process, self.struck, self.granted = False, False, {}
        self.pause = 0.0 if now - self.started > 5.0 else min(max(0.2, 2 * self.pause), _LONGEST_PAUSE)
        self.restart = now + self.pause

    def beats(self, beat: Beat, now: float) -> dict[int, float]:
        """Takes a beat: the device-seconds that each job has had since the last one."""
        before = self.beat.busy
        self.beat, self.heard = beat, now
        gained = {int(job): max(0.0, s - before.get(job, 0.0)) for job, s in beat.busy.items()}
        at, busy, idle = self.window
        total = sum(beat.busy.values())
        if now - at >= 4.0:
            spent, waited = max(0.0, total - busy), max(0.0, beat.idle - idle)  # jobs that left are forgotten
            self.utilization = spent / (spent + waited) if spent + waited > 0 else 0.0
            self.window = (now, total, beat.idle)
        return gained

    def sync(self, wanted: dict[Key, Grant | StartRank | None], held_back: Iterable[Key]) -> None:
        """Tells it the difference between what it has and what it should have; never twice the same."""
        if self.link is None:
            return
        for key in [k for k in self.granted if k not in wanted]:
            del self.granted[key]
            self.link.send(Revoke(job=str(key[0]), epoch=key[1]))
        waiting = set(held_back)
        for key, message in wanted.items():
            if message is None or (key in waiting and key not in self.granted):
                continue
            if self.granted.get(key) != message:
                self.granted[key] = message
                self.link.send(message)


def running_job(home: Home, device: int) -> int:
    """Whose task the executor noted as running; 0 if none."""
    with contextlib.suppress(OSError, ValueError):
        return int(home.running_file(device).read_bytes()[:64].split(b"\0")[0].strip() or b"0")
    return 0


def forget_running(home: Home, device: int) -> None:
    """Before an executor is started again: what its predecessor ran is no longer its fault."""
    with contextlib.suppress(OSError):
        home.running_file(device).unlink()


def delayed(job: Live, executors: Mapping[int, Executor]) -> float | None:
    """What background work has cost a foreground job, by its executors' own measure: the worst of them."""
    told = [executors[d].beat.slowdown.get(str(job.id)) for d in job.devices if d in executors]
    return max((s for s in told if s is not None), default=None)


def slowdown(job: Live, executors: Mapping[int, Executor]) -> float | None:
    """Of a foreground job what is promised, of others against devices of their own; None while unknown."""
    return delayed(job, executors) if job.share == "foreground" else job.slowdown


def late(executors: Iterable[Executor], now: float) -> list[Executor]:
    """Those that live but do not answer."""
    found = []
    for e in executors:
        silent = e.link is not None and now - e.heard > BEAT_LIMIT
        if e.process and (silent or (e.link is None and now > e.deadline)):
            found.append(e)
    return found


def endless(executor: Executor, limits: dict[int, float]) -> int:
    """The job whose task has run for longer than its limit there; 0 if none does."""
    beat = executor.beat
    if not beat.running or not executor.ready:
        return 0
    since = beat.since + (time.monotonic() - executor.heard)
    job = int(beat.running)
    return job if since > limits.get(job, UNWANTED) else 0
