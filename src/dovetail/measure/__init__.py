"""PyTorch models and live networks → Profile, Network. torch is imported when a function runs, not before."""

from .models import Workload, load
from .network import network
from .presets import PRESETS, preset
from .profile import profile

__all__ = ["PRESETS", "Workload", "load", "network", "preset", "profile"]
