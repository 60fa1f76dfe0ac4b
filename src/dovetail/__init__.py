"""dovetail makes deep-learning training jobs fit together.

    from dovetail import DistributedDataParallel as DDP   # in place of torch's
    model = DDP(model)
    print(model.explain())

Everything public is a name of this module; whatever needs torch is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import measure
    from .cluster.jobs import TrainingJob
    from .core.depth import DepthPlan
    from .core.errors import Error, InputError
    from .core.network import Network
    from .core.plan import Plan
    from .core.profile import Profile
    from .core.store import read, write
    from .core.timeline import Timeline
    from .planning import compare, plan
    from .planning.guard import Guard
    from .train.burst import Burst
    from .train.ddp import DistributedDataParallel
    from .train.partial import PartialBackprop
    from .train.sharded import optimizer
    from .train.trials import Tuning

__version__ = "0.1.0"

_WHERE = {
    "Burst": "train.burst",
    "DepthPlan": "core.depth",
    "DistributedDataParallel": "train.ddp",
    "Error": "core.errors",
    "Guard": "planning.guard",
    "InputError": "core.errors",
    "Network": "core.network",
    "PartialBackprop": "train.partial",
    "Plan": "core.plan",
    "Profile": "core.profile",
    "Timeline": "core.timeline",
    "TrainingJob": "cluster.jobs",
    "Tuning": "train.trials",
    "compare": "planning",
    "measure": "",
    "optimizer": "train.sharded",
    "plan": "planning",
    "read": "core.store",
    "write": "core.store",
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
    "measure",
    "optimizer",
    "plan",
    "read",
    "write",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'dovetail' has no attribute {name!r}")
    module = import_module(f"dovetail.{_WHERE[name] or name}")
    value = getattr(module, name) if _WHERE[name] else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
