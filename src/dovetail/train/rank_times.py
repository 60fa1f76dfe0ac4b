"""What a rank does in an iteration by itself, from stamps: input, layers, handing gradients over; and its waiting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Phase = Literal["input", "forward", "backward", "network", "optimizer"]
PHASES: tuple[Phase, ...] = get_args(Phase)
WAITING = "waiting"
"""Column of the time in which a rank waits for others."""
Column = tuple[str, str]
"""A phase, or `WAITING`, and the name of a layer ("" for the phase as such)."""

LOSS = "(loss)"
"""Stands for the layer between the end of forward and the first gradient: the loss, and the caller's own code."""


@dataclass(frozen=True)
class RankIteration:
    """What one rank did in one iteration, in seconds; nothing but `waiting` has waiting for other ranks in it."""

    input: float
    """From the end of the iteration before to the start of forward: data, and whatever else the script does there."""
    forward: Mapping[str, float]
    """By layer, each without the layers inside it."""
    backward: Mapping[str, float]
    """By layer; `LOSS` is what comes before the first one."""
    network: float = 0.0
    """Handing gradients over to be reduced."""
    optimizer: float = 0.0
    """The update, where it is known apart from the input."""
    waiting: float = 0.0

    def columns(self) -> dict[Column, float]:
        return {
            ("input", ""): self.input,
            **{("forward", layer): seconds for layer, seconds in self.forward.items()},
            **{("backward", layer): seconds for layer, seconds in self.backward.items()},
            ("network", ""): self.network,
            ("optimizer", ""): self.optimizer,
            (WAITING, ""): self.waiting,
        }


def columns_of(iterations: Iterable[RankIteration]) -> list[Column]:
    """Every column of some iterations, in order of appearance."""
    found: dict[Column, None] = {}
    for iteration in iterations:
        found |= dict.fromkeys(iteration.columns())
    return list(found)


def table_of(iterations: Sequence[RankIteration], columns: Sequence[Column]) -> list[list[float]]:
    """Seconds, iteration by iteration, in the order of `columns`; what is not among these is left out."""
    rows = [iteration.columns() for iteration in iterations]
    return [[row.get(column, 0.0) for column in columns] for row in rows]


LayerVisit = tuple[str, bool, float]
"""A layer, whether it was entered or else left, and when."""
GradientMark = tuple[Literal["output", "ready", "handed"], str, float]
"""What happened in backward, the layer, and when: the gradient of a layer's output was there, that of one of its
parameters was ready, or was handed over to be reduced."""


def rank_iteration(
    visits: Sequence[LayerVisit],
    marks: Sequence[GradientMark],
    *,
    previous: float,
    began: float,
    forwarded: float,
    ended: float,
    computed: float | None = None,
    optimizer: float = 0.0,
    waits: Sequence[tuple[float, float]] = (),
) -> RankIteration:
    """What a rank did from `previous`, the end of the iteration before, to `ended`; all times by one clock, in seconds.

    Forward was called at `began` and returned at `forwarded`; the backward pass was over at `computed`, where that is
    known, and waited for collectives from then on. `waits` are those for other ranks inside forward.
    """
    waited = sum(min(stop, forwarded) - max(start, began) for start, stop in waits if began <= start <= forwarded)
    forward = forward_by_layer(visits, waits) or {"": max(0.0, forwarded - began - waited)}
    backward, handing, last = backward_by_layer(forwarded, marks)
    network = handing + (max(0.0, computed - last) if computed is not None else 0.0)
    before = max(0.0, began - previous)
    own = before + sum(forward.values()) + sum(backward.values()) + network + optimizer
    return RankIteration(
        input=before,
        forward=forward,
        backward=backward,
        network=network,
        optimizer=optimizer,
        waiting=max(0.0, ended - previous - own),
    )


def forward_by_layer(visits: Sequence[LayerVisit], waits: Sequence[tuple[float, float]] = ()) -> dict[str, float]:
    """Seconds of each layer without the layers inside it.

    `visits` are in the order of time; `waits` are the starts and ends of waits for other ranks, which do not count.
    """
    spent: dict[str, float] = {}
    inside: list[str] = []
    last = 0.0
    for layer, entered, at in visits:
        now = at - sum(min(stop, at) - start for start, stop in waits if start < at)
        if inside:
            spent[inside[-1]] = spent.get(inside[-1], 0.0) + max(0.0, now - last)
        if entered:
            inside.append(layer)
            spent.setdefault(layer, 0.0)
        elif layer in inside:
            # An exception may have left layers without a visit of their own.
            del inside[len(inside) - 1 - inside[::-1].index(layer) :]
        last = now
    return spent


def backward_by_layer(start: float, marks: Iterable[GradientMark]) -> tuple[dict[str, float], float, float]:
    """(seconds of each layer, seconds of handing gradients over, time of the last mark).

    A layer's backward begins when the gradient of its output is there, and goes on to the next layer's.
    """
    spent: dict[str, float] = {}
    handing, last, current = 0.0, start, LOSS
    for kind, layer, at in sorted(marks, key=lambda mark: mark[2]):
        seconds = max(0.0, at - last)
        if kind == "handed":
            handing += seconds
        else:
            of = layer if kind == "ready" else current
            spent[of] = spent.get(of, 0.0) + seconds
            current = layer
        last = max(last, at)
    return spent, handing, last
