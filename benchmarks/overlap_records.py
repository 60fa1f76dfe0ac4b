"""What the ranks of benchmarks/overlap.py and benchmarks/precision.py are told, and what they hand back."""

from __future__ import annotations

import itertools

from dovetail.core.files import Record
from dovetail.core.network import Network
from dovetail.core.profile import Profile
from dovetail.core.timeline import Timeline


class Spec(Record, frozen=True, kw_only=True):
    """The contest that the ranks run."""

    profile: Profile
    """In layer order."""
    contestants: tuple[str, ...]
    rounds: int
    settle: int
    steps: int
    trial: int
    """Iterations that count for each bucket cap, and for each all-split plan, before the contest."""
    caps: tuple[int, ...] = (1, 4, 10, 25, 50)
    """Bucket caps among which DDP's best is looked for, in MiB."""
    splits: int = 2
    """All-split plans among which the best is looked for."""
    recorded: int = 5
    """Iterations that are recorded for the link's idle time; 0 for none."""
    tuning: dict[str, int | float]
    """Arguments of `dovetail.Tuning` that are not the defaults."""


class Entry(Record, frozen=True, kw_only=True):
    """The result of one contestant."""

    name: str
    what: str
    """What was chosen before the contest, in words."""
    buckets: int
    kinds: dict[str, int]
    """Buckets by kind and precision."""
    seconds: tuple[float, ...]
    """Iteration times of the slowest rank."""
    sent: float
    """Bytes that this rank's interface has sent per iteration, with all headers."""
    predicted: float | None = None
    """Seconds of an iteration from the emulated profile and the network that dovetail measured while it trained."""
    promised: float | None = None
    """What dovetail itself predicted for the plan it keeps, from its own measured iterations."""
    idle: float | None = None
    """Share of a recorded iteration in which no collective was in flight."""
    codec: float = 0.0
    """Processor seconds per iteration that conversions to fewer bytes and back took on this rank."""


class Outcome(Record, frozen=True, kw_only=True):
    """A contest as one rank saw it."""

    network: Network
    """The exchange's collectives, as dovetail measured them while it trained with both lines."""
    all_reduce: dict[str, float]
    """Seconds of one all-reduce of all gradients with nothing beside it, by who carries it: "torch" or "ring"."""
    update: float
    """Seconds of the whole optimiser on one rank, while all ranks run it."""
    entries: tuple[Entry, ...]


def link_idle(timeline: Timeline) -> float | None:
    """Share of the time in which no collective was in flight, over the whole iterations that can be seen.

    An iteration begins where forward, or a wait in it, follows on backward or the optimiser. The first one is left out:
    what the iteration before it had queued is not in the recording.
    """
    computing = sorted((s for s in timeline.spans if s.track.endswith("/compute")), key=lambda s: s.start)
    begins = [
        b.start
        for a, b in itertools.pairwise(computing)
        if a.kind in ("backward", "optimizer") and b.kind in ("forward", "wait")
    ]
    if len(begins) < 2:
        return None
    start, stop = begins[0], begins[-1]
    at, busy = start, 0.0
    for s in sorted((s for s in timeline.spans if s.kind == "communication"), key=lambda s: s.start):
        busy += max(0.0, min(s.stop, stop) - max(s.start, at))
        at = max(at, min(s.stop, stop))
    return 1 - busy / (stop - start)
