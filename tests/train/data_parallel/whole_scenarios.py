"""What the tests of whole-tensor optimisers run on every rank, beside one process that sees the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dovetail
from dovetail.core.plan import Bucket
from dovetail.planning.merge.owners import update_cost

from .overlap_scenarios import Bag, refusal

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]


class Preconditioned(torch.optim.Optimizer):
    """Shampoo in small: every matrix has a statistic for its rows and one for its columns, in a list."""

    def __init__(self, params: Iterable[Any], lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, gradient = self.state[p], p.grad.reshape(p.shape[0], -1) if p.dim() else p.grad.reshape(1, 1)
                if not state:
                    state["sides"] = [1e-2 * torch.eye(size, dtype=p.dtype) for size in gradient.shape]
                    state["steps"] = 0
                state["steps"] += 1
                rows, columns = state["sides"]
                rows += gradient @ gradient.T
                columns += gradient.T @ gradient
                update = _root(rows) @ gradient @ _root(columns)
                p.sub_(group["lr"] * update.reshape(p.shape))


def _root(matrix: torch.Tensor) -> torch.Tensor:
    """The inverse fourth root of a symmetric matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    root: torch.Tensor = vectors * values.clamp(min=1e-8).pow(-0.25) @ vectors.T
    return root


class ByGlobalNorm(torch.optim.Optimizer):
    """Divides by the norm of all gradients together: parameters cannot be updated apart."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.sqrt(sum(p.grad.square().sum() for p in held))
        for p in held:
            p.sub_(0.1 * p.grad / norm)


class Counting(torch.optim.Optimizer):
    """Counts its steps in the group."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 0.1, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] / group["count"] * p.grad)


class Flat(torch.optim.Optimizer):
    """Keeps its parameters in a list of its own."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.held = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.held:
            if p.grad is not None:
                p.sub_(0.1 * p.grad)


MAKERS: dict[str, Make] = {
    "muon": lambda ps: torch.optim.Muon(ps, lr=0.02, momentum=0.9, weight_decay=0.05),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.01),
    "shampoo": lambda ps: Preconditioned(ps),
}


class Matrices(nn.Module):
    """Layers without biases, of the shapes of two blocks of a transformer, in float64: rounding is far below bfloat16,
    in which Muon orthogonalises, so that all ranks round alike."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        torch.manual_seed(0)
        shapes = [(width, 3 * width), (3 * width, width), (width, 4 * width), (4 * width, width)] * 2
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in shapes)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _batches(step: int, width: int) -> list[torch.Tensor]:
    """Inputs of all ranks."""
    return [
        torch.randn(6, width, generator=torch.Generator().manual_seed(1000 * step + r)).double()
        for r in range(dist.get_world_size())
    ]


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = (model(x) - x.roll(1, dims=1)).square().mean()
    return found


