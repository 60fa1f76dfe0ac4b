"""Output of jobs: logs are bounded."""

from __future__ import annotations

from pathlib import Path

from dovetail.cluster.output import Log


def test_a_log_that_grows_too_long_keeps_its_end(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.txt", limit=10_000)
    other = Log(tmp_path / "log.txt", limit=10_000)
    for i in range(2000):
        (log if i % 2 else other).write(f"line {i}\n".encode())
        if i % 100 == 0:
            log.trim()
            other.trim()
    text = (tmp_path / "log.txt").read_text()
    assert len(text) < 12_000 and text.endswith("line 1999\n")
    assert text.startswith("[dovetail: earlier output was dropped]\nline ")
    log.close()
    log.trim()  # the heartbeat thread may come just then
    other.close()
