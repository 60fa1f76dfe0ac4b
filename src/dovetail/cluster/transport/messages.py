"""What the processes of a cluster say to each other. Small and frequent; tensors never travel here.

Three conversations. The coordinator grants devices to jobs and takes them back (with executors), and starts, watches
and stops jobs (with aggregators). An aggregator offers tasks to executors, and they take them.
A job's *epoch* counts its starts; whoever belongs to an earlier one is told to leave.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Rank = tuple[bool, float, float, int]
"""As `planning.priority.Rank`: background last, the order's figure, arrival, serial number."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all messages; the class's name is its tag on the wire."""


# -- with the coordinator --


class Hello(Message, frozen=True):
    """First on every connection to the coordinator; `key` is the cluster's secret."""

    key: str
    role: Literal["executor", "aggregator"]
    pid: int
    device: int = -1
    """Of an executor."""
    node: str = ""
    """The machine: processes with the same name share memory."""
    emulated: bool = False
    job: str = ""
    """Of an aggregator."""
    epoch: int = 0
    address: tuple[str, int] = ("", 0)
    """Where an aggregator listens for executors."""
    residents: tuple[tuple[str, int], ...] = ()
    """(job, epoch) that an executor still serves when it comes back to a restarted coordinator."""


class Grant(Message, frozen=True):
    """Coordinator to executor: this device serves the job, until revoked. Sent again when the rank changes."""

    job: str
    epoch: int
    aggregator: tuple[str, int]
    node: str
    """The aggregator's machine."""
    folder: str
    """The job's."""
    rank: Rank
    foreground: bool = False
    """Its speed is promised: fillers start only in gaps that are long enough."""
    bound: float = 0.05
    """Slow-down that a foreground job accepts."""
    exclusive: bool = False


class Revoke(Message, frozen=True):
    """Coordinator to executor: no further task of the job; drop its weights when the running task has ended."""

    job: str
    epoch: int


class StartRank(Message, frozen=True):
    """Coordinator to executor: run one rank of a gang job as a process of its own on this device."""

    job: str
    epoch: int
    worker: int
    argv: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    rank: Rank
    foreground: bool = False
    bound: float = 0.05


class RankEnded(Message, frozen=True):
    """Executor to coordinator."""

    job: str
    epoch: int
    worker: int
    code: int
    tail: str = ""
    """Its last lines on stderr."""


class Beat(Message, frozen=True):
    """Executor to coordinator, twice a second, from a thread of its own: a stuck task cannot stop it."""

    running: str = ""
    """The job whose task runs now, empty if none."""
    since: float = 0.0
    """Seconds for which it has been running."""
    busy: dict[str, float] = {}
    """Device-seconds of each job's tasks since this executor began."""
    tasks: dict[str, int] = {}
    overhead: float = 0.0
    """Median seconds from the end of a task (or a release) to the start of the next, where one was ready."""
    slowdown: dict[str, float] = {}
    """For each foreground job: delay that fillers caused here, as a share of its time here."""
    idle: float = 0.0
    """Device-seconds with no task since this executor began."""


class Described(Message, frozen=True):
    """Aggregator to coordinator: what the job asks for. Seconds are its profile's or measured; 0 where unknown."""

    job: str
    epoch: int
    workers: int
    iterations: int
    forward: float = 0.0
    backward: float = 0.0
    off_device: float = 0.0
    depths: tuple[float, ...] = ()
    """One per worker, ascending or not; empty for full depth."""
    persistent_bytes: int = 0
    ephemeral_bytes: int = 0
    task_timeout: float = 120.0
    """Seconds after which the coordinator takes a task for endless."""


class Progress(Message, frozen=True):
    """Aggregator to coordinator, at most five times a second."""

    job: str
    epoch: int
    iteration: int
    """Iterations done."""
    loss: float
    checkpoint: int
    """Iterations in the newest checkpoint that is safely on disk."""
    task_seconds: tuple[float, ...] = ()
    """Smoothed, by worker."""
    off_device: float = 0.0
    iteration_seconds: float = 0.0
    depths: tuple[float, ...] = ()


class Finished(Message, frozen=True):
    """Aggregator to coordinator: all iterations are done and the last checkpoint is on disk."""

    job: str
    epoch: int
    iteration: int
    loss: float


class Failed(Message, frozen=True):
    """Aggregator or executor to coordinator: the job cannot go on. One line says why.

    `fatal`: another try would end the same way (a wrong job file, a loss that is not a number).
    """

    job: str
    epoch: int
    reason: str
    fatal: bool = False


class Stop(Message, frozen=True):
    """Coordinator to aggregator: finish the iteration, write a checkpoint, leave. `discard`: leave at once."""

    discard: bool = False


class Refused(Message, frozen=True):
    """Coordinator to whoever said Hello with the wrong key or for an earlier epoch: leave."""

    reason: str


# -- between executor and aggregator --


