"""Example batches: checking them, resizing them, and getting a loss out of a model's output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from dovetail.core.errors import Error

from .passes import tensors_in

Batch: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...] | list[torch.Tensor] | Mapping[str, torch.Tensor]
Loss: TypeAlias = Callable[[Any], torch.Tensor]


def parts(batch: Batch) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """Positional and keyword arguments for the model."""
    if isinstance(batch, torch.Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, list | tuple):
        return tuple(batch), {}
    raise Error(f"batch: expected a tensor, a tuple of tensors or a dict of tensors, got {type(batch).__name__}")


def size(batch: Batch) -> int:
    """Number of samples: the first dimension, which all its tensors share."""
    args, kwargs = parts(batch)
    named = {**{str(i): value for i, value in enumerate(args)}, **kwargs}
    if not named:
        raise Error("batch: expected at least one tensor, got none")
    counts: dict[str, int] = {}
    for key, value in named.items():
        if not isinstance(value, torch.Tensor):
            raise Error(f"batch[{key}]: expected a tensor, got {type(value).__name__}")
        if value.dim() == 0 or not len(value):
            raise Error(f"batch[{key}]: expected samples along the first dimension, got shape {tuple(value.shape)}")
        counts[key] = len(value)
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{key} has {count}" for key, count in counts.items())
        raise Error(f"batch: expected the same number of samples in every tensor, but {listed}")
    return next(iter(counts.values()))


def resized(
    batch: Batch, samples: int, device: torch.device
) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """The first `samples` samples, repeated from the start where there are not enough, on the model's device."""
    args, kwargs = parts(batch)

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor.detach()[torch.arange(samples, device=tensor.device) % len(tensor)].to(device)
        return rows.requires_grad_(tensor.requires_grad)

    return tuple(cut(t) for t in args), {key: cut(t) for key, t in kwargs.items()}


def default_loss(output: Any) -> torch.Tensor:
    """The output's own loss where it has one (Hugging Face), otherwise the sum of the means of its float tensors."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    means = [t.float().mean() for t in tensors_in(output) if t.is_floating_point()]
    if not means:
        raise Error("the model's output has no float tensor to make a loss of: give `loss`")
    return torch.stack(means).sum()


def training_pass(
    model: nn.Module, batch: Batch, samples: int, device: torch.device, loss: Loss | None
) -> Callable[[], torch.Tensor]:
    """A function that runs the model forward on a resized batch and gives the loss."""
    args, kwargs = resized(batch, samples, device)

    def run() -> torch.Tensor:
        value = (loss or default_loss)(model(*args, **kwargs))
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            got = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise Error(f"loss: expected a scalar tensor, got {got}")
        if not value.requires_grad:
            raise Error("loss: expected one that depends on the parameters, got one that requires no gradient")
        return value

    return run
