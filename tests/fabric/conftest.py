from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.fabric import kernel


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests here that are marked `root` need the kernel; elsewhere they say why they do not run."""
    why = kernel.missing()
    for item in items:
        if why and Path(__file__).parent in item.path.parents and item.get_closest_marker("root"):
            item.add_marker(pytest.mark.skip(reason=why))
