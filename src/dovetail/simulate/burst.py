"""One step of a burst plan as a predicted timeline: every device's work, its communication, and its idle gaps.

The step is a list of tasks in the order in which `train.burst` does them. A computing task belongs to one rank. A
re-sharding starts when all its ranks are there and holds them until it ends. The sum of a part's gradients starts when
all its ranks have computed them and holds nobody. A group of ranks has at most two communications on the way, as gloo
does; others wait their turn. Communications that share a rank at the same time share its link evenly, and lose what
the links say is lost by crowding. Nothing else is shared, and the step ends with its last task.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dovetail.core.burst_plan import BurstPlan
from dovetail.core.errors import Error
from dovetail.core.profile import Profile
from dovetail.core.sample_layout import Layout, block_layout, busiest, moved, next_layout, parts
from dovetail.core.timeline import Span, SpanKind, Timeline, idle_gaps
from dovetail.planning.burst.cost import Links, Wires

BUCKET = 25 * 2**20
"""Bytes; `train.burst` has the same default."""
AT_ONCE = 2
"""Communications of one group: gloo's threads."""


@dataclass
class _Task:
    name: str
    kind: SpanKind
    ranks: tuple[int, ...]
    seconds: float
    """Alone."""
    after: frozenset[int]
    bytes: int = 0
    crowding: float = 1.0
    left: float = field(init=False)
    start: float = -1.0
    stop: float = -1.0

    def __post_init__(self) -> None:
        self.left = self.seconds


def simulate_burst(
    plan: BurstPlan, profile: Profile, wires: Wires | None = None, *, bucket_bytes: float = BUCKET
) -> Timeline:
    """What one iteration of `plan` looks like on every rank; `wires` says what communication costs."""
    tasks, alike = _simulated(plan, profile, wires or Links(), bucket_bytes)
    devices = [f"rank {r}" for r in range(plan.devices)]
    until = max(t.stop for t in tasks)
    spans = [span for task in tasks for span in _spans(task, alike)]
    spans += idle_gaps(spans, devices, until=until)
    return Timeline(
        name=f"{profile.name}, batch {plan.batch} on {plan.devices} devices, {plan.policy}",
        source="predicted",
        emulated=profile.emulated,
        spans=tuple(sorted(spans, key=lambda s: (s.start, s.stop))),
    )


def occupancy(
    plan: BurstPlan, profile: Profile, wires: Wires | None = None, *, bucket_bytes: float = BUCKET
) -> tuple[float, list[tuple[int, list[tuple[float, float]]]]]:
    """Of the same iteration only how long it takes, and for ranks that do the same: how many, and when they are busy.

    For a thousand devices a timeline is long; ranks that do the same are few.
    """
    tasks, alike = _simulated(plan, profile, wires or Links(), bucket_bytes)
    busy: dict[int, list[tuple[float, float]]] = {first: [] for first in alike}
    for task in tasks:
        for rank in task.ranks:
            busy[rank].append((task.start, task.stop))
    return max(t.stop for t in tasks), [(len(alike[first]), sorted(spans)) for first, spans in busy.items()]


def _simulated(
    plan: BurstPlan, profile: Profile, wires: Wires, bucket_bytes: float
) -> tuple[list[_Task], dict[int, list[int]]]:
    if tuple(layer.name for layer in profile.layers) != plan.layers:
        raise Error(f"plan for {plan.profile!r} does not match profile {profile.name!r}: they have other layers")
    tasks, alike = _tasks(plan, profile, wires, bucket_bytes)
    _run(tasks)
    return tasks, alike


def live_bytes(profile: Profile) -> list[int]:
    """Bytes of one sample that cross the cut behind each layer: all tensors that a later layer still needs."""
    count = len(profile.layers)
    last = {i: i + 1 for i in range(count)}
    if profile.edges:
        last = {i: max((v for u, v in profile.edges if u == i), default=i + 1) for i in range(count)}
    size = [layer.activation_bytes for layer in profile.layers]
    return [sum(size[u] for u in range(cut + 1) if last[u] > cut) for cut in range(count)]


