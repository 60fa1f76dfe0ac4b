"""Small workloads for the tests of the cluster simulation."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import strategies as st

from dovetail.core.job import Job, JobPhase, Stage, ladder
from dovetail.planning.sharing.pack import ClusterSize

SMALL = ClusterSize(devices=6, node=4, device_bytes=100)
MODELS = (("bert", 0.165, 0.027), ("gpt2", 0.414, 0.020))
"""Device seconds and off-device seconds of an iteration."""


@st.composite
def jobs(draw: st.DrawFn, most: int = 8) -> list[Job]:
    """Jobs of every kind, on times that collide: multiples of a quarter second."""
    quarter = st.integers(1, 8).map(lambda n: n / 4)
    found = []
    for i in range(draw(st.integers(1, most))):
        kind = draw(st.sampled_from(["plain", "ladder", "burst", "elastic", "phases"]))
        workers = draw(st.integers(1, 4))
        iterations = draw(st.integers(1, 5))
        common: dict[str, Any] = {
            "name": f"job {i}",
            "arrival": draw(st.integers(0, 12)) / 4,
            "off_device": draw(st.integers(0, 4)) / 4,
            "persistent_bytes": draw(st.integers(0, 30)),
            "ephemeral_bytes": draw(st.integers(0, 60)),
            "background": draw(st.booleans()),
        }
        if kind == "burst":
            widths = [workers, *draw(st.lists(st.integers(1, workers), max_size=2))]
            stages = tuple(Stage(seconds=draw(quarter), workers=w) for w in draw(st.permutations(widths)))
            found.append(Job(phases=(JobPhase(iterations=iterations, workers=workers),), stages=stages, **common))
            continue
        phases = [JobPhase(iterations=iterations, workers=workers)]
        if kind == "ladder":
            phases = [JobPhase(iterations=iterations, workers=workers, depths=ladder(workers))]
        elif kind == "elastic":
            phases = [JobPhase(iterations=iterations, workers=workers, min_workers=draw(st.integers(1, workers)))]
        elif kind == "phases":
            phases.append(JobPhase(iterations=draw(st.integers(1, 3)), workers=draw(st.integers(1, 4))))
        found.append(Job(phases=tuple(phases), forward=draw(quarter), backward=draw(quarter), **common))
    return found


def mix(count: int, seed: int, *, devices: int = 32, load: float = 0.0, iterations: float = 1.0) -> list[Job]:
    """Device-bound jobs of 1 to 8 workers, BERT- and GPT-2-like; all at once, or Poisson arrivals at a load."""
    rng = random.Random(seed)
    found, now = [], 0.0
    for i in range(count):
        workers = rng.choices((1, 2, 4, 8), (0.35, 0.1, 0.3, 0.25))[0]
        name, device, off = rng.choice(MODELS)
        rounds = max(2, round(rng.uniform(15, 80) * iterations / (device + off)))
        job = Job(
            name=f"{name} {i}",
            arrival=now,
            phases=(JobPhase(iterations=rounds, workers=workers),),
            forward=device / 3,
            backward=device * 2 / 3,
            off_device=off,
            persistent_bytes=3 * 2**29,
            ephemeral_bytes=4 * 2**30,
        )
        found.append(job)
        if load:
            now += rng.expovariate(1) * job.gang_work / (load * devices)
    return found
