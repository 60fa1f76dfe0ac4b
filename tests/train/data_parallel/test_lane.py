"""overlap="forward": the end of a rank takes nothing away from those that go on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from dovetail.emulate.launch import launch
from tests.paths import ROOT

from . import lane_scenarios

WAYS = {"destroys its groups": 2, "just ends": 3, "is a fork": 2, "destroys an emulated channel": 2}


@pytest.mark.parametrize("way", WAYS)
def test_the_last_step_is_stored_whole_while_other_ranks_end(tmp_path: Path, way: str) -> None:
    launch(
        ["-m", "tests.train.data_parallel.lane_scenarios", way, str(tmp_path)],
        ranks=WAYS[way],
        timeout=400,
        env={"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
    )
    kept, expected = torch.load(tmp_path / "kept.pt"), lane_scenarios.alone(WAYS[way]).state_dict()
    assert list(kept) == list(expected)
    assert all(torch.allclose(kept[name], value, rtol=0, atol=1e-12) for name, value in expected.items())


def test_no_thread_and_no_descriptor_is_left_of_a_model_or_of_a_process_group(tmp_path: Path) -> None:
    ranks = launch(
        ["-m", "tests.train.data_parallel.leak_scenarios", str(tmp_path)],
        ranks=2,
        timeout=400,
        env={"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
    )
    for rank in ranks:
        assert len({tuple(counts) for counts in rank.report["dropped"]}) == 1, rank.report
        (threads, descriptors), torchs = (
            [last - first for first, last in zip(rank.report[way][0], rank.report[way][-1], strict=True)]
            for way in ("destroyed", "torch's")
        )
        assert threads <= torchs[0] and descriptors <= torchs[1], rank.report
