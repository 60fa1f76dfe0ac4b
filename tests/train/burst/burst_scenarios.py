"""What the tests of burst execution run on every rank. Each function returns what the test then asserts on."""

from __future__ import annotations

import copy
import os
import random
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail import Burst, Error
from dovetail.emulate.launch import report
from tests.train.burst.burst_models import (
    CLASSES,
    CROSS_ENTROPY,
    MODELS,
    SEED,
    Branches,
    Oracle,
    build,
    burst_plan,
    error,
    random_sets,
    total,
    worst,
)

PATIENCE = 120.0
"""Seconds after which a wait counts as hung, also on a busy machine."""


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
    plan: Any = sets
    if names:  # a traced model needs a plan with names, so prefixes
        sets = [s if isinstance(s, int) else len(s) for s in sets]
        plan = burst_plan(names, sets, batch)
    oracle = Oracle(model)
    burst = Burst(
        model, plan, loss=CROSS_ENTROPY, seed=SEED, bucket_bytes=rng.choice([0, 300, 2**20]), timeout=PATIENCE
    )
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
        burst = Burst(model, sets, loss=loss, bucket_bytes=rng.choice([0, 2**20]), timeout=PATIENCE)
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
    burst = Burst(model, plans[0], loss=CROSS_ENTROPY, seed=SEED, timeout=PATIENCE)
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
    again = Burst(fresh, plans[0], loss=CROSS_ENTROPY, timeout=PATIENCE)
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
    plans: list[Any] = [[2, 2, 4, 1, [1, 3], 3], [4, 1, 2, [0, 3], 4, 2]]
    burst = Burst(model, plans[0], loss=CROSS_ENTROPY, seed=SEED, timeout=PATIENCE)
    data = [(torch.randn(n, *shape, dtype=torch.float64), torch.randint(0, CLASSES, (n,))) for n in (6, 5)]
    for step, (x, y) in enumerate(data):
        burst.step(x, y)
        oracle.step(x, y, CROSS_ENTROPY, step)
        if step == 0:
            burst.replan(plans[1])
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
    burst = Burst(layers, [4, 2], loss=CROSS_ENTROPY, timeout=PATIENCE)
    x = torch.randn(4, 6, dtype=torch.float64).abs() * torch.tensor([[1.0], [1.0], [1.0], [-1.0]])
    y = torch.randint(0, CLASSES, (4,))
    burst.step(x, y)
    oracle.step(x, y, CROSS_ENTROPY, 0)
    experts: Any = oracle.whole[0].experts
    return {"error": worst(error(burst, oracle, "grad"))[0], "unused": experts[2].weight.grad is None}


def records() -> dict[str, Any]:
    torch.manual_seed(1)
    model, _, shape, _ = build("mlp")
    burst = Burst(model, [4, 4, 1, 2], loss=CROSS_ENTROPY, timeout=PATIENCE)
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
    attempt("other plan", lambda: Burst(linear(), [1, 1 + (rank == 1)], loss=CROSS_ENTROPY, timeout=PATIENCE))
    attempt("scalar loss", lambda: Burst(linear(), [4, 2], loss=F.cross_entropy, timeout=PATIENCE).step(x, y))
    attempt("rows", lambda: Burst(linear(), [4, 2], loss=CROSS_ENTROPY, timeout=PATIENCE).step(x, y[:3]))
    tied = linear()
    tied[1].weight = tied[0].weight
    attempt("tied", lambda: Burst(tied, [4, 2], loss=CROSS_ENTROPY))
    attempt("unknown layer", lambda: Burst(Branches(), burst_plan(("stem", "hed"), [1, 2], 4), loss=CROSS_ENTROPY))
    attempt("not a checkpoint", lambda: Burst(linear(), [4, 2], loss=CROSS_ENTROPY, timeout=PATIENCE).load(__file__))
    other = Burst([nn.Linear(4, 4)], [2], loss=CROSS_ENTROPY, timeout=PATIENCE)
    other.save(path)
    attempt("other model", lambda: Burst(linear(), [4, 2], loss=CROSS_ENTROPY, timeout=PATIENCE).load(path))
    nowhere = str(Path(path).parent / "absent" / "file.pt")
    attempt("no folder", lambda: other.save(nowhere))

    class Breaks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if rank == 2:
                raise ArithmeticError("no numbers today")
            return super().forward(x)

    attempt(
        "a layer",
        lambda: Burst([nn.Linear(4, 4), Breaks(4, 3)], [1, 4], loss=CROSS_ENTROPY, timeout=PATIENCE).step(x, y),
    )

    class Interrupted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if rank == 2:
                raise KeyboardInterrupt
            return super().forward(x)

    def interrupted() -> None:
        job = Burst([nn.Linear(4, 4), Interrupted(4, 3)], [1, 4], loss=CROSS_ENTROPY, timeout=PATIENCE)
        try:
            job.step(x, y)
        except KeyboardInterrupt:  # it lives on: its own next call says what the others heard
            job.step(x, y)

    attempt("an interrupt", interrupted)
    absent = Burst(linear(), [4, 2], loss=CROSS_ENTROPY, timeout=PATIENCE)
    absent.save(path)
    attempt("absent on one rank", lambda: absent.load(nowhere if rank == 1 else path))
    said["afterwards"] = "trains" if absent.step(x, y).isfinite() else "lost"
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
        Burst([nn.Linear(4, 4), Dies(4, 3)], [3, 2], loss=CROSS_ENTROPY, timeout=PATIENCE).step(
            torch.randn(5, 4), torch.zeros(5, dtype=torch.long)
        )
    except Error as e:
        Path(f"{path}.{dist.get_rank()}").write_text(str(e))
    os._exit(1)
