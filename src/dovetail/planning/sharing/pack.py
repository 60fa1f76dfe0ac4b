"""Admission: which devices a job may share, and why it has to wait.

A job's duty is the share of a device that it would use if it had the device to itself; a device's load is the sum of
its residents' duties. A job is admitted where load + duty stays under the cap (1.0: on average no job is slowed; 1.6 to
2.5: more throughput); the duty of background jobs, which give way, counts only against other background jobs. The
memory rule must hold as well: one task runs at a time and its activations are freed at its end, so a device must hold
every resident's persistent bytes and the largest ephemeral demand among them. Both are checked for all devices of the
job together, which gets all of them or none. A gang scheduler is the special case of one resident per device.
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
class ClusterSize:
    """A cluster: its devices, how many of them share a node, and the bytes of each."""

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
    """Most load of a device. 2.5 lets three ladder jobs share one, each of which would use it for 0.83 of the time: two
    would leave it idle while both are at their barriers. Of full-depth jobs, which use it always, it lets in two."""
    max_residents: int = 4
    locality: Literal["node", "any"] = "node"
    """node: a job that fits a node stays in one; any: wherever there is room."""
    guard: Literal["off", "background", "all"] = "background"
    """Which jobs' tasks start only if predicted to end before a job of higher priority wants the device again."""


class Residency:
    """One admitted job: its devices and the duty that it adds to the load of each."""

    __slots__ = ("background", "devices", "duty", "shape")

    def __init__(self, shape: Shape, devices: list[int], background: bool) -> None:
        self.shape, self.devices, self.background = shape, devices, background
        self.duty = shape.duty * shape.width / len(devices)


class Devices:
    """The residents of every device. Arrays are padded to whole nodes; devices that do not exist are never free."""

    def __init__(self, cluster: ClusterSize) -> None:
        self.cluster = cluster
        self.nodes = math.ceil(cluster.devices / cluster.node)
        size = self.nodes * cluster.node
        self.exists: Mask = np.arange(size) < cluster.devices
        self.load = np.where(self.exists, 0.0, np.inf)
        self.foreground = np.zeros(size)  # the load without background jobs
        self.persistent = np.zeros(size, dtype=np.int64)
        self.ephemeral = np.zeros(size, dtype=np.int64)
        self.count = np.zeros(size, dtype=np.int64)
        self.residents: list[list[int]] = [[] for _ in range(size)]
        self.residencies: dict[int, Residency] = {}

    def add(self, key: int, shape: Shape, devices: Iterable[int], *, background: bool = False) -> None:
        """Adds a job to the devices that `admit` found for it."""
        residency = self.residencies[key] = Residency(shape, list(devices), background)
        for d in residency.devices:
            self._add(d, key, residency)

    def remove(self, key: int) -> list[int]:
        """Removes a job from its devices and returns these."""
        residency = self.residencies.pop(key)
        for d in residency.devices:
            self._remove(d, key, residency)
        return residency.devices

    def replace(self, key: int, shape: Shape, devices: Iterable[int]) -> None:
        """Changes a job's shape or its devices."""
        background = self.residencies[key].background
        self.remove(key)
        self.add(key, shape, devices, background=background)

    def reserve(self, key: int, device: int) -> None:
        """Adds a job to one more device, which it will use from its next iteration boundary on."""
        residency = self.residencies[key]
        residency.devices.append(device)
        self._add(device, key, residency)

    def _add(self, d: int, key: int, residency: Residency) -> None:
        shape = residency.shape
        self.load[d] += residency.duty
        if not residency.background:
            self.foreground[d] += residency.duty
        self.persistent[d] += shape.persistent_bytes
        if shape.ephemeral_bytes > self.ephemeral[d]:
            self.ephemeral[d] = shape.ephemeral_bytes
        self.count[d] += 1
        self.residents[d].append(key)
        assert self.persistent[d] + self.ephemeral[d] <= self.cluster.device_bytes, f"memory of device {d} exceeded"

    def _remove(self, d: int, key: int, residency: Residency) -> None:
        self.residents[d].remove(key)
        self.count[d] -= 1
        self.persistent[d] -= residency.shape.persistent_bytes
        if self.residents[d]:
            self.load[d] -= residency.duty
            if not residency.background:
                self.foreground[d] -= residency.duty
            self.ephemeral[d] = max(self.residencies[k].shape.ephemeral_bytes for k in self.residents[d])
        else:
            self.load[d], self.foreground[d], self.ephemeral[d] = 0.0, 0.0, 0  # exactly: rounding errors do not add up


def open_devices(devices: Devices, shape: Shape, rules: Rules, *, background: bool = False) -> Mask:
    """The devices that may take one more resident of this shape, by duty cap, memory rule and number of residents."""
    fits = devices.persistent + np.maximum(devices.ephemeral, shape.ephemeral_bytes)
    mask: Mask = fits + shape.persistent_bytes <= devices.cluster.device_bytes
    mask &= devices.count < rules.max_residents
    if rules.max_residents > 1:
        # An empty device takes any job, however small the cap.
        load = devices.load if background else devices.foreground
        mask &= (load + shape.duty <= rules.duty_cap + EPSILON) | (devices.count == 0)
    mask &= devices.exists
    return mask


def admit(
    devices: Devices, shape: Shape, rules: Rules, *, allowed: Mask | None = None, background: bool = False
) -> list[int] | None:
    """The devices to give to a job, least loaded first, or None if it has to wait. Changes nothing.

    With locality "node", a job that fits a node stays in one: the node where its devices would be loaded least, and of
    equal ones the fullest, so that empty nodes stay free for wide jobs.
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


def waiting_reason(
    devices: Devices, shape: Shape, rules: Rules, *, allowed: Mask | None = None, background: bool = False
) -> str:
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
