"""Gradients that no rank has whole.

A gradient that was reduced and scattered leaves a `ScatteredGradient` in `.grad`: it can be set to None or to zero, as
usual between iterations; code that would compute with it gets one clear line instead of wrong numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from dovetail.core.errors import Error

from .arriving import WITHOUT_VALUES


class ScatteredGradient(torch.Tensor):
    """Stands in `.grad` for a gradient of which every rank has only its share. Takes no memory."""

    of: str
    zero: Callable[[], None]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if function in WITHOUT_VALUES or function is torch.Tensor.detach_:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        if function is torch.Tensor.zero_:
            args[0].zero()
            return args[0]
        if function is torch._foreach_zero_:
            for gradient in args[0]:
                gradient.zero() if isinstance(gradient, ScatteredGradient) else gradient.zero_()
            return None
        if function is torch.Tensor.__repr__:
            return f"ScatteredGradient(of {args[0].of!r}, {list(args[0].shape)})"
        name = next((a.of for a in _flat([*args, *(kwargs or {}).values()]) if isinstance(a, cls)), "a parameter")
        raise Error(
            f"overlap: every rank has only its share of the gradient of {name!r}: step with "
            "dovetail.optimizer(optimizer, model) and clip with its clip_grad_norm_(max_norm)"
        )


def stand_in(name: str, parameter: nn.Parameter, zero: Callable[[], None]) -> ScatteredGradient:
    """A stand-in for `.grad` of this parameter; `zero` is called when it is set to zero."""
    empty = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
    made: ScatteredGradient = empty.as_subclass(ScatteredGradient)
    made.of, made.zero = name, zero
    return made


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value
