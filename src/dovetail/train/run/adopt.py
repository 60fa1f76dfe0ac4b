"""What an unchanged DistributedDataParallel script gets under `dovetail train --spb`: partial backpropagation.

Constructing torch's DistributedDataParallel makes a PartialBackprop, and a DataLoader with a DistributedSampler takes
its batches from RotatingBatches instead: the same epochs and the same global batch, in the plan's shares, with the data
going round. The script's calls of `set_epoch` keep their effect.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from dovetail.core.depth_plan import DepthPlan
from dovetail.planning.depth.guard import Guard
from dovetail.train.partial.module import PartialBackprop
from dovetail.train.partial.rotation import RotatingBatches

from . import closing_line
from .launcher import PartialOptions


def adopt_partial(given: PartialOptions) -> None:
    """From now on, constructing torch's DistributedDataParallel makes a PartialBackprop, and loaders move the data."""
    plan = given.depths()
    guard = None
    if given.policy == "guard":
        guard = Guard() if given.epsilon is None else Guard(epsilon=given.epsilon)

    def wrap(
        module: nn.Module, *_: Any, process_group: Any = None, find_unused_parameters: bool = False, **__: Any
    ) -> PartialBackprop:
        made = PartialBackprop(
            module,
            plan or given.policy,
            guard=guard,
            steps=given.steps,
            process_group=process_group,
            uneven_use=find_unused_parameters,
        )
        if dist.get_rank() == 0:
            closing_line.say(f"trained under partial backpropagation ({given.policy})")
        return made

    def new(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        return wrap(*args, **kwargs) if cls is DistributedDataParallel and (args or kwargs) else object.__new__(cls)

    DistributedDataParallel.__new__ = staticmethod(new)  # type: ignore[method-assign]
    _rotate(plan, given)
    _log_to_stderr()


def shares(plan: DepthPlan, phase: int, total: int) -> tuple[int, ...]:
    """The plan's local batches, scaled to another global batch: at least one each, largest remainders first."""
    batches = plan.phases[phase].batches
    exact = [b * total / sum(batches) for b in batches]
    whole = [max(int(x), 1) for x in exact]
    for worker in sorted(range(len(batches)), key=lambda w: int(exact[w]) - exact[w]):
        if sum(whole) < total:
            whole[worker] += 1
    return tuple(whole)


class _Rotated(RotatingBatches):
    """Batches that follow the epochs of the sampler they replace."""

    def __init__(self, sampler: DistributedSampler[Any], batches: tuple[int, ...]) -> None:
        super().__init__(
            sampler.dataset,  # type: ignore[arg-type]
            batches,
            rank=sampler.rank,
            shuffle=sampler.shuffle,
            seed=sampler.seed,
        )
        self._sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        self.set_epoch(self._sampler.epoch)
        return super().__iter__()


def _rotate(plan: DepthPlan | None, given: PartialOptions) -> None:
    original = DataLoader.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs).arguments
        sampler, size = bound.get("sampler"), bound.get("batch_size", 1)
        if type(sampler) is DistributedSampler and size is not None and dist.is_initialized():
            workers = sampler.num_replicas
            batches = (size,) * workers
            if given.policy == "balanced" and plan is not None and plan.workers == workers:
                batches = shares(plan, 0, size * workers)
            for name in ("batch_size", "shuffle", "sampler", "drop_last"):
                bound.pop(name, None)
            bound["batch_sampler"] = _Rotated(sampler, batches)
            original(**bound)
            # Around DataLoader's own check: scripts read these, and call `loader.sampler.set_epoch`.
            object.__setattr__(self, "sampler", sampler)
            object.__setattr__(self, "batch_size", batches[sampler.rank])
        else:
            original(**bound)

    DataLoader.__init__ = init  # type: ignore[method-assign]


def _log_to_stderr() -> None:
    """Writes the guard's log to stderr, from the first rank only."""
    log = logging.getLogger("dovetail")
    if int(os.environ.get("RANK", "0")) == 0 and not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("dovetail: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
