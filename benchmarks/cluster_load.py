"""Load on the API: many queued jobs, and fuzzed requests."""

from __future__ import annotations

import http.client
import json
import random
import string
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cluster_trial import CHAOS_JOB, ask, home_of, submit
from dovetail.cluster.client import Client

Request = tuple[str, str, bytes | None, dict[str, str]]
"""Method, target, body, headers."""
PATHS = ("/jobs", "/jobs/1", "/jobs/1/why", "/jobs/1/logs", "/jobs/1/cancel", "/jobs/1/pause", "/jobs/1/resume",
         "/status", "/timeline", "/jobs/999999", "/jobs/0", "/jobs/-1", "/jobs/x", "/jobs/1/../../key", "/", "/down/",
         "/openapi.json", "/jobs/%2e%2e/key", "/jobs/1/logs?offset=-5", "/jobs/1/logs?limit=99999999999999999999",
         "/jobs?limit=0", "/jobs?state=%00", "/jobs?before=1e9", "/status?jobs=maybe", "/timeline?limit=2")  # fmt: skip
METHODS = ("GET", "GET", "POST", "POST", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH")


@dataclass(frozen=True)
class Load:
    """Times in seconds, while `jobs` jobs are queued."""

    jobs: int
    submit: float
    """Of one submission, median."""
    status: float
    """Of one `status`, median."""
    worst: float
    """Of one `status`."""
    bytes: int
    """Of its answer."""


def queued(client: Client, count: int, *, threads: int = 8, looks: int = 20) -> Load:
    """Submits `count` endless jobs: a few run, the others wait. Then asks for the status `looks` times."""
    text = CHAOS_JOB.replace("task_seconds=(0.010, 0.020)", "task_seconds=(0.2, 0.4)")
    assert text != CHAOS_JOB, "the jobs' tasks must be long"
    times: list[float] = []

    def some(part: int) -> None:
        for i in range(part, count, threads):
            began = time.perf_counter()
            submit(client, text, name=f"queued {i}", steps=1_000_000, workers=1)
            times.append(time.perf_counter() - began)

    workers = [threading.Thread(target=some, args=(t,)) for t in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    took, size = [], 0
    for _ in range(looks):
        began = time.perf_counter()
        found = ask(client, "status")
        took.append(time.perf_counter() - began)
        size = len(json.dumps(found))
        assert len(found["jobs"]) >= count, "all of them are shown"
    return Load(count, float(np.median(times)), float(np.median(took)), max(took), size)


def fuzz(client: Client, count: int, *, seed: int, threads: int = 4) -> Counter[int]:
    """Sends `count` fuzzed requests from a seeded generator: how often each status code came; -1 for no answer."""
    address = home_of(client).address()
    assert address is not None
    found: Counter[int] = Counter()
    lock = threading.Lock()

    def some(part: int) -> None:
        rng = random.Random(seed * 1000 + part)
        mine: Counter[int] = Counter()
        connection = http.client.HTTPConnection(address.host, address.port, timeout=300)
        for method, target, body, headers in requests(rng, count // threads + (part < count % threads)):
            try:
                connection.request(method, target, body=body, headers=headers)
                answer = connection.getresponse()
                answer.read()
                mine[answer.status] += 1
                if answer.will_close:
                    connection.close()
            except (OSError, http.client.HTTPException):
                mine[-1] += 1
                connection.close()
        connection.close()
        with lock:
            found.update(mine)

    workers = [threading.Thread(target=some, args=(t,)) for t in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return found


def requests(rng: random.Random, count: int) -> Iterator[Request]:
    for _ in range(count):
        method, target = rng.choice(METHODS), rng.choice(PATHS)
        if rng.random() < 0.2:
            letters = string.ascii_letters + string.digits + "/%?&=._-~:@"
            target = "/" + "".join(rng.choices(letters, k=rng.randrange(60)))
        headers = {"Content-Type": rng.choice(("application/json", "application/json", "text/plain", ""))}
        if rng.random() < 0.1:
            headers[rng.choice(("Origin", "Authorization", "X-Forwarded-For"))] = rng.choice(("null", "a" * 500, "%"))
        yield method, target, _body(rng) if method not in ("GET", "HEAD") else None, headers


def _body(rng: random.Random) -> bytes:
    """Nothing, noise, JSON of the wrong kind, or a submission with one wrong field."""
    kind = rng.randrange(5)
    if kind == 0:
        return b""
    if kind == 1:
        return rng.randbytes(rng.randrange(200))
    if kind == 2:
        return json.dumps(_value(rng, 0)).encode()
    if kind == 3:
        return b"[" * rng.randrange(1, 20000)
    good = {"text": "x = 1", "name": "fuzz", "kind": "tasks", "share": "background", "bound": 0.05, "gang": 0,
            "options": {"workers": 4096, "steps": 1}, "arguments": [], "request": ""}  # fmt: skip
    field = rng.choice(list(good))
    good[field] = _value(rng, 0)
    if rng.random() < 0.5:  # most of them must not become jobs
        good["options"] = {"workers": 0}
    return json.dumps(good).encode()


def _value(rng: random.Random, depth: int) -> object:
    odd = (None, True, -1, 0, 2**63, 2**64, 1e308, -0.0, "", "\0", "../../etc/passwd", "a" * 70, "\ud800", "é", "x y")
    if depth > 3 or rng.random() < 0.6:
        return rng.choice(odd)
    if rng.random() < 0.5:
        return [_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {str(rng.choice(odd)): _value(rng, depth + 1) for _ in range(rng.randrange(4))}
