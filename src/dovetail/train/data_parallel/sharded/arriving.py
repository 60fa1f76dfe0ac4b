"""Parameters whose new values are still on their way.

After `optimizer.step()` each rank has updated its share of the parameters, and the rest arrives while the next forward
pass runs. Until a parameter is whole its class is `Arriving`: the first use of its values, by a layer, by
`state_dict()` or by any code that kept a reference, waits for this parameter's bucket and no other, and then the class
is `nn.Parameter` again. Asking for its shape, its gradient or its flags does not wait.

On an accelerator it is the device stream of the moment that waits. Another one may use the parameter next (a moving
average on a stream beside, say), so the class stays `Arriving` until the values are there for everybody.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._functorch import eager_transforms, predispatch

from dovetail.core.errors import Error
from dovetail.measure.clock import Clock

from ..pass_stamps import ParameterUse
from ..wire.lane import LaneWork


@dataclass(frozen=True)
class Arrival:
    """The all-gather that brings a parameter's new values."""

    work: LaneWork
    index: int
    uses: list[ParameterUse] | None
    """If not None, gets the first use."""
    clock: Clock
    """Stamps it."""


_arrivals: dict[int, Arrival] = {}
"""Arrivals by id of the parameter, while its class is `Arriving`."""


def _without_values() -> set[Any]:
    """Everything that can be asked of a tensor without reading its values."""
    getters = (
        *("grad", "requires_grad", "shape", "dtype", "device", "layout", "ndim", "is_leaf", "grad_fn", "output_nr"),
        *("is_sparse", "is_quantized", "is_cpu", "is_cuda", "is_meta", "is_nested", "_version", "retains_grad"),
        *("_backward_hooks", "_post_accumulate_grad_hooks", "itemsize", "nbytes", "is_mps", "is_xpu", "is_mkldnn"),
    )
    methods = (
        *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "__len__"),
        *("is_contiguous", "is_floating_point", "get_device", "requires_grad_", "register_hook"),
        *("register_post_accumulate_grad_hook", "__hash__", "type", "_is_view", "is_inference", "is_conj", "is_neg"),
    )
    setters = ("grad", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
    found = {getattr(torch.Tensor, name).__get__ for name in getters if hasattr(torch.Tensor, name)}
    found |= {getattr(torch.Tensor, name).__set__ for name in setters if hasattr(torch.Tensor, name)}
    found |= {getattr(torch.Tensor, name) for name in methods if hasattr(torch.Tensor, name)}
    # Not is_complex: torch.distributed asks for it before its C++ takes the values past torch's dispatch.
    return found | {torch.is_floating_point, torch.numel, torch._is_functional_tensor}


WITHOUT_VALUES = _without_values()


class Arriving(nn.Parameter):
    """A parameter whose new values have not arrived yet."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if function in WITHOUT_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        found, arriving = _settle_in([*args, *kwargs.values()])
        if not found:
            for arrival in list(_arrivals.values()):  # the parameter is not among the arguments, so wait for all
                arrival.work.wait()
        if not found or arriving:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    def detach(self) -> torch.Tensor:
        settle(self)
        if sys._getframe(1).f_code is nn.Parameter.__new__.__code__:  # nn.Parameter(p) wants the class of p back
            return torch.Tensor._make_subclass(nn.Parameter, self.data, False)
        with torch._C.DisableTorchFunctionSubclass():
            return torch.Tensor.detach(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _end(self)
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _end(self)
        return self.__reduce_ex__(protocol)


def _wait_for_all() -> None:
    """Waits for everything that is on its way. Who cannot wait longer, or fails, finds that out when it is used."""
    for arrival in list(_arrivals.values()):
        with contextlib.suppress(Error):
            arrival.work.end()


os.register_at_fork(before=_wait_for_all)  # a fork has the memory of the moment, and no thread that brings the rest


def _settled_first(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and _arrivals:
            _settle_in([*args, *kwargs.values()])
        return function(*args, **kwargs)

    return call


@functools.cache
def watch_entrances() -> None:
    """Lets scripted code and torch.func, which take arguments past `__torch_function__`, wait for them too."""
    for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod):
        kind.__call__ = _settled_first(kind.__call__)  # type: ignore[method-assign]
    for module, name in ((eager_transforms, "_wrap_for_grad"), (predispatch, "_add_batch_dim_impl")):
        setattr(module, name, _settled_first(getattr(module, name)))


def expect(parameter: nn.Parameter, arrival: Arrival) -> None:
    """From now on the first use of the parameter's values waits."""
    _arrivals[id(parameter)] = arrival
    parameter.__class__ = Arriving


def settle(parameter: nn.Parameter, *, last: bool = False) -> None:
    """Waits until the parameter is whole. A failed arrival raises, now and at every further use.

    `last`: on an accelerator no other device stream uses these values, or only one that comes after the current one.
    """
    if parameter.__class__ is not Arriving:
        return
    arrival = _arrivals.get(id(parameter))
    if arrival is not None:
        before = arrival.clock.stamp() if arrival.uses is not None else None
        arrival.work.wait()
        if arrival.uses is not None:
            arrival.uses.append((arrival.index, before, arrival.clock.stamp()))
        if not last and not arrival.work.is_over():
            _arrivals[id(parameter)] = replace(arrival, uses=None)
            return
        _arrivals.pop(id(parameter), None)
    parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def _end(parameter: nn.Parameter) -> None:
    """Waits until the parameter is whole for everybody; the host waits for an accelerator too."""
    if (arrival := _arrivals.get(id(parameter))) is not None:
        arrival.work.end()
    settle(parameter)


def _settle_in(values: Iterable[Any]) -> tuple[bool, bool]:
    """Settles the parameters among these values and in lists and dicts of them.

    (whether there were any, whether the values of some are not there yet for every stream of an accelerator)
    """
    found = arriving = False
    for value in values:
        if isinstance(value, Arriving):
            settle(value)
            found, arriving = True, arriving or value.__class__ is Arriving
        elif isinstance(value, (list, tuple, dict)):
            inside = _settle_in(value.values() if isinstance(value, dict) else value)
            found, arriving = found or inside[0], arriving or inside[1]
    return found, arriving
