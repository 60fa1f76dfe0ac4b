"""Ranks as processes of their own: what they get, what comes back, and that none outlives its launcher."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from dovetail.core.errors import Error
from dovetail.emulate import launch as module
from dovetail.emulate.launch import LaunchError, launch, report


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    """Whether something comes true before the time is over."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


HANGS = 300.0  # seconds: for what hangs, not a guess at speed
PIDS = "import os, time; from dovetail.emulate.launch import report; report(os.getpid());"


def test_every_rank_gets_its_environment_and_hands_a_result_back() -> None:
    code = "import os; from dovetail.emulate.launch import report; report({k: os.environ.get(k) for k in %r})"
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "EXTRA"]
    results = launch(["-c", code % (names,)], ranks=3, timeout=HANGS, env={"EXTRA": "more"})
    assert [r.rank for r in results] == [0, 1, 2]
    for r in results:
        assert r.code == 0
        assert r.report == dict(
            zip(names, [str(r.rank), str(r.rank), "3", "127.0.0.1", "lo", "1", "more"], strict=True)
        )


def test_lines_of_both_streams_arrive_whole_and_in_order() -> None:
    code = (
        "import os, sys; r = os.environ['RANK']; print('a', r); print('\\xe4' * 70000); "
        "sys.stdout.write('no end'); print('oops', r, file=sys.stderr)"
    )
    heard: list[tuple[int, str]] = []
    results = launch(["-c", code], ranks=2, timeout=HANGS, on_line=lambda rank, line: heard.append((rank, line)))
    for r in results:
        assert r.stdout == (f"a {r.rank}", "ä" * 70000, "no end")
        assert r.stderr == (f"oops {r.rank}",)
        assert [line for rank, line in heard if rank == r.rank and "oops" not in line] == list(r.stdout)


def test_a_failing_rank_ends_all_with_one_line_that_names_it() -> None:
    code = PIDS + (
        "import sys\n"
        "if os.environ['RANK'] == '1':\n"
        "    print('what went wrong', file=sys.stderr); sys.exit(3)\n"
        "time.sleep(600)"
    )
    with pytest.raises(LaunchError) as caught:
        launch(["-c", code], ranks=3, timeout=HANGS)
    assert str(caught.value) == "rank 1 ended with exit code 3: what went wrong"
    assert not any(alive(r.report) for r in caught.value.results if r.report)


def test_a_killed_rank_is_named_with_its_signal() -> None:
    with pytest.raises(Error, match=r"^rank 0 was killed by SIGKILL$"):
        launch(["-c", "import os; os.kill(os.getpid(), 9)"], ranks=1, timeout=HANGS)


def test_time_out_ends_even_ranks_that_ignore_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's clock jumps over the time-out once both ranks ignore SIGTERM, however slowly they start."""
    monkeypatch.setattr(module, "GRACE", 1.0)
    heard: list[str] = []

    def now() -> float:
        return time.monotonic() + (600.0 if len(heard) == 2 else 0.0)

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=now))
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf'); time.sleep(600)"
    with pytest.raises(LaunchError, match=r"^rank 0, 1 did not end within 500 s") as caught:
        launch(["-c", code], ranks=2, timeout=500, on_line=lambda _, line: heard.append(line))
    assert [r.code for r in caught.value.results] == [-signal.SIGKILL] * 2


def test_processes_that_a_rank_started_end_with_it() -> None:
    code = (
        "import subprocess; from dovetail.emulate.launch import report; "
        "report(subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL).pid)"
    )
    (result,) = launch(["-c", code], ranks=1, timeout=HANGS)
    assert within(HANGS, lambda: not alive(result.report))


LAUNCHER = """
import sys
from dovetail.emulate.launch import launch
code = "import os, time; print(os.getpid()); time.sleep(900)"
launch(["-c", code], ranks=3, timeout=900, on_line=lambda rank, line: print(line, flush=True))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_rank_outlives_its_launcher(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as launcher:
        assert launcher.stdout is not None
        pids = [int(launcher.stdout.readline()) for _ in range(3)]
        assert all(alive(pid) for pid in pids)
        launcher.send_signal(number)
        launcher.wait(HANGS)
    assert within(HANGS, lambda: not any(map(alive, pids)))


def test_report_prints_without_a_launcher(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv(module.REPORT, raising=False)
    report({"seconds": 1.5})
    assert json.loads(capsys.readouterr().out) == {"seconds": 1.5}


def test_wrong_use_is_one_line() -> None:
    with pytest.raises(Error, match="ranks: expected at least 1, got 0"):
        launch(["-c", ""], ranks=0, timeout=1)
    with pytest.raises(Error, match="timeout: expected more than 0 seconds, got 0"):
        launch(["-c", ""], ranks=1, timeout=0)


def test_a_launch_leaves_no_open_file() -> None:
    launch(["-c", ""], ranks=1, timeout=HANGS)
    before = len(list(Path("/proc/self/fd").iterdir()))
    launch(["-c", ""], ranks=2, timeout=HANGS)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
