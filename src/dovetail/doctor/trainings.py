"""The small training that all checks share: a model, batches that every rank can make for every other, and a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

SAMPLES, SIDE, CLASSES = 8, 8, 10
LEARNING_RATE, MOMENTUM = 0.05, 0.9


@dataclass(frozen=True)
class Place:
    """Where a rank trains."""

    device: torch.device
    rank: int
    ranks: int

    def batch(self, step: int, rank: int | None = None) -> tuple[Tensor, Tensor]:
        """Images and labels of a step, this rank's or another's, on this rank's device."""
        seeded = torch.Generator().manual_seed(1000 * step + (self.rank if rank is None else rank))
        images = torch.randn(SAMPLES, 1, SIDE, SIDE, generator=seeded)
        labels = torch.randint(CLASSES, (SAMPLES,), generator=seeded)
        return images.to(self.device), labels.to(self.device)

    def batches(self, step: int) -> tuple[Tensor, Tensor]:
        """The batches of all ranks as one, in their order."""
        images, labels = zip(*(self.batch(step, rank) for rank in range(self.ranks)), strict=True)
        return torch.cat(images), torch.cat(labels)

    def wrapped(self, kind: type[TorchDDP], **keywords: Any) -> TorchDDP:
        """The model in a DistributedDataParallel, as scripts construct it on this device."""
        ids: dict[str, Any] = {} if self.device.type == "cpu" else {"device_ids": [self.device.index]}
        return kind(model().to(self.device), **ids, **keywords)


def model() -> nn.Sequential:
    """The same on every rank. Without batch norm and dropout, so that the global batch may be divided in any way."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.GELU(),
            nn.Flatten(),
            nn.LayerNorm(8 * SIDE * SIDE),
            nn.Linear(8 * SIDE * SIDE, 256),
            nn.GELU(),
            nn.Linear(256, 256),
            nn.GELU(),
            nn.Linear(256, CLASSES),
        )


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)


def step(trained: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> Tensor:
    """One iteration; the loss stays on the device."""
    optimizer.zero_grad()
    loss = F.cross_entropy(trained(images), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


def difference(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> float:
    """The largest difference of any value, as a share of the largest in its tensor; infinite where it is no number.

    Parameters that another rank holds (on "meta") are left out.
    """
    worst = 0.0
    for one, other in zip(ours, theirs, strict=True):
        if one.is_meta:
            continue
        a, b = one.detach().cpu().double(), other.detach().cpu().double()
        share = float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))
        worst = max(worst, share if share == share else float("inf"))
    return worst
