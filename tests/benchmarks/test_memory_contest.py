"""benchmarks/memory.py on a tiny model, handmade plans, and tables in pages that show several benchmarks."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from tests.benchmarks import overlap_ranks
from tests.paths import BENCHMARKS
from tests.ranks import run_ranks


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("memory")


@pytest.fixture
def markdown(memory: ModuleType) -> ModuleType:
    return importlib.import_module("markdown")


def test_every_contestant_trains_the_same_and_shares_state_as_it_says(memory: ModuleType) -> None:
    for rank in run_ranks(overlap_ranks.memory, ranks=2, contestants=list(memory.CONTESTANTS), steps=4):
        whole = rank["ddp"]["state"]
        assert whole == pytest.approx(2 * rank["ddp"]["parameters"], rel=0.01)
        for name in ("zero", "fsdp2", "shard"):
            assert rank[name]["state"] == pytest.approx(whole / 2, rel=0.1), name
        assert rank["shard"]["state"] < rank["both"]["state"] < whole
        for told in rank.values():
            assert told["losses"] == pytest.approx(rank["ddp"]["losses"], rel=1e-5)
            assert told["training"] <= told["highest"]


def made(memory: ModuleType, **training: int) -> list[dict[str, Any]]:
    states = {"ddp": 400, "ddp-views": 400, "zero": 110, "fsdp2": 100, "both": 250, "shard": 100}
    used = {"ddp": 900, "ddp-views": 800, "zero": 600, "fsdp2": 400, "both": 700, "shard": 500, **training}
    return [
        {
            "contestant": name,
            "training": used[name] * 10**6,
            "highest": used[name] * 10**6 + 1,
            "state": state * 10**6,
            "parameters": 200 * 10**6,
            "losses": [6.0, 5.0],
        }
        for name, state in states.items()
    ]


def test_memory_is_held_against_ddp_and_the_table_shows_all(memory: ModuleType) -> None:
    rows = made(memory)
    assert [c.holds for c in memory.checks(rows)] == [True] * 4
    lines = memory.markdown(rows)
    assert len(lines) == 2 + len(memory.CONTESTANTS)
    assert lines[2] == "| DDP + AdamW | 900 MB | 1.00 | 900 MB | 400 MB | 1.00 | 6.0000 → 5.0000 |"
    assert not memory.checks(made(memory, shard=850))[2].holds
    rows[3]["losses"] = [6.0, 5.01]
    assert not memory.checks(rows)[3].holds


def test_a_handmade_plan_covers_the_model_with_buckets_of_both_kinds(memory: ModuleType) -> None:
    by_hand = importlib.import_module("handmade")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    plan = by_hand.handmade(model, ranks=2, bucket_bytes=100, kind=by_hand.alternating("whole"))
    assert plan.tensors == tuple(reversed([n for n, _ in model.named_parameters()]))
    assert plan.bytes == sum(p.numel() * 4 for p in model.parameters())
    assert [b.kind for b in plan.buckets] == ["whole", "split", "whole"]
    assert all(b.bytes >= 100 for b in plan.buckets[:-1]) and plan.overlap == "forward"


PAGE = """# page
<!-- memory:memory -->
old
<!-- end memory:memory -->
<!-- overlap:gains -->
theirs
<!-- end overlap:gains -->
"""


def result(**tables: list[str]) -> dict[str, Any]:
    machine = {"cores": 2, "processor": "p", "torch": "t"}
    return {"benchmark": "memory", "command": "c", "machine": machine, "cells": [], "checks": [], "tables": tables}


def test_a_page_of_several_benchmarks_takes_what_it_names(markdown: ModuleType) -> None:
    page = markdown.into(result(memory=["| new |"]), PAGE)
    assert "| new |" in page and "old" not in page and "theirs" in page
    with pytest.raises(SystemExit, match="memory:memory"):
        markdown.into(result(), PAGE)


def test_a_page_of_one_benchmark_shows_every_table(markdown: ModuleType) -> None:
    own = "".join(f"<!-- {name} -->\n<!-- end {name} -->\n" for name in ("memory", "checks", "command"))
    page = markdown.into(result(memory=["| new |"]), own + PAGE.replace("memory:memory", "other:memory"))
    assert "| new |" in page and "old" in page and "Made by `c`" in page
    with pytest.raises(SystemExit, match="markers and tables differ: memory"):
        markdown.into(result(), own)
