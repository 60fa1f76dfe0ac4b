"""The published A100 layer times of VGG16 and WideResNet-101-2: every figure that we claim for burst plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.core.batch_law import law
from dovetail.core.profile import Profile
from dovetail.measure.layer_table import read_layer_table
from dovetail.planning.burst import rules
from dovetail.planning.burst.cost import ProfileCost
from dovetail.planning.burst.planner import BurstPlanner

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module")
def profiles(reference_data: Path) -> dict[str, Profile]:
    file = reference_data / "layers" / "a100_layers.csv"
    if not file.exists():
        pytest.skip(f"{file.name} is not among the reference data")
    return {model: read_layer_table(file, model) for model in ("vgg", "wrn")}


def planner(profile: Profile, batch: int, devices: int = 8) -> BurstPlanner:
    """Powers of two, as behind the reference figures."""
    counts = tuple(2**i for i in range(devices.bit_length()))
    return BurstPlanner(profile, ProfileCost(profile, batch), devices, counts=counts)


@pytest.mark.parametrize(
    ("model", "batch", "devices", "policy", "limit", "ms"),
    [
        ("vgg", 32, 8, "dp:2", None, 32.06),
        ("vgg", 32, 8, "dp:4", None, 20.73),
        ("vgg", 32, 8, "dp:8", None, 14.74),
        ("vgg", 32, 8, "fastest", None, 11.19),
        ("vgg", 32, 8, "fastest", 1.25, 12.61),
        ("vgg", 32, 8, "per-layer", 1.25, 21.62),
        ("vgg", 32, 8, "deeppool", 1.25, 21.62),
        ("vgg", 32, 8, "deeppool-published", 1.25, 29.99),
        ("vgg", 32, 32, "fastest", None, 6.51),
        ("vgg", 32, 32, "dp:32", None, 10.41),
        ("wrn", 16, 8, "dp:2", None, 39.90),
        ("wrn", 16, 8, "dp:4", None, 30.55),
        ("wrn", 16, 8, "dp:8", None, 26.90),
        ("wrn", 16, 8, "fastest", 1.25, 38.03),
        ("wrn", 16, 8, "fastest", 1.5, 33.79),
        ("wrn", 16, 8, "fastest", 2.0, 29.87),
        ("wrn", 32, 8, "dp:2", None, 61.54),
        ("wrn", 32, 8, "dp:4", None, 40.98),
        ("wrn", 32, 8, "dp:8", None, 31.09),
        ("wrn", 32, 8, "fastest", 1.25, 47.34),
        ("wrn", 32, 8, "fastest", 1.5, 38.07),
        ("wrn", 32, 8, "fastest", 2.0, 33.55),
        ("wrn", 32, 8, "per-layer", 1.5, 48.54),
        ("wrn", 32, 8, "deeppool", 1.5, 49.06),
        ("wrn", 32, 8, "deeppool-published", 1.5, 48.70),
    ],
)
def test_published_layer_times_give_the_reference_figures(
    profiles: dict[str, Profile], model: str, batch: int, devices: int, policy: str, limit: float | None, ms: float
) -> None:
    found = rules.by_name(planner(profiles[model], batch, devices), policy, amplification=limit)
    assert found.prediction.iteration * 1e3 == pytest.approx(ms, abs=0.006)


def test_one_device_takes_what_the_published_rows_add_up_to(profiles: dict[str, Profile]) -> None:
    for model, totals in (
        ("vgg", {1: 5.53, 2: 7.26, 4: 10.30, 8: 16.88, 16: 29.39, 32: 53.73}),
        ("wrn", {1: 19.30, 4: 26.61, 8: 37.04, 16: 58.68, 32: 103.84}),
    ):
        for batch, ms in totals.items():
            assert planner(profiles[model], batch, 1).one_device * 1e3 == pytest.approx(ms, abs=0.006)


def test_the_fastest_plan_and_the_freed_devices_of_vgg(profiles: dict[str, Profile]) -> None:
    vgg = planner(profiles["vgg"], 32)
    assert vgg.fastest().prediction.amplification == pytest.approx(1.35, abs=0.005)
    same_speed = vgg.cheapest(iteration=rules.by_name(vgg, "dp:8").prediction.iteration).prediction
    assert 8 - same_speed.device_time / same_speed.iteration == pytest.approx(3.6, abs=0.05)


def test_front_and_limits_agree_on_real_layers(profiles: dict[str, Profile]) -> None:
    for batch in (16, 32):
        vgg = BurstPlanner(profiles["vgg"], ProfileCost(profiles["vgg"], batch), 8)
        front = [p.prediction for p in vgg.front()]
        for limit in (1.0, 1.1, 1.25, 1.3, 1.5):
            found = vgg.fastest(amplification=limit).prediction
            assert found.iteration == pytest.approx(min(p.iteration for p in front if p.amplification <= limit + 1e-9))


def test_layer_times_follow_the_affine_law_within_a_few_per_cent(profiles: dict[str, Profile]) -> None:
    for model, mean in (("vgg", 0.030), ("wrn", 0.028)):
        laws = [law(layer) for layer in profiles[model].layers]
        assert sum(found.error for found in laws) / len(laws) <= mean * 1.2
