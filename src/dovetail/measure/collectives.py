"""A live process group → Network: what each collective costs, measured where the job will run.

What "M bytes" means, for each collective among n ranks:

    all_reduce       bytes of the tensor that every rank holds
    reduce_scatter   bytes of the full tensor that every rank puts in (each gets M/n back)
    all_gather       bytes of the full tensor that every rank gets (each puts M/n in)
    all_to_all       bytes that each rank sends in total, including the part it keeps

So the same gradient bucket has the same M whether it is all-reduced or reduce-scattered and gathered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.core.errors import Error
from dovetail.core.network import COLLECTIVES, Collective, CollectiveName, CostSample, Fit, Network

from .stats import quantiles

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

SMALLEST = 1024
"""Bytes of the smallest message: below it, time is latency."""
LEAST = 3
"""Repeats that every size gets at least: a median needs them."""
WARMUP = 2
"""Untimed calls before the timed ones; the first of a size pays for buffers and connections."""


def network(
    group: ProcessGroup | None = None,
    *,
    max_bytes: int,
    collectives: Sequence[CollectiveName] = COLLECTIVES,
    repeats: int = 20,
    budget: float = 20.0,
    name: str | None = None,
    device: torch.device | str | None = None,
    emulated: bool = False,
    via: Mapping[CollectiveName, Callable[[torch.Tensor], object]] | None = None,
) -> Network:
    """Measures collectives of 1 KiB to `max_bytes` on a process group; call it on every rank at the same time.

    For each collective it tries a small and a middling message to see whether powers of two fit into the time or only
    powers of four do. Then it goes up through the sizes: a warm-up, which also tells how often this size can be
    repeated in its share of what is left of `budget` (seconds for everything; at most `repeats`, at least three
    times), then the repeats. Before each repeat a tiny all-reduce lines the ranks up; nothing else happens inside or
    between the stamps. Of every repeat the slowest rank counts. Sizes that no longer fit into the budget are left out,
    and `source` says so; planners follow the last slope beyond them.

    `via` replaces torch's own collectives by functions of the full, flat tensor (a reduce-scatter leaves the sum of
    this rank's part in place, an all-gather fills the other parts in), for jobs that will run those.

    Every decision rests on numbers that were all-reduced before, so all ranks do the same and return the same Network.
    """
    ranks, backend, where = _place(group, device)
    unknown = [c for c in collectives if c not in COLLECTIVES]
    if unknown or not collectives:
        raise Error(f"collectives: expected some of {', '.join(COLLECTIVES)}, got {', '.join(unknown) or 'none'}")
    if max_bytes < SMALLEST:
        raise Error(f"max_bytes: expected at least {SMALLEST}, got {max_bytes}")
    if repeats < LEAST:
        raise Error(f"repeats: expected at least {LEAST}, got {repeats}")
    import torch

    via = via or {}
    bench = _CollectiveTimer(group, ranks, where, round_up(max_bytes, ranks), via)
    found: dict[CollectiveName, Collective] = {}
    short: list[str] = []
    for left, collective in zip(range(len(collectives), 0, -1), collectives, strict=True):
        share = max(0.0, budget - bench.elapsed()) / left
        timed = functools.partial(bench.time, collective)
        samples = table(timed, bench.elapsed, max_bytes=max_bytes, ranks=ranks, repeats=repeats, budget=share)
        if samples[-1].bytes < round_up(max_bytes, ranks):
            short.append(f"{collective} up to {samples[-1].bytes} bytes only")
        found[collective] = Collective(fit=fit(samples), samples=samples)
    source = f"measured by dovetail with torch {torch.__version__}, {backend} on {where.type}, slowest of {ranks} ranks"
    if ours := [c for c in collectives if c in via]:
        source += f"; {', '.join(ours)} by dovetail's own"
    if short:
        source += f"; the budget of {budget:g} s allowed {', '.join(short)}"
    return Network(
        name=name or f"{backend}-{ranks}",
        ranks=ranks,
        source=source,
        measured=True,
        emulated=emulated,
        collectives=found,
    )


def fit(samples: Sequence[CostSample]) -> Fit:
    """The law latency + seconds_per_byte · bytes through a table, neither part negative.

    Least squares of the relative errors: each point is weighted with 1/T, or else the largest message alone would
    decide and the latency would be noise. Where the best line has a negative part, the best without it is taken.
    """
    assert samples, "a fit needs a point"
    sizes = np.array([s.bytes for s in samples], dtype=np.float64)
    seconds = np.maximum([s.seconds.median for s in samples], 1e-12)
    largest = max(float(sizes.max()), 1.0)  # keeps both columns of the same order
    columns = np.stack([1 / seconds, sizes / largest / seconds], axis=1)
    candidates = [_only(columns, 0), _only(columns, 1)]
    if len(np.unique(sizes)) > 1:
        both = np.linalg.lstsq(columns, np.ones(len(sizes)), rcond=None)[0]
        if both.min() >= 0:
            candidates = [both]
    elif largest > 1:
        candidates = candidates[1:]  # one size tells no latency
    latency, slope = min(candidates, key=lambda c: float(np.sum((columns @ c - 1) ** 2)))
    error = float(np.median(np.abs(columns @ np.array([latency, slope]) - 1)))
    return Fit(latency=float(latency), seconds_per_byte=float(slope) / largest, error=error)


def _only(columns: np.ndarray[Any, np.dtype[np.float64]], i: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The best law that has only part i."""
    column, law = columns[:, i], np.zeros(2)
    square = float(column @ column)
    law[i] = float(column.sum()) / square if square else 0.0
    return law


