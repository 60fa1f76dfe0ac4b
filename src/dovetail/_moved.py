"""Modules that the documentation once named and that have moved: their old names lead to the new ones, with a warning.

A finder behind Python's own is asked only for what nobody else knows, so it costs nothing until an old name is imported.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "dovetail.core.burst": "dovetail.core.burst_plan",
    "dovetail.core.store": "dovetail.core.files",
    "dovetail.planning.burst_cost": "dovetail.planning.burst.cost",
    "dovetail.simulate.channel": "dovetail.emulate.channel",
    "dovetail.simulate.device": "dovetail.emulate.device",
    "dovetail.simulate.launch": "dovetail.emulate.launch",
    "dovetail.simulate.shaped": "dovetail.emulate.shaped_network",
}
"""Old name → new name. To be removed with version 0.3 (see the deprecation policy in CONTRIBUTING.md)."""


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return import_module(MOVED[spec.name])

    def exec_module(self, module: ModuleType) -> None:
        old = next(name for name, new in MOVED.items() if new == module.__name__)
        warnings.warn(f"{old} has moved: import {module.__name__} instead", DeprecationWarning, stacklevel=2)


def install() -> None:
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
