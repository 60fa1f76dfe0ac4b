"""Explicit stages: each part of the model has a graph of its own, with detached tensors at its boundaries.

Forward runs the parts in order and keeps each part's leaves and outputs. Backward goes through them in reverse: one
`backward` per part, and right after it starts the all-reduce of the part's gradients over the ranks that ran it, while
earlier parts go on. What crosses a boundary is plain data, so the order of all collectives is written in one loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dovetail.core.errors import Error, first_line
from dovetail.train.device_streams import to_device

from .norm import Context, GroupBatchNorm, SampleDropout
from .split import tensors


@dataclass(eq=False)
class StagePart:
    """Layers that run on the same ranks and whose gradients travel together."""

    name: str
    layers: list[nn.Module]
    ranks: tuple[int, ...]
    context: Context
    leaves: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._across_ranks = False
        for layer in self.layers:
            for m in layer.modules():
                if isinstance(m, (GroupBatchNorm, SampleDropout)):
                    m.context = self.context
                self._across_ranks |= isinstance(m, GroupBatchNorm)
                if getattr(m, "inplace", False):
                    m.inplace = False  # type: ignore[assignment]  # the part before still needs what this part begins with

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that get gradients, each once."""
        found = {p: None for layer in self.layers for p in layer.parameters() if p.requires_grad}
        return list(found)

    def runs(self, rows: int) -> bool:
        """Whether a rank with so many rows runs this part: without rows only if a BatchNorm would wait for it."""
        return rows > 0 or self._across_ranks

    def forward(self) -> None:
        """Computes `outputs` from `leaves`; they keep their autograd history."""
        value: object = tuple(self.leaves)
        for layer in self.layers:
            given = tensors(value, self.name)
            try:
                value = layer(*given)
            except Error:
                raise
            except Exception as e:
                empty = given[0].shape[0] == 0
                hint = "; it must accept a local batch of 0 samples, or be planned on fewer devices" if empty else ""
                raise Error(f"{self.name}: {type(layer).__name__}: {first_line(e)}{hint}") from e
        self.outputs = tensors(value, self.name)

    def backward(self, grads: Sequence[Tensor | None]) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """(gradients of the leaves, new gradients of the parameters); what `.grad` held before is kept.

        An output without a gradient counts as one of zeros, so that all ranks go through the same graph. Frees the
        graph.
        """
        parameters = self.parameters()
        aside = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        pairs = [(o, g) for o, g in zip(self.outputs, grads, strict=True) if o.requires_grad]
        if pairs:
            torch.autograd.backward([o for o, _ in pairs], [torch.zeros_like(o) if g is None else g for o, g in pairs])
        fresh = [p.grad for p in parameters]
        for p, held in zip(parameters, aside, strict=True):
            p.grad = held
        back = [leaf.grad for leaf in self.leaves]
        self.leaves, self.outputs = [], []
        return back, fresh


@dataclass(eq=False)
class Reduction:
    """The all-reduce of one part's gradients over its ranks, in flat buffers, one per dtype.

    Behind the gradients each buffer has one number per parameter that says whether it got one: a parameter that no
    sample on any rank has used keeps `grad` as it was, as in one process.
    """

    parameters: list[nn.Parameter]
    fresh: list[Tensor | None]
    ranks: tuple[int, ...]
    works: list[tuple[dist.Work | None, int]] = field(default_factory=list)
    """(collective, its bytes)"""
    _buffers: list[tuple[list[int], Tensor]] = field(default_factory=list)
    _used: list[bool] = field(default_factory=list)
    """Whether this rank has a gradient of each parameter."""

    def start(self, context: Context) -> None:
        if len(self.ranks) == 1:
            return
        self._used = [grad is not None for grad in self.fresh]
        kinds: dict[torch.dtype, list[int]] = {}
        for i, p in enumerate(self.parameters):
            kinds.setdefault(p.dtype, []).append(i)
        for which in kinds.values():
            flat_grads = [self._or_zeros(i).reshape(-1) for i in which]
            used = to_device([float(self._used[i]) for i in which], flat_grads[0].dtype, flat_grads[0].device)
            flat = torch.cat([*flat_grads, used])
            self.works.append((context.comm.all_reduce(flat, self.ranks), flat.numel() * flat.element_size()))
            self._buffers.append((which, flat))
        self.fresh = self.fresh if not self._buffers else [None] * len(self.fresh)

    def unsure(self) -> Tensor | None:
        """When the collectives are done: how many ranks have a gradient of each parameter, if this rank must ask.

        Only if it has none of some: what one rank has used, some rank has. None if it has all.
        """
        if not self._buffers or all(self._used):
            return None
        return torch.cat([flat[-len(which) :].double() for which, flat in self._buffers])

    def finish(self, counts: Sequence[float] | None = None) -> None:
        """Adds the sums to the parameters' `.grad`; `counts` is what `unsure` gave. When the collectives are done."""
        known = iter([1.0] * len(self.parameters) if counts is None else counts)
        for which, flat in self._buffers:
            at = 0
            for i in which:
                p = self.parameters[i]
                if next(known):
                    self.fresh[i] = flat[at : at + p.numel()].view_as(p)
                at += p.numel()
        for p, grad in zip(self.parameters, self.fresh, strict=True):
            if grad is not None:
                p.grad = grad if p.grad is None else p.grad.add_(grad)

    def _or_zeros(self, i: int) -> Tensor:
        grad = self.fresh[i]
        return torch.zeros_like(self.parameters[i]) if grad is None else grad


def finish_all(reductions: Sequence[Reduction]) -> None:
    """Ends reductions whose collectives are done. The host reads from an accelerator at most once, for all of them."""
    unsure = [reduction.unsure() for reduction in reductions]
    asked = [counts for counts in unsure if counts is not None]
    known = iter(torch.cat(asked).tolist()) if asked else iter(())
    for reduction, counts in zip(reductions, unsure, strict=True):
        reduction.finish(None if counts is None else [next(known) for _ in range(len(counts))])
