"""Depth plans for people: what each saves, and what each worker does."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from dovetail.core.depth_plan import DepthPlan
from dovetail.simulate.depth import savings as saved_by

from . import units
from .tables import plain_table


def savings(plans: Sequence[DepthPlan], *, chosen: DepthPlan | None = None) -> RenderableType:
    """What each policy saves over the whole training, against full backpropagation of the same global batch."""
    table = plain_table("   partial backpropagation", ">compute", ">traffic", ">activations", ">largest", ">iteration")
    for p in plans:
        s, mark = saved_by(p), chosen is not None and p.policy == chosen.policy
        numbers = (s.compute, s.sent, s.activations, s.peak, s.iteration)
        table.add_row(
            f"{'->' if mark else '  '} {p.policy}",
            *(units.percent(-x, sign=True) for x in numbers),
            style="bold" if mark else "",
        )
    return Group(Text("predicted, against full backpropagation of the same global batch:"), table)


def advice(p: DepthPlan) -> list[str]:
    """What the figures do not say by themselves."""
    s = saved_by(p)
    if s.compute <= 0:
        return []
    equal = p.workers * (1 - s.compute)
    return [
        f"{p.policy} spends the device time of {equal:.1f} workers at full depth: where gradients are noisy, so many "
        "workers may learn more from it; compare both (the guard says so in its log).",
    ]


def depths(p: DepthPlan) -> RenderableType:
    """Segments, and each worker's part in each phase."""
    names = ", ".join(p.layers[s.start] for s in p.segments)
    lines = [
        f"depth plan {p.policy} for {p.profile} on {p.network}: {units.count(p.workers, 'worker')}, "
        f"{units.count(len(p.segments), 'segment')} beginning at {names}",
        f"predicted iteration at full depth {units.seconds(p.full.iteration)}",
    ]
    parts: list[RenderableType] = [*map(Text, lines)]
    for phase in p.phases:
        from_where = f"from {units.percent(phase.begins)} of the training on" if phase.begins else "from the start"
        parts.append(Text(f"{from_where}: iteration {units.seconds(phase.iteration)}"))
        table = plain_table(">worker", ">depth", ">batch", ">forward", ">backward", ">activations", ">sent", ">memory")
        for i, w in enumerate(phase.workers):
            table.add_row(
                str(i),
                f"{phase.depths[i]} of {len(p.segments)}",
                str(phase.batches[i]),
                units.seconds(w.forward),
                units.seconds(w.backward),
                units.size(w.activations),
                units.size(w.sent),
                units.size(w.memory),
            )
        parts.append(table)
    return Group(*parts)
