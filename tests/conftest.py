"""What tests in every room share."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Machines differ in speed: a slow example is not a failing one. The same examples every time, so that whoever changes
# something is told of their own change; HYPOTHESIS=explore looks for new ones.
settings.register_profile("dovetail", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("explore", settings.get_profile("dovetail"), derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS", "dovetail"))

# A shell starts what runs in its background deaf to Ctrl-C, and processes inherit that; tests interrupt their own.
signal.signal(signal.SIGINT, signal.default_int_handler)


LONGEST = (
    "test_examples.py",
    "demo/test_demo.py",
    "cluster/web/test_load.py",
    "train/run/test_launcher.py",
    "train/partial/test_module.py",
    "train/data_parallel/test_module.py",
    "cluster/executor/test_main_real.py",
    "cluster/test_examples.py",
    "docs/test_tutorial.py",
    "cluster/engines/test_ray.py",
    "train/burst/test_module.py",
    "reference/test_cluster_traces.py",
    "train/data_parallel/test_forward_overlap.py",
    "simulate/cluster/test_fluid.py",
    "train/run/test_adopt.py",
    "emulate/test_contest.py",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files first: several run at a time, and none should be left to run alone at the end."""
    if "study" not in config.getoption("markexpr"):
        for item in items:
            if item.get_closest_marker("study") is not None:
                item.add_marker(pytest.mark.skip(reason="a study of minutes: pytest -m study"))
    here = Path(__file__).parent
    place = {here / name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


@pytest.fixture(scope="session")
def reference_data() -> Path:
    """Published data beside the checkout; tests that need it skip where it is absent."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the published data is not beside the checkout")
    return folder


@pytest.fixture(scope="session")
def accelerator() -> str:
    """The emulated accelerator, built; skips where there is no C++ compiler."""
    from dovetail.emulate.accelerator import extension

    if extension.compiler() is None:
        pytest.skip("the emulated accelerator needs a C++ compiler")
    extension.built()  # once, before ranks that have to end in time need it
    return "emu"
