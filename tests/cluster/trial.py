"""The benchmark's own trials, small: `trial.chaos`, `load.queued`, `load.fuzz`."""

from __future__ import annotations

import sys

from tests.paths import BENCHMARKS

if str(BENCHMARKS) not in sys.path:
    sys.path.append(str(BENCHMARKS))

import cluster_load as load
import cluster_trial as trial

__all__ = ["load", "trial"]
