"""Names that the documentation once gave and that have moved: the old ones lead to the new ones, with a warning.

A finder behind Python's own is asked only for what nobody else knows: it costs nothing until an old name is imported.
Entries stay for two minor versions (the deprecation policy in CONTRIBUTING.md); these came with 0.2 and go with 0.4.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULES = {
    "dovetail.core.burst": "dovetail.core.burst_plan",
    "dovetail.core.store": "dovetail.core.files",
    "dovetail.planning.burst_cost": "dovetail.planning.burst.cost",
    "dovetail.planning.straggler": "dovetail.planning.depth.straggler",
    "dovetail.simulate.channel": "dovetail.emulate.channel",
    "dovetail.simulate.device": "dovetail.emulate.device",
    "dovetail.simulate.launch": "dovetail.emulate.launch",
    "dovetail.simulate.shaped": "dovetail.emulate.shaped_network",
    "dovetail.train.burst_measure": "dovetail.train.burst.measurement",
    "dovetail.train.segments": "dovetail.train.partial.segments",
}
"""Old module → the same module under its new name."""

NAMES = {
    "dovetail.cluster.looking": {"Cluster": "dovetail.cluster.web.cluster_section.ClusterSource"},
    "dovetail.fabric.looking": {"Running": "dovetail.fabric.page_source.FabricSource"},
    "dovetail.planning.burst": {"BurstPlanner": "dovetail.planning.burst.planner.BurstPlanner"},
    "dovetail.train.data_parallel.ring": {"halves": "dovetail.train.data_parallel.wire.lane.functions"},
    "dovetail.planning.depth": {"plan": "dovetail.planning.depth.planner.plan"},
}
"""Old module, or a package that was a module → the names it had, and what each is called today."""


def attribute(old: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module in NAMES."""

    def moved(name: str) -> Any:
        if name not in NAMES[old]:
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        new = NAMES[old][name]
        module, _, attribute = new.rpartition(".")
        _warn(f"{old}.{name}", new, stacklevel=3)
        return getattr(import_module(module), attribute)

    return moved


class _Alias(Loader):
    """Gives an old module name the module that has taken its place."""

    def __init__(self, old: str) -> None:
        self.old = old

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(MODULES[self.old])
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # importing it under the old name has put the old one's there
        _warn(self.old, module.__name__, stacklevel=2)


class _Stub(Loader):
    """Makes an old module that has nothing but the names in NAMES."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__getattr__"] = attribute(module.__name__)


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in MODULES:
            return ModuleSpec(name, _Alias(name))
        return ModuleSpec(name, _Stub()) if name in NAMES else None


def _warn(old: str, new: str, *, stacklevel: int) -> None:
    warnings.warn(f"{old} has moved: use {new} instead", DeprecationWarning, stacklevel=stacklevel + 1)


def install() -> None:
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
