"""Who stands in the place of torch's DistributedDataParallel while a test runs."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dovetail
from dovetail import Tuning
from dovetail.train.data_parallel.module import DistributedDataParallel

SHARED = "dovetail.optimizer took an optimiser over"
"""A rank writes this line when the second line was really in force."""

QUICK = Tuning(warmup=1, measure=1, candidates=3, settle=2, steps=1, rounds=1, network_seconds=0.05)
"""Most tests make a few steps only: buckets begin to change in the fifth."""

PATIENT = (
    "test_ddp_logging_data_cpu",
    "test_ddp_profiling_torch_profiler",
    "test_detect_ddp_is_actually_static",
)
"""Tests that look at torch's own buckets, count collectives or ask the reducer what it has seen, in so few steps that
with the default Tuning this is what a script would see."""

OPTIMIZERS = ("SGD", "Adam", "AdamW")


class QuickDDP(DistributedDataParallel):
    """dovetail's class, in as much of a hurry as these tests are."""

    haste: ClassVar[Tuning | None] = QUICK

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, tuning=self.haste, **kwargs)
        _wrapped.append(weakref.ref(self))


_wrapped: list[weakref.ref[QuickDDP]] = []


def put_in_place(contestant: str) -> None:
    """From now on torch's class makes the contestant's, as under `dovetail train`."""
    if contestant == "torch":
        return

    def new(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        return object.__new__(QuickDDP if cls is TorchDDP and (args or kwargs) else cls)

    TorchDDP.__new__ = staticmethod(new)  # type: ignore[method-assign]
    logging.getLogger("dovetail").addHandler(logging.StreamHandler(sys.stderr))
    logging.getLogger("dovetail").setLevel(logging.INFO)
    if contestant == "second line":
        for name in OPTIMIZERS:
            setattr(torch.optim, name, HandedOver(getattr(torch.optim, name)))


class HandedOver:
    """In place of an optimiser's class: what it makes for all parameters of a wrapped model is wrapped at once."""

    def __init__(self, kind: Callable[..., Any]) -> None:
        self.kind = kind

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made = self.kind(*args, **kwargs)
        given = {id(p) for group in made.param_groups for p in group["params"]}
        models = [model for reference in reversed(_wrapped) if (model := reference()) is not None]
        for model in models:
            if given >= {id(p) for _, p in model.reduced_parameters()}:
                made = dovetail.optimizer(made, model)
                print(SHARED, file=sys.stderr, flush=True)
                break
        return made
