"""torch's own tests of DistributedDataParallel pass with dovetail's class in its place."""

from __future__ import annotations

import pytest

from .page import page
from .runner import PAGE, broken, run, stored

SOME = {
    "plain": (
        "test_DistributedDataParallelCPU_grad_is_view",
        "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false",
        "test_static_graph_api_cpu",
        "test_grads_same_across_ranks_with_no_sync",
        "test_ddp_hook_parity_allreduce",
        "test_ddp_apply_optim_in_backward_ignored_params",
        "test_ddp_build_debug_param_to_name_mapping",
        "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none",
        "test_ddp_forward_backward_hook",
        "test_ddp_logging_data_cpu",
    ),
}
"""A few seconds of them, chosen so that each asks for something that a planned reducer could spoil."""


def test_what_torchs_class_passes_dovetails_passes() -> None:
    _, tests = stored()
    assert len(tests) > 80
    assert not broken(tests)


def test_the_page_says_what_is_expected() -> None:
    version, tests = stored()
    assert PAGE.read_text(encoding="utf-8") == page(tests, version)


@pytest.mark.parametrize("contestant", SOME)
def test_outcomes_are_the_expected_ones(contestant: str) -> None:
    _, tests = stored()
    seen = {
        found["test"]: (found["outcome"], found["reason"]) for found in run(contestant, SOME[contestant], timeout=300)
    }
    wanted = {name: tests[name][contestant] for name in SOME[contestant]}
    assert {name: outcome for name, (outcome, _) in seen.items()} == {n: o["outcome"] for n, o in wanted.items()}, seen
