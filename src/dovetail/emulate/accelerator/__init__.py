"""An emulated accelerator: a device of torch, "emu", with the rules of a GPU, for machines that have none.

After `load()` a model goes there as it goes to any device: `model.to("emu")`.

Kernels really run later: a stream is a thread, a launch returns at once, and the CPU's kernel works on the stream when
its turn comes. The host cannot touch a device's memory (a program that tries is ended with a line that says so), fresh
memory is full of NaN, and a freed block is reused at once by the stream it belongs to. So a forgotten wait, a tensor
that is freed too early or a result that is read too soon goes wrong here as it would on a GPU; and a detector names the
two operators, their streams and lines at the launch that races, whether or not it went wrong this time (`detector.cpp`
in `native` says how). Waits of the host for a device are counted with the line of each.

What is not emulated: speed (unless `durations` says how long kernels take), numbers (they are the CPU's, to the bit),
sparse and quantised tensors, graphs, memory shared among processes. docs/accelerators.md says what this proves.

Several devices are there in one process: two, or as many as the environment variable DOVETAIL_EMULATED_DEVICES says.
DOVETAIL_EMULATED_MEMORY is the memory of each in bytes (16 GiB), DOVETAIL_EMULATED_DETECTOR is "raise", "collect" or
"off". The extension (`native`) is compiled at the first use, in about a minute, and kept in the user's cache.

Begin reading with `native/runtime.h`. May import `core`.
"""

from __future__ import annotations

from .kernel_times import durations, occupy, set_durations, taking
from .loading import DEVICE, Race, is_loaded, load
from .observations import (
    HostSync,
    SyncCount,
    count_syncs,
    detecting,
    detector,
    host_syncs,
    kernel_counts,
    kernels_launched,
    races,
    set_detector,
    set_memory_limit,
    without_meta_kernel,
)

__all__ = [
    "DEVICE",
    "HostSync",
    "Race",
    "SyncCount",
    "count_syncs",
    "detecting",
    "detector",
    "durations",
    "host_syncs",
    "is_loaded",
    "kernel_counts",
    "kernels_launched",
    "load",
    "occupy",
    "races",
    "set_detector",
    "set_durations",
    "set_memory_limit",
    "taking",
    "without_meta_kernel",
]
