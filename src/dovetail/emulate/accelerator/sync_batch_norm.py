"""The operators of torch's SyncBatchNorm for the emulated accelerator, made of others: the CPU has none of them.

Statistics and sums are in single precision for half-precision inputs, as on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

_library: torch.library.Library | None = None
"""The registration; it lasts as long as this object."""


def register() -> None:
    """Registers the operators for the device, once."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("aten", "IMPL")
    for operator in (
        batch_norm_stats,
        batch_norm_gather_stats_with_counts,
        batch_norm_elemt,
        batch_norm_backward_reduce,
        batch_norm_backward_elemt,
    ):
        _library.impl(operator.__name__, operator, "PrivateUse1")


def batch_norm_stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and inverse standard deviation of each channel, over this rank's input."""
    variance, mean = torch.var_mean(_precise(input), _all_but_channels(input), correction=0)
    return mean, torch.rsqrt(variance + eps)


def batch_norm_gather_stats_with_counts(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Those of all ranks, from each rank's (in rows) and its number of samples. Moves the running statistics on."""
    shares = counts.to(mean.dtype).unsqueeze(1)
    total = shares.sum()
    overall = (mean * shares).sum(0) / total
    variances = invstd.pow(-2) - eps
    squares = ((variances + (mean - overall).square()) * shares).sum(0)
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_((momentum * overall).to(running_mean.dtype))
    if running_var is not None:
        running_var.mul_(1 - momentum).add_((momentum * squares / (total - 1)).to(running_var.dtype))
    return overall, torch.rsqrt(squares / total + eps)


def batch_norm_elemt(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    """The normalised input."""
    out = (_precise(input) - _over(mean, input)) * _over(invstd, input)
    if weight is not None:
        out = out * _over(weight, input)
    if bias is not None:
        out = out + _over(bias, input)
    return out.to(input.dtype)


def batch_norm_backward_reduce(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per channel the sums of dy and of dy · (x - mean), then the gradients of weight and bias."""
    dims = _all_but_channels(input)
    gradient = _precise(grad_out)
    sums = gradient.sum(dims)
    products = (gradient * (_precise(input) - _over(mean, input))).sum(dims)
    kind = mean.dtype if weight is None else weight.dtype
    return sums, products, (products * invstd).to(kind), sums.to(kind)


def batch_norm_backward_elemt(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    """The gradient of the input, from the sums over all ranks."""
    total = count.sum().to(mean.dtype)
    centred = _precise(input) - _over(mean, input)
    slope = _over(sum_dy_xmu / total * invstd.square(), input)
    out = (_precise(grad_out) - _over(sum_dy / total, input) - centred * slope) * _over(invstd, input)
    if weight is not None:
        out = out * _over(weight, input)
    return out.to(input.dtype)


def _precise(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _all_but_channels(input: Tensor) -> list[int]:
    return [d for d in range(input.dim()) if d != 1]


def _over(per_channel: Tensor, input: Tensor) -> Tensor:
    """Values of channels, shaped so that they spread over an input."""
    return _precise(per_channel).view(1, -1, *[1] * (input.dim() - 2))
