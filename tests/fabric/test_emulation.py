"""A fabric of namespaces carries real traffic, keeps its promises while links break, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail.core.errors import Error
from dovetail.fabric import check, emulate, kernel, netns, shapes
from dovetail.fabric.dataplane import addresses
from dovetail.fabric.heartbeat import Heartbeat

pytestmark = pytest.mark.root
TREE = shapes.fat_tree(4, hosts=2)
POLICY = {
    "tenants": {"red": ["h2", "h3"]},
    "classes": [{"name": "guarded", "from": "h0", "to": "h15", "via": "core0"}],
}


@pytest.fixture(scope="module")
def shared() -> Iterator[emulate.Fabric]:
    with emulate.temporary(TREE, POLICY) as made:
        yield made


@pytest.fixture
def fabric(shared: emulate.Fabric) -> Iterator[emulate.Fabric]:
    yield shared
    for link in shared.failed():
        shared.heal(link)
    if shared.document is not POLICY:
        shared.use(POLICY)


def sockets(f: emulate.Fabric, host: int, family: int, kind: int) -> socket.socket:
    with netns.inside(f.names.host(host)):
        made = socket.socket(family, kind)
    made.settimeout(10)
    return made


def transfer(f: emulate.Fabric, a: int, b: int, data: bytes, family: int = socket.AF_INET) -> bytes:
    """Sends bytes over TCP from host to host."""
    server = sockets(f, b, family, socket.SOCK_STREAM)
    client = sockets(f, a, family, socket.SOCK_STREAM)
    got = bytearray()

    def take() -> None:
        peer, _ = server.accept()
        with peer:
            peer.settimeout(10)
            while part := peer.recv(1 << 16):
                got.extend(part)

    with contextlib.closing(server), contextlib.closing(client):
        server.bind(("", 0))
        server.listen()
        taker = threading.Thread(target=take)
        taker.start()
        address = addresses(b).v6 if family == socket.AF_INET6 else addresses(b).v4
        client.connect((address, server.getsockname()[1]))
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        taker.join(20)
    return bytes(got)


def checksum_errors(f: emulate.Fabric, host: int) -> int:
    with netns.inside(f.names.host(host)):
        text = Path("/proc/thread-self/net/snmp").read_text()
    head, values = [line.split()[1:] for line in text.splitlines() if line.startswith("Tcp:")]
    return int(dict(zip(head, values, strict=True))["InCsumErrors"])


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_tcp_arrives_intact_with_right_checksums(fabric: emulate.Fabric, family: int) -> None:
    data = random.Random(1).randbytes(1 << 20)
    assert transfer(fabric, 0, 15, data, family) == data
    assert transfer(fabric, 15, 1, data, family) == data
    assert checksum_errors(fabric, 15) == checksum_errors(fabric, 1) == 0


@pytest.mark.parametrize("mtu", [1500, 9000])
def test_full_sized_packets_pass_unfragmented(mtu: int) -> None:
    """A host's MTU is what the topology says; the links inside are wider by the header."""
    line = shapes.ring(3, mtu=mtu)
    with emulate.temporary(line) as f:
        a, b = (sockets(f, h, socket.AF_INET, socket.SOCK_DGRAM) for h in (0, 1))
        with contextlib.closing(a), contextlib.closing(b):
            b.bind(("", 5000))
            a.setsockopt(socket.IPPROTO_IP, 10, 2)  # IP_MTU_DISCOVER: never fragment
            body = os.urandom(mtu - 28)
            a.sendto(body, (addresses(1).v4, 5000))
            assert b.recv(65536) == body
            with pytest.raises(OSError, match="Message too long"):
                a.sendto(body + b"x", (addresses(1).v4, 5000))
            a.setsockopt(socket.IPPROTO_IP, 10, 0)  # fragments are put together again at the far end
            a.sendto(body * 3, (addresses(1).v4, 5000))
            assert b.recv(65536) == body * 3


def test_every_pair_agrees_with_the_oracle_while_links_break(fabric: emulate.Fabric) -> None:
    rng = random.Random(3)
    with check.Prober(fabric) as prober:
        for n in (0, 1, 3, 5):
            for link in rng.sample(range(len(TREE.links)), n):
                fabric.fail(link, how=rng.choice(["down", "drained"]), end=rng.randrange(2))
            assert len(fabric.failed()) == n
            report = check.check(fabric, flows=1, seed=n, v6=bool(n % 2), prober=prober)
            assert report.holds, (report.violations + report.loops + report.lost)[:3]
            assert report.delivered > 100 and report.denied > 50
            for link in fabric.failed():
                fabric.heal(link)


