"""Packets for probes and tests: real IPv4, IPv6 and UDP with checksums, and the frame of a probe."""

from __future__ import annotations

import socket
import struct

from .dataplane import Addresses
from .structs import ETH_PROBE, RECORD

ETH_IP, ETH_ARP, ETH_IPV6 = 0x0800, 0x0806, 0x86DD
UDP, ICMPV6 = 17, 58


def checksum(data: bytes) -> int:
    """The Internet checksum (RFC 1071)."""
    padded = data + b"\0" * (len(data) % 2)
    total: int = sum(struct.unpack(f">{len(padded) // 2}H", padded))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def mac_bytes(mac: str) -> bytes:
    return bytes.fromhex(mac.replace(":", ""))


def ethernet(source: Addresses, target: Addresses, kind: int, payload: bytes) -> bytes:
    return mac_bytes(target.mac) + mac_bytes(source.mac) + struct.pack(">H", kind) + payload


def udp(
    source: Addresses, target: Addresses, *, sport: int, dport: int, payload: bytes = b"", v6: bool = False
) -> bytes:
    """An Ethernet frame with a UDP datagram."""
    length = 8 + len(payload)
    body = struct.pack(">HHHH", sport, dport, length, 0) + payload
    if v6:
        a, b = (socket.inet_pton(socket.AF_INET6, x.v6) for x in (source, target))
        value = checksum(a + b + struct.pack(">II", length, UDP) + body) or 0xFFFF
        body = body[:6] + struct.pack(">H", value) + body[8:]
        head = struct.pack(">IHBB", 6 << 28, length, UDP, 64) + a + b
        return ethernet(source, target, ETH_IPV6, head + body)
    a, b = socket.inet_aton(source.v4), socket.inet_aton(target.v4)
    value = checksum(a + b + struct.pack(">BBH", 0, UDP, length) + body) or 0xFFFF
    body = body[:6] + struct.pack(">H", value) + body[8:]
    head = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 20 + length, 0, 0x4000, 64, UDP, 0, a, b)
    head = head[:10] + struct.pack(">H", checksum(head)) + head[12:]
    return ethernet(source, target, ETH_IP, head + body)


def probe(frame: bytes, tag: tuple[int, int] = (0, 0)) -> bytes:
    """The same packet as a probe: classified and forwarded like it, and signed by every switch on its way."""
    record = RECORD.pack(0, frame[12:14], *tag, *([0] * 124))
    return frame[:12] + struct.pack(">H", ETH_PROBE) + record + frame[14:]


def read_probe(frame: bytes) -> tuple[tuple[int, ...], tuple[int, int], bytes]:
    """(switches that signed, tag, the packet inside) of a probe that arrived."""
    count, inner, first, second, *walk = RECORD.unpack_from(frame, 14)
    return tuple(walk[:count]), (first, second), frame[:12] + inner + frame[14 + RECORD.size :]


def arp_request(source: Addresses, target: Addresses) -> bytes:
    body = struct.pack(">HHBBH", 1, ETH_IP, 6, 4, 1) + mac_bytes(source.mac) + socket.inet_aton(source.v4)
    body += b"\0" * 6 + socket.inet_aton(target.v4)
    return b"\xff" * 6 + mac_bytes(source.mac) + struct.pack(">H", ETH_ARP) + body


def neighbour_solicitation(source: Addresses, target: Addresses, *, unspecified: bool = False) -> bytes:
    wanted = socket.inet_pton(socket.AF_INET6, target.v6)
    group = bytes.fromhex("ff0200000000000000000001ff") + wanted[-3:]
    sender = b"\0" * 16 if unspecified else socket.inet_pton(socket.AF_INET6, source.v6)
    body = struct.pack(">BBHI", 135, 0, 0, 0) + wanted + b"\x01\x01" + mac_bytes(source.mac)
    value = checksum(sender + group + struct.pack(">II", len(body), ICMPV6) + body)
    body = body[:2] + struct.pack(">H", value) + body[4:]
    head = struct.pack(">IHBB", 6 << 28, len(body), ICMPV6, 255) + sender + group
    return b"\x33\x33\xff" + wanted[-3:] + mac_bytes(source.mac) + struct.pack(">H", ETH_IPV6) + head + body
