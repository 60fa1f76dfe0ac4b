"""One rank of benchmarks/memory.py: one contestant trains a small GPT with AdamW, and this process's memory is read."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dovetail
from dovetail.core.plan import BucketKind
from dovetail.emulate.channel import leave
from dovetail.emulate.launch import report
from handmade import alternating, handmade

HEADS, VOCABULARY, LENGTH, BATCH = 8, 512, 32, 2
BUCKETS = 10
"""Handmade buckets, about."""
RATE = 3e-4


class Block(nn.Module):
    """Attention to what came before, then a feed-forward layer, each added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        batch, length, width = h.shape
        q, k, v = self.attend(self.first(h)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.join(mixed.transpose(1, 2).reshape(batch, length, width))
        return h + self.narrow(nn.functional.gelu(self.widen(self.second(h))))  # type: ignore[no-any-return]


class SmallGPT(nn.Module):
    """A decoder, by default of 26 million parameters."""

    def __init__(self, width: int = 512, blocks: int = 8) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.token(tokens) + self.place(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))  # type: ignore[no-any-return]


@dataclass
class Trained:
    """A model in its wrapper, its optimiser, and where that keeps its state on this rank."""

    model: Any
    optimizer: Any
    state: Callable[[], Iterable[Any]]
    """The optimiser's state of every parameter, or piece of one."""


def ddp(net: SmallGPT, *, views: bool = False) -> Trained:
    model = TorchDDP(net, gradient_as_bucket_view=views)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    return Trained(model, optimizer, optimizer.state.values)


def zero(net: SmallGPT) -> Trained:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # takes seconds; the other contestants do without

    model = TorchDDP(net, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=RATE)
    return Trained(model, optimizer, lambda: optimizer.optim.state.values())


def fsdp2(net: SmallGPT) -> Trained:
    from torch.distributed.fsdp import fully_shard

    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)
    return Trained(net, optimizer, optimizer.state.values)


def two_lines(net: SmallGPT, memory: Literal["time", "shard"], kind: Callable[[int], BucketKind]) -> Trained:
    total = sum(p.numel() * p.element_size() for p in net.parameters())
    plan = handmade(net, ranks=dist.get_world_size(), bucket_bytes=total // BUCKETS, kind=kind)
    model: Any = dovetail.DistributedDataParallel(net, plan=plan, memory=memory)
    optimizer = dovetail.optimizer(torch.optim.AdamW(model.parameters(), lr=RATE), model)
    return Trained(model, optimizer, optimizer.state.values)


CONTESTANTS: dict[str, Callable[[SmallGPT], Trained]] = {
    "ddp": ddp,
    "ddp-views": lambda net: ddp(net, views=True),
    "zero": zero,
    "fsdp2": fsdp2,
    "both": lambda net: two_lines(net, "time", alternating("whole")),
    "shard": lambda net: two_lines(net, "shard", lambda _: "split"),
}


def run(name: str, steps: int, *, width: int = 512, blocks: int = 8) -> dict[str, Any]:
    """Bytes of this rank's memory over what the process needs for a tiny model, and the mean losses."""
    train(CONTESTANTS[name](SmallGPT(64, 1)), 2)  # what is imported, connected and started on the way is there
    gc.collect()
    before = _memory("VmRSS")
    _reset_peak()
    torch.manual_seed(0)
    trained = CONTESTANTS[name](SmallGPT(width, blocks))
    losses = train(trained, 2)
    highest = _memory("VmHWM")
    _reset_peak()  # from here on: what every iteration needs, as the state, the buffers and the gradients are there
    losses += train(trained, steps, seed=1)
    training = _memory("VmHWM")
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    with torch.device("meta"):
        parameters = sum(p.numel() * p.element_size() for p in SmallGPT(width, blocks).parameters())
    return {
        "training": training - before,
        "highest": max(highest, training) - before,
        "state": sum(_bytes(value) for entry in trained.state() for value in entry.values()),
        "parameters": parameters,
        "losses": (mean / dist.get_world_size()).tolist(),
    }


def train(trained: Trained, steps: int, *, seed: int = 0) -> list[Tensor]:
    """This rank's losses."""
    draw = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, VOCABULARY // 8, (BATCH, LENGTH + 1), generator=draw)
        trained.optimizer.zero_grad()
        logits = trained.model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        del logits
        loss.backward()
        trained.optimizer.step()
        losses.append(loss.detach())
    for parameter in trained.model.parameters():
        parameter.detach()  # what dovetail's last iteration has sent arrives
    return losses


def _bytes(value: Any) -> int:
    """Bytes of a tensor on this rank; options and counts that are no tensors take none."""
    tensor = value.to_local() if hasattr(value, "to_local") else value  # FSDP2's are shards of a DTensor
    return tensor.numel() * tensor.element_size() if isinstance(tensor, Tensor) else 0


def _memory(field: str) -> int:
    """Bytes of this process: resident now (VmRSS), or the most since the peak was reset (VmHWM)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    report(run(sys.argv[1], int(sys.argv[2])))
    leave()


if __name__ == "__main__":
    main()
