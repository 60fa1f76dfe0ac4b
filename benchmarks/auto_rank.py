"""One rank of benchmarks/auto.py: measures the network, lets the planner choose, and runs the plan beside DDP.

The plan is executed by the runtime of its technique, as `dovetail plan --auto` says; it and torch's own
DistributedDataParallel take turns in the same processes. Ranks that a plan does not use are idle.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dovetail
from dovetail import measure
from dovetail.core.burst_plan import BurstPlan
from dovetail.core.files import Record
from dovetail.core.network import Network
from dovetail.core.plan import Plan
from dovetail.core.profile import Profile
from dovetail.emulate.burst_device import emulated_layers, first_column
from dovetail.emulate.channel import leave
from dovetail.emulate.launch import report
from dovetail.emulate.layered import layered
from dovetail.simulate import choose
from dovetail.train import agree
from dovetail.train.burst.module import Burst
from dovetail.train.data_parallel.wire.lane import functions
from dovetail.view import auto as view
from overlap_rank import plain, two_lines

DDP, AUTO = "ddp", "auto"


class AutoSpec(Record, frozen=True, kw_only=True):
    """What the ranks have to do."""

    profile: Profile
    """In layer order."""
    batch: int
    """Global batch."""
    rounds: int
    settle: int
    steps: int
    budget: float
    """Seconds for measuring the network."""


class AutoEntry(Record, frozen=True, kw_only=True):
    """Result of one contestant."""

    name: str
    technique: str
    devices: int
    pieces: int
    """Buckets, or stages of a burst plan."""
    predicted: float
    seconds: tuple[float, ...]
    """Iteration times of the slowest rank."""


class AutoOutcome(Record, frozen=True, kw_only=True):
    """Result of one run, from rank 0."""

    network: Network
    optimizer: float
    """Seconds of the optimiser on a rank's share, as measured."""
    planning: float
    """Seconds that planning took."""
    explained: tuple[str, ...]
    entries: tuple[AutoEntry, ...]


@dataclass
class Contestant:
    """One iteration, and what has to follow the last one."""

    iterate: Callable[[], None]
    drain: Callable[[], None]


def contest(spec: AutoSpec) -> Any:
    group, device = dist.group.WORLD, torch.device("cpu")
    assert group is not None
    network = measure.network(
        group,
        max_bytes=min(32 * 2**20, spec.profile.parameter_bytes),
        collectives=("all_reduce", "reduce_scatter", "all_gather", "all_to_all"),
        budget=spec.budget,
        name="emulated",
        emulated=True,
        via=functions(group),
    )
    optimizer = max(agree.largest([_updating(spec)], group, device))
    decision: Any = None
    if dist.get_rank() == 0:
        began = time.perf_counter()
        found = choose(spec.profile, network, devices=dist.get_world_size(), batch=spec.batch, optimizer=optimizer)
        chosen, default = found.chosen, found.baseline.plan
        assert isinstance(default, Plan), "the baseline is torch's DDP"
        base = len(default.buckets), found.baseline.score.iteration
        decision = (chosen.technique, chosen.devices, chosen.plan, chosen.score.iteration, base)
        decision += (time.perf_counter() - began, tuple(view.sentences(found)))
        print(*view.sentences(found), sep="\n", flush=True)
    technique, devices, plan, predicted, base, planning, explained = agree.from_first(decision, group, device)
    made = {DDP: _ddp(spec)}
    same = technique == "ddp" and devices == dist.get_world_size()
    if not same:
        made[AUTO] = _chosen(spec, technique, devices, plan)
    times = _turns(spec, made)
    pieces = len(plan.stages()) if isinstance(plan, BurstPlan) else len(plan.buckets)
    ours = times[DDP if same else AUTO]
    entries = [
        AutoEntry(name=name, technique=what, devices=number, pieces=parts, predicted=seconds, seconds=taken)
        for name, what, number, parts, seconds, taken in (
            (DDP, "ddp", dist.get_world_size(), *base, times[DDP]),
            (AUTO, technique, devices, pieces, predicted, ours),
        )
    ]
    return msgspec.to_builtins(
        AutoOutcome(
            network=network, optimizer=optimizer, planning=planning, explained=explained, entries=tuple(entries)
        )
    )


def _turns(spec: AutoSpec, made: dict[str, Contestant]) -> dict[str, tuple[float, ...]]:
    group = dist.group.WORLD
    assert group is not None
    times: dict[str, list[float]] = {name: [] for name in made}
    turns = random.Random(0)  # the same on all ranks
    for number in range(spec.rounds):
        for name in turns.sample(sorted(made), len(made)):
            dist.barrier()
            stamps = []
            for _ in range(spec.settle + spec.steps):
                stamps.append(time.perf_counter())
                made[name].iterate()
            stamps.append(time.perf_counter())
            made[name].drain()
            seconds = [b - a for a, b in itertools.pairwise(stamps)][spec.settle :]
            times[name] += agree.largest(seconds, group, torch.device("cpu"))
        if dist.get_rank() == 0:
            print(f"round {number + 1} of {spec.rounds}", flush=True)
    return {name: tuple(seconds) for name, seconds in times.items()}


def _nothing() -> None:
    pass


def _plain(model: torch.nn.Module) -> Contestant:
    return Contestant(plain(model, torch.full((1,), 1.0 + dist.get_rank())), _nothing)


def _ddp(spec: AutoSpec) -> Contestant:
    return _plain(TorchDDP(layered(spec.profile, batch=spec.batch // dist.get_world_size())))


def _overlapped(spec: AutoSpec, devices: int, plan: Plan | None, group: Any) -> tuple[Any, Contestant]:
    model: Any = dovetail.DistributedDataParallel(
        layered(spec.profile, batch=spec.batch // devices), overlap="forward", plan=plan, process_group=group
    )
    return model, Contestant(*two_lines(model, torch.full((1,), 1.0 + dist.get_rank())))


def _updating(spec: AutoSpec) -> float:
    """Seconds that the optimiser takes on this rank's share."""
    model, contestant = _overlapped(spec, dist.get_world_size(), None, None)
    for _ in range(3):
        contestant.iterate()
    contestant.drain()
    return float(model.exchange.updating)


def _chosen(spec: AutoSpec, technique: str, devices: int, plan: Any) -> Contestant:
    if isinstance(plan, BurstPlan):
        job = Burst(emulated_layers(spec.profile, plan.counts), plan, loss=first_column)
        x, y = torch.ones(spec.batch, 1), torch.zeros(spec.batch)

        def step() -> None:
            job.module.zero_grad(set_to_none=True)
            job.step(x, y)

        return Contestant(step, _nothing)
    group = None if devices == dist.get_world_size() else dist.new_group(list(range(devices)))
    if dist.get_rank() >= devices:
        return Contestant(_nothing, _nothing)
    if technique == "overlap":
        return _overlapped(spec, devices, plan, group)[1]
    local = layered(spec.profile, batch=spec.batch // devices)
    if devices == 1:
        return _plain(local)
    if technique == "ddp":
        return _plain(TorchDDP(local, process_group=group))
    assert technique == "merging", technique
    return _plain(dovetail.DistributedDataParallel(local, plan=plan, process_group=group))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    report(contest(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=AutoSpec)))
    leave()


if __name__ == "__main__":
    main()
