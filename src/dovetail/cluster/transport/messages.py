"""The messages between the processes of a cluster. They are small and frequent; tensors never travel here.

There are three conversations. With executors, the coordinator grants leases of devices and revokes them. With
aggregators, it starts, watches and stops jobs. An aggregator offers tasks to executors, and they take them.
A job's *attempt* counts its starts, from 1 on; a process of an earlier attempt is told to end.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Priority = tuple[bool, float, float, int]
"""As in `planning.sharing.priority`: background jobs last, then the policy's figure, arrival, serial number."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all messages; the class's name is its tag on the wire."""


# -- with the coordinator --


class Hello(Message, frozen=True):
    """First on every connection to the coordinator; `key` is the cluster's secret."""

    key: str
    role: Literal["executor", "aggregator"]
    pid: int
    device: int = -1
    """The executor's device."""
    node: str = ""
    """Name of the machine: processes of one machine share memory."""
    emulated: bool = False
    job: str = ""
    """The aggregator's job."""
    attempt: int = 0
    address: tuple[str, int] = ("", 0)
    """Where an aggregator listens for executors."""
    leases: tuple[tuple[str, int], ...] = ()
    """(job, attempt) of the leases that an executor holds when it reconnects, perhaps to a restarted coordinator."""


class GrantLease(Message, frozen=True):
    """Coordinator to executor: this device serves the job until the lease is revoked.

    Sent again when the job's priority changes.
    """

    job: str
    attempt: int
    aggregator: tuple[str, int]
    node: str
    """The aggregator's machine."""
    folder: str
    """The job's folder."""
    priority: Priority
    foreground: bool = False
    """Its speed is promised: background tasks start only in gaps that are long enough."""
    bound: float = 0.05
    """Slow-down that a foreground job accepts, as a share of its time alone."""
    exclusive: bool = False


class RevokeLease(Message, frozen=True):
    """Coordinator to executor: run no further task of the job; drop its weights when the running task has ended."""

    job: str
    attempt: int


class StartRank(Message, frozen=True):
    """Coordinator to executor: run one rank of a gang job as a process of its own on this device."""

    job: str
    attempt: int
    worker: int
    argv: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    priority: Priority
    foreground: bool = False
    bound: float = 0.05


class RankEnded(Message, frozen=True):
    """Executor to coordinator: the process of a gang's rank has ended."""

    job: str
    attempt: int
    worker: int
    code: int
    """Exit code; negative for a signal."""
    tail: str = ""
    """The last lines that it printed."""


class Heartbeat(Message, frozen=True):
    """Executor to coordinator, twice a second, from a thread of its own: a stuck task does not silence it."""

    running: str = ""
    """The job whose task runs now, empty if none."""
    since: float = 0.0
    """Seconds for which that task has been running."""
    busy: dict[str, float] = {}
    """Device-seconds of each job's tasks since this executor started."""
    tasks: dict[str, int] = {}
    """Number of each job's tasks that have ended since this executor started."""
    overhead: float = 0.0
    """Median seconds from when a task could start (its release, or the end of the task before it) to its start."""
    slowdown: dict[str, float] = {}
    """For each foreground job: delay that background tasks caused here, as a share of its time here."""
    idle: float = 0.0
    """Device-seconds with no task since this executor started."""


class Described(Message, frozen=True):
    """Aggregator to coordinator: what the job asks for. Times are in seconds, from its profile; 0 where unknown.

    The coordinator stores it with the job, so names on the wire must not change.
    """

    job: str
    attempt: int = msgspec.field(name="epoch")
    workers: int
    iterations: int
    forward: float = 0.0
    backward: float = 0.0
    off_device: float = 0.0
    depths: tuple[float, ...] = ()
    """Share of the backward pass of each worker; empty where all have full depth."""
    persistent_bytes: int = 0
    ephemeral_bytes: int = 0
    task_timeout: float = 120.0
    """Seconds after which the coordinator treats a task as endless."""


class Progress(Message, frozen=True):
    """Aggregator to coordinator, at most five times a second."""

    job: str
    attempt: int
    iteration: int
    """Number of iterations done."""
    loss: float
    checkpoint: int
    """Number of iterations in the newest checkpoint on disk."""
    task_seconds: tuple[float, ...] = ()
    """Smoothed seconds of each worker's task."""
    off_device: float = 0.0
    iteration_seconds: float = 0.0
    depths: tuple[float, ...] = ()


class Finished(Message, frozen=True):
    """Aggregator to coordinator: all iterations are done and the last checkpoint is on disk."""

    job: str
    attempt: int
    iteration: int
    loss: float


class Failed(Message, frozen=True):
    """Aggregator or executor to coordinator: the job cannot go on. `reason` is one line.

    `fatal`: a retry would end the same way (a wrong job file, a loss that is not a number).
    """

    job: str
    attempt: int
    reason: str
    fatal: bool = False


class StopJob(Message, frozen=True):
    """Coordinator to aggregator: finish the iteration, write a checkpoint, end. `discard`: end at once."""

    discard: bool = False


class Refusal(Message, frozen=True):
    """Coordinator to a process that said Hello with a wrong key or for an earlier attempt: end."""

    reason: str


# -- between executor and aggregator --


