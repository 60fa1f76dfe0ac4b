"""Sockets on the hosts of a running fabric."""

from __future__ import annotations

import contextlib
import socket
import threading

from dovetail.fabric import emulation, netns
from dovetail.fabric.dataplane import addresses


def sockets(f: emulation.Fabric, host: int, family: int, kind: int) -> socket.socket:
    with netns.inside(f.names.host(host)):
        made = socket.socket(family, kind)
    made.settimeout(60)
    return made


def transfer(f: emulation.Fabric, a: int, b: int, data: bytes, family: int = socket.AF_INET) -> bytes:
    """Sends bytes over TCP from host to host."""
    server = sockets(f, b, family, socket.SOCK_STREAM)
    client = sockets(f, a, family, socket.SOCK_STREAM)
    got = bytearray()

    def take() -> None:
        peer, _ = server.accept()
        with peer:
            peer.settimeout(60)
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
        taker.join(90)
    return bytes(got)
