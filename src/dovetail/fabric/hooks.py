"""Hooks: where a switch program sits on a device: at XDP, in the driver, or at tc, where segments stay whole.

Both replace an earlier program without a gap, and both keep a program, and the maps that it holds, until the device is
removed.
"""

from __future__ import annotations

import contextlib
import ctypes as C
import errno
import os
from collections.abc import Iterator

from dovetail.core.errors import Error

from .kernel import checked, libbpf

TC, XDP = "tc", "xdp"
HOOKS = (TC, XDP)
TC_MTU = 15_800
"""The kernel lets a packet that is not a segment grow to 16,064 bytes: with our header and Ethernet's."""
_DRIVER_MODE = 4  # XDP in the driver, never the kernel's slow imitation
_TCX_INGRESS, _REPLACE = 46, 4


class _AttachOptions(C.Structure):
    _fields_ = (("size", C.c_size_t), ("flags", C.c_uint32), ("replaced", C.c_int))


class _ProgramInfo(C.Structure):
    """The first fields of struct bpf_prog_info, up to the ids of its maps."""

    _fields_ = (
        ("type", C.c_uint32), ("id", C.c_uint32), ("tag", C.c_uint8 * 8), ("jited_len", C.c_uint32),
        ("xlated_len", C.c_uint32), ("jited", C.c_uint64), ("xlated", C.c_uint64), ("load_time", C.c_uint64),
        ("uid", C.c_uint32), ("nr_map_ids", C.c_uint32), ("map_ids", C.c_uint64), ("name", C.c_char * 16),
    )  # fmt: skip


class _MapInfo(C.Structure):
    _fields_ = (
        ("type", C.c_uint32), ("id", C.c_uint32), ("key_size", C.c_uint32), ("value_size", C.c_uint32),
        ("max_entries", C.c_uint32), ("flags", C.c_uint32), ("name", C.c_char * 16),
    )  # fmt: skip


def chosen(name: str, mtu: int) -> str:
    """The hook for hosts of this MTU: the one that was asked for, or tc where the MTU allows it."""
    if name and name not in HOOKS:
        raise Error(f"hook: expected {' or '.join(HOOKS)}, got {name!r}")
    if name == TC and mtu > TC_MTU:
        raise Error(f"hook tc: expected an MTU of at most {TC_MTU} (segments pass whole whatever it is), got {mtu}")
    return name or (TC if mtu <= TC_MTU else XDP)


def attach(hook: str, ifindex: int, program: int) -> None:
    """Puts a program on a device of this namespace, in place of the one that may be there."""
    if hook == XDP:
        checked(libbpf().bpf_xdp_attach(ifindex, program, _DRIVER_MODE, None), f"attach to device {ifindex}")
        return
    with _program_at(TC, ifindex) as earlier:
        options = _AttachOptions(size=C.sizeof(_AttachOptions))
        if earlier is not None:
            options.flags, options.replaced = _REPLACE, earlier
        made = libbpf().bpf_prog_attach_opts(program, ifindex, _TCX_INGRESS, C.byref(options))
        checked(made, f"attach to device {ifindex}")


def program_id(hook: str, ifindex: int) -> int:
    """The id of the program at a hook of a device of this namespace; 0 where there is none."""
    if hook == XDP:
        number = C.c_uint32()
        checked(libbpf().bpf_xdp_query_id(ifindex, 0, C.byref(number)), "query")
        return number.value
    ids, count = (C.c_uint32 * 1)(), C.c_uint32(1)
    checked(libbpf().bpf_prog_query(ifindex, _TCX_INGRESS, 0, None, ids, C.byref(count)), "query")
    return ids[0] if count.value else 0


@contextlib.contextmanager
def _program_at(hook: str, ifindex: int) -> Iterator[int | None]:
    number = program_id(hook, ifindex)
    program = checked(libbpf().bpf_prog_get_fd_by_id(number), "program") if number else None
    try:
        yield program
    finally:
        if program is not None:
            os.close(program)


def found(ifindex: int) -> tuple[str, int, dict[str, int]]:
    """(hook, program, its maps by name) of a device of this namespace; the caller closes the descriptors."""
    hook, number = XDP, program_id(XDP, ifindex)
    if not number:
        hook, number = TC, program_id(TC, ifindex)
    if not number:
        raise OSError(errno.ENOENT, "no program on the device")
    lib = libbpf()
    program = checked(lib.bpf_prog_get_fd_by_id(number), "program")
    ids = (C.c_uint32 * 64)()
    info = _ProgramInfo(nr_map_ids=64, map_ids=C.addressof(ids))
    size = C.c_uint32(C.sizeof(info))
    checked(lib.bpf_obj_get_info_by_fd(program, C.byref(info), C.byref(size)), "program info")
    maps = {}
    for i in range(info.nr_map_ids):
        fd = checked(lib.bpf_map_get_fd_by_id(ids[i]), "map")
        described = _MapInfo()
        size = C.c_uint32(C.sizeof(described))
        checked(lib.bpf_obj_get_info_by_fd(fd, C.byref(described), C.byref(size)), "map info")
        maps[described.name.decode()] = fd
    return hook, program, maps
