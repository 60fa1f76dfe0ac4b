"""Traces: lists of jobs that arrive over time, read strictly from files.

May import `core`; called by `dovetail schedule`.
Begin with `readers.py` (the formats); `assume.py` fills in what a trace does not say, `rows.py` reads tables strictly.
"""

from .assume import Assumed
from .readers import JobTrace, read_trace
from .rows import TraceError

__all__ = ["Assumed", "JobTrace", "TraceError", "read_trace"]
