"""A live process group → Network: what each collective costs, measured where the job will run.

What "M bytes" means, for each collective among n ranks:

    all_reduce       bytes of the tensor that every rank holds
    reduce_scatter   bytes of the full tensor that every rank puts in (each gets M/n back)
    all_gather       bytes of the full tensor that every rank gets (each puts M/n in)
    all_to_all       bytes that each rank sends in total, including the part it keeps

So the same gradient bucket has the same M whether it is all-reduced or reduce-scattered and gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from dovetail.core.errors import Error
from dovetail.core.network import COLLECTIVES, Collective, CollectiveName, CostSample, Fit, Network, Precision

from .collective_timer import CollectiveKey, CollectiveTimer, place
from .contention import MIDDLING, contention
from .message_rounds import LEAST, SMALLEST, round_up, tables

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from .collective_timer import Functions

CONTENTION_SHARE = 0.25
"""Share of the budget for measuring what computing and communicating cost each other."""


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
    via: Functions | None = None,
    reduced: Mapping[Precision, Functions] | None = None,
    compute: Callable[[], object] | None = None,
) -> Network:
    """Measures collectives of 1 KiB to `max_bytes` on a process group; call it on every rank at the same time.

    For each collective it tries a small and a middling message to see whether powers of two fit into the time or only
    powers of four do, and goes up through the sizes once, as far as the `budget` (seconds for everything) allows. Then
    it measures in rounds, one call of each collective and size in turn, so that a busy moment hits all alike. A size is
    called up to `repeats` times, at least three times, and more often where the times have not settled and the budget
    lasts. Before each call a tiny all-reduce lines the ranks up, and a small message comes right behind another of its
    size, as in training; nothing else happens inside or between the stamps. Of every call the slowest rank counts;
    calls that others disturbed are left out, and no message takes longer than a larger one. `Network.noise` says what
    error is left, `Network.lost` how much time the disturbed calls took. Sizes that no longer fit into the budget are
    left out, and `source` says so; planners follow the last slope beyond them.

    `via` replaces torch's own collectives by functions of the full, flat tensor (a reduce-scatter leaves the sum of
    this rank's part in place, an all-gather fills the other parts in), for jobs that will run those. `reduced` gives
    such functions that carry fewer bytes, by what travels; they are measured in the same way, for the same sizes of
    tensors. With `compute`, a function that keeps this rank's device busy for about as long as a middling collective,
    it also measures what computing and communicating cost each other (`contention`).

    Every decision rests on numbers that were all-reduced before, so all ranks do the same and return the same Network.
    """
    ranks, backend, where = place(group, device)
    unknown = [c for c in collectives if c not in COLLECTIVES]
    if unknown or not collectives:
        raise Error(f"collectives: expected some of {', '.join(COLLECTIVES)}, got {', '.join(unknown) or 'none'}")
    if max_bytes < SMALLEST:
        raise Error(f"max_bytes: expected at least {SMALLEST}, got {max_bytes}")
    if repeats < LEAST:
        raise Error(f"repeats: expected at least {LEAST}, got {repeats}")
    via, reduced = via or {}, reduced or {}
    _check_reduced(reduced)
    import torch

    keys: list[CollectiveKey] = [("full", c) for c in collectives]
    keys += [(precision, c) for precision, functions in reduced.items() for c in functions]
    bench = CollectiveTimer(group, ranks, where, round_up(max_bytes, ranks), {**reduced, "full": via})
    found = tables(
        bench.time,
        bench.elapsed,
        keys,
        max_bytes=max_bytes,
        ranks=ranks,
        repeats=repeats,
        budget=budget * (1 - CONTENTION_SHARE) if compute else budget,
    )
    short = [
        f"{collective}{'' if precision == 'full' else ' in ' + precision} up to {table.samples[-1].bytes} bytes only"
        for (precision, collective), table in found.items()
        if table.samples[-1].bytes < round_up(max_bytes, ranks)
    ]
    source = f"measured by dovetail with torch {torch.__version__}, {backend} on {where.type}, slowest of {ranks} ranks"
    if ours := [c for c in collectives if c in via]:
        source += f"; {', '.join(ours)} by dovetail's own"
    if short:
        source += f"; the budget of {budget:g} s allowed {', '.join(short)}"
    costs = {key: Collective(fit=fit(table.samples), samples=table.samples) for key, table in found.items()}
    together = None
    if compute:
        together = contention(
            group,
            compute,
            collective="all_reduce" if "all_reduce" in collectives else collectives[0],
            nbytes=min(max_bytes, MIDDLING),
            budget=max(0.0, budget - bench.elapsed()),
            device=where,
            via=via,
        )
    return Network(
        name=name or f"{backend}-{ranks}",
        ranks=ranks,
        source=source,
        measured=True,
        emulated=emulated,
        collectives={c: costs["full", c] for c in collectives},
        reduced={p: {c: costs[p, c] for c in functions} for p, functions in reduced.items()},
        contention=together,
        noise=max(table.noise for table in found.values()),
        lost=max(table.lost for table in found.values()),
    )


def _check_reduced(reduced: Mapping[Precision, Functions]) -> None:
    allowed = [p for p in get_args(Precision) if p != "full"]
    for precision, functions in reduced.items():
        if precision not in allowed:
            raise Error(f"reduced: expected some of {', '.join(allowed)}, got {precision}")
        if unknown := [c for c in functions if c not in COLLECTIVES]:
            raise Error(f"reduced[{precision}]: expected some of {', '.join(COLLECTIVES)}, got {', '.join(unknown)}")


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
