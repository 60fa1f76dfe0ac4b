"""One iteration of a burst plan as a predicted timeline: every device's work, its communication, and its idle gaps.

The iteration is a list of operations in the order in which `train.burst` does them. A computing operation belongs to
one rank. A re-sharding starts when all its ranks have reached it and occupies them until it ends. The sum of a part's
gradients starts when all its ranks have computed them and occupies no rank. A group of ranks runs at most two
communications at once, as gloo does; others wait their turn. Communications that share a rank at the same time share
its link evenly, and are slowed by the links' factor for crowding; computing is slowed, where that was measured, while
gradients of its rank are on their way. Nothing else is shared, and the iteration ends with
its last operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dovetail.core.burst_plan import BurstPlan
from dovetail.core.errors import Error
from dovetail.core.profile import Profile
from dovetail.core.sample_layout import SampleLayout, block_layout, busiest, moved, next_layout, parts
from dovetail.core.timeline import Span, SpanKind, Timeline, idle_gaps
from dovetail.planning.burst.cost import LinkCosts, Links

BUCKET = 25 * 2**20
"""Bytes of gradients that are summed together; `train.burst` has the same default."""
AT_ONCE = 2
"""Most communications of one group at a time: gloo's threads."""


@dataclass
class _Operation:
    name: str
    kind: SpanKind
    ranks: tuple[int, ...]
    seconds: float
    """Duration if no other communication shares its links."""
    after: frozenset[int]
    bytes: int = 0
    crowding: float = 1.0
    """How many times longer it takes beside another communication of one of its ranks."""
    left: float = field(init=False)
    start: float = -1.0
    stop: float = -1.0

    def __post_init__(self) -> None:
        self.left = self.seconds


def simulate_burst(
    plan: BurstPlan, profile: Profile, wires: LinkCosts | None = None, *, bucket_bytes: float = BUCKET
) -> Timeline:
    """The timeline of one iteration of `plan` on every rank; `wires` says what communication costs."""
    operations, alike = _simulated(plan, profile, wires or Links(), bucket_bytes)
    devices = [f"rank {r}" for r in range(plan.devices)]
    until = max(t.stop for t in operations)
    spans = [span for operation in operations for span in _spans(operation, alike)]
    spans += idle_gaps(spans, devices, until=until)
    return Timeline(
        name=f"{profile.name}, batch {plan.batch} on {plan.devices} devices, {plan.policy}",
        source="predicted",
        emulated=profile.emulated,
        spans=tuple(sorted(spans, key=lambda s: (s.start, s.stop))),
    )


def occupancy(
    plan: BurstPlan, profile: Profile, wires: LinkCosts | None = None, *, bucket_bytes: float = BUCKET
) -> tuple[float, list[tuple[int, list[tuple[float, float]]]]]:
    """How long the same iteration takes, and for every set of ranks that do the same: how many, and when they are busy.

    Of a thousand devices a timeline is long; there are few such sets.
    """
    operations, alike = _simulated(plan, profile, wires or Links(), bucket_bytes)
    busy: dict[int, list[tuple[float, float]]] = {first: [] for first in alike}
    for operation in operations:
        for rank in operation.ranks:
            busy[rank].append((operation.start, operation.stop))
    return max(t.stop for t in operations), [(len(alike[first]), sorted(spans)) for first, spans in busy.items()]


def _simulated(
    plan: BurstPlan, profile: Profile, wires: LinkCosts, bucket_bytes: float
) -> tuple[list[_Operation], dict[int, list[int]]]:
    if tuple(layer.name for layer in profile.layers) != plan.layers:
        raise Error(f"plan for {plan.profile!r} does not match profile {profile.name!r}: their layers differ")
    operations, alike = _operations(plan, profile, wires, bucket_bytes)
    _run(operations)
    return operations, alike


def live_bytes(profile: Profile) -> list[int]:
    """Bytes of one sample that cross the cut behind each layer: all tensors that a later layer still needs."""
    count = len(profile.layers)
    last = {i: i + 1 for i in range(count)}
    if profile.edges:
        last = {i: max((v for u, v in profile.edges if u == i), default=i + 1) for i in range(count)}
    size = [layer.activation_bytes for layer in profile.layers]
    return [sum(size[u] for u in range(cut + 1) if last[u] > cut) for cut in range(count)]


def _alike(layouts: Sequence[SampleLayout]) -> dict[int, list[int]]:
    """Sets of ranks that hold equally many samples in every part, and so do the same, by their first rank."""
    held = [{rank: len(samples) for rank, samples in layout.held} for layout in layouts]
    kinds: dict[tuple[int | None, ...], list[int]] = {}
    for rank in sorted({rank for part in held for rank in part}):
        kinds.setdefault(tuple(part.get(rank) for part in held), []).append(rank)
    return {ranks[0]: ranks for ranks in kinds.values()}


