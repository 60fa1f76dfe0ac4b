"""The emulated accelerator's process group keeps NCCL's rules, and says in one line which of them was broken."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.emulate.launch import launch
from tests.ranks import run_all

from . import group_failure_scenarios as failures
from . import group_processes
from . import group_result_scenarios as results
from . import group_scenarios as scenarios

HANGS = 300.0
DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "int32", "int8", "uint8", "bool")

Reports = dict[str, list[Any]]
"""By scenario: what each rank returned."""


@pytest.fixture(scope="module")
def two() -> Reports:
    """All scenarios of two ranks, in the same two processes."""
    named: dict[str, tuple[Any, dict[str, Any]]] = {
        f"collectives {dtype}": (results.collectives_equal_gloos, {"dtype": dtype, "whole": False}) for dtype in DTYPES
    }
    for scenario in (
        results.what_gloo_cannot_do,
        scenarios.wait_orders_streams_only,
        scenarios.barrier_blocks_the_host,
        scenarios.forgotten_waits,
        scenarios.memory_outlives_its_owner,
        scenarios.futures_follow_streams,
        failures.both_receive_first,
        failures.messages_keep_their_order,
        failures.one_rank_stays_away,
        failures.a_wait_with_a_timeout,
        failures.a_timeout_that_is_changed,
        failures.aborted,
        failures.different_calls,
        failures.refused,
        failures.groups_of_groups,
        scenarios.threads_may_share_a_group,
    ):
        named[scenario.__name__] = (scenario, {})
    reports = run_all(list(named.values()), timeout=HANGS)
    return {name: [rank[i] for rank in reports] for i, name in enumerate(named)}


# --- Results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_collective_gives_gloos_bits(two: Reports, dtype: str) -> None:
    for rank, (*different, compared) in enumerate(two[f"collectives {dtype}"]):
        assert different == []
        assert int(compared.split()[0]) >= 12 + rank


def test_collectives_of_three_ranks_give_gloos_bits() -> None:
    calls = [(results.collectives_equal_gloos, {"dtype": d, "whole": True}) for d in ("float32", "int64")]
    for rank in run_all(calls, ranks=3, timeout=HANGS):
        assert [len(names) for names in rank] == [1, 1], rank


def test_what_gloo_lacks_is_there(two: Reports) -> None:
    for rank, found in enumerate(two["what_gloo_cannot_do"]):
        assert found["uneven"] == [[0.0], [1.0, 1.0]]
        assert found["letters"] == [[0.0] * (10 * rank), [1.0] * (10 * rank + 1)]
        assert found["flags"] == [[True, False, True]]
        assert found["eighth"] == [[2.5] * 3]
        assert found["turned"] == [[[2.0, 1.0]] * 2]
        assert found["sums"] == [[3.0], [5.0] * 2, [7.0] * 3]
        assert found["gathered"] == [[0.0, 1.0], [0.0, 0.0, 1.0, 1.0]]
        assert found["shares"] == [[2.0 * rank], [4.0 * rank, 4.0 * rank + 2]]
        assert found["roots"] == [[0.0, 0.0], [1.0, 1.0]]


# --- Streams ----------------------------------------------------------------------------------------------------------


def test_wait_orders_streams_and_does_not_block_the_host(two: Reports) -> None:
    for found in two["wait_orders_streams_only"]:
        assert found["ahead"] == [True, True, True]
        assert found["waits"] == 0
        assert found["none"]  # as NCCL: nothing to wait for after a collective on the current stream
        assert found["values"] == [12.0, 2.0]
        assert found["completed"]


def test_a_barrier_blocks_the_host(two: Reports) -> None:
    assert two["barrier_blocks_the_host"] == [[True, True], [True, True]]


def test_a_forgotten_wait_is_found_with_its_line(two: Reports) -> None:
    expected = {
        "all_reduce": ("aten::add", "eccl:all_reduce"),
        "gathered": ("aten::sum", "eccl:all_gather_into_tensor"),
        "overwritten": ("aten::zero_", "eccl:all_reduce"),
        "coalesced": ("aten::add", "eccl:coalesced"),
        "batch": ("aten::add", "eccl:coalesced"),
        "launched too early": ("eccl:all_reduce", "aten::fill_"),
        "another stream": ("aten::add", "eccl:all_reduce"),
    }
    for said in two["forgotten_waits"]:
        assert said.pop("waited") == ""
        assert set(said) == set(expected)
        for name, (second, first) in expected.items():
            assert said[name].startswith("Race: ") and "group_scenarios.py:" in said[name], said[name]
            assert said[name].index(second) < said[name].index(first), said[name]


def test_memory_in_use_is_neither_reused_nor_reported(two: Reports) -> None:
    for found in two["memory_outlives_its_owner"]:
        assert found["sums"] == [256.0 * (20 * i + 1) for i in range(8)]
        assert found["races"] == []


def test_a_callback_runs_at_once_on_a_stream_behind_the_collective(two: Reports) -> None:
    for found in two["futures_follow_streams"]:
        assert found == {"completed when called": [False], "value": 1.0, "result": 2.0}


def test_host_threads_may_take_turns(two: Reports) -> None:
    assert two["threads_may_share_a_group"] == [[2.0 * n for n in range(1, 11)]] * 2


# --- Point to point ---------------------------------------------------------------------------------------------------


def test_two_ranks_that_receive_first_wait_for_the_time_out_and_a_batch_does_not(two: Reports) -> None:
    for rank, (device, next_call, arrived) in enumerate(two["both_receive_first"]):
        reason = f"eccl: rank {rank}: recv from rank {1 - rank} of float32[4], point-to-point operation 1"
        assert reason in device and "group_failure_scenarios.py:" in device
        assert next_call.startswith(f"DistBackendError: {reason}") and "\n" not in next_call
        assert arrived == "[5.0, 5.0, 5.0, 5.0]"
    assert any("did not finish within 2 s" in said for said, _, _ in two["both_receive_first"])


def test_messages_arrive_in_the_order_in_which_they_are_posted(two: Reports) -> None:
    assert two["messages_keep_their_order"] == [[0.0, 2.0, 4.0, 10.0, 11.0, 12.0], [1.0, 3.0, 5.0, 10.0, 11.0, 12.0]]


# --- What goes wrong --------------------------------------------------------------------------------------------------


def test_a_collective_that_takes_too_long_ends_the_group_and_not_the_process(two: Reports) -> None:
    first, second = two["one_rank_stays_away"]
    reason = "all_reduce (SUM) of float32[3, 2], collective 1 did not finish within 2 s"
    line = f"DistBackendError: eccl: rank 0: {reason}"
    assert first["wait returned"] == ""
    assert reason in first["device"] and "group_failure_scenarios.py:" in first["device"]
    assert [first[call] for call in ("wait again", "next call", "and the next")] == [line] * 3
    assert first["exception"] == f"eccl: rank 0: {reason}"
    assert first["completed"]
    assert f"because rank 0 gave up: {reason}" in second["next call"]
    assert f"because rank 0 gave up: {reason}" in second["and the next"] and "\n" not in second["and the next"]
    for rank in (first, second):
        assert rank["kernels"] == 6.0
        assert rank["another group"] == 2.0


def test_a_wait_with_a_time_out_blocks_the_host(two: Reports) -> None:
    first, second = two["a_wait_with_a_timeout"]
    assert first["blocked"] and second["blocked"]
    assert "all_reduce (SUM) of float32[3], collective 2 did not finish within 0.05 s" in first["late"]


def test_the_time_out_can_be_changed(two: Reports) -> None:
    assert "did not finish within 1 s" in two["a_timeout_that_is_changed"][0]


def test_abort_ends_what_waits_on_all_ranks(two: Reports) -> None:
    first, second = two["aborted"]
    assert first["device"] == ""  # no error of the device: the program asked for it
    assert first["wait"] == first["next call"] == "DistBackendError: eccl: rank 0: the group was aborted"
    assert "ended, because rank 0 gave up: the group was aborted" in second["wait"]
    assert second["wait"] == second["next call"]


def test_different_calls_are_named_on_every_rank(two: Reports) -> None:
    claims = {
        "operation": (
            "all_reduce (SUM) of float32[4], collective 2",
            "broadcast from rank 0 of float32[4], collective 2",
        ),
        "size": ("all_reduce (SUM) of float32[4]", "all_reduce (SUM) of float32[2, 3]"),
        "type": ("all_reduce (SUM) of float32[4]", "all_reduce (SUM) of int32[4]"),
        "root": ("broadcast from rank 0", "broadcast from rank 1"),
        "reduction": ("all_reduce (SUM)", "all_reduce (MAX)"),
        "message": ("send to rank 1 of float32[4]", "recv from rank 0 of float32[3]"),
        "coalesced": (
            "all_reduce (SUM) of float32[4] and all_reduce (SUM) of float32[4]",
            "all_reduce (SUM) of float32[4] and all_reduce (SUM) of float32[3]",
        ),
    }
    for said in two["different_calls"]:
        for name, calls in claims.items():
            for rank, call in enumerate(calls):
                assert f"rank {rank} called {call}" in said[name], said[name]
        assert "rank 0 sends 4 bytes to rank 0, which expects 8" in said["splits"]


def test_what_nccl_refuses_is_refused(two: Reports) -> None:
    expected = {
        "cpu": "RuntimeError: No backend type associated with device type cpu",
        "cpu, asked directly": "ValueError: Tensors must be on an emu device and dense",
        "not contiguous": "ValueError: Tensors must be contiguous",
        "short": "TypeError: Input tensor data type is not supported for NCCL process group: Short",
        "BAND": "ValueError: Cannot use ReduceOp.BAND with NCCL",
        "AVG of bool": "TypeError: Cannot use ReduceOp.AVG with Boolean inputs",
        "any source": "NotImplementedError: eccl does not support recvAnysource, as NCCL does not",
        "two devices": "ValueError: Expected list of tensors on the same device",
        "sizes": "ValueError: output tensor size must be equal to world_size times input tensor size",
        "after": "[1.0, 1.0]",
    }
    for said in two["refused"]:
        assert said.pop("monitored").startswith("RuntimeError: Backend eccl does not support monitoredBarrier")
        assert said == expected


def test_groups_of_some_ranks_work_and_leave_no_thread_or_descriptor(two: Reports) -> None:
    for found in two["groups_of_groups"]:
        assert found["alone"] == 7.0
        assert max(found["left"]) <= 0  # of five groups; what other scenarios left may go meanwhile


# --- Beginnings and ends ----------------------------------------------------------------------------------------------


def run_module(name: str, ranks: int) -> list[Any]:
    return [r.report for r in launch(["-m", group_processes.__name__, name], ranks=ranks, timeout=HANGS)]


def test_every_way_to_begin_a_group_gives_the_devices_backend() -> None:
    for rank, found in enumerate(run_module("ways_to_begin", 2)):
        for way in ("by name", "by device", "bare", "bound", "device only", "checked by torch too"):
            assert found[way] == [3.0, "eccl"], way
        assert found["with the CPU"] == [2.0, [{"rank": 0}, {"rank": 1}]]
        refused = "Attempt to perform collective on tensor not on device passed to init_process_group"
        assert found["other device"] == f"DistBackendError: {refused}"
        assert found["split"] == [rank + 1.0, 3.0]
        assert found["some"] == 1.0
        assert found["message"] == 0.0


def test_a_rank_that_is_killed_ends_the_group_of_the_others() -> None:
    (found,) = run_module("survives_the_other_rank", 1)
    reason = "eccl: rank 0: all_reduce (SUM) of float32[3], collective 2 failed: "
    assert reason in found["device"] and "a rank has ended, or left the group" in found["device"]
    assert found["wait"].startswith(f"DistBackendError: {reason}") and found["wait"] == found["next call"]
    assert found["kernels"] == 3.0
    assert found["seconds"] < HANGS / 2  # it was the connection that told, and no time-out
