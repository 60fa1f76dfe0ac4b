"""Bucketings side by side on emulated devices: real gradients, a real network, the same processes, turn by turn.

Every rank emulates the profile on one DDP module. First dovetail plans for it, as it would for a user. Then all
contestants take turns on that same module, in an order that is shuffled for every round; each turn exchanges the
reducer, lets it settle and takes the time of a few steps. What a contestant gets is what torch's DDP would do with the
same caps; dovetail's turn uses what dovetail has kept. Contestants with the very same buckets are one program under
several names: they take one turn and share its times, so noise cannot tell them apart.

`run` is the caller's side; `python -m dovetail.emulate.contest SPEC` is one rank's.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dovetail.core import files
from dovetail.core.network import Network
from dovetail.core.plan import Plan
from dovetail.core.profile import Profile
from dovetail.core.scratch import scratch
from dovetail.core.timeline import Span, Timeline

DOVETAIL = "dovetail"
"""The contestant that plans for itself."""


class Spec(files.Record, frozen=True, kw_only=True):
    """What the ranks need to know."""

    profile: Profile
    policies: tuple[str, ...]
    rounds: int
    settle: int
    steps: int
    seed: int
    latency: float | None
    """Seconds that every all-reduce waits in addition, on an in-order channel; None for gloo as it is."""
    tuning: dict[str, int | float]


class Entry(files.Record, frozen=True, kw_only=True):
    """How one contestant did."""

    policy: str
    buckets: int
    predicted: float
    lower_bound: float
    seconds: tuple[float, ...]
    """Iteration times of the slowest rank."""
    same_as: tuple[str, ...] = ()
    """Contestants with the very same buckets, which share these times."""


class Outcome(files.Record, frozen=True, kw_only=True):
    """A whole contest."""

    network: Network
    """As measured among the ranks before the contest."""
    entries: tuple[Entry, ...]
    kept: Plan | None
    """dovetail's plan; None where it kept torch's own buckets."""
    explained: str
    tuning_steps: int
    timelines: dict[str, Timeline]
    """One recorded iteration of the first rank, for torch's default and for dovetail."""

    def entry(self, policy: str) -> Entry:
        return next(e for e in self.entries if e.policy == policy)


@dataclass(frozen=True)
class Setting:
    """Where a contest takes place."""

    ranks: int = 4
    rate: str | None = "1gbit"
    """Of every rank's link, in both directions; None for loopback, which has no limit."""
    latency: float | None = None
    burst: str = "256kb"
    """What a link may send at once after a pause."""
    in_flight: int | None = None
    """Bytes that a connection may have on its way; None as the system has it."""


def run(
    profile: Profile,
    policies: list[str],
    setting: Setting,
    *,
    rounds: int = 3,
    settle: int = 2,
    steps: int = 3,
    seed: int = 0,
    tuning: dict[str, int | float] | None = None,
    timeout: float = 1800,
    on_line: Callable[[str], None] | None = None,
) -> Outcome:
    """Lets `policies` and dovetail compete for `profile`; lines of progress go to `on_line`."""
    spec = Spec(
        profile=profile,
        policies=tuple(policies),
        rounds=rounds,
        settle=settle,
        steps=steps,
        seed=seed,
        latency=setting.latency,
        tuning=tuning or {},
    )
    return msgspec.convert(hold(__name__, spec, setting, timeout=timeout, on_line=on_line), Outcome)


def hold(
    module: str, spec: files.Record, setting: Setting, *, timeout: float, on_line: Callable[[str], None] | None
) -> Any:
    """Runs `python -m module SPEC` on every rank of the setting and returns what the first one reports."""
    from .launch import launch
    from .shaped_network import shaped

    with (
        scratch("contest") as folder,
        shaped(setting.ranks, rate=setting.rate, burst=setting.burst, in_flight=setting.in_flight)
        if setting.rate
        else nullcontext() as network,
    ):
        path = folder / "spec.json"
        path.write_bytes(msgspec.json.encode(spec))
        results = launch(
            ["-m", module, str(path)],
            ranks=setting.ranks,
            network=network,
            timeout=timeout,
            on_line=lambda rank, line: on_line(line) if on_line and rank == 0 else None,
        )
    return results[0].report


