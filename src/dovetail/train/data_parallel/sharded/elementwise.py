"""Which optimisers work element by element, so that each rank can run its share of one, and state that is looked up."""

from __future__ import annotations

import inspect
from collections import defaultdict
from typing import Any

import torch
from torch.optim import Optimizer

from dovetail.core.errors import Error

ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
"""Optimisers of torch.optim in which an element's new value depends on that element's gradients only."""


def is_elementwise(kind: type[Optimizer]) -> bool:
    """Whether this is one of ELEMENTWISE, or a subclass that leaves the arithmetic of one as it is."""
    for base in kind.__mro__:
        if base.__module__.startswith("torch.optim") and base.__name__ in ELEMENTWISE:
            theirs = [c for c in base.__mro__ if issubclass(c, Optimizer) and c is not Optimizer]
            names = {n for c in theirs for n in vars(c) if not n.startswith("__")}
            # torch wraps `step` of a class when its first optimiser is made.
            return all(inspect.unwrap(getattr(kind, n)) is inspect.unwrap(getattr(base, n)) for n in names)
    return False


def works_by_element(optimizer: Optimizer, promised: bool) -> bool:
    """Whether this optimiser works element by element; `promised` is what the user says of one of his own."""
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise Error("optimizer: differentiable=True needs whole parameters in one graph")
    kind = type(optimizer)
    return is_elementwise(kind) or (promised and not kind.__module__.startswith("torch.optim"))


class PieceState(defaultdict[torch.Tensor, dict[str, Any]]):
    """State by piece of a parameter. Code that looks a whole parameter up finds the state of this rank's piece."""

    def __init__(self) -> None:
        super().__init__(dict)
        self.piece_of: dict[int, torch.Tensor] = {}
        """The values of this rank's piece by id of the parameter."""

    def __missing__(self, key: torch.Tensor) -> dict[str, Any]:
        piece = self.piece_of.get(id(key))
        return super().__missing__(key) if piece is None else self[piece]

    def __contains__(self, key: object) -> bool:
        return super().__contains__(self.piece_of.get(id(key), key))

    def get(self, key: torch.Tensor, default: Any = None) -> Any:
        return super().get(self.piece_of.get(id(key), key), default)