class Join(Message, frozen=True):
    """First from an executor; `key` is the cluster's secret."""

    key: str
    job: str
    epoch: int
    device: int
    node: str


class Welcome(Message, frozen=True):
    """From the aggregator: where the job's tensors are."""

    memory: str
    """Name of its shared memory; empty where the executor is on another machine."""
    store: tuple[str, int] = ("", 0)
    """Host and port of a torch store for the tensor channel then."""
    channel: str = ""
    """Under which name both meet there (`channel.Peer.name`)."""
    header: str = ""
    """What an arena of the executor's own is to be like then (`Arena.apart`)."""


class Task(Message, frozen=True):
    """One worker's part of an iteration. As the answer to a Claim: worker -1 if there is none left."""

    iteration: int
    worker: int = -1
    depth: int = 0
    """How many of the last segments get a backward pass; 0 for all. An executor learns seconds by depth."""
    samples: tuple[int, int] = (0, 0)
    """[start, stop) in the iteration's global batch."""
    seconds: float = 0.0
    """What it is predicted to take, 0 where nothing is known yet; an emulated device takes just that."""
    claim: int = 0
    """Counts the job's offers: who locks this number has the task (see `arena`). 0: it must be asked for."""
    fresh: bool = False
    """Over a tensor channel: parameters and buffers come first, since the executor's are of an earlier iteration."""


class Offered(Message, frozen=True):
    """The tasks of an iteration, as soon as they are known: to be taken at once, to be started when it is Released.

    Repeated, with what is left, to an executor that joins in the middle, and to all when one is lost.
    """

    iteration: int
    tasks: tuple[Task, ...]
    """That nobody has taken, the longest last."""
    width: int = 0
    """Tasks of the iteration, with those that are taken; 0 if not said."""


class Released(Message, frozen=True):
    """What was offered may start."""

    iteration: int
    at: float = 0.0
    """time.monotonic() of the aggregator's machine when the iteration's first task became ready; 0 if not said."""
    gone: tuple[int, ...] = ()
    """Workers whose tasks were taken before."""
    until: float = 0.0
    """When all that run are predicted to end; 0 if none does."""


class Took(Message, frozen=True):
    """An executor that shares the job's memory has taken a task; worker -1: has given up the one it had.

    Needs no answer.
    """

    iteration: int
    worker: int = -1
    claim: int = 0
    at: float = 0.0
    """time.monotonic() when it did."""


class Claim(Message, frozen=True):
    """An idle executor that does not share the job's memory asks for the longest ready task."""

    iteration: int
    """That it has heard of."""


class Taken(Message, frozen=True):
    """To the job's executors: these workers' tasks are gone; all that run are predicted to end at `until`.

    Said when nothing is left: until then, who believes that a gone one is there finds out when it wants it.
    """

    iteration: int
    workers: tuple[int, ...]
    until: float
    """time.monotonic() of the aggregator's machine."""
    at: float = 0.0
    """The same clock when it was taken; 0 if not said."""


class Barrier(Message, frozen=True):
    """All tasks of the iteration have ended; the next is predicted to be released at `until`."""

    iteration: int
    until: float
    at: float = 0.0
    """The aggregator's clock when the last task had ended; 0 if not said."""


class Done(Message, frozen=True):
    """A task has ended; its gradients are in place."""

    iteration: int
    worker: int
    loss: float
    """Sum over its samples."""
    samples: int
    start: float
    stop: float
    """time.monotonic()"""


class TaskFailed(Message, frozen=True):
    """The job's own code raised; `reason` is one line, `trace` goes to the job's log."""

    iteration: int
    worker: int
    reason: str
    trace: str = ""


class Leave(Message, frozen=True):
    """Either side: the job ends here."""

    reason: str = ""


# -- with the local engine's supervisor --


class Start(Message, frozen=True):
    """Coordinator to supervisor: run a process. `key` names it ("executor 3", "aggregator 17.2")."""

    key: str
    role: Literal["executor", "aggregator"]
    settings: dict[str, Any]
    """Keyword arguments of the role's `main`."""


class Kill(Message, frozen=True):
    """Coordinator to supervisor: end the process and what it started, at once."""

    key: str


class Alive(Message, frozen=True):
    """Supervisor to coordinator, first on the connection: what runs already."""

    processes: dict[str, int]


class Exited(Message, frozen=True):
    """Supervisor to coordinator. Negative codes are signals."""

    key: str
    pid: int
    code: int


class Shutdown(Message, frozen=True):
    """Coordinator to executors, then to the supervisor: `dovetail cluster down`."""


AnyMessage = (
    Hello | Grant | Revoke | StartRank | RankEnded | Beat | Described | Progress | Finished | Failed | Stop | Refused
    | Join | Welcome | Offered | Released | Took | Claim | Task | Taken | Barrier | Done | TaskFailed | Leave
    | Start | Kill | Alive | Exited | Shutdown
)  # fmt: skip
