"""Burst plans side by side on emulated devices: real tensors, a real network, the same processes, turn by turn.

Every rank emulates one device. First the ranks measure what communication costs them: all-reduces among all of them and
among the first 2, 4, … of them, and re-sharding between each two of these sets. Rank 0 plans; then the plans take
turns, in an order shuffled for every round. Links are measured again after every round, since many ranks on few cores
have good minutes and bad ones: plans are made by the first measurement, predictions by all of them. Policies that
choose the very same devices are one program under several names: they take one turn and share its times. At the end
each plan runs three more steps, which are recorded.

`run` is the caller's side; `python -m dovetail.emulate.burst_contest SPEC` is one rank's.
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
from dovetail.core.timeline import Span, Timeline
from dovetail.planning.burst.cost import ProfileCost
from dovetail.planning.burst.links import MeasuredLinks
from dovetail.planning.burst.overlap import candidates
from dovetail.planning.burst.planner import BurstPlanner
from dovetail.planning.burst.rules import data_parallel
from dovetail.simulate.burst import simulate_burst

from .contest import Setting, hold
from .shaped_network import bits_per_second

if TYPE_CHECKING:
    from dovetail.train.burst.module import Burst

DDP = "ddp"
"""The contestant that is torch's DistributedDataParallel, on all ranks and with the buckets of the burst executor."""
QUEUED = 0.02
"""Seconds of a link's rate that a connection may have on its way: many round trips, and no long queue before others."""
RECORDED = 3
"""Steps, of which the one of median duration is kept."""


class Spec(files.Record, frozen=True, kw_only=True):
    """What the ranks need to know."""

    profile: Profile
    batch: int
    policies: tuple[str, ...]
    """"ddp" for torch's own, "dp:8" and other baselines by name, "best-dp" for the number of devices on which data
    parallelism is predicted to be fastest, "burst" for the fastest plan, "burst:1.25" in a limit."""
    bucket_bytes: float
    rounds: int
    steps: int
    latency: float | None
    network_seconds: float


class Entry(files.Record, frozen=True, kw_only=True):
    """How one plan did."""

    policy: str
    plan: BurstPlan
    predicted: Timeline
    predicted_before: float
    """Seconds, by what was measured before the first round alone."""
    seconds: tuple[float, ...]
    """Iteration times of the slowest rank."""
    same_as: tuple[str, ...] = ()
    """Policies that chose the very same devices, and share these times."""
    recorded: Timeline | None = None
    """One step of all ranks; None for DDP."""
    moved: int = 0
    """Bytes that all ranks sent in re-sharding in one step, as counted."""
    predicted_moved: int = 0

    @property
    def idle(self) -> float | None:
        """Device-seconds in which a device neither computed nor communicated, in the recorded step."""
        if self.recorded is None:
            return None
        return sum(s.duration for s in self.recorded.spans if s.kind == "idle")


class Outcome(files.Record, frozen=True, kw_only=True):
    networks: dict[int, Network]
    """As measured, by number of ranks."""
    moves: dict[str, Collective]
    """Re-sharding as measured, by "ranks before-ranks after"."""
    crowded: dict[int, float]
    """How many times longer two all-reduces took at once than one after the other, by number of ranks."""
    entries: tuple[Entry, ...]

    def entry(self, policy: str) -> Entry:
        return next(e for e in self.entries if e.policy == policy)


