"""DepthPlan: how deep each worker backpropagates, in which phase of training."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from .files import Bytes, Count, Index, Name, Noun, Record, Seconds


class Segment(Record, frozen=True, kw_only=True):
    """Layers [start, stop) of the profile, in execution order; the unit in which depth is counted."""

    start: Index
    stop: Index


class WorkerPrediction(Record, frozen=True, kw_only=True):
    """One worker's share of one iteration."""

    forward: Seconds
    backward: Seconds
    activations: Bytes
    """Outputs kept for backward."""
    sent: Bytes
    """Gradients and results that it puts on the wire; copies that others relay for it count as its own."""
    memory: Bytes = 0
    """The most that it holds at once: weights, gradients, the optimiser's state and activations."""


class DepthPhase(Record, frozen=True, kw_only=True):
    """A part of training with one assignment of depths."""

    begins: Annotated[float, msgspec.Meta(ge=0, lt=1)]
    """Fraction of the training's iterations after which this phase begins; 0 for the first."""
    depths: Annotated[tuple[Count, ...], msgspec.Meta(min_length=1)]
    """For each worker, how many of the last segments it backpropagates through."""
    batches: Annotated[tuple[Count, ...], msgspec.Meta(min_length=1)]
    """Local batch of each worker."""
    workers: tuple[WorkerPrediction, ...]
    """What the cost model predicts for each worker."""
    iteration: Seconds
    """Predicted time of an iteration, communication included."""


class DepthPlan(Noun, frozen=True, kw_only=True):
    """Segments and depths for the workers of one job."""

    kind: ClassVar[str] = "depth-plan"

    policy: Name
    profile: Name
    network: Name
    layers: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1)]
    """Names of the profile's layers, in execution order."""
    segments: Annotated[tuple[Segment, ...], msgspec.Meta(min_length=1)]
    phases: Annotated[tuple[DepthPhase, ...], msgspec.Meta(min_length=1)]
    full: DepthPhase
    """Full backpropagation with the same global batch, equally shared: the reference for all savings."""

    def check(self) -> None:
        at = 0
        for i, segment in enumerate(self.segments):
            if segment.start != at or segment.stop <= segment.start:
                raise ValueError(
                    f"segments[{i}]: expected to start at layer {at} and hold at least one, "
                    f"got [{segment.start}, {segment.stop})"
                )
            at = segment.stop
        if at != len(self.layers):
            raise ValueError(f"segments: expected to cover all {len(self.layers)} layers, got {at}")
        begins = [p.begins for p in self.phases]
        if begins[0] != 0 or begins != sorted(set(begins)):
            raise ValueError(f"phases: expected to begin at 0 and in ascending order, got {begins}")
        for name, phase in [*((f"phases[{i}]", p) for i, p in enumerate(self.phases)), ("full", self.full)]:
            self._check_phase(name, phase)

    def _check_phase(self, name: str, phase: DepthPhase) -> None:
        k = self.workers
        for field in ("depths", "batches", "workers"):
            if len(getattr(phase, field)) != k:
                raise ValueError(f"{name}.{field}: expected one for each of {k} workers")
        if max(phase.depths) > len(self.segments):
            raise ValueError(f"{name}.depths: expected at most {len(self.segments)}, got {max(phase.depths)}")
        if max(phase.depths) < len(self.segments):
            raise ValueError(f"{name}.depths: expected some worker to reach the first segment: nobody would train it")

    @property
    def workers(self) -> int:
        return len(self.full.depths)

    def contributors(self, phase: int, segment: int) -> tuple[int, ...]:
        """Workers that backpropagate through a segment (counted from the input)."""
        needed = len(self.segments) - segment
        return tuple(i for i, d in enumerate(self.phases[phase].depths) if d >= needed)
