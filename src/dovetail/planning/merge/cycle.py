"""An iteration with its communication split in two: reduce-scatters behind backward, all-gathers behind forward.

What happens, in order, on every rank at the same time:

1. backward makes gradients ready. Buckets are reduce-scattered over one channel, first in first out, each once its
   last gradient is ready: afterwards every rank holds the sum of its own 1/n of the bucket.
2. The optimiser updates that 1/n, the rank's shards: all of them in one step once backward and the last reduce-scatter
   are over (clipping by the global norm needs that), or bucket by bucket as their reduce-scatters end.
3. The next forward starts at once. The updated parameters are all-gathered over the same channel without a pause, the
   bucket with the first layers first: the reverse of the order in which they were reduced. A layer starts once the
   buckets that hold its tensors are there.
4. The last layers' bucket comes last and is needed last. So the channel is free when the next backward starts, no
   iteration reaches into the one after next, and every period is alike.

Let A_m be the time from the start of forward until bucket m is gathered, and t_m the seconds of forward from the first
layer that uses it to the end. Forward lasts max(forward, max over m of A_m + t_m), and A_m is the sum of the
all-gathers of the buckets m, m + 1, …: precisely the finish of a stream with ready times t (`stream.schedule`; time
runs backwards from the end of forward). So one partition is judged on two streams, and the period is a sum of two
finishes:

    period = max(backward, F) + optimiser + max(forward, H)
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from dovetail.core.network import AffineCost, Cost
from dovetail.core.profile import Profile

from . import exact
from .stream import Stream, bucket_bytes, finish, schedule, stream


@dataclass(frozen=True)
class Cycle:
    """A stream of gradients backward, the same tensors forward, and what moving them costs."""

    backward: Stream
    forward: Stream
    """The same tensors, breaks and cap. `ready[j]`: seconds of forward from the first layer that uses any of the
    tensors 0..j to the end; `backward`: seconds of the whole forward pass."""
    scatter: Cost
    """Seconds of a reduce-scatter, by the bytes of all ranks' shards together."""
    gather: Cost
    step: float = 0.0
    """Seconds of the optimiser on all of a rank's shards at once, between the phases."""
    update: Cost | None = None
    """Seconds of the optimiser on a bucket's shard, by the bytes of the bucket, where shards are updated one by one."""

    def __post_init__(self) -> None:
        a, b = self.backward, self.forward
        assert (a.sizes, a.breaks, a.cap) == (b.sizes, b.breaks, b.cap), "both phases move the same tensors"

    def __len__(self) -> int:
        return len(self.backward)


@dataclass(frozen=True)
class Phases:
    """When everything happens, by bucket in gradient-ready order. Times in seconds."""

    scatters: list[tuple[float, float]]
    """Seconds from the start of backward."""
    updates: list[tuple[float, float]]
    """Seconds from the start of backward; one in all, or one for each bucket."""
    gathers: list[tuple[float, float]]
    """Seconds from the start of the next forward, which starts when the last update ends."""
    forward: float
    """Seconds of the next forward, waiting included."""

    @property
    def period(self) -> float:
        """Seconds from one start of backward to the next, and so from one start of forward to the next."""
        return self.updates[-1][1] + self.forward


def cycle(
    profile: Profile,
    scatter: Cost,
    gather: Cost,
    *,
    batch: int | None = None,
    cap: int | None = None,
    step: float = 0.0,
    update: Cost | None = None,
) -> Cycle:
    """The two phases of a profile at a local batch."""
    backward = stream(profile, batch=batch, cap=cap)
    return Cycle(
        backward=backward,
        forward=Stream(
            ready=tuple(accumulate(tails(profile, batch=batch), max)),
            sizes=backward.sizes,
            breaks=backward.breaks,
            cap=cap,
            backward=profile.forward_time(batch),
        ),
        scatter=scatter,
        gather=gather,
        step=step,
        update=update,
    )


def tails(profile: Profile, *, batch: int | None = None) -> list[float]:
    """For every tensor in ready order: seconds of forward from its layer on.

    All-gathers keep their order, so a tensor that forward uses earlier than one that was ready before it does not come
    earlier. `cycle` therefore takes running maxima, which leave the finish of every partition as it is.
    """
    seconds = [layer.forward(batch or profile.batch) for layer in profile.layers]
    left = list(accumulate(reversed(seconds)))[::-1]
    return [left[t.layer] for t in profile.tensors]


def by_bytes(seconds: float, total: int) -> Cost | None:
    """The cost of updating a bucket's shard, where all `total` bytes together take `seconds`; None where that is 0."""
    return AffineCost(0.0, seconds / max(1, total)) if seconds else None


def phases(cycle: Cycle, cuts: list[int]) -> Phases:
    """When each bucket is reduced, updated and gathered."""
    scatters = schedule(cycle.backward, cuts, cycle.scatter)
    over = max(cycle.backward.backward, scatters[-1][1])
    updates = [(over, over + cycle.step)]
    if cycle.update is not None:
        updates, free = [], cycle.backward.backward
        seconds = cycle.update(bucket_bytes(cycle.backward, cuts)).tolist()
        for (_, reduced), lasts in zip(scatters, seconds, strict=True):
            start = max(free, reduced)
            free = start + lasts
            updates.append((start, free))
    each = cycle.gather(bucket_bytes(cycle.forward, cuts)).tolist()
    ends = list(accumulate(reversed(each), initial=0.0))
    gathers = list(pairwise(ends))[::-1]
    lasts = max(cycle.forward.backward, finish(cycle.forward, cuts, cycle.gather))
    return Phases(scatters=scatters, updates=updates, gathers=gathers, forward=lasts)


def period(cycle: Cycle, cuts: list[int]) -> float:
    """Seconds from one iteration to the next."""
    return phases(cycle, cuts).period


def lower_bound(cycle: Cycle) -> float:
    """Seconds that no partition can go below: each phase's own bound, and what the optimiser takes at least."""
    reduced = max(cycle.backward.backward, exact.lower_bound(cycle.backward, cycle.scatter))
    forward = max(cycle.forward.backward, exact.lower_bound(cycle.forward, cycle.gather))
    if cycle.update is not None:
        updating = float(exact.remaining(cycle.backward, cycle.update)[0][0])
        return max(reduced, cycle.backward.backward + updating) + forward
    return reduced + cycle.step + forward
