"""Makes a job's own objects (model, data, optimiser, scheduler) and refuses unusable ones before the first task.

Everything is made under the job's seed, so that every process makes the same. What a job sets for the whole process
(torch's default dtype) applies to that job alone, since jobs share processes.
"""

from __future__ import annotations

import hashlib
import io
import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from dovetail.core.errors import Error, typed_line

from .spec import TrainingJob

R = TypeVar("R")
AGGREGATOR = -1
"""The worker number with which the aggregator is seeded."""
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


class JobError(Error):
    """The job's own code raised, or returned something unusable. One line, and the stack trace for the job's log."""

    def __init__(self, line: str, trace: str = "") -> None:
        self.trace = trace
        super().__init__(line)


@contextmanager
def job_errors(what: str = "") -> Iterator[None]:
    """Turns whatever the job's code raises inside into a JobError that begins with `what`."""
    where = f"{what}: " if what else ""
    try:
        yield
    except JobError:
        raise
    except Error as e:
        raise JobError(f"{where}{e}") from None
    except (Exception, SystemExit) as e:
        raise JobError(f"{where}{typed_line(e)}", traceback.format_exc()) from e


def mixed(*numbers: int) -> int:
    """One seed from several numbers, the same in every process and release."""
    packed = b"".join(n.to_bytes(8, "little", signed=True) for n in numbers)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def seed_everything(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # the CPU's only: torch.manual_seed looks at every kind of device
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def use_defaults(job: TrainingJob) -> None:
    """Sets torch's default dtype to what the job file set."""
    if job.default_dtype:
        torch.set_default_dtype(getattr(torch, job.default_dtype))


@contextmanager
def own_defaults(dtype: torch.dtype) -> Iterator[None]:
    """Inside, torch's default dtype is the job's and gradients are on; afterwards both are as before."""
    before, mode = torch.get_default_dtype(), torch.is_grad_enabled()
    try:
        if dtype != before:
            torch.set_default_dtype(dtype)
        torch.set_grad_enabled(True)
        yield
    finally:
        if torch.get_default_dtype() != before:
            torch.set_default_dtype(before)
        torch.set_grad_enabled(mode)


def make_model(job: TrainingJob) -> nn.Module:
    """The job's model, made under its seed, in training mode."""
    seed_everything(mixed(job.seed, 0, 0))
    with job_errors("model"):
        model = job.model()
    if not isinstance(model, nn.Module):
        raise JobError(f"model: expected a function that makes a torch.nn.Module, got {type(model).__name__}")
    if any(nn.parameter.is_lazy(p) for p in model.parameters()):
        raise JobError("model: expected one whose parameters have shapes, got lazy ones: run it once on a batch")
    if not any(p.requires_grad for p in model.parameters()):
        raise JobError(f"model: expected parameters to train, {type(model).__name__} has none")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise JobError(f"model: {name}: expected a dense tensor on the CPU, got {tensor.layout} on {tensor.device}")
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise JobError(f"model: {name or type(model).__name__}: sparse gradients cannot be averaged: sparse=False")
    return model.train()


def make_optimizer(job: TrainingJob, model: nn.Module) -> torch.optim.Optimizer:
    """The job's optimiser, over the model's parameters only; in torch's fastest form unless the job chose one."""
    seed_everything(mixed(job.seed, 0, 1))
    with job_errors("optimizer"):
        optimizer = job.optimizer(list(model.parameters()))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise JobError(
            f"optimizer: expected a function that makes a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise JobError("optimizer: LBFGS runs the model inside its step, which here does not run on the devices")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise JobError("optimizer: SparseAdam wants sparse gradients, which cannot be averaged here")
    own = {id(p) for p in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in own:
                shape = tuple(parameter.shape)
                raise JobError(
                    f"optimizer: expected parameters of the model that it was given, "
                    f"group {number} has another one of shape {shape}"
                )
        _quicken(optimizer, group)
    return optimizer


def _quicken(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Uses torch's fused or foreach form of the same rule, unless the job has chosen one itself."""
    if group.get("foreach", False) is not None or group.get("fused") is not None:
        return
    if group.get("differentiable") or group.get("capturable") or isinstance(group.get("lr"), torch.Tensor):
        return
    dense = all(p.dtype in (torch.float32, torch.float64) for p in group["params"])
    if type(optimizer) in _FUSED and dense and "fused" in group:
        group["fused"] = True
    elif not any(p.is_complex() for p in group["params"]):
        group["foreach"] = True


class LearningRateSchedule:
    """The job's learning-rate scheduler, if it has one; it steps after every iteration."""

    def __init__(self, job: TrainingJob, optimizer: torch.optim.Optimizer) -> None:
        self.own: Any = None
        if job.scheduler is not None:
            with job_errors("scheduler"):
                self.own = job.scheduler(optimizer)
            if not all(hasattr(self.own, name) for name in ("step", "state_dict", "load_state_dict")):
                raise JobError(f"scheduler: expected one of torch.optim.lr_scheduler, got {type(self.own).__name__}")
        with job_errors("scheduler"):
            probe = io.BytesIO()
            torch.save(self.state(), probe)
            probe.seek(0)
            try:
                torch.load(probe, weights_only=True)
            except Exception as e:
                raise JobError(f"scheduler: its state cannot be stored in a checkpoint: {typed_line(e)}") from e

    def step(self, loss: float) -> None:
        if isinstance(self.own, ReduceLROnPlateau):
            self.own.step(loss)
        elif self.own is not None:
            self.own.step()

    def state(self) -> Any:
        return None if self.own is None else self.own.state_dict()

    def restore(self, state: Any) -> None:
        if self.own is not None and state is not None:
            self.own.load_state_dict(state)


class Samples:
    """The job's data as one endless stream, shuffled anew in every epoch, cut into global batches."""

    def __init__(self, job: TrainingJob) -> None:
        seed_everything(mixed(job.seed, 0, 2))
        with job_errors("data"):
            self._data = job.data()
        lacks = not (hasattr(self._data, "__len__") and hasattr(self._data, "__getitem__"))
        if lacks or isinstance(self._data, IterableDataset):
            raise JobError(
                f"data: expected a dataset with len() and [index], {type(self._data).__name__} lacks one of them"
            )
        with job_errors("data"):
            self.size = len(self._data)
        if self.size < 1:
            raise JobError("data: expected at least one sample, got none")
        self._seed, self._batch, self._collate = job.seed, job.batch, job.collate
        self._orders: dict[int, torch.Tensor] = {}

    def indices(self, iteration: int, start: int, stop: int) -> list[int]:
        """Indices of the samples [start, stop) of an iteration's global batch."""
        at, end = iteration * self._batch + start, iteration * self._batch + stop
        found: list[int] = []
        while at < end:
            epoch, offset = divmod(at, self.size)
            part = self._order(epoch)[offset : offset + end - at]
            found += part.tolist()
            at += len(part)
        return found

    def batch(self, iteration: int, start: int, stop: int) -> Any:
        """The collated samples. Runs the job's code (dataset and collate)."""
        wanted = self.indices(iteration, start, stop)
        if self._collate is None and type(self._data) is TensorDataset:
            # The same as collating single samples, but quicker.
            return [tensor[wanted] for tensor in self._data.tensors]
        many: Callable[[Sequence[int]], list[Any]] | None = getattr(self._data, "__getitems__", None)
        samples = many(wanted) if many is not None else [self._data[i] for i in wanted]
        return (self._collate or default_collate)(samples)

    def _order(self, epoch: int) -> torch.Tensor:
        if epoch not in self._orders:
            while len(self._orders) > 1:  # this epoch and the one before
                del self._orders[min(self._orders)]
            generator = torch.Generator().manual_seed(mixed(self._seed, 1, epoch))
            self._orders[epoch] = torch.randperm(self.size, generator=generator)
        return self._orders[epoch]
