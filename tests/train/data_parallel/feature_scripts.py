"""Scripts that use one feature of torch's each, as the table in docs/integrations.md lists them. Run on every rank.

A script is given the two lines: `wrap` makes the wrapper, `line` wraps an optimiser or returns it as it is. After every
iteration it yields what is compared with torch's: modules, the wrapper first, and tensors.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import dovetail

from .overlap_scenarios import Bag
from .overlap_scenarios import loss as bag_loss
from .scenarios import batch, net

Script = Callable[[Callable[..., Any], Callable[..., Any]], Iterator[list[Any]]]


def layers() -> nn.Sequential:
    return cast(nn.Sequential, net().double())


def x(step: int) -> torch.Tensor:
    return batch(step).double()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=0.003)


def backward(model: Any, step: int) -> None:
    model(x(step)).square().mean().backward()


def iterations(model: Any, *optimizers: Any) -> Iterator[list[Any]]:
    """Plain ones."""
    for step in count():
        model.zero_grad()
        backward(model, step)
        for optimizer in optimizers:
            optimizer.step()
        yield [model]


def given(build: Callable[[], nn.Module] = layers, **keywords: Any) -> Script:
    """Plain iterations of a model, or with arguments of the wrapper."""

    def script(wrap: Any, line: Any) -> Iterator[list[Any]]:
        model = wrap(build(), **keywords)
        yield from iterations(model, line(sgd(model), model))

    return script


def by_flag(wrap: Any, line: Any) -> Iterator[list[Any]]:
    """Accumulates without no_sync, as older training libraries do."""
    model = wrap(layers())
    optimizer = line(sgd(model), model)
    for step in count():
        optimizer.zero_grad()
        for part in range(3):
            model.require_backward_grad_sync = part == 2
            backward(model, 3 * step + part)
        optimizer.step()
        yield [model]


def in_turns(wrap: Any, line: Any) -> Iterator[list[Any]]:
    """Gradients set to None, set to zero or left to add up, by the model or by the optimiser; no_sync now and then."""
    model = wrap(layers())
    optimizer = line(sgd(model), model)
    for step in count():
        if step % 5 < 4:
            who = model if step % 2 else optimizer
            who.zero_grad(set_to_none=step % 5 < 2)
        with model.no_sync() if step % 3 == 2 else nullcontext():
            backward(model, 2 * step)
        backward(model, 2 * step + 1)
        optimizer.step()
        yield [model]


def ignored_parameters() -> nn.Module:
    """Its last layer belongs to the rank: nobody sends its parameters."""
    module = layers()
    TorchDDP._set_params_and_buffers_to_ignore_for_model(module, ["13.weight", "13.bias"])
    return module


def normalised() -> nn.Module:
    torch.manual_seed(0)
    blocks = [m for _ in range(3) for m in (nn.Linear(32, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU())]
    return nn.Sequential(nn.Linear(16, 32), *blocks, nn.Linear(32, 4)).double()


def bag(wrap: Any, line: Any) -> Iterator[list[Any]]:
    """Tied, frozen, scalar and channels-last parameters."""
    model = wrap(Bag())
    optimizer = line(sgd(model), model)
    for step in count():
        optimizer.zero_grad()
        bag_loss(model, step).backward()
        optimizer.step()
        yield [model]


def parametrised() -> nn.Module:
    module = layers()
    for k in (3, 5):
        nn.utils.parametrizations.weight_norm(module[k])
    nn.utils.parametrizations.orthogonal(module[7])
    return module


class Recomputed(nn.Module):
    """Every layer is computed again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers, self.reentrant = layers(), reentrant

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            given = checkpoint(layer, given, use_reentrant=self.reentrant)
        return given


def recomputed(reentrant: bool) -> Script:
    def script(wrap: Any, line: Any) -> Iterator[list[Any]]:
        model = wrap(Recomputed(reentrant))
        optimizer = line(sgd(model), model)
        for step in count():
            optimizer.zero_grad()
            model(x(step).requires_grad_()).square().mean().backward()
            optimizer.step()
            yield [model]

    return script


