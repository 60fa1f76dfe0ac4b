"""The Ray engine on two Ray nodes: jobs span machines, and survive the loss of the coordinator and of a machine."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from dovetail.cluster.home import Home
from tests.cluster.trial import trial
from tests.paths import ROOT

TIMEOUT = 1500.0
"""Seconds after which the session hangs."""


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install ray")
def test_a_cluster_on_two_ray_nodes_trains_as_one_machine_does_and_survives_losses() -> None:
    # Ray puts sockets there, whose paths may have about a hundred characters: pytest's own folders are too deep.
    with tempfile.TemporaryDirectory(prefix="dt-ray-") as folder:
        saw = run(Path(folder))
        home = Home(Path(folder) / "home")
        assert saw["engine"] == "ray" and len(set(saw["nodes"])) == 2
        assert saw["first"] == saw["second"] == saw["third"] == "finished", saw
        assert saw["devices"] == [0, 1], "both machines took tasks"
        assert saw["same"] and saw["starts"] == 1, "the second job did not notice that its coordinator died"
        assert saw["begins_the_same"], "a lost machine changes no loss value"
        assert trial.left(home) == []
    with trial.cluster(devices=2, emulated=True) as client:
        job = trial.submit(client, trial.CHAOS_JOB, name="near", steps=30, workers=2, spb="ladder")
        trial.wait(client, [job], limit=600.0)
        assert trial.curve(trial.home_of(client), job).decode() == saw["curve"], "bit for bit, near or far"


def run(folder: Path) -> dict[str, Any]:
    """Runs the session and ends all its processes; what it printed."""
    mark = f"dovetail-test-{os.urandom(8).hex()}"
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_TMPDIR": str(folder),
        # A lost node is noticed within ten seconds; a node of a loaded machine that is late is not lost.
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_failure_threshold": "8",
        "DOVETAIL_TEST": mark,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.cluster.engines.ray_session", str(folder)],
        env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=TIMEOUT)
    finally:
        for entry in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"DOVETAIL_TEST={mark}".encode() in entry.read_bytes().split(b"\0"):
                    os.kill(int(entry.parent.name), signal.SIGKILL)
            except OSError:
                continue
    line = next((line for line in output.splitlines() if line.startswith("saw ")), None)
    logs = "\n".join(p.read_text(errors="replace")[-2000:] for p in (folder / "home" / "logs").glob("*.log"))
    assert line is not None, f"{output[-2000:]}\n{errors[-4000:]}\n{logs}"
    found: dict[str, Any] = json.loads(line.removeprefix("saw "))
    return found
