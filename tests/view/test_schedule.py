"""What is printed of a cluster study: times in the unit that suits them, and the verdict."""

from __future__ import annotations

from dataclasses import replace

from dovetail.core.job import Job, JobPhase
from dovetail.planning.sharing.pack import ClusterSize
from dovetail.simulate.cluster.study import contenders, study
from dovetail.view.schedule import span, verdict


def test_times_have_the_unit_that_suits_them() -> None:
    assert [span(x) for x in (4.5, 738, 11520, 950400)] == ["4.50 s", "12.3 min", "3.20 h", "11.0 d"]


def test_the_verdict_is_that_of_all_samples() -> None:
    phases = [JobPhase(iterations=50 + 25 * (i % 7), workers=1 + 3 * (i % 3)) for i in range(30)]
    jobs = [
        Job(name=str(i), arrival=4.0 * i, phases=(phase,), forward=0.1, backward=0.2, off_device=0.1)
        for i, phase in enumerate(phases)
    ]
    who = contenders("jigsaw,gang-fifo-backfill", spb="ladder")
    cells = study(jobs, ClusterSize(devices=16), who, loads=[0.9], samples=2, level="fluid")
    turned = [replace(c, reports=c.reports[::-1]) for c in cells]
    assert verdict(*turned) == verdict(*cells)
    first = [replace(c, reports=c.reports[:1]) for c in cells]
    assert verdict(*first) != verdict(*cells)
