"""One iteration of a plan as a predicted timeline."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise

from dovetail.core.errors import Error
from dovetail.core.network import Network
from dovetail.core.plan import Plan
from dovetail.core.profile import Profile
from dovetail.core.timeline import Span, SpanKind, Timeline
from dovetail.planning.merge.stream import schedule, stream

from .overlap import COMPUTE, NETWORK, forward_overlap


def simulate(plan: Plan, profile: Profile, network: Network) -> Timeline:
    """The layers forward, then backward in reverse order, and beside backward every bucket's all-reduce.

    A bucket starts once its last gradient is ready and the bucket before it has finished. All ranks do the same at the
    same time, so rank 0 stands for all. One worker communicates with nobody: its timeline has no network track.

    Where the plan overlaps with forward too, the timeline is one period of many alike: it starts with forward, beside
    which the parameters are gathered that the optimiser has updated at the end of the period before.
    """
    _check(plan, profile)
    if plan.overlap == "forward":
        return _two_phases(plan, profile, network)
    gradients = stream(profile, batch=plan.batch)
    cuts = [b.stop for b in plan.buckets]
    forward = profile.forward_time(plan.batch)

    spans = [*_forward(profile, plan.batch, until=forward)]
    spans += _backward(profile, plan.batch, start=forward, until=forward + gradients.backward)
    if plan.workers > 1:
        times = schedule(gradients, cuts, network.cost("all_reduce", ranks=plan.workers))
        for i, (bucket, (start, stop)) in enumerate(zip(plan.buckets, times, strict=True)):
            held = bucket.stop - bucket.start
            spans.append(
                Span(
                    track=NETWORK,
                    name=f"bucket {i} ({held} tensor{'s' if held > 1 else ''})",
                    kind="communication",
                    start=forward + start,
                    stop=forward + stop,
                    bytes=bucket.bytes,
                )
            )
    return _timeline(plan, profile, network, spans)


def _two_phases(plan: Plan, profile: Profile, network: Network) -> Timeline:
    forward, others, found = forward_overlap(plan, profile, network)
    until = found.forward + profile.backward_time(plan.batch)
    backward = _backward(profile, plan.batch, start=found.forward, until=until)
    return _timeline(plan, profile, network, [*forward, *backward, *others])


def _timeline(plan: Plan, profile: Profile, network: Network, spans: list[Span]) -> Timeline:
    how = ", overlapping forward" if plan.overlap == "forward" else ""
    return Timeline(
        name=f"{profile.name} on {network.name}, {plan.workers} workers, {plan.policy}{how}",
        source="predicted",
        emulated=profile.emulated or network.emulated,
        spans=tuple(spans),
    )


def _forward(profile: Profile, batch: int, *, until: float) -> Iterator[Span]:
    seconds = [layer.forward(batch) for layer in profile.layers]
    return _chain("forward", [layer.name for layer in profile.layers], seconds, start=0.0, until=until)


def _backward(profile: Profile, batch: int, *, start: float, until: float) -> Iterator[Span]:
    """Where the last gradient is ready after the sum of the layers' times, the layers share the rest in proportion."""
    layers = profile.layers[::-1]
    return _chain("backward", [x.name for x in layers], [x.backward(batch) for x in layers], start=start, until=until)


def _chain(kind: SpanKind, names: list[str], seconds: list[float], *, start: float, until: float) -> Iterator[Span]:
    """Spans on end from `start` to exactly `until`, in proportion to `seconds`; equal ones if those are all zero."""
    if not sum(seconds):
        seconds = [1.0] * len(seconds)
    stretch = (until - start) / sum(seconds)
    edges = [min(start + stretch * done, until) for done in accumulate(seconds, initial=0.0)]
    edges[-1] = until
    for name, (begins, ends) in zip(names, pairwise(edges), strict=True):
        yield Span(track=COMPUTE, name=name, kind=kind, start=begins, stop=ends)


def _check(plan: Plan, profile: Profile) -> None:
    """The plan must be one for this profile's tensors."""
    ours, theirs = plan.tensors, tuple(t.name for t in profile.tensors)
    hint = f"make a plan from this profile (the plan is for {plan.profile!r})"
    if len(ours) != len(theirs):
        raise Error(f"plan does not match profile {profile.name!r}: {len(ours)} tensors against {len(theirs)}; {hint}")
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a != b:
            raise Error(f"plan does not match profile {profile.name!r}: tensor {i} is {a!r} against {b!r}; {hint}")
    for i, bucket in enumerate(plan.buckets):
        held = sum(t.bytes for t in profile.tensors[bucket.start : bucket.stop])
        if held != bucket.bytes:
            raise Error(
                f"plan does not match profile {profile.name!r}: bucket {i} holds {bucket.bytes} bytes "
                f"against {held}; {hint}"
            )
