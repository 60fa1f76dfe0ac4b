"""PyTorch models and live networks → Profile, Network. torch is imported when a function runs, not before."""

from .collectives import network
from .models import Workload, load
from .presets import PRESETS, preset
from .profiler import profile

__all__ = ["PRESETS", "Workload", "load", "network", "preset", "profile"]
