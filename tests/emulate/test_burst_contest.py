"""Burst plans on emulated devices: real ranks, real tensors, times as the profile says."""

from __future__ import annotations

import time

import pytest
import torch

from dovetail.core.errors import Error
from dovetail.emulate.burst_contest import run
from dovetail.emulate.burst_device import Device, emulated_layers, first_column
from dovetail.emulate.contest import Setting
from dovetail.train.burst.module import Burst
from tests.simulate.test_burst import profile


def test_a_device_never_ends_early_and_works_one_thing_after_the_other() -> None:
    device = Device()
    start = time.perf_counter()
    for i in range(5):
        device.work(0.004, arrived=i == 0)
    assert time.perf_counter() - start >= 0.02


def test_a_late_processor_does_not_delay_the_device_but_late_samples_do() -> None:
    device = Device()
    start = time.perf_counter()
    device.work(0.005, arrived=True)
    time.sleep(0.2)  # the processor is busy elsewhere
    device.work(0.005, arrived=False)
    assert device._free - start < 0.15, "queued behind the first, it had ended before the processor looked"
    time.sleep(0.02)
    arrival = time.perf_counter()
    device.work(0.005, arrived=True)
    assert time.perf_counter() - arrival >= 0.005


def test_samples_arrive_at_the_start_and_where_the_number_of_devices_changes() -> None:
    layers = emulated_layers(profile(5), [4, 4, 1, 1, 2])
    assert [layer.arrives for layer in layers] == [  # forward, backward
        (True, False),
        (False, True),
        (True, False),
        (False, True),
        (True, False),
    ]


def test_emulated_layers_have_the_profiles_bytes_and_real_gradients() -> None:
    small = profile(2).scaled(forward=1e-3, backward=2e-3)
    layers = emulated_layers(small, [1, 1])
    burst = Burst(layers, [1, 1], loss=first_column)  # without torch.distributed: one rank
    loss = burst.step(torch.arange(1.0, 4.0)[:, None], torch.zeros(3))
    assert float(loss) == 2.0
    assert [p.numel() * 4 for p in burst.parameters()] == [8, 8]  # of 10 bytes whole numbers fit
    assert all(bool((p.grad == 1.0).all()) for p in burst.parameters() if p.grad is not None)
    assert layers[1](layers[0](torch.ones(3, 1))).shape == (3, 20)


def test_layers_that_branch_are_refused() -> None:
    with pytest.raises(Error, match="need a chain"):
        emulated_layers(profile(3, edges=((0, 1), (0, 2), (1, 2))), [1, 1, 1])


def test_plans_take_turns_and_move_the_predicted_bytes() -> None:
    small = profile(3, parameters=4000).scaled(forward=4e-3, backward=8e-3)
    outcome = run(
        small,
        ["ddp", "dp:2", "best-dp", "burst", "burst:1"],
        Setting(ranks=2, rate=None),
        batch=6,
        bucket_bytes=4000,
        rounds=1,
        steps=2,
        network_seconds=1.0,
        timeout=120,
    )
    assert [e.policy for e in outcome.entries if e.policy == "ddp"] == ["ddp"] and len(outcome.entries) == 5
    assert outcome.entry("dp:2").plan.counts == (2, 2, 2) and outcome.entry("burst:1").plan.counts == (1, 1, 1)
    assert list(outcome.networks) == [2] and outcome.networks[2].emulated
    assert sorted(outcome.moves) == ["1-2", "2-1"]
    for move in outcome.moves.values():
        assert all(s.seconds.median > 0 and s.seconds.samples >= 3 for s in move.samples)
    for entry in outcome.entries:
        assert len(entry.seconds) == 2 and entry.moved == entry.predicted_moved
        assert entry.predicted.emulated and entry.predicted.source == "predicted"
        same = [
            e for e in outcome.entries if "ddp" not in (e.policy, entry.policy) and e.plan.counts == entry.plan.counts
        ]
        assert set(entry.same_as) == {e.policy for e in same} - {entry.policy}
        assert all(e.seconds == entry.seconds for e in same)
    # Of two devices one has nothing to do while the other works.
    alone = outcome.entry("burst:1")
    assert alone.recorded is not None and alone.recorded.source == "measured" and alone.idle is not None
    assert alone.idle >= sum(layer.forward(6) + layer.backward(6) for layer in small.layers)
    assert {s.track.partition("/")[0] for s in alone.recorded.spans} == {"rank 0", "rank 1"}
    assert outcome.entry("ddp").recorded is None