def _buckets(count: int, layout: str) -> list[Bucket]:
    """As many buckets as there are letters, "s" for split and "w" for whole, of about equal numbers of parameters."""
    cuts = [count * k // len(layout) for k in range(len(layout) + 1)]
    kinds: dict[str, Any] = {"s": "split", "w": "whole"}
    return [Bucket(start=cuts[k], stop=cuts[k + 1], bytes=0, kind=kinds[kind]) for k, kind in enumerate(layout)]


def trains(kind: str, steps: int = 6) -> dict[str, Any]:
    """An optimiser that needs whole tensors, with buckets that change on the way, beside one process alone."""
    make, rank = MAKERS[kind], dist.get_rank()
    alone, ours = Matrices(), dovetail.DistributedDataParallel(Matrices(), plan=None, bucket_cap_mb=0.01)
    single, sharded = make(alone.parameters()), dovetail.optimizer(make(ours.parameters()), ours)
    exchange = ours.exchange
    assert exchange is not None
    count, states, losses = len(exchange.slots), [], []
    layouts = {0: "ssss", 2: "s", 3: "sws", 4: "w", 5: "ss"}
    for step in range(steps):
        if step in layouts:
            sharded.move(list(reversed(range(count))), _buckets(count, layouts[step]))
        inputs = _batches(0, 12)
        for model, optimizer, x in ((alone, single, torch.cat(inputs)), (ours, sharded, inputs[rank])):
            optimizer.zero_grad()
            found = _loss(model, x)
            found.backward()
            optimizer.step()
        mean = found.detach()
        dist.all_reduce(mean)
        losses.append(float(mean / dist.get_world_size()))
        states.append(_state_difference(sharded.state_dict(), single.state_dict()))
    return {
        "difference": _difference(alone, ours.module),
        "state": max(states),
        "losses": losses,
        "buckets": len(exchange.buckets),
    }


def resumes(kind: str) -> dict[str, Any]:
    """State goes to a plain optimiser and comes back, through what `state_dict()` of both give."""
    make, rank = MAKERS[kind], dist.get_rank()
    first = dovetail.DistributedDataParallel(Matrices(), plan=None, bucket_cap_mb=0.01)
    before = dovetail.optimizer(make(first.parameters()), first)
    for step in range(3):
        before.zero_grad()
        _loss(first, _batches(step, 12)[rank]).backward()
        before.step()
    stored = copy.deepcopy(before.state_dict())
    values = copy.deepcopy(first.module.state_dict())

    alone = Matrices()
    alone.load_state_dict(values)
    single = make(alone.parameters())
    single.load_state_dict(stored)
    second = dovetail.DistributedDataParallel(Matrices(), plan=None, bucket_cap_mb=0.002)
    second.module.load_state_dict(values)
    after = dovetail.optimizer(make(second.parameters()), second)
    after.load_state_dict(copy.deepcopy(single.state_dict()))
    back = _state_difference(after.state_dict(), stored)
    for step in range(3, 6):
        inputs = _batches(step, 12)
        for model, optimizer, x in ((alone, single, torch.cat(inputs)), (second, after, inputs[rank])):
            optimizer.zero_grad()
            _loss(model, x).backward()
            optimizer.step()
    return {"back": back, "difference": _difference(alone, second.module), "keys": len(stored["state"])}


class Small(nn.Module):
    """A table, norms and biases around two matrices, as models for Muon and AdamW have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table, self.norm, self.out = nn.Embedding(16, 12), nn.LayerNorm(12), nn.Linear(12, 16)
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(5))
        self.double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(self.norm(x)))
        return self.out(x)  # type: ignore[no-any-return]


def two_optimizers(muon_first: bool) -> dict[str, Any]:
    """Muon for matrices and AdamW for the rest of one model, beside one process alone; buckets change on the way."""
    alone, ours = Small(), dovetail.DistributedDataParallel(Small(), plan=None, bucket_cap_mb=0.001)

    def made(model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = [b.weight for b in model.blocks]  # type: ignore[union-attr]
        rest = [p for p in model.parameters() if all(p is not m for m in matrices)]
        both = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]
        return both if muon_first else both[::-1]

    plain, inner = made(alone), made(ours.module)
    sharded = [dovetail.optimizer(o, ours) for o in inner]
    exchange = ours.exchange
    assert exchange is not None
    count, rank, ranks = len(exchange.slots), dist.get_rank(), dist.get_world_size()
    for step in range(6):
        if step in (2, 4):
            sharded[0].move(list(range(count)), _buckets(count, "sws" if step == 2 else "ss"))
        draw = torch.Generator().manual_seed(step)
        everyones = torch.randint(16, (4 * ranks, 8), generator=draw)
        contestants: list[tuple[nn.Module, Sequence[torch.optim.Optimizer], torch.Tensor]] = [
            (alone, plain, everyones),
            (ours, sharded, everyones[4 * rank : 4 * rank + 4]),
        ]
        for model, optimizers, batch in contestants:
            for optimizer in optimizers:
                optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.roll(1, dims=1).flatten()).backward()
            for optimizer in optimizers:
                optimizer.step()
    gathered = [len({exchange.users[i] for i in bucket.members}) for bucket in exchange.buckets]
    stored = [_state_difference(a.state_dict(), b.state_dict()) for a, b in zip(sharded, plain, strict=True)]
    return {"difference": _difference(alone, ours.module), "state": max(stored), "users": gathered}


def odd_shapes() -> dict[str, Any]:
    """Adafactor on a model with tied, scalar and channels-last parameters, with accumulation, beside torch's DDP."""
    theirs = nn.parallel.DistributedDataParallel(Bag())
    ours = dovetail.DistributedDataParallel(Bag(), plan=None, bucket_cap_mb=0.002)

    def made(model: nn.Module) -> torch.optim.Optimizer:
        return MAKERS["adafactor"](p for p in model.parameters() if p.requires_grad)

    pairs = [(theirs, made(theirs)), (ours, dovetail.optimizer(made(ours), ours))]
    for step in range(4):
        batch = torch.randint(16, (4, 8), generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        for model, optimizer in pairs:
            with model.no_sync():
                nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten()).backward()
            nn.functional.cross_entropy(model(batch.flip(0)).flatten(0, 1), batch.flatten()).backward()
            optimizer.step()
            if step % 2:
                optimizer.zero_grad()
    return {"difference": _difference(theirs.module, ours.module)}


def in_fewer_bytes() -> dict[str, Any]:
    """Muon with buckets that travel in int8: all ranks have the same bits, and the loss falls."""
    torch.manual_seed(0)
    ours = dovetail.DistributedDataParallel(Matrices().float(), plan=None, precision="int8")
    sharded = dovetail.optimizer(torch.optim.Muon(ours.parameters(), lr=0.02), ours)
    assert ours.exchange is not None
    count, losses = len(ours.exchange.slots), []
    kinds = [("split", "int8"), ("whole", "int8"), ("split", "bf16"), ("split", "full")]
    sharded.move(
        list(range(count)),
        [
            Bucket(start=2 * k, stop=2 * k + 2, bytes=0, kind=kind, precision=precision)  # type: ignore[arg-type]
            for k, (kind, precision) in enumerate(kinds)
        ],
    )
    for step in range(30):
        sharded.zero_grad()
        loss = _loss(ours, _batches(step % 3, 12)[dist.get_rank()].float())
        loss.backward()
        sharded.step()
        losses.append(float(loss))
    values = torch.cat([p.detach().flatten() for p in ours.parameters()])
    everyones = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, values)
    return {"same": all(torch.equal(values, v) for v in everyones), "first": losses[0], "last": losses[-1]}


