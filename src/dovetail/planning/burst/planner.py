"""Burst parallelism: how many devices each layer gets, for a global batch that stays fixed.

    BurstPlanner(profile, cost, devices=8) one job on up to 8 devices
        .front()                         every plan that no other beats in both time and device-time
        .fastest(amplification=1.25)     the fastest within a limit on total device-time
        .cheapest(iteration=0.015)       the least device-time at a speed
    rules.by_name(planner, "dp:8")         a baseline by name

The iteration takes   Σ_layers compute(⌈B/g⌉) + sync(g)   +   Σ_edges reshard(g before, g after)
and occupies          Σ_layers g·(compute + sync)          +   Σ_edges g after · reshard      device-seconds.

Layers run one after the other, those of different branches too: a branch that waits for its turn costs nothing, and no
two layers are ever at work at once. Layer v runs on ranks 0 .. g−1.

Which g are tried. Among all g with the same local batch ⌈B/g⌉ only the smallest matters, and there are at most 2√B of
those: computing depends on the local batch alone, an all-reduce over fewer devices is assumed to be no slower, and
re-sharding depends on the local batches and is nothing where the device counts agree. Replace every g of a plan by the
smallest with its local batch: no term grows. So the front over these few is the front over all g ≤ G.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from dovetail.core.burst_plan import BurstPlan, BurstPrediction
from dovetail.core.errors import Error
from dovetail.core.network import FloatArray
from dovetail.core.profile import Profile

from . import limited
from .cost import BurstCost, local_batch
from .graph import Decomposition, decompose
from .pareto import BITS, IntArray, Problem, chosen, label_tables, ticks

MOST_CHOICES = 360
"""Limit on the device counts: pairs of choices are numbered in the bits that a sum leaves of 63."""


def useful_counts(batch: int, devices: int) -> tuple[int, ...]:
    """Device counts up to `devices` of which none has the local batch of a smaller one, ascending."""
    if batch < 1 or devices < 1:
        raise Error(f"batch and devices: expected at least 1, got {batch} and {devices}")
    found = []
    samples, count = batch + 1, 1
    while count <= devices and samples > 1:
        samples = -(-batch // count)
        found.append(count)
        # The smallest count with fewer samples than these.
        count = -(-batch // (samples - 1)) if samples > 1 else devices + 1
    return tuple(found)


@dataclass(frozen=True)
class BurstPlanner:
    """One job on up to `devices` devices.

    `counts` are the device counts to choose from, by default all that can be useful. `memory` is the most that a rank
    may need, in bytes: rank 0 runs every layer, so its need is the sum over all of them. `network` is a name for the
    plans to carry.
    """

    profile: Profile
    cost: BurstCost
    devices: int
    counts: tuple[int, ...] = ()
    memory: int | None = None
    network: str = "links"

    def front(self) -> list[BurstPlan]:
        """Every plan that no other beats or equals in time and device-time, the fastest first; of equals one.

        The number of such plans grows quickly with layers and choices: for large graphs ask for plans under limits.
        """
        problem = self.problem
        spare = limited.memory_left(problem)
        bound = None if spare is None else lambda table, ls: ls.memory <= spare[table][ls.first, ls.last]
        tables = label_tables(problem, bound=bound)
        final = tables[-1]
        order = np.lexsort((final.work, final.time))
        least, kept = np.inf, []
        for label in order.tolist():  # with memory as a third cost a plan may be there for its memory alone
            if final.work[label] < least:
                least = final.work[label]
                kept.append(label)
        if not kept:
            raise self._no_plan("")
        return [self.predict(self._counts(chosen(problem, tables, label)), policy="front") for label in kept]

    def fastest(self, *, amplification: float | None = None) -> BurstPlan:
        """The least time with at most `amplification` times the device-time that one device needs for computing."""
        if amplification is not None and not amplification >= 1:
            raise Error(f"amplification: expected at least 1, got {amplification:g}")
        limit = None if amplification is None else self._ticks(amplification * self.one_device)
        found = limited.best(self.problem, "time", limit)
        if found is None:
            raise self._no_plan(f" with {amplification:g} times the device-time of one device" if limit else "")
        name = "fastest" if amplification is None else f"fastest:{amplification:g}"
        return self.predict(self._counts(found), policy=name)

    def cheapest(self, *, iteration: float | None = None) -> BurstPlan:
        """The least device-time with an iteration of at most `iteration` seconds."""
        if iteration is not None and not iteration >= 0:
            raise Error(f"iteration: expected seconds, at least 0, got {iteration}")
        limit = None if iteration is None else self._ticks(iteration)
        found = limited.best(self.problem, "work", limit)
        if found is None:
            raise self._no_plan(f" within {iteration:g} s: the fastest takes {self.fastest().prediction.iteration:g} s")
        name = "cheapest" if iteration is None else f"cheapest:{iteration:g}"
        return self.predict(self._counts(found), policy=name)

    def tradeoff(self, amplifications: Sequence[float] = (1, 1.1, 1.25, 1.5, 2, 3, 4)) -> list[BurstPlan]:
        """Points of the front: the fastest plan, and the fastest under each limit that takes something away."""
        plans = [self.fastest()]
        for limit in sorted(amplifications, reverse=True):
            if limit < plans[-1].prediction.amplification:
                try:
                    plans.append(self.fastest(amplification=limit))
                except Error:  # memory does not allow so little device-time: nor any less
                    break
        return plans

    def predict(self, counts: Sequence[int], *, policy: str = "given") -> BurstPlan:
        """The plan with these device counts, one per layer, as the cost model predicts it."""
        layers = self.profile.layers
        if len(counts) != len(layers) or not all(1 <= g <= self.devices for g in counts):
            raise Error(
                f"counts: expected one of 1 to {self.devices} devices for each of {len(layers)} layers, got "
                f"{list(counts)}"
            )
        known = self.choices if set(counts) <= set(self.choices) else sorted(set(counts))
        seconds, memories = self._stages if known is self.choices else self._stages_on(known)
        at = {g: k for k, g in enumerate(known)}
        time = work = memory = 0.0
        for v, g in enumerate(counts):
            stage = float(seconds[v][at[g]])
            time, work, memory = time + stage, work + g * stage, memory + float(memories[v][at[g]])
        for u, v in self.edges:
            if counts[u] != counts[v]:
                moving = float(self.cost.reshard(u, counts[u], counts[v]))
                time, work = time + moving, work + counts[v] * moving
        return BurstPlan(
            policy=policy,
            profile=self.profile.name,
            network=self.network,
            devices=self.devices,
            batch=self.cost.batch,
            layers=tuple(layer.name for layer in layers),
            counts=tuple(counts),
            prediction=BurstPrediction(
                iteration=time, device_time=work, one_device=self.one_device, memory=int(memory)
            ),
        )

    @cached_property
    def graph(self) -> Decomposition:
        names = [layer.name for layer in self.profile.layers]
        return decompose(len(names), self.profile.edges, names=names)

    @property
    def edges(self) -> list[tuple[int, int]]:
        """Between layers, as (from, to)."""
        return [(u, v) for u, v in self.graph.edges if max(u, v) < self.graph.layers]

    @cached_property
    def one_device(self) -> float:
        """Seconds of computing the global batch on one device."""
        return float(sum(self.cost.compute(v, self.cost.batch) for v in range(len(self.profile.layers))))

    @cached_property
    def choices(self) -> tuple[int, ...]:
        """The device counts that plans are made of, ascending."""
        found = self.counts or useful_counts(self.cost.batch, self.devices)
        if min(found) < 1 or max(found) > self.devices or any(a >= b for a, b in pairwise(found)):
            raise Error(f"counts: expected 1 to {self.devices} devices, ascending, got {list(found)}")
        if len(found) > MOST_CHOICES:
            raise Error(
                f"a global batch of {self.cost.batch:,} on {self.devices:,} devices leaves {len(found)} device counts "
                f"to choose from, expected at most {MOST_CHOICES}: plan for fewer devices, or give `counts`"
            )
        return found

    @cached_property
    def _stages(self) -> tuple[list[FloatArray], list[FloatArray]]:
        """For each layer its seconds (computing and gradients) and its bytes, for every choice."""
        return self._stages_on(self.choices)

    def _stages_on(self, counts: Sequence[int]) -> tuple[list[FloatArray], list[FloatArray]]:
        samples, layers = local_batch(self.cost.batch, counts), range(len(self.profile.layers))
        seconds = [self.cost.compute(v, samples) + self.cost.sync(v, counts) for v in layers]
        return seconds, [self.cost.memory(v, samples) for v in layers]

    @cached_property
    def problem(self) -> Problem:
        """All costs of all choices, in ticks."""
        graph, counts = self.graph, np.array(self.choices, dtype=np.int64)
        time, memory = self._stages
        moving = {(u, v): self.cost.reshard(u, counts[:, None], counts[None, :]) for u, v in self.edges}
        longest = sum(float((t * counts).max()) for t in time)
        longest += sum(float((t * counts).max()) for t in moving.values())
        if not (np.isfinite(longest) and min(float(t.min()) for t in [*time, *moving.values()]) >= 0):
            raise Error("cost model: expected finite times of at least 0")
        # A power of two, so that whole numbers of any unit stay whole; every sum is below 2^(BITS − 1) ticks.
        tick = 2.0 ** (math.frexp(longest)[1] - BITS + 1)
        one = np.zeros(1, dtype=np.int64)
        edge_time = []
        for u, v in graph.edges:
            shape = (len(counts) if u < graph.layers else 1, len(counts) if v < graph.layers else 1)
            edge_time.append(ticks(moving[u, v], tick) if (u, v) in moving else np.zeros(shape, dtype=np.int64))
        node_time = [ticks(t, tick) for t in time]
        made = Problem(
            graph=graph,
            counts=(*[counts] * graph.layers, one + 1, one + 1),
            time=(*node_time, one, one),
            work=(*(t * counts for t in node_time), one, one),
            edge_time=tuple(edge_time),
            edge_work=tuple(
                t * (counts if v < graph.layers else one) for t, (_, v) in zip(edge_time, graph.edges, strict=True)
            ),
            memory=(*(m.astype(np.int64) for m in memory), one, one),
            most_memory=None if self.memory is None or sum(m.max() for m in memory) <= self.memory else self.memory,
            tick=tick,
        )
        return made if made.most_memory is None else self._fitting(made, made.most_memory)

    def _fitting(self, problem: Problem, most: int) -> Problem:
        """The problem without choices that do not fit even if all other layers need the least memory."""
        least = [int(m.min()) for m in problem.memory]
        kept: list[IntArray] = [
            np.flatnonzero(m <= most - sum(least) + own) for m, own in zip(problem.memory, least, strict=True)
        ]
        if any(len(k) == 0 for k in kept):
            raise Error(f"{self._no_plan('')}: rank 0, which runs every layer, needs at least {sum(least):,}")
        return problem.restricted(kept)

    def _counts(self, choices: list[int]) -> list[int]:
        return [int(self.problem.counts[layer][k]) for layer, k in enumerate(choices)]

    def _ticks(self, seconds: float) -> int:
        # Every cost was rounded to the nearest tick: a sum may be off by half a tick for each, times its devices.
        slack = (len(self.problem.time) + len(self.problem.edge_time)) * (self.devices + 1)
        return int(min(seconds / self.problem.tick, 2.0 ** (BITS + 1))) + slack

    def _no_plan(self, what: str) -> Error:
        memory = f" in {self.memory:,} bytes per rank" if self.memory is not None else ""
        return Error(
            f"no plan for {self.profile.name!r} at a global batch of {self.cost.batch} on {self.devices} "
            f"devices{what}{memory}"
        )
