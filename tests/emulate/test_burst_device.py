"""Emulated devices of burst jobs: layers that take the profile's time at any local batch, with real gradients."""

from __future__ import annotations

import time

import pytest
import torch

from dovetail.core.errors import Error
from dovetail.emulate.burst_device import EmulatedDevice, emulated_layers, first_column
from dovetail.train.burst.module import Burst
from tests.simulate.test_burst import profile


def test_a_device_never_ends_early_and_works_one_thing_after_the_other() -> None:
    device = EmulatedDevice()
    start = time.perf_counter()
    for i in range(5):
        device.work(0.004, arrived=i == 0)
    assert time.perf_counter() - start >= 0.02


def test_a_late_processor_does_not_delay_the_device_but_late_samples_do() -> None:
    device = EmulatedDevice()
    device.work(0.005, arrived=True)
    first = device.free
    time.sleep(0.02)  # the processor is busy elsewhere
    device.work(0.005, arrived=False)
    assert device.free == first + 0.005, "queued behind the first, it had ended before the processor looked"
    time.sleep(0.02)
    arrival = time.perf_counter()
    device.work(0.005, arrived=True)
    assert device.free >= arrival + 0.005


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
