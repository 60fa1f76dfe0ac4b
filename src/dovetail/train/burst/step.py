"""One step of a burst job, written out: the parts forward, the loss, the parts backward, the sums of gradients.

This is the one global order of collectives. Every rank walks through all of it and takes part where it has a part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from dovetail.core.errors import Error
from dovetail.core.sample_layout import Layout, block_layout, moved, next_layout

from .burst_record import Recorder
from .reshard import Exchange, Sketch, sketch
from .stages import Reduction, StagePart
from .wire import Wire

Loss = Callable[..., Tensor]


def layouts(parts: Sequence[StagePart], batch: int) -> list[Layout]:
    """Which rank holds which samples in every part."""
    found = [block_layout(batch, parts[0].ranks)]
    for part in parts[1:]:
        found.append(next_layout(found[-1], part.ranks))
    return found


def groups(parts: Sequence[StagePart]) -> set[tuple[int, ...]]:
    """All rank sets that a step needs process groups of, whatever the batch."""
    borders = [*pairwise(parts), (parts[0], parts[-1])]
    return {p.ranks for p in parts} | {tuple(sorted({*a.ranks, *b.ranks})) for a, b in borders}


class Route:
    """The way of a global batch of one size through the parts: layouts, exchanges, and what crosses each border."""

    def __init__(self, wire: Wire, parts: Sequence[StagePart], batch: int) -> None:
        self.batch, self._wire = batch, wire
        self.layouts = layouts(parts, batch)
        pairs = list(pairwise(self.layouts))
        self.forth = [Exchange(wire, a, b) for a, b in pairs]
        self.back = [Exchange(wire, b, a) for a, b in pairs]
        self.direct = Exchange(wire, self.layouts[0], self.layouts[-1])
        self._known: dict[Hashable, dict[int, list[Sketch]]] = {}
        self.kinds: dict[int, list[Sketch]] = {}
        """By part: the tensors that leave it."""

    def look(self, key: Hashable) -> None:
        """Before a step: what crosses borders depends on nothing but `key`, so each key is looked at only once."""
        self.kinds = self._known.setdefault(key, {})

    def settle(self, i: int, outputs: list[Tensor], what: str) -> list[Sketch]:
        """What leaves part i. The first time, a rank that has samples there tells all ranks."""
        if i not in self.kinds:
            seen = [sketch(o) for o in outputs]
            self.kinds[i] = self._wire.share(seen, self.layouts[i].first_holder(), what)
        return self.kinds[i]

    def moved_bytes(self) -> int:
        """Predicted: samples that change ranks at each border, times the bytes of one, in both directions."""
        total = 0
        for i, exchange in enumerate(self.forth):
            if i not in self.kinds:
                raise Error(f"batch: expected that of a step that was taken, got {self.batch}: none shows what moves")
            kinds = self.kinds[i]
            each = sum(k.bytes for k in kinds) + sum(k.bytes for k in kinds if k.grad)
            total += moved(exchange.before, exchange.after) * each
        return total


def forward(
    wire: Wire, parts: Sequence[StagePart], route: Route, rows: list[Tensor], step: int, recorder: Recorder | None
) -> list[Tensor]:
    """What leaves the last part on this rank, detached. The parts keep their graphs."""
    values = rows
    for i, part in enumerate(parts):
        if i > 0:
            values = _exchange(route.forth[i - 1], values, f"step {step}: samples into {part.name}", recorder)
            values = [v.requires_grad_(k.grad) for v, k in zip(values, route.kinds[i - 1], strict=True)]
        part.context.step, part.context.samples = step, route.layouts[i].samples(wire.rank)
        part.leaves, part.outputs = values, []
        if wire.rank in part.ranks and part.runs(len(part.context.samples)):
            start = time.perf_counter()
            if wire.gaps is not None:
                wire.gaps.end()
            part.forward()
            if recorder is not None:
                recorder.add(part.name, "forward", start)
        if wire.gaps is not None and wire.rank not in parts[min(i + 1, len(parts) - 1)].ranks:
            wire.gaps.begin(("forward", i))
        kinds = route.settle(i, part.outputs, f"step {step}: shapes of {part.name}")
        values = [o.detach() for o in part.outputs] or [k.empty(0, wire.device) for k in kinds]
    return values


def losses(route: Route, ends: list[Tensor], labels: object, loss: Loss, rank: int, total: Tensor) -> None:
    """Adds this rank's part of the loss to `total` and leaves the gradients in `ends`.

    The sum of the samples' losses over the GLOBAL batch: how many samples a rank happens to have does not matter.
    """
    rows = len(route.layouts[-1].samples(rank))
    for end, kind in zip(ends, route.kinds[len(route.layouts) - 1], strict=True):
        end.requires_grad_(kind.grad)
    if not rows:
        return
    values = loss(*ends, labels)
    if values.dim() == 0 or len(values) != rows:
        got = "a scalar" if values.dim() == 0 else str(len(values))
        raise Error(f"loss: expected one value for each of {rows} samples (reduction='none'), got {got}")
    mean = values.sum() / route.batch
    if mean.requires_grad:
        mean.backward()
    total += mean.detach()


def backward(
    wire: Wire, parts: Sequence[StagePart], route: Route, ends: list[Tensor], step: int, recorder: Recorder | None
) -> list[tuple[str, Reduction]]:
    """Goes back through the parts; the sums of gradients that are still under way."""
    grads: list[Tensor | None] = [e.grad for e in ends]
    pending: list[tuple[str, Reduction]] = []
    for i in reversed(range(len(parts))):
        part = parts[i]
        back: list[Tensor | None] = [None] * len(part.leaves)
        fresh: list[Tensor | None] = []
        if wire.rank in part.ranks:
            fresh = [None] * len(part.parameters())
        if part.outputs:
            start = time.perf_counter()
            if wire.gaps is not None:
                wire.gaps.end()
            back, fresh = part.backward(grads)
            if recorder is not None:
                recorder.add(part.name, "backward", start)
        if fresh:
            reduction = Reduction(part.parameters(), fresh, part.ranks)
            reduction.start(part.context)
            pending.append((part.name, reduction))
            for work, nbytes in reduction.works if recorder is not None else ():
                assert recorder is not None
                recorder.watch(work, f"gradients of {part.name}", nbytes)
        if wire.gaps is not None and wire.rank not in parts[max(i - 1, 0)].ranks:
            wire.gaps.begin(("backward", i))
        if i > 0:
            rows = len(route.layouts[i].samples(wire.rank))
            kinds = route.kinds[i - 1]
            returning = [j for j, kind in enumerate(kinds) if kind.grad]
            sent = [_or_zeros(back[j], kinds[j], rows, wire.device) for j in returning]
            what = f"step {step}: gradients back from {part.name}"
            got = _exchange(route.back[i - 1], sent, what, recorder) if sent else []
            grads = [None] * len(kinds)
            for j, grad in zip(returning, got, strict=True):
                grads[j] = grad
    return pending


def _exchange(exchange: Exchange, values: list[Tensor], what: str, recorder: Recorder | None) -> list[Tensor]:
    if recorder is not None:
        exchange.meet(what)
    start, before = time.perf_counter(), exchange.wire.moved_bytes
    out = exchange(values, what)
    if recorder is not None and exchange.takes_part:
        recorder.add(what.partition(": ")[2], "communication", start, exchange.wire.moved_bytes - before)
    return out


def _or_zeros(grad: Tensor | None, kind: Sketch, rows: int, device: torch.device) -> Tensor:
    return kind.empty(rows, device).zero_() if grad is None else grad
