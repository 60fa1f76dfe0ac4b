"""What `dovetail plan --auto` says: what was chosen, what each part contributed, what was not chosen and why."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from dovetail.core.burst_plan import BurstPlan
from dovetail.core.depth_plan import DepthPlan
from dovetail.planning.auto.options import PARTIAL, TECHNIQUES
from dovetail.planning.auto.search import AutoPlan, Candidate, Score, throughput

from . import units
from .tables import plain_table

TIE = 0.01
"""Gains below this share are called none: torch's own is then the better choice."""
NAMES = {
    "ddp": "torch's DDP",
    "merging": "planned merging",
    "overlap": "overlap with forward",
    "ladder": "partial depth, ladder",
    "balanced": "partial depth, balanced batches",
    "guard": "partial depth, the guard's start",
    "burst": "burst: devices by layer",
    "partial": "partial depth",
}


def table(found: AutoPlan) -> RenderableType:
    """The ablation: from torch's DDP to the plan, a part at a time."""
    background = found.question.objective == "throughput"
    columns = ["   part", ">devices", ">iteration", ">device-time"]
    made = plain_table(*columns, *([">useful"] if background else []), ">against the last")
    before: Candidate | None = None
    for step in found.steps:
        mark, s = step is found.chosen, step.score
        row = [f"{'->' if mark else '  '} {_part(found, step, before)}", f"{step.devices:,}"]
        row += [units.seconds(s.iteration), units.seconds(s.device_time)]
        row += [f"{throughput(found.question, s):.2f}"] if background else []
        made.add_row(*row, _change(found, s, before), style="bold" if mark else "")
        before = step
    note = "useful: devices' worth of work, foreground and background" if background else ""
    return Group(made, *([Text(note, style="dim")] if note else []))


def _part(found: AutoPlan, step: Candidate, before: Candidate | None) -> str:
    if before is None:
        return NAMES["ddp"] if found.search.fits else f"{NAMES['ddp']}, does not fit"
    if step.technique == "ddp":
        return "+ fewer devices"
    return f"+ {NAMES[step.technique]}"


def _change(found: AutoPlan, score: Score, before: Candidate | None) -> str:
    if before is None:
        return ""
    now, then = _value(found, score), _value(found, before.score)
    return units.percent(now / then - 1, sign=True) if then else ""


def _value(found: AutoPlan, score: Score) -> float:
    """Value of the objective."""
    if found.question.objective == "time":
        return score.iteration
    return score.device_time if found.question.objective == "device-time" else throughput(found.question, score)


def rejected(found: AutoPlan) -> RenderableType:
    """Every technique that was not chosen: the best that was seen of it, or why nothing was."""
    made = plain_table("not chosen", ">devices", ">iteration", "why")
    for technique in TECHNIQUES:
        rivals = [c for c in found.scored if c.technique == technique and c is not found.chosen]
        drops = [d for d in found.dropped if d.combination.technique == technique]
        if rivals:
            best = min(rivals, key=lambda c: (not _reached(found, c), _worse(found, c)))
            made.add_row(NAMES[technique], f"{best.devices:,}", units.seconds(best.score.iteration), _why(found, best))
        elif drops:
            least = min(d.combination.bound for d in drops)
            numbers = sorted({d.combination.devices for d in drops})
            devices = f"{numbers[0]:,}" if len(numbers) == 1 else f"{numbers[0]:,}-{numbers[-1]:,}"
            slow = all(d.reason == "slow" for d in drops)
            why = "cannot be as fast as wanted" if slow else "no plan of it can be better"
            if any(d.reason == "none" for d in drops):
                why = "found none that is better"
            made.add_row(NAMES[technique], devices, f">= {units.seconds(least)}", why)
    return made


def excluded(found: AutoPlan) -> list[str]:
    """What could not be considered at all, and what would change that."""
    lines = []
    for technique in dict.fromkeys(e.technique for e in found.excluded):
        why = [e.reason for e in found.excluded if e.technique == technique]
        more = f" (and {len(why) - 1} more like that)" if len(why) > 1 else ""
        lines.append(f"Not considered: {NAMES.get(technique, technique)}: {why[0]}{more}.")
    return lines


def _reached(found: AutoPlan, c: Candidate) -> bool:
    return c.score.iteration <= found.within * (1 + 1e-9)


