"""One iteration of a plan as a predicted timeline, and which communication hides behind which computation in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

from dovetail.core.errors import Error
from dovetail.core.network import Network
from dovetail.core.plan import Bucket, Plan
from dovetail.core.profile import Profile
from dovetail.core.timeline import Span, SpanKind, Timeline
from dovetail.planning.merge import cycle as cycles
from dovetail.planning.merge.setting import MergeSetting, OverlapSetting, setting_of
from dovetail.planning.merge.stream import schedule

COMPUTE, NETWORK = "rank 0/compute", "rank 0/network"


def simulate(plan: Plan, profile: Profile, network: Network) -> Timeline:
    """The layers forward, then backward in reverse order, and beside backward every bucket's all-reduce.

    A bucket starts once its last gradient is ready and the bucket before it has finished. All ranks do the same at the
    same time, so rank 0 stands for all. A single worker does not communicate: its timeline has no network track.

    Where the plan overlaps with forward too, the timeline is one of many equal iterations: it starts with forward,
    beside which the parameters are gathered that the optimiser updated at the end of the iteration before.
    """
    _check(plan, profile)
    if plan.overlap == "forward":
        return _two_phases(plan, profile, network)
    setting = MergeSetting(profile, network, plan.workers, plan.batch)
    gradients = setting.stream
    forward = profile.forward_time(plan.batch)

    spans = [*_forward(profile, plan.batch, until=forward)]
    spans += _backward(profile, plan.batch, start=forward, until=forward + gradients.backward)
    if plan.workers > 1:
        times = schedule(gradients, [b.stop for b in plan.buckets], setting.cost)
        spans += [_channel("bucket", i, plan.buckets[i], at, forward) for i, at in enumerate(times)]
    return _timeline(plan, profile, network, spans)


def _two_phases(plan: Plan, profile: Profile, network: Network) -> Timeline:
    forward, others, setting = forward_overlap(plan, profile, network)
    begins = forward[-1].stop
    backward = _backward(profile, plan.batch, start=begins, until=begins + setting.stream.backward)
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
    """Layers in reverse order. If the last gradient is ready later than their times add up to, all are stretched."""
    layers = profile.layers[::-1]
    return _chain("backward", [x.name for x in layers], [x.backward(batch) for x in layers], start=start, until=until)


def _chain(kind: SpanKind, names: list[str], seconds: list[float], *, start: float, until: float) -> Iterator[Span]:
    """Spans without gaps from `start` to exactly `until`, in proportion to `seconds`; equal ones if all are zero."""
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


@dataclass(frozen=True)
class Hidden:
    """One communication and the computation that went on meanwhile."""

    span: Span
    behind: tuple[Span, ...]
    """Layers and the optimiser's update, in order of time."""
    exposed: float
    """Seconds of the communication in which nothing was computed."""


def forward_overlap(plan: Plan, profile: Profile, network: Network) -> tuple[list[Span], list[Span], OverlapSetting]:
    """The spans of forward with its waits, the spans of the network and of the optimiser, and what they follow from.

    The iteration starts with forward, while the parameters of split buckets that the iteration before has updated are
    still being gathered, the first layers' bucket first. A layer starts once its tensors are there.
    """
    setting = setting_of(plan, profile, network, workers=plan.workers, batch=plan.batch)
    assert isinstance(setting, OverlapSetting), "the plan overlaps with forward"
    found = cycles.phases(setting.cycle, setting.buckets(plan))
    spans = list(_forward_waiting(plan, profile, found, setting.cycle.forward))
    others: list[Span] = []
    if plan.workers > 1:
        for i, at in reversed(list(enumerate(found.gathers))):
            if at is not None:
                others.append(_channel("all-gather", i, plan.buckets[i], at, 0.0))
        for i, at in enumerate(found.reductions):
            what = "all-reduce" if plan.buckets[i].kind == "whole" else "reduce-scatter"
            others.append(_channel(what, i, plan.buckets[i], at, found.forward))
    if plan.prediction.optimizer:
        for i, (start, stop) in enumerate(found.updates):
            name = f"update {i}" if len(found.updates) > 1 else "update"
            start, stop = found.forward + start, found.forward + stop
            others.append(Span(track=COMPUTE, name=name, kind="optimizer", start=start, stop=stop))
    return spans, others, setting


