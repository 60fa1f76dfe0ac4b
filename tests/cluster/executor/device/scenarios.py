"""What the tests of tasks on an accelerator run: in a process of its own, since the emulated device stays loaded.

    python -m tests.cluster.executor.device.scenarios    prints what each scenario found, as JSON

Losses and parameters on the device are compared with those of the same job on the CPU, in the same process.
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from dovetail import TrainingJob
from dovetail.cluster.executor.device import leaving_gradients
from dovetail.cluster.executor.device.device_runner import DeviceRunner
from dovetail.cluster.executor.device.device_tensors import DeviceTensors
from dovetail.cluster.executor.device.leaving_gradients import LeavingGradients
from dovetail.cluster.executor.device.task_device import TaskDevice, moved
from dovetail.cluster.job.objects import JobError
from dovetail.emulate import accelerator
from tests.cluster.executor.device.jobs_on_device import (
    STEPS,
    Convolutions,
    Normed,
    Recurrent,
    Transformer,
    job,
    loss,
    opened,
    trained,
    wide,
)

DEVICE = "emu:1"
"""Not the device that is current when the process begins."""
LIMIT = 64 << 20
JITTER = 0.0003
"""Seconds, at most, by which every kernel is delayed."""


# -- scenarios --


def same_bits() -> dict[str, bool]:
    """By job: whether device and CPU have learnt the same, to the bit, with jitter on every kernel."""
    on, found = TaskDevice(DEVICE, LIMIT), {}
    jobs = {
        f"{model.__name__} {spb}": job(model, spb=spb)
        for model, spb in itertools.product((Convolutions, Transformer), ("off", "ladder"))
    }
    for name, one in (jobs | {"backward inside the loss": job(loss=twice)}).items():
        expected = trained(one)
        with accelerator.durations(jitter=JITTER, seed=7):
            found[name] = trained(one, on) == expected
    return found


def nearly_same_losses() -> dict[str, float]:
    """Largest relative difference to the CPU's losses, where the device has kernels of its own."""
    on, found = TaskDevice(DEVICE, LIMIT), {}
    for model in (Recurrent, Normed):
        pairs = zip(trained(job(model))[:STEPS], trained(job(model), on)[:STEPS], strict=True)
        found[model.__name__] = max(abs(a - b) / abs(a) for a, b in pairs)
    return found


def waits() -> dict[str, Any]:
    """How often the host waited for the device in tasks after the first ones, and what they left there."""
    on = TaskDevice(DEVICE, LIMIT)
    with opened(job(), on=on) as (only,):
        only.iterate()
        before = torch.accelerator.memory_allocated(on.device)
        with accelerator.count_syncs() as counted:
            for _ in range(3):
                only.iterate()
        left = torch.accelerator.memory_allocated(on.device) - before
    gc.collect()
    after = torch.accelerator.memory_allocated(on.device)
    return {"tasks": 6, "waits": counted.total, "where": str(counted), "left": left, "closed": after}


def overlap() -> dict[str, float]:
    """Milliseconds by which copies had ended before the computation had that they ran beside."""
    on = TaskDevice(DEVICE, LIMIT)
    on.event = lambda: torch.Event(on.device, enable_timing=True)  # type: ignore[method-assign]
    with opened(job(wide, workers=1), job(wide, workers=1, seed=4), on=on) as (one, other):
        one.iterate()
        other.iterate()
        runner, waiting = one.runner, other.runner
        assert isinstance(runner, DeviceRunner) and isinstance(waiting, DeviceRunner)
        on.meanwhile = lambda: waiting.prefetch(other.training.iteration)
        first, left = runner._leaving._groups[0][-1], on.event()
        copy = LeavingGradients._copy

        def timed(self: LeavingGradients, index: int) -> None:
            copy(self, index)
            if index == first:
                left.record(on.outward)

        LeavingGradients._copy = timed  # type: ignore[method-assign]
        try:
            with accelerator.durations(0.005, kernels={"copy H2D": 0.0, "copy D2H": 0.0}):
                one.iterate()
        finally:
            LeavingGradients._copy = copy  # type: ignore[method-assign]
        computed, arrived = runner._leaving._computed, waiting._tensors._arrived
        arrived.synchronize()
        before = [computed, left, arrived]
        with accelerator.count_syncs() as counted:
            on.meanwhile = lambda: None
            other.iterate()
        assert waiting._tensors.iteration == 1
        return {
            "gradients": before[1].elapsed_time(before[0]),
            "parameters": before[2].elapsed_time(before[0]),
            "waits": counted.total,
        }


def races() -> dict[str, str]:
    """What a task says if a wait between two streams is left out."""
    on, found = TaskDevice(DEVICE, LIMIT), {}
    kept = DeviceTensors.await_arrival, on.outward
    for name in ("parameters", "gradients"):
        with opened(job(), on=on) as (only,), accelerator.durations(jitter=JITTER):
            if name == "parameters":
                DeviceTensors.await_arrival = lambda self: None  # type: ignore[method-assign]
            else:
                on.outward = Deaf(device=on.device)
            found[name] = failure(only.iterate)
            DeviceTensors.await_arrival, on.outward = kept  # type: ignore[method-assign]
            only.iterate()  # the next task is whole again
    accelerator.races(clear=True)
    return found


class Deaf(torch.Stream):
    """A stream that waits for nobody."""

    def wait_event(self, event: torch.Event) -> None:
        pass


