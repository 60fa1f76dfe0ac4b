"""Hugging Face Accelerate: `plan.apply(accelerator)` before `prepare`.

torchrun --standalone --nproc-per-node 2 examples/accelerate_digits.py [--plan plan.json]
"""

import argparse

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dovetail
from dovetail.train.integrations import buckets


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", help="a plan that `dovetail plan` wrote for this model")
    path = parser.parse_args().plan

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    layers = [nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(512, 10))
    if path:
        plan = dovetail.read(path, dovetail.Plan)
    else:
        profile = dovetail.measure.profile(model, data[:64][0])
        plan = dovetail.plan(profile, dovetail.measure.preset("10gbe-2"))

    plan.apply(accelerator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=64, shuffle=True))
    for epoch in range(3):
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            total += loss.item()
        accelerator.print(f"epoch {epoch}: loss {total / len(loader):.3f}", flush=True)

    accelerator.print(f"plan by {plan.policy}: buckets of {[b.bytes for b in plan.buckets]} bytes")
    accelerator.print(f"torch uses buckets of {buckets(model)} bytes", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
