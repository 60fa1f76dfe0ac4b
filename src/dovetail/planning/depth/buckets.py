"""Gradient merging for partial backpropagation: which gradients of a segment travel together.

Gradients leave in the order of the segments, the last first. A gradient is ready when the slowest of its segment's
contributors has it, and a bucket never spans two segments, whose contributors differ. What a bucket of n bytes with c
of k contributors costs is an all-reduce of the bytes that it really puts on the wire, (c + k − 2)n / 2(k − 1).
"""

from __future__ import annotations

from itertools import pairwise

from dovetail.core.depth_plan import DepthPlan
from dovetail.core.errors import Error
from dovetail.core.network import Network
from dovetail.core.profile import Profile
from dovetail.planning.merge.policies import POLICIES
from dovetail.planning.merge.stream import Stream


def depth_stream(plan: DepthPlan, profile: Profile, *, phase: int = 0) -> tuple[Stream, list[int]]:
    """The stream of gradients in sending order, with sizes in equivalent all-reduce bytes; and each one's tensor.

    Ready times are seconds from the start of the iteration, forward included: workers with larger batches start their
    backward pass later.
    """
    if tuple(layer.name for layer in profile.layers) != plan.layers:
        raise Error(f"plan for {plan.profile!r}: expected the layers of profile {profile.name!r} in its order")
    home = {layer: s for s, segment in enumerate(plan.segments) for layer in range(segment.start, segment.stop)}
    last = len(plan.segments) - 1
    order = sorted(range(len(profile.tensors)), key=lambda i: (last - home[profile.tensors[i].layer], i))
    segments = [home[profile.tensors[i].layer] for i in order]
    k, batches = plan.workers, plan.phases[phase].batches
    at_batch = {b: (profile.forward_time(b), profile.ready_times(b)) for b in set(batches)}
    # A worker whose predicted time is not the profile's has a device of another speed.
    slowness = [
        p.forward / at_batch[b][0] if p.forward and at_batch[b][0] else 1.0
        for p, b in zip(plan.phases[phase].workers, batches, strict=True)
    ]
    ready: list[float] = []
    sizes: list[int] = []
    for i, segment in zip(order, segments, strict=True):
        contributors = plan.contributors(phase, segment)
        slowest = max(slowness[w] * (at_batch[batches[w]][0] + at_batch[batches[w]][1][i]) for w in contributors)
        ready.append(max(slowest, ready[-1] if ready else 0.0))
        share = (len(contributors) + k - 2) / (2 * (k - 1)) if k > 1 else 1.0
        sizes.append(round(profile.tensors[i].bytes * share))
    breaks = {at for at, (a, b) in enumerate(pairwise(segments), start=1) if a != b}
    breaks |= {
        at for at, (a, b) in enumerate(pairwise(order), start=1) if profile.tensors[a].dtype != profile.tensors[b].dtype
    }
    # Segments need not take equally long, so only the prediction knows when a shallow worker is done. Where nothing is
    # predicted, as in a job that has just begun, the workers of full depth are known.
    predicted = max(p.forward + p.backward for p in plan.phases[phase].workers)
    whole = (at_batch[batches[w]][0] + profile.backward_time(batches[w]) for w in plan.contributors(phase, 0))
    backward = predicted or max(whole)
    return Stream(
        ready=tuple(ready), sizes=tuple(sizes), breaks=frozenset(breaks), backward=max(backward, ready[-1])
    ), order


def buckets(
    plan: DepthPlan, profile: Profile, network: Network, *, phase: int = 0, policy: str = "auto"
) -> tuple[tuple[str, ...], ...]:
    """Names of the parameters that travel together, in sending order."""
    stream, order = depth_stream(plan, profile, phase=phase)
    cost = network.cost("all_reduce", ranks=max(plan.workers, 2))
    cuts = POLICIES.parse(policy).value(stream, cost)
    names = [profile.tensors[i].name for i in order]
    return tuple(tuple(names[a:b]) for a, b in pairwise([0, *cuts]))