def one_of_three() -> dict[str, Any]:
    """Three jobs take turns on a device that has room for one of them."""
    jobs = [job(wide, seed=seed) for seed in range(3)]
    expected = [trained(one) for one in jobs]
    need = needed(jobs[0])
    on = TaskDevice(DEVICE, need + need // 8)
    most = 0
    with opened(*jobs, on=on) as three:
        for _ in range(STEPS):
            for one in three:
                torch.accelerator.reset_peak_memory_stats(on.device)
                one.iterate()
                most = max(most, torch.accelerator.max_memory_allocated(on.device))
        same = [one.bits() for one in three] == expected
    return {"same": same, "evictions": on.budget.evictions, "most": most, "limit": on.budget.limit, "need": need}


def room_for_all() -> int:
    """Evictions of three jobs where all have room."""
    on = TaskDevice(DEVICE, LIMIT)
    with opened(*(job(wide, seed=seed) for seed in range(3)), on=on) as three:
        for one in (*three, *three):
            one.iterate()
    return on.budget.evictions


def wrong_guess() -> dict[str, Any]:
    """A job whose first task needs more than was to be expected runs out of memory, and is run again alone."""
    heavy, light = job(wide, batch=64, workers=1, loss=hungry), job(wide, seed=1)
    expected = [trained(heavy), trained(light)]
    on = TaskDevice(DEVICE, needed(heavy) + 4096)
    with opened(heavy, light, on=on) as both:
        for one in [*reversed(both)] * STEPS:
            one.iterate()
        failed = torch.accelerator.memory_stats(on.device)["num_ooms"]
        return {"same": [one.bits() for one in both] == expected, "failed": failed}


def too_large() -> dict[str, Any]:
    """A job that does not fit alone fails with one line, and the next job runs."""
    on = TaskDevice(DEVICE, needed(job()) * 2)
    with opened(job(wide), job(), on=on) as (large, small):
        lines = [failure(large.iterate), failure(large.iterate)]
        small.iterate()
        return {"lines": lines, "loss": small.losses[0]}


def faults() -> dict[str, Any]:
    """Errors of a job's code, in Python or in a kernel that fails later, are its own."""
    on, found = TaskDevice(DEVICE, LIMIT), {}
    expected = trained(job(Transformer))
    broken = {"kernel": outside, "tensors of two devices": elsewhere, "python": impossible}
    with opened(job(Transformer), on=on) as (whole,):
        for name, bad in broken.items():
            with opened(job(Transformer, loss=bad), on=on) as (one,):
                found[name] = failure(one.iterate)
            whole.iterate()
        whole.iterate()
        return {**found, "same": whole.bits() == expected}


def kept() -> dict[str, str]:
    """A job whose code keeps device memory, which nothing can evict, leaves too little for another one."""
    hoard: list[torch.Tensor] = []

    def hoarding(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        hoard.append(torch.zeros(128 << 10, device=batch[0].device))
        return loss(model, batch)

    other = job(wide)
    on = TaskDevice(DEVICE, needed(other) + (1 << 20))
    with opened(other, job(loss=hoarding, workers=1), on=on) as (first, greedy):
        first.iterate()
        greedy.iterate()
        fits = failure(first.iterate)
        greedy.iterate()
        greedy.iterate()
        fails = failure(first.iterate)
        hoard.clear()
        return {"fits": fits, "fails": fails, "again": failure(first.iterate)}


class Named(NamedTuple):
    """A batch with names."""

    x: torch.Tensor
    y: str


def batches() -> list[str]:
    """Where the tensors of a batch are that has every shape which batches have, and what it is made of."""
    on = TaskDevice(DEVICE, LIMIT)
    one = torch.ones(2)
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 1), torch.ones(2, 1)])
    batch: dict[str, Any] = {
        "list": [one, (one, "text")],
        "named": Named(one, "text"),
        "packed": packed,
        "default": defaultdict[str, Any](list, a=one),
    }
    staged: list[torch.Tensor] = []
    there = moved(batch, on.device, staged)
    on.synchronize()
    return [
        str(there["list"][0].device),
        str(there["list"][1][0].device) + there["list"][1][1],
        str(there["named"].x.device) + type(there["named"]).__name__,
        f"{there['packed'].data.device} {there['packed'].batch_sizes.device}",
        f"{there['default']['a'].device} {there['default']['missing']}",
        str(batch["list"][0].device),
        f"{len(staged)} {all(t.is_pinned() for t in staged)}",
    ]


def hungry(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Needs more memory for activations than for weights."""
    return loss(model, [batch[0].repeat(64, 1, 1, 1), batch[1].repeat(64)])


def twice(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Every gradient is added to a second time, when the first may have been on its way already."""
    loss(model, [batch[0] * 0.5, batch[1]]).backward()
    return loss(model, batch)


def outside(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return loss(model, [batch[0] + 1000, batch[1]])


def elsewhere(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return loss(model, [batch[0], batch[1].cpu()])


def impossible(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    loss(model, batch).backward()  # leaves gradients behind
    raise RuntimeError("out of paper")


def needed(one: TrainingJob) -> int:
    """Bytes that a task of the job needs on a device, its tensors included."""
    on = TaskDevice(DEVICE, LIMIT)
    with opened(one, on=on) as (only,):
        only.iterate()
        assert isinstance(only.runner, DeviceRunner)
        return only.runner._tensors.bytes + only.runner._working


def failure(call: Callable[[], object]) -> str:
    try:
        call()
    except JobError as e:
        return str(e)
    return ""


SCENARIOS = (
    same_bits, nearly_same_losses, waits, overlap, races, one_of_three, room_for_all, wrong_guess, too_large, kept,
    faults, batches,
)  # fmt: skip


def main(wanted: list[str]) -> None:
    torch.set_num_threads(1)
    leaving_gradients.GROUP = 4096  # several groups in a small model
    print(json.dumps({s.__name__: s() for s in SCENARIOS if not wanted or s.__name__ in wanted}))


if __name__ == "__main__":
    main(sys.argv[1:])
