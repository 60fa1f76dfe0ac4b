"""What is particular to a hook: segments that stay whole at tc, and how programs come onto a port."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from dovetail.core.errors import Error
from dovetail.fabric import emulation, hooks, kernel, netns, packets, structs
from dovetail.fabric.dataplane import FIRST_IFINDEX, DataPlane, addresses, host_slot, slot_towards
from dovetail.fabric.hooks import HOOKS, TC
from dovetail.fabric.routing import shapes
from dovetail.fabric.routing.topology import Link, Topology
from dovetail.fabric.wiring import HOST_DEVICE

from .switch_bench import bench
from .traffic import sockets, transfer

pytestmark = pytest.mark.root
RING = shapes.ring(4)
UDP_SEGMENT = 103


@pytest.fixture(scope="module", params=HOOKS)
def fabric(request: pytest.FixtureRequest) -> Iterator[emulation.Fabric]:
    with emulation.temporary(RING, hook=request.param) as made:
        yield made


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_tcp_segments_cross_every_switch_whole_at_tc_and_in_frames_at_xdp(
    fabric: emulation.Fabric, family: int
) -> None:
    before = [fabric.plane.counters(s) for s in range(4)]
    data = random.Random(1).randbytes(8 << 20)
    assert transfer(fabric, 0, 2, data, family) == data
    after = [fabric.plane.counters(s) for s in range(4)]
    sent = after[0]["ingress"] - before[0]["ingress"]  # the first switch takes nothing else from its host
    if fabric.plane.hook == TC:
        assert sent < len(data) / (4 * RING.mtu)
    else:
        assert sent > len(data) / RING.mtu


def test_a_train_of_datagrams_arrives_as_datagrams(fabric: emulation.Fabric) -> None:
    """The sender hands its kernel many at once; at tc they travel as one, and are told apart again at the far end."""
    body = random.Random(2).randbytes(16_000)
    for family, to in ((socket.AF_INET, addresses(2).v4), (socket.AF_INET6, addresses(2).v6)):
        a, b = (sockets(fabric, h, family, socket.SOCK_DGRAM) for h in (0, 2))
        with contextlib.closing(a), contextlib.closing(b):
            b.bind(("", 5000))
            a.setsockopt(socket.IPPROTO_UDP, UDP_SEGMENT, 1000)
            a.sendto(body, (to, 5000))
            assert [b.recv(65536) for _ in range(16)] == [body[i : i + 1000] for i in range(0, 16_000, 1000)]


def test_a_notice_of_a_segment_tells_its_source(fabric: emulation.Fabric) -> None:
    """TCP leaves its checksum to the device; the switch that finds no path still sends back the bare header."""
    into = frozenset(i for i, k in enumerate(RING.links) if 2 in (k.a, k.b))
    fabric.plane.forget(RING)
    before = fabric.plane.totals(RING)
    for link in into:
        fabric.fail(link)
    try:
        client = sockets(fabric, 0, socket.AF_INET, socket.SOCK_STREAM)
        with contextlib.closing(client):
            client.setblocking(False)
            client.connect_ex((addresses(2).v4, 5000))
            end = time.monotonic() + 10
            while fabric.plane.believed(0) != into:
                assert time.monotonic() < end
                time.sleep(0.01)
        after = fabric.plane.totals(RING)
        assert after["noticed"] > before["noticed"] and after["drop no path"] > before["drop no path"]
    finally:
        for link in into:
            fabric.heal(link)


def test_a_frame_with_a_vlan_tag_is_not_taken_for_one_without(fabric: emulation.Fabric) -> None:
    plain = packets.udp(addresses(1), addresses(3), sport=1, dport=5000, payload=b"tagged?")
    with netns.inside(fabric.names.host(1)):
        raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    receiver = sockets(fabric, 3, socket.AF_INET, socket.SOCK_DGRAM)
    with contextlib.closing(raw), contextlib.closing(receiver):
        receiver.bind(("", 5000))
        raw.bind((HOST_DEVICE, structs.ETH_PROBE))
        before = fabric.plane.counters(1)
        raw.send(plain[:12] + struct.pack(">HH", 0x8100, 5) + plain[12:])
        raw.send(plain)
        assert receiver.recv(100) == b"tagged?"
        after = fabric.plane.counters(1)
    assert after["drop other"] > before["drop other"]
    assert after["ingress"] == before["ingress"] + 1


def test_a_program_takes_the_place_of_another(fabric: emulation.Fabric) -> None:
    hook, slot = fabric.plane.hook, host_slot(RING, 3)
    with (
        contextlib.closing(DataPlane.load(fabric.plane.size, hook=hook)) as other,
        netns.inside(fabric.names.switch(3)),
    ):
        first = hooks.program_id(hook, FIRST_IFINDEX + slot)
        hooks.attach(hook, FIRST_IFINDEX + slot, other.programs["fabric_switch"])
        second = hooks.program_id(hook, FIRST_IFINDEX + slot)
        hooks.attach(hook, FIRST_IFINDEX + slot, fabric.plane.programs["fabric_switch"])
        assert first and second and hooks.program_id(hook, FIRST_IFINDEX + slot) == first != second


def test_a_running_fabric_stays_at_its_hook(fabric: emulation.Fabric) -> None:
    other = next(h for h in HOOKS if h != fabric.plane.hook)
    with pytest.raises(Error, match=f"is up at hook {fabric.plane.hook}"):
        emulation.up(RING, name=fabric.name, hook=other)
    again = emulation.up(RING, name=fabric.name)
    assert again.plane.hook == fabric.plane.hook
    again.close()
    with pytest.raises(Error, match="hook: expected tc or xdp, got 'nic'"):
        emulation.up(RING, name=fabric.name, hook="nic")
    with pytest.raises(Error, match=r"hook tc: expected an MTU of at most 15800 .*, got 20000"):
        emulation.up(shapes.ring(4, mtu=20_000), hook=TC)


def test_a_whole_segment_is_charged_to_the_wire_as_the_frames_it_would_be() -> None:
    ring = shapes.ring(3)
    slow = 1.0  # byte per second: how long a wire is busy tells the bytes, however slow this machine is
    links = tuple(Link(k.a, k.b, slow) for k in ring.links)
    ring = Topology(ring.name, ring.switches, links, ring.hosts)
    charged = []
    with bench(ring, hook=TC) as b:
        frame = packets.udp(addresses(0), addresses(1), sport=1, dport=2, payload=bytes(3000))
        _, inside = b.enter(host_slot(ring, 0), frame)
        header = b.plane.size.header
        detour = bytearray(inside)  # as it is on its way from 0 over 2 to 1
        struct.pack_into("<BB", detour, 14 + 5, 1, 2)
        struct.pack_into("<HH", detour, 14 + 24, 2, 1)
        out = slot_towards(ring, 2, 1)
        for segment in (0, 1000):
            values = list(b.plane.port(out))
            values[8] = 0  # the wire is free
            kernel.update(b.plane.maps["ports"], out, structs.PORT.pack(*values))
            before = time.monotonic_ns()
            verdict, _ = b.enter(slot_towards(ring, 2, 0), bytes(detour), segment=segment)
            assert verdict == kernel.XDP_REDIRECT
            charged.append(int((b.plane.port(out)[8] - before) / 1e9 * slow))
    heads = 14 + header + 20 + 32
    cuts = -(-(len(inside) - heads) // 1000)
    whole = len(inside)
    assert cuts == 3 and charged[0] in range(whole, whole + 20)
    assert charged[1] in range(whole + 2 * heads, whole + 2 * heads + 20)
