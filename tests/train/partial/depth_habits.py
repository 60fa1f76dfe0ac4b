"""What user code does besides plain steps, under partial backpropagation: run on every rank, as depth_scenarios."""

from __future__ import annotations

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
from .depth_scenarios import identical


class Box:
    """An output that nobody looks into."""

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
        return self.c(torch.tanh(self.b(self.a(x))))


class Raises(torch.autograd.Function):
    """The identity, until its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("in backward")


def wrapped(model: nn.Module, depths: list[int] | None = None, **options: Any) -> PartialBackprop:
    plan = cut(model, inputs("skips", 3, 0), at=["b"], depths=depths or [2] * dist.get_world_size())
    return PartialBackprop(model, plan, **{"guard": None, "timeout": 60, **options})


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
    """The whole of it at full depth, where no cut breaks anything: only the passes inside the pass do."""
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
        alone.module.recompute = "b"
    said["alone"] = said_by(lambda: (step(alone), step(alone)))
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
    """Parameters frozen on the way, and those that nobody uses, under an optimiser with momentum and decay."""
    moved: dict[str, float] = {}
    gradients: dict[str, bool] = {}
    same = True
    for case, depths in (("frozen", [2, 2]), ("frozen", [1, 2]), ("tied", [2, 2]), ("unused", [2, 2])):
        model = TiedLayers() if case == "tied" else Layers()
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
    """An unsynchronised pass whose gradients are dropped leaves nothing behind; one without gradients counts."""
    rank = dist.get_rank()

    def gradients(model: nn.Module, discard: str) -> list[torch.Tensor]:
        ours = wrapped(model)
        step(ours)
        ours.zero_grad()
        if discard:
            with ours.no_sync():
                output = ours(inputs("skips", 1 + 4 * rank, 77))
                (loss(output) * (0.0 if discard == "masked" else 1.0)).backward()
            if discard != "masked":
                ours.zero_grad(set_to_none=discard == "none")
        counted = ours._samples
        step(ours, samples=2, seed=5)
        samples.append(counted)
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    samples: list[int] = []
    equal = {}
    for kind in (Layers, TiedLayers):
        plain = gradients(kind(), "")
        for discard in ("none", "zero", "masked"):
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
    """The last rank gets Ctrl-C in forward and lives on: nobody waits for it."""
    ours = wrapped(Layers())
    step(ours)
    if dist.get_rank() == dist.get_world_size() - 1:
        ours.module.raises = KeyboardInterrupt("from the user")
    try:
        step(ours)
    except BaseException as e:
        said = f"{type(e).__name__}: {e}"
    dist.barrier()  # alive, and joined as before
    return {"said": said}


def given_up() -> dict[str, Any]:
    """A backward pass that raises, on all ranks: the thread that waits for its gradients goes with it."""
    ours = wrapped(Layers())
    step(ours)
    x = inputs("skips", 3, dist.get_rank())
    hidden = ours.module.b.register_forward_hook(lambda *given: Raises.apply(given[-1]))
    try:
        loss(ours(x)).backward()
    except ValueError as e:
        said = str(e)
    hidden.remove()
    delivery = ours._delivery
    assert delivery is not None
    waiting = not delivery.done.is_set()
    again = said_by(lambda: ours(x))
    return {"raised": said, "waiting": waiting, "again": again, "gone": delivery.done.wait(30)}


def one_rank() -> str:
    ours = wrapped(Layers(), guard=Guard(every=2, patience=1))
    for _ in range(6):
        step(ours)
    return ours.explain()
