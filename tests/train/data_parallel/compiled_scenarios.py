"""What the tests of compiled and scripted modules run on every rank, while new values are held up."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dovetail

from .overlap_scenarios import of_kinds
from .reference_scenarios import held_up

BACKEND = "aot_eager"
"""Compiled forward and backward graphs that run torch's own operators: no C compiler is needed."""
STEPS = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.wide(x).tanh())  # type: ignore[no-any-return]


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)  # type: ignore[no-any-return]


def _train(model: Any, optimizer: Any, run: Any, *, rows: int = 4) -> list[int]:
    """Trains, and returns how many graphs there were after each iteration."""
    graphs = []
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        x = torch.randn(rows, 8, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        run(x).square().mean().backward()
        if isinstance(model, dovetail.DistributedDataParallel) and model.exchange is not None:
            held_up(model, 0.05)
        optimizer.step()
        graphs.append(int(counters["stats"]["unique_graphs"]))
    return graphs


def compiled(way: str) -> dict[str, Any]:
    """`way` says what is compiled or scripted, and when; the difference from torch's wrapper without any of it."""
    torch._dynamo.reset()
    counters.clear()
    theirs: Any = TorchDDP(Blocks())
    _train(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9), theirs)
    before = int(counters["stats"]["unique_graphs"])

    module: Any = Blocks()
    if way == "blocks":
        module.blocks = nn.ModuleList([cast(nn.Module, torch.compile(b, backend=BACKEND)) for b in module.blocks])
    elif way == "blocks in place":
        for block in module.blocks:
            block.compile(backend=BACKEND)
    elif way == "module":
        module = torch.compile(module, backend=BACKEND)
    elif way == "scripted block":
        module.blocks[1] = torch.jit.script(module.blocks[1])
    elif way == "scripted module":
        module = torch.jit.script(module)
    model: Any = dovetail.DistributedDataParallel(module, plan=None)
    optimizer = dovetail.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    optimizer.move(*of_kinds(model, "s", every=2))
    run = model
    if way == "wrapper":
        run = torch.compile(model, backend=BACKEND)
    elif way == "wrapper in place":
        model.compile(backend=BACKEND)
    elif way == "blocks after wrapping":
        for block in module.blocks:
            block.compile(backend=BACKEND)
    graphs = _train(model, optimizer, run)
    mine, torchs = ([p.detach() for p in m.parameters()] for m in (model, theirs))
    found = {
        "difference": max(float((a - b).abs().max()) for a, b in zip(mine, torchs, strict=True)),
        "graphs": [count - before for count in graphs],
        "breaks": {str(k).splitlines()[0]: v for k, v in counters["graph_break"].items()},
        "explained": model.explain(),
    }
    # Another shape is compiled anew, while gradients and values are as an iteration leaves them.
    _train(model, optimizer, run, rows=5)
    return found
