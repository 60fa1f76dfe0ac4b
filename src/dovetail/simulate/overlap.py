"""One iteration of a plan whose communication hides behind forward too, and what hid behind what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dovetail.core.network import Network
from dovetail.core.plan import Bucket, Plan
from dovetail.core.profile import Profile
from dovetail.core.timeline import Span, Timeline
from dovetail.planning.merge import cycle as cycles
from dovetail.planning.merge.cycle import Phases

COMPUTE, NETWORK = "rank 0/compute", "rank 0/network"


@dataclass(frozen=True)
class Hidden:
    """One communication and the computation that went on meanwhile."""

    span: Span
    behind: tuple[Span, ...]
    """Layers, in order of time; the optimiser too."""
    exposed: float
    """Seconds in which nothing was computed."""


def forward_overlap(plan: Plan, profile: Profile, network: Network) -> tuple[list[Span], list[Span], Phases]:
    """The spans of forward with the waiting in it, those of the network and of the optimiser, and the plain times.

    The iteration starts with forward, while the parameters that the iteration before has updated are still being
    gathered, the first layers' bucket first. A layer starts once its tensors are there.
    """
    total = max(1, plan.bytes)
    found = cycles.phases(
        cycles.cycle(
            profile,
            network.cost("reduce_scatter", ranks=plan.workers),
            network.cost("all_gather", ranks=plan.workers),
            batch=plan.batch,
            update=cycles.by_bytes(plan.prediction.optimizer, total),
        ),
        [b.stop for b in plan.buckets],
    )
    spans = list(_forward(plan, profile, found))
    others = []
    if plan.workers > 1:
        others += _channel("all-gather", plan.buckets, found.gathers, 0.0)[::-1]
        others += _channel("reduce-scatter", plan.buckets, found.scatters, found.forward)
    if plan.prediction.optimizer:
        for i, (start, stop) in enumerate(found.updates):
            name = f"update {i}" if len(found.updates) > 1 else "update"
            start, stop = found.forward + start, found.forward + stop
            others.append(Span(track=COMPUTE, name=name, kind="optimizer", start=start, stop=stop))
    return spans, others, found


def hidden(timeline: Timeline) -> list[Hidden]:
    """For every communication of a timeline: behind which computation of the same rank it hid, and how far not."""
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


def _forward(plan: Plan, profile: Profile, found: Phases) -> Iterator[Span]:
    """Layers in order; what a layer waits for its tensors is a span of its own."""
    there = [0.0] * len(profile.layers)
    if plan.workers > 1:
        for bucket, (_, gathered) in zip(plan.buckets, found.gathers, strict=True):
            for tensor in profile.tensors[bucket.start : bucket.stop]:
                there[tensor.layer] = max(there[tensor.layer], gathered)
    at = 0.0
    for i, layer in enumerate(profile.layers):
        start = min(max(at, there[i]), found.forward)
        if start > at:
            yield Span(track=COMPUTE, name=f"wait for {layer.name}", kind="wait", start=at, stop=start)
        # Sums in another order than the plan's differ by rounding; the pass ends when the plan says.
        last = i + 1 == len(profile.layers)
        at = found.forward if last else min(start + layer.forward(plan.batch), found.forward)
        yield Span(track=COMPUTE, name=layer.name, kind="forward", start=start, stop=at)


def _channel(what: str, buckets: tuple[Bucket, ...], times: list[tuple[float, float]], origin: float) -> list[Span]:
    return [
        Span(
            track=NETWORK,
            name=f"{what} {i} ({b.stop - b.start} tensor{'s' if b.stop - b.start > 1 else ''})",
            kind="communication",
            start=origin + start,
            stop=origin + stop,
            bytes=b.bytes,
        )
        for i, (b, (start, stop)) in enumerate(zip(buckets, times, strict=True))
    ]
