"""The benchmark's own trials, small: `trial.chaos`, `load.queued`, `load.fuzz`."""

from __future__ import annotations

import sys
from pathlib import Path

_BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
if _BENCHMARKS not in sys.path:
    sys.path.append(_BENCHMARKS)

import cluster_load as load  # noqa: E402
import cluster_trial as trial  # noqa: E402

__all__ = ["load", "trial"]
