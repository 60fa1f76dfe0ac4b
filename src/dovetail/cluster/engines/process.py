"""How a process of the cluster begins: what it inherits and what it runs. Shared by the engines."""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ALLOWED = frozenset(
    ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH",
     "PYTHONHOME", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_OFFLINE",
     "TRANSFORMERS_OFFLINE", "TORCH_HOME", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "HIP_VISIBLE_DEVICES",
     "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
)  # fmt: skip
"""Variables that jobs see. They see nothing else of the operator's shell (tokens, passwords, proxies)."""


def scrubbed(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of jobs: the allowed variables, and one thread per process, since a device is one core."""
    kept = {k: v for k, v in environment.items() if k in ALLOWED or k.startswith("LC_")}
    kept.setdefault("PATH", os.defpath)
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return kept | threads | {"PYTHONUNBUFFERED": "1"}


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
    except BaseException:  # the reason belongs into its log
        traceback.print_exc()
        return 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    return 0


def note(line: str) -> None:
    """Writes one line, with the time, to the log of this process of the cluster."""
    print(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {' '.join(line.split())}", file=sys.stderr, flush=True)
