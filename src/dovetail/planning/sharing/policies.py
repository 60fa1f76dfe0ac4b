"""The policies by name: iteration-level sharing, and the schedulers it competes with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from dovetail.core.errors import Error

from .pack import Rules
from .priority import Order

EXCLUSIVE = Rules(duty_cap=float("inf"), max_residents=1, locality="any", guard="off")
"""A gang holds its devices alone. Wherever there is room: the gangs are not charged for locality."""


@dataclass(frozen=True)
class Policy:
    """A scheduler: an order, rules for sharing devices, and what it may do to jobs that run."""

    name: str
    what: str
    order: Order = "fifo"
    rules: Rules = EXCLUSIVE
    backfill: Literal["none", "any", "easy"] = "any"
    """Who may pass a job that does not fit: nobody, whoever fits, or (gangs) whoever is predicted not to delay it."""
    preempt: bool = False
    """Whether a running job may lose its devices at an iteration boundary to one of better rank."""
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


POLICIES: dict[str, Policy] = {
    p.name: p
    for p in (
        Policy("jigsaw", "tasks of many jobs share devices, iteration by iteration", rules=Rules(), repack=True),
        Policy("jigsaw-srpt", "the same, least remaining work first", order="srpt", rules=Rules(), repack=True),
        Policy("jigsaw-las", "the same, least attained service first (fair)", order="las", rules=Rules(), repack=True),
        Policy("jigsaw-cp", "the same, longest critical path first", order="cp", rules=Rules(), repack=True),
        Policy("jigsaw-slo", "the same, duty cap 1.0 and every filler guarded: older jobs are hardly slowed",
               rules=Rules(duty_cap=1.0, guard="all"), repack=True),
        Policy("gang-fifo", "exclusive devices, strictly first come first served", backfill="none"),
        Policy("gang-fifo-backfill", "exclusive devices, first come first served, whoever fits may pass"),
        Policy("gang-easy-backfill", "the same, but nobody may delay the first in the queue (EASY)", backfill="easy"),
        Policy("gang-srsf", "exclusive devices, least remaining service first, preemptive", order="srsf",
               preempt=True),
        Policy("tiresias-las", "exclusive devices, attained service in classes, preemptive", order="queues",
               preempt=True, quantum=60.0),
        Policy("gandiva-timeslice", "exclusive devices in turns of a minute", order="turns",
               preempt=True, quantum=60.0, suspend=True),
        Policy("static-partition", "devices divided among tenants by their work, gang-fifo-backfill in each part",
               partition=True),
    )
}  # fmt: skip


def policy(name: str, *, duty_cap: float | None = None, max_residents: int | None = None) -> Policy:
    """A policy by name, with other limits where sharing is allowed."""
    if name not in POLICIES:
        raise Error(f"policy {name!r}: expected one of {', '.join(POLICIES)}")
    found = POLICIES[name]
    if not found.shares:
        return found
    rules = found.rules
    if duty_cap is not None:
        rules = replace(rules, duty_cap=duty_cap)
    if max_residents is not None:
        rules = replace(rules, max_residents=max_residents)
    return replace(found, rules=rules)
