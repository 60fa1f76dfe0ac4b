"""Does something as soon as a module is imported, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Action = Callable[[ModuleType], None]

_actions: dict[str, list[Action]] = {}


def when_imported(name: str, action: Action) -> None:
    """Calls `action` with the module: at once if it is there already, else right after the module's own code has run.

    Until then every import costs one look into a dictionary more.
    """
    if name in sys.modules:
        action(sys.modules[name])
        return
    _actions.setdefault(name, []).append(action)
    if not any(isinstance(finder, _ImportHook) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ImportHook())


class _ImportHook(MetaPathFinder):
    """Lets the other finders find a module, and adds the actions to the execution of its code."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _actions:
            return None
        others = (f.find_spec(name, path, target) for f in sys.meta_path if f is not self)
        spec = next((found for found in others if found is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for action in _actions.pop(name, []):
                action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # a loader of this module only
        return spec
