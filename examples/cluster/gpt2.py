"""A Hugging Face model: a small GPT-2 from a configuration, with random weights, so that nothing is downloaded.

dovetail cluster submit examples/cluster/gpt2.py
"""

import argparse
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from dovetail import TrainingJob

CONTEXT = 64


class Windows(Dataset):
    """Windows of bytes out of a source file that every Python has, in the form that the library's models take."""

    def __init__(self):
        source = torch.tensor(list(Path(argparse.__file__).read_bytes()))
        self.windows = source[: len(source) // CONTEXT * CONTEXT].view(-1, CONTEXT)

    def __len__(self):
        return len(self.windows)

    def __getitem__(self, i):
        return {"input_ids": self.windows[i], "labels": self.windows[i]}


def model():
    sizes = {"vocab_size": 256, "n_positions": CONTEXT, "n_embd": 64, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"))


job = TrainingJob(
    name="gpt2",
    model=model,
    data=Windows,
    loss=lambda model, batch: model(**batch).loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    steps=100,
    batch=16,
    workers=2,
    task_seconds=(0.030, 0.060),
)
