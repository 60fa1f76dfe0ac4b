"""Handwritten digits as images, with convolutions and batch norm, whose running statistics are worker 0's.

dovetail cluster submit examples/cluster/cnn.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from dovetail import TrainingJob


def convolution(before, after):
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU())


def model():
    blocks = [convolution(1, 16), convolution(16, 32), nn.MaxPool2d(2), convolution(32, 64), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 10))


def data():
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return TensorDataset(images, torch.tensor(labels))


def loss(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


job = TrainingJob(
    name="cnn",
    model=model,
    data=data,
    loss=loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200),
    steps=200,
    batch=64,
    workers=2,
    task_seconds=(0.015, 0.030),
)
