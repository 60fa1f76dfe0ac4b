"""One rank of the loss comparison of benchmarks/overlap.py: a small transformer on the sources of Python's library.

It is trained three times on the same data: with torch's DDP; with handmade plans whose buckets are of both kinds, which
are exchanged for others (other cuts, every kind the other one) in the middle of the training, by way of a checkpoint;
and with dovetail's own planning, which changes buckets while it trains.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dovetail
from dovetail.core.plan import Plan
from dovetail.emulate.channel import leave
from dovetail.emulate.launch import report
from handmade import alternating, handmade

LENGTH, BATCH = 32, 8


def training(steps: int) -> Any:
    """Losses by step, mean over ranks, and what carried the gradients."""
    losses, plans = {}, {}
    for name, train in (("ddp", _ddp), ("handmade", _handmade), ("planned", _planned)):
        mine, plans[name] = train(_batches(steps), steps)
        mean = torch.stack(mine)
        dist.all_reduce(mean)
        losses[name] = (mean / dist.get_world_size()).tolist()
    return {"losses": losses, "plans": plans}


def _ddp(batches: list[Tensor], _: int) -> tuple[list[Tensor], str]:
    model = TorchDDP(transformer())
    return _run(model, torch.optim.AdamW(model.parameters(), lr=1e-3), batches), "torch's buckets"


def _handmade(batches: list[Tensor], steps: int) -> tuple[list[Tensor], str]:
    net, half = transformer(), steps // 2
    first = handmade(net, ranks=dist.get_world_size(), bucket_bytes=40_000, kind=alternating("whole"))
    second = handmade(net, ranks=dist.get_world_size(), bucket_bytes=90_000, kind=alternating("split"))
    model, optimizer = _two_lines(net, plan=first)
    losses = _run(model, optimizer, batches[:half])
    values, state = model.module.state_dict(), optimizer.state_dict()
    again = transformer()
    again.load_state_dict(values)
    model, optimizer = _two_lines(again, plan=second)
    optimizer.load_state_dict(state)
    losses += _run(model, optimizer, batches[half:])
    return losses, f"{kinds(first)}, from step {half} on {kinds(second)}"


def _planned(batches: list[Tensor], steps: int) -> tuple[list[Tensor], str]:
    # Planning begins late, so that the optimiser has state to move.
    tuning = dovetail.Tuning(warmup=steps // 4, measure=5, steps=2, network_seconds=2.0)
    model, optimizer = _two_lines(transformer(), tuning=tuning)
    losses = _run(model, optimizer, batches)
    tried = len(model.report.trials)
    kept = kinds(model.report.plan) if model.report.plan else "torch's buckets"
    return losses, f"{tried} plans tried from step {steps // 4} on, kept {kept}"


def _two_lines(net: nn.Module, **given: Any) -> tuple[Any, Any]:
    model = dovetail.DistributedDataParallel(net, **given)
    return model, dovetail.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model)


def kinds(plan: Plan) -> str:
    whole = sum(b.kind == "whole" for b in plan.buckets)
    return f"{whole} whole and {len(plan.buckets) - whole} split buckets"


def _run(model: nn.Module, optimizer: Any, batches: Iterable[Tensor]) -> list[Tensor]:
    losses = []
    for rows in batches:
        optimizer.zero_grad()
        logits = model(rows[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def _batches(steps: int) -> list[Tensor]:
    """This rank's own batches of text, the same for every contestant."""
    text = _library()
    draw = torch.Generator().manual_seed(1 + dist.get_rank())
    starts = torch.randint(0, len(text) - LENGTH - 1, (steps, BATCH), generator=draw)
    return [torch.stack([text[i : i + LENGTH + 1] for i in row]) for row in starts.tolist()]


def transformer() -> Transformer:
    torch.manual_seed(0)
    return Transformer()


class Transformer(nn.Module):
    """Two blocks that predict the next byte."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        h = self.token(tokens) + self.place(torch.arange(length))
        return self.head(self.blocks(h, mask=mask, is_causal=True))  # type: ignore[no-any-return]


def _library() -> Tensor:
    """A few hundred kilobytes of source text that every Python has."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join((folder / f"{name}.py").read_bytes() for name in ("argparse", "typing", "inspect", "subprocess"))
    return torch.tensor(list(text), dtype=torch.int64)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    report(training(int(sys.argv[1])))
    leave()


if __name__ == "__main__":
    main()
