"""The C++ extension in `native`, compiled at the first use and kept in the user's cache.

A file of the cache is named after all that it depends on: sources, flags, torch, Python and the compiler. Translation
units are kept too, so that a change compiles what it touches. Of several processes that need the extension at the same
time one builds it, and the others wait. Nothing but a C++ compiler is needed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

from dovetail.core.errors import Error, first_line
from dovetail.core.files import cache_folder, replacing

NAME = "emulated_accelerator"
SOURCES = Path(__file__).with_name("native")
FLAGS = (
    "-std=c++20",
    "-O1",
    "-fPIC",
    "-fvisibility=hidden",
    "-w",
    "-DUSE_DISTRIBUTED",
    f"-DTORCH_EXTENSION_NAME={NAME}",
)
LIBRARIES = ("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python")
PATIENCE = 600.0
"""Seconds that a process waits for another one's build, and that one run of the compiler may take."""
UNUSED_DAYS = 14.0
"""Days after which a file of the cache that nobody has used is removed."""


def compiler() -> str | None:
    """The C++ compiler: what CXX says, or the first that is found."""
    return next(
        (found for name in (os.environ.get("CXX"), "g++", "c++", "clang++") if name and (found := shutil.which(name))),
        None,
    )


def load_extension() -> ModuleType:
    """The extension as a Python module; it is built first where the cache does not have it."""
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(built()))
    spec = importlib.util.spec_from_loader(NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def built() -> Path:
    """The compiled extension in the cache. Raises one line where it cannot be compiled."""
    program = compiler()
    if program is None:
        raise Error("the emulated accelerator needs a C++ compiler to build itself (Debian: apt-get install g++)")
    folder = cache_folder("accelerator")
    common = [*FLAGS, *_paths("-isystem", _includes()), _identity(program)]
    headers = [file.read_bytes() for file in sorted(SOURCES.glob("*.h"))]
    units = {file: _digest([file.name, file.read_bytes(), *headers, *common]) for file in sorted(SOURCES.glob("*.cpp"))}
    target = folder / f"{NAME}-{_digest(sorted(units.values()))}.so"
    if not target.exists():
        with _alone(folder / "lock"):
            if not target.exists():
                _build(program, {file: folder / f"{file.stem}-{digest}.o" for file, digest in units.items()}, target)
                _tidy(folder)
    with contextlib.suppress(OSError):  # a cache that only its owner can write to
        os.utime(target)
    return target


def _build(program: str, objects: dict[Path, Path], target: Path) -> None:
    """Compiles what the cache lacks, two files at a time, the largest first, and links all."""
    missing = sorted((file for file, made in objects.items() if not made.exists()), key=lambda f: -f.stat().st_size)
    includes = _paths("-isystem", _includes())

    def compile_unit(source: Path) -> None:
        with replacing(objects[source]) as temporary:
            _run([program, *FLAGS, *includes, "-c", str(source), "-o", str(temporary)], source.name)

    with ThreadPoolExecutor(max_workers=min(2, os.cpu_count() or 1)) as pool:
        for _ in pool.map(compile_unit, missing):
            pass
    with replacing(target) as temporary:
        libraries = [*_paths("-L", cpp_extension.library_paths()), *LIBRARIES]
        _run([program, "-shared", *map(str, objects.values()), *libraries, "-o", str(temporary)], target.name)


def _run(command: Sequence[str], what: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        raise Error(f"the emulated accelerator cannot be built: {what} took more than {PATIENCE:.0f} s") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if re.search(r"error:|undefined reference|ld:", line)]
        raise Error(
            f"the emulated accelerator cannot be built: {what}: {first_line(errors[0] if errors else done.stderr)}"
        )


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process at a time; the lock of a process that dies is free at once."""
    with lock.open("w") as file:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > end:
                    waited = f"another process has been building the emulated accelerator for {PATIENCE:.0f} s"
                    raise Error(f"{waited}: it holds {lock}") from None
                time.sleep(0.1)
        yield


def _tidy(folder: Path) -> None:
    oldest = time.time() - UNUSED_DAYS * 86400
    for file in folder.glob("*.*o"):
        with contextlib.suppress(OSError):
            if file.stat().st_mtime < oldest:
                file.unlink()


def _includes() -> list[str]:
    return [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]


def _paths(option: str, paths: Sequence[str]) -> list[str]:
    return [f"{option}{path}" for path in paths]


def _identity(program: str) -> str:
    """Compiler, torch and Python, as far as a compiled file depends on them."""
    said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=PATIENCE, check=False).stdout
    torches = f"torch {torch.__version__} {torch.version.git_version}"
    return f"{program} {first_line(said)} {torches} {sys.implementation.cache_tag}"


def _digest(parts: Sequence[str | bytes]) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part if isinstance(part, bytes) else part.encode())
        whole.update(b"\0")
    return whole.hexdigest()[:16]
