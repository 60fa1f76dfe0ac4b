"""Training over the fabric goes on while links break: no iteration is lost and the losses are the undisturbed ones."""

from __future__ import annotations

import pytest

from dovetail.core.errors import Error
from dovetail.fabric import emulation
from dovetail.fabric.disturbed import demo, disturbed_run
from dovetail.fabric.routing import shapes

pytestmark = pytest.mark.root
HOSTS = [0, 3]
TREE = shapes.fat_tree(4)


def test_the_loss_curve_is_the_undisturbed_one() -> None:
    events = disturbed_run.disturbances(TREE, iterations=24, failures=4, hosts=HOSTS, hold=3)
    assert len(events) == 8
    with emulation.temporary(TREE) as fabric:
        calm = disturbed_run.run(fabric, HOSTS, iterations=24, width=128)
        rough = disturbed_run.run(fabric, HOSTS, iterations=24, width=128, events=events)
        assert fabric.failed() == frozenset()
    assert rough.events == events
    assert len(rough.losses) == 24 and rough.losses == calm.losses
    assert len(set(calm.losses)) == 24  # it did compute


def test_a_rank_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        emulation.temporary(shapes.ring(3)) as fabric,
        pytest.raises(Error, match=r"^rank \d on the fabric failed: ") as e,
    ):
        disturbed_run.run(fabric, HOSTS[:1], iterations=1, worker=["-m", "dovetail.no_such_worker"])
    assert "\n" not in str(e.value)


def test_disturbances_always_heal_what_they_break() -> None:
    for iterations in (10, 30, 100):
        down: set[int] = set()
        hosts = [0] * (iterations % 4)
        for event in disturbed_run.disturbances(TREE, iterations=iterations, failures=8, hosts=hosts):
            assert 0 < event.iteration < iterations
            (down.add if event.action == "fail" else down.discard)(event.link)
            assert len(down) <= 1
        assert not down


def test_the_demonstration_breaks_links_and_tells_that_nothing_was_lost() -> None:
    told: list[str] = []
    facts = demo.run(iterations=14, failures=1, ranks=2, tell=told.append)
    system = facts["systems"]["dovetail"]
    assert facts["failures"] == 1 and facts["check"]["holds"]
    assert system["same_losses"] and system["steps"] == 14
    assert any("identical to the undisturbed run" in line for line in told)