def link_idle(timeline: Timeline) -> float:
    """Seconds of a timeline in which nothing is communicated; where ranks differ, of the one that idles longest."""
    tracks: dict[str, list[tuple[float, float]]] = {}
    for span in timeline.spans:
        if span.kind == "communication":
            tracks.setdefault(span.track, []).append((span.start, span.stop))
    # The timeline may begin after 0, where it was recorded.
    origin = min((span.start for span in timeline.spans), default=0.0)
    end = max((span.stop for span in timeline.spans), default=0.0)
    found = [end - origin] if not tracks else []
    for spans in tracks.values():
        idle, at = 0.0, origin
        for start, stop in sorted(spans):
            idle += max(0.0, start - at)
            at = max(at, stop)
        found.append(idle + max(0.0, end - at))
    return max(found)


def hidden(timeline: Timeline) -> list[Hidden]:
    """For every communication of a timeline: the computation of the same rank behind which it hid, and the rest."""
    busy: dict[str, list[Span]] = {}
    for span in timeline.spans:
        if span.kind in ("forward", "backward", "optimizer"):
            busy.setdefault(span.track.partition("/")[0], []).append(span)
    found = []
    for span in sorted((s for s in timeline.spans if s.kind == "communication"), key=lambda s: (s.start, s.stop)):
        meanwhile = [
            s
            for s in sorted(busy.get(span.track.partition("/")[0], []), key=lambda s: (s.start, s.stop))
            if min(s.stop, span.stop) > max(s.start, span.start)
        ]
        covered = sum(min(s.stop, span.stop) - max(s.start, span.start) for s in meanwhile)
        found.append(Hidden(span=span, behind=tuple(meanwhile), exposed=max(0.0, span.duration - covered)))
    return found


def _forward_waiting(plan: Plan, profile: Profile, found: cycles.Phases, computing: float) -> Iterator[Span]:
    """Layers in order; the time that a layer waits for its parameters is a span of its own.

    `computing`: seconds of forward without waiting, contention included.
    """
    there = [0.0] * len(profile.layers)
    if plan.workers > 1:
        for bucket, times in zip(plan.buckets, found.gathers, strict=True):
            if times is not None:
                for tensor in profile.tensors[bucket.start : bucket.stop]:
                    there[tensor.layer] = max(there[tensor.layer], times[1])
    total = profile.forward_time(plan.batch)
    factor = computing / total if total else 1.0
    at = 0.0
    for i, layer in enumerate(profile.layers):
        start = min(max(at, there[i]), found.forward)
        if start > at:
            yield Span(track=COMPUTE, name=f"wait for {layer.name}", kind="wait", start=at, stop=start)
        # The pass ends when the plan says: a sum in another order than the plan's may differ by rounding.
        last = i + 1 == len(profile.layers)
        at = found.forward if last else min(start + factor * layer.forward(plan.batch), found.forward)
        yield Span(track=COMPUTE, name=layer.name, kind="forward", start=start, stop=at)


def _channel(what: str, i: int, bucket: Bucket, times: tuple[float, float], origin: float) -> Span:
    count = bucket.stop - bucket.start
    held = f"{count} tensor{'s' if count > 1 else ''}"
    return Span(
        track=NETWORK,
        name=f"{what} {i} ({held}{f', {bucket.precision}' if bucket.precision != 'full' else ''})",
        kind="communication",
        start=origin + times[0],
        stop=origin + times[1],
        bytes=bucket.bytes,
    )
