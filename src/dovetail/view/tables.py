"""Tables for people: they fit in 80 columns and read the same without colour."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dovetail.core.network import Collective, CostSample, Network
from dovetail.core.plan import Bucket, Plan
from dovetail.core.profile import Layer, Profile
from dovetail.core.timeline import Comparison, Timeline

if TYPE_CHECKING:
    from dovetail.simulate.scale import ScalePoint

from . import units

TOP_LAYERS = 12
MAX_ROWS = 16
SCALE_COLUMNS = 6
"""Numbers of workers beside each other; more start a second table, so that 80 columns do."""


def profile(p: Profile, *, top: int = TOP_LAYERS) -> RenderableType:
    """What a job is made of: totals, the layers that take most of the time, and the local batches measured."""
    forward, backward = p.forward_time(), p.backward_time()
    lines = [
        f"profile {p.name}: {units.count(len(p.layers), 'layer')}, {units.count(len(p.tensors), 'tensor')}, "
        f"{units.size(p.parameter_bytes)} of gradients",
        f"{_origin(p.emulated)} on {p.device}; at a local batch of {p.batch}: forward {units.seconds(forward)}, "
        f"backward {units.seconds(backward)}",
    ]
    table = plain_table("layer", "type", ">forward", ">backward", ">share", ">parameters")
    total = sum(_time(layer, p.batch) for layer in p.layers) or 1.0
    shown, rest = list(p.layers), list[Layer]()
    if len(shown) > top + 4:  # hiding three rows behind a line that says so gains nothing
        shown.sort(key=lambda layer: -_time(layer, p.batch))
        shown, rest = shown[:top], shown[top:]
    for layer in shown:
        table.add_row(layer.name, layer.type, *_layer_cells([layer], p.batch, total))
    if rest:
        table.add_row(f"({len(rest):,} more layers)", "", *_layer_cells(rest, p.batch, total), style="dim")
    table.add_section()
    table.add_row("all layers", "", *_layer_cells(p.layers, p.batch, total), style="bold")
    batches = sorted({t.batch for layer in p.layers for t in layer.times})
    parts: list[RenderableType] = [*map(Text, lines), table]
    if len(batches) > 1:
        times = plain_table(">local batch", ">forward", ">backward", ">per sample")
        for batch in batches:
            f, b = p.forward_time(batch), p.backward_time(batch)
            times.add_row(str(batch), units.seconds(f), units.seconds(b), units.seconds((f + b) / batch))
        parts += [Text(), times]
    return Group(*parts)


def network(n: Network) -> RenderableType:
    """What each collective costs: the measured sizes with their spread, and the affine law with its error."""
    how = "measured" if n.measured else "a preset, not measured here"
    parts: list[RenderableType] = [
        Text(f"network {n.name}: {units.count(n.ranks, 'rank')}, {how}{', emulated' if n.emulated else ''}"),
    ]
    if n.source:
        parts.append(Text(f"source: {n.source}", style="dim"))
    for name, collective in n.collectives.items():
        parts += [*([Text()] if collective.samples else []), *_collective(name, collective)]
    return Group(*parts)


def _collective(name: str, c: Collective) -> list[RenderableType]:
    law = f"{name}: {units.seconds(c.fit.latency)} + bytes / {units.rate(c.fit.seconds_per_byte)}"
    if not c.samples:
        return [Text(law)]
    table = plain_table(">bytes", ">median", ">10 %", ">90 %", ">law", ">law's error")
    for s in _spread(c.samples, MAX_ROWS):
        fitted = c.fit.latency + c.fit.seconds_per_byte * s.bytes
        error = fitted / s.seconds.median - 1 if s.seconds.median else 0.0
        quantiles = (units.seconds(q) for q in (s.seconds.median, s.seconds.low, s.seconds.high))
        table.add_row(units.size(s.bytes), *quantiles, units.seconds(fitted), units.percent(error, sign=True))
    shown = f" ({MAX_ROWS} of {len(c.samples)} sizes shown)" if len(c.samples) > MAX_ROWS else ""
    return [Text(f"{law}, median error {units.percent(c.fit.error)}{shown}"), table]


def plans(compared: Sequence[Plan], *, chosen: Plan | None = None, baseline: str = "ddp") -> RenderableType:
    """Every policy's prediction, best first; the chosen one is marked."""
    # Of two plans of that name torch's own is the one that overlaps with backward only.
    base = next((p for p in sorted(compared, key=lambda p: p.overlap) if p.policy == baseline), None)
    mixed = len({p.overlap for p in compared}) > 1
    kinds = any(p.overlap == "forward" for p in compared)
    columns = ["   policy", ">whole+split" if kinds else ">buckets", ">iteration", ">exposed", ">above bound"]
    table = plain_table(*columns, *([f">against {baseline}"] if base else []))
    for p in by_promise(compared):
        r, mark = p.prediction, chosen is not None and (p.policy, p.overlap) == (chosen.policy, chosen.overlap)
        name = f"{p.policy} (all-reduce)" if mixed and p.overlap == "backward" else p.policy
        whole, split = (f"{sum(b.kind == kind for b in p.buckets):,}" for kind in ("whole", "split"))
        row = [f"{'->' if mark else '  '} {name}", f"{whole}+{split}" if kinds else f"{len(p.buckets):,}"]
        row += [units.seconds(r.iteration), units.seconds(r.exposed), above(r.iteration, r.lower_bound)]
        if base:
            row.append(above(r.iteration, base.prediction.iteration))
        table.add_row(*row, style="bold" if mark else "")
    return table


