"""One rank of benchmarks/overlap.py and benchmarks/precision.py: all contestants in this process, turn by turn.

Every contestant trains an emulated model of its own and runs its real optimiser on the host: whole updates with DDP and
merging, a rank's n-th with FSDP2, and as the plan says with dovetail's two lines. What the contestants choose by trial
(DDP's bucket cap, dovetail's plans) is chosen before the contest.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dovetail
from dovetail import measure, planning
from dovetail.core.errors import Error
from dovetail.core.network import CollectiveName, Network, Precision
from dovetail.core.plan import Overlap, Plan
from dovetail.core.profile import Profile
from dovetail.emulate.channel import leave
from dovetail.emulate.launch import report
from dovetail.emulate.layered import LayeredModel, blocks, layered
from dovetail.train import agree
from dovetail.train.data_parallel.wire import ring
from dovetail.train.data_parallel.wire.lane import functions
from overlap_records import Entry, Outcome, Spec, link_idle

SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
"""Bytes that this rank's interface has sent, in its own namespace."""
PREFETCH = 2
"""Blocks whose all-gathers FSDP2 starts ahead: what its documentation advises for more overlap."""
SPLIT_POLICIES = ("auto", "optimal", "fewest")
"""Policies of the planner that make all-split plans."""
REPEATS = 3
"""All-reduces of all gradients that the limit is the median of."""

Option = TypeVar("Option")


@dataclass
class Contestant:
    """A model and what one iteration does with it."""

    iterate: Callable[[], None]
    drain: Callable[[], None] = lambda: None
    """Waits for the communication that an iteration has left running."""
    what: str = ""
    policy: str = ""
    """Name of the planner's policy that makes the same buckets, where there is no plan."""
    plan: Plan | None = None
    model: Any = None
    """dovetail's wrapper, where it is one."""
    groups: int = 0
    """Groups of modules, where there are neither buckets nor a plan."""
    updates: list[float] = field(default_factory=list)
    """Seconds of every whole update."""

    def codec(self) -> float:
        """Processor seconds of all conversions so far."""
        return float(getattr(getattr(self.model, "exchange", None), "codec_seconds", 0.0))


def contest(spec: Spec) -> Any:
    x = torch.full((1,), 1.0 + dist.get_rank())
    made: dict[str, Contestant] = {}
    for name in spec.contestants:
        made[name] = _BUILDERS[name](spec, x, made)
        print(f"{name}: {made[name].what or 'ready'}", flush=True)
    times: dict[str, list[float]] = {name: [] for name in made}
    sent: dict[str, list[float]] = {name: [] for name in made}
    codec: dict[str, list[float]] = {name: [] for name in made}
    turns = random.Random(0)  # the same on all ranks
    for number in range(spec.rounds):
        for name in turns.sample(list(made), len(made)):
            seconds, nbytes, converting = _turn(made[name], settle=spec.settle, steps=spec.steps)
            times[name] += seconds
            sent[name].append(nbytes)
            codec[name].append(converting)
        print(f"round {number + 1} of {spec.rounds}", flush=True)
    networks: dict[Overlap, Network] = {overlap: _network(spec, made, overlap) for overlap in ("backward", "forward")}
    update = _update(made)
    entries = [
        Entry(
            name=name,
            what=c.what,
            seconds=tuple(times[name]),
            sent=statistics.median(sent[name]),
            codec=statistics.median(codec[name]),
            idle=_idle(c, spec.recorded),
            **_planned(c, spec.profile, networks, update),
        )
        for name, c in made.items()
    ]
    outcome = Outcome(
        network=networks["forward"],
        all_reduce=_all_reduce_seconds(spec.profile.parameter_bytes),
        update=update,
        entries=tuple(entries),
    )
    return msgspec.to_builtins(outcome)


def _turn(c: Contestant, *, settle: int, steps: int) -> tuple[list[float], float, float]:
    """(slowest rank's times of the iterations after the first `settle`; bytes, and seconds of the codec, of each)."""
    dist.barrier()
    sent, converting, count = _sent(), c.codec(), settle + steps
    stamps = []
    for _ in range(count):
        stamps.append(time.perf_counter())
        c.iterate()
    stamps.append(time.perf_counter())
    c.drain()
    seconds = [b - a for a, b in itertools.pairwise(stamps)][settle:]
    return _agreed(seconds), (_sent() - sent) / count, (c.codec() - converting) / count


def _agreed(values: Sequence[float]) -> list[float]:
    """Element by element, the largest value of any rank."""
    group = dist.group.WORLD
    assert group is not None
    return agree.largest(values, group, torch.device("cpu"))


