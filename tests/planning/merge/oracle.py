"""What the planners are held against: every partition there is, tried one by one, and small made-up inputs.

Nothing here uses the planners' own code for feasibility or for the finish.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from dovetail.core.network import AffineCost, Collective, Cost, Fit, FloatArray, Network, Precision, TableCost
from dovetail.core.plan import BucketKind
from dovetail.core.profile import Layer, LayerTime, ParameterTensor, Profile, exactly
from dovetail.planning.merge.cycle import Bucketing, Cycle, Way
from dovetail.planning.merge.stream import Stream


class Lookup:
    """An arbitrary cost: one number for every count of bytes, in no order at all."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = np.array(seconds)

    def __call__(self, nbytes: npt.ArrayLike, /) -> FloatArray:
        return self.seconds[np.asarray(nbytes, dtype=np.int64)]


def general(cost: Cost) -> Cost:
    """The same cost, but no longer recognisable as affine."""
    return lambda nbytes: cost(nbytes)


def partitions(stream: Stream) -> Iterator[list[int]]:
    n = len(stream.sizes)
    for chosen in itertools.product((False, True), repeat=n - 1):
        cuts = [i + 1 for i, cut in enumerate(chosen) if cut] + [n]
        if _allowed(stream, cuts):
            yield cuts


def _allowed(stream: Stream, cuts: list[int]) -> bool:
    for start, stop in itertools.pairwise([0, *cuts]):
        if any(start < b < stop for b in stream.breaks):
            return False
        if stream.cap is not None and stop - start > 1 and sum(stream.sizes[start:stop]) > stream.cap:
            return False
    return True


def finish(stream: Stream, cuts: list[int], cost: Cost, *, overhead: float = 0.0) -> float:
    time = float("-inf")
    for start, stop in itertools.pairwise([0, *cuts]):
        time = max(time, stream.ready[stop - 1]) + float(cost(sum(stream.sizes[start:stop]))) + overhead
    return time


def bucketings(made: Cycle) -> Iterator[Bucketing]:
    """Every partition with every way for every bucket."""
    for cuts in partitions(made.backward):
        for ways in itertools.product(range(len(made.ways)), repeat=len(cuts)):
            yield Bucketing(tuple(cuts), ways)


class Played:
    """Iterations played through on one channel and one device, with no formula of the planner's."""

    def __init__(self, profile: Profile, made: Cycle, *, iterations: int = 3) -> None:
        self.profile, self.iterations = profile, iterations
        self.forward = [layer.forward(profile.batch) for layer in profile.layers]
        self.kinds = [way.kind for way in made.ways]
        self.costs = [tuple(map(_remembered, (way.reduce, way.gather, way.update))) for way in made.ways]

    def __call__(self, bucketing: Bucketing) -> float:
        """Seconds from the start of the last forward but one to that of the last."""
        profile = self.profile
        buckets = list(itertools.pairwise([0, *bucketing.cuts]))
        size = [sum(t.bytes for t in profile.tensors[a:b]) for a, b in buckets]
        kinds, costs = [self.kinds[w] for w in bucketing.ways], [self.costs[w] for w in bucketing.ways]
        there = [0.0] * len(buckets)
        now = channel = 0.0
        starts = []
        for _ in range(self.iterations):
            starts.append(now)
            for index, seconds in enumerate(self.forward):
                for b, (i, j) in enumerate(buckets):
                    if any(t.layer == index for t in profile.tensors[i:j]):
                        now = max(now, there[b])
                now += seconds
            assert channel <= now + 1e-9, "the network is free when backward starts"
            began, reduced = now, []
            for (_, stop), nbytes, (reduce, _, _) in zip(buckets, size, costs, strict=True):
                channel = max(channel, began + profile.tensors[stop - 1].ready) + reduce(nbytes)
                reduced.append(channel)
            now = began + profile.backward_time()
            for nbytes, at, (_, _, update) in zip(size, reduced, costs, strict=True):
                now = max(now, at) + update(nbytes)
            channel = now
            for b in reversed(range(len(buckets))):
                if kinds[b] == "split":
                    channel += costs[b][1](size[b])
                there[b] = channel if kinds[b] == "split" else now
        starts.append(now)
        return starts[-1] - starts[-2]


