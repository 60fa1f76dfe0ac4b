"""The published traces: read in full, and simulated in full."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest

from dovetail.planning.sharing.pack import ClusterSize
from dovetail.planning.sharing.policies import policy
from dovetail.simulate.cluster import report, simulate
from dovetail.simulate.traces import read_trace

pytestmark = pytest.mark.reference


@pytest.mark.parametrize(
    ("name", "jobs", "widest"),
    [
        ("philly/philly.csv", 82247, 128),
        ("muri/trace1.csv", 1494, 32),
        ("muri/trace2.csv", 5755, 32),
        ("gavel/msr-seed0-6c71a0.trace", 2000, 32),
        ("pollux/workload-1.csv", 160, 32),
        ("pollux/workload-realistic-3.csv", 160, 16),
    ],
)
def test_every_published_trace_is_read_in_full(reference_data: Path, name: str, jobs: int, widest: int) -> None:
    trace = read_trace(reference_data / "traces" / name)
    assert len(trace.jobs) == jobs
    assert max(j.workers for j in trace.jobs) == widest
    assert trace.jobs[0].arrival == 0.0


def test_philly_is_mostly_jobs_of_one_worker(reference_data: Path) -> None:
    jobs = read_trace(reference_data / "traces/philly/philly.csv").jobs
    assert sum(j.workers == 1 for j in jobs) / len(jobs) == pytest.approx(0.93, abs=0.005)
    assert sum(j.gang_work for j in jobs) / 86400 == pytest.approx(40753, rel=0.001)


def test_all_of_philly_runs_on_2048_devices_and_gains_nothing_there(reference_data: Path) -> None:
    """At a fifth of the cluster's capacity nobody waits: sharing changes nothing, and must harm nobody."""
    jobs = [j.with_depths("ladder") for j in read_trace(reference_data / "traces/philly/philly.csv").jobs]
    began = time.process_time()
    outcome = simulate(jobs, ClusterSize(devices=2048), policy("jigsaw"))
    assert time.process_time() - began < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 * 2**20  # kilobytes
    found = report(outcome)
    assert outcome.level == "fluid" and found.jobs == 82247
    assert found.all.slowdown < 1.05 and found.all.queueing < 1.0


def test_muri_at_full_load_gains_from_sharing(reference_data: Path) -> None:
    jobs = read_trace(reference_data / "traces/muri/trace1.csv").jobs
    gang = report(simulate(jobs, ClusterSize(devices=128), policy("gang-fifo-backfill")))
    shared = report(simulate([j.with_depths("ladder") for j in jobs], ClusterSize(devices=128), policy("jigsaw")))
    assert shared.makespan < 0.9 * gang.makespan
    assert shared.all.mean < 0.5 * gang.all.mean