def penalised(wrap: Any, line: Any) -> Iterator[list[Any]]:
    """A penalty on the gradient of the output with respect to the input: backward through backward."""
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 4)).double())
    optimizer = line(sgd(model), model)
    for step in count():
        optimizer.zero_grad()
        points = x(step).requires_grad_()
        out = model(points)
        (slope,) = torch.autograd.grad(out.sum(), points, create_graph=True)
        (out.square().mean() + slope.square().mean()).backward()
        optimizer.step()
        yield [model]


def clipped(wrap: Any, line: Any) -> Iterator[list[Any]]:
    model = wrap(layers())
    optimizer = line(adam(model), model)
    for step in count():
        optimizer.zero_grad()
        backward(model, step)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        nn.utils.clip_grad_value_(model.parameters(), 0.001)
        optimizer.step()
        yield [model, norm]


def scaled(wrap: Any, line: Any) -> Iterator[list[Any]]:
    """With steps that are skipped, because one rank has an infinite gradient."""
    model = wrap(layers())
    optimizer, scaler = line(adam(model), model), torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    for step in count():
        optimizer.zero_grad()
        spoilt = math.inf if step % 7 == 3 and dist.get_rank() == 0 else 1.0
        scaler.scale(model(x(step)).square().mean() * spoilt).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        yield [model, torch.tensor(scaler.get_scale())]


def autocast(wrap: Any, line: Any) -> Iterator[list[Any]]:
    model = wrap(net())
    optimizer = line(sgd(model), model)
    for step in count():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        yield [model]


def gradients(wrap: Any, line: Any) -> Iterator[list[Any]]:
    """Gradients are read, written in place and replaced."""
    model = wrap(layers())
    optimizer = line(sgd(model), model)
    for step in count():
        optimizer.zero_grad()
        backward(model, step)
        read = [p.grad.abs().max() for p in model.parameters()]
        for k, p in enumerate(model.parameters()):
            if k % 3 == 0:
                p.grad.mul_(0.5)
            elif k % 3 == 1:
                p.grad = p.grad + 0.01 * p.detach()
        optimizer.step()
        yield [model, *read]


def scheduled(wrap: Any, line: Any) -> Iterator[list[Any]]:
    """Groups with a learning rate each, a scheduler, and a group that is added on the way."""
    model = wrap(layers())
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [{"params": parameters[:4]}, {"params": parameters[4:8], "lr": 0.002}]
    optimizer = line(torch.optim.AdamW(groups, lr=0.01), model)
    scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
    for step in count():
        if step == 4:
            optimizer.add_param_group({"params": parameters[8:], "lr": 0.001, "initial_lr": 0.001})
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.95)
        model.zero_grad()
        backward(model, step)
        optimizer.step()
        scheduler.step()
        yield [model, *(torch.tensor(group["lr"]) for group in optimizer.param_groups)]


def several(wrap: Any, line: Any) -> Iterator[list[Any]]:
    """Two optimisers of one model, of which one steps less often."""
    model = wrap(layers())
    ps = list(model.parameters())
    often = line(torch.optim.AdamW(ps[::2], lr=0.003), model)
    seldom = line(torch.optim.SGD(ps[1::2], lr=0.05), model)
    for step in count():
        model.zero_grad()
        backward(model, step)
        for optimizer in (often, seldom) if step % 3 else (often,):
            optimizer.step()
        yield [model]


def one_of_two(wrap: Any, line: Any) -> Iterator[list[Any]]:
    """One optimiser over two wrapped models and a module that nobody wraps."""
    model, other = wrap(layers()), wrap(nn.Linear(16, 4).double())
    torch.manual_seed(dist.get_world_size())
    loose = nn.Linear(4, 1).double()
    optimizer = line(torch.optim.AdamW([p for m in (model, other, loose) for p in m.parameters()], lr=0.003), model)
    for step in count():
        optimizer.zero_grad()
        loose(model(x(step)) + other(x(step + 1))).square().mean().backward()
        optimizer.step()
        yield [model, other, loose]


def muon(wrap: Any, line: Any) -> Iterator[list[Any]]:
    model = wrap(layers())
    matrices, rest = ([p for p in model.parameters() if (p.dim() == 2) == square] for square in (True, False))
    first = line(torch.optim.Muon(matrices, lr=0.003), model)
    yield from iterations(model, first, line(torch.optim.AdamW(rest, lr=0.003), model))


