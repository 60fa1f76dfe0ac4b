"""The emulated device of which every layer is a module: for overlap with forward and for FSDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from dovetail.core.profile import Profile
from dovetail.emulate.layered import blocks, in_layer_order, layered
from tests.planning.merge.oracle import made_profile
from tests.ranks import run_all

if TYPE_CHECKING:
    import torch


def profile() -> Profile:
    """Eight short layers in numbered blocks, with two tensors that are ready in another order than their layers."""
    made = made_profile([400, 80, 40, 4000, 120, 16, 800, 40], [0.001] * 8)
    tensors = [msgspec.structs.replace(t, name=f"blocks.{t.layer // 2}.{t.name}") for t in made.tensors]
    tensors[0] = msgspec.structs.replace(tensors[0], name="head.weight")
    tensors[2], tensors[3] = (
        msgspec.structs.replace(tensors[2], layer=tensors[3].layer, name=tensors[3].name),
        msgspec.structs.replace(tensors[3], layer=tensors[2].layer, name=tensors[2].name),
    )
    return msgspec.structs.replace(made, tensors=tuple(tensors))


def test_tensors_in_layer_order_keep_their_layers_and_the_ready_times_their_order() -> None:
    before, after = profile(), in_layer_order(profile())
    assert [t.layer for t in before.tensors] != sorted((t.layer for t in before.tensors), reverse=True)
    assert [t.layer for t in after.tensors] == sorted((t.layer for t in before.tensors), reverse=True)
    assert [t.ready for t in after.tensors] == [t.ready for t in before.tensors]
    assert {(t.name, t.bytes) for t in after.tensors} == {(t.name, t.bytes) for t in before.tensors}
    after.check()


def test_modules_are_grouped_by_numbered_block() -> None:
    model = layered(profile())
    paths = {module: path for path, module in model.named_modules()}
    groups = [[paths[m].partition(".layer")[0] for m in group] for group in blocks(model)]
    assert groups == [["blocks.0"] * 2, ["blocks.1"] * 2, ["blocks.2"] * 2, ["blocks.3"], ["head"]]


def test_layers_are_passed_one_by_one_and_gradients_come_in_order_and_in_time() -> None:
    import torch

    model = layered(profile())
    order: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: order.append(name))
    passed: list[str] = []
    for path, module in model.named_modules():
        if module._parameters:
            module.register_forward_pre_hook(lambda m, a, path=path: passed.append(path))
    model(torch.tensor([3.0])).backward()
    tensors = in_layer_order(profile()).tensors
    assert order == [t.name for t in tensors]
    assert passed == [t.name.rpartition(".")[0] for t in reversed(tensors)]
    for parameter in model.parameters():
        assert parameter.grad is not None and torch.equal(parameter.grad, 3.0 * parameter.detach())
    start = model.backward_span[0]
    assert all(at - start >= t.ready for at, t in zip(model.ready_stamps, tensors, strict=True))
    assert not model(torch.tensor([3.0])).detach().requires_grad
    with torch.no_grad():
        assert float(model(torch.tensor([3.0]))) == 3.0


def trained(iterations: int) -> list[float]:
    """Largest differences of parameters from DDP's after some iterations: with overlap, and of FSDP2's gradients."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel as TorchDDP

    import dovetail

    x = torch.tensor([1.0 + dist.get_rank()])
    theirs = TorchDDP(layered(profile()))
    ours: Any = dovetail.DistributedDataParallel(layered(profile()), overlap="forward", plan=None)
    plain = torch.optim.SGD(theirs.parameters(), lr=0.1)
    optimizer = dovetail.optimizer(torch.optim.SGD(ours.parameters(), lr=0.1), ours)
    for _ in range(iterations):
        for model, stepping in ((theirs, plain), (ours, optimizer)):
            stepping.zero_grad()
            model(x).backward()
            stepping.step()
    pairs = zip(theirs.parameters(), ours.parameters(), strict=True)
    apart = max(float((a - b).abs().max()) for a, b in pairs)

    model = layered(profile())
    for modules in blocks(model):
        fully_shard(modules if len(modules) > 1 else modules[0], reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)
    model(x).backward()
    mean = sum(1.0 + r for r in range(dist.get_world_size())) / dist.get_world_size()
    worst = 0.0
    for parameter in model.parameters():
        sharded: Any = parameter
        worst = max(worst, float((sharded.grad.to_local() - mean * sharded.to_local()).abs().max()))
    return [apart, worst]


def measured() -> dict[str, Any]:
    import torch.distributed as dist

    from dovetail import measure
    from dovetail.train.data_parallel.wire.lane import functions

    group = dist.group.WORLD
    assert group is not None
    called = set()

    def counted(name: Any, one: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], object]:
        def call(flat: torch.Tensor) -> object:
            called.add(name)
            return one(flat)

        return call

    via = {name: counted(name, one) for name, one in functions(group).items()}
    network = measure.network(
        group, max_bytes=4096, collectives=("reduce_scatter", "all_gather"), repeats=3, budget=1.0, via=via
    )
    return {
        "called": sorted(called),
        "source": network.source,
        "samples": [len(c.samples) for c in network.collectives.values()],
    }


def test_overlap_and_fsdp_train_on_it_and_the_halves_can_be_measured() -> None:
    for (apart, worst), network in run_all([(trained, {"iterations": 3}), (measured, {})]):
        assert apart == pytest.approx(0.0, abs=1e-6)
        assert worst == pytest.approx(0.0, abs=1e-6)
        assert network["called"] == ["all_gather", "reduce_scatter"]
        assert "reduce_scatter, all_gather by dovetail's own" in network["source"]
        assert min(network["samples"]) >= 2
