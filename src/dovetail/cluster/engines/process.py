"""How a process of the cluster begins: what it inherits, and whom it dies with. Shared by the engines."""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ALLOWED = frozenset(
    ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH",
     "PYTHONHOME", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_OFFLINE",
     "TRANSFORMERS_OFFLINE", "TORCH_HOME", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "GLOO_SOCKET_IFNAME",
     "NCCL_SOCKET_IFNAME")
)  # fmt: skip
"""Variables that jobs see. Whatever else the operator's shell holds (tokens, passwords, proxies) they do not."""
_PR_SET_PDEATHSIG = 1


def scrubbed(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of jobs: what is on the list, and one thread per process, since a device is one core."""
    kept = {k: v for k, v in environment.items() if k in ALLOWED or k.startswith("LC_")}
    kept.setdefault("PATH", os.defpath)
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return kept | threads | {"PYTHONUNBUFFERED": "1"}


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """The kernel sends `signum` to this process when its parent ends, by whatever means."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def run(role: str, settings: Mapping[str, Any]) -> int:
    """Runs `dovetail.cluster.ROLE.main.main` in this process; the code to exit with."""
    arguments = dict(settings)
    for name in ("home", "key_file"):
        if name in arguments:
            arguments[name] = Path(arguments[name])
    if "coordinator" in arguments:
        host, port = arguments["coordinator"]
        arguments["coordinator"] = (str(host), int(port))
    try:
        import torch

        torch.set_num_threads(1)
        importlib.import_module(f"dovetail.cluster.{role}.main").main(**arguments)
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:  # its last words belong into its log
        traceback.print_exc()
        return 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    return 0
