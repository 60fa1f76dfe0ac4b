"""What the doctor checks on every rank: each way to train for a few steps, beside torch's DDP or an oracle.

A check is a function of a `Place` that returns a `Finding`. All ranks run it together. What it raises ends the rank
with one line; the examination then goes on with the next check in new processes.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from dovetail import measure
from dovetail.core.errors import Error
from dovetail.core.plan import Bucket, Plan, Prediction
from dovetail.train.burst.module import Burst
from dovetail.train.data_parallel.module import DistributedDataParallel
from dovetail.train.data_parallel.sharded.optimizer import optimizer as second_line
from dovetail.train.data_parallel.tuning.trials import Tuning
from dovetail.train.partial.module import PartialBackprop
from dovetail.train.partial.segments import contributors, cut
from dovetail.train.run.closing_line import summary

from .diagnosis import EMULATED, AllReduceFit
from .instruments import HostSyncs, host_syncs
from .trainings import Place, difference, model, sgd, step

TOLERANCE = 1e-4
"""The largest difference of a parameter that passes, as a share of the largest value in its tensor: sums in another
order and kernels of another device differ by 1e-6 or less, a gradient that is missing or not averaged by 1e-2 or
more."""
STEPS = 6
SETTLED = 3
"""Steps after planning in which torch's reducer, if it is a new one, still rebuilds its buckets."""
COUNTED = 4
"""Steps over which host syncs are counted, when everything is in its final state."""
QUICK = Tuning(warmup=2, measure=4, candidates=3, settle=2, steps=2, rounds=1, duel_steps=1, network_seconds=0.5)
PATIENCE = 45.0
"""Seconds after which a wait of PartialBackprop or Burst counts as lost."""
LARGEST = 16 * 2**20  # bytes of the largest message
NETWORK_SECONDS = 4.0


@dataclass(frozen=True)
class Finding:
    """What one rank found in one check."""

    line: str
    difference: float | None = None
    syncs: HostSyncs | None = None
    """Of the last COUNTED steps."""
    network: AllReduceFit | None = None

    @property
    def passed(self) -> bool:
        return self.difference is None or self.difference <= TOLERANCE


Check = Callable[[Place], Finding]


def network(place: Place) -> Finding:
    """Latency and bandwidth of an all-reduce."""
    found = measure.network(
        max_bytes=LARGEST,
        collectives=("all_reduce",),
        budget=NETWORK_SECONDS,
        device=place.device,
        emulated=place.device.type == EMULATED,
    )
    table = found.collectives["all_reduce"]
    slope = table.fit.seconds_per_byte
    fit = AllReduceFit(
        latency=table.fit.latency,
        bytes_per_second=1 / slope if slope else 0.0,
        error=table.fit.error,
        largest=table.samples[-1].bytes,
    )
    return Finding(f"{len(table.samples)} sizes of messages among {found.ranks} ranks", network=fit)


def torch_ddp(place: Place) -> Finding:
    """torch's own DistributedDataParallel against one process on the CPU: whether the machine itself is right."""
    trained = place.wrapped(TorchDDP)
    optimizer, cpu = sgd(trained.parameters()), Place(torch.device("cpu"), place.rank, place.ranks)
    alone = model()
    alone_optimizer = sgd(alone.parameters())
    for number in range(STEPS):
        step(trained, optimizer, *place.batch(number))
        step(alone, alone_optimizer, *cpu.batches(number))
    apart = difference(trained.parameters(), alone.parameters())
    syncs = _syncs(place, trained, optimizer, STEPS)
    return Finding(f"{STEPS} steps against one process on the CPU", apart, syncs)


def one_line(place: Place) -> Finding:
    """dovetail's DistributedDataParallel, through planning to the plan that it keeps."""
    ours = place.wrapped(DistributedDataParallel, tuning=QUICK)
    assert isinstance(ours, DistributedDataParallel)
    return _planned(place, ours, sgd(ours.parameters()))


def two_lines(place: Place) -> Finding:
    """With `dovetail.optimizer`, through planning to the buckets that it keeps."""
    ours = place.wrapped(DistributedDataParallel, overlap="forward", tuning=QUICK)
    assert isinstance(ours, DistributedDataParallel)
    return _planned(place, ours, second_line(sgd(ours.parameters()), ours))


def bucket_kinds(place: Place) -> Finding:
    """Whole and split buckets in turn, as a stored plan says."""
    ours = place.wrapped(DistributedDataParallel, plan=_alternating(place.ranks))
    assert isinstance(ours, DistributedDataParallel)
    optimizer = second_line(sgd(ours.parameters()), ours)
    assert ours.exchange is not None
    kinds = [bucket.kind for bucket in ours.exchange.buckets]
    apart = _beside_torch(place, ours, optimizer, STEPS)
    syncs = _syncs(place, ours, optimizer, STEPS)
    said = f"{kinds.count('whole')} whole and {kinds.count('split')} split buckets"
    return Finding(f"{STEPS} steps against torch's DDP, {said}", apart, syncs)


