"""Streams run kernels later, in order, and side by side; events and durations are on the device's clock."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest
import torch

from dovetail.core.errors import Error
from dovetail.emulate import accelerator

from .child import emulated

LONG = 0.5
"""Seconds of a kernel that the host must not wait for."""


def timed() -> torch.Event:
    return torch.Event("emu", enable_timing=True)


@emulated
def test_the_host_goes_on_while_the_device_works() -> None:
    x = torch.ones(4, device="emu")
    end = timed()
    with accelerator.durations(LONG):
        y = x + 1
        end.record()
        assert not end.query()
    assert not torch.accelerator.current_stream().query()
    end.synchronize()
    assert y.tolist() == [2.0] * 4


@emulated
def test_two_streams_run_side_by_side_and_one_stream_in_order() -> None:
    begin, ends = timed(), [timed(), timed()]
    begin.record()
    streams = [torch.Stream("emu"), torch.Stream("emu")]
    for stream, end in zip(streams, ends, strict=True):
        with stream:
            accelerator.occupy(LONG)
            end.record(stream)
    for end in ends:
        end.synchronize()
    assert max(begin.elapsed_time(end) for end in ends) < 2 * LONG * 1e3
    begin.record(streams[0])
    with streams[0]:
        accelerator.occupy(LONG / 4)
        accelerator.occupy(LONG / 4)
    ends[0].record(streams[0])
    ends[0].synchronize()
    assert begin.elapsed_time(ends[0]) >= LONG / 2 * 1e3


@emulated
def test_a_stream_waits_for_an_event_of_another_and_the_host_does_not() -> None:
    slow, fast = torch.Stream("emu"), torch.Stream("emu")
    x = torch.zeros(1, device="emu")
    slow.wait_stream(torch.accelerator.current_stream())
    with slow:
        accelerator.occupy(LONG)
        x += 1
        done = slow.record_event()
    fast.wait_event(done)
    with fast:
        y = x * 10
    assert not fast.query()
    torch.accelerator.current_stream().wait_stream(fast)
    assert y.item() == 10


@emulated
def test_durations_do_not_add_up_the_errors_of_sleeping() -> None:
    begin, end = timed(), timed()
    with accelerator.durations(0.001):
        x = torch.zeros(1, device="emu")
        torch.accelerator.synchronize()
        begin.record()
        for _ in range(100):
            x += 1
        end.record()
        end.synchronize()
    # A launch that comes late leaves the stream idle, so there is no upper bound on a loaded machine.
    assert begin.elapsed_time(end) >= 99.0


@emulated
def test_durations_by_name_hold_for_all_overloads_and_end_with_the_block() -> None:
    x, begin, end = torch.ones(1, device="emu"), timed(), timed()
    with accelerator.durations(kernels={"aten::add": 0.2, "aten::mul.Tensor": 0.1}):
        torch.accelerator.synchronize()
        begin.record()
        x = (x + 1) * x - 3
        end.record()
    end.synchronize()
    assert begin.elapsed_time(end) >= 300
    begin.record()
    with accelerator.taking(0.2):
        x = x + 1
        x = x + 1
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) >= 200


@emulated
def test_jitter_differs_from_kernel_to_kernel() -> None:
    marks = [timed() for _ in range(8)]
    x = torch.zeros(1, device="emu")
    with accelerator.durations(0.01, jitter=0.02, seed=5):
        accelerator.occupy(LONG)  # what follows is launched before this is over: the stream never idles
        for mark in marks:
            x += 1
            mark.record()
        torch.accelerator.synchronize()
    took = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    assert all(t >= 9.9 for t in took)
    assert max(took) - min(took) > 2


@emulated
def test_events_refuse_what_they_cannot_tell() -> None:
    plain, timing = torch.Event("emu"), timed()
    with pytest.raises(ValueError, match="recorded"):
        timing.elapsed_time(timed())
    plain.record()
    timing.record()
    torch.accelerator.synchronize()
    with pytest.raises(ValueError, match="enable_timing"):
        timing.elapsed_time(plain)
    assert torch.Event("emu").query()  # never recorded: nobody waits for it


@emulated
def test_every_device_has_its_own_streams_and_current_stream() -> None:
    side = torch.Stream(torch.device("emu", 1))
    with side:
        assert torch.accelerator.current_device_index() == 1
        assert torch.accelerator.current_stream(1) == side
        assert torch.accelerator.current_stream(0) == torch.emu.default_stream(0)  # type: ignore[attr-defined]
    assert torch.accelerator.current_device_index() == 0
    assert torch.Stream("emu", priority=-1).device == torch.device("emu", 0)
    with torch.emu.device(1):  # type: ignore[attr-defined]
        assert torch.ones(1, device="emu").device.index == 1
    with pytest.raises(RuntimeError, match="emu:7 does not exist"):
        torch.accelerator.set_device_index(7)


@emulated
def test_a_failed_kernel_is_reported_at_a_later_call_with_its_line() -> None:
    table = torch.ones(3, 2, device="emu")
    wrong = torch.tensor([7], device="emu")
    torch.accelerator.synchronize()
    with accelerator.durations(0.05):
        table.index_select(0, wrong)
    with pytest.raises(RuntimeError, match=r"aten::index_select \(.*test_streams.py:\d+ in .*index out of range"):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()  # once


@emulated
def test_shapes_are_checked_at_the_call() -> None:
    x = torch.ones(2, 3, device="emu")
    wrong: tuple[Callable[[], object], ...] = (
        lambda: x @ x,
        lambda: x + torch.ones(5, device="emu"),
        lambda: x.add_(torch.ones(4, device="emu")),
    )
    for call in wrong:
        with pytest.raises(RuntimeError):
            call()
    torch.accelerator.synchronize()


@emulated
def test_hundreds_of_streams_are_no_burden() -> None:
    begun = time.monotonic()
    x = torch.ones(8, device="emu")
    torch.accelerator.synchronize()
    for _ in range(600):
        with torch.Stream("emu"):
            assert x.add(1).numel() == 8
    torch.accelerator.synchronize()
    assert time.monotonic() - begun < 60


@emulated
def test_bad_durations_are_refused() -> None:
    with pytest.raises(Error, match="expected seconds"):
        accelerator.set_durations(-1)
    with pytest.raises(Error, match="expected seconds"):
        accelerator.occupy(float("nan"))
