"""Bucketings side by side on emulated devices: real gradients, a real network, the same processes, turn by turn.

Every rank emulates the profile on one DDP module. First dovetail plans for it, as it would for a user. Then all
contestants take turns on that same module, in an order that is shuffled for every round; each turn replaces the
reducer, lets it settle and takes the time of a few iterations. What a contestant gets is what torch's DDP would do with
the same caps; dovetail's turn uses what dovetail has kept. Contestants with the very same buckets are one program under
several names: they take one turn and share its times, so noise cannot tell them apart.

`run` is the caller's side; `python -m dovetail.emulate.contest SPEC` is one rank's. Other contests (benchmarks/) use
`hold`, `join`, `say` and `alike` as well.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dovetail.core import files
from dovetail.core.network import Network
from dovetail.core.plan import Plan
from dovetail.core.profile import Profile
from dovetail.core.scratch import scratch
from dovetail.core.timeline import Span, Timeline

if TYPE_CHECKING:
    import torch.distributed as dist

DOVETAIL = "dovetail"
"""The contestant that plans for itself."""


class ContestSpec(files.Record, frozen=True, kw_only=True):
    """What the ranks are to do."""

    profile: Profile
    policies: tuple[str, ...]
    rounds: int
    settle: int
    """Iterations of every turn that are not counted, after the reducer was replaced."""
    iterations: int
    """Iterations of every turn that are counted."""
    seed: int
    latency: float | None
    """Seconds that every all-reduce waits in addition, on an in-order channel; None for gloo as it is."""
    tuning: dict[str, int | float]


class ContestEntry(files.Record, frozen=True, kw_only=True):
    """How one contestant did."""

    policy: str
    buckets: int
    predicted: float
    """Seconds of an iteration, as is `lower_bound`."""
    lower_bound: float
    seconds: tuple[float, ...]
    """Iteration times of the slowest rank."""
    same_as: tuple[str, ...] = ()
    """Contestants with the very same buckets, which share these times."""


class ContestOutcome(files.Record, frozen=True, kw_only=True):
    """A whole contest."""

    network: Network
    """The network as it was measured among the ranks before the contest."""
    entries: tuple[ContestEntry, ...]
    kept: Plan | None
    """dovetail's plan; None where it kept torch's own buckets."""
    explained: str
    """dovetail's report on how it planned."""
    tuning_steps: int
    timelines: dict[str, Timeline]
    """One recorded iteration of the first rank, for torch's default and for dovetail."""

    def entry(self, policy: str) -> ContestEntry:
        return next(e for e in self.entries if e.policy == policy)


@dataclass(frozen=True)
class EmulatedCluster:
    """Where a contest takes place: ranks as processes, joined by links of limited rate."""

    ranks: int = 4
    rate: str | None = "1gbit"
    """Rate of every rank's link, in both directions; None for loopback, which has no limit."""
    latency: float | None = None
    """Seconds that every all-reduce waits in addition, on an in-order channel; None for gloo as it is."""
    burst: str = "256kb"
    """Bytes that a link may send at once after a pause (tbf's burst)."""
    in_flight: int | None = None
    """Most bytes of a connection that are sent and not acknowledged; None for the system's own limit."""


def run(
    profile: Profile,
    policies: list[str],
    cluster: EmulatedCluster,
    *,
    rounds: int = 3,
    settle: int = 2,
    iterations: int = 3,
    seed: int = 0,
    tuning: dict[str, int | float] | None = None,
    timeout: float = 1800,
    on_line: Callable[[str], None] | None = None,
) -> ContestOutcome:
    """Lets `policies` and dovetail compete for `profile`; lines of progress go to `on_line`."""
    spec = ContestSpec(
        profile=profile,
        policies=tuple(policies),
        rounds=rounds,
        settle=settle,
        iterations=iterations,
        seed=seed,
        latency=cluster.latency,
        tuning=tuning or {},
    )
    found = hold(["-m", __name__], spec, cluster, timeout=timeout, on_line=on_line)
    return msgspec.convert(found, ContestOutcome)


def hold(
    program: list[str],
    spec: files.Record,
    cluster: EmulatedCluster,
    *,
    timeout: float,
    on_line: Callable[[str], None] | None,
) -> Any:
    """Runs `python *program SPEC` on every rank of the cluster and returns what the first one reports."""
    from .launch import launch
    from .shaped_network import shaped

    with (
        scratch("contest") as folder,
        shaped(cluster.ranks, rate=cluster.rate, burst=cluster.burst, in_flight=cluster.in_flight)
        if cluster.rate
        else nullcontext() as network,
    ):
        path = folder / "spec.json"
        path.write_bytes(msgspec.json.encode(spec))
        results = launch(
            [*program, str(path)],
            ranks=cluster.ranks,
            network=network,
            timeout=timeout,
            on_line=lambda rank, line: on_line(line) if on_line and rank == 0 else None,
        )
    return results[0].report


def join(latency: float | None) -> dist.ProcessGroup:
    """One rank's side: the process group of all ranks on the emulated channel. `channel.leave` destroys it."""
    import torch
    import torch.distributed as dist

    from .channel import register

    torch.set_num_threads(1)
    dist.init_process_group("gloo" if latency is None else register(latency=latency))
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def say(line: str) -> None:
    """A line of progress, for `on_line` of the caller."""
    print(line, flush=True)


