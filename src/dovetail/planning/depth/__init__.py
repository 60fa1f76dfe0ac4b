"""Partial backpropagation (after SPB): how deep each worker backpropagates, and the guard that limits it.

Pure functions; may import `core` and `planning.merge`.
Begin with `planner.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail import _moved

if not TYPE_CHECKING:
    __getattr__ = _moved.attribute(__name__)
