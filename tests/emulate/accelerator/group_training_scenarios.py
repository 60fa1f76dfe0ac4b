"""torch's own training on the emulated accelerator and its process group, for tests that compare it with the CPU."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from dovetail.emulate import accelerator

from .group_scenarios import device

JITTER = 200e-6
"""Seconds by which a kernel may be late, so that the order of streams differs from run to run of the host."""
STEPS = 4


class Convolutional(nn.Sequential):
    """Batch norm, whose buffers DDP broadcasts; every kernel is the CPU's."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 5 * 5, 5)
        )


class Attentive(nn.Module):
    """A transformer's encoder on tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layers(self.words(x)).mean(1))
        return out


class Perceptron(nn.Sequential):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5))


class Branching(nn.Module):
    """Uses one of two branches in turn, on all ranks the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 5), nn.Linear(8, 5)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = (self.left if self.calls % 2 else self.right)(self.first(x))
        return out


def model_and_inputs(kind: str) -> tuple[nn.Module, list[torch.Tensor], list[torch.Tensor]]:
    """A model, and this rank's batches and targets, on the CPU."""
    torch.manual_seed(0)
    kinds = {"cnn": Convolutional, "transformer": Attentive, "branches": Branching, "perceptron": Perceptron}
    model: nn.Module = kinds[kind]()
    generator = torch.Generator().manual_seed(10 + dist.get_rank())
    targets = [torch.randint(0, 5, (8,), generator=generator) for _ in range(STEPS)]
    if kind == "transformer":
        return model, [torch.randint(0, 20, (8, 7), generator=generator) for _ in range(STEPS)], targets
    shape = (8, 1, 12, 12) if kind == "cnn" else (8, 8)
    return model, [torch.randn(*shape, generator=generator) for _ in range(STEPS)], targets


@contextlib.contextmanager
def place(on: str, jitter: float = JITTER) -> Iterator[tuple[torch.device, Any]]:
    """A device and a group for it: the CPU with gloo, or the accelerator with jitter on every kernel."""
    accelerator.load()  # on the CPU too: autograd asks for devices once, at the first backward pass of a process
    where = device() if on == "emu" else torch.device("cpu")
    group = dist.new_group(backend="eccl") if on == "emu" else dist.group.WORLD
    late = accelerator.durations(jitter=jitter, seed=7) if on == "emu" else contextlib.nullcontext()
    with late, sdpa_kernel(SDPBackend.MATH):  # the CPU would take a fused attention of its own
        yield where, group
    if on == "emu":
        torch.accelerator.synchronize()
        found = accelerator.races(clear=True)
        assert found == [], found
        dist.destroy_process_group(group)


def losses_of_ddp(on: str, kind: str, **options: Any) -> list[float]:
    """Losses of torch's DDP on this rank, then the sum of all parameters. `options` choose what is special."""
    hook = options.pop("hook", None)
    accumulate = options.pop("no_sync", False)
    model, inputs, targets = model_and_inputs(kind)
    with place(on) as (where, group):
        ids = [where.index] if where.index is not None else None
        ddp = DistributedDataParallel(
            model.to(where), device_ids=ids, process_group=group, bucket_cap_mb=0.002, **options
        )
        if hook:
            chosen = getattr(default_hooks, hook)
            # DDP refuses the bfloat16 one, by its name, where there is neither CUDA nor XPU.
            ddp.register_comm_hook(group, lambda state, bucket: chosen(state, bucket))
        optimizer = torch.optim.SGD(ddp.parameters(), 0.05, momentum=0.9)
        losses = []
        for step, (x, y) in enumerate(zip(inputs, targets, strict=True)):
            with ddp.no_sync() if accumulate and step % 2 == 0 else contextlib.nullcontext():
                loss = nn.functional.cross_entropy(ddp(x.to(where)).float(), y.to(where))
                loss.backward()
            if not (accumulate and step % 2 == 0):
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        sums = [p.detach().double().sum() for p in ddp.parameters()]
        return [x.item() for x in losses + sums]


