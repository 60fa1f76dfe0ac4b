"""Models, random plans and the oracle for the tests of burst execution.

The oracle is the plain model in one process on the whole batch: torch's own BatchNorm, and dropout masks worked out
sample by sample with Python's integers.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail import Burst
from dovetail.core.burst_plan import BurstPlan, BurstPrediction

CROSS_ENTROPY = partial(F.cross_entropy, reduction="none")
CLASSES = 5
SEED = 7


class Residual(nn.Module):
    """A layer of a list whose border is (value, value to be added two layers later)."""

    def __init__(self, width: int, what: str) -> None:
        super().__init__()
        self.what, self.linear = what, nn.Linear(width, width)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Any:
        y = torch.relu(self.linear(x))
        if self.what == "open":
            return y, x
        assert skip is not None
        return (y, skip) if self.what == "carry" else y + skip


class Branches(nn.Module):
    """Forks, joins by concatenation, and a skip over both, for torch.fx; two inputs reach different layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.left, self.right = nn.Conv2d(4, 3, 1), nn.Conv2d(4, 4, 3, padding=1)
        self.again = nn.Conv2d(4, 5, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(5, momentum=None)
        self.drop = nn.Dropout2d(0.4)
        self.head = nn.Linear(4 * 12, CLASSES)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        stem = self.stem(x)
        left = F.relu(self.left(stem))
        right = F.relu(self.right(stem))
        right = self.drop(self.norm(self.again(right)))
        joined = torch.cat([left, right, stem * self.scale], 1)
        return self.head(F.adaptive_avg_pool2d(joined, 2).flatten(1))  # type: ignore[no-any-return]


BRANCHES = ("stem", "left", "right", "again", "norm", "drop", "head")


def mlp() -> tuple[list[nn.Module], tuple[int, ...]]:
    d = [6, 9, 7, 8, CLASSES]
    return [nn.Sequential(nn.Linear(a, b), nn.ReLU(inplace=b != CLASSES)) for a, b in pairwise(d)], (6,)


def cnn() -> tuple[list[nn.Module], tuple[int, ...]]:
    return [
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
        nn.Sequential(nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(6, momentum=0.3), nn.ReLU()),
        nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten()),
        nn.Sequential(nn.Linear(24, 12), nn.ReLU(), nn.Dropout(0.3)),
        nn.Linear(12, CLASSES),
    ], (2, 6, 6)


def residual() -> tuple[list[nn.Module], tuple[int, ...]]:
    inner = [Residual(6, what) for what in ("open", "carry", "close")]
    return [nn.Linear(6, 6), *inner, nn.Linear(6, CLASSES)], (6,)


def branches() -> tuple[nn.Module, tuple[int, ...]]:
    return Branches(), (2, 6, 6)


MODELS: dict[str, Callable[[], tuple[Any, tuple[int, ...]]]] = {
    "mlp": mlp,
    "cnn": cnn,
    "residual": residual,
    "branches": branches,
}


def chain(layers: list[nn.Module], x: Tensor) -> Tensor:
    value: Any = x
    for layer in layers:
        value = layer(*value) if isinstance(value, tuple) else layer(value)
    assert isinstance(value, Tensor)
    return value


class OracleDropout(nn.Module):
    """The same streams as dovetail's, element by element."""

    def __init__(self, p: float, site: int, whole: bool) -> None:
        super().__init__()
        self.p, self.site, self.whole, self.step = p, site, whole, 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        shape = (x.shape[1], 1, 1) if self.whole else tuple(x.shape[1:])
        count = torch.Size(shape).numel()
        rows = []
        for sample in range(len(x)):
            seed = splitmix(splitmix(splitmix(splitmix(SEED) + self.step) + self.site) + sample * GOLDEN)
            bits = [splitmix(seed + (e + 1) * GOLDEN) >> 11 for e in range(count)]
            rows.append(torch.tensor([b >= self.p * 2**53 for b in bits]).view(shape))
        return x * torch.stack(rows).to(x.dtype) / (1 - self.p)


