"""Burst parallelism (after DeepPool): how many devices each layer gets at a fixed global batch.

Pure functions; may import `core` and `planning.merge`.
Begin with `cost.py` (what a layer costs on so many devices), then `planner.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail import _moved

if not TYPE_CHECKING:
    __getattr__ = _moved.attribute(__name__)
