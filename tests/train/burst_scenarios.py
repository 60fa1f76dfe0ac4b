"""What the tests of burst execution run on every rank. Each function returns what the test then asserts on.

The oracle is the plain model in one process on the whole batch: torch's own BatchNorm, and dropout masks worked out
sample by sample with Python's integers.
"""

from __future__ import annotations

import copy
import os
import random
import signal
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail import Burst, Error
from dovetail.core.burst import BurstPlan, BurstPrediction
from dovetail.simulate.launch import report

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
        return self.head(F.adaptive_avg_pool2d(joined, 2).flatten(1))


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


def matches(first: int, count: int) -> list[dict[str, Any]]:
    """Random models, plans, rank sets and batches; three steps of SGD with momentum beside the oracle."""
    return [match(seed) for seed in range(first, first + count)]


def match(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    name = rng.choice(list(MODELS))
    model, layers, shape, names = build(name)
    batch = rng.randint(2, 11)
    sets = random_sets(rng, layers, dist.get_world_size())
    plan = sets
    if names:  # a traced model needs a plan with names, so prefixes
        sets = [s if isinstance(s, int) else len(s) for s in sets]
        plan = burst_plan(names, sets, batch)
    oracle = Oracle(model)
    burst = Burst(model, plan, loss=CROSS_ENTROPY, seed=SEED, bucket_bytes=rng.choice([0, 300, 2**20]), timeout=30)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (burst, oracle.whole)]
    sharded = rng.random() < 0.5
    errors = [0.0, 0.0, 0.0, 0.0]
    moved, predicted = 0, 0
    for step in range(3):
        size = batch if step < 2 else rng.randint(2, 11)
        x, y = torch.randn(size, *shape, dtype=torch.float64), torch.randint(0, CLASSES, (size,))
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        before = burst.moved_bytes
        if sharded:
            rows = list(burst.samples(size))
            ours = burst.step(x[rows], y[rows], batch=size)
        else:
            ours = burst.step(x, y)
            moved += burst.moved_bytes - before
            predicted += burst.predicted_moved_bytes(size)
        theirs = oracle.step(x, y, CROSS_ENTROPY, step)
        now = [error(burst, oracle, "grad"), 0.0, 0.0, abs(float(ours - theirs))]
        for optimizer in optimizers:
            optimizer.step()
        now[1:3] = [error(burst, oracle, "parameters"), error(burst, oracle, "buffers")]
        errors = [max(a, b) for a, b in zip(errors, now, strict=True)]
    held = [not p.is_meta for p in burst.parameters()]
    return {
        "seed": seed,
        "scenario": f"{name} {sets} batch {batch}",
        "errors": dict(zip(("grad", "parameters", "buffers", "loss"), worst(*errors), strict=True)),
        "moved": total(moved),
        "predicted": predicted,
        "held": held,
        "state": [p in optimizers[0].state for p in burst.parameters()],
    }


def integers(first: int, count: int) -> list[dict[str, Any]]:
    """Whole numbers, of which every sum is exact: gradients must be equal to the last bit."""
    results = []
    for seed in range(first, first + count):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        name = rng.choice(["mlp", "residual"])
        model, layers, shape, _ = build(name, integer=True)
        batch = rng.randint(1, 12)
        sets = random_sets(rng, layers, dist.get_world_size())

        def loss(out: Tensor, y: Tensor, batch: int = batch) -> Tensor:
            return batch * (out * (y[:, None] + 1)).sum(1)

        oracle = Oracle(model)
        burst = Burst(model, sets, loss=loss, bucket_bytes=rng.choice([0, 2**20]), timeout=30)
        x = torch.randint(-3, 4, (batch, *shape)).double()
        y = torch.randint(0, CLASSES, (batch,))
        burst.step(x, y)
        oracle.step(x, y, loss, 0)
        something = max(float(p.grad.abs().max()) for p in oracle.whole.parameters() if p.grad is not None)
        results.append(
            {"scenario": f"{name} {sets} {batch}", "error": worst(error(burst, oracle, "grad"))[0], "is": something}
        )
    return results


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.02),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.005, momentum=0.5, centered=True),
}


