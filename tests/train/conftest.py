"""What the tests of training share: the devices that scenarios run on."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", params=["cpu", "emu"])
def device(request: pytest.FixtureRequest) -> str:
    """The CPU, then the emulated accelerator."""
    return str(request.getfixturevalue("accelerator") if request.param == "emu" else request.param)
