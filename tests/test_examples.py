"""Every example trains with two real ranks; with a stored plan torch's buckets are the plan's, to the byte."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from dovetail.core import files
from dovetail.core.plan import Plan
from tests.paths import EXAMPLES

from .train.test_integrations import plan_for

TIMEOUT = 240.0  # seconds for one example
LAYERS = [(64, 512), (512, 512), (512, 512), (512, 10)]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def test_every_example_is_tested() -> None:
    tested = {"ddp_digits", "plan_file", *(name for name, _ in LIBRARIES), "ray_train"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tested


LIBRARIES = [
    ("lightning_digits", "lightning"),
    ("fabric_digits", "lightning"),
    ("accelerate_digits", "accelerate"),
    ("hf_trainer", "transformers"),
]


@pytest.mark.parametrize(("name", "package"), LIBRARIES)
def test_one_line_plans_in_a_training_library(name: str, package: str) -> None:
    need(package, "sklearn")
    output = finish([*TORCHRUN, str(EXAMPLES / f"{name}.py")])
    assert_loss_fell(output)
    assert re.search(r"^dovetail: 2 workers, \d+ tensors, .+ of gradients a step$", output, re.MULTILINE), output


def test_a_training_library_follows_a_stored_plan(tmp_path: Path) -> None:
    need("lightning", "sklearn")
    files.write(tmp_path / "plan.json", digits_plan())
    output = finish([*TORCHRUN, str(EXAMPLES / "fabric_digits.py"), "--plan", str(tmp_path / "plan.json")])
    assert_loss_fell(output)
    assert "dovetail: a given plan (by hand, 3 buckets)" in output


def digits_plan() -> Plan:
    layers = [nn.Identity() if i % 2 else nn.Linear(*LAYERS[i // 2]) for i in range(7)]  # as the examples have them
    return plan_for(nn.Sequential(*layers), [2, 4, 8])


def test_plain_ddp_follows_a_stored_plan(tmp_path: Path) -> None:
    need("sklearn")
    plan = digits_plan()
    files.write(tmp_path / "plan.json", plan)
    output = finish([*TORCHRUN, str(EXAMPLES / "plan_file.py"), "--plan", str(tmp_path / "plan.json")])
    assert_loss_fell(output)
    assert listed("torch uses buckets of", output) == [b.bytes for b in plan.buckets]
    assert len(plan.buckets) == 3


def test_one_changed_line_plans_tries_and_explains() -> None:
    need("sklearn")
    output = finish([*TORCHRUN, str(EXAMPLES / "ddp_digits.py")])
    assert_loss_fell(output)
    trials = re.findall(r"^  (kept|tried) ", output, re.MULTILINE)
    assert len(trials) >= 2 and trials.count("kept") == 1
    assert "torch's own buckets" in output and "  result " in output


def test_one_line_plans_in_ray_train_and_leaves_no_process(ray_folder: Path) -> None:
    need("ray", "sklearn")
    environment = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": str(ray_folder),
        "RAY_AUTH_MODE": "disabled",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(TIMEOUT),
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    }
    output = finish([sys.executable, str(EXAMPLES / "ray_train.py")], environment)
    assert_loss_fell(output)
    assert "dovetail: 2 workers, 8 tensors, " in output


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    # Ray puts sockets there, whose paths may have about a hundred characters: pytest's own folders are too deep.
    with tempfile.TemporaryDirectory(prefix="dt-ray-") as folder:
        yield Path(folder)


def need(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'dovetail-train[examples]'")


def finish(command: list[str], environment: dict[str, str] | None = None) -> str:
    """Standard output of an example that ended well, once none of its processes is left."""
    mark = f"dovetail-test-{os.getpid()}-{os.urandom(8).hex()}"
    own = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    process = subprocess.Popen(
        command,
        env={**os.environ, **own, **(environment or {}), "DOVETAIL_TEST": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=TIMEOUT)
        ended = time.monotonic() + 30
        while marked(mark) and time.monotonic() < ended:  # daemons may need a moment
            time.sleep(0.1)
    finally:
        left = {pid: kill(pid) for pid in marked(mark)}
    assert process.returncode == 0, f"{output}\n{errors}"
    assert not left, f"processes left: {left}"
    return output


def marked(mark: str) -> list[int]:
    """Processes that inherited our mark in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"DOVETAIL_TEST={mark}".encode() in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


def kill(pid: int) -> str:
    """What the process was."""
    try:
        name = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return "gone meanwhile"
    return name


def assert_loss_fell(output: str) -> None:
    losses = [float(loss) for loss in re.findall(r"(?<!_)\bloss\W+([\d.]+)", output)]
    assert len(losses) >= 3, output
    assert losses[-1] < 0.8 * losses[0], output


def listed(after: str, output: str) -> list[int]:
    """The first list of numbers that stands behind these words."""
    match = re.search(re.escape(after) + r" (\[[\d, ]+\])", output)
    assert match, output
    numbers: list[int] = json.loads(match[1])
    return numbers
