"""Checkpoints and losses on disk: complete or absent, readable with plain torch, and never ahead of each other."""

from __future__ import annotations

import collections
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.cluster.aggregator import checkpoint
from dovetail.cluster.aggregator.checkpoint import Damaged, Losses, Writer, newest
from dovetail.core.errors import Error


def state(iteration: int) -> dict[str, Any]:
    return {"iteration": iteration, "model": {"w": torch.full((3,), float(iteration))}, "optimizer": {"state": {}}}


def test_the_newest_two_are_kept_and_torn_or_foreign_files_are_skipped(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    for iteration in (5, 10, 15):
        checkpoint.write(tmp_path, iteration, state(iteration))
    assert [n for n, _ in checkpoint.found(tmp_path)] == [15, 10]
    folder = tmp_path / "checkpoints"
    whole = (folder / "00000015.pt").read_bytes()
    (folder / ".00000020.pt.77").write_bytes(whole)
    (folder / "notes.pt").write_bytes(whole)
    for torn in (b"", b"PK", whole[:200], whole[: len(whole) - 30], b"\x80\x04K\x01."):
        (folder / "00000020.pt").write_bytes(torn)
        with pytest.raises(Damaged, match="cannot be read"):
            checkpoint.read(folder / "00000020.pt")
        found = newest(tmp_path)
        assert found is not None and found["iteration"] == 15
    torch.save({"model": {}}, folder / "00000020.pt")
    found = newest(tmp_path)
    assert found is not None and torch.equal(found["model"]["w"], torch.full((3,), 15.0))
    checkpoint.tidy(tmp_path)
    assert sorted(p.name for p in folder.iterdir()) == ["00000010.pt", "00000015.pt", "00000020.pt", "notes.pt"]


def test_a_checkpoint_that_cannot_be_written_leaves_no_file_and_is_an_error_at_the_end(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.begin(3, {**state(3), "odd": lambda: 1})
    with pytest.raises(Error, match="checkpoint: "):
        writer.finish()
    assert not list((tmp_path / "checkpoints").iterdir()) and writer.done == -1
    writer.begin(4, state(4))
    writer.finish()
    assert (writer.done, writer.error, writer.busy) == (4, "", False)


def test_a_state_is_copied_deeply_and_keeps_its_types() -> None:
    tensor = torch.zeros(2)
    given = {"a": [tensor, (tensor, 1)], "c": collections.Counter([2, 2, 5]), "none": None}
    copy = checkpoint.copied(given)
    tensor.add_(1)
    assert copy["a"][0].tolist() == copy["a"][1][0].tolist() == [0.0, 0.0]
    assert copy["c"] == given["c"] and type(copy["c"]) is collections.Counter


def test_losses_are_cut_to_the_checkpoint_and_written_again_with_the_same_bytes(tmp_path: Path) -> None:
    path, values = tmp_path / "losses.jsonl", [2.5, 1e-17, 1 / 3, 0.1 + 0.2]
    losses = Losses(tmp_path, 0)
    for i, value in enumerate(values):
        losses.add(i, value)
    whole = path.read_bytes()
    assert checkpoint.losses(tmp_path) == values
    path.write_bytes(whole + b'{"iteration": 4, "lo')
    again = Losses(tmp_path, 2)
    assert again.last == 1e-17 and path.read_bytes() == b"".join(whole.splitlines(True)[:2])
    for i, value in enumerate(values[2:], start=2):
        again.add(i, value)
    assert path.read_bytes() == whole
    assert Losses(tmp_path, 99).last == values[-1] and path.read_bytes() == whole


def test_a_full_disk_neither_stops_training_nor_loses_a_line(tmp_path: Path) -> None:
    losses = Losses(tmp_path, 0)
    losses.add(0, 1.0)
    room, losses._handle = losses._handle, os.open("/dev/full", os.O_WRONLY)
    losses.add(1, 0.5)
    losses.add(2, 0.25)
    with pytest.raises(OSError, match="No space left"):
        losses.sync()
    os.close(losses._handle)
    losses._handle = room
    losses.sync()
    assert checkpoint.losses(tmp_path) == [1.0, 0.5, 0.25]
