"""Planning: pure functions from a profile and a network to a plan. No torch, no I/O.

    plan(profile, network)        the plan to use
    compare(profile, network)     one plan for every policy, the fastest first
    candidates(profile, network)  plans worth trying on the real system

Each builds the stream of gradients at the local batch, asks a policy for the cuts at the cost of one all-reduce among
the workers, and predicts: iteration = forward + max(backward, finish of the last bucket).

With `overlap="forward"` every bucket is whole or split, in full precision or a lower one (`planning.merge.cycle`):

* `optimizer` is what the optimiser takes on a rank's shards if all is split, in seconds; a whole bucket takes `workers`
  times as long as its shard.
* `memory="time"` takes the fastest; "shard" has the most bytes in split buckets among those within 2 % of it.
* `precision` "bf16" or "int8" allows that one beside "full", "auto" all that the network has. Fewer bits are taken only
  where they save more than 0.5 %.
* `kinds` can be limited to ("split",) or ("whole",).

Policies that know one phase only cut by their rule; the buckets then get the ways that are best for them.
"""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.core.errors import Error
from dovetail.core.network import Network
from dovetail.core.plan import BucketKind, Overlap, Plan
from dovetail.core.profile import Profile

from .cycle import Bucketing
from .cycle_choice import Memory
from .policies import COMPARED
from .setting import KINDS, Precisions, setting_for, setting_of

__all__ = ["candidates", "compare", "plan", "predict"]


def plan(
    profile: Profile,
    network: Network,
    *,
    workers: int | None = None,
    batch: int | None = None,
    policy: str = "auto",
    overlap: Overlap = "backward",
    optimizer: float = 0.0,
    memory: Memory = "time",
    precision: Precisions = "full",
    kinds: Sequence[BucketKind] = KINDS,
) -> Plan:
    """A plan by one policy; `workers` defaults to the network's own number of ranks, `batch` to the profile's."""
    return setting_for(
        profile,
        network,
        workers=workers,
        batch=batch,
        overlap=overlap,
        optimizer=optimizer,
        memory=memory,
        precision=precision,
        kinds=kinds,
    ).plan(policy)


def compare(
    profile: Profile,
    network: Network,
    *,
    workers: int | None = None,
    batch: int | None = None,
    policies: Sequence[str] | None = None,
    overlap: Overlap = "backward",
    optimizer: float = 0.0,
    memory: Memory = "time",
    precision: Precisions = "full",
    kinds: Sequence[BucketKind] = KINDS,
) -> list[Plan]:
    """One plan for every policy by predicted iteration time; among equals, the one with fewer buckets first."""
    setting = setting_for(
        profile,
        network,
        workers=workers,
        batch=batch,
        overlap=overlap,
        optimizer=optimizer,
        memory=memory,
        precision=precision,
        kinds=kinds,
    )
    plans = [setting.plan(name) for name in policies or COMPARED]
    return sorted(plans, key=lambda p: (p.prediction.iteration, len(p.buckets)))


def candidates(
    profile: Profile,
    network: Network,
    *,
    workers: int | None = None,
    batch: int | None = None,
    count: int = 4,
    overlap: Overlap = "backward",
    optimizer: float = 0.0,
    memory: Memory = "time",
    precision: Precisions = "full",
    kinds: Sequence[BucketKind] = KINDS,
) -> list[Plan]:
    """Up to `count` distinct bucketings to try on the real system: torch's default, then the others by promise.

    After `ddp` come the robust choice, the fewest buckets near the optimum and the best size threshold; where those
    coincide, the optimum, further thresholds and one bucket take their place. Fewer come back if no more exist.
    """
    setting = setting_for(
        profile,
        network,
        workers=workers,
        batch=batch,
        overlap=overlap,
        optimizer=optimizer,
        memory=memory,
        precision=precision,
        kinds=kinds,
    )
    plans: dict[Bucketing, Plan] = {}
    for name, buckets in setting.promising():
        if len(plans) == max(count, 1):
            break
        if buckets not in plans:
            plans[buckets] = setting.of(name, buckets)
    return list(plans.values())


def predict(plan: Plan, profile: Profile, network: Network, *, workers: int | None = None) -> Plan:
    """The same buckets, predicted from this profile and this network, at the profile's own batch."""
    if tuple(t.name for t in profile.tensors) != plan.tensors:
        raise Error(f"plan for {plan.profile!r}: expected the tensors of profile {profile.name!r} in its order")
    setting = setting_of(plan, profile, network, workers=workers, batch=None)
    return setting.of(plan.policy, setting.buckets(plan))
