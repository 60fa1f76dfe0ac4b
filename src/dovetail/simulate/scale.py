"""How an iteration scales with the number of workers, for every policy."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.core.network import Network
from dovetail.core.profile import Profile
from dovetail.core.store import Count, Name, Record, Seconds
from dovetail.planning import plan
from dovetail.planning.policies import COMPARED


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


def scale(
    profile: Profile, network: Network, *, workers: Sequence[int], policies: Sequence[str] = COMPARED
) -> list[ScalePoint]:
    """Predicts an iteration for every number of workers and every policy, in the order in which they are given.

    The network's costs are carried to other numbers of ranks by the ring law; every policy plans anew for each number.
    """
    points = []
    for count in workers:
        for policy in policies:
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
