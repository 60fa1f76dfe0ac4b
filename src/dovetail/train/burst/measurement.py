"""The cost of communication of a burst job, measured among its own processes with the calls that a step makes.

Every rank goes through everything at the same time, and those outside a group wait as they do in a step. Re-sharding is
timed as a step does it, with choosing, packing and unpacking rows: what the next stage waits for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import msgspec
import torch
import torch.distributed as dist

from dovetail.core.errors import Error
from dovetail.core.network import Collective, CostSample, Network
from dovetail.core.profile import Quantiles
from dovetail.core.sample_layout import block_layout, busiest, next_layout
from dovetail.measure.collectives import fit, network
from dovetail.measure.stats import quantiles
from dovetail.planning.burst.cost import MeasuredLinks
from dovetail.train import agree

from .communicator import Communicator
from .reshard import Reshard

SIZES = (1 << 10, 1 << 14, 1 << 16, 1 << 18)
"""Measured sizes, in bytes of the busiest rank, besides `max_bytes`; costs between them are interpolated."""


def measure_links(
    batch: int,
    *,
    max_bytes: int,
    max_moved: int,
    counts: Sequence[int] = (),
    budget: float = 30.0,
    timeout: float = 300.0,
    emulated: bool = False,
) -> MeasuredLinks:
    """Measures all-reduces of up to `max_bytes`, and re-sharding of a global batch with up to `max_moved` bytes per
    rank.

    Both for each number of ranks in `counts` (the powers of two and all ranks by default), within about `budget`
    seconds: half of them for single all-reduces, a quarter for two at once, a quarter for re-sharding. Every rank of
    the job calls it and gets the same result.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world < 2:
        raise Error("no links to measure: start the job with torchrun on at least 2 ranks")
    chosen = sorted(set(counts) or {2**i for i in range(world.bit_length()) if 2**i <= world} | {1, world})
    pairs = [(a, b) for a in chosen for b in chosen if a != b]
    for a, b in pairs:
        first = block_layout(batch, range(a))
        if not busiest(first, next_layout(first, range(b))):
            raise Error(f"batch: expected so many samples that some move between {a} and {b} ranks, got {batch}")
    comm = Communicator(torch.device("cpu"), timeout=timeout)
    comm.prepare(tuple(range(n)) for n in chosen)
    several = [n for n in chosen if n > 1]
    networks: dict[int, Network] = {}
    for n in several:
        if (found := _all_reduce(comm, n, max_bytes, budget / 2 * n / sum(several), emulated)) is not None:
            networks[n] = found
    crowded = {n: _crowding(comm, n, max_bytes, budget / 4 * n / sum(several)) for n in several}
    each = budget / 4 / max(1, len(pairs))
    moves = {pair: _reshard(comm, batch, *pair, max_bytes=max_moved, budget=each) for pair in pairs}
    group = dist.group.WORLD
    assert group is not None
    return MeasuredLinks(*agree.from_first((networks, moves, crowded), group, comm.device))


def together(bouts: Sequence[MeasuredLinks]) -> MeasuredLinks:
    """Several measurements as one: the median of every cost, so that a bad minute does not count."""
    first = bouts[0]
    networks = {}
    for n, found in first.networks.items():
        cost = _middle([b.networks[n].collectives["all_reduce"] for b in bouts])
        networks[n] = msgspec.structs.replace(found, collectives={"all_reduce": cost})
    moves = {pair: _middle([b.moves[pair] for b in bouts]) for pair in first.moves}
    crowded = {n: statistics.median(b.crowded[n] for b in bouts) for n in first.crowded}
    return MeasuredLinks(networks, moves, crowded)


def _middle(several: Sequence[Collective]) -> Collective:
    """The median for each size; a size that did not fit into some bout's time has fewer to choose from."""
    by_size: dict[int, list[Quantiles]] = {}
    for one in several:
        for sample in one.samples:
            by_size.setdefault(sample.bytes, []).append(sample.seconds)
    samples = []
    for size, seconds in sorted(by_size.items()):
        ordered = sorted(seconds, key=lambda q: q.median)
        samples.append(CostSample(bytes=size, seconds=ordered[(len(ordered) - 1) // 2]))
    return Collective(fit=fit(samples), samples=tuple(samples))


def _all_reduce(comm: Communicator, ranks: int, max_bytes: int, budget: float, emulated: bool) -> Network | None:
    """All-reduces among the first `ranks` ranks; None on the others."""
    found = None
    if comm.rank < ranks:
        found = network(
            comm.group(tuple(range(ranks))),
            max_bytes=max_bytes,
            collectives=("all_reduce",),
            budget=budget,
            name=f"measured-{ranks}",
            emulated=emulated,
        )
    dist.barrier()
    return found


def _crowding(comm: Communicator, ranks: int, max_bytes: int, budget: float) -> float:
    """Time of a large and a small all-reduce at once, over that of one after the other; at least 1.

    A link that carries two streams may serve both worse than each alone: messages of one queue behind the other's.
    """
    who, world = tuple(range(ranks)), dist.group.WORLD
    assert world is not None
    tensors = [torch.zeros(max(1, max_bytes // 8)), torch.zeros(max(1, max_bytes // 32))]  # a half, and an eighth

    def timed(*batches: list[torch.Tensor]) -> float:
        dist.barrier()
        start = time.perf_counter()
        for batch in batches if comm.rank < ranks else ():
            for work in [comm.all_reduce(t, who) for t in batch]:
                comm.wait(work, "measuring")
        return agree.largest([time.perf_counter() - start], world, comm.device)[0]

    until, found = time.perf_counter() + budget, list[float]()
    while len(found) < 3 or (len(found) < 9 and not _all_late(until)):
        found.append(timed(tensors) / timed(tensors[:1], tensors[1:]))
    return max(1.0, statistics.median(found))


def _reshard(comm: Communicator, batch: int, before: int, after: int, *, max_bytes: int, budget: float) -> Collective:
    """Re-sharding from the first `before` ranks to the first `after`: slowest rank's seconds by busiest's bytes."""
    first = block_layout(batch, range(before))
    reshard = Reshard(comm, first, next_layout(first, range(after)))
    rows = busiest(reshard.before, reshard.after)
    held = len(first.samples(comm.rank))
    samples = []
    widths = sorted({max(1, size // (4 * rows)) for size in (*(s for s in SIZES if s < max_bytes), max_bytes)})
    for width in widths:  # float32 per sample
        given = [torch.zeros(held, width)]
        until = time.perf_counter() + budget / len(widths)
        _timed(comm, reshard, given)  # the first one pays for buffers and connections
        seconds: list[float] = []
        while len(seconds) < 3 or (len(seconds) < 15 and not _all_late(until)):
            seconds.append(_timed(comm, reshard, given))
        samples.append(CostSample(bytes=4 * rows * width, seconds=quantiles(seconds)))
    return Collective(fit=fit(samples), samples=tuple(samples))


def _timed(comm: Communicator, reshard: Reshard, given: list[torch.Tensor]) -> float:
    dist.barrier()
    reshard.meet("measuring")
    start = time.perf_counter()
    reshard(given, "measuring")
    group = dist.group.WORLD
    assert group is not None
    return agree.largest([time.perf_counter() - start if reshard.takes_part else 0.0], group, comm.device)[0]


def _all_late(until: float) -> bool:
    group = dist.group.WORLD
    assert group is not None
    return agree.largest([float(time.perf_counter() > until)], group, torch.device("cpu"))[0] > 0
