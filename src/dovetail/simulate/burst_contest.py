"""Burst plans side by side on emulated devices: real tensors, a real network, the same processes, turn by turn.

Every rank emulates one device. First the ranks measure their network: all-reduce and all-to-all among all of them and
among the first 2, 4, … of them. Rank 0 plans; then the plans take turns, in an order shuffled for every round.
`run` is the caller's side; `python -m dovetail.simulate.burst_contest SPEC` is one rank's.
"""

from __future__ import annotations

import functools
import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from .contest import Setting, hold

if TYPE_CHECKING:
    from dovetail.train.burst import Burst

DDP = "ddp"
"""The contestant that is torch's DistributedDataParallel, on all ranks."""


class Spec(store.Record, frozen=True, kw_only=True):
    """What the ranks need to know."""

    profile: Profile
    batch: int
    policies: tuple[str, ...]
    """"ddp" for torch's own, "dp:8" and other baselines by name, "burst" for the fastest, "burst:1.25" in a limit."""
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
    moved: int = 0
    """Bytes that all ranks sent in re-sharding in one step, as counted."""
    predicted_moved: int = 0
    idle: float | None = None
    """Device-seconds per iteration in which a device of the job neither computed nor communicated; None for DDP."""


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
    # Messages are small here: a link must not let many of them pass for nothing.
    setting = replace(setting, burst="32kb")
    return msgspec.convert(hold(__name__, spec, setting, timeout=timeout, on_line=on_line), Outcome, strict=False)


def make_plan(spec: Spec, policy: str, links: MeasuredLinks, devices: int) -> BurstPlan:
    cost = ProfileCost(spec.profile, spec.batch, wires=links)
    planner = BurstPlanner(spec.profile, cost, devices, network="measured")
    if policy == DDP:
        return planner.policy(f"dp:{devices}")
    kind, _, limit = policy.partition(":")
    if kind == "burst":
        return fastest_overlapped(planner, amplification=float(limit) if limit else None)
    return planner.policy(policy)


def _rank(spec: Spec) -> Any:
    import torch
    import torch.distributed as dist

    from dovetail.train import agree

    from .channel import leave, register

    torch.set_num_threads(1)
    dist.init_process_group("gloo" if spec.latency is None else register(latency=spec.latency))
    group, device = dist.group.WORLD, torch.device("cpu")
    assert group is not None
    links = MeasuredLinks(agree.from_first(_networks(spec), group, device))
    _say(f"network measured among {', '.join(map(str, links.networks))} ranks")
    made = {p: make_plan(spec, p, links, dist.get_world_size()) for p in spec.policies} if dist.get_rank() == 0 else {}
    plans: dict[str, BurstPlan] = agree.from_first(made, group, device)
    jobs, steps = _contestants(spec, plans)

    def timed(name: str) -> float:
        dist.barrier()
        start = time.perf_counter()
        steps[name]()
        return time.perf_counter() - start

    times: dict[str, list[float]] = {name: [] for name in plans}
    rng = random.Random(0)  # the same on all ranks, so all take the same turns
    for turn in range(spec.rounds):
        for name in rng.sample(sorted(plans), len(plans)):
            timed(name)
            times[name] += agree.largest([timed(name) for _ in range(spec.steps)], group, device)
        _say(f"round {turn + 1} of {spec.rounds}")
    entries = []
    for name, plan in plans.items():
        entry = Entry(
            policy=name,
            plan=plan,
            predicted=simulate_burst(plan, spec.profile, links, bucket_bytes=spec.bucket_bytes),
            seconds=tuple(times[name]),
        )
        if (job := jobs.get(name)) is not None:
            before = job.moved_bytes
            with job.record() as recording:
                took = timed(name)
            gaps = sum(s.duration for s in recording.timeline(emulated=True).spans if s.kind == "idle")
            gaps += agree.largest([took], group, device)[0] - took  # a rank that is needed no more has left already
            summed = torch.tensor([float(job.moved_bytes - before), gaps], dtype=torch.float64)
            dist.all_reduce(summed)
            entry = msgspec.structs.replace(
                entry,
                moved=int(summed[0]),
                predicted_moved=job.predicted_moved_bytes(spec.batch),
                idle=float(summed[1]),
            )
        entries.append(entry)
    leave()
    return msgspec.to_builtins(Outcome(networks=dict(links.networks), entries=tuple(entries)), str_keys=True)


def _networks(spec: Spec) -> dict[int, Network]:
    """What rank 0 is part of: all-reduce and all-to-all among the first 2, 4, … ranks. Every rank calls it."""
    import torch.distributed as dist

    from dovetail import measure

    found: dict[int, Network] = {}
    size = 2
    while size <= dist.get_world_size():
        among = dist.new_group(list(range(size)))
        if dist.get_rank() < size:
            found[size] = measure.network(
                among,
                max_bytes=max(64 * 1024, spec.profile.parameter_bytes),
                collectives=("all_reduce", "all_to_all"),
                budget=spec.network_seconds,
                name=f"emulated-{size}",
                emulated=True,
            )
        dist.barrier()
        size *= 2
    return found


def _contestants(
    spec: Spec, plans: Mapping[str, BurstPlan]
) -> tuple[dict[str, Burst], dict[str, Callable[[], object]]]:
    """(the burst jobs, one step of every contestant)."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from dovetail.train.burst import Burst

    from .burst_device import emulated_layers, first_column
    from .device import emulated

    jobs: dict[str, Burst] = {}
    steps: dict[str, Callable[[], object]] = {}
    x, y = torch.ones(spec.batch, 1), torch.zeros(spec.batch)

    def burst_step(job: Burst) -> None:
        job.module.zero_grad(set_to_none=True)
        job.step(x, y)

    def ddp_step(model: DistributedDataParallel) -> None:
        model.zero_grad(set_to_none=True)
        model(x[:1]).backward()

    for name, plan in plans.items():
        if name == DDP:
            local = emulated(spec.profile, batch=spec.batch // dist.get_world_size())
            model = DistributedDataParallel(local, bucket_cap_mb=spec.bucket_bytes / 2**20)
            steps[name] = functools.partial(ddp_step, model)
        else:
            layers = emulated_layers(spec.profile)
            jobs[name] = Burst(layers, plan, loss=first_column, bucket_bytes=spec.bucket_bytes)
            steps[name] = functools.partial(burst_step, jobs[name])
    return jobs, steps


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    from dovetail.simulate.launch import report

    report(_rank(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Spec)))
