"""`dovetail cluster` with wrong input: one clear line each; and what `up` refuses before it starts anything."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.cluster import up_down
from dovetail.cluster.coordinator.job_store import Store
from dovetail.cluster.engines import process
from dovetail.cluster.home import Home, arena_name, default_home, sweep_arenas
from dovetail.cluster.job.submission import MOST_TEXT
from tests.cli.command import run


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def fails(*arguments: object, code: int = 1) -> str:
    done = run(*map(str, arguments))
    assert done.exit_code == code and done.stdout == "", done.output
    if code == 1:
        assert done.stderr.count("\n") == 1 and done.stderr.startswith("dovetail: ")
    return str(done.stderr)


@pytest.mark.parametrize(
    "verb",
    [
        ("status",),
        ("page",),
        ("page", "1"),
        ("why", "1"),
        ("logs", "1"),
        ("cancel", "1"),
        ("pause", "1"),
        ("resume", "1"),
    ],
)
def test_without_a_cluster_every_verb_says_how_to_start_one(home: Path, verb: tuple[str, ...]) -> None:
    assert "no cluster runs in" in fails("cluster", *verb, "--home", home)


def test_down_without_a_cluster_is_no_error(home: Path) -> None:
    assert run("cluster", "down", "--home", home).stdout == "no cluster was running\n"
    assert not home.exists()


def test_wrong_files_are_named_before_the_cluster_is_asked(home: Path, tmp_path: Path) -> None:
    missing, torn, binary = tmp_path / "no.py", tmp_path / "torn.py", tmp_path / "binary.py"
    torn.write_text("x = 1\njob = (\n")
    binary.write_bytes(b"\xff\xfe")
    assert "no.py: cannot be read: no such file" in fails("cluster", "submit", missing, "--home", home)
    assert "torn.py: line 2: expected valid Python" in fails("cluster", "submit", torn, "--home", home)
    assert "binary.py: expected Python text" in fails("cluster", "submit", binary, "--home", home)
    empty, zero, long, pipe = (tmp_path / f"{name}.py" for name in ("empty", "zero", "long", "pipe"))
    empty.touch()
    zero.write_bytes(b"x = 1\0")
    long.write_text("#" * (MOST_TEXT + 1))
    os.mkfifo(pipe)
    for file, got in ((empty, "got none"), (zero, "got a zero byte"), (long, "got more")):
        assert f"{file.name}: expected 1 to {MOST_TEXT} bytes" in (line := fails("cluster", "submit", file))
        assert got in line
    for endless in (pipe, Path("/dev/zero"), tmp_path):
        assert f"{endless}: expected a Python file" in fails("cluster", "submit", endless, "--home", home)
    right = tmp_path / "right.py"
    right.write_text("job = 1\n")
    assert "no cluster runs in" in fails("cluster", "submit", right, "--home", home)


def test_options_that_do_not_go_together_are_refused(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text("job = 1\n")
    both = fails("cluster", "submit", file, "--foreground", "--background", "--home", home, code=2)
    assert "got both" in both
    assert "--worker" in fails("cluster", "submit", file, "--worker", "3", "--home", home, code=2)
    assert "after --" in fails("cluster", "submit", file, "--gang", "2", "--steps", "3", "--home", home, code=2)
    fails("cluster", "submit", file, "--workers", "0", "--home", home, code=2)
    fails("cluster", "why", "x", "--home", home, code=2)
    fails("cluster", "cancel", "0", "--home", home, code=2)


def test_up_refuses_what_cannot_work_before_it_starts_anything(home: Path, tmp_path: Path) -> None:
    assert "policy 'best': expected one of jigsaw" in fails("cluster", "up", "--policy", "best", "--home", home)
    assert "only simulated" in (line := fails("cluster", "up", "--policy", "tiresias-las", "--home", home))
    assert "expected one of jigsaw," in line and "gandiva" not in line, "only what the cluster runs"
    file = home.with_name("a file")
    file.touch()
    assert "a file: expected a folder" in fails("cluster", "up", "--home", file)
    assert "needs --token-file" in fails("cluster", "up", "--host", "0.0.0.0", "--home", home)
    token = tmp_path / "token"
    assert "token: cannot be read" in fails("cluster", "up", "--token-file", token, "--home", home)
    token.write_text("short\n")
    assert "expected a token of 16 to 1024" in fails("cluster", "up", "--token-file", token, "--home", home)
    assert Home(home).supervisor() is None and not home.exists()


def test_a_store_of_a_newer_dovetail_stops_up_with_one_line(home: Path) -> None:
    Home(home).create()
    Store(home / "cluster.db").close()
    with sqlite3.connect(home / "cluster.db") as other:
        other.execute("PRAGMA user_version=99")
    other.close()
    line = fails("cluster", "up", "--devices", "1", "--emulated", "--home", home)
    assert "cluster.db: of a newer dovetail (schema 99" in line
    assert Home(home).supervisor() is None


def test_a_port_that_is_taken_stops_up_with_one_line(home: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = fails("cluster", "up", "--devices", "1", "--emulated", "--port", port, "--home", home)
    assert f"127.0.0.1:{port}: cannot listen: address already in use" in line


def test_the_reason_of_a_failed_job_is_below_the_table_and_widens_no_column() -> None:
    from dovetail.cli.cluster_table import draw

    job = {"job": 3, "name": "x", "share": "normal", "state": "failed", "iteration": 0, "iterations": 9, "loss": 0.0,
           "submitted": 0.0, "reason": "a reason of many words " * 5}  # fmt: skip
    status = {"policy": "p", "emulated": False, "now": 1.0, "counts": {}, "devices": [], "jobs": [], "ended": [job]}
    *_, table, reason = draw(status)
    assert reason.plain == f"job 3 (x): {job['reason']}"
    columns = {str(column.header): list(column.cells) for column in table.columns}
    assert columns["devices"] == [""] and columns["loss"] == [""], "no loss before the first iteration"


def test_a_wrong_url_is_one_line(tmp_path: Path) -> None:
    assert "no cluster answers" in fails("cluster", "status", "--url", "http://127.0.0.1:1")


def test_help_imports_neither_torch_nor_the_web_server() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "dovetail", "cluster", "submit", "--help"],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0 and "--gang" in done.stdout
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & {"torch", "numpy", "fastapi", "uvicorn", "sqlite3", "asyncio", "ray"}


def test_the_home_is_found_by_option_variable_or_state_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path / "a"))
    assert default_home() == tmp_path / "a"
    monkeypatch.delenv("DOVETAIL_HOME")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "b"))
    assert default_home() == tmp_path / "b" / "dovetail" / "cluster"


def test_only_the_owner_can_read_the_home_and_its_key(home: Path) -> None:
    Home(home).create()
    key = Home(home).key()
    assert home.stat().st_mode & 0o777 == 0o700
    assert (home / "key").stat().st_mode & 0o777 == 0o600
    Home(home).create()
    assert Home(home).key() == key and len(key) == 64


def test_only_shared_memory_of_dead_aggregators_of_this_home_is_removed(home: Path, tmp_path: Path) -> None:
    names = [arena_name(home, 1, 1), arena_name(home, 1, 2), arena_name(tmp_path / "other", 1, 1)]
    paths = [Path("/dev/shm") / name for name in names]
    try:
        for path in paths:
            path.write_bytes(b"x")
        assert sweep_arenas(home, alive=[("1", 2)]) == [names[0]]
        assert [p.exists() for p in paths] == [False, True, True]
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def test_jobs_see_only_the_allowed_variables() -> None:
    seen = process.scrubbed({"PATH": "p", "LC_ALL": "C", "AWS_SECRET": "s", "HTTP_PROXY": "u:p@h", "PYTHONPATH": "q"})
    assert seen["PATH"] == "p" and seen["LC_ALL"] == "C" and seen["PYTHONPATH"] == "q"
    assert not {"AWS_SECRET", "HTTP_PROXY"} & set(seen)
    assert seen["OMP_NUM_THREADS"] == "1"


def test_the_memory_of_cpu_devices_is_that_of_the_machine() -> None:
    assert 2**28 < up_down.memory_bytes() < 2**50
