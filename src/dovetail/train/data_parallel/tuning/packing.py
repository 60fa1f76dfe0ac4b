"""Orders in which gradients are packed into buckets, where that is not simply the order in which they become ready.

A bucket holds gradients of one kind only (a dtype on a device), and torch's own buckets may follow the order in which
parameters are defined. A plan cuts a stream in which every bucket is one run, so such a stream has the gradients in the
order of the buckets. Buckets leave in that order too: a gradient then counts as ready once all before it are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import msgspec

from dovetail import planning
from dovetail.core.network import Network
from dovetail.core.plan import Plan, Prediction, from_cuts
from dovetail.core.profile import Profile

PROBES = 6
"""Sizes of buckets, each twice the one before, at which a communication hook is timed."""
UNKNOWN = Prediction(iteration=0.0, forward=0.0, backward=0.0, exposed=0.0, lower_bound=0.0)


def reordered(profile: Profile, names: Sequence[str]) -> Profile:
    """The same gradients, packed in the order of these names."""
    tensors = {t.name: t for t in profile.tensors}
    ready = accumulate((tensors[n].ready for n in names), max)
    return msgspec.structs.replace(
        profile,
        tensors=tuple(msgspec.structs.replace(tensors[n], ready=r) for n, r in zip(names, ready, strict=True)),
    )


def by_kind(profile: Profile, kinds: Mapping[str, str]) -> Profile:
    """The same gradients with what they share buckets with in place of their dtypes: plans cut where that changes."""
    return msgspec.structs.replace(
        profile, tensors=tuple(msgspec.structs.replace(t, dtype=kinds[t.name]) for t in profile.tensors)
    )


def arranged(profile: Profile, network: Network) -> Profile:
    """The gradients in that order for which a faster plan is predicted: ready order, or gathered by kind."""
    orders = [profile, gathered(profile)]
    return min(orders, key=lambda order: planning.plan(order, network, policy="optimal").prediction.iteration)


def gathered(profile: Profile) -> Profile:
    """All gradients of a kind in a row, at the place of the last of them; those of the largest kind stay in place.

    Where kinds alternate (a norm in 32 bits after every layer in 16), ready order would need a cut at every change.
    """
    size: dict[str, int] = {}
    last: dict[str, int] = {}
    for place, tensor in enumerate(profile.tensors):
        size[tensor.dtype] = size.get(tensor.dtype, 0) + tensor.bytes
        last[tensor.dtype] = place
    largest = max(size, key=lambda kind: size[kind])
    places = [place if t.dtype == largest else last[t.dtype] for place, t in enumerate(profile.tensors)]
    order = sorted(range(len(places)), key=lambda place: places[place])  # a stable sort: ready order within a kind
    return reordered(profile, [profile.tensors[place].name for place in order])


def as_plan(
    buckets: Sequence[Sequence[str]], profile: Profile, network: Network, *, policy: str
) -> tuple[Plan, Profile]:
    """These buckets as a plan with its prediction, and the gradients in their order."""
    packed = reordered(profile, [name for bucket in buckets for name in bucket])
    plan = from_cuts(
        list(accumulate(len(bucket) for bucket in buckets)),
        packed,
        policy=policy,
        network=network.name,
        workers=network.ranks,
        batch=packed.batch,
        prediction=UNKNOWN,
    )
    return planning.predict(plan, packed, network), packed


def members(plan: Plan) -> list[frozenset[str]]:
    """The names in every bucket: plans with the same are the same, however each orders a bucket's gradients."""
    return [frozenset(plan.tensors[b.start : b.stop]) for b in plan.buckets]


def doubling(profile: Profile, workers: int) -> Plan:
    """Buckets in ready order of which each has about twice the bytes of the one before; they only serve to measure."""
    size = profile.parameter_bytes / (2**PROBES - 1)
    cuts, held, tensors = [], 0, profile.tensors
    for end, tensor in enumerate(tensors, 1):
        held += tensor.bytes
        if held >= size or end == len(tensors) or tensors[end].dtype != tensor.dtype:
            cuts.append(end)
            held, size = 0, 2 * size
    return from_cuts(cuts, profile, policy="doubling", network="unknown", workers=workers, batch=1, prediction=UNKNOWN)
