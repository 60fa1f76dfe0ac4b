"""Ray Train: dovetail's `prepare_model` in place of Ray's. One line differs: the marked import.

RAY_USAGE_STATS_ENABLED=0 python examples/ray_train.py [--ddp | --overlap | --plan plan.json]
"""

import argparse
import tempfile
from contextlib import nullcontext
from pathlib import Path

import ray
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dovetail
from dovetail.train.integrations.ray_train import prepare_model  # was: from ray.train.torch import prepare_model


def net():
    layers = [nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(512, 10))


def digits():
    pixels, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))


def work(config):
    """One worker: {"losses": of the epochs, "explained": by dovetail}; in steps of two accumulated batches, clipped."""
    torch.manual_seed(0)
    if config["ddp"]:
        model = ray.train.torch.prepare_model(net())
    else:
        model = prepare_model(net(), parallel_strategy_kwargs={"plan": config["plan"]})
    loader = prepare_data_loader(DataLoader(digits(), batch_size=64, shuffle=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if config["overlap"]:
        optimizer = dovetail.optimizer(optimizer, model)
    losses, first = [], 0
    if checkpoint := config["resume"]:
        with checkpoint.as_directory() as folder:
            stored = torch.load(Path(folder) / "state.pt")
        model.module.load_state_dict(stored["model"])
        optimizer.load_state_dict(stored["optimizer"])
        first = stored["epochs"]
    for epoch in range(first, config["epochs"]):
        loader.sampler.set_epoch(epoch)
        total = 0.0
        for step, (x, y) in enumerate(loader, 1):
            accumulating = step % 2 != 0
            with model.no_sync() if accumulating else nullcontext():
                with torch.autocast("cpu", torch.bfloat16, enabled=config["bf16"]):
                    loss = nn.functional.cross_entropy(model(x), y)
                (loss / 2).backward()
            if not accumulating:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.item()
        losses.append(total / len(loader))
    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epochs": config["epochs"]}
    with tempfile.TemporaryDirectory() as folder:
        stored = None
        if ray.train.get_context().get_world_rank() == 0:
            torch.save(state, Path(folder) / "state.pt")
            stored = Checkpoint.from_directory(folder)
        ray.train.report({"loss": losses[-1]}, checkpoint=stored)
    return {"losses": losses, "explained": "" if config["ddp"] else model.explain()}


def train(folder, **config):
    """What `work` returned, and the checkpoint."""
    given = {"ddp": False, "overlap": False, "plan": "auto", "epochs": 14, "bf16": False, "resume": None, **config}
    trainer = TorchTrainer(
        work,
        train_loop_config=given,
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        run_config=RunConfig(storage_path=folder),
    )
    result = trainer.fit()
    return result.return_value, result.checkpoint


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ddp", action="store_true", help="torch's own wrapper, to compare with")
    parser.add_argument("--overlap", action="store_true", help="hide communication behind the next forward pass too")
    parser.add_argument("--plan", help="a plan that `dovetail plan` wrote for this model")
    given = parser.parse_args()
    plan = dovetail.read(given.plan, dovetail.Plan) if given.plan else "auto"

    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            done, _ = train(folder, ddp=given.ddp, overlap=given.overlap, plan=plan)
    finally:
        ray.shutdown()
    for epoch, loss in enumerate(done["losses"]):
        print(f"epoch {epoch}: loss {loss:.3f}")
    print(done["explained"], flush=True)


if __name__ == "__main__":
    main()
