"""The command line: every subcommand is a thin call into the library."""

from __future__ import annotations

from .app import main

__all__ = ["main"]
