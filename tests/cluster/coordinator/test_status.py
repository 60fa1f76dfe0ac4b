"""The reasons for which a job waits or is slow, as `dovetail cluster why` prints them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from dovetail.cluster.coordinator import status
from dovetail.cluster.coordinator.coordinator import Coordinator
from dovetail.cluster.coordinator.job_state import ActiveJob
from dovetail.cluster.coordinator.placement import Placement
from dovetail.cluster.coordinator.strikes import Strike, StrikeRecord
from dovetail.cluster.transport.messages import Progress
from dovetail.planning.sharing.policies import POLICIES

from .test_placement import GIB, active, admit, devices


def explain(
    placement: Placement, job: ActiveJob, queue: Sequence[ActiveJob] = (), jobs: Sequence[ActiveJob] = ()
) -> str:
    ready = set(placement.devices)
    known = {j.id: j for j in (*jobs, job)}
    c = SimpleNamespace(jobs=known, placement=placement, ready=lambda: ready, executors={})
    return " | ".join(status.reasons(cast(Coordinator, c), job, queue))


@pytest.mark.parametrize(
    ("held", "asked", "expected"),
    [
        ([], active(9, gang=5), "width: needs 5 devices, the cluster offers 2"),
        ([], active(9, persistent=99 * GIB), "memory: needs"),
        (
            [active(1, persistent=15 * GIB), active(2, persistent=15 * GIB)],
            active(9, persistent=2 * GIB),
            "memory: 0 devices",
        ),
        ([active(n, 2, off=9.0) for n in range(1, 5)], active(9, off=9.0), "residents: 0 devices have fewer than 4"),
        ([active(1, 2), active(2, 2)], active(9), "duty: 0 devices stay under 2.5"),
        ([active(1, 2, share="foreground")], active(9), "promise: 0 devices are free of jobs of promised speed"),
        ([active(1, 2)], active(9, share="foreground"), "promise: 0 devices are free of other jobs"),
    ],
)
def test_the_reasons_say_what_a_waiting_job_lacks(held: list[ActiveJob], asked: ActiveJob, expected: str) -> None:
    placement = Placement(devices(2), POLICIES["jigsaw"])
    assert len(admit(placement, held)) == len(held)
    assert admit(placement, [asked]) == []
    assert expected in explain(placement, asked, [asked])


def test_the_reasons_name_locality_where_no_node_has_enough() -> None:
    placement = Placement(devices(2, 2), POLICIES["jigsaw"])
    assert len(admit(placement, [active(1, share="foreground"), active(2, share="foreground")])) == 2
    taken = [j for j in (active(3, 2),) if admit(placement, [j])]
    assert taken or "node" in explain(placement, active(3, 2))


def test_the_reasons_name_the_jobs_before_it_and_its_strikes() -> None:

    placement = Placement(devices(1), POLICIES["jigsaw"])
    held = [active(1), active(2)]
    admit(placement, held)
    queue = [active(3), active(4), active(5)]
    queue[2].record = StrikeRecord((Strike(3, "it raised"),), 1)
    found = explain(placement, queue[2], queue)
    assert "priority: job 3 (job-3) and 1 more before it" in found
    assert "strikes: 1 so far, the last: it raised" in found
    queue[2].retry_at = time.monotonic() + 2000.0
    assert "s after it raised" in explain(placement, queue[2], queue)
    fresh = active(6)
    fresh.described, fresh.connected = None, False
    assert "preparing: its file is being loaded" in explain(placement, fresh, [fresh])
    fresh.process = False
    assert "preparing: its turn to be loaded has not come" in explain(placement, fresh, [fresh])
    fresh.state = "paused"
    assert explain(placement, fresh).startswith("paused")


def test_the_reasons_of_a_running_job_name_who_shares_its_devices_and_its_slow_down() -> None:
    placement = Placement(devices(1), POLICIES["jigsaw"])
    first, second = active(1), active(2, share="background")
    admit(placement, [first, second])
    first.state = second.state = "running"
    first.progress = Progress(
        job="1",
        attempt=1,
        iteration=5,
        loss=1.0,
        checkpoint=0,
        task_seconds=(0.4,),
        off_device=0.1,
        iteration_seconds=0.6,
    )
    found = explain(placement, first, jobs=[second])
    assert "shares device 0 with job 2 (job-2) (background), duty 1.00" in found
    assert "50% of what is asked" in found
    assert "0.6 s per iteration, 0.5 s alone: 20.0% slower" in found
    placement.release(second)
    assert "alone on device 0" in explain(placement, first)
