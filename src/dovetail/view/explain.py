"""A plan in sentences: what limits the job, what was chosen, what it is worth, and what is still to gain."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.core.network import CollectiveName, Network
from dovetail.core.plan import Plan

from . import units

TIE = 0.01
"""Predictions closer than this are called a tie: measurements do not tell them apart."""


def explain(chosen: Plan, compared: Sequence[Plan], network: Network, *, baseline: str = "ddp") -> list[str]:
    """Sentences about a plan that has been predicted but not run."""
    r = chosen.prediction
    compute = r.forward + r.backward
    lines = [
        f"{chosen.profile} on {units.count(chosen.workers, 'worker')} of {network.name}, local batch {chosen.batch}: "
        f"computing takes {units.seconds(compute)} per iteration"
    ]
    if chosen.workers == 1:
        return [lines[0] + ". One worker communicates with nobody: there is nothing to plan."]
    lines[0] += _communication(chosen, network)
    lines.append(
        f"Chosen: {chosen.policy}{_same(chosen, compared)}, {units.count(len(chosen.buckets), 'bucket')}"
        f"{_kinds(chosen)}: predicted "
        f"{units.seconds(r.iteration)} per iteration, of which {units.seconds(r.exposed)} is communication that "
        f"nothing hides{_idle(chosen, network)}."
    )
    base = next((p for p in sorted(compared, key=lambda p: p.overlap) if p.policy == baseline), None)
    if base is not None and (chosen.policy, chosen.overlap) != (baseline, base.overlap):
        lines.append(_against(chosen, base))
    over = r.iteration / r.lower_bound - 1 if r.lower_bound else 0.0
    lines.append(
        "That is the lower bound: no plan of this kind can be faster."
        if over < 0.0005
        else f"No plan of this kind can take less than {units.seconds(r.lower_bound)}; this one is "
        f"{units.percent(over)} above that."
    )
    lines.append("Predicted from the profile and the network, nothing ran: `dovetail train` tells.")
    if chosen.overlap == "forward":
        lines[-1] = (
            "Predicted from the profile and the network, nothing ran: "
            "dovetail.DistributedDataParallel(model) and dovetail.optimizer(optimizer, model) do it."
        )
    return lines


def _communication(chosen: Plan, network: Network) -> str:
    """What sending everything at once takes."""
    size = units.size(chosen.bytes)
    if chosen.overlap == "backward":
        whole = float(network.cost("all_reduce", ranks=chosen.workers)(chosen.bytes))
        return f", and one all-reduce of all {size} of gradients {units.seconds(whole)}."
    halves = [
        units.seconds(float(network.cost(half, ranks=chosen.workers)(chosen.bytes)))
        for half in ("reduce_scatter", "all_gather")
        if half in network.collectives
    ]
    if len(halves) < 2:
        whole = float(network.cost("all_reduce", ranks=chosen.workers)(chosen.bytes))
        return f", and one all-reduce of all {size} of gradients {units.seconds(whole)}."
    return (
        f", one reduce-scatter of all {size} of gradients {halves[0]}, and one all-gather of the parameters "
        f"{halves[1]}."
    )


def _kinds(chosen: Plan) -> str:
    """How many buckets are whole and how many split, and which share of the bytes is split or in fewer bits."""
    if chosen.overlap == "backward":
        return ""
    split = [b for b in chosen.buckets if b.kind == "split"]
    share = units.percent(sum(b.bytes for b in split) / chosen.bytes) if chosen.bytes else "0 %"
    text = f" ({len(chosen.buckets) - len(split)} whole, {len(split)} split with {share} of the bytes"
    for precision in ("bf16", "int8"):
        if count := sum(b.precision == precision for b in chosen.buckets):
            text += f", {count} in {precision}"
    return f"{text})"


def _idle(chosen: Plan, network: Network) -> str:
    """How long the link has nothing to do in an iteration."""
    if chosen.overlap == "backward":
        return ""
    used = 0.0
    for b in chosen.buckets:
        needed: tuple[CollectiveName, ...] = ("all_reduce",) if b.kind == "whole" else ("reduce_scatter", "all_gather")
        costs = [network.cost(name, ranks=chosen.workers, precision=b.precision) for name in needed]
        used += sum(float(cost(b.bytes)) for cost in costs)
    idle = max(0.0, chosen.prediction.iteration - used)
    share = units.percent(idle / chosen.prediction.iteration) if chosen.prediction.iteration else "0 %"
    return f"; the link is idle for {units.seconds(idle)} ({share})"


def _same(chosen: Plan, compared: Sequence[Plan]) -> str:
    alike = [p for p in compared if p.overlap == chosen.overlap and p.buckets == chosen.buckets]
    twins = [p.policy for p in alike if p.policy != chosen.policy]
    return f" (the same buckets as {' and '.join(twins[:2])})" if twins else ""


def _against(chosen: Plan, base: Plan) -> str:
    ratio = base.prediction.iteration / chosen.prediction.iteration if chosen.prediction.iteration else 1.0
    sentence = f"torch's default ({units.count(len(base.buckets), 'bucket')}) is predicted at "
    sentence += units.seconds(base.prediction.iteration)
    if abs(ratio - 1) < TIE:
        return f"{sentence}: a tie, expect no gain."
    if ratio < 1:
        return f"{sentence}: it is {1 / ratio:.2f} times as fast as this plan, so use it instead."
    return f"{sentence}: this plan is {ratio:.2f} times as fast."
