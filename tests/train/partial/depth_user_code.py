"""What user code does besides plain steps, under partial backpropagation: run on every rank, as depth_scenarios."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from dovetail.core.errors import Error
from dovetail.planning.depth.guard import Guard
from dovetail.train.partial.module import PartialBackprop
from dovetail.train.partial.segments import cut

from .depth_models import inputs, loss
from .depth_scenarios import HANGS, identical, wrapped_module


class Box:
    """An output whose tensors cannot be found."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Layers(nn.Module):
    """Three layers, one of them perhaps used several times, some of them perhaps recomputed, one to spare."""

    def __init__(self, recompute: str = "", *, uses: int = 1, boxed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.spare = (nn.Linear(6, 6) for _ in range(4))
        self.recompute, self.uses, self.boxed = recompute, uses, boxed
        self.raises: BaseException | None = None
        self.use_spare = False
        self.double()

    def forward(self, x: torch.Tensor) -> Any:
        if self.raises is not None:
            raise self.raises
        x = torch.tanh(self.a(x))
        for _ in range(self.uses):
            x = torch.tanh(self._run("b", x))
        if self.use_spare:
            x = self.spare(x)
        x = self._run("c", x)
        return Box(x) if self.boxed else x

    def _run(self, name: str, x: torch.Tensor) -> torch.Tensor:
        layer = getattr(self, name)
        result: torch.Tensor = checkpoint(layer, x, use_reentrant=True) if name in self.recompute else layer(x)
        return result


class TiedLayers(nn.Module):
    """The first and the last layer share their weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(6, 6, bias=False), nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.c.weight = self.a.weight
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.c(torch.tanh(self.b(self.a(x))))
        return result


class Raises(torch.autograd.Function):
    """The identity, until its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("in backward")


def raising(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Raises.apply(x)  # type: ignore[no-untyped-call]
    return result


def wrapped(model: nn.Module, depths: list[int] | None = None, **options: Any) -> PartialBackprop:
    plan = cut(model, inputs("skips", 3, 0), at=["b"], depths=depths or [2] * dist.get_world_size())
    return PartialBackprop(model, plan, **{"guard": None, "timeout": HANGS, **options})


def step(ours: PartialBackprop, samples: int = 3, seed: int = 0) -> None:
    output = ours(inputs("skips", samples, 10 * seed + dist.get_rank()))
    loss(getattr(output, "value", output)).backward()


def said_by(run: Any) -> str:
    try:
        run()
    except Error as e:
        return str(e)
    return "went on"


def reentrant() -> dict[str, Any]:
    """Reentrant checkpointing at full depth, where no cut breaks anything: only the inner backward passes do."""
    said = {
        "last layer": said_by(lambda: step(wrapped(Layers("bc")))),
        "used often": said_by(lambda: step(wrapped(Layers("b", uses=3)))),
        "boxed": said_by(lambda: step(wrapped(Layers("bc", boxed=True)))),
        "boxed and plain": said_by(lambda: step(wrapped(Layers(boxed=True)))),
    }
    accumulating = wrapped(Layers("c"))
    with accumulating.no_sync():
        step(accumulating)
    said["accumulated"] = said_by(lambda: step(accumulating))
    # From the second step on, on the last rank alone: it says why, the others hear that it has failed.
    alone = wrapped(Layers())
    step(alone)
    if dist.get_rank() == dist.get_world_size() - 1:
        wrapped_module(alone).recompute = "b"
    said["alone"] = said_by(lambda: [step(alone, seed=i) for i in range(2)])  # type: ignore[func-returns-value]
    return said


def other_gradients() -> dict[str, Any]:
    """Gradients of something else, asked for through the model's outputs, are no backward pass of a step."""
    model = Layers()
    ours = wrapped(model)
    steps = []
    for _ in range(2):
        x = inputs("skips", 3, dist.get_rank()).requires_grad_()
        output = ours(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        steps.append(ours.step)
        (loss(output) + slope.square().sum()).backward()
    loss(model(inputs("skips", 3, dist.get_rank()))).backward()  # not through us, on this rank alone
    model.zero_grad()
    step(ours)
    return {"steps": [*steps, ours.step], "same": identical(model)}


def kept_as_they_were() -> dict[str, Any]:
    """Parameters frozen during training, and unused ones, under an optimiser with momentum and decay."""
    moved: dict[str, float] = {}
    gradients: dict[str, bool] = {}
    same = True
    for case, depths in (("frozen", [2, 2]), ("frozen", [1, 2]), ("tied", [2, 2]), ("unused", [2, 2])):
        model: Any = TiedLayers() if case == "tied" else Layers()
        if case == "frozen":
            model.spare.requires_grad_(False)
        ours = wrapped(model, depths, uneven_use=case == "unused")
        optimizer = torch.optim.AdamW(ours.parameters(), lr=0.1)
        held = model.spare if case == "unused" else model.a
        for i in range(4):
            if i == 2 and case != "unused":
                held.requires_grad_(False)
            if i in (0, 2):
                before = held.weight.detach().clone()
            optimizer.zero_grad()
            step(ours, seed=i)
            optimizer.step()
            same &= identical(model)
        name = f"{case} {depths}"
        moved[name] = float((held.weight.detach() - before).abs().max())
        gradients[name] = held.weight.grad is not None
        if case == "unused":
            model.use_spare = dist.get_rank() == 0  # one contributor is enough
            step(ours)
            used = held.weight.grad is not None and bool(held.weight.grad.any())
            same &= identical(model)
    entries = all(optimizer.state_dict()["state"].values())
    return {"moved": moved, "gradients": gradients, "used": used, "same": same, "entries": entries}


def thrown_away() -> dict[str, Any]:
    """A local pass whose gradients are dropped leaves nothing behind, also if a graph is dropped in between or its
    backward pass raises; one whose loss is masked has zero gradients and counts.
    """
    rank = dist.get_rank()

    def gradients(model: Any, discard: str) -> list[torch.Tensor]:
        ours = wrapped(model)
        step(ours)
        ours.zero_grad()
        hook = model.b.register_forward_hook(lambda *given: raising(given[-1])) if discard == "raised" else None
        if discard:
            with ours.no_sync(), contextlib.suppress(ValueError):
                output = ours(inputs("skips", 1 + 4 * rank, 77))
                (loss(output) * (0.0 if discard == "masked" else 1.0)).backward()
            if discard == "graph":
                ours(inputs("skips", 3, 78))  # no backward pass follows
            if discard != "masked":
                ours.zero_grad(set_to_none=discard != "zero")
        if hook is not None:
            hook.remove()
        step(ours, samples=2, seed=5)
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    equal = {}
    for kind in (Layers, TiedLayers):
        plain = gradients(kind(), "")
        for discard in ("none", "zero", "masked", "graph", *(["raised"] if kind is Layers else [])):
            got = gradients(kind(), discard)
            equal[f"{kind.__name__} {discard}"] = all(torch.equal(a, b) for a, b in zip(plain, got, strict=True))
    return {"equal": equal}


def without_samples() -> dict[str, Any]:
    """A measured step in which one rank has nothing to do."""
    ours = wrapped(Layers(), guard=Guard(every=2, patience=1))
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.01)
    for i in range(8):
        optimizer.zero_grad()
        output = ours(inputs("skips", 0 if i == 5 and dist.get_rank() == 0 else 3, i + dist.get_rank()))
        output.square().sum().backward()
        optimizer.step()
    return {"measured": [d.step for d in ours.decisions], "same": identical(ours.module)}


def interrupted() -> dict[str, str]:
    """The last rank gets Ctrl-C in forward and lives on: no rank waits for it."""
    ours = wrapped(Layers())
    step(ours)
    if dist.get_rank() == dist.get_world_size() - 1:
        wrapped_module(ours).raises = KeyboardInterrupt("from the user")
    try:
        step(ours)
    except BaseException as e:
        said = f"{type(e).__name__}: {e}"
    dist.barrier()  # alive, and joined as before
    return {"said": said}


def given_up() -> dict[str, Any]:
    """A backward pass raises on all ranks: the thread stops waiting for its gradients."""
    ours = wrapped(Layers(), [1, 2])
    step(ours)
    x = inputs("skips", 3, dist.get_rank())
    hidden = wrapped_module(ours).b.register_forward_hook(lambda *given: raising(given[-1]))
    try:
        loss(ours(x)).backward()
    except ValueError as e:
        said = str(e)
    hidden.remove()
    assert ours._planned is not None and ours._planned._exchange is not None
    delivery = ours._planned._exchange.delivery
    waiting = not delivery.done.is_set()
    again = [said_by(lambda: ours(x)) for _ in range(2)]
    ended = delivery.done.wait(HANGS)
    loss(ours.module(x)).backward()  # the wrapped module still works by itself
    trainable = all(p.requires_grad for p in ours.module.parameters())
    return {
        "raised": said,
        "waiting": waiting,
        "again": again,
        "ended": ended,
        "trainable": trainable,
        "state": ours.state.name,
    }


def awaiting_plan() -> dict[str, Any]:
    """A policy's name instead of a plan: only a forward pass with gradients makes the plan."""
    ours = PartialBackprop(Layers(), "ladder", timeout=HANGS)
    x = inputs("skips", 3, dist.get_rank())
    before = [ours.state.name, list(ours.depths), ours.step, len(ours.decisions), ours.explain()]
    refused = [said_by(lambda: ours.resume(3)), said_by(lambda: ours.batches(range(9)))]
    with torch.no_grad():
        ours(x)
    evaluated = ours.state.name
    ours(x)
    armed = ours.state.name
    step(ours)
    after = [ours.state.name, sorted(ours.depths), ours.step]
    return {"before": before, "refused": refused, "evaluated": evaluated, "armed": armed, "after": after}


def released() -> dict[str, Any]:
    """The user drops the wrapper after a step and keeps the model, the optimiser and an output."""
    model = Layers()
    ours = wrapped(model)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.01)
    step(ours)
    optimizer.step()
    output = ours(inputs("skips", 3, 1))
    held: list[weakref.ref[Any]] = [weakref.ref(ours), weakref.ref(ours._planned)]
    del ours
    gc.collect()
    model.zero_grad()
    loss(output).backward()
    optimizer.step()
    return {"released": [ref() is None for ref in held], "gradient": model.c.weight.grad is not None}


def one_rank() -> str:
    ours = wrapped(Layers(), guard=Guard(every=2, patience=1))
    for _ in range(6):
        step(ours)
    return ours.explain()
