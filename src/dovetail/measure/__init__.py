"""Measuring: PyTorch models and live networks → Profile, Network. torch is imported when a function runs, not before.

May import `core`; `train`, `emulate`, `cli` and `demo` import it.
Begin with `profiler.py` (a model → Profile) and `collectives.py` (a process group → Network).
"""

from .collectives import network
from .contention import contention
from .models import Workload, load
from .presets import PRESETS, preset
from .profiler import profile

__all__ = ["PRESETS", "Workload", "contention", "load", "network", "preset", "profile"]
