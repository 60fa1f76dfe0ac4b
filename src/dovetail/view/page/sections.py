"""Nouns and reports as the page's sections: one function for each kind."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.core.burst_plan import BurstPlan
from dovetail.core.depth_plan import DepthPlan
from dovetail.core.errors import Error
from dovetail.core.network import Network
from dovetail.core.plan import Plan
from dovetail.core.profile import Profile
from dovetail.core.timeline import Comparison
from dovetail.planning.merge.policies import POLICIES
from dovetail.view import tables, units

from .document import (
    BucketRow,
    BurstSection,
    CollectiveRow,
    ComparisonSection,
    DepthRow,
    DepthsSection,
    DrawnTimeline,
    Family,
    LayersSection,
    NetworkSection,
    PlanSection,
    PolicyRow,
    ScalingSection,
    Series,
    SizeRow,
    StudyRow,
    StudySection,
    TradeOff,
)
from .reports import BurstReport, ScaleReport, StudyReport


def layers(p: Profile) -> LayersSection:
    forward, backward = tuple(x.forward(p.batch) for x in p.layers), tuple(x.backward(p.batch) for x in p.layers)
    total = sum(forward) + sum(backward) or 1.0
    most = max(range(len(p.layers)), key=lambda i: forward[i] + backward[i])
    heavy = max(range(len(p.layers)), key=lambda i: p.layers[i].parameter_bytes)
    return LayersSection(
        title=f"{p.name}: {units.count(len(p.layers), 'layer')}, {units.size(p.parameter_bytes)} of gradients, "
        f"{'emulated' if p.emulated else 'measured'} on {p.device}",
        sentence=f"At a local batch of {p.batch}, forward takes {units.seconds(p.forward_time())} and backward "
        f"{units.seconds(p.backward_time())}. {p.layers[most].name} takes the most time "
        f"({units.percent((forward[most] + backward[most]) / total)}); {p.layers[heavy].name} has the most parameters "
        f"({units.size(p.layers[heavy].parameter_bytes)}).",
        names=tuple(x.name for x in p.layers),
        types=tuple(x.type for x in p.layers),
        forward=forward,
        backward=backward,
        parameters=tuple(x.parameter_bytes for x in p.layers),
        activations=tuple(x.activation_bytes for x in p.layers),
        batches=tuple(
            (b, p.forward_time(b), p.backward_time(b)) for b in sorted({t.batch for x in p.layers for t in x.times})
        ),
    )


def planned(
    chosen: Plan, compared: Sequence[Plan], sentences: Sequence[str], drawn: Sequence[DrawnTimeline], missing: str
) -> PlanSection:
    how = ", overlapping forward too" if chosen.overlap == "forward" else ""
    rivals = list(compared)
    if all((p.policy, p.overlap) != (chosen.policy, chosen.overlap) for p in rivals):
        rivals.append(chosen)
    mixed = len({p.overlap for p in rivals}) > 1
    return PlanSection(
        title=f"Plan {chosen.policy}{how}: {chosen.profile} on {units.count(chosen.workers, 'worker')} of "
        f"{chosen.network}, local batch {chosen.batch}",
        sentences=tuple(sentences),
        policies=tuple(
            PolicyRow(
                name=f"{p.policy} (all-reduce)" if mixed and p.overlap == "backward" else p.policy,
                buckets=len(p.buckets),
                iteration=p.prediction.iteration,
                exposed=p.prediction.exposed,
                bound=p.prediction.lower_bound if p.overlap == chosen.overlap else 0.0,
                chosen=(p.policy, p.overlap) == (chosen.policy, chosen.overlap),
                how=_described(p.policy),
            )
            for p in tables.by_promise(rivals)
        ),
        buckets=tuple(
            BucketRow(
                bytes=b.bytes,
                tensors=b.stop - b.start,
                first=chosen.tensors[b.start],
                last=chosen.tensors[b.stop - 1],
                kind=tables.bucket_kind(b) if chosen.overlap == "forward" else "",
            )
            for b in chosen.buckets
        ),
        drawn=tuple(drawn),
        missing=missing,
    )


def _described(policy: str) -> str:
    """The policy's line in `--help`; empty if its name is not registered."""
    try:
        return POLICIES.parse(policy).description
    except Error:
        return ""


def depths(plan: DepthPlan) -> DepthsSection:
    last, full = plan.phases[-1], plan.full
    saved = 1 - sum(w.backward for w in last.workers) / (sum(w.backward for w in full.workers) or 1.0)
    return DepthsSection(
        title=f"{plan.policy}: {plan.profile} on {units.count(plan.workers, 'worker')} of {plan.network}",
        sentence=f"Workers go back through the last {min(last.depths)} to {max(last.depths)} of "
        f"{units.count(len(plan.segments), 'segment')}, which saves {units.percent(saved)} of backward. "
        f"Predicted iteration {units.seconds(last.iteration)}, against {units.seconds(full.iteration)} at full depth.",
        segments=len(plan.segments),
        workers=tuple(
            DepthRow(
                worker=i,
                depth=depth,
                batch=batch,
                forward=w.forward,
                backward=w.backward,
                activations=w.activations,
                sent=w.sent,
            )
            for i, (depth, batch, w) in enumerate(zip(last.depths, last.batches, last.workers, strict=True))
        ),
    )


