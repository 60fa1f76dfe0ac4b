from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.core.scratch import scratch

OWNER = """
import signal, sys
from dovetail.core.scratch import scratch
with scratch("test") as folder:
    (folder / "half").write_text("written")
    print(folder, flush=True)
    signal.pause()
"""


@pytest.fixture(autouse=True)
def _somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def test_a_folder_is_gone_at_the_end_also_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), scratch("test") as folder:
        (folder / "file").touch()
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_killed_owners_folder_goes_with_the_next_and_a_living_owners_stays(tmp_path: Path) -> None:
    owners = [subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        folders = [Path(owner.stdout.readline().strip()) for owner in owners if owner.stdout]
        owners[0].send_signal(signal.SIGKILL)
        owners[0].wait(20)
        assert folders[0].exists()
        with scratch("test") as mine:
            assert set(tmp_path.iterdir()) == {folders[1], mine}
            assert (folders[1] / "half").read_text() == "written"
    finally:
        for owner in owners:
            owner.kill()
            owner.wait(20)
            assert owner.stdout is not None
            owner.stdout.close()


def test_folders_of_another_name_and_fresh_folders_stay(tmp_path: Path) -> None:
    fresh, other = tmp_path / "dovetail-test-fresh", tmp_path / "dovetail-testing"
    fresh.mkdir()  # its owner may be about to lock it
    other.mkdir()
    old = tmp_path / "dovetail-test-old"
    old.mkdir()
    os.utime(old, (0, 0))
    with scratch("test") as mine:
        assert set(tmp_path.iterdir()) == {fresh, other, mine}
