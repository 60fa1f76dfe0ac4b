"""Admission: which devices a job may share, and why it has to wait.

A device's load is the sum of its residents' duties, a job's duty being the share of a device that it would use if it
had it to itself. A job is admitted where load + duty stays under the cap (1.0: in the mean nobody is slowed; 1.6–2.5:
throughput); the duty of background jobs, which give way, counts only against other background jobs. And the memory
rule must hold: one task runs at a time and its activations are gone at its end, so a device must hold every resident's
persistent bytes and the largest ephemeral demand among them. Both are checked and booked in one step, for all devices
of the job or for none. A gang scheduler is the special case of one resident per device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from dovetail.core.errors import Error
from dovetail.core.job import Shape

Mask = npt.NDArray[np.bool_]
EPSILON = 1e-9


@dataclass(frozen=True)
class Cluster:
    """Devices, how many of them share a node, and what each can hold."""

    devices: int
    node: int = 8
    device_bytes: int = 16 * 2**30

    def __post_init__(self) -> None:
        if self.devices < 1 or self.node < 1 or self.device_bytes < 1:
            raise Error(f"cluster: expected at least one device, node and byte, got {self}")


@dataclass(frozen=True)
class Rules:
    """How devices may be shared."""

    duty_cap: float = 2.5
    """Lets three jobs share a device whose ladders use it for 0.83 of the time: two leave it idle when both are at
    their barriers. Full-depth jobs, which use it always, stay two."""
    max_residents: int = 4
    locality: Literal["node", "any"] = "node"
    """node: a job that fits a node stays in one; any: wherever there is room."""
    guard: Literal["off", "background", "all"] = "background"
    """Whose tasks start only if predicted to end before a job of higher priority wants the device again."""


class Holding:
    """One job's place: its devices and what it books on each."""

    __slots__ = ("background", "devices", "duty", "shape")

    def __init__(self, shape: Shape, devices: list[int], background: bool) -> None:
        self.shape, self.devices, self.background = shape, devices, background
        self.duty = shape.duty * shape.width / len(devices)


