"""Burst plans side by side on emulated devices: real tensors, a real network, the same processes, turn by turn.

Every rank emulates one device. First the ranks measure what communication costs them: all-reduces among all of them and
among the first 2, 4, … of them, and re-sharding between each two of these sets. Rank 0 plans; then the plans take
turns, in an order shuffled for every round. Links are measured again after every round, since many ranks on few cores
have good minutes and bad ones: plans are made by the first measurement, predictions by all of them. Policies that
choose the very same devices are one program under several names: they take one turn and share its times. At the end
each plan runs three more iterations, which are recorded.

`run` is the caller's side (benchmarks/burst_run.py); `python benchmarks/burst_contest.py SPEC` is one rank's.
"""

from __future__ import annotations

import functools
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dovetail.core import files
from dovetail.core.burst_plan import BurstPlan
from dovetail.core.network import Collective, Network
from dovetail.core.profile import Profile
from dovetail.core.sample_layout import parts
from dovetail.core.timeline import Span, Timeline, idle_gaps
from dovetail.emulate.contest import EmulatedCluster, alike, hold, join, say
from dovetail.emulate.shaped_network import bits_per_second
from dovetail.planning.burst import rules
from dovetail.planning.burst.cost import MeasuredLinks, ProfileCost
from dovetail.planning.burst.overlap import candidates
from dovetail.planning.burst.planner import BurstPlanner
from dovetail.simulate.burst import simulate_burst

if TYPE_CHECKING:
    from dovetail.train.burst.module import Burst

DDP = "ddp"
"""The contestant that is torch's DistributedDataParallel, on all ranks and with the buckets of the burst executor."""
QUEUED = 0.02
"""Most data of a connection that is sent and not acknowledged, in seconds of the link's rate: many round trips, and no
long queue before the data of other connections."""
RECORDED = 3
"""Iterations, of which the one of median duration is kept."""


class BurstSpec(files.Record, frozen=True, kw_only=True):
    """What the ranks are to do."""

    profile: Profile
    batch: int
    policies: tuple[str, ...]
    """"ddp" for torch's own, "dp:8" and other baselines by name, "best-dp" for the number of devices on which data
    parallelism is predicted to be fastest, "burst" for the fastest plan, "burst:1.25" in a limit."""
    bucket_bytes: float
    rounds: int
    iterations: int
    """Iterations of every turn that are counted; one more before them is not."""
    latency: float | None
    """Seconds that every all-reduce waits in addition; None for gloo as it is."""
    network_seconds: float
    """Time for measuring what communication costs."""


class BurstEntry(files.Record, frozen=True, kw_only=True):
    """How one plan did."""

    policy: str
    plan: BurstPlan
    predicted: Timeline
    predicted_before: float
    """Seconds of an iteration, predicted from what was measured before the first round alone."""
    seconds: tuple[float, ...]
    """Iteration times of the slowest rank."""
    same_as: tuple[str, ...] = ()
    """Policies that chose the very same devices, and share these times."""
    recorded: Timeline | None = None
    """One iteration of all ranks; None for DDP."""
    moved: int = 0
    """Bytes that all ranks sent in re-sharding in one iteration, as counted."""
    predicted_moved: int = 0

    @property
    def idle(self) -> float | None:
        """Device-seconds in which a device neither computed nor communicated, in the recorded iteration."""
        if self.recorded is None:
            return None
        return sum(s.duration for s in self.recorded.spans if s.kind == "idle")


class BurstOutcome(files.Record, frozen=True, kw_only=True):
    """A whole contest."""

    networks: dict[int, Network]
    """As measured, by number of ranks."""
    moves: dict[str, Collective]
    """Re-sharding as measured, by "ranks before-ranks after"."""
    crowded: dict[int, float]
    """How many times longer two all-reduces took at once than one after the other, by number of ranks."""
    entries: tuple[BurstEntry, ...]

    def entry(self, policy: str) -> BurstEntry:
        return next(e for e in self.entries if e.policy == policy)


