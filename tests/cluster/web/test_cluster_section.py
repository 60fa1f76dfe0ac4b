"""A running cluster's section of the page: its picture and its sentences."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from dovetail.cluster.coordinator.status import Ongoing, Snapshot
from dovetail.cluster.executor.recorder import LeaseLine, TaskLine
from dovetail.cluster.web.cluster_section import MOST_SPANS, section
from dovetail.view.page.document import ScheduleSection


def a_job(number: int, **more: Any) -> dict[str, Any]:
    known = {
        "job": number, "name": "net", "kind": "tasks", "share": "normal", "state": "running", "reason": "",
        "iteration": 3, "iterations": 10, "submitted": 5.0, "devices": [0], "iteration_seconds": 0.1,
        "slowdown": None, "bound": None,
    }  # fmt: skip
    return known | more


def a_status(jobs: list[dict[str, Any]], *, devices: int = 2, ended: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    counts: dict[str, int] = {}
    for j in (*jobs, *ended):
        counts[j["state"]] = counts.get(j["state"], 0) + 1
    machines = [
        {"device": d, "ready": True, "residents": [1], "running": 0, "utilization": 0.5, "bytes": 1, "bytes_total": 2}
        for d in range(devices)
    ]
    return {
        "policy": "jigsaw", "emulated": True, "devices": machines, "counts": counts, "jobs": jobs, "ended": list(ended)
    }  # fmt: skip


def task(job: int, device: int, start: float, stop: float, iteration: int = 0) -> TaskLine:
    return TaskLine(job=str(job), iteration=iteration, worker=0, device=device, start=start, stop=stop)


def cells(shown: ScheduleSection) -> list[tuple[str, str, float, float]]:
    def column(name: str, dtype: str) -> list[Any]:
        found: list[Any] = np.frombuffer(base64.b64decode(getattr(shown.drawn.columns, name)), dtype=dtype).tolist()
        return found

    start, long, name = column("start", "<f8"), column("duration", "<f4"), column("name", "<u4")
    return [
        (row.label, shown.drawn.names[name[i]], round(start[i], 4), round(start[i] + long[i], 4))
        for row in shown.drawn.rows
        for i in range(row.first, row.stop)
    ]


def test_an_unfinished_task_is_drawn_as_far_as_it_is_known_and_never_over_another() -> None:
    ongoing = [Ongoing(1, 0, 1003.0, 1004.0), Ongoing(2, 1, 1000.5, 1002.5)]
    spans = [task(1, 0, 1000.0, 1002.0), task(2, 1, 1000.5, 1002.0, 7)]
    shown = section(Snapshot(a_status([a_job(1), a_job(2)]), {}, ongoing), spans)
    assert cells(shown) == [
        ("device 0", "job 1 (net), iteration 0, worker 0", 0.0, 2.0),
        ("device 0", "job 1 (net), running", 3.0, 4.0),
        ("device 1", "job 2 (net), iteration 7, worker 0", 0.5, 2.0),
        ("device 1", "job 2 (net), running", 2.0, 2.5),
    ]
    assert shown.drawn.origin == 1000.0 and shown.drawn.duration == 4.0


def test_a_gang_fills_its_devices_row_and_background_tasks_get_a_row_beside_it() -> None:
    jobs = [a_job(1, kind="gang"), a_job(2)]
    ongoing = [Ongoing(1, 0, 990.0, 1010.0, gang=True)]
    held = LeaseLine(job="2", device=0, start=1000.0, stop=1005.0)
    shown = section(Snapshot(a_status(jobs), {}, ongoing), [task(2, 0, 1000.0, 1001.0), held])
    assert [c[:2] for c in cells(shown)] == [
        ("device 0", "job 2 (net), iteration 0, worker 0"),
        ("device 0 (2)", "job 1 (net), has the device"),
    ]


def test_pictures_are_bounded_and_idle_devices_keep_their_row() -> None:
    spans = [task(1 + i % 300, i % 2, i * 0.1, i * 0.1 + 0.1, i) for i in range(20_000)]
    shown = section(Snapshot(a_status([a_job(1)], devices=3), {}), spans)
    assert shown.drawn.columns.count == MOST_SPANS
    assert len(shown.drawn.looks) <= 61 and shown.drawn.looks[-1].label == "240 smaller jobs"
    assert [row.label for row in shown.drawn.rows] == ["device 0", "device 1", "device 2"]
    assert section(Snapshot(a_status([a_job(1)]), {}), [task(1, 0, 1.0, 2.0), task(1, 0, 9000.0, 9001.0)]).drawn \
        .columns.count == 1  # fmt: skip


@pytest.mark.parametrize(
    ("slow", "bound", "share", "expected"),
    [
        (0.012, 0.05, "foreground", "promised to be slowed by at most 5.0 % by others: 1.2 % measured, kept"),
        (0.07, 0.05, "foreground", "promised to be slowed by at most 5.0 % by others: 7.0 % measured, broken"),
        (None, 0.05, "foreground", "promised to be slowed by at most 5.0 % by others: not measured yet"),
        (0.3, None, "normal", "30.0 % slower than alone"),
        (None, None, "normal", ""),
    ],
)
def test_promised_and_measured_slow_down_are_shown_together(
    slow: float | None, bound: float, share: str, expected: str
) -> None:
    jobs = [a_job(1, slowdown=slow, bound=bound, share=share)]
    shown = section(Snapshot(a_status(jobs), {}), [])
    assert shown.live[0].promise == expected
    assert any(expected and expected in line for line in shown.more) == (bound is not None)


def test_the_first_sentence_counts_jobs_that_run_wait_and_have_ended() -> None:
    def first(jobs: list[dict[str, Any]], *ended: dict[str, Any]) -> str:
        return section(Snapshot(a_status(jobs, ended=ended), {}), []).sentence

    queued, failed = a_job(2, state="queued", devices=[]), a_job(3, state="failed", reason="it raised")
    assert first([a_job(1), queued], failed) == (
        "1 job runs on 2 emulated devices, 1 waits and 1 has ended (1 failed)."
    )
    assert first([]) == "Nothing has been submitted to this cluster yet. 2 emulated devices are ready."
    shown = section(Snapshot(a_status([queued], ended=(failed,)), {2: ["memory: too little", "more"]}), [])
    assert shown.live[0].why == ("memory: too little", "more") and shown.live[1].why == ("it raised",)
    assert shown.more == ("Job 2 (net) waits (memory): too little.",)
    assert shown.missing and shown.sentence.startswith("No job runs on 2 emulated devices, 1 waits and")
