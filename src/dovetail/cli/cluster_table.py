"""The tables of `dovetail cluster status`."""

from __future__ import annotations

import time
from typing import Any

from rich.table import Table
from rich.text import Text

_SHOWN = 40
"""Rows of jobs that have not ended."""
_STYLE = {"running": "green", "failed": "red", "paused": "yellow", "preparing": "cyan", "cancelled": "dim"}


def draw(status: dict[str, Any]) -> list[Any]:
    """A line with the sums, the devices, the jobs, and below them the reasons, which are too long for a column."""
    shown = [*status["jobs"][:_SHOWN], *status["ended"][:10]]
    reasons = [Text(f"job {j['job']} ({j['name']}): {j['reason']}") for j in shown if j["reason"]]
    return [_summary(status), _devices(status), _jobs(status), *reasons]


def _summary(status: dict[str, Any]) -> Text:
    counts = ", ".join(f"{n} {state}" for state, n in sorted(status["counts"].items())) or "no jobs yet"
    kind = "emulated devices" if status["emulated"] else "devices"
    ready = sum(d["ready"] for d in status["devices"])
    of = f"{ready}" if ready == len(status["devices"]) else f"{ready} of {len(status['devices'])}"
    return Text(f"{of} {kind}, policy {status['policy']}; jobs: {counts}")


def _devices(status: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("device", "node", "jobs", "duty", "busy", "memory"):
        table.add_column(name, justify="right" if name in ("duty", "busy", "memory") else "left")
    for d in status["devices"]:
        residents = Text("not ready", "red") if not d["ready"] else Text()
        for i, job in enumerate(d["residents"]):
            residents.append(("" if not i else " ") + str(job), "bold green" if job == d["running"] else "")
        name = f"{d['device']} {d.get('accelerator', '')}".strip()
        table.add_row(
            name, d["node"], residents, f"{d['duty']:.2f}", f"{d['utilization']:.0%}",
            f"{_size(d['bytes'])} of {_size(d['bytes_total'])}",
        )  # fmt: skip
    return table


def _jobs(status: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("job", "name", "state", "iteration", "loss", "s/iteration", "slowdown", "devices", "age"):
        table.add_column(name, justify="right" if name in ("job", "iteration", "loss", "s/iteration") else "left")
    now = status["now"]
    active = status["jobs"]
    for j in [*active[:_SHOWN], *status["ended"][:10]]:
        share = "" if j["share"] == "normal" else f" ({j['share']})"
        slow = j.get("slowdown")
        bound = f" of {j['bound']:.0%}" if j.get("bound") else ""
        table.add_row(
            str(j["job"]), Text(j["name"] + share), Text(j["state"], _STYLE.get(j["state"], "")),
            f"{j['iteration']}/{j['iterations']}" if j["iterations"] else str(j["iteration"]),
            "" if j["loss"] is None or not j["iteration"] else f"{j['loss']:.4g}",
            f"{j['iteration_seconds']:.3g}" if j.get("iteration_seconds") else "",
            "" if slow is None else f"{slow:.1%}{bound}",
            " ".join(map(str, j.get("devices", ()))), _age(now - j["submitted"]),
        )  # fmt: skip
    if len(active) > _SHOWN:
        table.add_row("", Text(f"… and {len(active) - _SHOWN} more that wait"))
    return table


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


if __name__ == "__main__":
    from . import console

    console.show(
        *draw(
            {
                "policy": "jigsaw", "emulated": True, "now": time.time(), "counts": {"running": 1}, "ended": [],
                "devices": [
                    {"device": 0, "node": "local", "ready": True, "residents": [1], "running": 1, "duty": 0.8,
                     "utilization": 0.7, "bytes": 2**30, "bytes_total": 2**34}
                ],
                "jobs": [
                    {"job": 1, "name": "digits", "share": "foreground", "state": "running", "iteration": 10,
                     "bound": 0.05, "iterations": 100, "loss": 0.5, "iteration_seconds": 0.1, "slowdown": 0.01,
                     "devices": [0], "submitted": time.time() - 60, "reason": ""}
                ],
            }
        )
    )  # fmt: skip