def _worse(found: AutoPlan, c: Candidate) -> float:
    """How much worse than the chosen, as a share of it."""
    mine, best = _value(found, c.score), _value(found, found.chosen.score)
    if not best:
        return 0.0
    return mine / best - 1 if found.question.objective != "throughput" else 1 - mine / best


def _why(found: AutoPlan, c: Candidate) -> str:
    if not _reached(found, c):
        return "slower than wanted"
    share = _worse(found, c)
    if share < 1e-6:
        return "as good, not as simple" if c.technique != found.chosen.technique else "as good"
    what = {"time": "slower", "device-time": "more device-time", "throughput": "less useful work"}
    return f"{units.percent(share)} {what[found.question.objective]}"


def sentences(found: AutoPlan) -> list[str]:
    """What was asked, what was chosen, how good that is, and how sure."""
    q, chosen, base = found.question, found.chosen, found.baseline
    lines = [
        f"{q.profile.name} at a global batch of {q.batch:,} on up to {units.count(q.devices, 'device')} of "
        f"{q.network.name}: one device computes for {units.seconds(q.one_device)} per iteration."
    ]
    if math.isfinite(found.within):
        lines.append(f"Wanted: {_wanted(found)}, with iterations of at most {units.seconds(found.within)}.")
    lines.append(
        f"Chosen: {NAMES[chosen.technique]} on {units.count(chosen.devices, 'device')}{_local(chosen)}: predicted "
        f"{units.seconds(chosen.score.iteration)} per iteration and {units.seconds(chosen.score.device_time)} of "
        f"device-time. {_against(found, chosen, base)}"
    )
    lines.append(_sure(found))
    lines += _doubts(found)
    if q.optimizer:
        lines.append(
            f"The optimiser counts for overlap only ({units.seconds(q.optimizer)} for a rank's share, between the "
            f"phases). For all others its time on all parameters comes on top of these figures."
        )
    if chosen.technique in PARTIAL:
        lines.append("Partial depth changes the statistics of the gradients: compare what it learns (docs/partial.md).")
    lines.append("Predicted from the profile and the network; nothing ran.")
    return lines


def _wanted(found: AutoPlan) -> str:
    return {
        "time": "the shortest iteration",
        "device-time": "the least device-time",
        "throughput": f"the most useful work, with background tasks of {units.seconds(found.question.task)}",
    }[found.question.objective]


def _local(c: Candidate) -> str:
    if isinstance(c.plan, DepthPlan):
        batches = sorted(set(c.plan.phases[-1].batches))
        return f", local batch {batches[0]}" + (f" to {batches[-1]}" if len(batches) > 1 else "")
    if not isinstance(c.plan, BurstPlan):
        return f", local batch {c.plan.batch}"
    if len(set(c.plan.counts)) > 1:
        return ""
    # The batch is not shared evenly here: otherwise it would be data parallelism.
    return f", the same for every layer, local batch up to {-(-c.plan.batch // c.devices)}"


def _against(found: AutoPlan, chosen: Candidate, base: Candidate) -> str:
    sentence = f"torch's DDP on {units.count(base.devices, 'device')} is predicted at "
    sentence += f"{units.seconds(base.score.iteration)} and {units.seconds(base.score.device_time)}"
    sentence += "" if found.search.fits else ", and its memory is not enough"
    if chosen is base:
        return "That is torch's own: nothing to change."
    now, then = _value(found, chosen.score), _value(found, base.score)
    better = then / now - 1 if found.question.objective != "throughput" and now else now / (then or 1.0) - 1
    if better < TIE:
        return f"{sentence}: a tie, expect no gain from anything else."
    word = {"time": "as fast", "device-time": "as cheap", "throughput": "as much useful work"}
    return f"{sentence}: this is {1 + better:.2f} times {word[found.question.objective]}."


def _sure(found: AutoPlan) -> str:
    planned, none = len(found.scored), sum(d.reason == "none" for d in found.dropped)
    sentence = f"{units.count(found.considered, 'combination')}: {planned} planned and simulated, "
    sentence += f"{len(found.dropped) - none} dropped by lower bounds"
    sentence += f", {none} without a better plan. " if none else ". "
    if found.gap < 1e-6:
        sentence += "None of them can be better."
        seen = {c.technique for c in found.search.combinations}
        missing = [name for name in ("merging", "overlap", "burst") if name not in seen and found.question.devices > 1]
        names = ", ".join(NAMES[name].partition(":")[0] for name in missing)
        return sentence + (f" Not among them: {names}." if missing else "")
    return sentence + (
        f"Burst plans whose gradients hide behind backward are not searched exactly: by their bound one might be up to "
        f"{units.percent(found.gap)} better."
    )