def _best(options: Sequence[Option], build: Callable[[Option], Contestant], spec: Spec) -> Contestant:
    """The option whose iterations were fastest on the slowest rank, so the same option on all ranks."""
    if len(options) == 1:
        return build(options[0])
    best: tuple[float, Contestant] | None = None
    for option in options:
        made = build(option)
        # torch puts buckets into ready order when the second iteration begins.
        took = statistics.median(_turn(made, settle=1, steps=spec.trial)[0])
        if best is None or took < best[0]:
            best = (took, made)
    assert best is not None, "there is an option"
    return best[1]


def _ddp(spec: Spec, x: Tensor, *, cap: int | None = None, half: bool = False) -> Contestant:
    model = TorchDDP(layered(spec.profile), bucket_cap_mb=cap)
    if half:
        model.register_comm_hook(None, fp16_compress_hook)
    updates: list[float] = []
    policy = "" if half else "ddp" if cap is None else f"threshold:{cap}"
    what = "fp16_compress_hook" if half else "" if cap is None else f"caps of {cap} MiB"
    made = Contestant(one_line(model, x, updates), what=what, policy=policy, updates=updates)
    _turn(made, settle=0, steps=2)  # its updates are timed, and torch has put its buckets into ready order
    return made


def _merge(spec: Spec, x: Tensor, made: dict[str, Contestant]) -> Contestant:
    """The plan of `dovetail.DistributedDataParallel(model)`, without the trials that would choose it or torch's own."""
    plan = planning.plan(spec.profile, _network(spec, made, "backward"))
    model = dovetail.DistributedDataParallel(layered(spec.profile), plan=plan)
    return Contestant(one_line(model, x, []), what="planned, not tried", plan=plan, model=model)


def _both(spec: Spec, x: Tensor, precision: Precision) -> Contestant:
    """What dovetail keeps on its own where the optimiser is wrapped too."""
    tuning = dovetail.Tuning(**spec.tuning)  # type: ignore[arg-type]
    model: Any = dovetail.DistributedDataParallel(layered(spec.profile), tuning=tuning, precision=precision)
    return _tuned(model, tuning, *two_lines(model, x))


def _tuned(model: Any, tuning: dovetail.Tuning, iterate: Callable[[], None], drain: Callable[[], None]) -> Contestant:
    """Iterates until dovetail has decided; the plan that it keeps is that of the first rank."""
    for _ in range(tuning.most + 1):
        if model.report.state not in ("measuring", "trying"):
            break
        iterate()
    else:
        raise Error(f"dovetail has not decided after {tuning.most} iterations")
    drain()
    if dist.get_rank() == 0:
        print(model.explain(), flush=True)
    group = dist.group.WORLD
    assert group is not None
    plan: Plan | None = agree.from_first(model.report.plan, group, torch.device("cpu"))
    what = f"keeps {plan.policy}" if plan else model.report.reason or "keeps torch's own buckets"
    return Contestant(iterate, drain, what=what, plan=plan, policy="" if plan else "ddp", model=model)


def _split(spec: Spec, x: Tensor, made: dict[str, Contestant]) -> Contestant:
    """The best of the planner's all-split plans: reduce-scatter and all-gather for every bucket."""
    network, share = _network(spec, made, "forward"), _update(made) / dist.get_world_size()
    found = [
        planning.plan(spec.profile, network, policy=policy, overlap="forward", optimizer=share, kinds=("split",))
        for policy in SPLIT_POLICIES
    ]
    plans = list({p.buckets: p for p in reversed(found)}.values())[::-1][: spec.splits]

    def build(plan: Plan) -> Contestant:
        model: Any = dovetail.DistributedDataParallel(layered(spec.profile), plan=plan)
        iterate, drain = two_lines(model, x)
        return Contestant(iterate, drain, what=f"keeps {plan.policy}", plan=plan, model=model)

    return _best(plans, build, spec)


def _fsdp2(profile: Profile, x: Tensor) -> Contestant:
    model: LayeredModel = layered(profile)
    groups = blocks(model)
    for modules in groups:
        fully_shard(modules if len(modules) > 1 else modules[0], reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)
    heads: list[Any] = [modules[0] for modules in groups]
    for i, head in enumerate(heads):
        head.set_modules_to_forward_prefetch(heads[i + 1 : i + 1 + PREFETCH])
    # On a processor there are no streams: without this every all-gather would be waited for where it starts.
    model._set_unshard_async_op(True)  # type: ignore[operator]
    return Contestant(one_line(model, x, []), groups=len(groups))


_BUILDERS: dict[str, Callable[[Spec, Tensor, dict[str, Contestant]], Contestant]] = {
    "ddp": lambda spec, x, _: _ddp(spec, x),
    "ddp-tuned": lambda spec, x, _: _best(spec.caps, lambda cap: _ddp(spec, x, cap=cap), spec),
    "ddp-fp16": lambda spec, x, _: _ddp(spec, x, half=True),
    "merge": _merge,
    "both": lambda spec, x, _: _both(spec, x, "full"),
    "bf16": lambda spec, x, _: _both(spec, x, "bf16"),
    "int8": lambda spec, x, _: _both(spec, x, "int8"),
    "split": _split,
    "fsdp2": lambda spec, x, _: _fsdp2(spec.profile, x),
}


