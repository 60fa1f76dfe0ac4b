"""Order between host threads, for the race detector.

What one thread has seen to be over (by synchronising, or by asking an event), another thread may rely on only if it
heard of it. Python's own means of telling it are watched while the detector is on: locks, conditions, semaphores,
events, barriers and queues; starting and joining a thread; futures and thread pools; callbacks put into an event loop
from another thread. A release hands over what the releasing thread knows, an acquisition takes it.

Not seen: locks that were made before the accelerator was loaded, `_thread` used directly, and variables that one thread
sets and another one polls. Code that orders its threads in such a way, and relies on one of them having synchronised,
would be accused wrongly. Threads that Python did not start (autograd's work for the thread that called backward(), and
are known by torch) are believed to know what any thread knows.
"""

from __future__ import annotations

import _thread
import asyncio
import functools
import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

MODES = ("raise", "collect", "off")

_native: Any = None
_originals: list[tuple[Any, str, Any]] = []


def set_mode(native: Any, mode: str) -> None:
    """Switches the race detector, and with it the watch over Python's threads."""
    global _native
    if mode not in MODES:
        raise ValueError(f"detector: expected one of {', '.join(MODES)}, got {mode!r}")
    _native = native
    native.set_detector(mode)
    if mode == "off":
        _stop_watching()
    elif not _originals:
        native.introduce()
        _watch()


class WatchedLock:
    """A lock that tells the race detector who had it before."""

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()
        self._handover = _native.Handover()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken = self._lock.acquire(blocking, timeout)
        if taken:
            self._handover.acquire()
        return taken

    def release(self) -> None:
        self._handover.release()
        self._lock.release()

    def locked(self) -> bool:
        return self._lock.locked()

    def _at_fork_reinit(self) -> None:
        self._lock._at_fork_reinit()  # type: ignore[attr-defined]

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class WatchedRLock:
    """A lock that its owner may take again, and that tells the race detector who had it before."""

    def __init__(self) -> None:
        self._lock: Any = _thread.RLock()
        self._handover = _native.Handover()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken = bool(self._lock.acquire(blocking, timeout))
        if taken:
            self._handover.acquire()
        return taken

    def release(self) -> None:
        self._handover.release()
        self._lock.release()

    # What threading.Condition asks of a lock that can be held several times.
    def _is_owned(self) -> bool:
        return bool(self._lock._is_owned())

    def _release_save(self) -> Any:
        self._handover.release()
        return self._lock._release_save()

    def _acquire_restore(self, state: Any) -> None:
        self._lock._acquire_restore(state)
        self._handover.acquire()

    def _at_fork_reinit(self) -> None:
        self._lock._at_fork_reinit()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class WatchedSimpleQueue(queue.SimpleQueue):  # type: ignore[type-arg]
    """A queue of `queue` (thread pools have one) that hands over what the putting thread knows."""

    def __init__(self) -> None:
        self._handover = _native.Handover()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._handover.release()
        super().put(item, block, timeout)

    def put_nowait(self, item: Any) -> None:
        self.put(item, block=False)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        item = super().get(block, timeout)
        self._handover.acquire()
        return item

    def get_nowait(self) -> Any:
        return self.get(block=False)


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    _originals.append((owner, name, original))
    setattr(owner, name, make(original))


def _stop_watching() -> None:
    while _originals:
        owner, name, original = _originals.pop()
        setattr(owner, name, original)


def _watch() -> None:
    """Puts watched locks and queues in the place of Python's, and watches what has no lock that one could replace."""
    _replace(threading, "Lock", lambda _: WatchedLock)
    _replace(threading, "RLock", lambda _: WatchedRLock)
    _replace(queue, "SimpleQueue", lambda _: WatchedSimpleQueue)
    _replace(threading.Thread, "start", _start)
    _replace(threading.Thread, "_bootstrap_inner", _bootstrap)
    _replace(threading.Thread, "join", _join)
    _replace(threading.Event, "is_set", _is_set)
    _replace(asyncio.BaseEventLoop, "call_soon_threadsafe", _call_soon_threadsafe)


def _start(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def start(self: Any) -> None:
        self._dovetail_begin, self._dovetail_end = _native.Handover(), _native.Handover()
        self._dovetail_begin.release()
        original(self)

    return start


def _bootstrap(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def bootstrap(self: Any) -> None:
        if not hasattr(self, "_dovetail_begin"):
            original(self)
            return
        _native.introduce()
        self._dovetail_begin.acquire()
        try:
            original(self)
        finally:
            self._dovetail_end.release()

    return bootstrap


def _join(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def join(self: Any, timeout: float | None = None) -> None:
        original(self, timeout)
        if hasattr(self, "_dovetail_end") and not self.is_alive():
            self._dovetail_end.acquire()

    return join


def _is_set(original: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(original)
    def is_set(self: Any) -> bool:
        answer = original(self)
        lock = self._cond._lock
        if answer and isinstance(lock, WatchedLock):
            lock._handover.acquire()
        return answer

    return is_set


def _call_soon_threadsafe(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call_soon_threadsafe(self: Any, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        handover = _native.Handover()
        handover.release()

        @functools.wraps(callback)
        def learned(*given: Any) -> Any:
            handover.acquire()
            return callback(*given)

        return original(self, learned, *args, context=context)

    return call_soon_threadsafe
