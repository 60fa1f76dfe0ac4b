"""Re-packing: moves to emptier devices, and elastic jobs that change width."""

from __future__ import annotations

from dataclasses import replace

from dovetail.planning.sharing.pack import ClusterSize, Devices, Rules
from dovetail.planning.sharing.repack import crowded, narrow, relocate, widen

from .made_shapes import shape


def test_a_crowded_job_moves_to_the_emptier_node_and_only_then() -> None:
    devices = Devices(ClusterSize(devices=8, node=4, device_bytes=100))
    for key in (0, 1):
        devices.add(key, shape(4, device=0.9), range(4))
    assert crowded(devices) == [1, 0]
    assert sorted(relocate(devices, 1, Rules()) or ()) == [4, 5, 6, 7]
    assert devices.residencies[1].devices == [0, 1, 2, 3], "asking changes nothing"
    devices.add(2, shape(4, device=0.9), range(4, 8))
    assert relocate(devices, 1, Rules()) is None


def test_elastic_jobs_take_an_open_device_and_give_one_where_that_helps() -> None:
    devices = Devices(ClusterSize(devices=4, node=4, device_bytes=100))
    rules = replace(Rules(), duty_cap=1.0)
    devices.add(0, shape(3, device=1.0), [0, 1, 2])
    assert widen(devices, 0, shape(4, device=1.0), rules) == 3
    narrower = [shape(2, device=1.0), shape(1, device=1.0)]
    assert narrow(devices, shape(2, device=1.0), [(0, narrower)], rules) == (0, 1)
    assert narrow(devices, shape(3, device=1.0), [(0, narrower)], rules) == (0, 2)
    assert narrow(devices, shape(4, device=1.0), [(0, narrower)], rules) is None
    assert devices.residencies[0].devices == [0, 1, 2]
