"""Checks once for every assignment of depths that the ranks used the same parameters, and finds what moves or idles.

The first check also tells which buffers forward passes change, and which parameters no rank uses.
"""

from __future__ import annotations

import torch
from torch import nn

from dovetail.core.errors import Error

from .courier import Courier
from .segments import Leaf, Segments


class UseCheck:
    """What the ranks found out about the model's use of its parameters and buffers. The same on all ranks."""

    def __init__(self, module: nn.Module, segments: Segments, courier: Courier, *, uneven_use: bool) -> None:
        """`uneven_use`: the model may use a layer for some inputs only."""
        self._module, self._segments, self._courier, self._uneven_use = module, segments, courier, uneven_use
        self._checked: set[tuple[int, ...]] = set()
        self._before: dict[str, torch.Tensor] = {}
        self.moving_buffers: list[torch.Tensor] = []
        """Buffers that forward passes change, such as batch norm's statistics; known after the first check."""
        self.used_leaves: list[Leaf] = segments.leaves
        """Parameters that some rank uses; all of them until the first check, and always with `uneven_use`."""

    def before_forward(self) -> None:
        """Remembers the buffers before the first forward pass."""
        if not self._checked and not self._before:
            self._before = {n: b.clone() for n, b in self._module.named_buffers() if b.is_floating_point()}

    def due(self, depths: tuple[int, ...]) -> bool:
        return depths not in self._checked

    def check(self, depths: tuple[int, ...], used: set[Leaf], fault: str) -> None:
        """A collective: all ranks call it after a step at `depths`, each with the leaves that got a gradient on it.

        Raises, on all ranks, the first rank's `fault`, or says which contributor got no gradient where another did.
        """
        leaves = self._segments.leaves
        mine = [i for i, leaf in enumerate(leaves) if leaf in used]
        moved = [
            n for n, b in self._module.named_buffers() if n in self._before and not torch.equal(b, self._before[n])
        ]
        reports: list[tuple[list[int], list[str], str]] = self._courier.gather_objects((mine, moved, fault))
        if line := next((theirs for *_, theirs in reports if theirs), ""):
            raise Error(line)
        seen = [set(theirs) for theirs, *_ in reports]
        if not self._uneven_use and (line := self._segments.uneven(seen, depths) or ""):
            raise Error(line)
        if not self._checked:
            names = {name for _, theirs, _ in reports for name in theirs}
            self.moving_buffers = [b for n, b in self._module.named_buffers() if n in names]
            self._before = {}
            self._courier.share(self.moving_buffers)
            if not self._uneven_use:
                self.used_leaves = [leaf for i, leaf in enumerate(leaves) if i in set.union(*seen)]
        self._checked.add(depths)
