"""The modules of benchmarks/cluster.py, for tests that run its trials at a small size."""

from __future__ import annotations

import sys

from tests.paths import BENCHMARKS

if str(BENCHMARKS) not in sys.path:
    sys.path.append(str(BENCHMARKS))

import cluster_load as load
import cluster_trial as trial

__all__ = ["load", "trial"]
