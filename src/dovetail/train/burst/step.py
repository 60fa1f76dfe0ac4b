"""One step of a burst job: the parts forward, the loss, the parts backward, the all-reduces of gradients.

All collectives have this one global order. Every rank goes through all of it and communicates where it has a share.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from dovetail.core.errors import Error
from dovetail.core.sample_layout import SampleLayout, block_layout, moved, next_layout
from dovetail.train.device_streams import hold_here, to_device
from dovetail.train.recording import SpanRecorder

from .communicator import Communicator
from .reshard import Reshard, RowSpec, row_spec
from .stages import Reduction, StagePart

Loss = Callable[..., Tensor]


def layouts(parts: Sequence[StagePart], batch: int) -> list[SampleLayout]:
    """For every part, which rank holds which samples."""
    found = [block_layout(batch, parts[0].ranks)]
    for part in parts[1:]:
        found.append(next_layout(found[-1], part.ranks))
    return found


def groups(parts: Sequence[StagePart]) -> set[tuple[int, ...]]:
    """All rank sets for which a step needs process groups, whatever the batch."""
    boundaries = [*pairwise(parts), (parts[0], parts[-1])]
    return {p.ranks for p in parts} | {tuple(sorted({*a.ranks, *b.ranks})) for a, b in boundaries}


class Route:
    """The way of a global batch of one size through the parts: layouts, re-sharding, and what crosses each boundary."""

    def __init__(self, comm: Communicator, parts: Sequence[StagePart], batch: int) -> None:
        self.batch, self._comm = batch, comm
        self.layouts = layouts(parts, batch)
        pairs = list(pairwise(self.layouts))
        self.forth = [Reshard(comm, a, b) for a, b in pairs]
        self.back = [Reshard(comm, b, a) for a, b in pairs]
        self.direct = Reshard(comm, self.layouts[0], self.layouts[-1])
        self._known: dict[Hashable, dict[int, list[RowSpec]]] = {}
        self.specs: dict[int, list[RowSpec]] = {}
        """By part: the tensors that leave it, as far as this step has shown them."""
        self._indices: dict[tuple[int, torch.device], Tensor] = {}

    def rows(self, whole: Tensor, part: int) -> Tensor:
        """This rank's rows in a part, of a tensor with all rows of the batch."""
        if (part, whole.device) not in self._indices:
            rows = self.layouts[part].samples(self._comm.rank)
            self._indices[part, whole.device] = to_device(rows, torch.int64, whole.device)
        index = self._indices[part, whole.device]
        hold_here([index])
        return whole.index_select(0, index)

    def select(self, key: Hashable) -> None:
        """Called before a step: what crosses boundaries depends on `key` only, so each key is examined once."""
        self.specs = self._known.setdefault(key, {})

    def leaving(self, i: int, outputs: list[Tensor], what: str) -> list[RowSpec]:
        """The tensors that leave part i. The first time, a rank that has samples there tells all ranks."""
        if i not in self.specs:
            seen = [row_spec(o) for o in outputs]
            self.specs[i] = self._comm.share(seen, self.layouts[i].first_holder(), what)
        return self.specs[i]

    def moved_bytes(self) -> int:
        """Predicted bytes: samples that change ranks at each boundary, times the bytes of one, in both directions."""
        total = 0
        for i, reshard in enumerate(self.forth):
            if i not in self.specs:
                raise Error(
                    f"batch: expected that of a step that was taken, got {self.batch}: a step has to show what moves"
                )
            specs = self.specs[i]
            each = sum(s.bytes for s in specs) + sum(s.bytes for s in specs if s.grad)
            total += moved(reshard.before, reshard.after) * each
        return total