def run(
    profile: Profile,
    policies: list[str],
    cluster: EmulatedCluster,
    *,
    batch: int,
    bucket_bytes: float,
    rounds: int = 3,
    iterations: int = 3,
    network_seconds: float = 30.0,
    timeout: float = 900,
    on_line: Callable[[str], None] | None = None,
) -> BurstOutcome:
    """Lets the plans of `policies` take turns; lines of progress go to `on_line`.

    `network_seconds` is the time for measuring what communication costs: half of it before the first round.
    """
    spec = BurstSpec(
        profile=profile,
        batch=batch,
        policies=tuple(policies),
        bucket_bytes=bucket_bytes,
        rounds=rounds,
        iterations=iterations,
        latency=cluster.latency,
        network_seconds=network_seconds,
    )
    # Messages are small here: a link must not let many of them pass for nothing, nor a large one keep them waiting.
    if cluster.rate is not None:
        cluster = replace(cluster, burst="8kb", in_flight=int(QUEUED * bits_per_second(cluster.rate) / 8))
    found = hold([str(Path(__file__).resolve())], spec, cluster, timeout=timeout, on_line=on_line)
    return msgspec.convert(found, BurstOutcome, strict=False)


def make_plan(spec: BurstSpec, policy: str, links: MeasuredLinks, devices: int) -> BurstPlan:
    """The plan of a policy. Plans are compared by the predicted timeline with the executor's buckets, and use only
    numbers of devices among which communication was measured."""

    def predicted(plan: BurstPlan) -> float:
        return simulate_burst(plan, spec.profile, links, bucket_bytes=spec.bucket_bytes).duration

    cost = ProfileCost(spec.profile, spec.batch, wires=links)
    planner = BurstPlanner(spec.profile, cost, devices, counts=tuple(sorted({1, *links.networks})), network="measured")
    if policy == DDP:
        return rules.by_name(planner, f"dp:{devices}")
    if policy == "best-dp":
        return min(rules.data_parallel(planner), key=predicted)
    kind, _, limit = policy.partition(":")
    if kind == "burst":
        return min(candidates(planner, amplification=float(limit) if limit else None), key=predicted)
    return rules.by_name(planner, policy)


def _rank(spec: BurstSpec) -> Any:
    import torch
    import torch.distributed as dist

    from dovetail.emulate.channel import leave
    from dovetail.train import agree
    from dovetail.train.burst.measurement import measure_links, together

    group, device = join(spec.latency), torch.device("cpu")
    layers = spec.profile.layers

    def measured(budget: float) -> MeasuredLinks:
        return measure_links(
            spec.batch,
            max_bytes=max(64 * 1024, *(int(2 * spec.bucket_bytes), *(layer.parameter_bytes for layer in layers))),
            max_moved=min(512 * 1024, spec.batch * max(layer.activation_bytes for layer in layers)),
            budget=budget,
            emulated=True,
        )

    links = measured(spec.network_seconds / 2)
    bouts = [links]
    say(f"links measured among {', '.join(map(str, links.networks))} ranks")
    made = {p: make_plan(spec, p, links, dist.get_world_size()) for p in spec.policies} if dist.get_rank() == 0 else {}
    plans: dict[str, BurstPlan] = agree.from_first(made, group, device)
    groups = alike({name: (name == DDP, *plan.counts) for name, plan in plans.items()})
    jobs, iterate = _contestants(spec, {names[0]: plans[names[0]] for names in groups})
    # Python's collector would walk through all of torch in every process at the same iteration, on two cores.
    gc.collect()
    gc.freeze()

    def timed(name: str) -> float:
        dist.barrier()
        start = time.perf_counter()
        iterate[name]()
        return time.perf_counter() - start

    times: dict[str, list[float]] = {name: [] for name in iterate}
    rng = random.Random(0)  # the same on all ranks, so all take the same turns
    for turn in range(spec.rounds):
        for name in rng.sample(sorted(iterate), len(iterate)):
            timed(name)
            times[name] += agree.largest([timed(name) for _ in range(spec.iterations)], group, device)
        bouts.append(measured(spec.network_seconds / 2 / spec.rounds))
        say(f"round {turn + 1} of {spec.rounds}")
    first, links = links, together(bouts)
    entries = []
    for names in groups:
        job, recorded, moved = jobs.get(names[0]), None, 0
        if job is not None:
            before = job.moved_bytes
            recorded = _record(job, functools.partial(timed, names[0]), spec)
            sent = torch.tensor([job.moved_bytes - before])
            dist.all_reduce(sent)
            moved = int(sent) // RECORDED
        entries += [
            BurstEntry(
                policy=name,
                plan=plans[name],
                predicted=simulate_burst(plans[name], spec.profile, links, bucket_bytes=spec.bucket_bytes),
                predicted_before=simulate_burst(
                    plans[name], spec.profile, first, bucket_bytes=spec.bucket_bytes
                ).duration,
                seconds=tuple(times[names[0]]),
                same_as=tuple(other for other in names if other != name),
                recorded=recorded,
                moved=moved,
                predicted_moved=job.predicted_moved_bytes(spec.batch) if job is not None else 0,
            )
            for name in names
        ]
    leave()
    moves = {f"{a}-{b}": cost for (a, b), cost in links.moves.items()}
    outcome = BurstOutcome(
        networks=dict(links.networks), moves=moves, crowded=dict(links.crowded), entries=tuple(entries)
    )
    return msgspec.to_builtins(outcome, str_keys=True)