def _remembered(cost: Cost | None) -> Callable[[int], float]:
    return functools.cache(lambda nbytes: 0.0 if cost is None else float(cost(nbytes)))


def random_ways(rng: random.Random, most: int) -> tuple[Way, ...]:
    """One to four ways of any costs: both kinds, and one of them in fewer bits."""
    update = rng.random() < 0.5
    kinds: list[tuple[BucketKind, Precision]] = [("whole", "full"), ("split", "full"), ("split", "int8")]
    chosen = rng.choice([kinds[:1], kinds[1:2], kinds[:2], kinds[:2], kinds])
    return tuple(
        Way(
            kind,
            precision,
            random_cost(rng, most),
            random_cost(rng, most) if kind == "split" else None,
            random_cost(rng, most) if update else None,
        )
        for kind, precision in chosen
    )


def random_stream(rng: random.Random, n: int, *, limits: bool = True) -> Stream:
    """Small numbers, so that ties, zero gaps and zero sizes are common."""
    step = rng.choice([lambda: float(rng.randint(0, 3)), rng.random, lambda: 0.0, lambda: 0.9])
    ready = tuple(itertools.accumulate(step() for _ in range(n)))  # type: ignore[no-untyped-call]
    sizes = tuple(rng.choice([0, 1, 1, 2, 3, 7]) for _ in range(n))
    breaks = frozenset(i for i in range(1, n) if limits and rng.random() < 0.15)
    cap = rng.choice([None, 1, 3, 6, 10]) if limits else None
    return Stream(ready, sizes, breaks, cap, backward=ready[-1] + rng.choice([0.0, 0.0, 1.0, 10.0]))


def random_affine(rng: random.Random) -> AffineCost:
    return AffineCost(rng.choice([0.0, 0.1, 1.0, 1.0, 5.0]), rng.choice([0.0, 0.1, 1.0, 1.0, rng.random()]))


def random_cost(rng: random.Random, most: int) -> Cost:
    """Affine, a table that rises in steps, a falling one, or noise; defined for 0..most bytes."""
    kind = rng.randrange(4)
    if kind == 0:
        return random_affine(rng)
    if kind == 1:
        sizes = sorted(rng.sample(range(1, 40), 4))
        seconds = sorted(rng.choice([0.5, 1.0, 2.0, 4.0]) for _ in sizes)
        return TableCost(tuple(map(float, sizes)), tuple(seconds))
    if kind == 2:
        return Lookup([5.0 / (1 + m) for m in range(most + 1)])
    return Lookup([float(rng.randint(0, 4)) for _ in range(most + 1)])


def instances(seed: int, count: int, *, longest: int = 8) -> Iterator[tuple[Stream, Cost]]:
    rng = random.Random(seed)
    for _ in range(count):
        stream = random_stream(rng, rng.randint(1, longest))
        yield stream, random_cost(rng, sum(stream.sizes))


def made_profile(
    sizes: list[int],
    backward: list[float],
    *,
    forward: list[float] | None = None,
    dtypes: list[str] | None = None,
    late: float = 0.0,
) -> Profile:
    """One layer with one tensor for each size, given in READY order; every gradient `late` seconds after its layer."""
    n = len(sizes)
    forward = forward or [t / 2 for t in backward]
    layers = tuple(
        Layer(
            name=f"layer{i}",
            type="Linear",
            parameter_bytes=sizes[n - 1 - i],
            activation_bytes=4,
            times=(LayerTime(batch=8, forward=exactly(forward[n - 1 - i]), backward=exactly(backward[n - 1 - i])),),
        )
        for i in range(n)
    )
    tensors = tuple(
        ParameterTensor(
            name=f"layer{n - 1 - j}.weight",
            layer=n - 1 - j,
            bytes=sizes[j],
            dtype=dtypes[j] if dtypes else "float32",
            ready=ready + late,
        )
        for j, ready in enumerate(itertools.accumulate(backward))
    )
    return Profile(name="made", device="none", batch=8, layers=layers, tensors=tensors)


def made_network(latency: float, seconds_per_byte: float, *, ranks: int = 4, name: str = "made") -> Network:
    fit = Fit(latency=latency, seconds_per_byte=seconds_per_byte, error=0.0)
    return Network(
        name=name, ranks=ranks, source="a test", measured=False, collectives={"all_reduce": Collective(fit=fit)}
    )
