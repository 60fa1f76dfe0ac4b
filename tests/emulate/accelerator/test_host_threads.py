"""What one host thread has seen done, another may rely on only if it was told: the detector knows who was."""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import threading
from collections.abc import Callable

import pytest
import torch

from dovetail.emulate import accelerator

from .child import emulated
from .test_detector import N, here, ready


def after(event: torch.Event, tell: Callable[[], None]) -> Callable[[], None]:
    """A function that waits for the event and then tells."""

    def told() -> None:
        event.synchronize()
        tell()

    return told


def told_by_a_queue(x: torch.Tensor, event: torch.Event) -> None:
    told: queue.Queue[str] = queue.Queue()
    _second(lambda: told.get(), x, after(event, lambda: told.put("done")))


def told_by_a_simple_queue(x: torch.Tensor, event: torch.Event) -> None:
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    _second(lambda: told.get(), x, after(event, lambda: told.put("done")))


def told_by_an_event(x: torch.Tensor, event: torch.Event) -> None:
    told = threading.Event()
    _second(lambda: told.wait(), x, after(event, lambda: told.set()))


def told_by_an_event_that_is_polled(x: torch.Tensor, event: torch.Event) -> None:
    told = threading.Event()

    def poll() -> None:
        while not told.is_set():
            pass

    _second(poll, x, after(event, lambda: told.set()))


def told_by_a_condition(x: torch.Tensor, event: torch.Event) -> None:
    condition, done = threading.Condition(), []

    def tell() -> None:
        event.synchronize()
        with condition:
            done.append(True)
            condition.notify()

    def hear() -> None:
        with condition:
            condition.wait_for(lambda: done)

    _second(hear, x, tell)


def told_by_a_lock(x: torch.Tensor, event: torch.Event) -> None:
    lock, done = threading.Lock(), []

    def tell() -> None:
        event.synchronize()
        with lock:
            done.append(True)

    def hear() -> None:
        while True:
            with lock:
                if done:
                    return

    _second(hear, x, tell)


def told_by_the_start_of_a_thread(x: torch.Tensor, event: torch.Event) -> None:
    event.synchronize()
    _second(lambda: None, x, lambda: None)


def told_by_the_end_of_a_thread(x: torch.Tensor, event: torch.Event) -> None:
    other = threading.Thread(target=event.synchronize)
    other.start()
    other.join()
    with torch.Stream("emu"):
        x.sum()


def told_by_a_future(x: torch.Tensor, event: torch.Event) -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        seen = pool.submit(event.synchronize)

        def use() -> None:
            seen.result()
            _use(x)

        pool.submit(use).result()


def told_by_an_event_loop(x: torch.Tensor, event: torch.Event) -> None:
    async def main() -> None:
        await asyncio.to_thread(event.synchronize)
        _use(x)

    asyncio.run(main())


def told_by_backward(x: torch.Tensor, event: torch.Event) -> None:
    w = torch.ones(N, device="emu", requires_grad=True)
    torch.accelerator.current_stream().record_event().synchronize()
    side = torch.Stream("emu")
    event.synchronize()
    with side:
        loss = (w * x).sum()  # x is saved, and read again by backward
    loss.backward()


TOLD = [
    told_by_a_queue,
    told_by_a_simple_queue,
    told_by_an_event,
    told_by_an_event_that_is_polled,
    told_by_a_condition,
    told_by_a_lock,
    told_by_the_start_of_a_thread,
    told_by_the_end_of_a_thread,
    told_by_a_future,
    told_by_an_event_loop,
    told_by_backward,
]


def _use(x: torch.Tensor) -> None:
    with torch.Stream("emu"):
        x.sum()


def _second(hear: Callable[[], object], x: torch.Tensor, tell: Callable[[], object]) -> None:
    """A thread that hears of something and then uses `x` on a stream of its own; this one tells it."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            hear()
            _use(x)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    tell()
    thread.join()
    if raised:
        raise raised[0]


@emulated
@pytest.mark.parametrize("program", TOLD, ids=lambda p: p.__name__)
def test_a_thread_that_was_told_may_rely_on_what_another_has_seen(
    program: Callable[[torch.Tensor, torch.Event], None],
) -> None:
    x = ready()
    with accelerator.durations(0.005):
        x.add_(1)
        program(x, here().record_event())
        torch.accelerator.synchronize()
    assert accelerator.races() == []


def _seen_by_another(event: torch.Event) -> threading.Thread:
    """A thread that has synchronised the event, which the caller knows from a variable only: nothing orders the two."""
    finished: list[bool] = []
    thread = threading.Thread(target=after(event, lambda: finished.append(True)))
    thread.start()
    while not finished:
        pass
    return thread


@emulated
def test_a_thread_that_was_not_told_may_not() -> None:
    x = ready()
    x.add_(1)
    other = _seen_by_another(here().record_event())
    with pytest.raises(accelerator.Race):
        _use(x)
    other.join()
    _use(x)


@emulated
def test_autograd_knows_what_its_caller_knows_and_no_more() -> None:
    side = torch.Stream("emu")
    w = torch.ones(N, device="emu", requires_grad=True)
    w.grad = torch.zeros_like(w)
    torch.accelerator.synchronize()
    with side:
        w.grad.add_(1)
    other = _seen_by_another(side.record_event())
    with pytest.raises(accelerator.Race):
        (w * 2).sum().backward()
    other.join()
    (w * 2).sum().backward()


@emulated
def test_two_threads_on_one_stream_are_ordered_by_it() -> None:
    x, side = ready(), torch.Stream("emu")

    def use() -> None:
        with side:
            for _ in range(20):
                x.add_(1)

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    here().wait_stream(side)
    assert x[0].item() == 60


@emulated
def test_watched_locks_work_as_pythons() -> None:
    lock, again = threading.Lock(), threading.RLock()
    assert lock.acquire()
    assert not lock.acquire(blocking=False)
    assert not lock.acquire(timeout=0.01)
    assert lock.locked()
    lock.release()
    with pytest.raises(RuntimeError):
        lock.release()
    condition = threading.Condition(again)
    with again, again, condition:
        assert not condition.wait(timeout=0.01)
    barrier, gate = threading.Barrier(2), threading.Semaphore(0)

    def meet() -> None:
        barrier.wait()
        gate.release()

    thread = threading.Thread(target=meet)
    thread.start()
    barrier.wait()
    assert gate.acquire(timeout=10)
    thread.join()
    with accelerator.detecting("off"):
        assert type(threading.Lock()).__name__ == "lock"
