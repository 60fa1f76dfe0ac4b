"""Re-packing: residents move to freed devices, and elastic jobs take or give workers, at iteration boundaries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from dovetail.core.job import Shape

from .pack import EPSILON, Devices, Rules, admit, open_device, open_devices



def move(devices: Devices, freed: Iterable[int], rules: Rules) -> tuple[int, int, int] | None:
    """One move (job, from, to) that evens out the load, or None.

    From the fullest device of the same node to a freed one, if the job's duty is smaller than the difference: then the
    worse of the two devices gets better. Between nodes where jobs may be anywhere.
    """
    node = devices.cluster.node
    best: tuple[float, int, int, int] | None = None
    for to in freed:
        low = 0 if rules.locality != "node" else to // node * node
        high = devices.cluster.devices if rules.locality != "node" else min(low + node, devices.cluster.devices)
        for source in range(low, high):
            gap = float(devices.load[source] - devices.load[to])
            if gap <= EPSILON or (best is not None and gap <= best[0]):
                continue
            for key in devices.residents[source]:
                holding = devices.holdings[key]
                if holding.shape.pinned or to in holding.devices or holding.duty >= gap - EPSILON:
                    continue
                if open_device(devices, holding.shape, holding.duty, to, rules):
                    best = (gap, key, source, to)
                    break
    return None if best is None else best[1:]


def widen(devices: Devices, key: int, shape: Shape, rules: Rules) -> int | None:
    """A device for one more worker of an elastic job, or None. `shape` is the job's with that worker."""
    mine = devices.holdings[key].devices
    mask = open_devices(devices, shape, shape.duty, rules)
    mask[mine] = False
    node = devices.cluster.node
    if rules.locality == "node" and len(mine) < node:
        home = np.zeros_like(mask)
        home[mine[0] // node * node : (mine[0] // node + 1) * node] = True
        mask &= home
    if not mask.any():
        return None
    return int(np.where(mask, devices.load, np.inf).argmin())


def narrow(
    devices: Devices, wanting: Shape, elastic: Sequence[tuple[int, Sequence[Shape]]], rules: Rules
) -> tuple[int, int] | None:
    """The elastic job that should give up workers so that a waiting job can start, and how many; or None.

    `elastic` lists each job with its shapes when it gives 1, 2, … workers, the first to be asked first. Tried on the
    books and undone: changes nothing.
    """
    for key, shapes in elastic:
        shape, mine = devices.holdings[key].shape, list(devices.holdings[key].devices)
        for count, narrower in enumerate(shapes, 1):
            devices.replace(key, narrower, mine[:-count])
            fits = admit(devices, wanting, rules) is not None
            devices.replace(key, shape, mine)
            if fits:
                return key, count
    return None
