"""Handwritten digits with a small fully connected network: the shortest job file that learns something.

dovetail cluster submit examples/cluster/digits.py [--workers 4 --spb ladder]
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from dovetail import TrainingJob


def model():
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(256, 10))


def data():
    pixels, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))


def loss(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)  # the mean over the samples that it is given


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


job = TrainingJob(
    name="digits",
    model=model,
    data=data,
    loss=loss,
    optimizer=optimizer,
    steps=300,
    batch=128,
    workers=2,
    # What a task of full depth takes on an emulated device: seconds of forward and of backward.
    task_seconds=(0.010, 0.020),
)
