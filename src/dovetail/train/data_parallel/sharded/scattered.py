"""Gradients that no rank has whole.

A gradient that was reduced and scattered leaves a `ScatteredGradient` in `.grad`. It takes no memory, and torch asks
its `__torch_function__` before it computes with it:

* norms over all elements are the true ones: all ranks' shares count, with one all-reduce for all gradients;
* in-place functions whose other arguments are numbers change this rank's share, as every rank changes its own;
* `GradScaler` unscales this rank's share, and all ranks agree on whether an element was infinite or NaN;
* whatever else reads the gradient gets a whole copy, gathered from all ranks. In-place changes of it take effect.

So `torch.nn.utils.clip_grad_norm_`, `clip_grad_value_` and `torch.amp.GradScaler` work as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from dovetail.core.errors import Error

from .arriving import WITHOUT_VALUES


class SharesOfGradients(Protocol):
    """This rank's shares of the gradients of one model; gradients have the numbers of their parameters."""

    def zero(self, index: int) -> None:
        """Sets a gradient to zero."""

    def pieces(self, index: int) -> list[torch.Tensor]:
        """What this rank has of a gradient, to be changed in place."""

    def norms(self, indices: Sequence[int], order: float) -> list[torch.Tensor]:
        """Norms of whole gradients. All ranks call it together."""

    def whole(self, index: int) -> torch.Tensor:
        """A whole gradient; changes of it are written back. All ranks call it together."""

    def write(self, index: int, values: torch.Tensor) -> None:
        """Puts this rank's part of new values into its share."""

    def unscale(self, indices: Sequence[int], found: torch.Tensor, inverse: torch.Tensor) -> None:
        """What GradScaler does: multiplies gradients by `inverse`; `found` becomes 1 if an element is not finite.

        All ranks call it together, and agree on `found`.
        """


class ScatteredGradient(torch.Tensor):
    """Stands in `.grad` for a gradient of which every rank has only its share. Takes no memory."""

    of: str
    number: int
    shares_of: Callable[[], SharesOfGradients | None]

    @property
    def shares(self) -> SharesOfGradients:
        """Where the shares are."""
        found = self.shares_of()
        if found is None:
            raise Error(
                f"overlap: this gradient of {self.of!r} is no longer in .grad, and every rank had only its share of "
                "it: keep a copy, p.grad.clone(), to use it later"
            )
        return found

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        # torch.compile describes gradients too, down to their storage, which is one zero.
        if function in WITHOUT_VALUES or function in (torch.Tensor.detach_, torch.Tensor.untyped_storage):
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        if function is torch.Tensor.__repr__:
            return f"ScatteredGradient(of {args[0].of!r}, {list(args[0].shape)})"
        special = _SPECIAL.get(function)
        if special is not None:
            return special(*args, **kwargs)
        if function in _CHANGES and isinstance(args[0], cls) and not _tensors([*args[1:], *kwargs.values()]):
            for piece in args[0].shares.pieces(args[0].number):
                function(piece, *args[1:], **kwargs)
            return args[0]
        order = _order(function, args, kwargs)
        if order is not None and isinstance(args[0], cls):
            return args[0].shares.norms([args[0].number], order)[0]
        return _with_wholes(function, args, kwargs)

    def __str__(self) -> str:
        """The values, gathered: `print` shows them. `repr`, which debuggers call at any time, needs no other rank."""
        return str(self.shares.whole(self.number))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.shares.whole(self.number).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.shares.whole(self.number).clone().__reduce_ex__(protocol)


def stand_in(
    name: str, parameter: nn.Parameter, index: int, shares_of: Callable[[], SharesOfGradients | None]
) -> ScatteredGradient:
    """A stand-in for `.grad` of this parameter, which has this number."""
    empty = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
    made = torch.Tensor._make_subclass(ScatteredGradient, empty, False)
    made.of, made.number, made.shares_of = name, index, shares_of
    return made


def renewed(gradient: ScatteredGradient) -> ScatteredGradient:
    """A stand-in for the next gradient of the parameter: whoever has kept this one must not read that one from it."""
    with torch._C.DisableTorchFunctionSubclass():
        made = torch.Tensor._make_subclass(ScatteredGradient, gradient, False)
    made.of, made.number, made.shares_of = gradient.of, gradient.number, gradient.shares_of
    gradient.shares_of = _gone
    return made


def _gone() -> None:
    return None