def forward(
    comm: Communicator, parts: Sequence[StagePart], route: Route, rows: list[Tensor], step: int, recorder: SpanRecorder
) -> list[Tensor]:
    """The outputs of the last part on this rank, detached. The parts keep their graphs."""
    values = rows
    for i, part in enumerate(parts):
        if i > 0:
            values = _resharded(route.forth[i - 1], values, f"step {step}: samples into {part.name}", recorder)
            values = [v.requires_grad_(s.grad) for v, s in zip(values, route.specs[i - 1], strict=True)]
        part.context.step, part.context.samples = step, route.layouts[i].samples(comm.rank)
        part.leaves, part.outputs = values, []
        if comm.rank in part.ranks and part.runs(len(part.context.samples)):
            start = recorder.begin()
            if comm.gaps is not None:
                comm.gaps.end()
            part.forward()
            recorder.add(part.name, "forward", start)
        if comm.gaps is not None and comm.rank not in parts[min(i + 1, len(parts) - 1)].ranks:
            comm.gaps.begin(("forward", i))
        specs = route.leaving(i, part.outputs, f"step {step}: shapes of {part.name}")
        values = [o.detach() for o in part.outputs] or [s.empty(0, comm.device) for s in specs]
    return values


def losses(route: Route, ends: list[Tensor], labels: object, loss: Loss, rank: int, total: Tensor) -> None:
    """Adds this rank's part of the loss to `total` and leaves the gradients in `ends`.

    The loss is the sum over samples divided by the GLOBAL batch: how many samples a rank happens to have does not
    matter.
    """
    rows = len(route.layouts[-1].samples(rank))
    for end, spec in zip(ends, route.specs[len(route.layouts) - 1], strict=True):
        end.requires_grad_(spec.grad)
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
    comm: Communicator, parts: Sequence[StagePart], route: Route, ends: list[Tensor], step: int, recorder: SpanRecorder
) -> list[tuple[str, Reduction]]:
    """Goes back through the parts; returns the all-reduces of gradients, by part, that are still running."""
    grads: list[Tensor | None] = [e.grad for e in ends]
    pending: list[tuple[str, Reduction]] = []
    for i in reversed(range(len(parts))):
        part = parts[i]
        back: list[Tensor | None] = [None] * len(part.leaves)
        fresh: list[Tensor | None] = []
        if comm.rank in part.ranks:
            fresh = [None] * len(part.parameters())
        if part.outputs:
            start = recorder.begin()
            if comm.gaps is not None:
                comm.gaps.end()
            back, fresh = part.backward(grads)
            recorder.add(part.name, "backward", start)
        if fresh:
            reduction = Reduction(part.parameters(), fresh, part.ranks)
            reduction.start(part.context)
            pending.append((part.name, reduction))
            for work, nbytes in reduction.works:
                recorder.watch(work, f"gradients of {part.name}", nbytes)
        if comm.gaps is not None and comm.rank not in parts[max(i - 1, 0)].ranks:
            comm.gaps.begin(("backward", i))
        if i > 0:
            rows = len(route.layouts[i].samples(comm.rank))
            specs = route.specs[i - 1]
            returning = [j for j, spec in enumerate(specs) if spec.grad]
            sent = [_or_zeros(back[j], specs[j], rows, comm.device) for j in returning]
            what = f"step {step}: gradients back from {part.name}"
            got = _resharded(route.back[i - 1], sent, what, recorder) if sent else []
            grads = [None] * len(specs)
            for j, grad in zip(returning, got, strict=True):
                grads[j] = grad
    return pending


def _resharded(reshard: Reshard, values: list[Tensor], what: str, recorder: SpanRecorder) -> list[Tensor]:
    if recorder.active:
        reshard.meet(what)
    start, before = recorder.begin(), reshard.comm.moved_bytes
    out = reshard(values, what)
    if reshard.takes_part:
        recorder.add(what.partition(": ")[2], "communication", start, nbytes=reshard.comm.moved_bytes - before)
    return out


def _or_zeros(grad: Tensor | None, spec: RowSpec, rows: int, device: torch.device) -> Tensor:
    return spec.empty(rows, device).zero_() if grad is None else grad