class Devices:
    """What every device holds. Arrays are padded to whole nodes; devices that do not exist are never free."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.nodes = math.ceil(cluster.devices / cluster.node)
        size = self.nodes * cluster.node
        self.exists: Mask = np.arange(size) < cluster.devices
        self.load = np.where(self.exists, 0.0, np.inf)
        self.firm = np.zeros(size)  # the load without background jobs
        self.persistent = np.zeros(size, dtype=np.int64)
        self.ephemeral = np.zeros(size, dtype=np.int64)
        self.count = np.zeros(size, dtype=np.int64)
        self.residents: list[list[int]] = [[] for _ in range(size)]
        self.holdings: dict[int, Holding] = {}

    def add(self, key: int, shape: Shape, devices: Iterable[int], *, background: bool = False) -> None:
        """Books a placement that `admit` found."""
        holding = self.holdings[key] = Holding(shape, list(devices), background)
        for d in holding.devices:
            self._book(d, key, holding)

    def remove(self, key: int) -> list[int]:
        """Frees everything the job held; says which devices those were."""
        holding = self.holdings.pop(key)
        for d in holding.devices:
            self._free(d, key, holding)
        return holding.devices

    def replace(self, key: int, shape: Shape, devices: Iterable[int]) -> None:
        """The job in another shape or on other devices."""
        background = self.holdings[key].background
        self.remove(key)
        self.add(key, shape, devices, background=background)

    def reserve(self, key: int, device: int) -> None:
        """Books one more device for a job that will get it at its next iteration boundary."""
        holding = self.holdings[key]
        holding.devices.append(device)
        self._book(device, key, holding)

    def _book(self, d: int, key: int, holding: Holding) -> None:
        shape = holding.shape
        self.load[d] += holding.duty
        if not holding.background:
            self.firm[d] += holding.duty
        self.persistent[d] += shape.persistent_bytes
        if shape.ephemeral_bytes > self.ephemeral[d]:
            self.ephemeral[d] = shape.ephemeral_bytes
        self.count[d] += 1
        self.residents[d].append(key)
        assert self.persistent[d] + self.ephemeral[d] <= self.cluster.device_bytes, f"memory of device {d} exceeded"

    def _free(self, d: int, key: int, holding: Holding) -> None:
        self.residents[d].remove(key)
        self.count[d] -= 1
        self.persistent[d] -= holding.shape.persistent_bytes
        if self.residents[d]:
            self.load[d] -= holding.duty
            if not holding.background:
                self.firm[d] -= holding.duty
            self.ephemeral[d] = max(self.holdings[k].shape.ephemeral_bytes for k in self.residents[d])
        else:
            self.load[d], self.firm[d], self.ephemeral[d] = 0.0, 0.0, 0  # exactly: no rounding is carried on


def open_devices(devices: Devices, shape: Shape, rules: Rules, *, background: bool = False) -> Mask:
    """Where one more resident of this shape may go: the duty cap, the memory rule, the number of residents."""
    fits = devices.persistent + np.maximum(devices.ephemeral, shape.ephemeral_bytes)
    mask: Mask = fits + shape.persistent_bytes <= devices.cluster.device_bytes
    mask &= devices.count < rules.max_residents
    if rules.max_residents > 1:
        # An empty device takes any job, however small the cap.
        load = devices.load if background else devices.firm
        mask &= (load + shape.duty <= rules.duty_cap + EPSILON) | (devices.count == 0)
    mask &= devices.exists
    return mask


def admit(
    devices: Devices, shape: Shape, rules: Rules, *, allowed: Mask | None = None, background: bool = False
) -> list[int] | None:
    """The devices to give to a job, least loaded first, or None if it has to wait. Changes nothing.

    Within a node if the job fits one (locality); among nodes that would carry it equally well, the fullest, so that
    whole nodes stay whole for wide jobs.
    """
    width = shape.width
    mask = open_devices(devices, shape, rules, background=background)
    if allowed is not None:
        mask &= allowed
    node = devices.cluster.node
    load = np.where(mask, devices.load, np.inf)
    if width <= node and rules.locality == "node":
        by_node = load.reshape(devices.nodes, node)
        # The load a node would add up to over the job's devices; infinite where it has too few open ones.
        cost = by_node.min(axis=1) if width == 1 else np.partition(by_node, width - 1, axis=1)[:, :width].sum(axis=1)
        best = cost.min()
        if best == np.inf:
            return None
        ties = np.flatnonzero(cost <= best + EPSILON)
        at = int(ties[0])
        if len(ties) > 1:
            at = int(ties[np.argmin(np.isfinite(by_node[ties]).sum(axis=1))])
        order = np.argsort(by_node[at], kind="stable")[:width]
        return [at * node + int(i) for i in order]
    if int(mask.sum()) < width:
        return None
    # Emptiest nodes first, so that a wide job touches few of them.
    node_load = np.where(devices.exists, devices.load, 0.0).reshape(devices.nodes, node).sum(axis=1)
    order = np.lexsort((np.repeat(node_load, node), load))[:width]
    return [int(i) for i in order]


def why(devices: Devices, shape: Shape, rules: Rules, *, allowed: Mask | None = None, background: bool = False) -> str:
    """One sentence that says what a waiting job lacks; empty if it could be admitted now."""
    if admit(devices, shape, rules, allowed=allowed, background=background) is not None:
        return ""
    width = shape.width
    cluster = devices.cluster
    mine = devices.exists if allowed is None else devices.exists & allowed
    have = int(mine.sum())
    if width > have:
        return f"width: needs {width} devices, the cluster offers {have}"
    need = shape.persistent_bytes + shape.ephemeral_bytes
    if need > cluster.device_bytes:
        return f"memory: needs {need} bytes on a device, each has {cluster.device_bytes}"
    fits = devices.persistent + np.maximum(devices.ephemeral, shape.ephemeral_bytes) + shape.persistent_bytes
    memory = int((mine & (fits <= cluster.device_bytes)).sum())
    if memory < width:
        return f"memory: {memory} devices have room for its {need} bytes, it needs {width}"
    room = int((mine & (devices.count < rules.max_residents)).sum())
    if room < width:
        return f"residents: {room} devices have fewer than {rules.max_residents} jobs, it needs {width}"
    under = int((mine & open_devices(devices, shape, rules, background=background)).sum())
    if under < width:
        return f"duty: {under} devices stay under {rules.duty_cap:g} with its {shape.duty:.2f}, it needs {width}"
    return f"locality: {under} devices are open, but no node has {width} of them"
