"""Merge policies by name. A policy is a function of the stream and the cost of one all-reduce that returns the cuts.

To add one: `POLICIES.add(name, one line for --help, function)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dovetail.core.network import Cost
from dovetail.core.plan import MIB
from dovetail.planning.registry import Registry

from . import exact, rules
from .robust import robust
from .stream import Stream, objective

Choose = Callable[[Stream, Cost], list[int]]


def safest(stream: Stream, cost: Cost) -> list[int]:
    """The robust choice among the partitions that are not predicted slower than torch's default."""
    return robust(stream, cost, ceiling=objective(stream, rules.ddp(stream), cost))


def _threshold(argument: str) -> Choose:
    try:
        mib = float(argument)
    except ValueError:
        mib = math.nan
    if not 0 < mib < math.inf:
        raise ValueError(f"threshold:MB with MB a number above zero, as in threshold:10, got {argument!r}")
    return lambda stream, cost: rules.by_size(stream, mib * MIB)


POLICIES: Registry[Choose] = Registry("policy")
POLICIES.add("auto", "the robust choice, and never one that is predicted slower than ddp", safest)
POLICIES.add(
    "robust",
    "best mean over perturbed latencies, bandwidths and ready times",
    lambda stream, cost: robust(stream, cost),
)
POLICIES.add("fewest", "fewest buckets within 1 % of the optimum", lambda stream, cost: exact.fewest(stream, cost))
POLICIES.add("optimal", "exact optimum for the measured cost", exact.optimum)
POLICIES.add(
    "ddp", "torch's default: buckets close at 1 MiB, then at 25 MiB each", lambda stream, cost: rules.ddp(stream)
)
POLICIES.add(
    "mgwfbp-greedy",
    "MG-WFBP's rule: merge while that delays the start by less than the latency",
    rules.mgwfbp_greedy,
)
POLICIES.add(
    "accumulate-while-busy", "send all that is ready whenever the network is free", rules.accumulate_while_busy
)
POLICIES.add(
    "per-tensor", "every gradient on its own, as soon as it is ready", lambda stream, cost: rules.per_tensor(stream)
)
POLICIES.add("single", "one bucket after backward (one per dtype)", lambda stream, cost: rules.fill(stream))
POLICIES.family("threshold", "MB", "a bucket closes at so many MiB, as torch's bucket_cap_mb", _threshold)

COMPARED = (*(name for name in POLICIES if name != "auto"), "threshold:10")
"""What a comparison shows unless told otherwise: every policy once."""
