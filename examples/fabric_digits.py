"""Lightning Fabric: the plan goes into its DDPStrategy.

torchrun --standalone --nproc-per-node 2 examples/fabric_digits.py [--plan plan.json]
"""

import argparse
import os

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dovetail
from dovetail.train.integrations import agree, buckets


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", help="a plan that `dovetail plan` wrote for this model")
    path = parser.parse_args().plan

    dist.init_process_group("gloo")  # Fabric uses the group that exists
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    layers = [nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(512, 10))
    if path:
        plan = dovetail.read(path, dovetail.Plan)
    else:
        profile = dovetail.measure.profile(model, data[:64][0])
        plan = agree(dovetail.plan(profile, dovetail.measure.preset("10gbe-2")))  # every rank measured: take rank 0's

    strategy = DDPStrategy(**plan.ddp_kwargs())
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]))
    fabric.launch()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=64, shuffle=True))
    for epoch in range(3):
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            fabric.backward(loss)
            optimizer.step()
            total += loss.item()
        if fabric.is_global_zero:
            print(f"epoch {epoch}: loss {total / len(loader):.3f}", flush=True)

    if fabric.is_global_zero:
        print(f"plan by {plan.policy}: buckets of {[b.bytes for b in plan.buckets]} bytes")
        print(f"torch uses buckets of {buckets(model)} bytes", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