def test_check_probes_classes_of_one_port_and_notices_what_is_not_in_force(fabric: emulate.Fabric) -> None:
    document = {
        "classes": [
            {"from": "h0", "to": "h15", "port": 29500, "via": "core0"},
            {"from": "h4", "to": "h12", "prefer": "core1"},
        ]
    }
    fabric.use(document)
    fabric.plane.forget(TREE)
    assert "core0" in check.trace(fabric, 0, 15, port=29500).walk
    report = check.check(fabric, flows=4)
    assert report.holds and report.probes == 4 * (16 * 15 + 2)
    fabric.plane.install(TREE, emulate.compile_policy({}, TREE))  # behind its back
    report = check.check(fabric, flows=4)
    assert not report.holds and not report.loops and not report.lost
    assert {v.split(":")[0] for v in report.violations} <= {"h0 to h15", "h15 to h0"} and report.violations
    assert {v.split(":")[0] for v in report.less_preferred} <= {"h4 to h12", "h12 to h4"} and report.less_preferred


def test_no_datagram_is_lost_when_a_link_loses_its_carrier(fabric: emulate.Fabric) -> None:
    """Datagrams one at a time, a link of their path cut between two of them: the next one already goes another way."""
    a, b = (sockets(fabric, h, socket.AF_INET, socket.SOCK_DGRAM) for h in (0, 15))
    with contextlib.closing(a), contextlib.closing(b):
        b.bind(("", 7000))
        a.bind(("", 20000))
        for position in range(4):
            walk = fabric.path(0, 15, 20000, 7000)
            link = TREE.link_index[frozenset(walk[position : position + 2])]
            for n in range(20):
                if n == 10:
                    fabric.fail(link, end=n % 2)
                a.sendto(n.to_bytes(4, "little"), (addresses(15).v4, 7000))
                assert int.from_bytes(b.recv(100), "little") == n
            fabric.heal(link)


def test_a_tcp_stream_survives_a_cut_of_its_path(fabric: emulate.Fabric) -> None:
    data = random.Random(2).randbytes(8 << 20)
    stop = threading.Event()

    def break_things() -> None:
        rng = random.Random(5)
        while not stop.is_set():
            link = rng.randrange(16, 32)  # between aggregation and core
            fabric.fail(link)
            time.sleep(0.03)
            fabric.heal(link)

    breaker = threading.Thread(target=break_things)
    breaker.start()
    try:
        assert transfer(fabric, 1, 14, data) == data
    finally:
        stop.set()
        breaker.join(10)


def test_a_policy_changes_without_a_window(fabric: emulate.Fabric) -> None:
    """Probes run while the waypoint changes to and fro: each walk obeys one of the two policies, none is lost."""
    policies = [{"classes": [{"from": "h0", "to": "h15", "via": core}]} for core in ("core0", "core3")]
    fabric.use(policies[0])
    fabric.plane.forget(TREE)  # a link believed failed may lead a walk over both, which obeys either
    walks: list[tuple[int, ...]] = []
    sent = 0
    stop = threading.Event()

    def swap() -> None:
        n = 0
        while not stop.is_set():
            n += 1
            fabric.plane.install(TREE, emulate.compile_policy(policies[n % 2], TREE))

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        with check.Prober(fabric) as prober:
            for i in range(60):
                wanted = [(0, 15, i * 20 + j) for j in range(20)]
                walks += [walk for _, walk in prober.send(wanted).values()]
                sent += len(wanted)
    finally:
        stop.set()
        swapper.join(10)
    cores = [TREE.switch_index["core0"], TREE.switch_index["core3"]]
    assert len(walks) == sent
    assert [walk for walk in walks if sum(core in walk for core in cores) != 1] == []
    assert len({core for walk in walks for core in cores if core in walk}) == 2


def test_silent_and_one_way_failures_are_found_by_missing_heartbeats(fabric: emulate.Fabric) -> None:
    beat = Heartbeat(fabric, misses=3)
    beat._thread = threading.Thread(target=lambda: None)  # rounds are made by hand here
    beat.start()
    try:
        for how in ("silent", "one-way"):
            walk = fabric.path(0, 15, 20000, 7000)
            link = TREE.link_index[frozenset(walk[2:4])]
            end = 0 if TREE.links[link].a == walk[3] else 1  # frames vanish on arrival at the far end
            fabric.fail(link, how=how, end=end)
            assert fabric.path(0, 15, 20000, 7000) == ()  # nobody can know yet
            for _ in range(6):
                beat.round()
                time.sleep(0.005)
            assert fabric.path(0, 15, 20000, 7000)
            fabric.heal(link)
            for _ in range(3):
                beat.round()
                time.sleep(0.005)
            fabric.plane.forget(TREE)
            assert fabric.path(0, 15, 20000, 7000) == walk
    finally:
        beat.stop()


