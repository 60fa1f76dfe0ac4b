"""Presets: published constants, the ring law, and one clear line for a name that does not exist."""

import subprocess
import sys

import pytest

from dovetail.core import files
from dovetail.core.errors import Error
from dovetail.core.network import COLLECTIVES, Network
from dovetail.measure import PRESETS, preset


def test_importing_measure_imports_no_torch() -> None:
    code = "import sys, dovetail.measure as m; m.preset('10gbe-16'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_public_names_are_functions_even_after_their_modules_were_imported() -> None:
    import dovetail.measure
    from dovetail.measure.collectives import network
    from dovetail.measure.profiler import profile

    assert dovetail.measure.profile is profile
    assert dovetail.measure.network is network


def test_ten_gigabit_ethernet_follows_the_published_ring_simulation() -> None:
    cost = preset("10gbe-16").affine("all_reduce")
    assert cost.latency == pytest.approx(30 * 45.25e-6)
    assert cost.seconds_per_byte == pytest.approx(30 / 16 * 1.2 / (9 * 2**30 / 8))


def test_infiniband_gives_back_the_fit_it_was_derived_from() -> None:
    cost = preset("infiniband-16").affine("all_reduce")
    assert cost.latency == pytest.approx(2.36e-4) and cost.seconds_per_byte == pytest.approx(4.06e-10)


def test_nvlink_gives_back_its_published_latency_and_bus_bandwidth() -> None:
    cost = preset("nvlink-8").affine("all_reduce")
    assert cost.latency == pytest.approx(20e-6)
    assert 2 * 7 / 8 / cost.seconds_per_byte == pytest.approx(235e9)


@pytest.mark.parametrize("fabric", PRESETS)
@pytest.mark.parametrize("ranks", [2, 3, 16, 2048])
def test_scaling_a_preset_to_other_ranks_equals_the_preset_of_those_ranks(fabric: str, ranks: int) -> None:
    here, there = preset(f"{fabric}-64"), preset(f"{fabric}-{ranks}")
    for collective in COLLECTIVES:
        scaled, direct = here.affine(collective, ranks=ranks), there.affine(collective)
        assert scaled.latency == pytest.approx(direct.latency)
        assert scaled.seconds_per_byte == pytest.approx(direct.seconds_per_byte)


def test_scatter_and_gather_together_cost_an_all_reduce() -> None:
    network = preset("100gbe-128")
    parts = network.cost("reduce_scatter")(10**7) + network.cost("all_gather")(10**7)
    assert parts == pytest.approx(network.cost("all_reduce")(10**7))


@pytest.mark.parametrize("fabric", PRESETS)
def test_every_preset_says_that_nothing_was_measured_and_survives_storage(fabric: str) -> None:
    network = preset(f"{fabric}-16")
    assert not network.measured
    assert network.source.startswith("preset, not measured")
    assert files.decode(files.encode(network), Network) == network
    if fabric in ("25gbe", "100gbe"):
        assert "assumed" in network.source


@pytest.mark.parametrize("name", ["10gbe", "foo-16", "10gbe-1", "10gbe-0", "10gbe-5000", "", "10gbe-16-2", "10gbe--16"])
def test_a_wrong_name_gets_one_line_that_lists_what_exists(name: str) -> None:
    with pytest.raises(Error) as caught:
        preset(name)
    text = str(caught.value)
    assert "\n" not in text
    assert all(fabric in text for fabric in PRESETS)
    assert "2 to 2048" in text
