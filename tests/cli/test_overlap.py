"""`dovetail plan --overlap forward` and `dovetail simulate` of what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from dovetail.core import files
from dovetail.core.plan import Plan
from dovetail.measure.presets import preset
from dovetail.view.explain import explain
from tests.planning.merge.oracle import made_network, made_profile

from .command import run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sizes = [4_000_000, 100_000, 20_000_000, 500_000, 9_000_000]
    files.write(tmp_path / "job.json", made_profile(sizes, [0.02, 0.001, 0.03, 0.005, 0.01]))
    return tmp_path


def test_the_plan_says_its_mode_and_is_compared_with_torchs_default(folder: Path) -> None:
    out = folder / "plan.json"
    told = run("plan", folder / "job.json", "10gbe-16", "--overlap", "forward", "--optimizer", "0.002", "-o", out)
    assert told.exit_code == 0, told.stderr
    made = files.read(out, Plan)
    assert (made.overlap, made.prediction.optimizer) == ("forward", 0.002)
    text = " ".join(told.stdout.split())
    assert "ddp (all-reduce)" in text
    assert "one reduce-scatter of all" in text and "dovetail.optimizer(optimizer, model)" in text
    split = sum(b.kind == "split" for b in made.buckets)
    assert f"({len(made.buckets) - split} whole, {split} split with" in text and "whole+split" in text
    result = run("plan", folder / "job.json", "10gbe-16", "--overlap", "forward", "-o", out, "--json")
    plans = json.loads(result.stdout)["plans"]
    assert sorted({p["overlap"] for p in plans}) == ["backward", "forward"]
    assert sum(p["policy"] == "ddp" for p in plans) == 2


def test_the_gain_is_told_against_torchs_all_reduces_and_not_against_its_sizes_in_this_mode(folder: Path) -> None:
    from dovetail.planning import compare, plan

    job, net = made_profile([50_000_000] * 4, [0.02] * 4, forward=[0.02] * 4), preset("10gbe-16")
    theirs, ours = plan(job, net, policy="ddp"), plan(job, net, overlap="forward")
    ratio = theirs.prediction.iteration / ours.prediction.iteration
    assert ratio > 1.1
    lines = explain(ours, [*compare(job, net, overlap="forward"), theirs], net)
    assert any(f"{ratio:.2f} times as fast" in line for line in lines)


def test_simulate_shows_what_hides_behind_which_layer(folder: Path) -> None:
    run(
        "plan",
        folder / "job.json",
        "10gbe-16",
        "--overlap",
        "forward",
        "--policy",
        "per-tensor",
        "-o",
        folder / "p.json",
    )
    made = files.read(folder / "p.json", Plan)
    split = tuple(msgspec.structs.replace(b, kind="split") for b in made.buckets)
    files.write(folder / "p.json", msgspec.structs.replace(made, buckets=split))
    told = run("simulate", folder / "p.json")
    assert told.exit_code == 0, told.stderr
    text = " ".join(told.stdout.split())
    for part in (
        "overlapping forward too",
        "all-gather 4",
        "reduce-scatter 0",
        "forward of layer0",
        "backward of layer",
        "split",
        "the link is idle for",
    ):
        assert part in text


def test_a_network_without_the_halves_says_what_to_measure(folder: Path) -> None:
    files.write(folder / "net.json", made_network(1e-3, 1e-9))
    told = run("plan", folder / "job.json", folder / "net.json", "--overlap", "forward", "-o", folder / "p.json")
    assert told.exit_code == 1 and "has no reduce_scatter" in told.stderr
    assert not (folder / "p.json").exists()
    told = run("plan", folder / "job.json", "10gbe-16", "--optimizer", "1", "-o", folder / "p.json")
    assert told.exit_code == 1 and "optimizer: expected with overlap='forward' only" in told.stderr


def test_memory_and_precision_belong_to_this_mode_and_are_refused_in_one_line_elsewhere(folder: Path) -> None:
    job, out = folder / "job.json", folder / "p.json"
    forward = ("plan", job, "10gbe-16", "--overlap", "forward", "-o", out)
    for arguments, message in (
        ((*forward, "--memory", "3"), "--memory: expected time or shard"),
        ((*forward, "--precision", "int8"), "has no collectives in int8"),
        (("plan", job, "10gbe-16", "--memory", "shard", "-o", out), "memory: expected with overlap='forward' only"),
        (("plan", job, "10gbe-16", "--auto", "--memory", "shard", "-o", out), "--memory: expected GiB"),
        (("plan", job, "10gbe-16", "--auto", "--precision", "int8", "-o", out), "--precision does not go with"),
    ):
        told = run(*arguments)
        assert told.exit_code in (1, 2) and message in " ".join(told.stderr.split()), told.stderr
    assert not out.exists()
    told = run(*forward, "--memory", "shard", "--policy", "optimal")
    assert told.exit_code == 0, told.stderr
    assert "split" in {b.kind for b in files.read(out, Plan).buckets}


def test_scale_shows_plans_of_both_kinds_beside_the_policies(folder: Path) -> None:
    told = run("scale", folder / "job.json", "--network", "10gbe-16", "--workers", "4,16", "--json")
    points = json.loads(told.stdout)["points"]
    best = {p["workers"]: p["speedup"] for p in points if p["policy"] == "both"}
    others = {p["workers"]: p["speedup"] for p in points if p["policy"] == "optimal"}
    assert best.keys() == {4, 16} and all(best[w] >= 0.99 * others[w] for w in best)