def replans(path: str, optimizer: str, plans: list[list[Any]]) -> dict[str, Any]:
    """A new plan after every step, two param groups; then a checkpoint for another plan and for the plain model."""
    torch.manual_seed(3)
    model, _, shape, _ = build("cnn")
    oracle = Oracle(model)
    fresh = copy.deepcopy(model)
    burst = Burst(model, plans[0], loss=CROSS_ENTROPY, seed=SEED, timeout=30)
    made = []
    for m in (burst, oracle.whole):
        ps = list(m.parameters())
        made.append(OPTIMIZERS[optimizer]([{"params": ps[:3]}, {"params": ps[3:], "lr": 0.003}]))
    errors, states = [], []
    data = [(torch.randn(9, *shape, dtype=torch.float64), torch.randint(0, CLASSES, (9,))) for _ in plans]
    extra = torch.randn(9, *shape, dtype=torch.float64), torch.randint(0, CLASSES, (9,))
    for step, (plan, (x, y)) in enumerate(zip(plans, data, strict=True)):
        if step:
            burst.replan(plan, made[0])
        for o in made:
            o.zero_grad()
        burst.step(x, y)
        oracle.step(x, y, CROSS_ENTROPY, step)
        for o in made:
            o.step()
        errors.append(worst(error(burst, oracle, "grad"), error(burst, oracle, "parameters"))[0:2])
        states.append(
            [not p.is_meta for p in burst.parameters()]
            == [p in made[0].state and not meta(made[0], p) for p in burst.parameters()]
        )
    burst.save(path, made[0])
    again = Burst(fresh, plans[0], loss=CROSS_ENTROPY, timeout=30)
    ps = list(again.parameters())
    other = OPTIMIZERS[optimizer]([{"params": ps[:3]}, {"params": ps[3:], "lr": 0.1}])
    again.load(path, other)
    plain = Oracle(build("cnn")[0])
    content = torch.load(path, weights_only=True)
    plain.whole.load_state_dict(content["model"])
    ps = list(plain.whole.parameters())
    alone = OPTIMIZERS[optimizer]([{"params": ps[:3]}, {"params": ps[3:]}])
    alone.load_state_dict(content["optimizer"])
    for o in (*made, other, alone):
        o.zero_grad()
    again.step(*extra)
    for each in (oracle, plain):
        each.step(*extra, CROSS_ENTROPY, len(plans))
    for o in (made[1], other, alone):
        o.step()
    loaded = error(again, oracle, "parameters")
    from_file = max(
        float((a - b).abs().max()) for a, b in zip(plain.whole.parameters(), oracle.whole.parameters(), strict=True)
    )
    return {"errors": errors, "states": states, "loaded": worst(loaded, from_file)}


def meta(optimizer: torch.optim.Optimizer, p: Tensor) -> bool:
    return any(isinstance(v, Tensor) and v.is_meta for v in optimizer.state[p].values())


def accumulates() -> dict[str, Any]:
    """Two steps without zero_grad, a re-plan between them, clipping by the norm of the whole model, and prediction."""
    torch.manual_seed(5)
    model, _, shape, _ = build("cnn")
    oracle = Oracle(model)
    burst = Burst(model, [2, 2, 4, 1, [1, 3], 3], loss=CROSS_ENTROPY, seed=SEED, timeout=30)
    data = [(torch.randn(n, *shape, dtype=torch.float64), torch.randint(0, CLASSES, (n,))) for n in (6, 5)]
    for step, (x, y) in enumerate(data):
        burst.step(x, y)
        oracle.step(x, y, CROSS_ENTROPY, step)
        if step == 0:
            burst.replan([4, 1, 2, [0, 3], 4, 2])
    summed = error(burst, oracle, "grad")
    norm = float(burst.clip_grad_norm_(0.1))
    expected = float(nn.utils.clip_grad_norm_(oracle.whole.parameters(), 0.1))
    clipped = error(burst, oracle, "grad")
    (outputs,) = burst.predict(data[0][0])
    oracle.whole.eval()
    predicted = float((outputs - oracle(data[0][0])).abs().max().detach())
    return {
        "summed": worst(summed),
        "norm": norm,
        "expected": expected,
        "clipped": worst(clipped),
        "predict": predicted,
    }