def _doubts(found: AutoPlan) -> list[str]:
    """A warning if the plan rests on local batches that were not measured."""
    measured = sorted({t.batch for layer in found.question.profile.layers for t in layer.times})
    plan = found.chosen.plan
    if isinstance(plan, BurstPlan):
        needed = sorted({-(-plan.batch // g) for g in plan.counts})
    elif isinstance(plan, DepthPlan):
        needed = sorted(set(plan.phases[-1].batches))
    else:
        needed = [plan.batch]
    if needed[0] >= measured[0] and needed[-1] <= measured[-1]:
        return []
    have = f"{measured[0]}" if len(measured) == 1 else f"{measured[0]} to {measured[-1]}"
    want = ",".join(str(b) for b in (needed if len(needed) < 6 else [needed[0], needed[-1]]))
    return [
        f"Layer times at local batches beyond the measured ones ({have}) are extrapolated: "
        f"`dovetail profile --batches {want}` measures what this plan needs."
    ]


def recipe(found: AutoPlan, path: Path, *, profile: str, network: str) -> list[str]:
    """The lines of Python that execute the plan, in a script that runs once on each device."""
    technique, named = found.chosen.technique, _quoted(str(path))
    if technique == "ddp":
        return ["model = torch.nn.parallel.DistributedDataParallel(model)"]
    if technique == "merging":
        return [
            f"plan = dovetail.read({named}, dovetail.Plan)",
            "model = dovetail.DistributedDataParallel(model, plan=plan)",
        ]
    if technique == "overlap":
        return [
            f"plan = dovetail.read({named}, dovetail.Plan)",
            'model = dovetail.DistributedDataParallel(model, overlap="forward", plan=plan)',
            "optimizer = dovetail.optimizer(optimizer, model)",
        ]
    if technique == "burst":
        return [
            "from dovetail.core.burst_plan import BurstPlan",
            f"plan = dovetail.read({named}, BurstPlan)",
            "burst = dovetail.Burst(layers, plan, loss=loss_of_each_sample)",
        ]
    if technique == "guard":
        return ['model = dovetail.PartialBackprop(model, "guard")']
    stored = Path(network).exists()
    costs = f"dovetail.read({_quoted(network)}, dovetail.Network)" if stored else f"preset({_quoted(network)})"
    return [
        *([] if stored else ["from dovetail.measure.presets import preset"]),
        f"plan = dovetail.read({named}, dovetail.DepthPlan)",
        f"profile = dovetail.read({_quoted(profile)}, dovetail.Profile)",
        f"network = {costs}",
        "model = dovetail.PartialBackprop(model, plan, guard=None, profile=profile, network=network)",
        "loader = DataLoader(data, batch_sampler=model.batches(data))",
    ]


def _finite(number: float) -> float | None:
    """JSON has no infinity."""
    return number if math.isfinite(number) else None


def _quoted(text: str) -> str:
    """The text as a Python string in double quotes, as in the code around it."""
    return json.dumps(text, ensure_ascii=False)


def as_data(found: AutoPlan) -> dict[str, Any]:
    """The result as JSON has it (`--json`)."""
    q = found.question
    return {
        "objective": q.objective,
        "devices": q.devices,
        "batch": q.batch,
        "within": _finite(found.within),
        "value": _finite(found.value),
        "bound": _finite(found.bound),
        "gap": _finite(found.gap),
        "considered": found.considered,
        "dropped": len(found.dropped),
        "chosen": _candidate(found, found.chosen),
        "baseline": _candidate(found, found.baseline),
        "baseline_fits": found.search.fits,
        "steps": [_candidate(found, c) for c in found.steps],
        "scored": [_candidate(found, c) for c in found.scored],
        "not_considered": [{"technique": e.technique, "why": e.reason} for e in found.excluded],
    }


def _candidate(found: AutoPlan, c: Candidate) -> dict[str, Any]:
    return {
        "technique": c.technique,
        "devices": c.devices,
        "iteration": c.score.iteration,
        "device_time": c.score.device_time,
        "useful_devices": throughput(found.question, c.score),
        "bound": c.combination.bound,
    }
