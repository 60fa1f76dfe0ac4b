"""Where an iteration of a DDP module ends, also when backward passes run inside the backward pass."""

from __future__ import annotations

import pytest

from tests.ranks import run_all

from . import observe_scenarios

CASES = {
    "plain": {"reentrant": False},
    "reentrant": {"reentrant": True},
    "reentrant, static graph": {"reentrant": True, "static": True},
}


@pytest.fixture(scope="module")
def runs() -> list[list[dict[str, object]]]:
    return run_all([(observe_scenarios.watched, given) for given in CASES.values()])


@pytest.mark.parametrize("case", CASES)
def test_an_iteration_ends_when_all_gradients_are_there_and_reduced(
    runs: list[list[dict[str, object]]], case: str
) -> None:
    for rank in runs:
        assert rank[list(CASES).index(case)] == {"seen": [6, 6, 6], "same": [True] * 3, "hooks": 0}
