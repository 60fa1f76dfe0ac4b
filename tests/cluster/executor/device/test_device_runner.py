"""Tasks on an accelerator: the CPU's bits, copies beside the computation, one wait per task, a budget that is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.paths import ROOT

HANG = 600.0
"""Seconds; the accelerator may have to be built first."""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What the scenarios found, all in one process."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.cluster.executor.device.scenarios"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=HANG, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_losses_parameters_and_buffers_are_the_cpus_to_the_bit_also_with_jitter_on_every_kernel(
    found: dict[str, Any],
) -> None:
    same = found["same_bits"]
    assert len(same) == 5 and all(same.values()), same


def test_where_the_device_has_kernels_of_its_own_losses_differ_by_rounding_only(found: dict[str, Any]) -> None:
    assert found["nearly_same_losses"].keys() == {"Recurrent", "Normed"}
    assert max(found["nearly_same_losses"].values()) < 1e-5, found["nearly_same_losses"]


def test_the_host_waits_once_per_task_and_a_closed_job_leaves_nothing_on_the_device(found: dict[str, Any]) -> None:
    seen = found["waits"]
    assert seen["waits"] == seen["tasks"], seen["where"]
    assert (seen["left"], seen["closed"]) == (0, 0), "bytes that tasks, and closed jobs, leave on the device"


def test_gradients_leave_and_the_next_jobs_parameters_arrive_while_the_device_computes(found: dict[str, Any]) -> None:
    ahead = found["overlap"]
    assert ahead["gradients"] > 0, "the first gradients had left before backward had ended"
    assert ahead["parameters"] > 0, "the other job's parameters had arrived before this job's task had ended"
    assert ahead["waits"] == 1, "and its task did not wait for them again"


def test_a_wait_between_streams_that_is_left_out_is_a_race_that_fails_the_task(found: dict[str, Any]) -> None:
    assert found["races"]["parameters"].startswith("Race: ") and "copy H2D" in found["races"]["parameters"]
    assert found["races"]["gradients"].startswith("Race: ") and "copy D2H" in found["races"]["gradients"]


def test_three_jobs_on_a_device_with_room_for_one_evict_each_other_and_learn_the_same(found: dict[str, Any]) -> None:
    seen = found["one_of_three"]
    assert seen["same"]
    assert seen["need"] < seen["most"] <= seen["limit"] < 2 * seen["need"]
    assert seen["evictions"] >= 3 * 4 - 1, "all but the first job's first task found another job there"
    assert found["room_for_all"] == 0


def test_a_task_that_runs_out_of_memory_beside_other_jobs_is_run_again_alone(found: dict[str, Any]) -> None:
    assert found["wrong_guess"]["same"]
    assert found["wrong_guess"]["failed"] > 0, "it did run out of memory"


def test_a_job_that_does_not_fit_alone_fails_with_one_line_and_the_next_one_runs(found: dict[str, Any]) -> None:
    lines, loss = found["too_large"]["lines"], found["too_large"]["loss"]
    assert all(line.startswith("memory of emu:1: a task needs ") and "\n" not in line for line in lines), lines
    assert loss > 0


def test_memory_that_a_jobs_code_keeps_on_the_device_is_named_where_it_leaves_too_little(found: dict[str, Any]) -> None:
    seen = found["kept"]
    assert (seen["fits"], seen["again"]) == ("", "")
    assert seen["fails"].endswith("MiB are kept by the code of jobs there"), seen


def test_batches_of_every_shape_are_moved_through_pinned_memory(found: dict[str, Any]) -> None:
    assert found["batches"] == [
        "emu:1",
        "emu:1text",
        "emu:1Named",
        "emu:1 cpu",  # a packed sequence moves itself: its sizes stay on the host
        "emu:1 []",
        "cpu",  # the batch itself is not changed
        "4 True",
    ]


def test_errors_of_a_jobs_code_and_of_its_kernels_are_its_own(found: dict[str, Any]) -> None:
    seen = found["faults"]
    assert "index out of range" in seen["kernel"], "a kernel that fails after its launch"
    assert "same device" in seen["tensors of two devices"]
    assert seen["python"] == "RuntimeError: out of paper"
    assert seen["same"], "another job on the device does not notice"