def _record(job: Burst, timed: Callable[[], float], spec: BurstSpec) -> Timeline:
    """The iteration of median duration among a few, of all ranks on one clock. Every rank calls it."""
    import torch.distributed as dist

    found = []
    for _ in range(RECORDED):
        start = time.perf_counter()  # one clock for all processes of a machine
        with job.record() as recording:
            timed()
        stop = time.perf_counter()
        mine = (start, stop, [s for s in recording.timeline(emulated=True).spans if s.kind != "idle"])
        held: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(held, mine)
        spans = [_shifted(s, begin) for begin, _, theirs in held for s in theirs]
        first = min(s.start for s in spans)
        spans = [_shifted(s, -first) for s in spans]
        until = max(s.stop for s in spans)
        spans += idle_gaps(spans, [f"rank {r}" for r in range(len(held))], until=until)
        found.append(tuple(sorted(spans, key=lambda s: (s.start, s.stop))))
    lasts = [max(s.stop for s in spans) for spans in found]
    middle = found[lasts.index(statistics.median_low(lasts))]
    return Timeline(name=f"{spec.profile.name}, batch {spec.batch}", source="measured", emulated=True, spans=middle)


def _shifted(span: Span, by: float) -> Span:
    return msgspec.structs.replace(span, start=span.start + by, stop=span.stop + by)


def _contestants(
    spec: BurstSpec, plans: Mapping[str, BurstPlan]
) -> tuple[dict[str, Burst], dict[str, Callable[[], object]]]:
    """The burst jobs, and for every contestant a function that runs one iteration."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from dovetail.emulate.burst_device import emulated_layers, first_column
    from dovetail.emulate.device import emulated
    from dovetail.train.burst.module import Burst

    jobs: dict[str, Burst] = {}
    iterate: dict[str, Callable[[], object]] = {}
    x, y = torch.ones(spec.batch, 1), torch.zeros(spec.batch)

    def burst_iteration(job: Burst) -> None:
        job.module.zero_grad(set_to_none=True)
        job.step(x, y)

    def ddp_iteration(model: DistributedDataParallel) -> None:
        model.zero_grad(set_to_none=True)
        model(x[:1]).backward()

    for name, plan in plans.items():
        if name == DDP:
            local = emulated(spec.profile, batch=spec.batch // dist.get_world_size())
            # A bucket closes once it holds as many bytes as the executor's part.
            sizes = [layer.parameter_bytes for layer in spec.profile.layers]
            pieces = parts([tuple(range(g)) for g in plan.counts], sizes, spec.bucket_bytes)
            caps = [sum(sizes[p.start : p.stop]) / 2**20 for p in reversed(pieces)]
            model = DistributedDataParallel(local, bucket_cap_mb_list=caps)  # type: ignore[arg-type]
            iterate[name] = functools.partial(ddp_iteration, model)
        else:
            layers = emulated_layers(spec.profile, plan.counts)
            jobs[name] = Burst(layers, plan, loss=first_column, bucket_bytes=spec.bucket_bytes)
            iterate[name] = functools.partial(burst_iteration, jobs[name])
    return jobs, iterate


if __name__ == "__main__":
    from dovetail.emulate.launch import report

    report(_rank(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=BurstSpec)))
