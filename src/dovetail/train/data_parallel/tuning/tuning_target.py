"""What a tuner needs of the model that it drives; targets.py has the two kinds that there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from dovetail.core.network import Network
from dovetail.core.plan import Overlap, Plan
from dovetail.core.profile import Profile

from ..observe import ObservedIteration
from .trials import TrialPlan


class TuningTarget(Protocol):
    """A model in training whose buckets can change between two iterations. Calls marked * are collectives."""

    name: str
    group: dist.ProcessGroup
    device: torch.device
    overlap: Overlap
    """What communication can hide behind."""
    own: Any
    """torch's description of the buckets from before planning, where a target needs it to go back to them."""
    parameters: list[tuple[str, nn.Parameter]]

    def begin(self, on_iteration: Callable[[ObservedIteration], None]) -> None:
        """Calls `on_iteration` at the end of every iteration from now on."""
        ...

    def before_forward(self) -> None: ...
    def after_forward(self) -> None: ...
    def after_step(self) -> None: ...

    def unready(self) -> bool:
        """Whether iterations still differ from those that are to come, so that planning had better wait."""
        ...

    def watch(self, *, every_gradient: bool) -> None:
        """Chooses between stamping everything that a plan is made from and just the length of an iteration."""
        ...

    def probe(self, profile: Profile) -> Plan | None:
        """* A bucketing that must run for a while before `network` is called, if any."""
        ...

    def network(self, max_bytes: int, budget: float) -> Network:
        """* What communication costs."""
        ...

    def watched(self, profile: Profile, network: Network, optimizer: float) -> tuple[Plan, Profile] | None:
        """The buckets while watching, the profile in their order; None where `network` has what training adds."""
        ...

    def contenders(self, profile: Profile, network: Network, optimizer: float, count: int) -> list[TrialPlan]:
        """Plans to try, the one to beat first. `optimizer` is the seconds of the optimiser while watching."""
        ...

    def notes(self, profile: Profile, network: Network) -> tuple[str, ...]: ...

    def use(self, order: list[int], plan: Plan, *, baseline: bool = False) -> None:
        """* Puts a plan in force from the next iteration on; `order` has the indices of the plan's tensors.

        `baseline` says that it is the first contender.
        """
        ...

    def changing(self) -> bool:
        """Whether a plan waits to be put in force."""
        ...

    def enforce(self) -> None:
        """Puts a plan that waits in force at once. Not to be called inside backward."""
        ...

    def hooked(self, late: bool) -> str | None:
        """A communication hook was registered; the reason why buckets must not change under it, or None."""
        ...

    def restore(self, *, now: bool) -> None:
        """Goes back to the buckets from before, at once or before the next iteration."""
        ...

    def close(self) -> None: ...
