"""Stragglers: limited after some slow iterations in a row, free again after as many healthy ones."""

from __future__ import annotations

import pytest

from dovetail.core.errors import Error
from dovetail.planning.depth.straggler import Pace, Stragglers


def test_a_worker_is_slow_after_patience_and_healthy_again_after_patience() -> None:
    pace = Pace(Stragglers(slow=1.5, patience=3), workers=4, segments=4, forward=1.0, backward=2.0)

    def seconds(slowness: float, depths: tuple[int, ...]) -> list[float]:
        return [(1 + 2 * d / 4) * (slowness if w == 3 else 1.0) for w, d in enumerate(depths)]

    for _ in range(2):
        assert pace.update(seconds(2.0, (1, 2, 3, 4)), (1, 2, 3, 4)) == []
    (line,) = pace.update(seconds(2.0, (1, 2, 3, 4)), (1, 2, 3, 4))
    # Depth 1 at half the speed takes 2 × 1.5, as long as a healthy worker at depth 4.
    assert pace.limits == (4, 4, 4, 1) and "worker 3 takes 2 times the usual time: depth at most 1 of 4" in line
    assert pace.update(seconds(1.4, (1, 2, 4, 1)), (1, 2, 4, 1)) == [], "better, but not well"
    for _ in range(2):
        assert pace.update(seconds(1.0, (1, 2, 4, 1)), (1, 2, 4, 1)) == []
    assert pace.update(seconds(1.0, (1, 2, 4, 1)), (1, 2, 4, 1)) == ["worker 3 keeps up again: any depth"]
    assert pace.limits == (4, 4, 4, 4)


def test_different_depths_alone_make_nobody_slow() -> None:
    pace = Pace(Stragglers(slow=1.2, patience=1), workers=4, segments=4, forward=1.0, backward=2.0)
    assert pace.update([1.5, 2.0, 2.5, 3.0], (1, 2, 3, 4)) == [] and pace.limits == (4,) * 4


def test_a_wrong_option_is_one_line() -> None:
    with pytest.raises(Error, match=r"Stragglers\.slow: expected above 1"):
        Stragglers(slow=1.0)