class Chooses(nn.Module):
    """Two experts: each sample goes to one, the third is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        which = x[:, 0] > 0
        return torch.stack([self.experts[int(w)](row) for w, row in zip(which, x, strict=True)])


def unused() -> dict[str, Any]:
    """A parameter that no sample uses has no gradient; one that a single rank's sample uses has it on all."""
    torch.manual_seed(1)
    layers = [Chooses().double(), nn.Linear(6, CLASSES).double()]
    oracle = Oracle(layers)
    burst = Burst(layers, [4, 2], loss=CROSS_ENTROPY, timeout=30)
    x = torch.randn(4, 6, dtype=torch.float64).abs() * torch.tensor([[1.0], [1.0], [1.0], [-1.0]])
    y = torch.randint(0, CLASSES, (4,))
    burst.step(x, y)
    oracle.step(x, y, CROSS_ENTROPY, 0)
    return {"error": worst(error(burst, oracle, "grad"))[0], "unused": oracle.layers[0].experts[2].weight.grad is None}


def records() -> dict[str, Any]:
    torch.manual_seed(1)
    model, _, shape, _ = build("mlp")
    burst = Burst(model, [4, 4, 1, 2], loss=CROSS_ENTROPY, timeout=30)
    x, y = torch.randn(8, *shape, dtype=torch.float64), torch.randint(0, CLASSES, (8,))
    burst.step(x, y)
    before = burst.moved_bytes
    with burst.record() as recording:
        burst.step(x, y)
    timeline = recording.timeline()
    timeline.check()
    return {
        "kinds": sorted({s.kind for s in timeline.spans}),
        "forward": [s.name for s in timeline.spans if s.kind == "forward"],
        "sent": burst.moved_bytes - before,
        "sent in spans": sum(s.bytes for s in timeline.spans if "layer" in s.name and "of layer" not in s.name),
        "source": timeline.source,
    }


def refuses(path: str) -> NoReturn:
    """One line for each thing a user can get wrong; `tests` look at the words."""
    said: dict[str, str] = {}

    def attempt(what: str, call: Callable[[], object]) -> None:
        try:
            call()
        except Error as e:
            said[what] = str(e)

    def linear() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Linear(4, 4), nn.Linear(4, 3)]

    x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    rank = dist.get_rank()
    attempt("too many ranks", lambda: Burst(linear(), [1, 9], loss=CROSS_ENTROPY))
    attempt("wrong length", lambda: Burst(linear(), [1, 1, 1], loss=CROSS_ENTROPY))
    attempt("other plan", lambda: Burst(linear(), [1, 1 + (rank == 1)], loss=CROSS_ENTROPY, timeout=30))
    attempt("scalar loss", lambda: Burst(linear(), [4, 2], loss=F.cross_entropy, timeout=30).step(x, y))
    attempt("rows", lambda: Burst(linear(), [4, 2], loss=CROSS_ENTROPY, timeout=30).step(x, y[:3]))
    tied = linear()
    tied[1].weight = tied[0].weight
    attempt("tied", lambda: Burst(tied, [4, 2], loss=CROSS_ENTROPY))
    attempt("unknown layer", lambda: Burst(Branches(), burst_plan(("stem", "hed"), [1, 2], 4), loss=CROSS_ENTROPY))
    attempt("not a checkpoint", lambda: Burst(linear(), [4, 2], loss=CROSS_ENTROPY, timeout=30).load(__file__))
    other = Burst([nn.Linear(4, 4)], [2], loss=CROSS_ENTROPY, timeout=30)
    other.save(path)
    attempt("other model", lambda: Burst(linear(), [4, 2], loss=CROSS_ENTROPY, timeout=30).load(path))
    nowhere = str(Path(path).parent / "absent" / "file.pt")
    attempt("no folder", lambda: other.save(nowhere))

    class Breaks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if rank == 2:
                raise ArithmeticError("no numbers today")
            return super().forward(x)

    attempt(
        "a layer", lambda: Burst([nn.Linear(4, 4), Breaks(4, 3)], [1, 4], loss=CROSS_ENTROPY, timeout=30).step(x, y)
    )
    report([said])
    dies(path)


def dies(path: str) -> NoReturn:
    """Rank 1 is killed in the middle of a step; the others must end with a line, not hang."""

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher, which sees rank 1 die, is to let us finish

    class Dies(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().forward(x)

    try:
        Burst([nn.Linear(4, 4), Dies(4, 3)], [3, 2], loss=CROSS_ENTROPY, timeout=30).step(
            torch.randn(5, 4), torch.zeros(5, dtype=torch.long)
        )
    except Error as e:
        Path(f"{path}.{dist.get_rank()}").write_text(str(e))
    os._exit(1)
