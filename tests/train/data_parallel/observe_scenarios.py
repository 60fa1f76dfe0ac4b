"""What the tests of the observer of DDP iterations run on every rank."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from dovetail.train.data_parallel.observe import ObservedIteration, Observer


class Recomputed(nn.Module):
    """Every layer is recomputed in a backward pass of its own, the last one too."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) if self.reentrant else layer(x)
        return x


def watched(static: bool = False, reentrant: bool = True) -> dict[str, Any]:
    """Of each iteration that was announced: how many parameters had a gradient, and whether all ranks had the same."""
    model = Recomputed(reentrant=reentrant)
    ddp = TorchDDP(model, static_graph=static)
    parameters = list(model.parameters())
    seen: list[int] = []
    same: list[bool] = []

    def on_iteration(iteration: ObservedIteration) -> None:
        seen.append(len({index for index, _ in iteration.ready}))
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, [None if p.grad is None else p.grad.tolist() for p in parameters])
        same.append(all(theirs == said[0] and None not in theirs for theirs in said))

    observer = Observer(ddp, parameters, on_iteration)
    observer.watch(every_gradient=True)
    for i in range(3):
        x = torch.full((2, 4), 1.0 + dist.get_rank() + i, requires_grad=True)
        model.zero_grad()
        observer.before_forward()
        output = ddp(x)
        observer.after_forward()
        if not reentrant:  # gradients of something else, asked for through the same outputs, are no iteration
            torch.autograd.grad(output.sum(), x, retain_graph=True)
        output.square().sum().backward()
    pickle.dumps(dict(ddp._forward_hooks))  # whoever saves a whole module saves its hooks
    observer.close()
    return {"seen": seen, "same": same, "hooks": len(ddp._forward_hooks)}
