"""Runs tests in a process that has loaded the accelerator: it changes torch and Python's locks for the whole process.

`@emulated` on a test function sends the call to the process, which is started at the first of them and kept. The
function runs there with warnings as errors, and with the accelerator as it is after `load()`. A process that dies (a
fault ends one) fails its test, and the next test gets another.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import inspect
import multiprocessing
import os
import shutil
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import pytest

F = TypeVar("F", bound=Callable[..., None])
INSIDE = "DOVETAIL_EMULATED_TESTS"
PATIENCE = 600.0
"""Seconds for one test, the first of which may have to compile the extension."""


def emulated(test: F) -> F:
    """Makes a test run in the process of the accelerator. Its parameters must be picklable."""
    if os.environ.get(INSIDE):
        return test

    @functools.wraps(test)
    def outside(**given: Any) -> None:
        if not any(shutil.which(name) for name in (os.environ.get("CXX") or "", "g++", "c++", "clang++")):
            pytest.skip("no C++ compiler to build the emulated accelerator with")
        failed = _child().call(test.__module__, test.__qualname__, given)
        if failed:
            pytest.fail(failed, pytrace=False)

    outside.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
    return outside  # type: ignore[return-value]


class Child:
    """The process, and the pipe that leads to it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,))
        before = os.environ.get(INSIDE)
        os.environ[INSIDE] = "1"
        try:
            self.process.start()
        finally:
            os.environ.pop(INSIDE) if before is None else os.environ.__setitem__(INSIDE, before)
        theirs.close()

    def call(self, module: str, name: str, given: dict[str, Any]) -> str | None:
        """None, or how the test failed."""
        global _running
        try:
            self.pipe.send((module, name, given))
            if not self.pipe.poll(PATIENCE):
                raise EOFError
            return str(answer) if (answer := self.pipe.recv()) is not None else None
        except (EOFError, OSError):
            _running = None
            self.process.kill()
            self.process.join()
            return f"the process of the accelerator ended with {self.process.exitcode}, or took more than {PATIENCE} s"


_running: Child | None = None


def _child() -> Child:
    global _running
    if _running is None:
        _running = Child()
        atexit.register(_running.process.kill)
    return _running


def _serve(pipe: Connection) -> None:
    import warnings

    import torch

    from dovetail.emulate import accelerator

    torch.set_num_threads(1)
    try:
        accelerator.load(devices=2)
    except Exception as error:
        while True:
            pipe.recv()
            pipe.send(f"load() failed: {error}")
    while True:
        try:
            module, name, given = pipe.recv()
        except EOFError:
            return
        failed = None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for category in (DeprecationWarning, FutureWarning):
                warnings.filterwarnings("ignore", category=category, module="torch")
            try:
                _fresh()
                getattr(importlib.import_module(module), name)(**given)
            except BaseException:
                failed = traceback.format_exc()
        pipe.send(failed)


def _fresh() -> None:
    """The accelerator as after load(), whatever the test before has left."""
    import torch

    from dovetail.emulate import accelerator

    for device in range(torch.accelerator.device_count()):
        for _ in range(3):  # errors of kernels and late races come one by one
            try:
                torch.accelerator.synchronize(device)
                break
            except RuntimeError:
                continue
        accelerator.set_memory_limit(16 << 30, device)
        torch.accelerator.set_device_index(device)
        torch.accelerator.set_stream(torch.emu.default_stream(device))  # type: ignore[attr-defined]
    torch.accelerator.set_device_index(0)
    accelerator.set_detector("raise")
    accelerator.set_durations()
    accelerator.races(clear=True)
    accelerator.host_syncs(clear=True)
    torch.manual_seed(0)
