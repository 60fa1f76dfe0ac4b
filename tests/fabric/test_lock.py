"""Whoever changes a fabric's tables holds its lock: nobody writes back what somebody else has changed meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from dovetail.core.errors import Error
from dovetail.fabric import emulation, netns, wiring
from dovetail.fabric.lock import RUN, FabricLock
from dovetail.fabric.routing import shapes

pytestmark = pytest.mark.root
RING = shapes.ring(3)


@pytest.fixture
def fabric() -> Iterator[emulation.Fabric]:
    with emulation.temporary(RING) as made:
        yield made


def test_a_heartbeat_that_ends_during_an_update_does_not_roll_the_tables_back(fabric: emulation.Fabric) -> None:
    """The heartbeat's process has read the settings; before it writes them back, another one installs a policy."""
    other = emulation.find(fabric.name)
    before, read = fabric.plane.config()["generation"], other.plane.config
    has_read, updated = threading.Event(), threading.Event()

    def read_slowly() -> dict[str, int]:
        values = read()
        has_read.set()
        updated.wait(1.0)
        return values

    def update() -> None:
        fabric.use({})
        updated.set()

    other.plane.config = read_slowly  # type: ignore[method-assign]
    ending = threading.Thread(target=lambda: other.plane.configure(silence=0))
    updating = threading.Thread(target=update)
    ending.start()
    assert has_read.wait(10)
    updating.start()
    ending.join(30)
    updating.join(30)
    other.close()
    assert fabric.plane.config()["generation"] == before + 1


def holder(name: str) -> subprocess.Popen[str]:
    """A process that holds the lock of a fabric."""
    script = (
        "import time\n"
        "from dovetail.fabric.lock import FabricLock\n"
        f"with FabricLock({name!r}).held():\n"
        "    print('held', flush=True); time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "held\n"
    return process


def test_whoever_waits_in_vain_is_told_who_holds_the_lock_and_a_killed_holder_holds_nothing(
    fabric: emulation.Fabric,
) -> None:
    process = holder(fabric.name)
    try:
        waiting = FabricLock(fabric.name, patience=0.1)
        with pytest.raises(Error) as refused, waiting.held():
            pass
        line = f"fabric {fabric.name!r}: process {process.pid} has been changing it for 0.1 s; try again"
        assert str(refused.value) == line
        assert fabric.failed() == frozenset(), "reading needs no lock"
    finally:
        process.kill()
        process.communicate()
    with waiting.held():
        pass
    assert fabric.use({}) == fabric.plane.config()["generation"]


def test_a_thread_that_holds_the_lock_may_take_it_again_and_another_thread_may_not(fabric: emulation.Fabric) -> None:
    lock = FabricLock(fabric.name, patience=0.1)
    refused: list[Error] = []

    def take() -> None:
        try:
            with lock.held():
                pass
        except Error as e:
            refused.append(e)

    with lock.held(), lock.held():
        other = threading.Thread(target=take)
        other.start()
        other.join(30)
    assert len(refused) == 1
    take()
    assert len(refused) == 1


def test_a_lock_goes_with_its_fabric() -> None:
    with emulation.temporary(RING) as fabric:
        fabric.use({})
        path = RUN / f"{fabric.name}.lock"
        assert path.exists()
    assert not path.exists()
    with FabricLock(fabric.name).held():  # as a heartbeat that ends after its fabric
        assert path.exists()
    assert not path.exists()


def test_two_processes_that_build_one_fabric_do_not_meet(fabric: emulation.Fabric) -> None:
    """Both read that there is none; only one may go on."""
    name = f"{fabric.name[:12]}two"
    script = (
        "from dovetail.core.errors import Error\n"
        "from dovetail.fabric import emulation\n"
        "from dovetail.fabric.routing import shapes\n"
        "try:\n"
        f"    emulation.up(shapes.ring(3), name={name!r}).close()\n"
        "except Error as e:\n"
        "    print(e)\n"
    )
    builders = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    try:
        said = [b.communicate(timeout=120)[0] for b in builders]
        assert all(not line or "is being built by process" in line for line in said)
        found = emulation.find(name)
        assert len(netns.named(f"dvf-{name}-")) == 6
        assert fabric.names.run != found.names.run and set(found.link_states()) == {"up"}
        found.close()
    finally:
        emulation.down(name)


def test_a_fabric_that_was_removed_while_it_was_built_leaves_nothing_and_is_not_described(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, attach = f"gone{os.getpid()}", wiring.attach

    def removed_meanwhile(*arguments: Any) -> None:
        attach(*arguments)
        emulation.down(name)

    monkeypatch.setattr(wiring, "attach", removed_meanwhile)
    with pytest.raises(Error, match="was removed while it was being built"):
        emulation.up(RING, name=name)
    assert name not in emulation.standing() and not (RUN / f"{name}.lock").exists()


def test_a_policy_for_a_fabric_that_was_removed_is_one_line(fabric: emulation.Fabric) -> None:
    other = emulation.find(fabric.name)
    emulation.down(fabric.name)
    with pytest.raises(Error, match="has been removed"):
        other.use({})
    other.close()
    assert fabric.name not in emulation.standing()
