"""Burst plans on emulated devices: real ranks, real tensors, times as the profile says."""

from __future__ import annotations

import time

import pytest
import torch

from dovetail.core.errors import Error
from dovetail.simulate.burst_contest import run
from dovetail.simulate.burst_device import Device, emulated_layers, first_column
from dovetail.simulate.contest import Setting
from dovetail.train.burst import Burst
from tests.simulate.test_burst import profile


def test_a_device_never_ends_early_and_works_one_thing_after_the_other() -> None:
    device = Device()
    start = time.perf_counter()
    for _ in range(5):
        device.work(0.004)
    assert time.perf_counter() - start >= 0.02


def test_emulated_layers_have_the_profiles_bytes_and_real_gradients() -> None:
    small = profile(2).scaled(forward=1e-3, backward=2e-3)
    layers = emulated_layers(small)
    burst = Burst(layers, [1, 1], loss=first_column)  # without torch.distributed: one rank
    loss = burst.step(torch.arange(1.0, 4.0)[:, None], torch.zeros(3))
    assert float(loss) == 2.0
    assert [p.numel() * 4 for p in burst.parameters()] == [8, 8]  # of 10 bytes whole numbers fit
    assert all(bool((p.grad == 1.0).all()) for p in burst.parameters() if p.grad is not None)
    assert layers[1](layers[0](torch.ones(3, 1))).shape == (3, 20)


def test_layers_that_branch_are_refused() -> None:
    with pytest.raises(Error, match="need a chain"):
        emulated_layers(profile(3, edges=((0, 1), (0, 2), (1, 2))))


def test_plans_take_turns_and_move_the_predicted_bytes() -> None:
    small = profile(3, parameters=4000).scaled(forward=4e-3, backward=8e-3)
    outcome = run(
        small,
        ["ddp", "dp:2", "burst", "burst:1"],
        Setting(ranks=2, rate=None),
        batch=6,
        bucket_bytes=4000,
        rounds=1,
        steps=2,
        network_seconds=0.5,
        timeout=120,
    )
    assert [e.policy for e in outcome.entries] == ["ddp", "dp:2", "burst", "burst:1"]
    assert outcome.entry("dp:2").plan.counts == (2, 2, 2) and outcome.entry("burst:1").plan.counts == (1, 1, 1)
    assert list(outcome.networks) == [2] and outcome.networks[2].emulated
    for entry in outcome.entries:
        assert len(entry.seconds) == 2 and entry.moved == entry.predicted_moved
        assert entry.predicted.emulated and entry.predicted.source == "predicted"
    # Of two devices one has nothing to do while the other works.
    idle = outcome.entry("burst:1").idle
    assert idle is not None and idle >= sum(layer.forward(6) + layer.backward(6) for layer in small.layers)
