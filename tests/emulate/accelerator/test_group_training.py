"""torch's own data parallel training gives the CPU's losses, to the bit, on the accelerator and its process group."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import run_all

from . import group_training_scenarios as scenarios

DDP: dict[str, dict[str, Any]] = {
    "cnn with batch norm": {"kind": "cnn"},
    "transformer": {"kind": "transformer"},
    "unused parameters": {"kind": "branches", "find_unused_parameters": True},
    "static graph": {"kind": "cnn", "static_graph": True},
    "gradients as views": {"kind": "transformer", "gradient_as_bucket_view": True},
    "no_sync": {"kind": "cnn", "no_sync": True},
    "all-reduce hook": {"kind": "cnn", "hook": "allreduce_hook"},
    "half-precision hook": {"kind": "cnn", "hook": "fp16_compress_hook"},
    "bfloat16 hook": {"kind": "cnn", "hook": "bf16_compress_hook"},
}
OTHERS = {
    "Join": scenarios.losses_with_join,
    "ZeroRedundancyOptimizer": scenarios.losses_with_zero,
    "fully_shard": scenarios.losses_of_fully_shard,
}


@pytest.fixture(scope="module")
def reports() -> dict[tuple[str, str], list[Any]]:
    """By scenario and device: what each rank returned. All in the same two processes."""
    calls: dict[tuple[str, str], tuple[Any, dict[str, Any]]] = {}
    for on in ("cpu", "emu"):
        for name, given in DDP.items():
            calls[name, on] = (scenarios.losses_of_ddp, {"on": on} | given)
        for name, scenario in OTHERS.items():
            calls[name, on] = (scenario, {"on": on})
    for jitter in (0.0, scenarios.JITTER):
        calls["mixed precision", str(jitter)] = (scenarios.losses_in_mixed_precision, {"jitter": jitter})
    calls["full precision", "emu"] = (scenarios.losses_of_ddp, {"on": "emu", "kind": "perceptron"})
    for dtype in ("float32", "bfloat16"):
        calls["SyncBatchNorm", dtype] = (scenarios.synchronised_batch_norm, {"dtype": dtype})
    found = run_all(list(calls.values()), timeout=600)
    return {key: [rank[i] for rank in found] for i, key in enumerate(calls)}


@pytest.mark.parametrize("name", [*DDP, *OTHERS])
def test_losses_are_the_cpus_with_jitter_on_every_kernel(reports: dict[tuple[str, str], list[Any]], name: str) -> None:
    on_cpu, emulated = reports[name, "cpu"], reports[name, "emu"]
    assert all(len(set(losses)) > 2 for losses in on_cpu)
    assert emulated == on_cpu


def test_mixed_precision_is_near_full_precision_and_the_same_with_jitter(
    reports: dict[tuple[str, str], list[Any]],
) -> None:
    quiet, late = reports["mixed precision", "0.0"], reports["mixed precision", str(scenarios.JITTER)]
    assert quiet == late
    for low, full in zip(quiet, reports["full precision", "emu"], strict=True):
        assert low[0] == pytest.approx(full[1], rel=0.05)
    assert [low[3:] for low in quiet] == [quiet[0][3:]] * 2  # parameters are the same on both ranks


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.05)])
def test_synchronised_batch_norm_is_that_of_the_whole_batch(
    reports: dict[tuple[str, str], list[Any]], dtype: str, tolerance: float
) -> None:
    for differences in reports["SyncBatchNorm", dtype]:
        assert max(differences) < tolerance
