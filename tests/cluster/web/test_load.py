"""A long queue is shown at once, and no request, however odd, is an internal error."""

from __future__ import annotations

from tests.cluster.trial import load, trial


def test_a_long_queue_is_shown_quickly_and_fuzzed_requests_are_refused_in_order() -> None:
    with trial.cluster(devices=2, emulated=True) as client:
        said = load.queued(client, 150, threads=4, looks=5)
        # 200 ms for a thousand on an idle machine; this is a seventh of them on a busy one.
        assert said.status < 1.0, said
        codes = load.fuzz(client, 600, seed=1)
        assert sum(codes.values()) == 600
        assert not [code for code in codes if code >= 500 or code < 0], codes
        assert {200, 404, 422} <= set(codes), f"the trial reached too little: {codes}"
        after = client.status()
        assert all(d["ready"] for d in after["devices"]), "the devices did not notice"
        home = trial.home_of(client)
        assert home.key_file.stat().st_mode & 0o777 == 0o600
        assert {p.name for p in (home.path / "jobs").iterdir()} <= {str(i) for i in range(1, 2000)}
    assert trial.left(home) == []