def alike(programs: Mapping[str, Hashable]) -> list[list[str]]:
    """Contestants in groups of equal programs: those of a group take one turn and share its times."""
    groups: dict[Hashable, list[str]] = {}
    for name, program in programs.items():
        groups.setdefault(program, []).append(name)
    return list(groups.values())


def _rank(spec: ContestSpec) -> Any:
    import torch

    from dovetail import measure, planning
    from dovetail.train import agree
    from dovetail.train.data_parallel import reducer
    from dovetail.train.data_parallel.module import DistributedDataParallel
    from dovetail.train.data_parallel.observe import SETTLE
    from dovetail.train.data_parallel.tuning.trials import Tuning

    from .channel import leave
    from .device import emulated

    group, device = join(spec.latency), torch.device("cpu")
    x = torch.full((1,), 1.0 + group.rank())
    network = measure.network(
        group,
        max_bytes=min(64 * 2**20, spec.profile.parameter_bytes),
        collectives=("all_reduce",),
        budget=10.0,
        name="emulated",
        emulated=True,
    )
    say(f"network: {_fit(network)}")
    model = DistributedDataParallel(emulated(spec.profile), tuning=Tuning(**spec.tuning))  # type: ignore[arg-type]
    baseline = reducer.current(model)

    def iterate() -> float:
        model.zero_grad(set_to_none=True)
        start = time.perf_counter()
        model(x).backward()
        return time.perf_counter() - start

    while model.report.state in ("measuring", "trying"):
        iterate()
    iterate()
    say(model.explain())
    report = model.report

    plans = agree.from_first(_plans(spec, network, group.size()), group, device)
    kept = agree.from_first(report.plan, group, device)
    configs = {name: reducer.planned(model, plan) for name, plan in plans.items()}
    configs[DOVETAIL] = baseline if kept is None else reducer.planned(model, kept)
    configs["ddp"] = baseline
    buckets = {name: len(plan.buckets) for name, plan in plans.items()}
    plans[DOVETAIL] = planning.predict(kept, spec.profile, network) if kept else plans["ddp"]
    buckets[DOVETAIL] = len(plans[DOVETAIL].buckets)
    # On one module equal bucket caps give equal buckets.
    groups = alike({name: tuple(found.config.per_bucket_bytes_caps) for name, found in configs.items()})
    times: dict[str, list[float]] = {names[0]: [] for names in groups}
    rng = random.Random(spec.seed)  # the same on all ranks, so all take the same turns
    for turn in range(spec.rounds):
        for name in rng.sample(sorted(times), len(times)):
            reducer.replace(model, configs[name])
            for _ in range(spec.settle):
                iterate()
            times[name] += agree.largest([iterate() for _ in range(spec.iterations)], group, device)
        say(f"round {turn + 1} of {spec.rounds}")
    recorded: dict[str, list[Timeline]] = {"ddp": [], DOVETAIL: []}
    for _ in range(2):
        for name, iterations in recorded.items():
            reducer.replace(model, configs[name])
            with model.record() as recording:
                for _ in range(SETTLE + 2):
                    iterate()
            iterations += _iterations(recording.timeline(emulated=True))
    timelines = {}
    for name, iterations in recorded.items():
        usual = statistics.median(next(times[names[0]] for names in groups if name in names))
        near = min(iterations, key=lambda t: abs(t.duration - usual))  # what is drawn is typical of what was measured
        timelines[name] = msgspec.structs.replace(near, name=name)
    outcome = ContestOutcome(
        network=network,
        entries=tuple(
            ContestEntry(
                policy=name,
                buckets=buckets[name],
                predicted=plans[name].prediction.iteration,
                lower_bound=plans[name].prediction.lower_bound,
                seconds=tuple(times[names[0]]),
                same_as=tuple(other for other in names if other != name),
            )
            for names in groups
            for name in names
        ),
        kept=kept,
        explained=str(report),
        tuning_steps=report.steps,
        timelines=timelines,
    )
    leave()
    return msgspec.to_builtins(outcome)


def _iterations(recorded: Timeline) -> list[Timeline]:
    """Recorded iterations one by one, each from zero on."""
    found: list[list[Span]] = []
    began = 0.0
    for span in recorded.spans:
        if span.kind == "forward":
            found.append([])
            began = span.start
        found[-1].append(msgspec.structs.replace(span, start=span.start - began, stop=span.stop - began))
    return [msgspec.structs.replace(recorded, spans=tuple(spans)) for spans in found]


def _plans(spec: ContestSpec, network: Network, workers: int) -> dict[str, Plan]:
    from dovetail import planning

    names = dict.fromkeys(["ddp", *spec.policies])
    return {name: planning.plan(spec.profile, network, workers=workers, policy=name) for name in names}


def _fit(network: Network) -> str:
    fit = network.collectives["all_reduce"].fit
    return f"all-reduce {fit.latency * 1e3:.2f} ms + {fit.seconds_per_byte * 1e9:.2f} ns/B (within {fit.error:.0%})"


if __name__ == "__main__":
    from .launch import report

    report(_rank(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=ContestSpec)))