def by_promise(compared: Sequence[Plan]) -> list[Plan]:
    """Plans by predicted iteration; among those within a thousandth of each other, fewer buckets first."""
    best = min((p.prediction.iteration for p in compared), default=0.0) or 1.0
    return sorted(compared, key=lambda p: (round(p.prediction.iteration / best, 3), len(p.buckets), p.policy))


def buckets(p: Plan) -> RenderableType:
    """A plan's buckets in the order in which they are sent."""
    r = p.prediction
    updating = f"optimizer {units.seconds(r.optimizer)}, " if r.optimizer else ""
    how = ", overlapping forward too" if p.overlap == "forward" else ""
    lines = [
        f"plan {p.policy}{how} for {p.profile} on {p.network}: {units.count(p.workers, 'worker')}, "
        f"local batch {p.batch}, "
        f"{units.count(len(p.buckets), 'bucket')}, {units.size(p.bytes)}",
        f"predicted iteration {units.seconds(r.iteration)}: forward {units.seconds(r.forward)}, "
        f"backward {units.seconds(r.backward)}, {updating}exposed communication {units.seconds(r.exposed)}",
    ]
    forward = p.overlap == "forward"
    table = plain_table(">bucket", *(["kind"] if forward else []), ">size", ">tensors", "first ready", "last ready")
    for i, b in list(enumerate(p.buckets))[:MAX_ROWS]:
        kind = [bucket_kind(b)] if forward else []
        ends = p.tensors[b.start], p.tensors[b.stop - 1]
        table.add_row(str(i), *kind, units.size(b.bytes), str(b.stop - b.start), *ends)
    parts: list[RenderableType] = [*map(Text, lines), table]
    if len(p.buckets) > MAX_ROWS:
        parts.append(Text(f"… and {units.count(len(p.buckets) - MAX_ROWS, 'more bucket')}", style="dim"))
    return Group(*parts)


def bucket_kind(bucket: Bucket) -> str:
    """How a bucket travels: "split", or "split, int8" where fewer bits do."""
    return bucket.kind if bucket.precision == "full" else f"{bucket.kind}, {bucket.precision}"