def _operations(
    plan: BurstPlan, profile: Profile, wires: LinkCosts, bucket_bytes: float
) -> tuple[list[_Operation], dict[int, list[int]]]:
    """All operations in order, for the first rank of each set of ranks that do the same; and these sets."""
    ranks = [tuple(range(g)) for g in plan.counts]
    pieces = parts(ranks, [layer.parameter_bytes for layer in profile.layers], bucket_bytes)
    crossing = live_bytes(profile)
    layouts = [block_layout(plan.batch, pieces[0].ranks)]
    for piece in pieces[1:]:
        layouts.append(next_layout(layouts[-1], piece.ranks))
    alike = _alike(layouts)
    operations: list[_Operation] = []
    last: dict[int, int] = {}  # the operation after which a rank is free

    def add(
        name: str, kind: SpanKind, who: tuple[int, ...], seconds: float, nbytes: int = 0, holds: bool = True
    ) -> None:
        crowding = wires.crowding(len(who)) if kind == "communication" else 1.0 + wires.slowing
        first = tuple(r for r in who if r in alike)
        after = frozenset(last[r] for r in first if r in last)
        operations.append(_Operation(name, kind, first, seconds, after, nbytes, crowding))
        if holds:
            last.update(dict.fromkeys(first, len(operations) - 1))

    def reshard(name: str, before: SampleLayout, after: SampleLayout, cut: int) -> None:
        if moved(before, after):
            who = tuple(sorted({r for r, _ in (*before.held, *after.held)}))
            nbytes = busiest(before, after) * crossing[cut]
            seconds = float(wires.move(nbytes, len(before.held), len(after.held)))
            add(name, "communication", who, seconds, nbytes)

    def compute(kind: SpanKind, layout: SampleLayout, layers: Sequence[int]) -> None:
        for rank, samples in layout.held:
            for i in layers if samples and rank in alike else ():
                layer = profile.layers[i]
                seconds = layer.forward(len(samples)) if kind == "forward" else layer.backward(len(samples))
                add(layer.name, kind, (rank,), seconds)

    for i, piece in enumerate(pieces):
        if i > 0:
            reshard(f"samples into {profile.layers[piece.start].name}", layouts[i - 1], layouts[i], piece.start - 1)
        compute("forward", layouts[i], range(piece.start, piece.stop))
    for i, piece in reversed(list(enumerate(pieces))):
        names = [layer.name for layer in profile.layers[piece.start : piece.stop]]
        compute("backward", layouts[i], range(piece.stop - 1, piece.start - 1, -1))
        nbytes = sum(layer.parameter_bytes for layer in profile.layers[piece.start : piece.stop])
        if nbytes and len(piece.ranks) > 1:
            seconds = float(wires.all_reduce(nbytes, len(piece.ranks)))
            what = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            add(f"gradients of {what}", "communication", piece.ranks, seconds, nbytes, holds=False)
        if i > 0:
            reshard(f"gradients back from {names[0]}", layouts[i], layouts[i - 1], piece.start - 1)
    return operations, alike


def _run(operations: list[_Operation]) -> None:
    """Sets the start and stop of every operation, from event to event, each link shared by its communications."""
    now = 0.0
    missing = [len(operation.after) for operation in operations]
    behind: list[list[int]] = [[] for _ in operations]
    for i, operation in enumerate(operations):
        for before in operation.after:
            behind[before].append(i)
    ready, running = [i for i, left in enumerate(missing) if not left], set[int]()
    while ready or running:
        waiting = []
        for i in sorted(ready):
            if operations[i].kind == "communication" and _beside(operations, running, i) >= AT_ONCE:
                waiting.append(i)
                continue
            running.add(i)
            operations[i].start = now
        ready = waiting
        speeds = {i: _speed(operations, running, i) for i in running}
        elapsed = min(operations[i].left / speeds[i] for i in running)
        now += elapsed
        for i in list(running):
            operations[i].left -= elapsed * speeds[i]
            if operations[i].left <= 1e-12:
                operations[i].stop = now
                running.remove(i)
                for after in behind[i]:
                    missing[after] -= 1
                    if not missing[after]:
                        ready.append(after)


def _speed(operations: list[_Operation], running: set[int], i: int) -> float:
    beside = [set(operations[j].ranks) for j in running if operations[j].kind == "communication"]
    sharing = max(sum(r in ranks for ranks in beside) for r in operations[i].ranks)
    if operations[i].kind != "communication":
        return 1.0 / operations[i].crowding if sharing else 1.0
    return 1.0 / (sharing * operations[i].crowding) if sharing > 1 else 1.0


def _beside(operations: list[_Operation], running: set[int], i: int) -> int:
    """The number of communications of the same group that run now."""
    return sum(operations[j].kind == "communication" and operations[j].ranks == operations[i].ranks for j in running)


def _spans(operation: _Operation, alike: dict[int, list[int]]) -> Iterator[Span]:
    place = "network" if operation.kind == "communication" else "compute"
    for rank in sorted(rank for first in operation.ranks for rank in alike[first]):
        yield Span(
            track=f"rank {rank}/{place}",
            name=operation.name,
            kind=operation.kind,
            start=operation.start,
            stop=operation.stop,
            bytes=operation.bytes,
        )
