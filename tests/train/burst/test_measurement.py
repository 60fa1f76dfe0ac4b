"""Measured links of a burst job."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from dovetail.core.errors import Error
from dovetail.train.burst import measurement


@pytest.mark.parametrize(("batch", "ranks"), [(1, (1, 2)), (2, (2, 4)), (0, (1, 2))])
def test_links_are_not_measured_with_samples_that_stay_where_they_are(
    batch: int, ranks: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    said = f"batch: expected so many samples that some move between {ranks[0]} and {ranks[1]} ranks, got {batch}"
    with pytest.raises(Error, match=said):
        measurement.measure_links(batch, max_bytes=1024, max_moved=1024, counts=ranks)
