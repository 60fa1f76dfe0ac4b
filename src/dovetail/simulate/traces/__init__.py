"""Traces: lists of jobs that arrive over time, read strictly from files or made by a seed."""

from .assume import Assumed
from .readers import Trace, read_trace
from .rows import TraceError

__all__ = ["Assumed", "Trace", "TraceError", "read_trace"]
