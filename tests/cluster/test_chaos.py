"""kill -9 of anything, again and again: every job finishes with the curve it would have had, and nothing is left."""

from __future__ import annotations

from .trial import trial


def test_jobs_survive_kills_of_executors_aggregators_and_the_coordinator_bit_for_bit() -> None:
    # At most a dozen kills, so that the test ends in time on a machine that is slow to start processes again.
    found = trial.chaos(5, steps=50, devices=4, every=1.0, seed=3, limit=120.0, most=12)
    assert set(found.states.values()) == {"finished"}, found.reasons
    assert found.differ == [], f"curves changed after {found.killed}"
    assert sum(found.killed.values()) >= 3, f"the trial was too short to be one: {found.killed}"
    assert found.leases == [], "no device is held by a job that has ended"
    assert found.left == [], "no process and no shared memory outlives its cluster"
