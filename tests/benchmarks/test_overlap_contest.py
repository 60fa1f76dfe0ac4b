"""The contests of benchmarks/overlap.py and precision.py: real ranks and contestants, and what their times make."""

from __future__ import annotations

import argparse
import importlib
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from dovetail.core.errors import Error
from dovetail.core.timeline import Span, SpanKind, Timeline
from dovetail.measure import preset
from tests.benchmarks import overlap_ranks
from tests.emulate.test_layered import profile
from tests.paths import BENCHMARKS
from tests.ranks import run_all


@pytest.fixture
def overlap(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("overlap")


@pytest.fixture
def cells(overlap: ModuleType) -> ModuleType:
    return importlib.import_module("overlap_cells")


@pytest.fixture
def precision(overlap: ModuleType) -> ModuleType:
    return importlib.import_module("precision")


def test_contestants_take_turns_and_every_figure_is_there(overlap: ModuleType, precision: ModuleType) -> None:
    calls: list[tuple[Any, dict[str, Any]]] = [
        (overlap_ranks.contest, {"contestants": list(overlap.CONTESTANTS)}),
        (overlap_ranks.contest, {"contestants": list(precision.CONTESTANTS)}),
    ]
    for lines, reduced in run_all(calls, ranks=2):
        entries = {e["name"]: e for e in lines["entries"]}
        assert set(entries) == set(overlap.CONTESTANTS)
        assert {len(e["seconds"]) for e in entries.values()} == {2}
        compute = profile().forward_time() + profile().backward_time()
        assert min(s for e in entries.values() for s in e["seconds"]) >= compute * 0.99
        assert set(entries["split"]["kinds"]) == {"split"}
        assert set(entries["ddp"]["kinds"]) == {"whole"}
        assert all(e["predicted"] > compute * 0.99 for name, e in entries.items() if name != "fsdp2")
        assert 0 <= entries["split"]["idle"] < 1
        assert set(lines["all_reduce"]) == {"torch", "ring"} and lines["update"] > 0
        assert [e["name"] for e in reduced["entries"]] == list(precision.CONTESTANTS)
        allowed = {f"{kind}{what}" for kind in ("whole", "split") for what in ("", " bf16", " int8")}
        assert all(set(e["kinds"]) <= allowed for e in reduced["entries"])


def test_losses_are_those_of_ddp_with_both_kinds_and_with_changing_plans() -> None:
    told = run_all([(overlap_ranks.training, {"steps": 24})], ranks=2)[0][0]
    assert "whole" in told["plans"]["handmade"] and "split" in told["plans"]["handmade"]
    for name in ("handmade", "planned"):
        assert told["losses"][name] == pytest.approx(told["losses"]["ddp"], rel=1e-4)


def timeline(*spans: tuple[str, SpanKind, float, float]) -> Timeline:
    return Timeline(
        name="made",
        source="measured",
        spans=tuple(Span(track=f"rank 0/{t}", name=k, kind=k, start=a, stop=b) for t, k, a, b in spans),
    )


def test_the_link_is_idle_while_no_collective_is_in_flight(overlap: ModuleType) -> None:
    idle = importlib.import_module("overlap_records").link_idle
    passes: list[tuple[str, SpanKind, float, float]] = []
    for at in (0.0, 10.0, 20.0, 30.0):
        passes += [("compute", "forward", at, at + 3), ("compute", "backward", at + 3, at + 9)]
        passes += [("compute", "optimizer", at + 9, at + 10)]
    # Counted from 10 to 30: the first iteration may miss what was queued before it.
    assert idle(timeline(*passes)) == 1.0
    assert idle(timeline(*passes, ("network", "communication", 0, 12))) == pytest.approx(0.9)
    overlapping: list[tuple[str, SpanKind, float, float]] = [
        ("network", "communication", 14, 18),
        ("network", "communication", 16, 20),
    ]
    assert idle(timeline(*passes, *overlapping)) == pytest.approx(0.7)
    assert idle(timeline(*passes, ("network", "communication", 5, 50))) == 0.0
    assert idle(timeline(*passes[:3])) is None


def test_cells_are_distinct_and_scaled_to_their_ratio(overlap: ModuleType, cells: ModuleType) -> None:
    assert len({(c.model, c.regime) for c in overlap.CELLS}) == len(overlap.CELLS) == 17
    base = profile()
    for cell in overlap.CELLS:
        scaled = cell.scale(base)
        compute = scaled.forward_time() + scaled.backward_time()
        assert cell.all_reduce_seconds(base) / compute == pytest.approx(cell.ratio)
        assert scaled.backward_time() == pytest.approx(2 * scaled.forward_time())


def test_slow_cells_get_fewer_iterations(overlap: ModuleType, cells: ModuleType) -> None:
    slow, fast = profile().scaled(forward=1.5, backward=3.0), profile().scaled(forward=0.3, backward=0.6)
    cell = overlap.CELLS[0]
    specs = [cells.spec(cell, p, overlap.CONTESTANTS, quick=False) for p in (slow, fast)]
    assert [s.steps for s in specs] == [2, 3]
    quick = cells.spec(cell, fast, overlap.CONTESTANTS, quick=True)
    assert (quick.rounds, quick.steps, quick.recorded) == (2, 2, 0)


def test_cells_are_chosen_by_number(overlap: ModuleType, cells: ModuleType) -> None:
    args = argparse.Namespace(cells="0,3", quick=False)
    assert cells.chosen(args, overlap.CELLS, overlap.QUICK) == [overlap.CELLS[0], overlap.CELLS[3]]
    for wrong in ("99", "x", ""):
        args.cells = wrong
        with pytest.raises(Error, match="--cells: expected numbers from 0 to 16"):
            cells.chosen(args, overlap.CELLS, overlap.QUICK)
    args.cells, args.quick = None, True
    assert cells.chosen(args, overlap.CELLS, overlap.QUICK) == overlap.QUICK


def row(cell: Any, policy: str, seconds: float, *, limit: float = 1.0, spread: float = 0.01, **more: Any) -> Any:
    quartiles = {"first": seconds - spread, "median": seconds, "third": seconds + spread}
    return {
        "model": cell.model,
        "regime": cell.regime,
        "ratio": cell.ratio,
        "rate": cell.rate,
        "policy": policy,
        "iteration": {"low": seconds - 2 * spread, **quartiles, "high": seconds + 2 * spread},
        "limit": limit,
        "prediction": seconds * 0.985 if policy != "fsdp2" else None,
        "promised": None,
        "parameter_bytes": 100,
        "sent_bytes": 150,
        "kinds": {},
        "codec": 0.0,
        **more,
    }


def contest(overlap: ModuleType, cell: Any, ours: float, best: float = 1.2) -> list[Any]:
    times = {"ddp": 1.4, "ddp-tuned": 1.35, "merge": 1.3, "both": ours, "split": best, "fsdp2": 2.0}
    return [row(cell, name, seconds) for name, seconds in times.items()]


def test_checks_hold_where_the_targets_are_reached_and_only_there(overlap: ModuleType) -> None:
    cell = overlap.Cell("ResNet-50", 1.0)
    good = {c.name: c for c in overlap.contest_checks(contest(overlap, cell, 1.06))}
    assert all(c.holds for c in good.values())
    target = "communication 1 × compute at 1 Gbit/s: two lines against DDP's default"
    assert good[target].target == "≤ 0.76"
    assert "median error" in " ".join(good)
    bad = {c.name: c for c in overlap.contest_checks(contest(overlap, cell, 1.25))}
    assert not bad[target].holds
    assert not bad["two lines against max(compute, communication as measured), every cell"].holds
    assert not bad["two lines against the best of the other contestants, every cell"].holds
    assert "+4.2% of split" in bad["two lines against the best of the other contestants, every cell"].value
    # Slower, but by less than the run varies.
    tie = {c.name: c for c in overlap.contest_checks(contest(overlap, cell, 1.205))}
    assert tie["two lines against the best of the other contestants, every cell"].holds


def test_predictions_are_judged_by_median_worst_and_sign(overlap: ModuleType) -> None:
    cell = overlap.Cell("ViT-like", 1.2)
    rows = contest(overlap, cell, 1.06)
    rows[0]["prediction"] = 1.4 * 0.9
    median, worst, signed = overlap.prediction_checks(rows)
    assert median.holds and not worst.holds and not signed.holds
    assert worst.value == "-10.0% (ddp, ViT-like, communication 1.2 × compute)"
    for r in rows:
        r["prediction"] = None
    assert [c.holds for c in overlap.prediction_checks(rows)] == [False]


def test_what_a_user_gains_is_one_table(overlap: ModuleType) -> None:
    rows = contest(overlap, overlap.Cell("ResNet-50", 1.0), 1.05)
    rows += contest(overlap, overlap.Cell("ResNet-50", 0.86, "2gbit"), 1.05)
    lines = overlap.gains(rows)
    assert lines[2] == "| ResNet-50 | 1 | 1.400 | 0.96 | 0.93 | 0.86 | **0.75** | 0.71 |"
    assert lines[3].startswith("| ResNet-50 | 0.86 (2 Gbit/s) |") and len(lines) == 4


def test_fewer_bytes_are_held_against_ddp_its_hook_and_full_precision(precision: ModuleType) -> None:
    far, near = precision.CELLS
    times = {"ddp": 5.0, "ddp-fp16": 2.7, "both": 4.6, "bf16": 2.5, "int8": 1.5}
    found = precision.checks([row(far, name, seconds, codec=0.02) for name, seconds in times.items()])
    assert [c.holds for c in found] == [True, True, True]
    assert found[0].value.startswith("0.300; the codec takes 20 ms")
    times |= {"both": 3.0, "bf16": 3.005, "int8": 3.2}
    assert [c.holds for c in precision.checks([row(near, n, s) for n, s in times.items()])] == [True, False]


def test_rows_have_finite_figures_for_the_limit(cells: ModuleType, overlap: ModuleType) -> None:
    records = importlib.import_module("overlap_records")
    cell = overlap.Cell("ResNet-50", 1.0)
    entry = records.Entry(name="ddp", what="", buckets=3, kinds={"whole": 3}, seconds=(1.0, 2.0, 3.0), sent=125e6)
    network = preset("10gbe-4")
    outcome = records.Outcome(network=network, all_reduce={"torch": 1.5, "ring": 1.25}, update=0.1, entries=(entry,))
    scaled = profile().scaled(forward=0.4, backward=0.8)
    (made,) = cells.rows_of(cell, scaled, [outcome])
    assert made["limit"] == 1.25 and made["iteration"]["median"] == 2.0
    assert made["link_idle"] == pytest.approx(0.5) and math.isfinite(made["link_idle"])


def test_finished_cells_are_not_run_again(overlap: ModuleType, cells: ModuleType, tmp_path: Path) -> None:
    done, other = overlap.CELLS[3], overlap.CELLS[4]
    kept = tmp_path / "kept.jsonl"
    kept.write_bytes(b"".join(msgspec.json.encode([row(c, "ddp", 1.0)]) + b"\n" for c in (other, done)))
    args = argparse.Namespace(keep=kept, most=0, quick=False)
    rows, complete = cells.run(args, [done], overlap.CONTESTANTS, None)
    assert complete and [r["regime"] for r in rows] == [done.regime]
    rows, complete = cells.run(args, [done, overlap.CELLS[5]], overlap.CONTESTANTS, None)
    assert not complete and len(rows) == 1