def partial_backprop(place: Place) -> Finding:
    """PartialBackprop with two depths against its oracle: full gradients, averaged over those who computed them."""
    trained = model().to(place.device)
    oracle = copy.deepcopy(trained)
    depths = [1 + rank % 2 for rank in range(place.ranks)]
    plan = cut(trained, (place.batch(0)[0],), at=["4"], depths=depths)
    ours = PartialBackprop(trained, plan, guard=None, timeout=PATIENCE)
    optimizer, theirs = sgd(ours.parameters()), sgd(oracle.parameters())
    home = {
        name: index
        for index, segment in enumerate(plan.segments)
        for layer in plan.layers[segment.start : segment.stop]
        for name, _ in trained.named_parameters()
        if name.rpartition(".")[0] == layer
    }
    for number in range(STEPS):
        step(ours, optimizer, *place.batch(number))
        full = [_gradients(oracle, place, number, rank) for rank in range(place.ranks)]
        for name, parameter in oracle.named_parameters():
            those = contributors(depths, len(plan.segments), home[name])
            parameter.grad = torch.stack([full[rank][name] for rank in those]).mean(dim=0)
        theirs.step()
    apart = difference(trained.parameters(), oracle.parameters())
    syncs = _syncs(place, ours, optimizer, STEPS)
    return Finding(f"{STEPS} steps at depths {' '.join(map(str, depths))} against full gradients, masked", apart, syncs)


def burst(place: Place) -> Finding:
    """Burst with the first layers on all ranks and the last ones on one, against one process with the whole batch."""
    whole = model().to(place.device)
    layers = copy.deepcopy(whole)
    counts = [place.ranks] * 5 + [1] * 4
    loss = functools.partial(F.cross_entropy, reduction="none")
    ours = Burst(layers, counts, loss=loss, timeout=PATIENCE)
    optimizer, theirs = sgd(ours.parameters()), sgd(whole.parameters())
    batches = [place.batches(number) for number in range(STEPS + COUNTED)]

    def burst_step(number: int) -> None:
        optimizer.zero_grad()
        ours.step(*batches[number])
        optimizer.step()

    for number in range(STEPS):
        burst_step(number)
        step(whole, theirs, *batches[number])
    apart = difference(ours.parameters(), whole.parameters())
    with host_syncs(place.device) as syncs:
        for number in range(STEPS, STEPS + COUNTED):
            burst_step(number)
    said = f"layers on {place.ranks} ranks and on 1"
    return Finding(f"{STEPS} steps against one process with the whole batch, {said}", apart, syncs)


def _planned(place: Place, ours: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> Finding:
    """Trains until planning is over and a few steps with what was kept, beside torch's DDP."""
    if ours.report.state == "off":
        raise Error(f"planning did not begin: {ours.report.reason}")
    planning, after = iter(range(QUICK.most + 1)), iter(range(SETTLED))

    def more() -> bool:
        return next(after if ours.report.state == "done" else planning, None) is not None

    taken, apart = _beside(place, ours, optimizer, more)
    if ours.report.state != "done":
        raise Error(f"planning was not over after {taken} steps, expected at most {QUICK.most}")
    syncs = _syncs(place, ours, optimizer, taken)
    return Finding(f"{taken} steps against torch's DDP; {summary(ours.report)}", apart, syncs)


def _beside_torch(place: Place, ours: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    left = iter(range(steps))
    return _beside(place, ours, optimizer, lambda: next(left, None) is not None)[1]


def _beside(
    place: Place, ours: nn.Module, optimizer: torch.optim.Optimizer, more: Callable[[], bool]
) -> tuple[int, float]:
    """Trains `ours` and torch's DDP on the same batches while `more` says so: (steps, difference at the end)."""
    theirs = place.wrapped(TorchDDP)
    their_optimizer, taken = sgd(theirs.parameters()), 0
    while more():
        batch = place.batch(taken)
        step(ours, optimizer, *batch)
        step(theirs, their_optimizer, *batch)
        taken += 1
    return taken, difference(ours.parameters(), theirs.parameters())


def _syncs(place: Place, trained: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> HostSyncs:
    """Host syncs of some more steps. The batches are on the device before, and nobody looks at a loss."""
    batches = [place.batch(first + number) for number in range(COUNTED)]
    with host_syncs(place.device) as counted:
        for batch in batches:
            step(trained, optimizer, *batch)
    return counted


def _gradients(trained: nn.Module, place: Place, number: int, rank: int) -> dict[str, torch.Tensor]:
    """The full gradients of a model on one rank's batch; the model has none afterwards."""
    images, labels = place.batch(number, rank)
    names, parameters = zip(*trained.named_parameters(), strict=True)
    found = torch.autograd.grad(F.cross_entropy(trained(images), labels), parameters)
    return dict(zip(names, found, strict=True))


def _alternating(ranks: int) -> Plan:
    """A plan for the model with buckets of two tensors each, whole and split in turn."""
    named = list(reversed(list(model().named_parameters())))
    nothing = Prediction(iteration=0.0, forward=0.0, backward=0.0, exposed=0.0, lower_bound=0.0)
    return Plan(
        policy="by hand",
        profile="doctor",
        network="doctor",
        workers=ranks,
        batch=1,
        tensors=tuple(name for name, _ in named),
        dtypes=("float32",),
        buckets=tuple(
            Bucket(
                start=at,
                stop=at + 2,
                bytes=sum(parameter.nbytes for _, parameter in named[at : at + 2]),
                kind="split" if at % 4 else "whole",
            )
            for at in range(0, len(named), 2)
        ),
        prediction=nothing,
        overlap="forward",
    )