GOLDEN = 0x9E3779B97F4A7C15


def splitmix(z: int) -> int:
    z &= 2**64 - 1
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return z ^ (z >> 31)


class Oracle:
    """The plain model in one process."""

    def __init__(self, model: Any) -> None:
        plain = copy.deepcopy(model)
        self.layers = plain if isinstance(plain, list) else None
        self.whole = nn.Sequential(*plain) if isinstance(plain, list) else plain
        self.drops: list[OracleDropout] = []
        for module in list(self.whole.modules()):
            for name, child in module.named_children():
                if isinstance(child, (nn.Dropout, nn.Dropout2d)):
                    made = OracleDropout(child.p, len(self.drops), isinstance(child, nn.Dropout2d))
                    self.drops.append(made)
                    setattr(module, name, made)

    def __call__(self, x: Tensor) -> Tensor:
        return chain(self.layers, x) if self.layers else self.whole(x)

    def step(self, x: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor], number: int) -> Tensor:
        for drop in self.drops:
            drop.step = number
        total = loss(self(x), y).sum() / len(x)
        total.backward()
        return total.detach()


def build(name: str, *, integer: bool = False) -> tuple[Any, int, tuple[int, ...], tuple[str, ...] | None]:
    """(model, number of layers, shape of a sample, names of the layers if a plan must carry them)."""
    model, shape = MODELS[name]()
    parts = model if isinstance(model, list) else [model]
    for part in parts:
        part.double()
        for p in part.parameters() if integer else ():
            p.data = torch.randint(-2, 3, p.shape).double()
    names = BRANCHES if name == "branches" else None
    return model, len(names) if names else len(parts), shape, names


def random_sets(rng: random.Random, layers: int, world: int) -> list[Any]:
    """A few stages: prefixes as planners give them, or any set of ranks."""
    prefixes = rng.random() < 0.4
    sets: list[Any] = []
    while len(sets) < layers:
        size = rng.randint(1, world)
        chosen = size if prefixes else sorted(rng.sample(range(world), size))
        sets += [chosen] * rng.randint(1, 2)
    return sets[:layers]


def burst_plan(names: tuple[str, ...], counts: list[int], batch: int) -> BurstPlan:
    nothing = BurstPrediction(iteration=1.0, device_time=1.0, one_device=1.0, memory=1)
    world = dist.get_world_size()
    fixed: dict[str, Any] = {"policy": "test", "profile": "test", "network": "test", "prediction": nothing}
    return BurstPlan(layers=names, counts=tuple(counts), devices=world, batch=batch, **fixed)


def error(burst: Burst, oracle: Oracle, what: str) -> float:
    """The largest difference on this rank, relative to the model's largest value; 0 only if bitwise equal."""
    theirs = dict(oracle.whole.named_parameters())
    pairs = []
    for name, p in burst.named_parameters():
        if not p.is_meta:
            pairs.append((p.grad, theirs[name].grad) if what == "grad" else (p.detach(), theirs[name].detach()))
    if what == "buffers":
        of = dict(oracle.whole.named_buffers())
        pairs = [(b, of[n]) for n, b in burst.module.named_buffers() if not b.is_meta]
    assert all((a is None) == (b is None) for a, b in pairs), (
        "a gradient where the oracle has none, or none where it has"
    )
    found = [(a.double(), b.double()) for a, b in pairs if a is not None]
    scale = max((float(b.abs().max()) for _, b in found), default=1.0) or 1.0
    return max((float((a - b).abs().max()) for a, b in found), default=0.0) / scale


def worst(*values: float) -> list[float]:
    """Element by element over all ranks."""
    t = torch.tensor([float(v) for v in values], dtype=torch.float64)
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return t.tolist()


def total(value: int) -> int:
    t = torch.tensor([value])
    dist.all_reduce(t)
    return int(t)
