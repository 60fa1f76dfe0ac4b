"""Segments: cut points given by hand, and what autograd keeps of a forward pass at each depth."""

from __future__ import annotations

import pytest

from dovetail.core.errors import Error
from dovetail.train.partial.segments import cut

from .depth_models import build, cuts, inputs
from .depth_scenarios import kept_bytes


def test_cut_points_that_do_not_fit_are_one_line() -> None:
    model, batch = build("skips"), inputs("skips", 3, 0)
    with pytest.raises(Error, match="expected the name of a module that runs in forward"):
        cut(model, batch, at=["nowhere"], depths=[1, 2])
    with pytest.raises(Error, match="expected cut points in execution order"):
        cut(model, batch, at=["blocks.4", "blocks.2"], depths=[1, 2, 3])
    with pytest.raises(Error, match="nobody would train it"):
        cut(model, batch, at=cuts("skips", 3, 8), depths=[1, 2])


@pytest.mark.parametrize("kind", ["cnn", "transformer"])
def test_activations_before_the_cut_are_not_kept(kind: str) -> None:
    kept = [kept_bytes(kind, depth, 4) for depth in (1, 2, 3, 4)]
    per_segment = kept[3] - kept[2]
    assert per_segment > 0
    # Blocks are alike: a segment more keeps the same amount more, and depth 1 no more than one segment and the head.
    assert kept[2] - kept[1] == pytest.approx(per_segment, rel=0.2)
    assert kept[1] - kept[0] == pytest.approx(per_segment, rel=0.2)
    assert kept[0] <= 1.6 * per_segment
