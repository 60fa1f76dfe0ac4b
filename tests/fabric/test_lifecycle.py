"""A fabric is built whole or not at all, is found again by its commands, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dovetail.core.errors import Error
from dovetail.fabric import emulation, hooks, kernel, netns
from dovetail.fabric.lock import RUN, FabricLock
from dovetail.fabric.routing import shapes
from dovetail.fabric.wiring import Names

pytestmark = pytest.mark.root
TREE = shapes.fat_tree(4, hosts=2)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dovetail", "fabric", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_commands_work_one_after_the_other(tmp_path: Path) -> None:
    name = f"c{os.getpid()}"
    topology = tmp_path / "t.yaml"
    topology.write_text("shape: {kind: ring, size: 4}\npolicy: {classes: [{name: x, from: h0, to: h2, via: s1}]}\n")
    try:
        made = command("up", str(topology), "--name", name, "--json")
        assert made.returncode == 0 and json.loads(made.stdout)["hosts"]["h0"] == "10.0.0.1", made.stderr
        assert "h0 → s0 → s1 → s2 → h2" in command("trace", "h0", "h2", "--name", name).stdout
        assert command("fail", "s0-s1", "--name", name).stdout == "s0-s1: down\n"
        assert json.loads(command("status", "--name", name, "--json").stdout)["links"]["s0-s1"] == "down"
        assert "s3 → s2 → s1 → s2" in command("trace", "h0", "h2", "--name", name).stdout
        checked = command("check", "--name", name, "--json")
        assert checked.returncode == 0 and json.loads(checked.stdout)["holds"]
        assert command("fail", "s1-s2", "--name", name).returncode == 0
        assert "no compliant path survives (down: s0-s1, s1-s2)" in command("trace", "h0", "h2", "--name", name).stdout
        assert command("heal", "--name", name).stdout == "up: s0-s1, s1-s2\n"
        ping = command("exec", "--name", name, "h0", "--", "ping", "-c", "1", "-W", "2", "10.0.0.9")
        assert ping.returncode == 0, ping.stdout
        wrong = command("fail", "s0-s9", "--name", name)
        assert wrong.returncode == 1 and wrong.stderr.count("\n") == 1
    finally:
        gone = command("down", "--name", name)
    assert gone.returncode == 0 and "removed 8 namespaces" in gone.stdout
    assert not netns.named(f"dvf-{name}-")
    assert command("status", "--name", name).stderr == f"dovetail: no fabric '{name}' is up\n"


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_down_cleans_up_after_a_kill_and_touches_nothing_else() -> None:
    name, stranger = f"k{os.getpid()}", f"dovetail-test-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", stranger], check=True)
    script = (
        "from dovetail.fabric import emulation\n"
        "from dovetail.fabric.routing import shapes\n"
        f"f = emulation.up(shapes.fat_tree(8), name={name!r})\n"
        "f.run(0, ['sleep', '1000']); print('up', flush=True)\n"
        "import time; time.sleep(1000)\n"
    )
    try:
        for made in (1, 60, 112, None):  # namespaces when it is killed; there are 112 in all, devices come after them
            child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
            if made is None:
                assert child.stdout and child.stdout.readline() == "up\n"
            else:
                end = time.monotonic() + 60
                while len(netns.named(f"dvf-{name}-")) < made:
                    assert time.monotonic() < end
                    time.sleep(0.002)
            child.send_signal(signal.SIGKILL)
            child.wait()
            assert child.stdout
            child.stdout.close()
            names = netns.named(f"dvf-{name}-")
            inside = netns.processes_in(names)
            emulation.down(name)
            assert not netns.named(f"dvf-{name}-")
            assert not [pid for pid in inside if alive(pid)]
        assert (netns.WHERE / stranger).exists()
        assert not (RUN / f"{name}.json").exists()
    finally:
        emulation.down(name)
        subprocess.run(["ip", "netns", "del", stranger], check=True)


def test_down_finds_what_a_kill_left_half_written_and_nothing_of_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    name, stranger = f"l{os.getpid()}", f"dvf-Stranger-{os.getpid()}"
    RUN.mkdir(parents=True, exist_ok=True)
    torn = RUN / f".{name}.json.torn.json"
    torn.write_text("{")
    for namespace in (f"dvf-{name}-1-s0", stranger):
        subprocess.run(["ip", "netns", "add", namespace], check=True)
    try:
        assert name not in emulation.running() and name in emulation.standing()
        assert all(emulation.VALID_NAME.fullmatch(n) for n in emulation.standing())
        with monkeypatch.context() as someone:
            someone.setattr(os, "geteuid", lambda: 1000)
            with pytest.raises(Error, match="needs root"):
                emulation.down(name)
        assert emulation.down(name) == 1
        assert not torn.exists() and name not in emulation.standing()
        assert (netns.WHERE / stranger).exists()
    finally:
        emulation.down(name)
        subprocess.run(["ip", "netns", "del", stranger], check=True)


def test_two_processes_do_not_build_one_fabric() -> None:
    name = f"b{os.getpid()}"
    ring = shapes.ring(3)
    with FabricLock(name).held():
        emulation.write_description(Names(name, f"{name}-{os.getppid()}"), ring, {}, "building")
    try:
        with pytest.raises(Error, match=rf"is being built by process {os.getppid()}"):
            emulation.up(ring, name=name)
    finally:
        emulation.down(name)


def test_a_program_that_cannot_be_loaded_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise Error("no")

    monkeypatch.setattr(kernel, "BpfObject", refused)
    with pytest.raises(Error, match="no"):
        emulation.up(TREE, name="refused")
    assert "refused" not in emulation.standing()


def test_nothing_is_built_for_a_policy_that_contradicts_itself() -> None:
    with pytest.raises(Error, match="contradict"):
        emulation.up(TREE, {"classes": [{"from": "h0", "to": "h15", "via": "core0", "avoid": "core0"}]}, name="never")
    assert not netns.named("dvf-never-") and "never" not in emulation.running()


def test_a_failed_build_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise Error("no")

    monkeypatch.setattr(hooks, "attach", broken)
    with pytest.raises(Error, match="no"):
        emulation.up(TREE, name="broken")
    assert not netns.named("dvf-broken-") and "broken" not in emulation.running()
