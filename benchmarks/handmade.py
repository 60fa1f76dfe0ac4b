"""Plans that were not measured but made by hand, so that what a benchmark trains does not depend on timing."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from dovetail.core.plan import Bucket, BucketKind, Plan, Prediction

NOTHING = Prediction(iteration=0.0, forward=0.0, backward=0.0, exposed=0.0, lower_bound=0.0)


def handmade(model: nn.Module, *, ranks: int, bucket_bytes: int, kind: Callable[[int], BucketKind]) -> Plan:
    """A plan whose buckets close at `bucket_bytes`; the n-th has the kind that `kind(n)` says.

    Gradients are taken to become ready in the reverse order of the parameters, as torch assumes at first.
    """
    named = list(reversed(list(model.named_parameters())))
    sizes = [p.numel() * p.element_size() for _, p in named]
    buckets: list[Bucket] = []
    start, held = 0, 0
    for stop, size in enumerate(sizes, 1):
        held += size
        if held >= bucket_bytes or stop == len(sizes):
            buckets.append(Bucket(start=start, stop=stop, bytes=held, kind=kind(len(buckets))))
            start, held = stop, 0
    return Plan(
        policy="handmade",
        profile=type(model).__name__,
        network="any",
        workers=ranks,
        batch=1,
        tensors=tuple(name for name, _ in named),
        dtypes=tuple(sorted({str(p.dtype).removeprefix("torch.") for _, p in named})),
        buckets=tuple(buckets),
        prediction=NOTHING,
        overlap="forward",
    )


def alternating(first: BucketKind) -> Callable[[int], BucketKind]:
    """Every other bucket of the other kind."""
    second: BucketKind = "split" if first == "whole" else "whole"
    return lambda number: second if number % 2 else first
