"""An executor as the coordinator knows it: whether it runs, the leases it was sent, its last heartbeat."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dovetail.cluster.engines.base import ClusterDevice
from dovetail.cluster.home import Home
from dovetail.cluster.transport.messages import GrantLease, Heartbeat, Hello, RevokeLease, StartRank

from .job_state import ActiveJob
from .peers import Peer

HELLO_LIMIT = 60.0
"""Seconds from an executor's start to its Hello, and from a lost connection to the next one."""
UNWANTED_LIMIT = 10.0
"""Seconds that a task may still run after its job was cancelled or has failed: other jobs wait for the device."""
HEARTBEAT_LIMIT = 30.0
"""Seconds without a heartbeat after which an executor is ended."""
LOST_LIMIT = 10.0
"""Seconds after which the jobs of a lost device are placed elsewhere."""
_LONGEST_PAUSE = 10.0  # seconds before an executor that keeps dying is started again
Key = tuple[int, int]
"""Job and attempt."""


@dataclass
class ExecutorState:
    """The executor of one device."""

    device: ClusterDevice
    process: bool = False
    peer: Peer | None = None
    leases: dict[Key, GrantLease | StartRank | None] = field(default_factory=dict)
    """What it was sent last for each job; None where it served the job before this coordinator began."""
    beat: Heartbeat = field(default_factory=Heartbeat)
    heard: float = 0.0
    """time.monotonic() of its last heartbeat."""
    connected_at: float = 0.0
    """time.monotonic() of its last Hello."""
    deadline: float = 0.0
    """time.monotonic() by which it must have connected."""
    lost_at: float = 0.0
    """time.monotonic() since when it has not been connected."""
    started: float = 0.0
    """time.monotonic() of its process's start."""
    restart: float = 0.0
    """time.monotonic() of its next start, after its process has ended."""
    pause: float = 0.0
    """Seconds between its last end and that start."""
    strike_counted: bool = False
    """Whether a job already has a strike for the coming end of this process."""
    window: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """time.monotonic(), busy and idle device-seconds of the heartbeat with which the present window began."""
    utilization: float = 0.0
    """Share of the last window in which tasks ran."""

    @property
    def index(self) -> int:
        return self.device.index

    @property
    def key(self) -> str:
        return f"executor {self.index}"

    @property
    def ready(self) -> bool:
        return self.peer is not None

    def connected(self, hello: Hello, peer: Peer, now: float) -> None:
        """It has connected, for the first time or again."""
        self.peer, self.process, self.heard, self.connected_at = peer, True, now, now
        self.leases = {(int(job), attempt): None for job, attempt in hello.leases}
        self.beat = Heartbeat()
        self.window = (now, 0.0, 0.0)

    def disconnected(self, now: float) -> None:
        """Its connection is lost; the process may live."""
        if self.peer is not None:
            self.lost_at = now
        self.peer = None
        self.deadline = now + HELLO_LIMIT

    def ended(self, now: float) -> None:
        """The process has ended; it is started again, later if it did not live long."""
        self.disconnected(now)
        self.process, self.strike_counted, self.leases = False, False, {}
        self.pause = 0.0 if now - self.started > 5.0 else min(max(0.2, 2 * self.pause), _LONGEST_PAUSE)
        self.restart = now + self.pause

    def take_heartbeat(self, beat: Heartbeat, now: float) -> dict[int, float]:
        """Stores a heartbeat; the device-seconds that each job has had since the one before."""
        before = self.beat.busy
        self.beat, self.heard = beat, now
        gained = {int(job): max(0.0, s - before.get(job, 0.0)) for job, s in beat.busy.items()}
        at, busy, idle = self.window
        total = sum(beat.busy.values())
        if now - at >= 4.0:
            spent, waited = max(0.0, total - busy), max(0.0, beat.idle - idle)  # sums fall when a job has left
            self.utilization = spent / (spent + waited) if spent + waited > 0 else 0.0
            self.window = (now, total, beat.idle)
        return gained

    def sync(self, wanted: dict[Key, GrantLease | StartRank | None], held_back: Iterable[Key]) -> None:
        """Sends the difference between the leases that it has and `wanted`. New ones of `held_back` wait."""
        if self.peer is None:
            return
        for key in [k for k in self.leases if k not in wanted]:
            del self.leases[key]
            self.peer.send(RevokeLease(job=str(key[0]), attempt=key[1]))
        waiting = set(held_back)
        for key, message in wanted.items():
            if message is None or (key in waiting and key not in self.leases):
                continue
            if self.leases.get(key) != message:
                self.leases[key] = message
                self.peer.send(message)


def running_job(home: Home, device: int) -> int:
    """The job whose task the executor has noted as running; 0 if none."""
    with contextlib.suppress(OSError, ValueError):
        return int(home.running_file(device).read_bytes()[:64].split(b"\0")[0].strip() or b"0")
    return 0


def forget_running(home: Home, device: int) -> None:
    """Before an executor is started again: what its predecessor ran must not count against a job twice."""
    with contextlib.suppress(OSError):
        home.running_file(device).unlink()


def delay(job: ActiveJob, executors: Mapping[int, ExecutorState]) -> float | None:
    """Slow-down of a foreground job by background work, as the worst of its executors measured it."""
    measured = [executors[d].beat.slowdown.get(str(job.id)) for d in job.devices if d in executors]
    return max((s for s in measured if s is not None), default=None)


def slowdown(job: ActiveJob, executors: Mapping[int, ExecutorState]) -> float | None:
    """Of a foreground job: the delay by background work; of others: against devices of their own. None: unknown."""
    return delay(job, executors) if job.share == "foreground" else job.slowdown


def silent(executors: Iterable[ExecutorState], now: float) -> list[ExecutorState]:
    """Executors whose process runs but sends no heartbeat, or does not connect."""
    found = []
    for e in executors:
        mute = e.peer is not None and now - e.heard > HEARTBEAT_LIMIT
        if e.process and (mute or (e.peer is None and now > e.deadline)):
            found.append(e)
    return found


def overdue_job(executor: ExecutorState, limits: dict[int, float]) -> int:
    """The job whose task has run there for longer than the job's limit (`limits`, seconds); 0 if none."""
    beat = executor.beat
    if not beat.running or not executor.ready:
        return 0
    since = beat.since + (time.monotonic() - executor.heard)
    job = int(beat.running)
    return job if since > limits.get(job, UNWANTED_LIMIT) else 0
