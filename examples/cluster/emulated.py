"""A job for emulated devices: real (small) tensors and a real optimiser, but a task takes what a GPU would.

dovetail cluster up --devices 8 --emulated
dovetail cluster submit examples/cluster/emulated.py --workers 4 --spb ladder

The model is a stand-in of a few thousand parameters. The times are those of a BERT-like model: 164 ms on the device in
one iteration, a third of them forward, and 27 ms of aggregation. With a profile of your own model, as `dovetail
profile` writes it, put `profile=dovetail.read("job.json", dovetail.Profile)` in place of `task_seconds`.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from dovetail import TrainingJob


def model():
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())], nn.Linear(32, 1))


def data():
    x = torch.randn(512, 32, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.square().mean(1, keepdim=True))


def loss(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


job = TrainingJob(
    name="emulated",
    model=model,
    data=data,
    loss=loss,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    steps=100,
    batch=32,
    workers=4,
    task_seconds=(0.055, 0.109),
    off_device=0.027,
)
