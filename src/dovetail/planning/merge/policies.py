"""Policies by name. A policy is a function of the stream and the cost of one all-reduce that returns the cuts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dovetail.core.errors import Error
from dovetail.core.network import AffineCost, Cost
from dovetail.core.plan import MIB

from . import exact, rules
from .robust import robust
from .stream import Stream, objective

Choose = Callable[[Stream, Cost], list[int]]


@dataclass(frozen=True)
class Policy:
    """A way of cutting the stream."""

    name: str
    """As people write it: "ddp", "threshold:10"."""
    description: str
    """One line for `--help`."""
    choose: Choose


_FIXED: dict[str, Policy] = {}
_FAMILIES: dict[str, tuple[str, str, Callable[[str], Choose]]] = {}
"""name → (what stands after the colon, description, function that reads it)."""


def register(name: str, description: str) -> Callable[[Choose], Choose]:
    """Adds a policy: `@register("single", "one bucket …")` above a function (stream, cost) -> cuts."""

    def add(choose: Choose) -> Choose:
        _FIXED[name] = Policy(name, description, choose)
        return choose

    return add


def described() -> list[tuple[str, str]]:
    """(name, description) of every policy, for people."""
    families = [(f"{name}:{argument}", text) for name, (argument, text, _) in _FAMILIES.items()]
    return [(p.name, p.description) for p in _FIXED.values()] + families


def names() -> list[str]:
    return [name for name, _ in described()]


def parse(text: str) -> Policy:
    """The policy that `text` names; an Error that lists what exists if there is none."""
    if text in _FIXED:
        return _FIXED[text]
    name, colon, argument = text.partition(":")
    if name in _FAMILIES and colon:
        wanted, description, read = _FAMILIES[name]
        try:
            return Policy(text, description, read(argument))
        except ValueError as e:
            raise Error(f"policy {text!r}: expected {name}:{wanted} with {e}") from None
    raise Error(f"no policy {text!r}: expected one of {', '.join(names())}")


def safest(stream: Stream, cost: Cost) -> list[int]:
    """The robust choice among the partitions that are not predicted slower than torch's default."""
    return robust(stream, cost, ceiling=objective(stream, rules.ddp(stream), cost))


def best(stream: Stream, cost: Cost) -> list[int]:
    """The earliest finish, by the faster exact algorithm that applies."""
    return exact.optimal_affine(stream, cost) if isinstance(cost, AffineCost) else exact.optimal(stream, cost)


def _threshold(argument: str) -> Choose:
    try:
        mib = float(argument)
    except ValueError:
        mib = math.nan
    if not 0 < mib < math.inf:
        raise ValueError(f"MB a number above zero, as in threshold:10, got {argument!r}")
    return lambda stream, cost: rules.by_size(stream, mib * MIB)


register("auto", "the robust choice, and never one that is predicted slower than ddp")(safest)
register("robust", "best mean over perturbed latencies, bandwidths and ready times")(
    lambda stream, cost: robust(stream, cost)
)
register("fewest", "fewest buckets within 1 % of the optimum")(lambda stream, cost: exact.fewest(stream, cost))
register("optimal", "exact optimum for the measured cost")(best)
register("ddp", "torch's default: buckets close at 1 MiB, then at 25 MiB each")(lambda stream, cost: rules.ddp(stream))
register("mgwfbp-greedy", "MG-WFBP's rule: merge while that delays the start by less than the latency")(
    rules.mgwfbp_greedy
)
register("accumulate-while-busy", "send all that is ready whenever the network is free")(rules.accumulate_while_busy)
register("per-tensor", "every gradient on its own, as soon as it is ready")(
    lambda stream, cost: rules.per_tensor(stream)
)
register("single", "one bucket after backward (one per dtype)")(lambda stream, cost: rules.fill(stream))
_FAMILIES["threshold"] = ("MB", "a bucket closes at so many MiB, as torch's bucket_cap_mb", _threshold)

COMPARED = (*(name for name in _FIXED if name != "auto"), "threshold:10")
"""What a comparison shows when nobody says otherwise: everything once."""
