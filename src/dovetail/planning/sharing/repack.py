"""Re-packing: residents move to freed devices, and elastic jobs take or give workers, at iteration boundaries."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dovetail.core.job import Shape

from .pack import Devices, Rules, admit, open_devices


def crowded(devices: Devices, *, gain: float = 0.25) -> list[int]:
    """Jobs that might be better off elsewhere, the most crowded first.

    A job's crowd is the mean load that others put on its devices; a job of k devices is looked at only if the k
    emptiest devices would be better by `gain`.
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
        if crowd >= least[len(devices.holdings[key].devices) - 1] + gain:
            crowds.append((crowd, key))
    return [key for _, key in sorted(crowds, reverse=True)]


def _crowd(devices: Devices, key: int) -> float:
    holding = devices.holdings[key]
    loads: list[float] = devices.load[holding.devices].tolist()
    return sum(loads) / len(loads) - holding.duty


def relocate(devices: Devices, key: int, rules: Rules, *, gain: float = 0.25) -> list[int] | None:
    """Better devices for a resident, or None: those that would admit it now, if others load them less by `gain`.

    Tried on the books and undone: changes nothing. Burst stages stay where their parameters are.
    """
    holding = devices.holdings[key]
    if holding.shape.pinned:
        return None
    before, mine = _crowd(devices, key), list(holding.devices)
    devices.remove(key)
    found = admit(devices, holding.shape, rules, background=holding.background)
    after = float(devices.load[found].mean()) if found is not None else np.inf
    devices.add(key, holding.shape, mine, background=holding.background)
    if found is None or after > before - gain:
        return None
    # Devices that it keeps stay in their places.
    kept = [d for d in mine if d in found]
    return kept + [d for d in found if d not in kept]


def widen(devices: Devices, key: int, shape: Shape, rules: Rules) -> int | None:
    """A device for one more worker of an elastic job, or None. `shape` is the job's with that worker."""
    holding = devices.holdings[key]
    mine = holding.devices
    mask = open_devices(devices, shape, rules, background=holding.background)
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

    `elastic` lists each job with its shapes when it gives 1, 2, … workers, the first to be asked first. Tried on the
    books and undone: changes nothing.
    """
    for key, shapes in elastic:
        shape, mine = devices.holdings[key].shape, list(devices.holdings[key].devices)
        for count, narrower in enumerate(shapes, 1):
            devices.replace(key, narrower, mine[:-count])
            fits = admit(devices, wanting, rules, background=background) is not None
            devices.replace(key, shape, mine)
            if fits:
                return key, count
    return None
