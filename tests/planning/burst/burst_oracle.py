"""Burst costs made up at random, and every plan there is."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from dovetail.core.network import FloatArray
from dovetail.planning.burst.cost import local_batch
from dovetail.planning.burst.planner import BurstPlanner
from tests.planning.merge.oracle import made_profile

Point = tuple[float, float]


@dataclass(frozen=True)
class MadeCost:
    """Small whole numbers, so that ties are common and sums exact: tables by layer and local batch or devices."""

    batch: int
    computing: list[FloatArray]
    syncing: list[FloatArray]
    moving: list[FloatArray]
    needing: list[FloatArray]

    def compute(self, layer: int, samples: npt.ArrayLike, /) -> FloatArray:
        return self.computing[layer][np.asarray(samples)]  # type: ignore[no-any-return]

    def forward(self, layer: int, samples: npt.ArrayLike, /) -> FloatArray:
        return self.compute(layer, samples) / 4

    def sync(self, layer: int, devices: npt.ArrayLike, /) -> FloatArray:
        return self.syncing[layer][np.asarray(devices)]  # type: ignore[no-any-return]

    def reshard(self, layer: int, before: npt.ArrayLike, after: npt.ArrayLike, /) -> FloatArray:
        a, b = local_batch(self.batch, before), local_batch(self.batch, after)
        return np.where(np.asarray(before) == np.asarray(after), 0.0, self.moving[layer][a, b])

    def memory(self, layer: int, samples: npt.ArrayLike, /) -> FloatArray:
        return self.needing[layer][np.asarray(samples)]  # type: ignore[no-any-return]


def made_cost(rng: random.Random, layers: int, batch: int, devices: int, *, largest: int = 20) -> MadeCost:
    """Computing falls with the local batch in most cases only; an all-reduce never gets cheaper with more devices."""

    def numbers(count: int, top: int) -> FloatArray:
        return np.array([rng.randint(0, top) for _ in range(count)], dtype=np.float64)

    return MadeCost(
        batch,
        [rng.randint(0, 3) * np.arange(batch + 1) + numbers(batch + 1, largest) for _ in range(layers)],
        [np.array([0.0, 0.0, *np.sort(numbers(devices, largest // 2))]) for _ in range(layers)],
        [numbers((batch + 1) ** 2, largest // 2).reshape(batch + 1, batch + 1) for _ in range(layers)],
        [rng.randint(0, 5) * np.arange(batch + 1.0) + numbers(1, 9) for _ in range(layers)],
    )


def made_planner(
    rng: random.Random,
    layers: int,
    *,
    batch: int,
    devices: int,
    edges: list[tuple[int, int]] | None = None,
    counts: tuple[int, ...] = (),
    memory: int | None = None,
) -> BurstPlanner:
    profile = made_profile([4] * layers, [1.0] * layers)
    profile = msgspec.structs.replace(profile, edges=tuple(edges or ()))
    return BurstPlanner(profile, made_cost(rng, layers, batch, devices), devices, counts=counts, memory=memory)


def random_graph(rng: random.Random, layers: int) -> list[tuple[int, int]]:
    """Edges of a series-parallel graph, with nested forks and skips: every layer is put into an edge that was there.

    Either the edge is cut in two, or it stays beside the new way (a fork whose one branch is a skip, for now).
    """
    source, sink = -1, -2
    edges: list[tuple[int, int]] = [(source, sink)]
    for new in range(layers):
        u, v = edges[rng.randrange(len(edges))]
        if rng.random() < 0.6 or new == 0:
            edges.remove((u, v))
        edges += [(u, new), (new, v)]
    behind: dict[int, list[int]] = {}
    waits = dict.fromkeys(range(layers), 0)
    for u, v in edges:
        if v != sink and u != source:
            behind.setdefault(u, []).append(v)
            waits[v] += 1
    order: list[int] = []
    ready = [m for m in waits if not waits[m]]
    while ready:
        order.append(ready.pop(rng.randrange(len(ready))))
        for v in behind.get(order[-1], []):
            waits[v] -= 1
            if not waits[v]:
                ready.append(v)
    place = {layer: at for at, layer in enumerate(order)}
    return sorted({(place[u], place[v]) for u, v in edges if u != source and v != sink})


def all_plans(planner: BurstPlanner, counts: tuple[int, ...]) -> tuple[FloatArray, FloatArray, FloatArray]:
    """(time, device-time, memory) of every way to give the layers one of these counts each."""
    cost, n = planner.cost, len(planner.profile.layers)
    which = np.array(list(itertools.product(range(len(counts)), repeat=n)))
    g = np.array(counts)
    samples = -(-cost.batch // g)
    time, work, memory = np.zeros(len(which)), np.zeros(len(which)), np.zeros(len(which))
    for v in range(n):
        seconds = (cost.compute(v, samples) + cost.sync(v, g))[which[:, v]]
        time, work = time + seconds, work + g[which[:, v]] * seconds
        memory += cost.memory(v, samples)[which[:, v]]
    for u, v in planner.profile.edges or [(i, i + 1) for i in range(n - 1)]:
        seconds = cost.reshard(u, g[:, None], g[None, :])[which[:, u], which[:, v]]
        time, work = time + seconds, work + g[which[:, v]] * seconds
    return time, work, memory


def front_of(time: FloatArray, work: FloatArray) -> list[Point]:
    """Points that no other beats or equals in both, by ascending time."""
    found: list[Point] = []
    for t, w in sorted(set(zip(time.tolist(), work.tolist(), strict=True))):
        if not found or w < found[-1][1]:
            found.append((t, w))
    return found


def points(planner: BurstPlanner) -> list[Point]:
    return [(p.prediction.iteration, p.prediction.device_time) for p in planner.front()]
