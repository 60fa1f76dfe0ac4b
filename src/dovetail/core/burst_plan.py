"""BurstPlan: how many devices each layer gets, for a global batch that stays fixed."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from .files import Bytes, Count, Name, Noun, Record, Seconds


class BurstPrediction(Record, frozen=True, kw_only=True):
    """What the cost model predicts for one iteration."""

    iteration: Seconds
    device_time: Seconds
    """Device-seconds the job occupies: over all layers, devices × (computation + gradients + re-sharding)."""
    one_device: Seconds
    """Computation of the whole global batch on one device."""
    memory: Bytes
    """Memory of the rank that needs most."""

    @property
    def amplification(self) -> float:
        """Device-time over what one device would need; 1 wastes nothing."""
        return self.device_time / self.one_device if self.one_device else 1.0


class BurstPlan(Noun, frozen=True, kw_only=True):
    """Devices per layer: layer i of the profile runs on ranks 0 .. counts[i] − 1, the others are free meanwhile."""

    kind: ClassVar[str] = "burst-plan"

    policy: Name
    profile: Name
    network: Name
    devices: Count
    """The most that the job may use."""
    batch: Count
    """Global batch: the sum over the ranks of any one layer."""
    layers: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1)]
    """Names of the profile's layers, in execution order."""
    counts: Annotated[tuple[Count, ...], msgspec.Meta(min_length=1)]
    prediction: BurstPrediction

    def check(self) -> None:
        if len(self.counts) != len(self.layers):
            raise ValueError(f"counts: expected one for each of {len(self.layers)} layers, got {len(self.counts)}")
        for i, count in enumerate(self.counts):
            if count > self.devices:
                raise ValueError(f"counts[{i}]: expected at most {self.devices} devices, got {count}")

    def stages(self) -> list[tuple[int, int, int]]:
        """Maximal runs of layers with one device count, as (first layer, one past the last, devices)."""
        runs: list[tuple[int, int, int]] = []
        for i, count in enumerate(self.counts):
            if runs and runs[-1][2] == count:
                runs[-1] = (runs[-1][0], i + 1, count)
            else:
                runs.append((i, i + 1, count))
        return runs
