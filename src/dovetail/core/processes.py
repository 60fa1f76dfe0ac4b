"""Processes that do not outlive the process that started them.

The kernel sends the signal (prctl's PR_SET_PDEATHSIG), so it also comes after a SIGKILL of the parent. Outside Linux
there is no such call, and none of this has an effect.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)  # bound before any fork: a forked child must not wait for the loader's lock

# Runs in a fresh interpreter without site-packages, hence without dovetail, and becomes the command.
_BOOT = f"""
import ctypes, os, sys
getattr(ctypes.CDLL(None), "prctl", lambda *_: 0)({_PR_SET_PDEATHSIG}, int(sys.argv[2]), 0, 0, 0)
if os.getppid() != int(sys.argv[1]): os._exit(1)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def die_with_parent(signum: int = signal.SIGKILL, *, parent: int | None = None) -> None:
    """From now on the kernel sends `signum` to this process when its parent ends.

    `parent` is the expected parent's process id: if that has ended already, this process exits at once. Safe between
    fork and exec (`preexec_fn`): takes no lock.
    """
    if hasattr(_libc, "prctl") and _libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def dying_with_us(command: Sequence[str], signum: int = signal.SIGKILL) -> list[str]:
    """The command line that runs `command` in a process to which the kernel sends `signum` when this process ends.

    For threads and large processes, where `preexec_fn` is not safe or too slow.
    """
    return [sys.executable, "-I", "-S", "-c", _BOOT, str(os.getpid()), str(int(signum)), *command]
