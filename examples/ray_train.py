"""Ray Train: the plan is made once, where the job is started, and goes to the workers with the job.

RAY_USAGE_STATS_ENABLED=0 python examples/ray_train.py [--plan plan.json]
"""

import argparse
import tempfile

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dovetail
from dovetail.train.integrations import buckets


def net():
    layers = [nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(512, 10))


def digits():
    pixels, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))


def work(config):
    torch.manual_seed(0)
    model = prepare_model(net(), parallel_strategy_kwargs=config["plan"].ddp_kwargs())
    loader = prepare_data_loader(DataLoader(digits(), batch_size=64, shuffle=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(3):
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
        losses.append(total / len(loader))
    return losses, buckets(model)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", help="a plan that `dovetail plan` wrote for this model")
    path = parser.parse_args().plan
    if path:
        plan = dovetail.read(path, dovetail.Plan)
    else:
        profile = dovetail.measure.profile(net(), digits()[:64][0])
        plan = dovetail.plan(profile, dovetail.measure.preset("10gbe-2"))

    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            scaling = ScalingConfig(num_workers=2, use_gpu=False)
            trainer = TorchTrainer(
                work,
                train_loop_config={"plan": plan},
                scaling_config=scaling,
                run_config=RunConfig(storage_path=folder),
            )
            losses, used = trainer.fit().return_value
    finally:
        ray.shutdown()
    for epoch, loss in enumerate(losses):
        print(f"epoch {epoch}: loss {loss:.3f}")
    print(f"plan by {plan.policy}: buckets of {[b.bytes for b in plan.buckets]} bytes")
    print(f"torch uses buckets of {used} bytes", flush=True)


if __name__ == "__main__":
    main()
