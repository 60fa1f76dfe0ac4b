"""torch's own DistributedDataParallel, following a plan: a stored one, or one made here on the spot.

torchrun --standalone --nproc-per-node 2 examples/plan_file.py [--plan plan.json]
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dovetail
from dovetail.train.integrations import agree, buckets


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", help="a plan that `dovetail plan` wrote for this model")
    path = parser.parse_args().plan

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64, sampler=sampler)
    layers = [nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(512, 10))

    if path:
        plan = dovetail.read(path, dovetail.Plan)
    else:
        profile = dovetail.measure.profile(model, data[:64][0])
        plan = agree(dovetail.plan(profile, dovetail.measure.preset("10gbe-2")))  # every rank measured: take rank 0's

    model = DDP(model, **plan.ddp_kwargs())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {total / len(loader):.3f}", flush=True)

    if dist.get_rank() == 0:
        print(f"plan by {plan.policy}: buckets of {[b.bytes for b in plan.buckets]} bytes")
        print(f"torch uses buckets of {buckets(model)} bytes", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