def losses_in_mixed_precision(jitter: float) -> list[float]:
    """Losses with DDP's own mixed precision, from the second iteration on; then the sum of all parameters.

    In the first iteration DDP averages memory that nothing has written (its buckets' views are not those of the buckets
    in reduced precision), which is NaN here and may be anything on a GPU: nothing is made of those gradients.
    """
    model, inputs, targets = model_and_inputs("perceptron")
    with place("emu", jitter) as (where, group):
        policy: Any = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        ddp = DistributedDataParallel(model.to(where), process_group=group, mixed_precision=policy)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.05, momentum=0.9)
        losses = []
        for step, (x, y) in enumerate(zip(inputs, targets, strict=True)):
            loss = nn.functional.cross_entropy(ddp(x.to(where)).float(), y.to(where))
            loss.backward()
            if step > 0:
                optimizer.step()
                losses.append(loss.detach())
            optimizer.zero_grad()
        sums = [p.detach().double().sum() for p in ddp.parameters()]
        return [x.item() for x in losses + sums]


def losses_with_join(on: str) -> list[float]:
    """Ranks with different numbers of batches, under torch's Join."""
    model, inputs, targets = model_and_inputs("perceptron")
    with place(on) as (where, group):
        ddp = DistributedDataParallel(model.to(where), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.05)
        losses = []
        with Join([ddp]):
            for x, y in list(zip(inputs, targets, strict=True))[dist.get_rank() :]:
                loss = nn.functional.cross_entropy(ddp(x.to(where)), y.to(where))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        sums = [p.detach().double().sum() for p in ddp.parameters()]
        return [x.item() for x in losses + sums]


def losses_with_zero(on: str) -> list[float]:
    """torch's ZeroRedundancyOptimizer."""
    model, inputs, targets = model_and_inputs("transformer")
    with place(on) as (where, group):
        ddp = DistributedDataParallel(model.to(where), process_group=group)
        optimizer = ZeroRedundancyOptimizer(
            ddp.parameters(), optimizer_class=torch.optim.Adam, process_group=group, lr=0.01
        )
        losses = []
        for x, y in zip(inputs, targets, strict=True):
            loss = nn.functional.cross_entropy(ddp(x.to(where)), y.to(where))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [x.item() for x in losses]


def losses_of_fully_shard(on: str) -> list[float]:
    """torch's FSDP2."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    model, inputs, targets = model_and_inputs("transformer")
    with place(on) as (where, group):
        model = model.to(where)
        mesh = DeviceMesh.from_group(group, where.type)
        assert isinstance(model, Attentive)
        for layer in model.layers.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        losses = []
        for x, y in zip(inputs, targets, strict=True):
            loss = nn.functional.cross_entropy(model(x.to(where)), y.to(where))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [x.item() for x in losses]


def synchronised_batch_norm(dtype: str) -> list[float]:
    """By how much SyncBatchNorm over ranks of different batches differs from batch norm of the whole batch on the CPU:
    the output, the gradients of input, weight and bias, and the running statistics; half precision within its own."""
    rank, kind = dist.get_rank(), getattr(torch, dtype)
    mine = slice(0, 4) if rank == 0 else slice(4, 10)
    generator = torch.Generator().manual_seed(3)
    values, slopes = (torch.randn(10, 3, 2, 2, generator=generator) for _ in range(2))
    whole = nn.BatchNorm2d(3)
    with place("emu") as (where, group):
        norm = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(whole).to(where), group)
        x = values[mine].to(where, kind).requires_grad_()
        y = norm(x)
        (y * slopes[mine].to(where, kind)).sum().backward()
        for p in norm.parameters():
            dist.all_reduce(p.grad, group=group)
        every = values.to(kind).float().requires_grad_()
        expected = whole(every)
        (expected * slopes).sum().backward()
        assert x.grad is not None and every.grad is not None
        pairs = [(y, expected[mine]), (x.grad, every.grad[mine]), (norm.weight.grad, whole.weight.grad)]
        pairs += [(norm.bias.grad, whole.bias.grad), (norm.running_mean, whole.running_mean)]
        pairs += [(norm.running_var, whole.running_var)]
        return [(a.detach().cpu().float() - b.detach()).abs().max().item() for a, b in pairs]