def _rank(spec: Spec) -> Any:
    import torch
    import torch.distributed as dist

    from dovetail import measure, planning
    from dovetail.train import agree
    from dovetail.train.data_parallel import reducer
    from dovetail.train.data_parallel.module import DistributedDataParallel
    from dovetail.train.data_parallel.record import SETTLE
    from dovetail.train.data_parallel.trials import Tuning

    from .channel import leave, register
    from .device import emulated

    torch.set_num_threads(1)
    dist.init_process_group("gloo" if spec.latency is None else register(latency=spec.latency))
    world, group, device = dist.get_world_size(), dist.group.WORLD, torch.device("cpu")
    assert group is not None
    x = torch.full((1,), 1.0 + dist.get_rank())
    network = measure.network(
        group,
        max_bytes=min(64 * 2**20, spec.profile.parameter_bytes),
        collectives=("all_reduce",),
        budget=10.0,
        name="emulated",
        emulated=True,
    )
    _say(f"network: {_fit(network)}")
    model = DistributedDataParallel(emulated(spec.profile), tuning=Tuning(**spec.tuning))  # type: ignore[arg-type]
    baseline = model._bucket_config

    def step() -> float:
        model.zero_grad(set_to_none=True)
        start = _now()
        model(x).backward()
        return _now() - start

    while model.report.state in ("measuring", "trying"):
        step()
    step()
    _say(model.explain())
    report = model.report

    plans = agree.from_first(_plans(spec, network, world), group, device)
    kept = agree.from_first(report.plan, group, device)
    configs = {name: reducer.bucket_config(plan.caps_mib()) for name, plan in plans.items()}
    configs[DOVETAIL] = baseline if kept is None else reducer.bucket_config(kept.caps_mib())
    configs["ddp"] = baseline
    buckets = {name: len(plan.buckets) for name, plan in plans.items()}
    plans[DOVETAIL] = planning.predict(kept, spec.profile, network) if kept else plans["ddp"]
    buckets[DOVETAIL] = len(plans[DOVETAIL].buckets)
    alike = _alike({name: config.per_bucket_bytes_caps for name, config in configs.items()})
    times: dict[str, list[float]] = {names[0]: [] for names in alike}
    rng = random.Random(spec.seed)  # the same on all ranks, so all take the same turns
    for turn in range(spec.rounds):
        for name in rng.sample(sorted(times), len(times)):
            reducer.exchange(model, configs[name])
            for _ in range(spec.settle):
                step()
            times[name] += agree.largest([step() for _ in range(spec.steps)], group, device)
        _say(f"round {turn + 1} of {spec.rounds}")
    recorded: dict[str, list[Timeline]] = {"ddp": [], DOVETAIL: []}
    for _ in range(2):
        for name, steps in recorded.items():
            reducer.exchange(model, configs[name])
            with model.record() as recording:
                for _ in range(SETTLE + 2):
                    step()
            steps += _steps(recording.timeline(emulated=True))
    timelines = {}
    for name, steps in recorded.items():
        usual = statistics.median(next(times[names[0]] for names in alike if name in names))
        near = min(steps, key=lambda t: abs(t.duration - usual))  # what is drawn is like what was measured above
        timelines[name] = msgspec.structs.replace(near, name=name)
    outcome = Outcome(
        network=network,
        entries=tuple(
            Entry(
                policy=name,
                buckets=buckets[name],
                predicted=plans[name].prediction.iteration,
                lower_bound=plans[name].prediction.lower_bound,
                seconds=tuple(times[names[0]]),
                same_as=tuple(other for other in names if other != name),
            )
            for names in alike
            for name in names
        ),
        kept=kept,
        explained=str(report),
        tuning_steps=report.steps,
        timelines=timelines,
    )
    leave()
    return msgspec.to_builtins(outcome)


def _steps(recorded: Timeline) -> list[Timeline]:
    """Recorded steps one by one, each from zero on."""
    steps: list[list[Span]] = []
    began = 0.0
    for span in recorded.spans:
        if span.kind == "forward":
            steps.append([])
            began = span.start
        steps[-1].append(msgspec.structs.replace(span, start=span.start - began, stop=span.stop - began))
    return [msgspec.structs.replace(recorded, spans=tuple(spans)) for spans in steps]


def _plans(spec: Spec, network: Network, workers: int) -> dict[str, Plan]:
    from dovetail import planning

    names = dict.fromkeys(["ddp", *spec.policies])
    return {name: planning.plan(spec.profile, network, workers=workers, policy=name) for name in names}


def _alike(caps: Mapping[str, Sequence[int]]) -> list[list[str]]:
    """Contestants in groups of equal bucket caps; on one module these give equal buckets."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, sizes in caps.items():
        groups.setdefault(tuple(sizes), []).append(name)
    return list(groups.values())


def _fit(network: Network) -> str:
    fit = network.collectives["all_reduce"].fit
    return f"all-reduce {fit.latency * 1e3:.2f} ms + {fit.seconds_per_byte * 1e9:.2f} ns/B (within {fit.error:.0%})"


def _now() -> float:
    import time

    return time.perf_counter()


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    from .launch import report

    report(_rank(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Spec)))
