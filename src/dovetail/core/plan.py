"""Plan: the buckets in which the gradients of a model travel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from .errors import Error
from .files import Bytes, Count, Index, Name, Noun, Record, Seconds
from .profile import Profile

MIB = 2**20

Overlap = Literal["backward", "forward"]
"""Behind what communication hides: "backward" all-reduces gradients; "forward" reduce-scatters them behind backward and
all-gathers the updated parameters behind the next forward."""


class Bucket(Record, frozen=True, kw_only=True):
    """Gradients that travel together: the tensors [start, stop) of the plan's ready order."""

    start: Index
    stop: Index
    bytes: Bytes


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
                f'dovetail.DistributedDataParallel(model, overlap="forward") and dovetail.optimizer'
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
) -> Plan:
    """A plan from the end index of every bucket."""
    starts = [0, *cuts[:-1]]
    return Plan(
        policy=policy,
        profile=profile.name,
        network=network,
        workers=workers,
        batch=batch,
        tensors=tuple(t.name for t in profile.tensors),
        dtypes=tuple(sorted({t.dtype for t in profile.tensors})),
        buckets=tuple(
            Bucket(start=a, stop=b, bytes=sum(t.bytes for t in profile.tensors[a:b]))
            for a, b in zip(starts, cuts, strict=True)
        ),
        prediction=prediction,
        overlap=overlap,
    )
