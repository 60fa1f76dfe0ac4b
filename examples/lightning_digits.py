"""PyTorch Lightning: the plan goes into its DDPStrategy.

torchrun --standalone --nproc-per-node 2 examples/lightning_digits.py [--plan plan.json]
"""

import argparse
import os

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dovetail
from dovetail.train.integrations import agree, buckets


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        layers = [nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.Linear(512, 10))
        self.losses = []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def on_train_epoch_end(self):
        if self.global_rank == 0:
            print(f"epoch {self.current_epoch}: loss {sum(self.losses) / len(self.losses):.3f}", flush=True)
        self.losses.clear()
        self.buckets = buckets(self.trainer.strategy.model)  # after training Lightning takes DDP off again

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", help="a plan that `dovetail plan` wrote for this model")
    path = parser.parse_args().plan

    dist.init_process_group("gloo")  # Lightning uses the group that exists
    lightning.seed_everything(0, verbose=False)
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    model = Digits()
    if path:
        plan = dovetail.read(path, dovetail.Plan)
    else:
        profile = dovetail.measure.profile(model, data[:64][0])
        plan = agree(dovetail.plan(profile, dovetail.measure.preset("10gbe-2")))  # every rank measured: take rank 0's

    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    strategy = DDPStrategy(**plan.ddp_kwargs())
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = lightning.Trainer(strategy=strategy, accelerator="cpu", devices=devices, max_epochs=3, **quiet)
    trainer.fit(model, DataLoader(data, batch_size=64, shuffle=True))
    if trainer.is_global_zero:
        print(f"plan by {plan.policy}: buckets of {[b.bytes for b in plan.buckets]} bytes")
        print(f"torch uses buckets of {model.buckets} bytes", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
