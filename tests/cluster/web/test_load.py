"""A real cluster under load: a long queue is shown, and no fuzzed request is an internal error."""

from __future__ import annotations

from tests.cluster.trial import load, trial


def test_a_long_queue_is_shown_and_fuzzed_requests_are_refused() -> None:
    with trial.cluster(devices=2, emulated=True) as client:
        load.queued(client, 150, threads=4, looks=5)  # fails if one is not shown; the benchmark has the times
        codes = load.fuzz(client, 600, seed=1)
        assert sum(codes.values()) == 600
        assert not [code for code in codes if code >= 500 or code < 0], codes
        assert {200, 404, 422} <= set(codes), f"too few kinds of answers: {codes}"
        after = client.status()
        assert all(d["ready"] for d in after["devices"]), "the devices are not disturbed"
        home = trial.home_of(client)
        assert home.key_file.stat().st_mode & 0o777 == 0o600
        assert {p.name for p in (home.path / "jobs").iterdir()} <= {str(i) for i in range(1, 2000)}
    assert trial.left(home) == []