class Join(Message, frozen=True):
    """First message of an executor; `key` is the cluster's secret."""

    key: str
    job: str
    attempt: int
    device: int
    node: str


class Welcome(Message, frozen=True):
    """The aggregator's answer: where the job's tensors are."""

    memory: str
    """Name of the job's shared memory; empty where the executor is on another machine. Only then are the others set."""
    store: tuple[str, int] = ("", 0)
    """Host and port of the torch store through which the tensor channel connects."""
    channel: str = ""
    """Name of the channel in that store (`tensor_channel.ChannelPeer.name`)."""
    header: str = ""
    """Header of the arena that the executor makes for itself (`Arena.apart`)."""


class Task(Message, frozen=True):
    """One worker's part of an iteration. As the answer to a Claim: worker -1 if no task is left."""

    iteration: int
    worker: int = -1
    depth: int = 0
    """Number of last segments that get a backward pass; 0 for all. An executor learns task times by depth."""
    samples: tuple[int, int] = (0, 0)
    """[start, stop) in the iteration's global batch."""
    seconds: float = 0.0
    """Predicted seconds, 0 where nothing is known yet; on an emulated device the task takes exactly that."""
    claim: int = 0
    """Serial number of the offer: the executor that locks it has the task (see `job.arena`). 0: send a Claim."""
    fresh: bool = False
    """Over a tensor channel: parameters and buffers are sent first, since the executor has older ones."""


class Offered(Message, frozen=True):
    """The tasks of an iteration, as soon as they are known. They may be taken now and started when it is Released.

    Sent again, with the tasks that are left, to an executor that joins in the middle, and to all when one is lost.
    """

    iteration: int
    tasks: tuple[Task, ...]
    """Tasks that no executor has taken, the longest last."""
    width: int = 0
    """Number of tasks in the iteration, including those that are taken; 0 if not given."""


class Released(Message, frozen=True):
    """The tasks that were offered may start."""

    iteration: int
    at: float = 0.0
    """time.monotonic() of the aggregator's machine when the iteration's first task became ready; 0 if not given."""
    taken: tuple[int, ...] = ()
    """Workers whose tasks were taken before."""
    until: float = 0.0
    """Predicted end of all tasks that run, on the same clock; 0 if none runs."""


class Took(Message, frozen=True):
    """An executor that shares the job's memory has taken a task; worker -1: it has given up the one it had.

    There is no answer.
    """

    iteration: int
    worker: int = -1
    claim: int = 0
    at: float = 0.0
    """time.monotonic() when it was taken."""


class Claim(Message, frozen=True):
    """An idle executor that does not share the job's memory asks for the longest ready task."""

    iteration: int
    """The newest iteration that the executor knows of."""


class Taken(Message, frozen=True):
    """To the job's executors: these workers' tasks are taken; all that run are predicted to end at `until`.

    Sent when no task is left. Before that, an executor finds out that a task is taken when it tries to lock it.
    """

    iteration: int
    workers: tuple[int, ...]
    until: float
    """time.monotonic() of the aggregator's machine."""
    at: float = 0.0
    """Time on the same clock when the last one was taken; 0 if not given."""


class Barrier(Message, frozen=True):
    """All tasks of the iteration have ended; the next is predicted to be released at `until`."""

    iteration: int
    until: float
    at: float = 0.0
    """Time on the aggregator's clock when the last task had ended; 0 if not given."""


class Done(Message, frozen=True):
    """A task has ended; its gradients are in the arena."""

    iteration: int
    worker: int
    loss: float
    """Sum over the task's samples."""
    samples: int
    start: float
    stop: float
    """time.monotonic() of the executor's machine, as `start`."""


class TaskFailed(Message, frozen=True):
    """The job's own code raised an exception; `reason` is one line, `trace` goes to the job's log."""

    iteration: int
    worker: int
    reason: str
    trace: str = ""


class Leave(Message, frozen=True):
    """From either side, last on a connection: the executor no longer serves the job."""

    reason: str = ""


# -- with the local engine's supervisor --


class StartProcess(Message, frozen=True):
    """Coordinator to supervisor: start a process. `key` names it ("executor 3", "aggregator 17.2")."""

    key: str
    role: Literal["executor", "aggregator"]
    settings: dict[str, Any]
    """Keyword arguments of the role's `main`."""


class KillProcess(Message, frozen=True):
    """Coordinator to supervisor: kill the process and every process that it started."""

    key: str


class Alive(Message, frozen=True):
    """Supervisor to coordinator, first on the connection: the processes that run."""

    processes: dict[str, int]
    """Process ids by key."""


class Exited(Message, frozen=True):
    """Supervisor to coordinator: a process has ended. Negative codes are signals."""

    key: str
    pid: int
    code: int


class Shutdown(Message, frozen=True):
    """Coordinator to executors, then to the supervisor: `dovetail cluster down`."""


AnyMessage = (
    Hello | GrantLease | RevokeLease | StartRank | RankEnded | Heartbeat
    | Described | Progress | Finished | Failed | StopJob | Refusal
    | Join | Welcome | Offered | Released | Took | Claim | Task | Taken | Barrier | Done | TaskFailed | Leave
    | StartProcess | KillProcess | Alive | Exited | Shutdown
)  # fmt: skip
