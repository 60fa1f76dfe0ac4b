"""Hugging Face Accelerate: `dovetail.prepare(accelerator)` before `accelerator.prepare`.

torchrun --standalone --nproc-per-node 2 examples/accelerate_digits.py [--ddp | --overlap | --plan plan.json]
"""

import argparse

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dovetail


def train(prepare, epochs, *, accumulate=1, precision="no", resume=None, store=None):
    """Mean losses of the epochs, and the wrapped model; from the checkpoint of an epoch on, if one is given."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, mixed_precision=precision)
    prepare(accelerator)
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    layers = [nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=64, shuffle=True))

    first = 0
    if resume:
        folder, first = resume
        accelerator.load_state(folder)
    losses = []
    for epoch in range(first, epochs):
        loader.set_epoch(epoch)
        total = 0.0
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.item()
        losses.append(total / len(loader))
        accelerator.print(f"epoch {epoch}: loss {losses[-1]:.3f}", flush=True)
    if store:
        accelerator.save_state(store)
    return losses, model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ddp", action="store_true", help="torch's own wrapper, to compare with")
    parser.add_argument("--overlap", action="store_true", help="hide communication behind the next forward pass too")
    parser.add_argument("--plan", help="a plan that `dovetail plan` wrote for this model")
    given = parser.parse_args()

    def prepare(accelerator):
        if not given.ddp:
            plan = dovetail.read(given.plan, dovetail.Plan) if given.plan else "auto"
            dovetail.prepare(accelerator, plan=plan, overlap="forward" if given.overlap else None)

    _, model = train(prepare, 14)  # planning ends within 200 steps
    accelerator = Accelerator()
    if not given.ddp:
        accelerator.print(model.explain(), flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
