"""What the tests of training share: the devices that scenarios run on."""

from __future__ import annotations

import pytest

from dovetail.emulate.accelerator import extension


@pytest.fixture(scope="session")
def accelerator() -> str:
    """The emulated accelerator, built; skips where there is no C++ compiler."""
    if extension.compiler() is None:
        pytest.skip("the emulated accelerator needs a C++ compiler")
    extension.built()  # once, before ranks that have to end in time need it
    return "emu"


@pytest.fixture(scope="module", params=["cpu", "emu"])
def device(request: pytest.FixtureRequest) -> str:
    """The CPU, then the emulated accelerator."""
    return str(request.getfixturevalue("accelerator") if request.param == "emu" else request.param)