def _alike(layouts: Sequence[Layout]) -> dict[int, list[int]]:
    """Ranks that hold equally many samples in every part, and so do the same at the same time, by the first of them."""
    held = [{rank: len(samples) for rank, samples in layout.held} for layout in layouts]
    kinds: dict[tuple[int | None, ...], list[int]] = {}
    for rank in sorted({rank for part in held for rank in part}):
        kinds.setdefault(tuple(part.get(rank) for part in held), []).append(rank)
    return {ranks[0]: ranks for ranks in kinds.values()}


def _tasks(
    plan: BurstPlan, profile: Profile, wires: Wires, bucket_bytes: float
) -> tuple[list[_Task], dict[int, list[int]]]:
    """All tasks in order, for the first of each ranks that do the same; and for whom each of these stands."""
    ranks = [tuple(range(g)) for g in plan.counts]
    pieces = parts(ranks, [layer.parameter_bytes for layer in profile.layers], bucket_bytes)
    crossing = live_bytes(profile)
    layouts = [block_layout(plan.batch, pieces[0].ranks)]
    for piece in pieces[1:]:
        layouts.append(next_layout(layouts[-1], piece.ranks))
    alike = _alike(layouts)
    tasks: list[_Task] = []
    last: dict[int, int] = {}  # the task after which a rank is free to go on

    def add(
        name: str, kind: SpanKind, who: tuple[int, ...], seconds: float, nbytes: int = 0, holds: bool = True
    ) -> None:
        crowding = wires.crowding(len(who)) if kind == "communication" else 1.0
        first = tuple(r for r in who if r in alike)
        after = frozenset(last[r] for r in first if r in last)
        tasks.append(_Task(name, kind, first, seconds, after, nbytes, crowding))
        if holds:
            last.update(dict.fromkeys(first, len(tasks) - 1))

    def reshard(name: str, before: Layout, after: Layout, cut: int) -> None:
        if moved(before, after):
            who = tuple(sorted({r for r, _ in (*before.held, *after.held)}))
            nbytes = busiest(before, after) * crossing[cut]
            seconds = float(wires.move(nbytes, len(before.held), len(after.held)))
            add(name, "communication", who, seconds, nbytes)

    def compute(kind: SpanKind, layout: Layout, layers: Sequence[int]) -> None:
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
    return tasks, alike


def _run(tasks: list[_Task]) -> None:
    """Sets every task's start and stop: from event to event, with each link shared by what is on it."""
    now = 0.0
    missing = [len(task.after) for task in tasks]
    behind: list[list[int]] = [[] for _ in tasks]
    for i, task in enumerate(tasks):
        for before in task.after:
            behind[before].append(i)
    ready, running = [i for i, left in enumerate(missing) if not left], set[int]()
    while ready or running:
        waiting = []
        for i in sorted(ready):
            if tasks[i].kind == "communication" and _beside(tasks, running, i) >= AT_ONCE:
                waiting.append(i)
                continue
            running.add(i)
            tasks[i].start = now
        ready = waiting
        speeds = {i: _speed(tasks, running, i) for i in running}
        step = min(tasks[i].left / speeds[i] for i in running)
        now += step
        for i in list(running):
            tasks[i].left -= step * speeds[i]
            if tasks[i].left <= 1e-12:
                tasks[i].stop = now
                running.remove(i)
                for after in behind[i]:
                    missing[after] -= 1
                    if not missing[after]:
                        ready.append(after)


def _speed(tasks: list[_Task], running: set[int], i: int) -> float:
    if tasks[i].kind != "communication":
        return 1.0
    beside = [set(tasks[j].ranks) for j in running if tasks[j].kind == "communication"]
    sharing = max(sum(r in ranks for ranks in beside) for r in tasks[i].ranks)
    return 1.0 / (sharing * tasks[i].crowding) if sharing > 1 else 1.0


def _beside(tasks: list[_Task], running: set[int], i: int) -> int:
    """Communications of the same group that are on their way."""
    return sum(tasks[j].kind == "communication" and tasks[j].ranks == tasks[i].ranks for j in running)


def _spans(task: _Task, alike: dict[int, list[int]]) -> Iterator[Span]:
    place = "network" if task.kind == "communication" else "compute"
    for rank in sorted(rank for first in task.ranks for rank in alike[first]):
        yield Span(
            track=f"rank {rank}/{place}",
            name=task.name,
            kind=task.kind,
            start=task.start,
            stop=task.stop,
            bytes=task.bytes,
        )
