"""Lets tests that were written for CUDA devices run on the CPU.

Nine in ten of torch's DDP tests put a model on the device with the rank's number, although nothing in them depends on
the device. Here such a device is the CPU: moving there does nothing, `device_ids` is dropped, streams and events order
nothing because everything happens at once. Tests for which that makes a difference fail with torch's own class too, and
are listed as such.
"""

from __future__ import annotations

import functools
import sys
import types
import unittest
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def host(device: Any) -> Any:
    """The device that stands for this one: the CPU for numbers and accelerators, what was given for anything else."""
    if isinstance(device, bool) or device is None:
        return device
    if isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda")):
        return CPU
    if isinstance(device, torch.device) and device.type != "meta":
        return CPU
    return device


class OnHost(TorchFunctionMode):
    """While it is entered, tensors that are made on or moved to an accelerator stay on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if "device" in kwargs:
            kwargs["device"] = host(kwargs["device"])
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], host(args[1]), *args[2:])
        return func(*args, **kwargs)


class HostStream:
    """A stream of a device that finishes everything at once."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> HostStream:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def synchronize(self) -> None: ...


class HostEvent:
    """An event of such a device: it has always happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any, **__: Any) -> None: ...


def stand_in(ranks: int) -> None:
    """Makes this process believe that every rank has a device. Before torch's test module is imported."""
    given: Any = torch
    cuda: Any = torch.cuda
    cuda.device_count = lambda: ranks
    cuda.current_device = lambda: 0
    for name in ("set_device", "manual_seed", "synchronize"):
        setattr(cuda, name, lambda *_, **__: None)
    cuda.Stream, cuda.stream = HostStream, lambda stream: stream
    given.Stream, given.Event = HostStream, HostEvent
    given.accelerator.current_stream = HostStream
    module: Any = nn.Module
    move = module.to
    module.cuda = lambda self, *_, **__: self
    module.to = lambda self, *args, **kwargs: move(
        self, *map(host, args[:1]), *args[1:], **{k: host(v) if k == "device" else v for k, v in kwargs.items()}
    )
    ddp: Any = DistributedDataParallel
    ddp.__init__ = without_devices(ddp.__init__)
    without_expecttest()
    from torch.testing._internal import common_distributed

    tests: Any = common_distributed
    tests.skip_if_lt_x_gpu = lambda *_, **__: unskipped
    tests.skip_if_no_gpu = unskipped


def without_expecttest() -> None:
    """torch's base class of tests derives from that of a package of which no test of DDP uses anything."""
    package: Any = types.ModuleType("expecttest")
    package.TestCase = unittest.TestCase
    sys.modules.setdefault("expecttest", package)


def without_devices(construct: Callable[..., None]) -> Callable[..., None]:
    """DDP's constructor less the devices of its arguments, which it refuses for a model on the CPU."""

    @functools.wraps(construct)
    def constructed(
        self: Any, module: nn.Module, device_ids: Any = None, output_device: Any = None, **rest: Any
    ) -> None:
        if device_ids is not None and len(device_ids) > 1:
            rest["device_ids"] = device_ids
        construct(self, module, **rest)

    return constructed


def unskipped(test: Callable[..., Any]) -> Callable[..., Any]:
    """In place of torch's decorators that skip a test where devices are missing."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> Any:
        return test(*args, **kwargs)

    return run