def test_a_rate_limits_a_link() -> None:
    slow = shapes.ring(3)
    slow = emulate.Topology(
        slow.name, slow.switches, tuple(emulate.Link(k.a, k.b, 2e6) for k in slow.links), slow.hosts
    )
    with emulate.temporary(slow) as f:
        begin = time.monotonic()
        assert len(transfer(f, 0, 1, bytes(1_000_000))) == 1_000_000
        assert time.monotonic() - begin > 0.35  # 1 MB at 2 MB/s, less what the queue holds


def test_up_is_idempotent_and_refuses_another_topology(fabric: emulate.Fabric) -> None:
    before = fabric.plane.config()["generation"]
    again = emulate.up(TREE, POLICY, name=fabric.name)
    try:
        assert again.names == fabric.names
        assert again.plane.config()["generation"] == before + 1
    finally:
        again.close()
    with pytest.raises(Error, match="is up with another topology"):
        emulate.up(shapes.ring(3), name=fabric.name)
    with pytest.raises(Error, match="fabric name: expected"):
        emulate.up(TREE, name="../x")


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dovetail.fabric.cli", *arguments],
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
        ping = command("exec", "--name", name, "h0", "--", "ping", "-c", "1", "-W", "2", "10.0.0.3")
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
        "from dovetail.fabric import emulate, shapes\n"
        f"f = emulate.up(shapes.fat_tree(8), name={name!r})\n"
        "f.run(0, ['sleep', '1000']); print('up', flush=True)\n"
        "import time; time.sleep(1000)\n"
    )
    try:
        for wait in (0.6, 0.75, 0.9, None):
            child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
            if wait is None:
                assert child.stdout and child.stdout.readline() == "up\n"
            else:
                time.sleep(wait)  # wherever it is by then
            child.send_signal(signal.SIGKILL)
            child.wait()
            assert child.stdout
            child.stdout.close()
            names = netns.named(f"dvf-{name}-")
            inside = netns.processes_in(names)
            emulate.down(name)
            assert not netns.named(f"dvf-{name}-")
            assert not [pid for pid in inside if alive(pid)]
        assert (netns.WHERE / stranger).exists()
        assert not (emulate.RUN / f"{name}.json").exists()
    finally:
        emulate.down(name)
        subprocess.run(["ip", "netns", "del", stranger], check=True)


def test_down_finds_what_a_kill_left_half_written_and_nothing_of_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    name, stranger = f"l{os.getpid()}", f"dvf-Stranger-{os.getpid()}"
    emulate.RUN.mkdir(parents=True, exist_ok=True)
    torn = emulate.RUN / f".{name}.json.torn.json"
    torn.write_text("{")
    for namespace in (f"dvf-{name}-1-s0", stranger):
        subprocess.run(["ip", "netns", "add", namespace], check=True)
    try:
        assert name not in emulate.running() and name in emulate.standing()
        assert all(emulate._NAME.fullmatch(n) for n in emulate.standing())
        with monkeypatch.context() as someone:
            someone.setattr(os, "geteuid", lambda: 1000)
            with pytest.raises(Error, match="needs root"):
                emulate.down(name)
        assert emulate.down(name) == 1
        assert not torn.exists() and name not in emulate.standing()
        assert (netns.WHERE / stranger).exists()
    finally:
        emulate.down(name)
        subprocess.run(["ip", "netns", "del", stranger], check=True)


def test_two_processes_do_not_build_one_fabric() -> None:
    name = f"b{os.getpid()}"
    ring = shapes.ring(3)
    emulate._remember(emulate.Names(name, f"{name}-{os.getppid()}"), ring, {}, "building")
    try:
        with pytest.raises(Error, match=rf"is being built by process {os.getppid()}"):
            emulate.up(ring, name=name)
    finally:
        emulate.down(name)


def test_a_program_that_cannot_be_loaded_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise Error("no")

    monkeypatch.setattr(kernel, "Object", refused)
    with pytest.raises(Error, match="no"):
        emulate.up(TREE, name="refused")
    assert "refused" not in emulate.standing()


def test_compiled_programs_are_kept_where_only_their_user_can_put_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # as some `sudo` leaves it
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert tmp_path not in kernel._cache().parents
    foreign = tmp_path / "dovetail" / "bpf"
    foreign.mkdir(parents=True)
    os.chown(foreign, 1000, 1000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(Error, match="belongs to another user"):
        kernel._cache()


def test_nothing_is_built_for_a_policy_that_contradicts_itself() -> None:
    with pytest.raises(Error, match="contradict"):
        emulate.up(TREE, {"classes": [{"from": "h0", "to": "h15", "via": "core0", "avoid": "core0"}]}, name="never")
    assert not netns.named("dvf-never-") and "never" not in emulate.running()


def test_a_failed_build_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise Error("no")

    monkeypatch.setattr(kernel, "attach_xdp", broken)
    with pytest.raises(Error, match="no"):
        emulate.up(TREE, name="broken")
    assert not netns.named("dvf-broken-") and "broken" not in emulate.running()
