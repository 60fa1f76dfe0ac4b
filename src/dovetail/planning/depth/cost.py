"""What one worker's part of an iteration of partial depth costs: seconds, bytes kept, bytes sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dovetail.core.depth_plan import Segment, WorkerPrediction
from dovetail.core.errors import Error
from dovetail.core.profile import Profile


@dataclass(frozen=True)
class WorkerDevice:
    """What a worker runs on."""

    speed: float = 1.0
    """How many times as fast as the profile's device."""
    memory: int | None = None
    """Bytes; None for no limit."""

    def __post_init__(self) -> None:
        if not 0 < self.speed < float("inf"):
            raise Error(f"WorkerDevice.speed: expected above 0, got {self.speed}")
        if self.memory is not None and self.memory <= 0:
            raise Error(f"WorkerDevice.memory: expected above 0 bytes, got {self.memory}")


@dataclass(frozen=True)
class DepthCosts:
    """Costs of one profile, cut into segments, on given devices. Depth d means the last d segments."""

    profile: Profile
    segments: tuple[Segment, ...]
    devices: tuple[WorkerDevice, ...]
    optimizer_copies: int
    """Bytes of optimiser state over bytes of weights: 2 for Adam, 1 for momentum."""

    @cached_property
    def _home(self) -> list[int]:
        return [s for s, segment in enumerate(self.segments) for _ in range(segment.start, segment.stop)]

    @cached_property
    def segment_bytes(self) -> list[int]:
        """Bytes of the gradients of each segment."""
        found = [0] * len(self.segments)
        for tensor in self.profile.tensors:
            found[self._home[tensor.layer]] += tensor.bytes
        return found

    @cached_property
    def _by_batch(self) -> dict[int, tuple[float, list[float]]]:
        return {}

    def _times(self, batch: int) -> tuple[float, list[float]]:
        """Forward, and backward by depth from 0 on, at the profile's speed.

        Layers share the profile's backward time, so that the whole depth takes exactly that; and no depth ends before
        the last of its gradients is ready.
        """
        if batch not in self._by_batch:
            profile = self.profile
            layers = [layer.backward(batch) for layer in profile.layers]
            stretch = profile.backward_time(batch) / sum(layers) if sum(layers) else 0.0
            ready = profile.ready_times(batch)
            last = [0.0] * len(self.segments)
            for tensor, at in zip(profile.tensors, ready, strict=True):
                last[self._home[tensor.layer]] = max(last[self._home[tensor.layer]], at)
            backward = [0.0]
            total = 0.0
            for s in range(len(self.segments) - 1, -1, -1):
                total += stretch * sum(layers[self.segments[s].start : self.segments[s].stop])
                backward.append(max(total, last[s], backward[-1]))
            backward[-1] = max(profile.backward_time(batch), backward[-2])
            self._by_batch[batch] = profile.forward_time(batch), backward
        return self._by_batch[batch]

    def forward(self, worker: int, batch: int) -> float:
        return self._times(batch)[0] / self.devices[worker].speed

    def backward(self, worker: int, depth: int, batch: int) -> float:
        return self._times(batch)[1][depth] / self.devices[worker].speed

    def seconds(self, worker: int, depth: int, batch: int) -> float:
        return self.forward(worker, batch) + self.backward(worker, depth, batch)

    def activations(self, depth: int, batch: int) -> int:
        """Bytes of the outputs of the layers that backward will visit."""
        first = self.segments[len(self.segments) - depth].start
        return batch * sum(layer.activation_bytes for layer in self.profile.layers[first:])

    def memory(self, depth: int, batch: int) -> int:
        """Bytes: weights, gradients, the optimiser's state, kept outputs, and the widest output before the cut.

        At full depth all of it is kept: then this is what data parallelism needs.
        """
        first = self.segments[len(self.segments) - depth].start
        passing = batch * max((layer.activation_bytes for layer in self.profile.layers[:first]), default=0)
        fixed = self.profile.parameter_bytes * (2 + self.optimizer_copies)
        return fixed + passing + self.activations(depth, batch)

    def deepest(self, worker: int, batch: int) -> int:
        """The depth that the worker's memory holds; 0 where it does not even hold one segment."""
        limit = self.devices[worker].memory
        depths = range(len(self.segments), 0, -1)
        return next((d for d in depths if limit is None or self.memory(d, batch) <= limit), 0)

    def largest(self, worker: int, depth: int, most: int) -> int:
        """The local batch up to `most` that the worker's memory holds at a depth; memory is linear in the batch."""
        limit = self.devices[worker].memory
        if limit is None or self.memory(depth, most) <= limit:
            return most
        fixed = self.memory(depth, 0)
        return max(0, (limit - fixed) * most // max(1, self.memory(depth, most) - fixed))

    def predict(self, depths: Sequence[int], batches: Sequence[int]) -> tuple[WorkerPrediction, ...]:
        sent = traffic(depths, self.segment_bytes)
        return tuple(
            WorkerPrediction(
                forward=self.forward(w, b),
                backward=self.backward(w, d, b),
                activations=self.activations(d, b),
                sent=sent[w],
                memory=self.memory(d, b),
            )
            for w, (d, b) in enumerate(zip(depths, batches, strict=True))
        )


def traffic(depths: Sequence[int], segment_bytes: Sequence[int]) -> list[int]:
    """Bytes that each worker puts on the wire.

    For a segment of n bytes with c of k contributors: every contributor sends (c − 1)/c of it while it is summed up,
    and delivers its c-th part of the sum to k − 1 others. Over all links that is (c + k − 2)n; for c = k it is what an
    all-reduce sends, 2(k − 1)n.
    """
    k, segments = len(depths), len(segment_bytes)
    sent = [0.0] * k
    for s, n in enumerate(segment_bytes):
        contributors = [w for w, d in enumerate(depths) if d >= segments - s]
        for w in contributors:
            sent[w] += (len(contributors) + k - 2) / len(contributors) * n
    return [round(b) for b in sent]
