"""A process that was told to die with its parent does, whatever ends the parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from dovetail.core.processes import dying_with_us

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")

_IN_PREEXEC = """
import functools, os, subprocess, sys
from dovetail.core.processes import die_with_parent
subprocess.Popen(["cat"], stdin=0, preexec_fn=functools.partial(die_with_parent, parent=os.getpid()))
print("started", flush=True)
sys.stdin.read()
"""
_IN_COMMAND = """
import subprocess, sys
from dovetail.core.processes import dying_with_us
subprocess.Popen(dying_with_us([sys.executable, "-c", "print('started', flush=True); import time; time.sleep(600)"]))
sys.stdin.read()
"""


@pytest.mark.parametrize("script", [_IN_PREEXEC, _IN_COMMAND], ids=["preexec_fn", "command"])
def test_a_killed_parent_takes_its_child_with_it(script: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None and parent.stdin is not None
    with parent.stdout, parent.stdin:
        assert parent.stdout.readline() == b"started\n"
        parent.kill()
        parent.wait(60)
        # The child has inherited the pipe: it reaches its end only when the child is dead too.
        assert parent.stdout.read() == b""


def test_a_command_whose_parent_is_lost_before_it_begins_does_not_run() -> None:
    command = dying_with_us([sys.executable, "-c", "print('ran')"], signal.SIGTERM)
    command[command.index(str(os.getpid()))] = "1"  # somebody else's child
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert done.returncode == 1 and done.stdout == b""
