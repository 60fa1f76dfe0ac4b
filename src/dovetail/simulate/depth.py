"""Partial backpropagation without hardware: the timeline of one iteration of all workers, and what a plan saves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dovetail.core.depth_plan import DepthPhase, DepthPlan, WorkerPrediction
from dovetail.core.errors import Error
from dovetail.core.network import Network
from dovetail.core.profile import Profile
from dovetail.core.timeline import ALL_RANKS, Span, Timeline
from dovetail.planning.depth.buckets import depth_stream
from dovetail.planning.merge import exact
from dovetail.planning.merge.stream import schedule


def simulate_depth(plan: DepthPlan, profile: Profile, network: Network | None = None, *, phase: int = -1) -> Timeline:
    """Every worker's forward and backward, segment by segment; the gradients of each segment beside it; then waiting.

    A segment's gradients are sent when the slowest of its contributors has computed them and the network is free.
    Workers that are done earlier wait for the end of the iteration: in that time a scheduler can run other jobs' tasks.
    """
    at = range(len(plan.phases))[phase]
    if tuple(layer.name for layer in profile.layers) != plan.layers:
        raise Error(f"plan for {plan.profile!r}: expected the layers of profile {profile.name!r} in its order")
    spans: list[Span] = []
    ends = []
    for worker, prediction in enumerate(plan.phases[at].workers):
        spans += _computing(plan, profile, at, worker, prediction)
        ends.append(prediction.forward + prediction.backward)
    if network is not None and plan.workers > 1:
        sent = list(_sending(plan, profile, network, at))
        spans += sent
        ends.append(sent[-1].stop)
    for worker, done in enumerate(ends[: plan.workers]):
        if done < max(ends):
            track = f"rank {worker}/compute"
            spans.append(Span(track=track, name="waiting", kind="wait", start=done, stop=max(ends)))
    return Timeline(
        name=f"{profile.name} on {plan.network}, {plan.workers} workers, {plan.policy}",
        source="predicted",
        emulated=profile.emulated or (network.emulated if network else False),
        spans=tuple(spans),
    )


def _computing(
    plan: DepthPlan, profile: Profile, phase: int, worker: int, prediction: WorkerPrediction
) -> Iterator[Span]:
    """One worker's segments forward and, from the last to the deepest, backward."""
    batch, depth = plan.phases[phase].batches[worker], plan.phases[phase].depths[worker]
    count, track, now = len(plan.segments), f"rank {worker}/compute", 0.0
    forward = [sum(x.forward(batch) for x in profile.layers[s.start : s.stop]) for s in plan.segments]
    backward = [sum(x.backward(batch) for x in profile.layers[s.start : s.stop]) for s in plan.segments]
    passes: tuple[tuple[str, Sequence[int], list[float], float], ...] = (
        ("forward", range(count), forward, prediction.forward),
        ("backward", range(count - 1, count - depth - 1, -1), backward, prediction.backward),
    )
    for kind, visited, seconds, whole in passes:
        total, begins = sum(seconds[s] for s in visited), now
        for i, s in enumerate(visited):
            # The last one ends with the pass: the sum may differ by rounding.
            stop = begins + whole if i == len(visited) - 1 else now + (seconds[s] / total * whole if total else 0.0)
            stop = min(max(stop, now), begins + whole)
            yield Span(track=track, name=f"segment {s}", kind=kind, start=now, stop=stop)  # type: ignore[arg-type]
            now = stop


def _sending(plan: DepthPlan, profile: Profile, network: Network, phase: int) -> Iterator[Span]:
    stream, order = depth_stream(plan, profile, phase=phase)
    cost = network.cost("all_reduce", ranks=plan.workers)
    cuts = exact.fewest(stream, cost)
    home = [s for s, segment in enumerate(plan.segments) for _ in range(segment.start, segment.stop)]
    for (a, b), (start, stop) in zip(pairwise([0, *cuts]), schedule(stream, cuts, cost), strict=True):
        segment = home[profile.tensors[order[a]].layer]
        given = len(plan.contributors(phase, segment))
        yield Span(
            track=f"{ALL_RANKS}/network",
            name=f"segment {segment} ({b - a} tensor{'s' if b - a > 1 else ''} of {given} of {plan.workers} workers)",
            kind="communication",
            start=start,
            stop=stop,
            bytes=sum(profile.tensors[order[i]].bytes for i in range(a, b)),
        )


@dataclass(frozen=True)
class Savings:
    """What partial backpropagation saves against full backpropagation of the same global batch, as shares."""

    compute: float
    """Device-seconds of forward and backward."""
    backward: float
    """Device-seconds of backward alone."""
    sent: float
    """Bytes of gradients that workers send."""
    activations: float
    """Bytes of activations, mean over the workers: the cluster's memory."""
    peak: float
    """Activations of the worker that keeps most: what a single device must hold."""
    iteration: float
    """Seconds of an iteration in which all workers wait for the slowest."""


def savings(plan: DepthPlan) -> Savings:
    """Savings of the cluster over the whole training: each phase counts for as long as it lasts."""
    edges = [*(p.begins for p in plan.phases), 1.0]
    lengths = [b - a for a, b in pairwise(edges)]
    each = [of_phase(plan, i) for i in range(len(plan.phases))]

    def over_training(field: str) -> float:
        return sum(length * float(getattr(s, field)) for length, s in zip(lengths, each, strict=True))

    whole = {field: over_training(field) for field in ("compute", "backward", "sent", "activations", "iteration")}
    return Savings(**whole, peak=min(s.peak for s in each))


def of_phase(plan: DepthPlan, phase: int) -> Savings:
    """Savings of the cluster in one phase."""
    now, full = plan.phases[phase], plan.full
    return Savings(
        compute=_saved(sum(_spent(now)), sum(_spent(full))),
        backward=_saved(sum(w.backward for w in now.workers), sum(w.backward for w in full.workers)),
        sent=_saved(sum(w.sent for w in now.workers), sum(w.sent for w in full.workers)),
        activations=_saved(sum(w.activations for w in now.workers), sum(w.activations for w in full.workers)),
        peak=_saved(max(w.activations for w in now.workers), max(w.activations for w in full.workers)),
        iteration=_saved(now.iteration, full.iteration),
    )


def _spent(phase: DepthPhase) -> list[float]:
    return [w.forward + w.backward for w in phase.workers]


def _saved(now: float, full: float) -> float:
    return 1 - now / full if full else 0.0
