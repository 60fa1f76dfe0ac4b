"""How an iteration scales with the number of workers, for every policy of merging or for every technique."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.core.burst_plan import BurstPlan
from dovetail.core.depth_plan import DepthPlan
from dovetail.core.files import Count, Name, Record, Seconds
from dovetail.core.network import Network
from dovetail.core.profile import Profile
from dovetail.planning import plan
from dovetail.planning.auto.options import TECHNIQUES
from dovetail.planning.auto.search import Candidate
from dovetail.planning.merge.policies import COMPARED

from .auto import choose

BOTH = "both"
"""Name of the plans in which every bucket is whole or split (`overlap="forward"`, policy auto)."""
AUTO = "auto"
"""Name of the best combination of all techniques."""


class ScalePoint(Record, frozen=True, kw_only=True):
    """One policy with one number of workers, each at the profile's local batch (weak scaling)."""

    workers: Count
    policy: Name
    iteration: Seconds
    speedup: float
    """Samples per second over those of one worker: workers · (forward + backward) / iteration."""
    efficiency: float
    """speedup / workers; 1.0 where communication hides entirely."""
    buckets: Count
    """Buckets of gradients; stages of a burst plan, segments of a depth plan."""


def scale(
    profile: Profile, network: Network, *, workers: Sequence[int], policies: Sequence[str] = COMPARED
) -> list[ScalePoint]:
    """Predicts an iteration for every number of workers and every policy, in the order in which they are given.

    The network's costs are extrapolated to other numbers of ranks by the ring law; every policy plans for each number.
    All policies merge all-reduces behind backward, except `both`, which also splits buckets.
    """
    points = []
    for count in workers:
        for policy in policies:
            if policy == BOTH:
                made = plan(profile, network, workers=count, overlap="forward")
            else:
                made = plan(profile, network, workers=count, policy=policy)
            alone = made.prediction.forward + made.prediction.backward
            # A profile without any time computes as fast on many workers as on one.
            efficiency = alone / made.prediction.iteration if made.prediction.iteration else 1.0
            points.append(
                ScalePoint(
                    workers=count,
                    policy=policy,
                    iteration=made.prediction.iteration,
                    speedup=count * efficiency,
                    efficiency=efficiency,
                    buckets=len(made.buckets),
                )
            )
    return points


def techniques(
    profile: Profile, network: Network, *, devices: Sequence[int], statistics: bool = False
) -> list[ScalePoint]:
    """Predicts an iteration for every number of devices and every technique that can be used on them.

    The global batch grows with the devices: the profile's own on each. A technique uses all devices, burst up to all;
    `auto` is what `dovetail plan --auto` chooses, on as many as are best.
    """
    points = []
    alone = profile.forward_time() + profile.backward_time()
    for count in devices:
        best = choose(profile, network, devices=count, statistics=statistics)
        found = {name: best.search.of(name, count) for name in TECHNIQUES} | {AUTO: best.chosen}
        for name, candidate in found.items():
            if candidate is not None:
                iteration = candidate.score.iteration
                efficiency = alone / iteration if iteration else 1.0
                points.append(
                    ScalePoint(
                        workers=count,
                        policy=name,
                        iteration=iteration,
                        speedup=count * efficiency,
                        efficiency=efficiency,
                        buckets=_pieces(candidate),
                    )
                )
    return points


def _pieces(candidate: Candidate) -> int:
    plan = candidate.plan
    if isinstance(plan, BurstPlan):
        return len(plan.stages())
    return len(plan.segments) if isinstance(plan, DepthPlan) else len(plan.buckets)
