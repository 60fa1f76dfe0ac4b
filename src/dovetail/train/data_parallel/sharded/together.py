"""Calls that all ranks must make together: one that a rank makes alone fails within seconds, and harms nothing.

Each rank has only its share of gradients and of optimiser state, so reading a whole one needs all ranks. A script that
does so on one rank (`if rank == 0: torch.save(optimizer.state_dict(), …)`) would send messages that nobody expects, and
wait for ever. So before any message is sent the ranks meet in the process group's store. The place of a meeting is the
number of optimiser steps so far and of meetings since the last step. The last rank to come lets all go on.

A rank that has waited for a second asks the others for signs of life. The thread of an idle communication lane gives
one every second, so a rank that computes is waited for. A rank that waits for others itself, trains on or has ended
gives none, and then the meeting is called off. One atomic key decides between the two, so that all ranks read the same
outcome.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import sys
import threading
import time
from collections import Counter

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from dovetail.core.errors import Error

from ..wire import lane
from ..wire.backends import patience

ALONE = 6.0
"""Seconds without a sign of life from a rank that has not come, after which the meeting is called off."""
SLOW = 1.0
"""Seconds after which those who wait ask for signs of life."""
USUAL = 3
"""Number of times that all ranks made a call that comes in every iteration, after which they no longer meet for it."""

LONG = 20.0
"""Seconds after which a rank that waits logs for whom."""

log = logging.getLogger("dovetail")

_WAITING = ("torch.distributed.distributed_c10d", lane.__name__)
"""Modules in which a rank waits for others."""


class RankMeeting:
    """Where the ranks of one process group meet before calls that all must make."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank, self._ranks, self._patience = group.rank(), group.size(), patience(group)
        self._store = _store(group)
        self._caller = threading.get_ident()
        self._step = self._count = self._signs = 0
        self._usual: Counter[tuple[str, int]] = Counter()
        self._held = ""
        """Where the last meeting was held: its keys are deleted at the next."""
        self._waiting = False
        self._used = -1.0
        """Seconds of processor time that the thread that trains had used at the last look."""

    def end_step(self) -> None:
        """Called at the end of every `optimizer.step()`."""
        self._step, self._count = self._step + 1, 0

    def all_call(self, what: str, instead: str, *, often: bool = False) -> None:
        """Returns when all ranks have made this call; raises where they have not. `instead` says what to do.

        A call that comes `often`, as in every iteration, is trusted after a few meetings: from then on ranks that make
        it alone wait, as in any collective.
        """
        if self._store is not None and not (often and self._usual[what, self._count] >= USUAL):
            self._meet(self._store, what, instead)
        if often:
            self._usual[what, self._count] += 1
        self._count += 1

    def give_sign(self) -> None:
        """Says that this rank is computing, if others have asked. Called by another thread than the caller's."""
        if self._store is None or self._waiting or not dist.is_initialized() or _has_ended(self._store):
            return
        if self._store.check(["asked"]) and not self._is_stuck():
            self._signs += 1
            self._store.set(f"sign {self._rank}", str(self._signs))

    def _meet(self, store: Store, what: str, instead: str) -> None:
        attempt = 0
        while store.check([f"{self._step} {self._count} {attempt} outcome"]):
            attempt += 1  # one that was called off
        place = f"{self._step} {self._count} {attempt}"
        store.set(f"{place} {self._rank}", what)
        if store.add(f"{place} came", 1) == self._ranks:
            asked = [store.get(f"{place} {r}").decode() for r in range(self._ranks)]
            odd = next((r for r in range(self._ranks) if asked[r] != asked[0]), None)
            differ = f"rank 0 asks for {asked[0]}, rank {odd} for {asked[odd or 0]}"
            outcome = _decide(store, place, "" if odd is None else differ)
        else:
            self._waiting = True
            try:
                outcome = self._wait(store, place, what)
            finally:
                self._waiting = False
        if outcome != "all came":
            raise Error(f"overlap: {outcome}: {instead}")
        if self._rank == 0 and self._held:
            for key in ("outcome", "came", *map(str, range(self._ranks))):
                store.delete_key(f"{self._held} {key}")
        self._held = place

    def _wait(self, store: Store, place: str, what: str) -> str:
        began = time.monotonic()
        pause, looked, logged = 2e-4, began + SLOW, False
        heard: dict[int, tuple[bytes, float]] = {}
        while not store.check([f"{place} outcome"]):
            now = time.monotonic()
            if now > looked:
                store.set("asked", place)
                looked = now + SLOW / 4
                missing = [r for r in range(self._ranks) if not store.check([f"{place} {r}"])]
                for rank in missing:
                    sign = store.get(f"sign {rank}") if store.check([f"sign {rank}"]) else b""
                    if rank not in heard or heard[rank][0] != sign:
                        heard[rank] = (sign, now)
                if now - began > LONG and not logged:
                    logged = True
                    log.warning("dovetail: %s: waiting for rank %s, which is computing", what, missing)
                silent = [r for r in missing if now - heard[r][1] > ALONE - SLOW]
                if silent or now - began > self._patience:
                    names = ", ".join(map(str, missing))
                    came = ", ".join(str(r) for r in range(self._ranks) if r not in missing)
                    _decide(store, place, f"{what} was asked for by rank {came} and not by rank {names}")
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return store.get(f"{place} outcome").decode()

    def _is_stuck(self) -> bool:
        """Whether the thread that trains waits for other ranks."""
        frame = sys._current_frames().get(self._caller)
        if frame is None:
            return True
        if hasattr(time, "pthread_getcpuclockid"):
            before, self._used = self._used, time.clock_gettime(time.pthread_getcpuclockid(self._caller))
            if before == self._used and frame.f_globals.get("__name__", "").partition(".")[0] == "torch":
                return True  # such as backward of another model, which waits for its reducer
        while frame is not None:
            if frame.f_globals.get("__name__") in _WAITING:
                return True
            frame = frame.f_back
        return False


def _decide(store: Store, place: str, wrong: str) -> str:
    """Proposes an outcome, and returns the one that holds: the first that was proposed."""
    return store.compare_set(f"{place} outcome", "", wrong or "all came").decode()


def _store(group: dist.ProcessGroup) -> Store | None:
    """Where the ranks of this group can meet; None if there is one rank, or if the group was made without a store."""
    try:
        found: Store | None = group.get_group_store()
    except RuntimeError:
        found = None
    return None if found is None or group.size() == 1 else PrefixStore("dovetail meeting", found)


def _has_ended(store: Store) -> bool:
    """Whether the process that serves the store has closed its connection: a request would print torch's stack trace.

    The connection is found among the descriptors of this process, where the system shows them, by its port.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return False
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
            with contextlib.suppress(OSError):
                if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    continue
                with socket.socket(fileno=os.dup(int(name))) as end:
                    if end.getpeername()[1] == store.port and not end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                        return True
    return False
