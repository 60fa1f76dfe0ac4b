"""What tests in every room share."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Machines differ in speed: a slow example is not a failing one.
settings.register_profile("dovetail", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dovetail")

# A shell starts what runs in its background deaf to Ctrl-C, and processes inherit that; tests interrupt their own.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def reference_data() -> Path:
    """Published data beside the checkout; tests that need it skip where it is absent."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the reference data (../shared/data) is not here")
    return folder
