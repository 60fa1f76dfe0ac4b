"""A thin layer over libbpf: compile, load, maps, the test runner."""

from __future__ import annotations

import ctypes as C
import hashlib
import os
import platform
import re
import shutil
import struct
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from dovetail.core.errors import Error, first_line
from dovetail.core.files import cache_folder, replacing

BPF_DIR = Path(__file__).parent / "bpf"
PACKAGES = ("clang", "libbpf-dev", "libbpf1", "iproute2")
"""Debian packages the fabric needs."""
XDP_DROP, XDP_PASS, XDP_REDIRECT = 1, 2, 4
_VERDICT_OF_TC = {2: XDP_DROP, 0: XDP_PASS, 7: XDP_REDIRECT}
LIVE_FRAMES = 2
SHAREABLE = (
    ".data.config", ".data.slots", "graphs", "policies", "nodes", "ports", "hosts", "classes", "pauses", "counts",
    "wires", "scratches", "cache",
)  # fmt: skip
"""The maps of bpf/maps.h."""
_P = C.c_void_p


class _TestRun(C.Structure):
    _fields_ = (
        ("size", C.c_size_t), ("data_in", _P), ("data_out", _P), ("size_in", C.c_uint32), ("size_out", C.c_uint32),
        ("ctx_in", _P), ("ctx_out", _P), ("ctx_size_in", C.c_uint32), ("ctx_size_out", C.c_uint32),
        ("result", C.c_uint32), ("repeat", C.c_int), ("duration", C.c_uint32), ("flags", C.c_uint32),
        ("cpu", C.c_uint32), ("batch", C.c_uint32),
    )  # fmt: skip


@cache
def libbpf() -> Any:
    try:
        lib = C.CDLL("libbpf.so.1", use_errno=True)
    except OSError:
        raise Error(f"the fabric needs libbpf: apt-get install {' '.join(PACKAGES)}") from None
    for name in (
        "bpf_object__open_file", "bpf_object__find_program_by_name", "bpf_object__find_map_by_name",
        "bpf_object__next_map",
    ):  # fmt: skip
        getattr(lib, name).restype = _P
    lib.bpf_map__name.restype = C.c_char_p
    return lib


_log: list[str] = []


def _message(level: int, form: bytes, arguments: int) -> int:
    """Keeps libbpf's messages instead of printing them."""
    if level == 0:
        text = C.create_string_buffer(4096)
        C.CDLL(None).vsnprintf(text, 4096, form, _P(arguments))
        _log.append(text.value.decode(errors="replace").strip())
    return 0


_keep_message = C.CFUNCTYPE(C.c_int, C.c_int, C.c_char_p, _P)(_message)


def checked(result: int, what: str) -> int:
    if result < 0:
        code = C.get_errno() or -result
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def missing() -> str:
    """Why the fabric cannot run here, or nothing."""
    if platform.system() != "Linux" or os.geteuid() != 0:
        return "the fabric needs root on Linux (network namespaces, XDP)"
    if tuple(int(n) for n in re.findall(r"\d+", platform.release())[:2]) < (6, 9):
        return f"the fabric needs Linux 6.9 or newer, this is {platform.release()}"
    if not Path("/sys/kernel/btf/vmlinux").exists():
        return "the fabric needs a kernel with BTF (/sys/kernel/btf/vmlinux)"
    for tool in ("clang", "ip"):
        if shutil.which(tool) is None:
            return f"the fabric needs {tool}: apt-get install {' '.join(PACKAGES)}"
    try:
        libbpf()
    except Error as e:
        return str(e)
    return ""


def build(source: str | Path, *, words: int, defines: Iterable[str] = ()) -> Path:
    """The object file of bpf/`source` for sets of `words` words: compiled once, kept by the hash of its text.

    A `source` elsewhere is given by its whole path; it includes the headers of bpf/ by their names.
    """
    path = BPF_DIR / source
    text = "".join(p.read_text() for p in (*sorted(BPF_DIR.glob("*.[hc]")), path)) + " ".join(defines)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    target = cache_folder("bpf") / f"{path.name.removesuffix('.bpf.c')}-{words}-{digest}.o"
    if not target.exists():
        machine = f"/usr/include/{platform.machine()}-linux-gnu"
        flags = ["-O2", "-g", "-target", "bpf", "-mcpu=v3", "-Wall", "-Wno-unused-function", f"-I{machine}"]
        flags += [f"-I{BPF_DIR}", f"-DWORDS={words}", *(f"-D{d}" for d in defines), "-c"]
        compile_with_clang(path, target, *flags)
    return target


