"""Waits for collectives of a burst job, in a job of one rank."""

from __future__ import annotations

import pytest
import torch

from dovetail.core.errors import Error
from dovetail.train.burst.communicator import Communicator


class Ended:
    """A collective that succeeds or fails just after a slice of the wait for it has run out."""

    def __init__(self, failure: str = "") -> None:
        self.failure, self.waits = failure, 0

    def wait(self, timeout: object) -> None:
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")
        if self.failure:
            raise RuntimeError(self.failure)

    def is_completed(self) -> bool:
        return True


def test_a_collective_that_ends_just_after_a_wait_ran_out_counts_by_its_result() -> None:
    comm = Communicator(torch.device("cpu"), timeout=5.0)
    comm.wait(Ended(), "weights")  # type: ignore[arg-type]
    with pytest.raises(Error, match="weights: a rank is lost or unreachable \\(closed by peer\\)"):
        comm.wait(Ended("closed by peer"), "weights")  # type: ignore[arg-type]
