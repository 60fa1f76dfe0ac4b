"""What the tests of overlap run on every rank: passes that synchronise and passes that do not, in any order."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dovetail

from .overlap_scenarios import OPTIMIZERS, both, difference, loss, of_kinds, refusal

ORDERS = (
    "sync silent sync step",
    "sync silent zero sync step",
    "sync silent silent zero silent sync step",
    "sync silent none sync step",
    "sync zero silent sync step sync step",
    "sync step silent zero sync step sync step",
    "sync aside step sync aside sync step",
    "sync silent aside sync step",
)
"""A "silent" pass is inside `no_sync`; "zero" and "none" are what `zero_grad` may do; "aside" adds to no gradient."""

IDLE_ORDERS = (
    "silent+ sync step sync step",
    "silent+ silent sync step sync step",
    "silent0 sync step sync step",
    "silent+ zero sync step",
    "sync+ silent+ sync step sync step",
    "sync+ silent0 sync step",
    "sync+ silent+ zero sync step",
    "sync+ none silent+ sync step none sync step",
)
"""The same with a layer that is used where there is a "+", or by the first rank alone where there is a 0."""


def played(order: str, idle: bool) -> float:
    """How far ours is from torch's after these passes; weight decay and momentum tell zeros from no gradient."""
    pairs = both(OPTIMIZERS["sgd"], idle=idle, find_unused_parameters=idle)
    for model, optimizer in pairs:
        play(model, optimizer, order)
    return difference(pairs[1][0], pairs[0][0])


def play(model: Any, optimizer: Any, order: str) -> None:
    for step, act in enumerate(order.split()):
        if act == "step":
            optimizer.step()
        elif act == "move":
            if isinstance(model, dovetail.DistributedDataParallel):
                optimizer.move(*of_kinds(model, ("sw", "w", "s", "ssw")[step % 4], every=1 + step % 5))
        elif act in ("zero", "none"):
            optimizer.zero_grad(set_to_none=act == "none")
        elif act == "aside":
            torch.autograd.grad(loss(model.module, step), [p for p in model.parameters() if p.requires_grad])
        else:
            uses = act.endswith("+") or (act.endswith("0") and dist.get_rank() == 0)
            with model.no_sync() if act.startswith("silent") else contextlib.nullcontext():
                loss(model, step, **({"use_idle": True} if uses else {})).backward()


def thrown_away() -> float:
    """A gradient that was set to None counts as never made, where torch takes it for a bug of its own."""
    (theirs, a), (ours, b) = both(OPTIMIZERS["sgd"], idle=True, find_unused_parameters=True)
    play(theirs, a, "none none sync step")
    play(ours, b, "silent+ none sync step")
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


def lone() -> list[Any]:
    """The errors of steps after a pass whose gradients were never sent; how far such a gradient is from torch's."""
    said: list[Any] = []
    for order in ("silent step", "sync silent step"):
        (theirs, _), (model, optimizer) = both(OPTIMIZERS["sgd"])
        said.append(refusal(lambda m=model, o=optimizer, way=order: play(m, o, way)))  # type: ignore[misc]
    play(theirs, None, "sync silent")
    pairs = zip(model.parameters(), theirs.parameters(), strict=True)
    return [*said, max(float((p.grad - q.grad).abs().max()) for p, q in pairs if p.requires_grad)]


def random_programs(seed: int, count: int) -> list[str]:
    """Random orders of everything above, re-planning included, in which ours is not where torch's is."""
    draw, wrong = random.Random(seed), []  # the same on all ranks
    for _ in range(count):
        order = program(draw)
        kinds = draw.choice(("s", "w", "ws", "wws"))
        pairs = both(OPTIMIZERS["sgd"], kinds=kinds)
        for model, optimizer in pairs:
            play(model, optimizer, order)
        if not difference(pairs[1][0], pairs[0][0]) < 1e-11:
            wrong.append(f"{kinds}: {order}")
    return wrong


def program(draw: random.Random) -> str:
    """Up to twelve acts; a step comes only where no gradient is a rank's own, as torch's users must see to it too."""
    acts: list[str] = []
    lone = True
    for _ in range(draw.randint(3, 12)):
        act = draw.choice(("sync", "sync", "silent", "zero", "none", "aside", "step", "step", "move"))
        if (act == "step" and lone) or (act == "move" and (not acts or acts[-1] != "step")):
            continue
        acts.append(act)
        lone = act == "silent" or (lone and act not in ("sync", "none"))
    return " ".join([*acts, "sync", "step"])


class Hollow(nn.Module):
    """Parameters without elements, one of them in a bucket of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.zeros(0))
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 2)
        self.last = nn.Parameter(torch.zeros(3, 0))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.one(x).relu()) + self.first.sum() + self.last.sum()  # type: ignore[no-any-return]


def hollow() -> dict[str, Any]:
    """Trains, stores and moves what has parameters without elements."""
    theirs = TorchDDP(Hollow())
    ours: Any = dovetail.DistributedDataParallel(Hollow(), overlap="forward", plan=None, bucket_cap_mb=1e-5)
    make = OPTIMIZERS["adam"]
    sharded: Any = dovetail.optimizer(make(ours.parameters()), ours)
    pairs: list[tuple[Any, Any]] = [(theirs, make(theirs.parameters())), (ours, sharded)]
    empty = min(bucket.elements for bucket in ours.exchange.buckets)
    count = len(ours.exchange.slots)
    for step in range(6):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).double()
        for model, optimizer in pairs:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        if step in (1, 3):  # as the tuner does
            sharded.move(*of_kinds(ours, "s" if step == 1 else "ws", every=count if step == 1 else 1))
    expected, stored = (optimizer.state_dict()["state"] for _, optimizer in pairs)
    shapes = [[{k: list(v.shape) for k, v in s.items()} for s in state.values()] for state in (stored, expected)]
    again = make(Hollow().parameters())
    again.load_state_dict(sharded.state_dict())
    full = [(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True) if p.numel()]
    return {
        "empty": empty,
        "difference": max(float((p - q).abs().max()) for p, q in full),
        "same form": list(stored) == list(expected) and shapes[0] == shapes[1],
    }
