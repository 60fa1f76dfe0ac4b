"""One rank of benchmarks/whole_tensors.py: a small GPT with Muon for its matrices and AdamW for the rest."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dovetail
from dovetail.emulate.channel import leave
from dovetail.emulate.launch import report
from memory_rank import BATCH, LENGTH, VOCABULARY, SmallGPT

WIDTH, BLOCKS, SETTLING = 256, 6, 2


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """As scripts divide parameters: matrices of the blocks to Muon, the rest to AdamW."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if ".blocks." in name and p.dim() == 2]
    held = {id(p) for p in matrices}
    rest = [p for _, p in named if id(p) not in held]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=3e-4)]


def run(name: str, steps: int) -> dict[str, Any]:
    """Processor seconds of this rank's optimisers in each step, bytes of their state, and the mean losses."""
    torch.manual_seed(0)
    net = SmallGPT(WIDTH, BLOCKS)
    model: Any
    if name == "replicated":
        model = TorchDDP(net)
        made = optimizers(model)
    else:
        model = dovetail.DistributedDataParallel(net, plan=None, bucket_cap_mb=4)
        made = [dovetail.optimizer(o, model) for o in optimizers(model)]
    draw = torch.Generator().manual_seed(dist.get_rank())
    losses, taken = [], []
    for _ in range(SETTLING + steps):
        tokens = torch.randint(0, VOCABULARY // 8, (BATCH, LENGTH + 1), generator=draw)
        for optimizer in made:
            optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        dist.barrier()
        # This thread's own: waiting for others takes none, and what other ranks do on the same cores is not counted.
        start = time.thread_time()
        for optimizer in made:
            optimizer.step()
        taken.append(time.thread_time() - start)
        losses.append(loss.detach())
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    values = [v for o in made for state in o.state.values() for v in state.values() if isinstance(v, Tensor)]
    muon = [v for state in made[0].state.values() for v in state.values() if isinstance(v, Tensor)]
    return {
        "seconds": taken[SETTLING:],
        "state": sum(v.numel() * v.element_size() for v in values),
        "muon": sum(v.numel() * v.element_size() for v in muon),
        "losses": (mean / dist.get_world_size()).tolist(),
    }


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    report(run(sys.argv[1], int(sys.argv[2])))
    leave()


if __name__ == "__main__":
    main()
