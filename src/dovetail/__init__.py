"""dovetail makes deep-learning training jobs fit together.

    from dovetail import DistributedDataParallel as DDP   # in place of torch's
    model = DDP(model)
    print(model.explain())

Everything public is a name of this module; whatever needs torch is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import _moved
from .core.plan import register_applier
from .train.integrations import strategy_names

if TYPE_CHECKING:
    from . import measure
    from .cluster.job.spec import TrainingJob
    from .core.depth_plan import DepthPlan
    from .core.errors import Error, InputError
    from .core.files import read, write
    from .core.network import Network
    from .core.plan import Plan
    from .core.profile import Profile
    from .core.timeline import Timeline
    from .planning import compare, plan
    from .planning.depth.guard import Guard
    from .train.burst.module import Burst
    from .train.data_parallel.module import DistributedDataParallel
    from .train.data_parallel.sharded.optimizer import full_state, optimizer
    from .train.data_parallel.tuning.trials import Tuning
    from .train.integrations.prepare import prepare
    from .train.partial.module import PartialBackprop

__version__ = "0.2.0"

_WHERE = {
    "Burst": "train.burst.module",
    "DepthPlan": "core.depth_plan",
    "DistributedDataParallel": "train.data_parallel.module",
    "Error": "core.errors",
    "Guard": "planning.depth.guard",
    "InputError": "core.errors",
    "Network": "core.network",
    "PartialBackprop": "train.partial.module",
    "Plan": "core.plan",
    "Profile": "core.profile",
    "Timeline": "core.timeline",
    "TrainingJob": "cluster.job.spec",
    "Tuning": "train.data_parallel.tuning.trials",
    "compare": "planning",
    "full_state": "train.data_parallel.sharded.optimizer",
    "measure": "",
    "optimizer": "train.data_parallel.sharded.optimizer",
    "plan": "planning",
    "prepare": "train.integrations.prepare",
    "read": "core.files",
    "write": "core.files",
}

__all__ = [
    "Burst",
    "DepthPlan",
    "DistributedDataParallel",
    "Error",
    "Guard",
    "InputError",
    "Network",
    "PartialBackprop",
    "Plan",
    "Profile",
    "Timeline",
    "TrainingJob",
    "Tuning",
    "compare",
    "full_state",
    "measure",
    "optimizer",
    "plan",
    "prepare",
    "read",
    "write",
]


def _apply(plan: Plan, target: Any) -> None:
    import_module("dovetail.train.integrations").apply(plan, target)


register_applier(_apply)
_moved.install()
strategy_names.install()


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'dovetail' has no attribute {name!r}")
    module = import_module(f"dovetail.{_WHERE[name] or name}")
    value = getattr(module, name) if _WHERE[name] else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
