"""`codec.c`, compiled for this processor where a C compiler is at hand: codecs in one pass over memory.

The library is built at the first use (half a second) and kept in the user's cache, under a name that says from which
source and for which processor. Without a compiler `library` gives None, and codecs use torch's operators: the
same bits, at about a third of the speed. The environment variable DOVETAIL_KERNELS=off has the same effect.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from pathlib import Path

from dovetail.core.errors import Error, first_line
from dovetail.core.files import cache_folder, replacing

SOURCE = Path(__file__).with_name("codec.c")
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
PATIENCE = 60.0
"""Seconds that the compiler may take."""

SIGNATURES = {
    "int8_encode": 4,
    "int8_decode": 3,
    "int8_decode_add": 3,
    "bf16_encode": 3,
    "bf16_decode_add": 2,
}
"""Functions of `codec.c`: how many addresses each takes before the number of elements."""

log = logging.getLogger("dovetail")


@functools.cache
def library() -> ctypes.CDLL | None:
    """The functions of `codec.c`, or None where they cannot be compiled."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or os.environ.get("DOVETAIL_KERNELS") == "off":
        return None
    try:
        loaded = ctypes.CDLL(str(_built(compiler)))
    except (OSError, Error, subprocess.SubprocessError) as error:
        log.warning("dovetail: codecs use torch's operators: codec.c could not be compiled: %s", first_line(error))
        return None
    for name, addresses in SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = [*[ctypes.c_void_p] * addresses, ctypes.c_int64], None
    return loaded


def _built(compiler: str) -> Path:
    """The compiled library; a process that is building it at the same time does no harm."""
    made_of = b"\0".join([SOURCE.read_bytes(), *(f.encode() for f in FLAGS), compiler.encode(), _processor()])
    target = cache_folder("kernels") / f"codec-{hashlib.sha256(made_of).hexdigest()[:16]}.so"
    if not target.exists():
        with replacing(target) as temporary:
            command = [compiler, *FLAGS, str(SOURCE), "-o", str(temporary), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
            if done.returncode:
                raise OSError(first_line(done.stderr) or f"{compiler} failed")
    return target


def _processor() -> bytes:
    """What `-march=native` depends on: homes are shared among machines with other processors."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    return b"\n".join(sorted({line for line in lines if line.startswith((b"model name", b"flags", b"Features"))}))
