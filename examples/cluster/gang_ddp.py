"""A gang: an ordinary DistributedDataParallel script, as torchrun runs it. The cluster gives every rank a device.

dovetail cluster submit --gang 2 examples/cluster/gang_ddp.py -- --steps 50
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args().steps

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(dist.get_rank())
    for step in range(steps):
        x = torch.randn(64, 16)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x.square().mean(1, keepdim=True))
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