def hidden(timeline: Timeline) -> RenderableType:
    """Every communication in order of time: what of it nothing hides, and behind which layers the rest goes on."""
    from dovetail.simulate.iteration import hidden as found
    from dovetail.simulate.iteration import link_idle

    idle = link_idle(timeline)
    share = f" ({units.percent(idle / timeline.duration)})" if timeline.duration else ""
    last = Text(f"the link is idle for {units.seconds(idle)} of {units.seconds(timeline.duration)}{share}")
    table = plain_table("communication", ">size", ">takes", ">exposed", "behind")
    rows = found(timeline)
    for h in rows[:MAX_ROWS]:
        ends = [f"{s.kind} of {s.name}" if s.kind != "optimizer" else s.name for s in (h.behind[:1] + h.behind[-1:])]
        behind = " … ".join(dict.fromkeys(ends))
        sizes = units.size(h.span.bytes), units.seconds(h.span.duration), units.seconds(h.exposed)
        table.add_row(h.span.name, *sizes, behind)
    more = [Text(f"… and {units.count(len(rows) - MAX_ROWS, 'more')}", style="dim")] if len(rows) > MAX_ROWS else []
    return Group(table, *more, last)


def comparison(c: Comparison) -> RenderableType:
    """A prediction beside what happened."""
    table = plain_table("", ">predicted", ">measured", ">error")
    table.add_row(
        "iteration",
        units.seconds(c.predicted),
        units.seconds(c.measured),
        units.percent(c.error, sign=True),
        style="bold",
    )
    for kind, (predicted, measured) in c.by_kind.items():
        error = units.percent(predicted / measured - 1, sign=True) if measured else ""
        table.add_row(kind, units.seconds(predicted), units.seconds(measured), error)
    return table


def scale(points: Sequence[ScalePoint]) -> RenderableType:
    """Speed-up over one worker: a row per policy, a column per number of workers; the best of each column is bold."""
    workers = sorted({p.workers for p in points})
    at = {(p.policy, p.workers): p.speedup for p in points}
    policies = list(dict.fromkeys(p.policy for p in points))
    policies.sort(key=lambda name: -at.get((name, workers[-1]), 0.0))
    best = {w: max(at.get((name, w), 0.0) for name in policies) for w in workers}
    parts: list[RenderableType] = []
    for columns in (workers[i : i + SCALE_COLUMNS] for i in range(0, len(workers), SCALE_COLUMNS)):
        if parts:
            parts.append(Text())
        table = plain_table("workers", *(f">{w:,}" for w in columns))
        for name in policies:
            cells = [at.get((name, w)) for w in columns]
            texts = ["" if c is None else f"{c:,.1f}" if c < 999.95 else f"{c:,.0f}" for c in cells]
            bold = ["bold" if c == best[w] else "" for c, w in zip(cells, columns, strict=True)]
            table.add_row(name, *(Text(t, style=b) for t, b in zip(texts, bold, strict=True)))
        parts.append(table)
    return Group(*parts)


def above(value: float, reference: float) -> str:
    """How far a time is from a reference: "+4.2 %"; nothing where the reference is zero."""
    return units.percent(value / reference - 1, sign=True) if reference else ""


def plain_table(*columns: str) -> Table:
    """Columns whose name starts with ">" are right-aligned."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", show_edge=False)
    for name in columns:
        right = name.startswith(">")
        # Everything may wrap, the widest column first: where only names did, a narrow terminal left nothing of them.
        table.add_column(name.removeprefix(">"), justify="right" if right else "left", overflow="fold")
    return table


def _origin(emulated: bool) -> str:
    return "emulated" if emulated else "measured"


def _time(layer: Layer, batch: int) -> float:
    return layer.forward(batch) + layer.backward(batch)


def _layer_cells(layers: Sequence[Layer], batch: int, total: float) -> list[str]:
    forward = sum(layer.forward(batch) for layer in layers)
    backward = sum(layer.backward(batch) for layer in layers)
    share = units.percent((forward + backward) / total)
    return [units.seconds(forward), units.seconds(backward), share, units.size(sum(x.parameter_bytes for x in layers))]


def _spread(samples: Sequence[CostSample], most: int) -> list[CostSample]:
    """At most `most` samples, evenly spaced, the first and the last among them."""
    if len(samples) <= most:
        return list(samples)
    return [samples[round(i * (len(samples) - 1) / (most - 1))] for i in range(most)]
