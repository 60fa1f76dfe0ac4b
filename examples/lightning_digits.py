"""PyTorch Lightning: `strategy="dovetail"`, after `import dovetail`.

torchrun --standalone --nproc-per-node 2 examples/lightning_digits.py [--strategy dovetail_overlap] [--plan plan.json]
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

import dovetail  # makes Lightning know the strategies "dovetail" and "dovetail_overlap"
from dovetail.train.integrations.lightning import DovetailStrategy


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        layers = [nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.Linear(512, 10))
        self.losses, self.epochs = [], []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def on_train_epoch_end(self):
        self.epochs.append(sum(self.losses) / len(self.losses))
        if self.global_rank == 0:
            print(f"epoch {self.current_epoch}: loss {self.epochs[-1]:.3f}", flush=True)
        self.losses.clear()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def train(strategy, epochs, *, resume=None, store=None, **options):
    """Mean losses of the epochs, and what dovetail explains; from a checkpoint on, if one is given."""
    lightning.seed_everything(0, verbose=False)
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    trainer = lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    model = Digits()
    trainer.fit(model, DataLoader(data, batch_size=64, shuffle=True), ckpt_path=resume)
    if store:
        trainer.save_checkpoint(store)
    return model.epochs, "" if type(trainer.strategy) is DDPStrategy else trainer.strategy.explain()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="dovetail", help='"dovetail", "dovetail_overlap", or Lightning\'s "ddp"')
    parser.add_argument("--plan", help="a plan that `dovetail plan` wrote for this model")
    given = parser.parse_args()
    strategy = DovetailStrategy(plan=dovetail.read(given.plan, dovetail.Plan)) if given.plan else given.strategy

    dist.init_process_group("gloo")  # Lightning uses the group that exists
    _, explained = train(strategy, 14, gradient_clip_val=1.0)  # planning ends within 200 steps
    if dist.get_rank() == 0:
        print(explained, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
