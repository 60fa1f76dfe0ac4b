"""What `explain()` says: what was measured, what was tried, what was kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from dovetail.core.network import Network
from dovetail.core.plan import Plan

State = Literal["measuring", "trying", "done", "off"]


@dataclass(frozen=True)
class Trial:
    """A bucketing that ran for some real steps; seconds per step, from the start of forward to reduced gradients."""

    plan: Plan
    baseline: bool
    median: float
    low: float
    high: float
    steps: int
    dropped: bool = False
    """Left out of the second round, having been clearly slower in the first."""

    @property
    def label(self) -> str:
        own = "torch's own buckets" if self.plan.overlap == "backward" else "buckets of torch's sizes"
        return own if self.baseline else f"plan {self.plan.policy}"


@dataclass(frozen=True)
class Report:
    """How the module came to the buckets it has."""

    state: State
    overlap: Literal["backward", "forward"] = "backward"
    """What communication hides behind; with "forward" it is the backward and the next forward pass."""
    reason: str = ""
    """Why planning is off."""
    steps: int = 0
    """Steps seen so far."""
    workers: int = 0
    tensors: int = 0
    bytes: int = 0
    forward: float = 0.0
    backward: float = 0.0
    network: Network | None = None
    trials: tuple[Trial, ...] = ()
    kept: Trial | None = None
    plan: Plan | None = None
    """The plan in force; None for torch's own buckets."""
    notes: tuple[str, ...] = field(default=())

    @property
    def gain(self) -> float:
        """How much less time a step takes with what was kept than with torch's own buckets: 0.1 is 10 %."""
        baseline = next((t for t in self.trials if t.baseline), None)
        if self.kept is None or baseline is None:
            return 0.0
        return 1 - self.kept.median / baseline.median

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(r: Report) -> list[str]:
    if r.state == "off":
        if r.overlap == "forward":
            return [f"dovetail: reduce-scatter behind backward, all-gather behind forward; {r.reason}", *r.notes]
        what = f"a given plan ({r.plan.policy}, {len(r.plan.buckets)} buckets)" if r.plan else "torch's own buckets"
        return [f"dovetail: {what}; {r.reason}", *r.notes]
    lines = [f"dovetail: {r.workers} workers, {r.tensors} tensors, {_size(r.bytes)} of gradients a step"]
    if r.forward:
        lines.append(f"  measured  forward {_ms(r.forward)}, backward {_ms(r.backward)}")
    for collective, measured in r.network.collectives.items() if r.network is not None else ():
        fit, name = measured.fit, collective.replace("_", "-")
        rate = 1 / fit.seconds_per_byte / 1e6 if fit.seconds_per_byte else float("inf")
        lines.append(
            f"  network   {name}: {_ms(fit.latency)} to start, then {rate:.0f} MB/s (fit within {fit.error:.0%})"
        )
    for trial in r.trials:
        lines.append(
            f"  {'kept ' if trial is r.kept else 'tried'}     {trial.label}: {len(trial.plan.buckets)} buckets, "
            f"{_ms(trial.median)} a step ({_ms(trial.low)} to {_ms(trial.high)}), "
            f"predicted {_ms(trial.plan.prediction.iteration)}{', dropped early' if trial.dropped else ''}"
        )
    if r.state == "done" and r.kept is not None:
        if r.kept.baseline:
            lines.append(f"  result    no plan was faster than {r.kept.label}, so those stay: a tie, not a gain")
        else:
            lines.append(f"  result    {r.gain:.1%} less time a step than {r.trials[0].label}")
    elif r.state in ("measuring", "trying"):
        lines.append(f"  now       {r.state}, after {r.steps} steps; ask again later")
    return [*lines, *(f"  note      {n}" for n in r.notes)]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.1f} KiB"
