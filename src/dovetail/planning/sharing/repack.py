"""Re-packing: residents move to freed devices, and elastic jobs take or give workers, at iteration boundaries."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dovetail.core.job import Shape

from .pack import Devices, Rules, admit, open_devices


def crowded(devices: Devices, *, gain: float = 0.25) -> list[int]:
    """Jobs that might run faster on other devices, the most crowded first.

    A job's crowd is the mean load that other jobs put on its devices; a job of k devices is listed only if the k
    emptiest devices have a mean load that is smaller by `gain` or more.
    """
    shared = np.flatnonzero(devices.count > 1)
    if not len(shared):
        return []
    loads = np.sort(devices.load)[: devices.cluster.devices]
    least = (np.cumsum(loads) / np.arange(1, len(loads) + 1)).tolist()  # mean load of the emptiest 1, 2, … devices
    keys = {key for d in shared for key in devices.residents[d]}
    crowds = []
    for key in keys:
        crowd = _crowd(devices, key)
        if crowd >= least[len(devices.residencies[key].devices) - 1] + gain:
            crowds.append((crowd, key))
    return [key for _, key in sorted(crowds, reverse=True)]


def _crowd(devices: Devices, key: int) -> float:
    residency = devices.residencies[key]
    loads: list[float] = devices.load[residency.devices].tolist()
    return sum(loads) / len(loads) - residency.duty


def relocate(devices: Devices, key: int, rules: Rules, *, gain: float = 0.25) -> list[int] | None:
    """Better devices for a resident, or None: those that would admit it now, if other jobs load them less by `gain`.

    Tries the move on `devices` and undoes it. Burst jobs do not move: a stage stays where its parameters are.
    """
    residency = devices.residencies[key]
    if residency.shape.pinned:
        return None
    before, mine = _crowd(devices, key), list(residency.devices)
    devices.remove(key)
    found = admit(devices, residency.shape, rules, background=residency.background)
    after = float(devices.load[found].mean()) if found is not None else np.inf
    devices.add(key, residency.shape, mine, background=residency.background)
    if found is None or after > before - gain:
        return None
    # Workers whose devices stay keep them, in their order.
    kept = [d for d in mine if d in found]
    return kept + [d for d in found if d not in kept]


def widen(devices: Devices, key: int, shape: Shape, rules: Rules) -> int | None:
    """A device for one more worker of an elastic job, or None. `shape` is the job's with that worker."""
    residency = devices.residencies[key]
    mine = residency.devices
    mask = open_devices(devices, shape, rules, background=residency.background)
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
    devices: Devices,
    wanting: Shape,
    elastic: Sequence[tuple[int, Sequence[Shape]]],
    rules: Rules,
    *,
    background: bool = False,
) -> tuple[int, int] | None:
    """The elastic job that should give up workers so that a waiting job can start, and how many; or None.

    `elastic` lists each job with its shapes when it gives up 1, 2, … workers; the first job is asked first. Tries each
    on `devices` and undoes it.
    """
    for key, shapes in elastic:
        shape, mine = devices.residencies[key].shape, list(devices.residencies[key].devices)
        for count, narrower in enumerate(shapes, 1):
            devices.replace(key, narrower, mine[:-count])
            fits = admit(devices, wanting, rules, background=background) is not None
            devices.replace(key, shape, mine)
            if fits:
                return key, count
    return None