def kinds(c: Comparison) -> ComparisonSection:
    off = abs(c.error)
    return ComparisonSection(
        sentence=f"The prediction is {units.percent(off)} {'above' if c.error > 0 else 'below'} what was measured."
        if off >= 0.0005
        else "The prediction and the measurement agree.",
        rows=(("iteration", c.predicted, c.measured), *((kind, p, m) for kind, (p, m) in c.by_kind.items())),
    )


def wires(n: Network) -> NetworkSection:
    how = "measured" if n.measured else "a preset, not measured here"
    first = next(iter(n.collectives))
    fit = n.collectives[first].fit
    return NetworkSection(
        title=f"{n.name}: {units.count(n.ranks, 'rank')}, {how}{', emulated' if n.emulated else ''}",
        sentence=f"Each {first.replace('_', '-')} costs {units.seconds(fit.latency)} to start, however small it is, "
        f"and then moves {units.rate(fit.seconds_per_byte)}: that is why gradients are merged, and why not into one.",
        collectives=tuple(
            CollectiveRow(
                name=name.replace("_", "-"),
                latency=c.fit.latency,
                seconds_per_byte=c.fit.seconds_per_byte,
                error=c.fit.error,
                samples=tuple(
                    SizeRow(bytes=s.bytes, median=s.seconds.median, low=s.seconds.low, high=s.seconds.high)
                    for s in c.samples
                ),
            )
            for name, c in n.collectives.items()
        ),
    )


def scaling(report: ScaleReport) -> ScalingSection:
    workers = sorted({p.workers for p in report.points})
    series = []
    for name in dict.fromkeys(p.policy for p in report.points):
        mine = sorted((p for p in report.points if p.policy == name), key=lambda p: p.workers)
        series.append(
            Series(
                name=name,
                workers=tuple(p.workers for p in mine),
                speedup=tuple(p.speedup for p in mine),
                iteration=tuple(p.iteration for p in mine),
            )
        )
    series.sort(key=lambda s: -s.speedup[-1])
    sentence = "No points: `dovetail scale` had nothing to predict."
    if series:
        best, worst, most = series[0], series[-1], workers[-1]
        sentence = (
            f"Predicted, at a fixed local batch. On {most:,} workers {best.name} is {best.speedup[-1]:,.0f} times as "
            f"fast as one worker, {units.percent(best.speedup[-1] / most)} of the ideal"
        )
        sentence += f"; {worst.name} {worst.speedup[-1]:,.0f} times." if len(series) > 1 else "."
    return ScalingSection(
        title=f"{report.profile} on {report.network}, local batch {report.batch}",
        sentence=sentence,
        series=tuple(series),
    )


def burst_report(report: BurstReport) -> BurstSection:
    chosen = next((p for p in report.plans if p.policy == report.chosen), report.plans[0])
    return BurstSection(
        title=f"{chosen.profile} at a global batch of {chosen.batch} on up to {units.count(chosen.devices, 'device')} "
        f"of {chosen.network}",
        sentences=report.explanation,
        devices=chosen.devices,
        points=tuple(
            TradeOff(
                name=p.name,
                family=_family(p.policy),
                iteration=p.prediction.iteration,
                device_time=p.prediction.device_time,
                amplification=p.prediction.device_time / p.prediction.one_device if p.prediction.one_device else 1.0,
                free=p.free_devices,
                chosen=p is chosen,
            )
            for p in report.plans
        ),
        layers=chosen.layers,
        counts=chosen.counts,
    )


def burst_plan(plan: BurstPlan) -> BurstSection:
    """A single plan has no rivals to trade against; `dovetail plan --burst --json` has."""
    p = plan.prediction
    return BurstSection(
        title=f"{plan.policy}: {plan.profile} at a global batch of {plan.batch} on up to "
        f"{units.count(plan.devices, 'device')} of {plan.network}",
        sentences=(
            f"Predicted: an iteration takes {units.seconds(p.iteration)} and {p.amplification:.2f} times the "
            f"device-time of one device.",
            "For the trade-off against other plans give the page what `dovetail plan --burst --json` prints.",
        ),
        devices=plan.devices,
        points=(
            TradeOff(
                name=plan.policy,
                family=_family(plan.policy),
                iteration=p.iteration,
                device_time=p.device_time,
                amplification=p.amplification,
                free=None,
                chosen=True,
            ),
        ),
        layers=plan.layers,
        counts=plan.counts,
    )


def _family(policy: str) -> Family:
    kind = policy.partition(":")[0]
    return "data-parallel" if kind == "dp" else "burst" if kind in ("fastest", "cheapest") else "other"


def study(report: StudyReport) -> StudySection:
    outcomes = tuple(
        StudyRow(
            policy=c.policy,
            load=c.load,
            makespan=_mean([s.makespan for s in c.samples]),
            mean=_mean([s.groups[0].mean for s in c.samples if s.groups]),
            queueing=_mean([s.groups[0].queueing for s in c.samples if s.groups]),
            busy=_mean([s.busy for s in c.samples]),
        )
        for c in report.cells
        if c.samples
    )
    assumed = f" Not in the trace, assumed: {report.trace.assumed}." if report.trace.assumed else ""
    return StudySection(
        title=f"{report.trace.name}: {units.count(report.trace.jobs, 'job')} on "
        f"{units.count(report.devices, 'device')}",
        sentence=f"Predicted by simulation, nothing ran.{assumed}",
        outcomes=outcomes,
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
