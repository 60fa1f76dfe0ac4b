"""The race detector names what nothing orders, and is silent where something does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dovetail.emulate import accelerator

from .child import emulated

N = 4096


def here() -> torch.Stream:
    return torch.accelerator.current_stream()


def ready(n: int = N) -> torch.Tensor:
    """A tensor that everybody may use: its kernel is over."""
    x = torch.zeros(n, device="emu")
    torch.accelerator.synchronize()
    return x


def reads_before_a_write_is_done() -> None:
    x, side = ready(), torch.Stream("emu")
    x.add_(1)
    with side:
        x.sum()


def writes_while_it_is_read() -> None:
    x, side = ready(), torch.Stream("emu")
    with side:
        x.sum()
    x.add_(1)


def writes_twice() -> None:
    x, side = ready(), torch.Stream("emu")
    with side:
        x.fill_(1)
    x.fill_(2)


def waits_for_an_event_that_was_recorded_too_early() -> None:
    x, side = ready(), torch.Stream("emu")
    event = here().record_event()
    x.add_(1)
    side.wait_event(event)
    with side:
        x.sum()


def waits_for_the_wrong_stream() -> None:
    x, side, other = ready(), torch.Stream("emu"), torch.Stream("emu")
    x.add_(1)
    side.wait_stream(other)
    with side:
        x.sum()


def uses_the_current_devices_stream_for_a_tensor_of_another() -> None:
    x = torch.zeros(N, device="emu:1")
    torch.accelerator.synchronize(1)
    side = torch.Stream("emu:1")
    with torch.device("emu:1"):
        x.add_(1)
    side.wait_stream(torch.accelerator.current_stream(0))
    with side:
        x.sum()


def uses_a_fresh_tensor_on_another_stream() -> None:
    side = torch.Stream("emu")
    x = torch.empty(N, device="emu")
    with side:
        x.fill_(1)


def frees_what_another_stream_uses() -> None:
    x, side = ready(N + 1), torch.Stream("emu")
    side.wait_stream(here())
    with side:
        x.sum()
    del x
    torch.empty(7, device="emu")  # of any size: the allocator may hand out what was freed


def copies_on_a_side_stream_without_waiting() -> None:
    x, side = ready(), torch.Stream("emu")
    target = torch.empty(N, pin_memory=True)
    x.add_(1)
    with side:
        target.copy_(x, non_blocking=True)


def two_streams_copy_into_one_pinned_buffer() -> None:
    x, side, target = ready(), torch.Stream("emu"), torch.empty(N, pin_memory=True)
    target.copy_(x, non_blocking=True)
    with side:
        target.copy_(x, non_blocking=True)


def overlapping_slices() -> None:
    x, side = ready(), torch.Stream("emu")
    x[: N // 2 + 1].add_(1)
    with side:
        x[N // 2 :].add_(1)


RACES = [
    reads_before_a_write_is_done,
    writes_while_it_is_read,
    writes_twice,
    waits_for_an_event_that_was_recorded_too_early,
    waits_for_the_wrong_stream,
    uses_the_current_devices_stream_for_a_tensor_of_another,
    uses_a_fresh_tensor_on_another_stream,
    frees_what_another_stream_uses,
    copies_on_a_side_stream_without_waiting,
    two_streams_copy_into_one_pinned_buffer,
    overlapping_slices,
]


def waits_for_a_stream() -> None:
    x, side = ready(), torch.Stream("emu")
    x.add_(1)
    side.wait_stream(here())
    with side:
        x.sum()


def waits_through_a_third_stream() -> None:
    x, between, side = ready(), torch.Stream("emu"), torch.Stream("emu")
    x.add_(1)
    between.wait_stream(here())
    side.wait_stream(between)
    with side:
        x.add_(1)
    here().wait_stream(side)
    x.add_(1)


def two_streams_read() -> None:
    x, side = ready(), torch.Stream("emu")
    x.sum()
    with side:
        x.sum()


def disjoint_slices() -> None:
    x, side = ready(), torch.Stream("emu")
    x[: N // 2].add_(1)
    with side:
        x[N // 2 :].add_(1)


def disjoint_columns() -> None:
    x, side = ready().view(64, 64), torch.Stream("emu")
    x[:, :32].add_(1)
    with side:
        x[:, 32:].add_(1)
        x[:, 40:48].add_(1)


def synchronises_an_event() -> None:
    x, side = ready(), torch.Stream("emu")
    x.add_(1)
    here().record_event().synchronize()
    with side:
        x.sum()


def asks_an_event_until_it_is_done() -> None:
    x, side = ready(), torch.Stream("emu")
    x.add_(1)
    event = here().record_event()
    while not event.query():
        pass
    with side:
        x.sum()


def frees_after_a_wait() -> None:
    x, side = ready(N + 2), torch.Stream("emu")
    side.wait_stream(here())
    with side:
        x.sum()
    del x
    here().wait_stream(side)  # after the tensor is freed, before the memory is handed out
    torch.empty(N + 2, device="emu").fill_(1)


def frees_with_record_stream() -> None:
    x, side = ready(N + 3), torch.Stream("emu")
    side.wait_stream(here())
    with side:
        x.sum()
    x.record_stream(side)
    del x
    for _ in range(3):
        torch.empty(N + 3, device="emu").fill_(1)


def reuses_memory_on_its_own_stream() -> None:
    for _ in range(5):
        torch.empty(N, device="emu").fill_(1)


def allocates_on_the_stream_that_uses_it() -> None:
    side = torch.Stream("emu")
    with side:
        x = torch.empty(N, device="emu").fill_(1)
    here().wait_stream(side)
    x.sum()


def differentiates_on_a_side_stream() -> None:
    side = torch.Stream("emu")
    side.wait_stream(here())
    with side:
        x = torch.ones(N, device="emu", requires_grad=True)
        (x * x).sum().backward()
        assert x.grad is not None
        x.grad.add_(1)
    here().wait_stream(side)
    x.grad.sum()


ORDERED = [
    waits_for_a_stream,
    waits_through_a_third_stream,
    two_streams_read,
    disjoint_slices,
    disjoint_columns,
    synchronises_an_event,
    asks_an_event_until_it_is_done,
    frees_after_a_wait,
    frees_with_record_stream,
    reuses_memory_on_its_own_stream,
    allocates_on_the_stream_that_uses_it,
    differentiates_on_a_side_stream,
]


@emulated
@pytest.mark.parametrize("program", RACES, ids=lambda p: p.__name__)
def test_a_race_is_raised_at_its_launch(program: Callable[[], None]) -> None:
    with pytest.raises(accelerator.Race, match=rf"test_detector.py:\d+ in {program.__name__}"):
        program()
    assert len(accelerator.races()) == 1


@emulated
@pytest.mark.parametrize("program", ORDERED, ids=lambda p: p.__name__)
def test_what_is_ordered_is_silent(program: Callable[[], None]) -> None:
    with accelerator.durations(jitter=0.001):
        program()
        torch.accelerator.synchronize()
    assert accelerator.races() == []


@emulated
def test_a_report_names_both_operators_streams_and_lines() -> None:
    x, side = ready(), torch.Stream("emu")
    x.mul_(2)
    with side, pytest.raises(accelerator.Race) as raised:
        x.neg()
    text = str(raised.value)
    assert "aten::neg on stream" in text
    assert "reads memory of emu:0 that aten::mul_" in text
    assert "the default stream of emu:0" in text
    assert text.count("test_detector.py:") == 2


@emulated
def test_collected_races_do_not_stop_the_program_and_off_finds_none() -> None:
    x, side = ready(), torch.Stream("emu")

    def race() -> None:
        x.add_(1)
        with side:
            x.neg_()
        torch.accelerator.synchronize()

    with accelerator.detecting("collect"):
        for _ in range(3):
            race()
        assert len(accelerator.races(clear=True)) == 1  # the same lines
    with accelerator.detecting("off"):
        race()
    assert accelerator.races() == []
    assert accelerator.detector() == "raise"
    with pytest.raises(ValueError, match="expected one of raise, collect, off"):
        accelerator.set_detector("loud")


@emulated
def test_what_autograd_launches_is_named_after_the_line_that_called_backward() -> None:
    side = torch.Stream("emu")
    w = torch.ones(N, device="emu", requires_grad=True)
    w.grad = torch.zeros_like(w)
    with side:
        pass
    torch.accelerator.synchronize()
    with side:
        w.grad.sum()
    loss = (w * 2).sum()
    with pytest.raises(accelerator.Race, match=r"in test_what_autograd_launches.*that aten::sum"):
        loss.backward()
