"""Processes are killed at random: every job finishes with the losses of an undisturbed run; nothing is left behind."""

from __future__ import annotations

from .trial import trial


def test_jobs_survive_kills_of_executors_aggregators_and_the_coordinator_bit_for_bit() -> None:
    # At most a dozen kills, so that the test ends also on a machine that is slow to start processes again.
    found = trial.chaos(5, steps=50, devices=4, every=1.0, seed=3, limit=800.0, most=12)
    assert set(found.states.values()) == {"finished"}, found.reasons
    assert found.differ == [], f"curves changed after {found.killed}"
    assert sum(found.killed.values()) >= 3, f"too few kills: {found.killed}"
    assert found.leases == [], "no job that has ended has a lease"
    assert found.left == [], "no process and no shared memory outlives its cluster"
