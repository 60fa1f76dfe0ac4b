"""Four data-parallel workers in one process whose gradients and parameters travel in fewer bytes.

Workers run in turn, each on its micro-batch. Their gradients lie in flat buckets, every second of which is split, and
become one by the arithmetic of `precision_arithmetic`: a split bucket has fp32 masters, which are
updated, and public values, which the model computes with; a whole bucket is updated with the decoded sum.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.core.network import Precision
from dovetail.train.data_parallel.wire.codec import BLOCK, CODECS
from partial_oracle import Oracle, evaluate, loss_of
from partial_tasks import WORKERS, Task
from precision_arithmetic import gather_differences, gather_sums, reduce_in

BUCKETS = 2


@dataclass(frozen=True)
class Variant:
    """What travels, and whether roundings are made up for."""

    name: str
    precision: Precision = "full"
    feedback: bool = True
    reverse: bool = False
    """Whether the workers' gradients are added up in reverse order: other roundings of fp32, and nothing else."""


class FlatBucket:
    """Parameters whose gradients travel together, with the memory of all workers."""

    def __init__(self, parameters: Sequence[nn.Parameter], variant: Variant, *, split: bool) -> None:
        self.codec = CODECS.get(variant.precision)
        self.split, self.feedback, self.reverse = split, variant.feedback, variant.reverse
        used = sum(p.numel() for p in parameters)
        self.width = -(-used // (WORKERS * BLOCK)) * BLOCK
        elements = self.width * WORKERS
        self.public = torch.zeros(elements)
        self.gradients = torch.zeros(WORKERS, elements)
        self.places: list[list[Tensor]] = [[] for _ in range(WORKERS)]
        """Where each worker's gradients go, by parameter."""
        at = 0
        for p in parameters:
            stop = at + p.numel()
            self.public[at:stop].copy_(p.data.flatten())
            p.data = self.public[at:stop].view_as(p)
            for places, row in zip(self.places, self.gradients, strict=True):
                places.append(row[at:stop].view_as(p))
            at = stop
        apart = split and self.codec is not None
        self.master = nn.Parameter(self.public.clone() if apart else self.public)
        """What the optimiser updates."""
        kept = variant.feedback and self.codec is not None
        self.errors = torch.zeros(WORKERS, elements) if kept else None
        self.owners = torch.zeros(WORKERS, self.width) if kept else None

    def reduce(self) -> None:
        """Leaves in the master's `.grad` what the workers' optimisers get."""
        if self.codec is None:
            total = (self.gradients.flip(0) if self.reverse else self.gradients).sum(0)
        else:
            total = reduce_in(self.codec, list(self.gradients), None if self.errors is None else list(self.errors))
            if not self.split:
                total = gather_sums(
                    self.codec, total.split(self.width), None if self.owners is None else [*self.owners]
                )
        self.master.grad = total.div_(WORKERS)

    @torch.no_grad()
    def gather(self) -> None:
        """Brings the masters' new values to the public ones."""
        if self.codec is None or not self.split:
            return
        gather_differences(self.codec, self.master.detach().split(self.width), self.public)
        if not self.feedback:
            self.master.copy_(self.public)  # what rounding lost is forgotten


def buckets_of(net: nn.Module, variant: Variant) -> list[FlatBucket]:
    """Buckets of about equal size in the order in which gradients are ready; every second one is split."""
    ready = list(net.parameters())[::-1]
    target = sum(p.numel() for p in ready) / BUCKETS
    members: list[list[nn.Parameter]] = [[]]
    filled = 0
    for p in ready:
        if members[-1] and filled + p.numel() / 2 > target * len(members) and len(members) < BUCKETS:
            members.append([])
        members[-1].append(p)
        filled += p.numel()
    return [FlatBucket(some, variant, split=i % 2 == 1) for i, some in enumerate(members)]


def learning_rate(step: int, steps: int) -> float:
    """Share of the peak, as in the study of partial backpropagation: a short rise, then half a cosine."""
    return min(1.0, (step + 1) / (0.05 * steps)) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def train(task: Task, variant: Variant, seed: int) -> dict[str, Any]:
    """One run, with its test losses and the relative error of the gradients that its optimiser got."""
    began = time.process_time()
    torch.manual_seed(seed)
    net = task.build()
    generator = torch.Generator().manual_seed(1000 + seed)
    oracle = Oracle(net, task.test[0][:4])
    buckets = buckets_of(net, variant)
    parameters = list(net.parameters())[::-1]
    places = [[place for b in buckets for place in b.places[w]] for w in range(WORKERS)]
    masters = [b.master for b in buckets]
    optimiser = task.optimiser(masters)
    peak = optimiser.param_groups[0]["lr"]
    errors: list[float] = []
    curve: list[tuple[int, float, float]] = []
    for step in range(task.steps):
        for group in optimiser.param_groups:
            group["lr"] = peak * learning_rate(step, task.steps)
        x, y = task.sample(WORKERS * task.batch, generator)
        for worker in range(WORKERS):
            mine = slice(worker * task.batch, (worker + 1) * task.batch)
            found = torch.autograd.grad(loss_of(oracle.forward(x[mine]), y[mine]), parameters)
            torch._foreach_copy_(places[worker], found)
        for bucket in buckets:
            bucket.reduce()
        if (step + 1) % max(1, task.steps // 20) == 0:
            errors.append(_relative_error(buckets))
        if task.clip:
            nn.utils.clip_grad_norm_(masters, task.clip)
        optimiser.step()
        for bucket in buckets:
            bucket.gather()
        if (step + 1) % max(1, task.steps // 8) == 0 or step == task.steps - 1:
            loss, right = evaluate(oracle, task, most=1000)
            curve.append((step + 1, round(loss, 5), round(right, 5)))
    loss, right = evaluate(oracle, task, most=None)
    return {
        "task": task.name,
        "variant": variant.name,
        "seed": seed,
        "options": asdict(variant) | {"batch": task.batch, "buckets": len(buckets)},
        "steps": task.steps,
        "loss": round(loss, 5),
        "accuracy": round(right, 5),
        "error": float(torch.tensor(errors).median()),
        "curve": curve,  # of the first 1,000 test samples
        "seconds": round(time.process_time() - began, 1),
    }


def _relative_error(buckets: Sequence[FlatBucket]) -> float:
    exact = torch.cat([b.gradients.double().mean(0) for b in buckets])
    got = torch.cat([b.master.grad for b in buckets if b.master.grad is not None]).double()
    return float((got - exact).norm() / exact.norm())