def by(make: Callable[[Any], torch.optim.Optimizer]) -> Script:
    """Plain iterations with another optimiser."""

    def script(wrap: Any, line: Any) -> Iterator[list[Any]]:
        model = wrap(layers())
        yield from iterations(model, line(make(model.parameters()), model))

    return script


def closed(make: Callable[[Any], torch.optim.Optimizer]) -> Script:
    """Steps with a closure."""

    def script(wrap: Any, line: Any) -> Iterator[list[Any]]:
        model = wrap(layers())
        optimizer = line(make(model.parameters()), model)
        for step in count():

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(x(step)).square().mean()
                loss.backward()
                return loss  # type: ignore[no-any-return]

            optimizer.step(closure)
            yield [model]

    return script


def resumed(wrap: Any, line: Any) -> Iterator[list[Any]]:
    """Model and optimiser are stored and loaded now and then; rank 0 alone has the whole state."""
    model = wrap(layers())
    optimizer = line(adam(model), model)
    for step in count():
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        whole: list[torch.Tensor] = []
        if step % 8 == 5:
            model.load_state_dict(copy.deepcopy(model.state_dict()))
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            state = dovetail.full_state(optimizer).get("state", {})
            whole = [torch.as_tensor(v) for s in state.values() for v in s.values()]
            assert bool(whole) == (dist.get_rank() == 0)
        yield [model, *whole]


def averaged(wrap: Any, line: Any) -> Iterator[list[Any]]:
    """An exponential average of the parameters, taken after every step."""
    model = wrap(layers())
    optimizer = line(sgd(model), model)
    mean = torch.optim.swa_utils.AveragedModel(
        model.module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    for step in count():
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        mean.update_parameters(model.module)
        yield [model, mean]


def scripted() -> nn.Module:
    module = layers()
    module[3] = torch.jit.script(module[3])
    return module


def traced() -> nn.Module:
    module = layers()
    return cast(nn.Module, torch.jit.trace(module, torch.zeros(8, 16, dtype=torch.float64)))


def exported(wrap: Any, line: Any) -> Iterator[list[Any]]:
    """The module inside is exported, copied and evaluated between iterations."""
    model = wrap(layers())
    for step, trained in enumerate(iterations(model, line(sgd(model), model))):
        seen = []
        if step % 10 == 9:
            with torch.no_grad():
                program = torch.export.export(model.module, (x(step),)).module()
                twin = copy.deepcopy(model.module)
                seen = [run(x(step)) for run in (program, twin, model.module, model)]
        yield [*trained, *seen]


def hooked(wrap: Any, line: Any) -> Iterator[list[Any]]:
    """Hooks of the wrapper, of a layer and of parameters."""
    model, seen = wrap(layers()), list[torch.Tensor]()
    model.register_forward_pre_hook(lambda _, given: (given[0] * 2,))
    model.register_forward_hook(lambda *given: given[2] / 2)
    model.module[5].register_forward_hook(lambda *given: seen.append(given[2].detach().clone()))
    model.module[5].register_full_backward_hook(lambda *given: seen.append(given[2][0].clone()))
    model.module[7].weight.register_hook(lambda gradient: gradient * 0.5)
    optimizer = line(sgd(model), model)
    model.module[9].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for trained in iterations(model, optimizer):
        yield [*trained, *seen]
        seen.clear()


def referred(wrap: Any, line: Any) -> Iterator[list[Any]]:
    """References to parameters from before the wrapper, in memory that other processes can see."""
    module = layers().share_memory()
    kept = [p.data for p in module.parameters()]
    views, arrays = [p.detach().t() for p in module.parameters()], [p.detach().numpy() for p in module.parameters()]
    model = wrap(module)
    for trained in iterations(model, line(sgd(model), model)):
        assert all(p.is_shared() for p in module.parameters())
        yield [*trained, *kept, *views, *(torch.tensor(a) for a in arrays)]


def in_subgroup(wrap: Any, line: Any) -> Iterator[list[Any]]:
    """A process group of the script's own."""
    model = wrap(layers(), process_group=dist.new_group())
    yield from iterations(model, line(sgd(model), model))
