"""Makes Lightning know the strategies "dovetail" and "dovetail_overlap", whichever of the two is imported first.

Nothing of Lightning's is imported for that, nor torch: its registries hold functions that make a strategy when asked.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

from dovetail.core.import_hooks import when_imported

REGISTRIES = {
    "lightning.pytorch.strategies": "StrategyRegistry",
    "pytorch_lightning.strategies": "StrategyRegistry",
    "lightning.fabric.strategies": "STRATEGY_REGISTRY",
    "lightning_fabric.strategies": "STRATEGY_REGISTRY",
}
"""Module of Lightning's → its registry of strategies."""

STRATEGIES = {
    "dovetail": ("DDP with gradient buckets that fit the model and the network", {}),
    "dovetail_overlap": ("the same, and communication hides behind the next forward pass too", {"overlap": "forward"}),
}
"""Name → (description, options)."""


def install() -> None:
    for package in REGISTRIES:
        when_imported(package, _register)


def _register(package: ModuleType) -> None:
    registry = getattr(package, REGISTRIES[package.__name__], None)
    if registry is None:
        return  # a Lightning that keeps its strategies elsewhere: DovetailStrategy itself still works
    for name, (description, options) in STRATEGIES.items():
        make = partial(_strategy, package.__name__)
        registry.register(name, make, description=description, override=True, **options)


def _strategy(package: str, **options: Any) -> Any:
    return import_module("dovetail.train.integrations.lightning").strategy_class(package)(**options)
