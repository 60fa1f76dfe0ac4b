"""A character transformer learns to spell a source file that every Python has.

dovetail cluster submit examples/cluster/characters.py
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

from dovetail import TrainingJob

CONTEXT, WIDTH = 64, 64


class Windows(Dataset):
    """Every sample is CONTEXT bytes and the byte after each of them."""

    def __init__(self):
        self.text = torch.tensor(list(Path(argparse.__file__).read_bytes()))

    def __len__(self):
        return len(self.text) // CONTEXT - 1

    def __getitem__(self, i):
        window = self.text[i * CONTEXT : (i + 1) * CONTEXT + 1]
        return window[:-1], window[1:]


class Characters(nn.Module):
    def __init__(self):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 256)
        mask = torch.full((CONTEXT, CONTEXT), float("-inf")).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x):
        x = self.bytes(x) + self.places.weight
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return self.head(x)


def loss(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


job = TrainingJob(
    name="characters",
    model=Characters,
    data=Windows,
    loss=loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    steps=200,
    batch=32,
    workers=2,
    spb="ladder",  # worker 0 backpropagates through the last half only; see docs/partial.md before you copy this line
    task_seconds=(0.020, 0.040),
)
