"""A gang that leaves gaps: every layer on its own number of ranks. A rank says for how long its device is free, and the
cluster runs background tasks there meanwhile.

dovetail cluster submit --gang 2 --foreground examples/cluster/gang_burst.py -- --steps 50
dovetail cluster submit --background examples/cluster/digits.py
"""

import argparse
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import dovetail


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args().steps

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(64, 512), nn.ReLU()),
        *(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(4)),
        nn.Linear(512, 10),
    ]
    ranks = dist.get_world_size()
    plan = [ranks, ranks, 1, 1, 1, 1]  # the last four layers leave every device but the first to others
    burst = dovetail.Burst(layers, plan, loss=partial(F.cross_entropy, reduction="none"))
    optimizer = torch.optim.SGD(burst.parameters(), lr=0.05)
    for step in range(steps):
        x = torch.randn(256, 64, generator=torch.Generator().manual_seed(step))
        labels = x[:, :10].argmax(1)
        optimizer.zero_grad()
        loss = burst.step(x, labels)
        optimizer.step()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
