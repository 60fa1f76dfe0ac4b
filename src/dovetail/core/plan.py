"""Plan: the buckets in which the gradients of a model travel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from .errors import Error
from .files import UPGRADES, Bytes, Count, Index, Name, Noun, Record, Seconds
from .profile import Precision, Profile

MIB = 2**20

Overlap = Literal["backward", "forward"]
"""Behind what communication hides: with "backward" behind the backward pass only; with "forward" every bucket has its
own kind, and what is split hides behind the next forward pass too."""

BucketKind = Literal["whole", "split"]
"""How a bucket travels. "whole": it is all-reduced behind backward, every rank updates all of it, and nothing is left
to gather. "split": it is reduce-scattered behind backward, every rank updates its n-th, and the new parameters are
all-gathered behind the next forward."""


class Bucket(Record, frozen=True, kw_only=True):
    """Gradients that travel together: the tensors [start, stop) of the plan's ready order."""

    start: Index
    stop: Index
    bytes: Bytes
    """Bytes of the gradients in memory, whatever the precision on the wire."""
    kind: BucketKind = "whole"
    precision: Precision = "full"


class Prediction(Record, frozen=True, kw_only=True):
    """What the simulator predicts for one iteration, in seconds."""

    iteration: Seconds
    forward: Seconds
    backward: Seconds
    exposed: Seconds
    """Communication that nothing hides: iteration − forward − backward − optimizer."""
    lower_bound: Seconds
    """No plan of this kind can end an iteration earlier."""
    optimizer: Seconds = 0.0
    """The optimiser on a rank's shards, where that stands between the phases (`overlap="forward"`)."""


class Plan(Noun, frozen=True, kw_only=True):
    """Buckets of gradients for one model on one network: which algorithm made them, from what, and what it predicts."""

    kind: ClassVar[str] = "plan"
    version: ClassVar[int] = 2

    policy: Name
    """The algorithm, by its name in `dovetail plan`."""
    profile: Name
    network: Name
    workers: Count
    batch: Count
    tensors: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1)]
    """Names of the parameters in gradient-ready order."""
    dtypes: tuple[Name, ...]
    """The distinct dtypes among them; torch packs each apart."""
    buckets: Annotated[tuple[Bucket, ...], msgspec.Meta(min_length=1)]
    """In gradient-ready order, in which they are reduced; with `overlap="forward"` gathered in the reverse order."""
    prediction: Prediction
    overlap: Overlap = "backward"

    def check(self) -> None:
        at = 0
        for i, bucket in enumerate(self.buckets):
            if self.overlap == "backward" and (bucket.kind, bucket.precision) != ("whole", "full"):
                raise ValueError(
                    f'buckets[{i}]: expected "whole" in "full" precision where the overlap is "backward", '
                    f'got "{bucket.kind}" in "{bucket.precision}"'
                )
            if bucket.start != at or bucket.stop <= bucket.start:
                raise ValueError(
                    f"buckets[{i}]: expected to start at tensor {at} and hold at least one, "
                    f"got [{bucket.start}, {bucket.stop})"
                )
            at = bucket.stop
        if at != len(self.tensors):
            raise ValueError(f"buckets: expected to cover all {len(self.tensors)} tensors, got {at}")

    @property
    def bytes(self) -> int:
        return sum(b.bytes for b in self.buckets)

    def caps_mib(self) -> list[float]:
        """One cap per bucket, as torch takes them: a bucket closes once it holds at least its cap.

        torch multiplies by 2**20 and truncates to an integer; 2**20 is a power of two, so no byte is lost.
        """
        return [b.bytes / MIB for b in self.buckets]

    def ddp_kwargs(self) -> dict[str, Any]:
        """Keywords that make torch's own DistributedDataParallel follow this plan.

        `DDP(model, **plan.ddp_kwargs())`, Lightning's and Fabric's `DDPStrategy(**plan.ddp_kwargs())`, Ray Train's
        `prepare_model(model, parallel_strategy_kwargs=plan.ddp_kwargs())`. torch orders the tensors by the order in
        which rank 0 saw them ready in the first iteration and applies the caps from the second on.
        """
        if self.overlap != "backward":
            raise Error(
                f"plan for {self.profile!r}: torch's DistributedDataParallel cannot overlap with forward; use "
                "dovetail.DistributedDataParallel(model, plan=plan) and dovetail.optimizer"
            )
        if len(self.dtypes) > 1:
            raise Error(
                f"plan for {self.profile!r}: torch's bucket list starts again for every dtype, so it cannot carry "
                f"a plan for a model with {', '.join(self.dtypes)}; leave the plan out and DDP's default applies"
            )
        return {"bucket_cap_mb_list": self.caps_mib()}

    def apply(self, target: Any) -> None:
        """Makes an `accelerate.Accelerator` or a `transformers.Trainer` follow this plan; call before training."""
        assert _appliers, "`import dovetail` registers how a plan is applied"
        _appliers[-1](self, target)


def _all_split(old: dict[str, Any]) -> dict[str, Any]:
    """Version 1 knew no kinds: all buckets of a plan that overlaps with forward were split."""
    buckets = old.get("buckets")
    if old.get("overlap") != "forward" or not isinstance(buckets, list):
        return old
    return old | {"buckets": [b | {"kind": "split"} if isinstance(b, dict) else b for b in buckets]}


UPGRADES["plan", 1] = _all_split


_appliers: list[Callable[[Plan, Any], None]] = []


def register_applier(apply: Callable[[Plan, Any], None]) -> None:
    """Sets what `Plan.apply` calls. The package's root calls this: core must not import training code."""
    _appliers.append(apply)


def from_cuts(
    cuts: list[int],
    profile: Profile,
    *,
    policy: str,
    network: str,
    workers: int,
    batch: int,
    prediction: Prediction,
    overlap: Overlap = "backward",
    kinds: Sequence[BucketKind] | None = None,
    precisions: Sequence[Precision] | None = None,
) -> Plan:
    """A plan from the end index of every bucket; without `kinds` all are whole, without `precisions` all full."""
    starts = [0, *cuts[:-1]]
    every: list[BucketKind] = list(kinds) if kinds is not None else ["whole"] * len(cuts)
    bits: list[Precision] = list(precisions) if precisions is not None else ["full"] * len(cuts)
    return Plan(
        policy=policy,
        profile=profile.name,
        network=network,
        workers=workers,
        batch=batch,
        tensors=tuple(t.name for t in profile.tensors),
        dtypes=tuple(sorted({t.dtype for t in profile.tensors})),
        buckets=tuple(
            Bucket(start=a, stop=b, bytes=sum(t.bytes for t in profile.tensors[a:b]), kind=kind, precision=precision)
            for a, b, kind, precision in zip(starts, cuts, every, bits, strict=True)
        ),
        prediction=prediction,
        overlap=overlap,
    )
