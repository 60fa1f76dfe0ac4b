"""Lightning Fabric: `strategy="dovetail"`, after `import dovetail`.

torchrun --standalone --nproc-per-node 2 examples/fabric_digits.py [--strategy dovetail_overlap] [--plan plan.json]
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

import dovetail  # makes Fabric know the strategies "dovetail" and "dovetail_overlap"
from dovetail.train.integrations.lightning import DovetailFabricStrategy


def train(strategy, epochs, *, accumulate=1, precision=None, resume=None, store=None):
    """Mean losses of the epochs, and what dovetail explains; from a checkpoint on, if one is given."""
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=devices, precision=precision)
    fabric.launch()
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    layers = [nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(512, 10))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=64, shuffle=True))

    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    if resume:
        fabric.load(resume, state)
    losses = []
    for epoch in range(state["epoch"], epochs):
        loader.sampler.set_epoch(epoch)
        total = 0.0
        for step, (x, y) in enumerate(loader, 1):
            accumulating = step % accumulate != 0
            with fabric.no_backward_sync(model, enabled=accumulating):
                loss = nn.functional.cross_entropy(model(x), y)
                fabric.backward(loss / accumulate)
            if not accumulating:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.item()
        losses.append(total / len(loader))
        if fabric.is_global_zero:
            print(f"epoch {epoch}: loss {losses[-1]:.3f}", flush=True)
    if store:
        fabric.save(store, {**state, "epoch": epochs})
    return losses, "" if type(fabric.strategy) is DDPStrategy else fabric.strategy.explain()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="dovetail", help='"dovetail", "dovetail_overlap", or Fabric\'s "ddp"')
    parser.add_argument("--plan", help="a plan that `dovetail plan` wrote for this model")
    given = parser.parse_args()
    strategy = DovetailFabricStrategy(plan=dovetail.read(given.plan, dovetail.Plan)) if given.plan else given.strategy

    dist.init_process_group("gloo")  # Fabric uses the group that exists
    _, explained = train(strategy, 14)  # planning ends within 200 steps
    if dist.get_rank() == 0:
        print(explained, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