def shares(width: int, layers: int) -> dict[str, Any]:
    """This rank's part of Muon's state and of its arithmetic, of what every rank would have without sharing."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * layers
        net = nn.ParameterList(nn.Parameter(torch.randn(shape) / 10) for shape in shapes)
    model = dovetail.DistributedDataParallel(_Sum(net), plan=None, bucket_cap_mb=0.1)
    optimizer = dovetail.optimizer(torch.optim.Muon(model.parameters(), lr=0.01), model)
    model(torch.ones(1)).backward()
    optimizer.step()
    assert model.exchange is not None
    pieces = [p for bucket in model.exchange.buckets for p in bucket.pieces]
    whole = sum(update_cost(shape, matrices=True) for shape in shapes)
    mine = sum(update_cost(p.values.shape, matrices=True) for p in pieces)
    held = sum(t.numel() for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor))
    return {"state": held / sum(r * c for r, c in shapes), "flops": mine / whole}


class _Sum(nn.Module):
    def __init__(self, net: nn.ParameterList) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([p.square().mean() for p in self.net]).sum() * x.sum()


def refusals() -> dict[str, str]:
    """What cannot be shared out says so; what was only unknown is taken."""

    def wrapped(make: Make) -> Any:
        model = dovetail.DistributedDataParallel(nn.Linear(4, 4), plan=None)
        return dovetail.optimizer(make(model.parameters()), model)

    return {
        "lbfgs": refusal(lambda: wrapped(torch.optim.LBFGS)),
        "norm": refusal(lambda: wrapped(ByGlobalNorm)),
        "counting": refusal(lambda: wrapped(Counting)),
        "flat": refusal(lambda: wrapped(Flat)),
        "shampoo": refusal(lambda: wrapped(Preconditioned)),
    }


def _difference(one: nn.Module, other: nn.Module) -> float:
    """Largest difference of a parameter."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)


def _state_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Largest difference of anything in two stored states; infinite if they have different forms."""

    def apart(a: Any, b: Any) -> float:
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            if a.shape != b.shape or a.dtype != b.dtype:
                return float("inf")
            return float((a - b).abs().max()) if a.numel() else 0.0
        if isinstance(a, dict) and isinstance(b, dict) and list(a) == list(b):
            return max((apart(a[k], b[k]) for k in a), default=0.0)
        if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
            return max((apart(x, y) for x, y in zip(a, b, strict=True)), default=0.0)
        return 0.0 if type(a) is type(b) and a == b else float("inf")

    return apart(one["state"], other["state"]) + apart(one["param_groups"], other["param_groups"])
