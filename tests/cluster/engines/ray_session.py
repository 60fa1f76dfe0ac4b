"""Two Ray nodes on this machine, on loopback addresses of their own, and a cluster on them; prints what it saw as JSON.

Run by test_ray.py in a process of its own: Ray changes much in the process that talks to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dovetail.cluster import up_down
from dovetail.cluster.client import Client
from dovetail.cluster.home import Home
from tests.cluster.trial import trial

NODE: dict[str, Any] = {
    "num_cpus": 1,
    "include_dashboard": False,
    "object_store_memory": 80 * 2**20,
    "resources": {"dovetail_device": 1},
}
LIMIT = 400.0
"""Seconds after which something that is waited for will not happen any more."""


def until(what: str, true: Callable[[], Any]) -> Any:
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            if found := true():
                return found
        time.sleep(0.1)
    raise AssertionError(f"{what}: not within {LIMIT:g} s")


def session(folder: Path) -> dict[str, Any]:
    from ray.cluster_utils import Cluster

    home = Home(folder / "home")
    ray = Cluster(
        initialize_head=True,
        head_node_args={**NODE, "node_ip_address": "127.0.0.2", "temp_dir": str(folder / "ray")},
    )
    try:
        far = ray.add_node(**NODE, node_ip_address="127.0.0.3")
        began = time.monotonic()
        up_down.up(home.path, emulated=True, engine="ray", ray=ray.address, timeout=LIMIT)
        try:
            return {"up": time.monotonic() - began, **scenario(home, ray, far)}
        finally:
            up_down.down(home.path, grace=1.0, timeout=LIMIT)
    finally:
        ray.shutdown()  # type: ignore[no-untyped-call]


def scenario(home: Home, ray: Any, far: Any) -> dict[str, Any]:
    client = Client(home.path, timeout=LIMIT)
    status = client.status()
    saw: dict[str, Any] = {"engine": status["engine"], "nodes": [d["node"] for d in status["devices"]]}

    def running(job: int) -> bool:
        return int(trial.ask(client, "job", job)["iteration"]) >= 3

    # Two workers on two machines: half of the gradients cross the tensor channel.
    first = trial.submit(client, trial.CHAOS_JOB, name="across", steps=30, workers=2, spb="ladder")
    saw["first"] = trial.wait(client, [first], limit=LIMIT)[first]["state"]
    saw["devices"] = sorted({t.device for t in _tasks(home, first)})
    saw["curve"] = trial.curve(home, first).decode()

    # The coordinator is killed: the other processes stay, and a new one finds them by name.
    second = trial.submit(client, trial.CHAOS_JOB, name="again", steps=30, workers=2, spb="ladder")
    until("the second job runs", lambda: running(second))
    address = home.address()
    assert address is not None
    os.kill(address.coordinator, signal.SIGKILL)
    until("another coordinator", lambda: (now := home.address()) and now.coordinator != address.coordinator)
    ended = trial.wait(client, [second], limit=LIMIT)[second]
    saw["second"], saw["starts"] = ended["state"], ended["epoch"]
    saw["same"] = trial.curve(home, second).decode() == saw["curve"]

    # A machine is lost in the middle of a job, which continues on the other one.
    third = trial.submit(client, trial.CHAOS_JOB, name="lost", steps=60, workers=2, spb="ladder")
    until("the third job runs", lambda: running(third))
    ray.remove_node(far, allow_graceful=False)
    saw["third"] = trial.wait(client, [third], limit=LIMIT)[third]["state"]
    saw["begins_the_same"] = trial.curve(home, third).decode().startswith(saw["curve"])
    return saw


def _tasks(home: Home, job: int) -> list[Any]:
    from dovetail.cluster.executor.recorder import recorded_tasks

    return [t for t in recorded_tasks(home.path) if t.job == str(job)]


if __name__ == "__main__":
    print("saw " + json.dumps(session(Path(sys.argv[1]))), flush=True)
