"""One rank of partial.py: contestants take turns on emulated devices, real gradients cross links of limited rate.

A layer of the emulated device sleeps for its forward and backward time, which grow with the batch. Autograd itself
leaves out the backward passes of layers that a worker does not reach, as it would with real ones.
"""

from __future__ import annotations

import sys
import time
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dovetail import measure
from dovetail.core.profile import Layer, LayerTime, ParameterTensor, Profile, exactly
from dovetail.emulate.channel import leave
from dovetail.emulate.launch import report
from dovetail.planning.depth import planner
from dovetail.train import agree
from dovetail.train.partial.module import PartialBackprop

LAYERS, BATCH = 8, 16
FORWARD, BACKWARD = 0.0016, 0.0032
"""Seconds of a layer for one sample."""
POLICIES = ("full", "ladder", "balanced")


def made_profile(layer_bytes: int) -> Profile:
    """Eight equal layers, backward twice as long as forward."""

    times = (LayerTime(batch=BATCH, forward=exactly(BATCH * FORWARD), backward=exactly(BATCH * BACKWARD)),)
    layers = [
        Layer(name=f"layers.{i}", type="Slow", parameter_bytes=layer_bytes, activation_bytes=4096, times=times)
        for i in range(LAYERS)
    ]
    ready = accumulate([BATCH * BACKWARD] * LAYERS)
    tensors = [
        ParameterTensor(name=f"layers.{i}.weight", layer=i, bytes=layer_bytes, dtype="torch.float32", ready=at)
        for i, at in zip(reversed(range(LAYERS)), ready, strict=True)
    ]
    return Profile(
        name="emulated", device="emulated", emulated=True, batch=BATCH, layers=tuple(layers), tensors=tuple(tensors)
    )


class Wait(torch.autograd.Function):
    """Takes a layer's time in both directions; its gradient is the weight itself, scaled, so that real bytes travel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.samples = len(x)
        time.sleep(len(x) * FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (weight,) = ctx.saved_tensors
        began = time.perf_counter()
        made = weight * grad.mean()
        time.sleep(max(0.0, ctx.samples * BACKWARD - (time.perf_counter() - began)))
        return grad, made


class Slow(nn.Module):
    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(nbytes // 4))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Wait.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return result


class Emulated(nn.Module):
    def __init__(self, layer_bytes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Slow(layer_bytes) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def sent_bytes() -> float:
    """What this rank's interface has put on the wire so far; the rank lives in a network namespace of its own."""
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return float(numbers.split()[8])
    raise RuntimeError("no interface eth0 in this namespace")


def main(rounds: int, steps: int, layer_bytes: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    group, device = dist.group.WORLD, torch.device("cpu")
    assert group is not None
    rank = dist.get_rank()
    profile = made_profile(layer_bytes)
    network = measure.network(
        group, max_bytes=4 * layer_bytes, collectives=("all_reduce",), budget=8.0, name="shaped", emulated=True
    )
    plans = agree.from_first({name: planner.plan(profile, network, policy=name) for name in POLICIES}, group, device)
    models: dict[str, nn.Module] = {"ddp": DistributedDataParallel(Emulated(layer_bytes))}
    for name, plan in plans.items():
        models[name] = PartialBackprop(Emulated(layer_bytes), plan, guard=None, profile=profile, network=network)
    batches = {"ddp": BATCH} | {name: plan.phases[0].batches[rank] for name, plan in plans.items()}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    wire = dict.fromkeys(models, 0.0)
    for turn in range(rounds + 1):
        for name, model in models.items():
            x = torch.ones(batches[name], 8, requires_grad=False)
            dist.barrier()
            before, times = sent_bytes(), []
            for _ in range(steps):
                model.zero_grad(set_to_none=True)
                began = time.perf_counter()
                model(x).mean().backward()
                times.append(time.perf_counter() - began)
            dist.barrier()
            after = sent_bytes()
            slowest = agree.largest(times, group, device)
            if turn:  # the first round warms up
                seconds[name] += slowest
                wire[name] += after - before
    total = torch.tensor([wire[name] for name in models], dtype=torch.float64)
    dist.all_reduce(total)
    fit = network.collectives["all_reduce"].fit
    report(
        {
            "seconds": seconds,
            "wire": dict(zip(models, total.tolist(), strict=True)),
            "predicted": {name: plan.phases[0].iteration for name, plan in plans.items()},
            "predicted_sent": {name: sum(w.sent for w in plan.phases[0].workers) for name, plan in plans.items()},
            "batches": {name: list(plan.phases[0].batches) for name, plan in plans.items()},
            "all_reduce": {"latency": fit.latency, "seconds_per_byte": fit.seconds_per_byte},
            "steps": rounds * steps,
        }
    )
    leave()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
