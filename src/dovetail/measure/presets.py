"""Networks by name, from published or assumed figures: for planning without the network at hand.

Nothing here was measured by us.

A preset is a fabric and a number of ranks, "10gbe-16". The fabric gives two constants, alpha (seconds per step of a
ring) and beta (seconds per byte on the wire); the ring law turns them into the cost of each collective among n ranks:

    all_reduce                   2(n−1)·alpha   + 2(n−1)/n·beta · M
    reduce_scatter, all_gather    (n−1)·alpha   +  (n−1)/n·beta · M
    all_to_all                    (n−1)·alpha   +  (n−1)/n·beta · M

M is the size in bytes as `dovetail.measure.collectives` counts it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dovetail.core.errors import Error
from dovetail.core.network import COLLECTIVES, Collective, Fit, Network

RANKS = range(2, 2049)


@dataclass(frozen=True)
class Preset:
    """One fabric."""

    alpha: float
    """Seconds per step of a ring."""
    beta: float
    """Seconds per byte on the wire."""
    source: str


def _from_all_reduce(ranks: int, latency: float, seconds_per_byte: float, source: str) -> Preset:
    """The constants behind a published all-reduce law among so many ranks: the ring law, backwards."""
    steps = 2 * (ranks - 1)
    return Preset(alpha=latency / steps, beta=seconds_per_byte * ranks / steps, source=source)


PRESETS: dict[str, Preset] = {
    "10gbe": Preset(
        alpha=45.25e-6,
        beta=1.2 / (9 * 2**30 / 8),
        source="10 Gbit Ethernet: alpha 45.25 us and 9 Gbit/s with 20 % overhead, the constants of the ring simulation "
        "published with MG-WFBP",
    ),
    "25gbe": Preset(
        alpha=30e-6,
        beta=8 / (25e9 * 0.9),
        source="25 Gbit Ethernet: alpha 30 us and 90 % of the line rate, assumed, not measured",
    ),
    "100gbe": Preset(
        alpha=15e-6,
        beta=8 / (100e9 * 0.9),
        source="100 Gbit Ethernet: alpha 15 us and 90 % of the line rate, assumed, not measured",
    ),
    "infiniband": _from_all_reduce(
        ranks=16,
        latency=2.36e-4,
        seconds_per_byte=4.06e-10,
        source="56 Gbit InfiniBand: derived by the ring law from the all-reduce fit on 16 V100 (236 us + 0.406 ns/B) "
        "published with MG-WFBP",
    ),
    "nvlink": Preset(
        # 20 us all-reduce latency among 8; NCCL's bus bandwidth already is bytes on the wire per second.
        alpha=20e-6 / (2 * (8 - 1)),
        beta=1 / 235e9,
        source="NVLink inside one server: derived by the ring law from NCCL on 8 A100 (20 us all-reduce latency, "
        "235 GB/s bus bandwidth) published with DeepPool",
    ),
}


def preset(name: str) -> Network:
    """The network called FABRIC-RANKS, for example "10gbe-16"; an Error that lists the fabrics for any other name."""
    match = re.fullmatch(r"([a-z0-9]+)-(\d{1,6})", name.strip().lower())
    fabric, ranks = (match[1], int(match[2])) if match else ("", 0)
    if fabric not in PRESETS or ranks not in RANKS:
        raise Error(
            f"no network preset {name!r}: expected FABRIC-RANKS such as 10gbe-16, with one of {', '.join(PRESETS)} "
            f"and {RANKS.start} to {RANKS.stop - 1} ranks"
        )
    constants = PRESETS[fabric]
    return Network(
        name=f"{fabric}-{ranks}",
        ranks=ranks,
        source=f"preset, not measured: {constants.source}; ring law for {ranks} ranks",
        measured=False,
        collectives={
            collective: Collective(fit=_ring(constants, ranks, passes=2 if collective == "all_reduce" else 1))
            for collective in COLLECTIVES
        },
    )


def _ring(constants: Preset, ranks: int, *, passes: int) -> Fit:
    """`passes` times around the ring: (n−1) steps each, every step moves M/n bytes per rank."""
    steps = passes * (ranks - 1)
    return Fit(latency=steps * constants.alpha, seconds_per_byte=steps / ranks * constants.beta, error=0.0)
