"""What one more node would do to an iteration, predicted from what was measured without it."""

from __future__ import annotations

import msgspec
import numpy as np

from dovetail.core.errors import Error
from dovetail.core.files import Count, Name, Record, Seconds
from dovetail.core.network import AffineCost, Collective, CollectiveName, CostSample, Fit, Network, bits_per_second
from dovetail.core.plan import Overlap
from dovetail.core.profile import Profile, exactly
from dovetail.planning import plan

ROUNDS: dict[CollectiveName, int] = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}
"""How often a ring carries the data past every rank: (n − 1) / n of the bytes each time."""
LARGE = 2**30
"""Bytes of a message for which bandwidth alone counts."""


class NodePrediction(Record, frozen=True, kw_only=True):
    """An iteration with and without one more node, both predicted, with the best buckets for each."""

    rate: Name
    """Of the link to the new node, such as "1gbit"."""
    workers: Count
    """Workers with the new node."""
    added: Count
    """Workers on it."""
    now: Seconds
    """An iteration without it."""
    then: Seconds
    """An iteration with it, at the same batch for each worker."""
    exposed: Seconds
    """Communication of that iteration that nothing hides."""

    @property
    def speedup(self) -> float:
        """Samples per second with the node over those without: below 1 the node does harm."""
        before = self.workers - self.added
        return self.workers / before * self.now / self.then if self.then else self.workers / before

    def __str__(self) -> str:
        return (
            f"predicted with one more node at {self.rate}: {self.then * 1e3:.0f} ms a step in place of "
            f"{self.now * 1e3:.0f} ms ({self.exposed * 1e3:.0f} ms of it communication that nothing hides); "
            f"{self.workers} workers would do {self.speedup:.2f} times the work of {self.workers - self.added}"
        )


def with_node(
    profile: Profile,
    network: Network,
    *,
    rate: str,
    workers: int = 1,
    overlap: Overlap = "backward",
    optimizer: float = 0.0,
) -> NodePrediction:
    """Predicts an iteration with one more node of so many `workers`, joined by a link of a given rate.

    A ring is as slow as its slowest link, so all collectives take what that link takes for their bytes, or what the
    measured network would take among as many ranks (the ring law) where that is longer. Starting a collective costs
    what the ring law says: a link with more latency than those measured makes it worse than predicted. The node
    computes as fast as the others, and gradients travel in full precision.
    """
    if workers < 1:
        raise Error(f"workers: expected at least 1, got {workers}")
    more = joined(network, network.ranks + workers, rate)
    now = plan(profile, network, overlap=overlap, optimizer=optimizer).prediction
    then = plan(profile, more, overlap=overlap, optimizer=optimizer).prediction
    return NodePrediction(
        rate=rate,
        workers=more.ranks,
        added=workers,
        now=now.iteration,
        then=then.iteration,
        exposed=then.exposed,
    )


def joined(network: Network, ranks: int, rate: str) -> Network:
    """The network among more ranks, of which one is behind a link of this rate."""
    seconds_per_byte = 8 / bits_per_second(rate)
    alone = msgspec.structs.replace(network, contention=None)
    found: dict[CollectiveName, Collective] = {}
    for name, collective in network.collectives.items():
        law = alone.affine(name, ranks=ranks)
        link = AffineCost(law.latency, ROUNDS[name] * (ranks - 1) / ranks * seconds_per_byte)
        ring = alone.cost(name, ranks=ranks)
        sizes = sorted({*(s.bytes for s in collective.samples), LARGE}) if collective.samples else []
        found[name] = Collective(
            fit=Fit(
                latency=law.latency,
                seconds_per_byte=max(law.seconds_per_byte, link.seconds_per_byte),
                error=collective.fit.error,
            ),
            samples=tuple(
                CostSample(bytes=size, seconds=exactly(float(np.maximum(ring(size), link(size))))) for size in sizes
            ),
        )
    return msgspec.structs.replace(
        network,
        name=f"{network.name} and {rate}"[:100],
        ranks=ranks,
        source=f"{network.source}; one rank more behind a link of {rate}, predicted",
        measured=False,
        collectives=found,
        reduced={},
    )
