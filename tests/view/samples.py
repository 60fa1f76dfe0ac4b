"""Contents with something for every section of the page."""

from __future__ import annotations

from typing import Any

import msgspec

from dovetail.core.job import Lease, Schedule, TaskRun
from dovetail.core.timeline import Span, SpanKind, Timeline
from dovetail.view import example
from dovetail.view.page import Contents, sort
from dovetail.view.page import reports as r

LINKS = {"a-b": "up", "b-c": "down", "c-d": "up", "d-a": "silent", "a-c": "up"}


def scale_report() -> r.ScaleReport:
    points = [
        {"workers": w, "policy": p, "iteration": 0.1, "speedup": w * share, "efficiency": share, "buckets": 3}
        for w in (2, 4, 8, 16)
        for p, share in (("optimal", 0.95), ("ddp", 0.8))
    ]
    data = {"profile": "example", "network": "made-up", "batch": 32, "points": points}
    return msgspec.convert(data, r.ScaleReport)


def burst_report() -> r.BurstReport:
    def plan(policy: str, counts: list[int], iteration: float) -> dict[str, Any]:
        prediction = {"iteration": iteration, "device_time": iteration * 3, "one_device": 0.1, "memory": 1}
        common = {"profile": "example", "network": "nvlink", "devices": 4, "batch": 32, "layers": ["a", "b", "c"]}
        return {
            **common,
            "policy": policy,
            "name": policy,
            "counts": counts,
            "prediction": prediction,
            "free_devices": 1.5,
        }

    plans = [plan("dp:4", [4, 4, 4], 0.04), plan("fastest", [4, 2, 1], 0.03), plan("deeppool", [4, 4, 1], 0.035)]
    return msgspec.convert({"chosen": "fastest", "explanation": ["Worth bursting."], "plans": plans}, r.BurstReport)


def study_report() -> r.StudyReport:
    cells = [
        {
            "policy": p,
            "load": load,
            "samples": [{"makespan": 90.0, "busy": 0.7, "groups": [{"mean": m, "queueing": 1.0}]}],
        }
        for p, m in (("jigsaw", 20.0), ("gang-fifo", 35.0))
        for load in (0.5, 0.8, 1.1)
    ]
    return msgspec.convert({"trace": {"name": "mine.csv", "jobs": 30}, "devices": 16, "cells": cells}, r.StudyReport)


def schedule() -> Schedule:
    """Two jobs that share two devices, task by task."""
    tasks = tuple(
        TaskRun(job=f"job {i % 2}", iteration=i // 2, worker=device, device=device, start=float(i), stop=i + 0.9)
        for i in range(10)
        for device in (0, 1)
    )
    leases = tuple(Lease(job=f"job {i}", devices=(0, 1), start=0.0, stop=10.0) for i in (0, 1))
    return Schedule(policy="jigsaw", source="predicted", devices=2, leases=leases, tasks=tasks)


def fabric() -> r.FabricReport:
    return r.FabricReport(name="lab", links=LINKS, counters={"forwarded": 12}, believed={"a": ("b-c",)})


def path() -> r.TraceReport:
    return r.TraceReport(source="h1", target="h3", policy="any", walk=("a", "c"), why="the shortest of 2")


def everything() -> Contents:
    things = [
        *(example.profile(), example.network(), *example.timelines(), scale_report(), burst_report()),
        *(study_report(), schedule(), fabric(), path()),
    ]
    return sort(things, files=["job.json", "net.json"])


def many(count: int, *, tracks: int = 4) -> Timeline:
    """So many spans on end, a third forward and the rest backward."""
    spans = []
    each = count // tracks
    for track in range(tracks):
        for i in range(each):
            kind: SpanKind = "forward" if i < each / 3 else "backward"
            spans.append(
                Span(
                    track=f"rank {track}/compute",
                    name=f"layer {i % 50}",
                    kind=kind,
                    start=i * 1e-3,
                    stop=(i + 1) * 1e-3,
                )
            )
    return Timeline(name="long", source="measured", spans=tuple(spans))
