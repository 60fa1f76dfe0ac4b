"""Heartbeats: how links that fail in silence, their carrier still on, are found.

Every `interval` one system call sends a small frame on every port of every switch: a round. The data plane notes in
which round it last heard anything on a port, and a packet that wants to leave by it finds the link down if that was
more than `misses` rounds ago: nothing waits for user space. Rounds are counted, not seconds, so a sender that is late
makes detection slow and never wrong. A frame also says whether its sender hears the receiver, so that a link broken in
one direction is not used in either.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time

from . import kernel
from .emulation import Fabric


class HeartbeatSender:
    """Sends heartbeats until stopped; afterwards links are judged by their carrier alone."""

    def __init__(self, fabric: Fabric, *, interval: float = 0.01, misses: int = 3) -> None:
        self.fabric, self.interval = fabric, interval
        self.misses = misses
        size = fabric.plane.size
        path = kernel.build("heartbeat.bpf.c", words=size.words)
        self._object = kernel.BpfObject(path, shared=fabric.plane.maps)
        self.slots = 2 * len(fabric.topology.links)
        kernel.update(self._object.map("turns"), 0, struct.pack("<II", 0, self.slots))
        self._run = kernel.ProgramRunner(self._object.program("heartbeat"))
        self._frame = bytes(14 + size.header)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def round(self) -> None:
        """One heartbeat on every port."""
        self._run(self._frame, repeat=self.slots, flags=kernel.LIVE_FRAMES, batch=64)

    def start(self) -> HeartbeatSender:
        self.fabric.plane.hear_all(self.fabric.topology)
        self.round()
        self.fabric.plane.configure(silence=self.misses)
        self._thread.start()
        return self

    def _beat(self) -> None:
        # Before ordinary work, where the system allows it: this thread works a few microseconds per round.
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
        due = time.monotonic()
        while not self._stop.is_set():
            self.round()
            due = max(due + self.interval, time.monotonic())
            self._stop.wait(max(0.0, due - time.monotonic()))

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(5)
        self.fabric.plane.configure(silence=0)
        self._object.close()

    def __enter__(self) -> HeartbeatSender:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