def round_up(nbytes: int, ranks: int) -> int:
    """Every rank's part is a whole number of four-byte elements."""
    part = 4 * ranks
    return -(-nbytes // part) * part


def sizes(max_bytes: int, ranks: int, *, factor: int) -> list[int]:
    """Message sizes from 1 KiB to `max_bytes`, each `factor` times the one before; the last is `max_bytes` itself."""
    grid = []
    size = SMALLEST
    while size < max_bytes:
        grid.append(round_up(size, ranks))
        size *= factor
    return sorted({*grid, round_up(max_bytes, ranks)})


def repeats_within(share: float, seconds: float, repeats: int) -> int:
    """How often a call of `seconds` is repeated in a `share` of the time: at least LEAST times, at most `repeats`."""
    return max(LEAST, min(repeats, int(share / seconds) if seconds > 0 else repeats))


def table(
    time: Callable[[int, int], list[float]],
    elapsed: Callable[[], float],
    *,
    max_bytes: int,
    ranks: int,
    repeats: int,
    budget: float,
) -> tuple[CostSample, ...]:
    """The points of one collective, in about `budget` seconds.

    `time(nbytes, count)` makes `count` calls and returns the seconds of each, `elapsed()` the seconds since a start.
    """
    start = elapsed()
    middle = min(max_bytes, 2**20)
    time(SMALLEST, WARMUP)
    t0, t1 = min(time(SMALLEST, LEAST)), min(time(middle, LEAST))
    slope = max(0.0, t1 - t0) / max(1, middle - SMALLEST)

    def least(sizes: Sequence[int]) -> float:
        """Estimated seconds of the fewest repeats of these sizes."""
        return sum((WARMUP + LEAST) * (t0 + slope * size) for size in sizes)

    fine = sizes(max_bytes, ranks, factor=2)
    grid = fine if least(fine) <= budget / 2 else sizes(max_bytes, ranks, factor=4)
    samples: list[CostSample] = []
    for i, size in enumerate(grid):
        left = budget - (elapsed() - start)
        if len(samples) >= 2 and least([size]) > left:
            break
        last = min(time(size, WARMUP))
        if size > middle:  # a small message tells nothing of bandwidth: a hiccup there would forbid all large ones
            slope = max(0.0, last - t0) / size
        # The larger sizes get their fewest repeats before this one gets more than its own.
        spare = left - WARMUP * last - least(grid[i + 1 :])
        count = repeats_within(spare / (len(grid) - i), last, repeats)
        samples.append(CostSample(bytes=size, seconds=quantiles(time(size, count))))
    return tuple(samples)


class _CollectiveTimer:
    """Times collectives of one group; all ranks get the same figures, those of the slowest rank."""

    def __init__(
        self,
        group: ProcessGroup | None,
        ranks: int,
        device: torch.device,
        max_bytes: int,
        via: Mapping[CollectiveName, Callable[[torch.Tensor], object]],
    ) -> None:
        import torch

        from .clock import Clock

        self._group, self._ranks, self._device, self._via = group, ranks, device, via
        self._clock = Clock(device)
        self._give = torch.zeros(max_bytes // 4, dtype=torch.float32, device=device)
        self._take = torch.zeros_like(self._give)
        self._tiny = torch.zeros(1, device=device)
        self._start = Clock(torch.device("cpu"))
        self._started = self._start.stamp()

    def elapsed(self) -> float:
        """Seconds since the start, on the slowest rank."""
        return self._slowest([self._start.stamp() - self._started])[0]

    def time(self, collective: CollectiveName, nbytes: int, count: int) -> list[float]:
        """Seconds that each of `count` calls took on the slowest rank."""
        import torch.distributed as dist

        call = self._call(collective, round_up(nbytes, self._ranks) // 4)
        stamps = []
        for _ in range(count):
            dist.all_reduce(self._tiny, group=self._group)
            stamps.append(self._clock.stamp())
            call()
            stamps.append(self._clock.stamp())
        at = self._clock.seconds(stamps)
        return self._slowest([stop - begin for begin, stop in zip(at[::2], at[1::2], strict=True)])

    def _call(self, collective: CollectiveName, elements: int) -> Callable[[], Any]:
        import torch.distributed as dist

        group, part = self._group, elements // self._ranks
        give, take = self._give[:elements], self._take[:elements]
        if collective in self._via:
            ours = self._via[collective]
            return lambda: ours(give)
        if collective == "all_reduce":
            return lambda: dist.all_reduce(give, group=group)
        if collective == "all_to_all":
            return lambda: dist.all_to_all_single(take, give, group=group)
        if collective == "reduce_scatter":
            scatter = _renamed("reduce_scatter_single", "reduce_scatter_tensor")
            return lambda: scatter(take[:part], give, group=group)
        gather = _renamed("all_gather_single", "all_gather_into_tensor")
        return lambda: gather(take, give[:part], group=group)

    def _slowest(self, seconds: list[float]) -> list[float]:
        import torch
        import torch.distributed as dist

        slowest = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self._group)
        return [float(s) for s in slowest.tolist()]


def _renamed(new: str, old: str) -> Callable[..., Any]:
    """torch 2.13 gave two collectives new names and warns about the old."""
    import torch.distributed as dist

    found: Callable[..., Any] = getattr(dist, new, None) or getattr(dist, old)
    return found


def _place(group: ProcessGroup | None, device: torch.device | str | None) -> tuple[int, str, torch.device]:
    """(number of ranks, backend, device) of the group."""
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise Error(
            "no process group to measure: start with torchrun and call torch.distributed.init_process_group first"
        )
    ranks = dist.get_world_size(group)
    if ranks < 1:
        raise Error("this rank is not in the process group that is to be measured")
    if ranks == 1:
        raise Error("a process group of 1 rank has no network to measure: expected at least 2 ranks")
    backend = str(dist.get_backend(group))
    if device is not None:
        return ranks, backend, torch.device(device)
    if backend in ("gloo", "mpi") or not torch.accelerator.is_available():
        return ranks, backend, torch.device("cpu")
    # Not tested on the hardware at hand: needs an accelerator.
    where = torch.accelerator.current_accelerator(check_available=True)
    assert where is not None
    return ranks, backend, torch.device(where.type, torch.accelerator.current_device_index())