def _with_wholes(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Calls a function with whole gradients in place of their stand-ins."""
    wholes: dict[int, tuple[torch.Tensor, ScatteredGradient]] = {}

    def swap(value: Any) -> Any:
        if isinstance(value, ScatteredGradient):
            if id(value) not in wholes:
                wholes[id(value)] = (value.shares.whole(value.number), value)
            return wholes[id(value)][0]
        if isinstance(value, (list, tuple)):
            swapped = [swap(v) for v in value]
            return type(value)(*swapped) if hasattr(value, "_fields") else type(value)(swapped)
        return {k: swap(v) for k, v in value.items()} if isinstance(value, dict) else value

    args, kwargs = swap(tuple(args)), swap(kwargs)
    before = {key: whole._version for key, (whole, _) in wholes.items()}
    result = function(*args, **kwargs)
    for key, (whole, stands) in wholes.items():
        if result is whole and whole._version != before[key]:
            return stands  # p.grad += x assigns what this returns to p.grad
    return result


def _tensors(values: Iterable[Any]) -> bool:
    """Whether any of these arguments is a tensor with more than one number, or a gradient."""
    return any(isinstance(v, ScatteredGradient) or (isinstance(v, torch.Tensor) and v.dim() > 0) for v in values)


def _methods(*names: str) -> set[Any]:
    return {getattr(torch.Tensor, name) for name in names if hasattr(torch.Tensor, name)}


_CHANGES = _methods(
    *("mul_", "multiply_", "div_", "divide_", "true_divide_", "add_", "sub_", "subtract_", "pow_", "fill_"),
    *("clamp_", "clip_", "clamp_min_", "clamp_max_", "nan_to_num_", "neg_", "negative_", "abs_", "sign_", "square_"),
    *("__imul__", "__itruediv__", "__idiv__", "__iadd__", "__isub__", "__ipow__"),
)
"""In-place functions of one element and numbers."""


def _order(function: Any, args: Any, kwargs: dict[str, Any]) -> float | None:
    """The order of a norm over all elements of a tensor; None for any other function."""
    if function not in _NORMS:
        return None
    named = dict(zip(_NORMS[function], args[1:], strict=False)) | kwargs
    order = named.pop("ord", named.pop("p", 2))
    if any(v is not None and v is not False for v in named.values()):
        return None  # over some dimensions, or into another tensor
    if order is None or order == "fro":
        return 2.0
    matrix = function is torch.linalg.norm and args[0].dim() == 2
    return None if isinstance(order, str) or matrix else float(order)


_NORMS: dict[Any, tuple[str, ...]] = {
    torch.linalg.vector_norm: ("ord", "dim", "keepdim"),
    torch.linalg.norm: ("ord", "dim", "keepdim"),
    torch.norm: ("p", "dim", "keepdim", "out", "dtype"),
    torch.Tensor.norm: ("p", "dim", "keepdim", "dtype"),
}
"""Functions that take norms, with the names of the arguments behind the first."""


def _zero(gradient: ScatteredGradient) -> ScatteredGradient:
    gradient.shares.zero(gradient.number)
    return gradient


def _copy(gradient: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(gradient, ScatteredGradient):
        return gradient.copy_(values.shares.whole(values.number), *args, **kwargs)
    if isinstance(values, ScatteredGradient):
        values = values.shares.whole(values.number)
    gradient.shares.write(gradient.number, values)
    return gradient


def _set_data(gradient: ScatteredGradient, values: torch.Tensor) -> None:
    _copy(gradient, values)


def _same(gradient: ScatteredGradient) -> ScatteredGradient:
    return gradient


def _foreach_norms(gradients: Sequence[Any], order: float = 2, dtype: Any = None) -> list[torch.Tensor]:
    found = [torch.linalg.vector_norm(g, order) for g in gradients]
    return found if dtype is None else [norm.to(dtype) for norm in found]


def _each(function: Any) -> Callable[..., None]:
    """torch's function of lists as a loop over one of tensors; the second argument may be a list too."""

    def call(gradients: Sequence[Any], other: Any = None, *args: Any, **kwargs: Any) -> None:
        for k, gradient in enumerate(gradients):
            second = other[k] if isinstance(other, (list, tuple)) else other
            function(gradient, *([] if other is None else [second]), *args, **kwargs)

    return call


def _unscale(gradients: Sequence[Any], found: torch.Tensor, inverse: torch.Tensor) -> None:
    plain = [g for g in gradients if not isinstance(g, ScatteredGradient)]
    if plain:
        torch._amp_foreach_non_finite_check_and_unscale_(plain, found, inverse)
    scattered = [g for g in gradients if isinstance(g, ScatteredGradient)]
    for shares in {id(g.shares): g.shares for g in scattered}.values():  # one for each model
        shares.unscale([g.number for g in scattered if g.shares is shares], found, inverse)


_SPECIAL: dict[Any, Callable[..., Any]] = {
    torch.Tensor.zero_: _zero,
    torch.Tensor.copy_: _copy,
    torch.Tensor.detach: _same,
    torch.detach: _same,
    torch.Tensor.data.__get__: lambda gradient, *_: gradient,  # type: ignore[attr-defined]
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    torch._foreach_norm: _foreach_norms,
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
    **{
        getattr(torch, f"_foreach_{name}_"): _each(getattr(torch.Tensor, f"{name}_"))
        for name in ("zero", "mul", "div", "add", "sub", "clamp_min", "clamp_max", "neg", "abs")
    },
}
"""What is done in place of torch's functions."""
