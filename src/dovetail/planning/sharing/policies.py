"""Scheduling policies by name: iteration-level sharing, and the schedulers it competes with.

To add one: `register(SchedulingPolicy(name, …), one line for --help)`, at the end of the list below.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from dovetail.planning.registry import Registry

from .pack import Rules
from .priority import Order

EXCLUSIVE = Rules(duty_cap=float("inf"), max_residents=1, locality="any", guard="off")
"""A gang holds its devices alone. Wherever there is room: the gangs are not charged for locality."""


@dataclass(frozen=True)
class SchedulingPolicy:
    """A scheduler: an order, rules for sharing devices, and what it may do to jobs that run."""

    name: str
    order: Order = "fifo"
    rules: Rules = EXCLUSIVE
    backfill: Literal["none", "any", "easy"] = "any"
    """Who may pass a job that does not fit: nobody, whoever fits, or (gangs) whoever is predicted not to delay it."""
    preempt: bool = False
    """Whether a running job may lose its devices at an iteration boundary to a job that comes before it."""
    quantum: float = 0.0
    """Seconds after which a preemptive policy looks again although no job came or went; 0 for never."""
    thresholds: tuple[float, ...] = ()
    """Device-seconds at which a job falls into the next class (order "queues"); by default from the jobs at hand."""
    suspend: bool = False
    """Whether a preempted job stays in its host's memory: coming back is a move of weights, not a restart."""
    partition: bool = False
    """Devices divided among tenants once and for all, in proportion to their work."""
    repack: bool = False
    """Whether residents may move to freed devices, and elastic jobs change width, when a job has finished."""

    @property
    def shares(self) -> bool:
        return self.rules.max_residents > 1


POLICIES: Registry[SchedulingPolicy] = Registry("policy")


def register(policy: SchedulingPolicy, description: str) -> None:
    """Adds a scheduler; `description` is its line in `--help`."""
    POLICIES.add(policy.name, description, policy)


register(
    SchedulingPolicy("jigsaw", rules=Rules(), repack=True), "tasks of many jobs share devices, iteration by iteration"
)
register(
    SchedulingPolicy("jigsaw-srpt", order="srpt", rules=Rules(), repack=True), "the same, least remaining work first"
)
register(
    SchedulingPolicy("jigsaw-las", order="las", rules=Rules(), repack=True),
    "the same, least attained service first (fair)",
)
register(SchedulingPolicy("jigsaw-cp", order="cp", rules=Rules(), repack=True), "the same, longest critical path first")
register(
    SchedulingPolicy("jigsaw-slo", rules=Rules(duty_cap=1.0, guard="all"), repack=True),
    "the same, duty cap 1.0 and every background task guarded: older jobs are hardly slowed",
)
register(SchedulingPolicy("gang-fifo", backfill="none"), "exclusive devices, strictly first come first served")
register(SchedulingPolicy("gang-fifo-backfill"), "exclusive devices, first come first served, whoever fits may pass")
register(
    SchedulingPolicy("gang-easy-backfill", backfill="easy"),
    "the same, but nobody may delay the first in the queue (EASY)",
)
register(
    SchedulingPolicy("gang-srsf", order="srsf", preempt=True),
    "exclusive devices, least remaining service first, preemptive",
)
register(
    SchedulingPolicy("tiresias-las", order="queues", preempt=True, quantum=60.0),
    "exclusive devices, attained service in classes, preemptive",
)
register(
    SchedulingPolicy("gandiva-timeslice", order="turns", preempt=True, quantum=60.0, suspend=True),
    "exclusive devices in turns of a minute",
)
register(
    SchedulingPolicy("static-partition", partition=True),
    "devices divided among tenants by their work, gang-fifo-backfill in each part",
)


def policy(name: str, *, duty_cap: float | None = None, max_residents: int | None = None) -> SchedulingPolicy:
    """A policy by name, with other limits where sharing is allowed."""
    found = POLICIES.parse(name).value
    if not found.shares:
        return found
    rules = found.rules
    if duty_cap is not None:
        rules = replace(rules, duty_cap=duty_cap)
    if max_residents is not None:
        rules = replace(rules, max_residents=max_residents)
    return replace(found, rules=rules)