def run(
    profile: Profile,
    policies: list[str],
    setting: Setting,
    *,
    batch: int,
    bucket_bytes: float,
    rounds: int = 3,
    steps: int = 3,
    network_seconds: float = 30.0,
    timeout: float = 900,
    on_line: Callable[[str], None] | None = None,
) -> Outcome:
    """Lets the plans of `policies` take turns; lines of progress go to `on_line`.

    `network_seconds` is the time for measuring what communication costs: half of it before the first round.
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
    # Messages are small here: a link must not let many of them pass for nothing, nor a large one keep them waiting.
    if setting.rate is not None:
        setting = replace(setting, burst="8kb", in_flight=int(QUEUED * bits_per_second(setting.rate) / 8))
    return msgspec.convert(hold(__name__, spec, setting, timeout=timeout, on_line=on_line), Outcome, strict=False)


def make_plan(spec: Spec, policy: str, links: MeasuredLinks, devices: int) -> BurstPlan:
    """By the prediction for the executor with its own buckets, on numbers of devices that were measured."""

    def predicted(plan: BurstPlan) -> float:
        return simulate_burst(plan, spec.profile, links, bucket_bytes=spec.bucket_bytes).duration

    cost = ProfileCost(spec.profile, spec.batch, wires=links)
    planner = BurstPlanner(spec.profile, cost, devices, counts=tuple(sorted({1, *links.networks})), network="measured")
    if policy == DDP:
        return planner.policy(f"dp:{devices}")
    if policy == "best-dp":
        return min(data_parallel(planner), key=predicted)
    kind, _, limit = policy.partition(":")
    if kind == "burst":
        return min(candidates(planner, amplification=float(limit) if limit else None), key=predicted)
    return planner.policy(policy)


def _rank(spec: Spec) -> Any:
    import torch
    import torch.distributed as dist

    from dovetail.train import agree
    from dovetail.train.burst.measurement import measure_links, together

    from .channel import leave, register

    torch.set_num_threads(1)
    dist.init_process_group("gloo" if spec.latency is None else register(latency=spec.latency))
    group, device = dist.group.WORLD, torch.device("cpu")
    assert group is not None
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
    _say(f"links measured among {', '.join(map(str, links.networks))} ranks")
    made = {p: make_plan(spec, p, links, dist.get_world_size()) for p in spec.policies} if dist.get_rank() == 0 else {}
    plans: dict[str, BurstPlan] = agree.from_first(made, group, device)
    alike = _alike(plans)
    jobs, steps = _contestants(spec, {names[0]: plans[names[0]] for names in alike})
    # Python's collector would walk through all of torch in every process at the same step, on two cores.
    gc.collect()
    gc.freeze()

    def timed(name: str) -> float:
        dist.barrier()
        start = time.perf_counter()
        steps[name]()
        return time.perf_counter() - start

    times: dict[str, list[float]] = {name: [] for name in steps}
    rng = random.Random(0)  # the same on all ranks, so all take the same turns
    for turn in range(spec.rounds):
        for name in rng.sample(sorted(steps), len(steps)):
            timed(name)
            times[name] += agree.largest([timed(name) for _ in range(spec.steps)], group, device)
        bouts.append(measured(spec.network_seconds / 2 / spec.rounds))
        _say(f"round {turn + 1} of {spec.rounds}")
    first, links = links, together(bouts)
    entries = []
    for names in alike:
        job, recorded, moved = jobs.get(names[0]), None, 0
        if job is not None:
            before = job.moved_bytes
            recorded = _record(job, functools.partial(timed, names[0]), spec)
            sent = torch.tensor([job.moved_bytes - before])
            dist.all_reduce(sent)
            moved = int(sent) // RECORDED
        entries += [
            Entry(
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
    outcome = Outcome(networks=dict(links.networks), moves=moves, crowded=dict(links.crowded), entries=tuple(entries))
    return msgspec.to_builtins(outcome, str_keys=True)


def _alike(plans: Mapping[str, BurstPlan]) -> list[list[str]]:
    """Policies in groups of equal programs."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, plan in plans.items():
        groups.setdefault((name == DDP, *plan.counts), []).append(name)
    return list(groups.values())


def _record(job: Burst, timed: Callable[[], float], spec: Spec) -> Timeline:
    """The step of median duration among a few, of all ranks on one clock. Every rank calls it and gets the same."""
    import torch.distributed as dist

    from dovetail.core.timeline import idle_gaps

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
    spec: Spec, plans: Mapping[str, BurstPlan]
) -> tuple[dict[str, Burst], dict[str, Callable[[], object]]]:
    """(the burst jobs, one step of every contestant)."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from dovetail.train.burst.module import Burst

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
            # A bucket closes once it holds as many bytes as the executor's part.
            sizes = [layer.parameter_bytes for layer in spec.profile.layers]
            pieces = parts([tuple(range(g)) for g in plan.counts], sizes, spec.bucket_bytes)
            caps = [sum(sizes[p.start : p.stop]) / 2**20 for p in reversed(pieces)]
            model = DistributedDataParallel(local, bucket_cap_mb_list=caps)  # type: ignore[arg-type]
            steps[name] = functools.partial(ddp_step, model)
        else:
            layers = emulated_layers(spec.profile, plan.counts)
            jobs[name] = Burst(layers, plan, loss=first_column, bucket_bytes=spec.bucket_bytes)
            steps[name] = functools.partial(burst_step, jobs[name])
    return jobs, steps


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    from .launch import report

    report(_rank(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Spec)))
