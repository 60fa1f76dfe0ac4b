"""Times the links between neighbours, two ranks at a time: a slow link slows every collective of every rank alike.

All collectives of a ring take as long as its slowest link, so their times say nothing of whose link that is. Messages
between two ranks do: a rank is slow if its links to both neighbours are, and its neighbours' other links are not. That
takes three ranks at least.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from dovetail.measure.collective_timer import backend_of
from dovetail.train import agree

PROBE = 256 * 2**10
"""Bytes of a message."""
REPEATS = 4
"""Round trips on each link; the fastest counts, since other work of the machine only ever adds time."""
TAG = 2**29
"""Tag of the messages, out of the way of others."""


def link_seconds(group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """Seconds that PROBE bytes take on the better of each rank's two links, by rank; all ranks call it together.

    Empty with fewer than three ranks, and where the backend is not gloo: an accelerator's links have several ways.
    """
    ranks, me = group.size(), group.rank()
    if ranks < 3 or device.type != "cpu" or backend_of(group, device) != "gloo":
        return []
    message, took = torch.zeros(PROBE, dtype=torch.uint8), [0.0] * ranks
    for turn in range(3):
        for link in (me, (me - 1) % ranks):
            if _turn(link, ranks) == turn:
                seconds = _round_trip(group, message, peer=(link + 1) % ranks if link == me else link, first=link == me)
                took[link] = seconds / 2 if link == me else 0.0
    took = agree.largest(took, group, device)
    return [min(took[rank], took[rank - 1]) for rank in range(ranks)]


def _turn(link: int, ranks: int) -> int:
    """Links of one turn have no rank in common; link i joins the ranks i and i + 1."""
    return 2 if ranks % 2 and link == ranks - 1 else link % 2


def _round_trip(group: dist.ProcessGroup, message: torch.Tensor, *, peer: int, first: bool) -> float:
    """Seconds of the fastest of some round trips, as the rank that begins them sees it."""
    fastest = float("inf")
    for _ in range(REPEATS):
        began = time.perf_counter()
        if first:
            group.send([message], peer, TAG).wait()
            group.recv([message], peer, TAG).wait()
        else:
            group.recv([message], peer, TAG).wait()
            group.send([message], peer, TAG).wait()
        fastest = min(fastest, time.perf_counter() - began)
    return fastest