def plain(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """One iteration without an optimiser."""

    def iterate() -> None:
        model.zero_grad(set_to_none=True)
        model(x).backward()

    return iterate


def one_line(model: nn.Module, x: Tensor, updates: list[float]) -> Callable[[], None]:
    """One iteration with torch's optimiser; the seconds of its updates go to `updates`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def iterate() -> None:
        optimizer.zero_grad()
        model(x).backward()
        began = time.perf_counter()
        optimizer.step()
        updates.append(time.perf_counter() - began)

    return iterate


def two_lines(model: Any, x: Tensor) -> tuple[Callable[[], None], Callable[[], None]]:
    """(one iteration of a model with `dovetail.optimizer`, a wait for the parameters of the last iteration)."""
    optimizer: Any = dovetail.optimizer(torch.optim.SGD(model.parameters(), lr=1e-6), model)

    def iterate() -> None:
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()

    def drain() -> None:
        for parameter in model.parameters():
            parameter.detach()

    return iterate, drain


def _update(made: dict[str, Contestant]) -> float:
    """Seconds of the whole optimiser on the slowest rank."""
    return _agreed([statistics.median(made["ddp"].updates)])[0]


def _network(spec: Spec, made: dict[str, Contestant], overlap: Overlap) -> Network:
    """What dovetail measured while it trained: torch's all-reduces ("backward"), or the exchange's own collectives.

    Where nothing that trained has measured it, it is measured here, without what computing adds.
    """
    for c in made.values():
        report = c.model.report if c.model is not None else None
        if report is not None and report.network is not None and report.overlap == overlap:
            return report.network  # type: ignore[no-any-return]
    halves: tuple[CollectiveName, ...] = () if overlap == "backward" else ("reduce_scatter", "all_gather")
    return measure.network(
        max_bytes=max(1024, min(32 * 2**20, spec.profile.parameter_bytes)),
        collectives=("all_reduce", *halves),
        budget=3.0 + 2 * len(halves),
        name="emulated",
        emulated=True,
        via=functions(None) if halves else None,
    )


def _planned(c: Contestant, profile: Profile, networks: dict[Overlap, Network], update: float) -> dict[str, Any]:
    """Buckets of a contestant and its prediction, as fields of `Entry`."""
    plan = c.plan
    if plan is None and c.policy:
        plan = planning.plan(profile, networks["backward"], policy=c.policy)
    if plan is None:
        return {"buckets": c.groups, "kinds": {}}
    own: Any = c.model.report if c.model is not None else None
    tuned = own is not None and own.network is not None
    network = own.network if tuned and own.overlap == plan.overlap else networks[plan.overlap]
    same = plan.tensors == tuple(t.name for t in profile.tensors)

    def seconds(p: Plan) -> float:
        # torch's optimiser comes after the last all-reduce, whatever the buckets; planners may leave it out.
        return p.prediction.iteration + (update if p.overlap == "backward" and not p.prediction.optimizer else 0.0)

    return {
        "buckets": len(plan.buckets),
        "kinds": dict(Counter(b.kind if b.precision == "full" else f"{b.kind} {b.precision}" for b in plan.buckets)),
        "predicted": seconds(planning.predict(plan, profile, network) if same else plan),
        "promised": seconds(plan) if tuned and c.plan is not None else None,
    }


def _idle(c: Contestant, iterations: int) -> float | None:
    """The link's idle share in recorded iterations of dovetail's exchange; plain merging records through a hook."""
    if not iterations or c.model is None or c.plan is None or c.plan.overlap == "backward":
        return None
    dist.barrier()
    with c.model.record() as recording:
        for _ in range(iterations):
            c.iterate()
        c.drain()
    return link_idle(recording.timeline())


def _all_reduce_seconds(nbytes: int) -> dict[str, float]:
    """Medians of the slowest rank's times of one all-reduce of all gradients, torch's and dovetail's ring."""
    queue = functions(None)["all_reduce"]
    flat = torch.ones(ring.padded(nbytes // 4, dist.get_world_size())).zero_()
    found = {}
    for name, run in (("torch", dist.all_reduce), ("ring", lambda flat: queue(flat).wait())):
        seconds = []
        for _ in range(REPEATS):
            dist.barrier()
            began = time.perf_counter()
            run(flat)
            seconds.append(time.perf_counter() - began)
        found[name] = statistics.median(_agreed(seconds))
    return found


def _sent() -> int:
    return int(SENT.read_text()) if SENT.exists() else 0


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    report(contest(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Spec)))
    leave()


if __name__ == "__main__":
    main()
