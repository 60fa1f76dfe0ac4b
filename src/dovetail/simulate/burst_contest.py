"""Burst plans side by side on emulated devices: real tensors, a real network, the same processes, turn by turn.

Every rank emulates one device. First the ranks measure their network: all-reduce and all-to-all among all of them and
among the first 2, 4, … of them. Rank 0 plans; then the plans take turns, in an order shuffled for every round.
`run` is the caller's side; `python -m dovetail.simulate.burst_contest SPEC` is one rank's.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dovetail.core import store
from dovetail.core.burst import BurstPlan
from dovetail.core.network import Cost, FloatArray, Network
from dovetail.core.profile import Profile
from dovetail.core.timeline import Timeline
from dovetail.planning.burst import BurstPlanner
from dovetail.planning.burst_cost import NetworkLinks, ProfileCost
from dovetail.planning.burst_overlap import fastest_overlapped

from .burst import simulate_burst
from .contest import Setting


class Spec(store.Record, frozen=True, kw_only=True):
    """What the ranks need to know."""

    profile: Profile
    batch: int
    policies: tuple[str, ...]
    """"dp:8" and other baselines by name, "burst" for the fastest plan, "burst:1.25" under a limit."""
    bucket_bytes: float
    rounds: int
    steps: int
    latency: float | None
    network_seconds: float


class Entry(store.Record, frozen=True, kw_only=True):
    """How one plan did."""

    policy: str
    plan: BurstPlan
    predicted: Timeline
    seconds: tuple[float, ...]
    """Iteration times of the slowest rank."""
    moved: int
    """Bytes that all ranks sent in re-sharding in one step, as counted."""
    predicted_moved: int
    idle: float
    """Device-seconds per iteration in which a device of the job neither computed nor communicated, as recorded."""


class Outcome(store.Record, frozen=True, kw_only=True):
    networks: dict[int, Network]
    """As measured, by number of ranks."""
    entries: tuple[Entry, ...]

    def entry(self, policy: str) -> Entry:
        return next(e for e in self.entries if e.policy == policy)


@dataclass(frozen=True)
class MeasuredLinks:
    """Communication as it was measured among each number of ranks; others by the ring law from the widest."""

    networks: Mapping[int, Network]

    def all_reduce(self, nbytes: float, ranks: npt.ArrayLike, /) -> FloatArray:
        n = np.asarray(ranks, dtype=np.int64)
        each = [float(self.reduction(int(m))(nbytes)) if m > 1 else 0.0 for m in n.ravel()]
        return np.array(each).reshape(n.shape)

    def reduction(self, ranks: int, /) -> Cost:
        return self._at(ranks).reduction(ranks)

    def move(self, nbytes: npt.ArrayLike, ranks: npt.ArrayLike, /) -> FloatArray:
        amounts, n = np.broadcast_arrays(np.asarray(nbytes, dtype=np.float64), np.asarray(ranks, dtype=np.int64))
        each = [float(self._at(int(m)).move(b, m)) for b, m in zip(amounts.ravel(), n.ravel(), strict=True)]
        return np.array(each).reshape(n.shape)

    def _at(self, ranks: int) -> NetworkLinks:
        return NetworkLinks(self.networks.get(ranks) or self.networks[max(self.networks)])


def run(
    profile: Profile,
    policies: list[str],
    setting: Setting,
    *,
    batch: int,
    bucket_bytes: float,
    rounds: int = 3,
    steps: int = 3,
    network_seconds: float = 12.0,
    timeout: float = 900,
    on_line: Callable[[str], None] | None = None,
) -> Outcome:
    """Lets the plans of `policies` take turns; lines of progress go to `on_line`.

    `network_seconds` is the time for measuring the network, for each number of ranks.
    """
    from .launch import launch
    from .shaped import shaped

    spec = Spec(
        profile=profile,
        batch=batch,
        policies=tuple(policies),
        bucket_bytes=bucket_bytes,
        rounds=rounds,
        steps=steps,
        latency=setting.latency,
        network_seconds=network_seconds,
    )
    with (
        tempfile.TemporaryDirectory(prefix="dovetail-burst-") as folder,
        shaped(setting.ranks, rate=setting.rate, burst="32kb") if setting.rate else nullcontext() as network,
    ):
        path = Path(folder, "spec.json")
        path.write_bytes(msgspec.json.encode(spec))
        results = launch(
            ["-m", "dovetail.simulate.burst_contest", str(path)],
            ranks=setting.ranks,
            network=network,
            timeout=timeout,
            on_line=lambda rank, line: on_line(line) if on_line and rank == 0 else None,
        )
    return msgspec.convert(results[0].report, Outcome, strict=False)


def make_plan(spec: Spec, policy: str, links: MeasuredLinks, devices: int) -> BurstPlan:
    cost = ProfileCost(spec.profile, spec.batch, wires=links)
    planner = BurstPlanner(spec.profile, cost, devices, network="measured")
    kind, _, limit = policy.partition(":")
    if kind == "burst":
        return fastest_overlapped(planner, amplification=float(limit) if limit else None)
    return planner.policy(policy)


def _rank(spec: Spec) -> Any:
    import torch
    import torch.distributed as dist

    from dovetail import measure
    from dovetail.train import agree
    from dovetail.train.burst import Burst

    from .burst_device import emulated_layers, first_column
    from .channel import leave, register

    torch.set_num_threads(1)
    dist.init_process_group("gloo" if spec.latency is None else register(latency=spec.latency))
    rank, world, device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    group = dist.group.WORLD
    assert group is not None
    largest = max(64 * 1024, spec.profile.parameter_bytes)
    networks: dict[int, Network] = {}
    for size in [2**i for i in range(1, world.bit_length()) if 2**i <= world]:
        among = dist.new_group(list(range(size)))
        if rank < size:
            networks[size] = measure.network(
                among,
                max_bytes=largest,
                collectives=("all_reduce", "all_to_all"),
                budget=spec.network_seconds,
                name=f"emulated-{size}",
                emulated=True,
            )
        dist.barrier()
    networks = agree.from_first(networks, group, device)
    links = MeasuredLinks(networks)
    _say(f"network measured among {', '.join(map(str, networks))} ranks")
    plans: dict[str, BurstPlan] = agree.from_first(
        {p: make_plan(spec, p, links, world) for p in spec.policies} if rank == 0 else {}, group, device
    )
    jobs = {
        name: Burst(emulated_layers(spec.profile), plan, loss=first_column, bucket_bytes=spec.bucket_bytes)
        for name, plan in plans.items()
    }
    x, y = torch.ones(spec.batch, 1), torch.zeros(spec.batch)

    def step(name: str) -> float:
        jobs[name].module.zero_grad(set_to_none=True)
        dist.barrier()
        start = time.perf_counter()
        jobs[name].step(x, y)
        return time.perf_counter() - start

    times: dict[str, list[float]] = {name: [] for name in jobs}
    rng = random.Random(0)  # the same on all ranks, so all take the same turns
    for turn in range(spec.rounds):
        for name in rng.sample(sorted(jobs), len(jobs)):
            step(name)
            times[name] += agree.largest([step(name) for _ in range(spec.steps)], group, device)
        _say(f"round {turn + 1} of {spec.rounds}")
    entries = []
    for name, job in jobs.items():
        before = job.moved_bytes
        with job.record() as recording:
            took = step(name)
        gaps = sum(s.duration for s in recording.timeline(emulated=True).spans if s.kind == "idle")
        gaps += agree.largest([took], group, device)[0] - took  # a rank that is not needed any more has left already
        summed = torch.tensor([float(job.moved_bytes - before), gaps], dtype=torch.float64)
        dist.all_reduce(summed)
        entries.append(
            Entry(
                policy=name,
                plan=plans[name],
                predicted=simulate_burst(plans[name], spec.profile, links, bucket_bytes=spec.bucket_bytes),
                seconds=tuple(times[name]),
                moved=int(summed[0]),
                predicted_moved=job.predicted_moved_bytes(spec.batch),
                idle=float(summed[1]),
            )
        )
    leave()
    return msgspec.to_builtins(Outcome(networks=networks, entries=tuple(entries)), str_keys=True)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    from dovetail.simulate.launch import report

    report(_rank(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Spec)))