def compile_with_clang(source: Path, target: Path, *flags: str) -> None:
    if shutil.which("clang") is None:
        raise Error(f"the fabric needs clang: apt-get install {' '.join(PACKAGES)}")
    with replacing(target) as temporary:
        command = ["clang", *flags, str(source), "-o", str(temporary)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            raise Error(f"{source.name}: {first_line(done.stderr) or 'clang failed'}")


class BpfObject:
    """A loaded object file: its programs and maps by name. Closing it frees what nothing else holds."""

    def __init__(
        self, path: Path, *, sizes: dict[str, int] | None = None, shared: dict[str, int] | None = None
    ) -> None:
        """`sizes` of maps by name; maps in `shared` are those of another object, what it does not share is not made."""
        lib = libbpf()
        lib.libbpf_set_print(_keep_message)
        _log.clear()
        self._maps: dict[str, int] = {}
        self._object = lib.bpf_object__open_file(str(path).encode(), None)
        if not self._object:
            raise Error(f"{path.name}: cannot be opened by libbpf")
        for name, size in (sizes or {}).items():
            found = lib.bpf_object__find_map_by_name(_P(self._object), name.encode())
            checked(lib.bpf_map__set_max_entries(_P(found), size), name)
        if shared is not None:
            self._share(shared)
        if lib.bpf_object__load(_P(self._object)) < 0:
            why = next((m for m in _log if "processed" in m or "failed" in m), "no reason given")
            self.close()
            raise Error(f"{path.name}: the kernel refuses to load it: {why.splitlines()[-1]}")

    def _share(self, shared: dict[str, int]) -> None:
        lib = libbpf()
        here = lib.bpf_object__next_map(_P(self._object), None)
        while here:
            name = lib.bpf_map__name(_P(here)).decode()
            if name in shared:
                checked(lib.bpf_map__reuse_fd(_P(here), shared[name]), name)
            elif name in SHAREABLE:
                checked(lib.bpf_map__set_autocreate(_P(here), False), name)
            here = lib.bpf_object__next_map(_P(self._object), _P(here))

    def map(self, name: str) -> int:
        if name not in self._maps:
            found = libbpf().bpf_object__find_map_by_name(_P(self._object), name.encode())
            assert found, name
            self._maps[name] = libbpf().bpf_map__fd(_P(found))
        return self._maps[name]

    def hold(self, program: str, name: str) -> None:
        """Lets a map live as long as a program that does not use it itself."""
        checked(libbpf().bpf_prog_bind_map(self.program(program), self.map(name), None), name)

    def program(self, name: str) -> int:
        found = libbpf().bpf_object__find_program_by_name(_P(self._object), name.encode())
        assert found, name
        return int(libbpf().bpf_program__fd(_P(found)))

    def close(self) -> None:
        if self._object:
            libbpf().bpf_object__close(_P(self._object))
            self._object = None


def update(fd: int, key: bytes | int, value: bytes) -> None:
    raw = struct.pack("<I", key) if isinstance(key, int) else key
    checked(libbpf().bpf_map_update_elem(fd, raw, value, C.c_ulonglong(0)), "map update")


def lookup(fd: int, key: bytes | int, size: int) -> bytes:
    raw = struct.pack("<I", key) if isinstance(key, int) else key
    value = C.create_string_buffer(size)
    checked(libbpf().bpf_map_lookup_elem(fd, raw, value), "map lookup")
    return value.raw


def delete(fd: int, key: bytes) -> None:
    libbpf().bpf_map_delete_elem(fd, key)


def keys(fd: int, size: int) -> list[bytes]:
    found: list[bytes] = []
    here: bytes | None = None
    after = C.create_string_buffer(size)
    while libbpf().bpf_map_get_next_key(fd, here, after) == 0:
        here = after.raw
        found.append(here)
    return found


@cache
def processors() -> int:
    """Processors the kernel may ever have: per-processor maps have a value for each."""
    return libbpf().libbpf_num_possible_cpus()  # type: ignore[no-any-return]


class ProgramRunner:
    """The kernel's test runner for one program: give it a packet, see what comes out. Buffers are kept between runs.

    `tc`: the program is one for tc and not for XDP; its verdicts are translated into XDP's.
    """

    def __init__(self, program: int, *, tc: bool = False, room: int = 4096) -> None:
        self._program, self._tc = program, tc
        self._in, self._out = C.create_string_buffer(room), C.create_string_buffer(room)
        self._context = C.create_string_buffer(180)
        self._room = room

    def __call__(
        self,
        packet: bytes,
        *,
        ifindex: int | None = None,
        repeat: int = 1,
        flags: int = 0,
        batch: int = 0,
        segment: int = 0,
    ) -> tuple[int, bytes, int]:
        """(verdict, packet afterwards, nanoseconds per run). `segment`: at tc, what it would be cut to, in bytes."""
        C.memmove(self._in, packet, len(packet))
        run = _TestRun(size=C.sizeof(_TestRun), data_in=C.addressof(self._in), size_in=len(packet), repeat=repeat)
        run.flags, run.batch = flags, batch
        if not flags:
            run.data_out, run.size_out = C.addressof(self._out), self._room
        if ifindex is not None:
            if self._tc:  # struct __sk_buff: ingress_ifindex and gso_size; the test runner wants the others to be zero
                context = struct.pack("<36xI136xI", ifindex, segment)
            else:  # struct xdp_md: data, data_end, data_meta, ingress_ifindex
                context = struct.pack("<6I", 0, len(packet), 0, ifindex, 0, 0)
            C.memmove(self._context, context, len(context))
            run.ctx_in, run.ctx_size_in = C.addressof(self._context), len(context)
        checked(libbpf().bpf_prog_test_run_opts(self._program, C.byref(run)), "test run")
        verdict = _VERDICT_OF_TC[run.result] if self._tc else run.result
        return verdict, self._out.raw[: run.size_out] if not flags else b"", run.duration
