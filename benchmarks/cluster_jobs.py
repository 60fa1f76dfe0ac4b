"""The jobs of benchmarks/cluster.py, with the measured duty cycles of known models, for emulated devices."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path

import torch

from dovetail.core import files
from dovetail.core.job import Job, JobPhase
from dovetail.core.profile import Profile
from dovetail.measure import profile as measured
from dovetail.measure.zoo import GPT

LIKE: dict[str, tuple[float, float]] = {
    # Seconds on the device and off it in one iteration, as in benchmarks/schedule.py.
    "bert": (0.164, 0.027),
    "gpt2": (0.414, 0.020),
    "vgg16": (0.072, 0.129),
}
SIZES = {"vocabulary": 64, "length": 8, "width": 16, "heads": 2, "depth": 2}
"""Arguments of the transformer that every task trains; small, since devices are emulated."""
TEXT = """
import torch
from torch.utils.data import TensorDataset

import dovetail
from dovetail.measure.zoo import GPT


def data():
    tokens = torch.randint(0, 64, (512, 8), generator=torch.Generator().manual_seed(1))
    return TensorDataset(tokens, tokens.roll(-1, 1))


def loss(model, batch):
    return model(*batch)["loss"]


job = dovetail.TrainingJob(
    name={name!r}, model=lambda: GPT(**{sizes!r}), data=data, loss=loss, steps={steps}, batch={batch},
    workers={workers}, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    profile=dovetail.read({profile!r}, dovetail.Profile), off_device={off!r}, checkpoint_every=1000,
)
"""


@dataclass(frozen=True)
class Wanted:
    """One job of a workload."""

    name: str
    text: str
    job: Job
    """The same job for the simulator, at full depth."""


def profiles(folder: Path) -> dict[str, Path]:
    """The transformer's layers as measured here, each stretched to the totals of a known model."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 64, (2, 8))
    base = measured(GPT(**SIZES), (tokens, tokens.roll(-1, 1)), loss=lambda output: output["loss"])
    found = {}
    for name, (device, _) in LIKE.items():
        # A third of the time is the forward pass, as is usual for these models.
        scaled: Profile = base.scaled(forward=device / 3, backward=device * 2 / 3, name=name)
        found[name] = folder / f"{name}.json"
        files.write(found[name], scaled)
    return found


def wanted(name: str, like: str, profile: Path, *, workers: int, steps: int) -> Wanted:
    device, off = LIKE[like]
    text = TEXT.format(
        name=name, sizes=SIZES, steps=steps, batch=2 * workers, workers=workers, profile=str(profile), off=off
    )
    job = Job(
        name=name,
        phases=(JobPhase(iterations=steps, workers=workers),),
        forward=device / 3,
        backward=device * 2 / 3,
        off_device=off,
    )
    return Wanted(name, text, job)


def mix(count: int, seconds: tuple[float, float], seed: int, paths: dict[str, Path]) -> list[Wanted]:
    """BERT- and GPT-2-like jobs of 1 to 8 workers, as the simulator's backlog of device-bound jobs, but shorter."""
    rng = random.Random(seed)
    found = []
    for i in range(count):
        workers = rng.choices((1, 2, 4, 8), (0.35, 0.1, 0.3, 0.25))[0]
        like = rng.choice(("bert", "gpt2"))
        alone = math.exp(rng.uniform(*map(math.log, seconds)))
        steps = int(alone / sum(LIKE[like])) + 2
        found.append(wanted(f"{like} {i}", like, paths[like], workers=workers, steps=steps))
    return found
