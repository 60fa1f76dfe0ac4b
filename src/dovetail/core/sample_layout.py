"""SampleLayout: which rank holds which samples of a global batch, and what moves when a stage has other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SampleLayout:
    """Samples 0 .. batch − 1 on ranks. Every rank holds its samples in ascending order."""

    batch: int
    held: tuple[tuple[int, tuple[int, ...]], ...]
    """(rank, its samples) by ascending rank; a rank of the stage may hold none."""
    _of: dict[int, tuple[int, ...]] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._of.update(self.held)

    def samples(self, rank: int) -> tuple[int, ...]:
        return self._of.get(rank, ())

    def first_holder(self) -> int:
        """The lowest rank that holds a sample."""
        return next(rank for rank, samples in self.held if samples)


def block_layout(batch: int, ranks: Sequence[int]) -> SampleLayout:
    """Consecutive blocks, one per rank in the order given; the first ranks get one more where it does not divide."""
    each, more = divmod(batch, len(ranks))
    held, at = [], 0
    for i, rank in enumerate(ranks):
        size = each + (i < more)
        held.append((rank, tuple(range(at, at + size))))
        at += size
    return SampleLayout(batch, tuple(sorted(held)))


def next_layout(before: SampleLayout, ranks: Sequence[int]) -> SampleLayout:
    """Evenly over `ranks` (sizes differ by one at most), with as many samples as possible where they are.

    Where the batch does not divide, the ranks that hold more than the even share already keep one more, so no other
    even layout moves fewer samples. What has to move goes, in ascending order, to the ranks that lack samples.
    """
    each, more = divmod(before.batch, len(ranks))
    wanting = sorted(ranks, key=lambda r: (len(before.samples(r)) <= each, ranks.index(r)))  # sort is stable
    quota = {rank: each + (i < more) for i, rank in enumerate(wanting)}
    kept = {rank: list(before.samples(rank)[: quota[rank]]) for rank in ranks}
    staying = {s for samples in kept.values() for s in samples}
    moving = iter(s for s in range(before.batch) if s not in staying)
    for rank in ranks:
        kept[rank] += [next(moving) for _ in range(quota[rank] - len(kept[rank]))]
    return SampleLayout(before.batch, tuple(sorted((rank, tuple(sorted(samples))) for rank, samples in kept.items())))


@dataclass(frozen=True)
class Move:
    """What one rank does when samples go from one layout to another; positions are rows of its local tensors."""

    rows: int
    """Samples that the rank holds afterwards."""
    keeps: tuple[tuple[int, ...], tuple[int, ...]]
    """(rows before, rows after) of the samples that stay."""
    sends: tuple[tuple[int, tuple[int, ...]], ...]
    """(to rank, rows before), by rank."""
    receives: tuple[tuple[int, tuple[int, ...]], ...]
    """(from rank, rows after), by rank."""


def move(before: SampleLayout, after: SampleLayout, rank: int) -> Move:
    """What `rank` does. Both ends of a message list its samples in ascending order."""
    mine, next_ = before.samples(rank), after.samples(rank)
    row = {s: i for i, s in enumerate(mine)}
    stay = [(row[s], i) for i, s in enumerate(next_) if s in row]
    going = {s: i for i, s in enumerate(mine) if s not in set(next_)}
    coming = {s: i for i, s in enumerate(next_) if s not in row}
    sends = [(r, tuple(going[s] for s in samples if s in going)) for r, samples in after.held if r != rank]
    receives = [(r, tuple(coming[s] for s in samples if s in coming)) for r, samples in before.held if r != rank]
    return Move(
        rows=len(next_),
        keeps=(tuple(a for a, _ in stay), tuple(b for _, b in stay)),
        sends=tuple((r, rows) for r, rows in sends if rows),
        receives=tuple((r, rows) for r, rows in receives if rows),
    )


def moved(before: SampleLayout, after: SampleLayout) -> int:
    """Samples that change their rank."""
    return sum(len(set(samples) - set(before.samples(rank))) for rank, samples in after.held)


def busiest(before: SampleLayout, after: SampleLayout) -> int:
    """Samples that the busiest rank sends or receives, whichever is more: it determines the time of a re-sharding."""
    ranks = {r for r, _ in (*before.held, *after.held)}
    parts = [(set(before.samples(r)), set(after.samples(r))) for r in ranks]
    return max(max(len(a - b), len(b - a)) for a, b in parts)


@dataclass(frozen=True)
class Part:
    """Layers [start, stop) that run as one piece on the same ranks: their gradients travel in one bucket."""

    start: int
    stop: int
    ranks: tuple[int, ...]


def parts(ranks: Sequence[tuple[int, ...]], parameter_bytes: Sequence[int], bucket_bytes: float) -> list[Part]:
    """Stages cut into buckets: going backward, a part closes once its gradients hold at least `bucket_bytes`.

    A stage is a maximal run of layers on the same ranks. What is left over at a stage's beginning joins the part
    after it if it has no parameters at all.
    """
    done: list[Part] = []
    stop, held = len(ranks), 0
    for i in reversed(range(len(ranks))):
        held += parameter_bytes[i]
        border = i == 0 or ranks[i - 1] != ranks[i]
        if border and held == 0 and done and done[-1].ranks == ranks[i]:
            done[-1] = Part(i, done[-1].stop, ranks[i])
            stop, held = i, 0
        elif border or held >= bucket_bytes:
            done.append(Part(i, stop, ranks[i]))
            stop, held = i, 0
    return done[::-1]
