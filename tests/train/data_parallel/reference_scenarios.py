"""What the tests of references run on every rank: parameters read in every way that torch offers, right after a step.

The lane is held up between a step's reductions and its all-gathers, so that whoever does not wait reads old values.
"""

from __future__ import annotations

import copy
import ctypes
import io
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dovetail
from dovetail.train.data_parallel.sharded.arriving import Arriving

from .overlap_scenarios import of_kinds, refusal

HELD_UP = 0.1
"""Seconds for which new values are held up."""
WIDTH = 6

Tensors = list[Any]
Reader = Callable[[], Tensors]


class Net(nn.Module):
    """Two layers whose weights a reader compares; the second is stored by columns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = nn.Parameter(self.second.weight.detach().t())
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


def x(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)


def held_up(model: Any, seconds: float = HELD_UP) -> None:
    """Holds up all that is queued from now on."""

    def pause() -> Iterator[None]:
        yield
        time.sleep(seconds)

    model.exchange.lane.submit("a pause", pause)


def step(model: Any, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    model(x(number)).square().mean().backward()
    if isinstance(model, dovetail.DistributedDataParallel) and model.exchange is not None:
        held_up(model)
    optimizer.step()


def wrapped(module: nn.Module, wrapper: Any = dovetail.DistributedDataParallel) -> tuple[Any, Any]:
    if wrapper is TorchDDP:
        model: Any = TorchDDP(module)
        return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model = dovetail.DistributedDataParallel(module, plan=None, bucket_cap_mb=1e-5)
    return model, dovetail.optimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), model)


def expected(steps: int) -> list[list[torch.Tensor]]:
    """The parameters after each step with torch's wrapper."""
    model, optimizer = wrapped(Net(), TorchDDP)
    found = []
    for number in range(steps):
        step(model, optimizer, number)
        found.append([p.detach().clone() for p in model.parameters()])
    return found


# Ways to keep a reference: each takes the module and returns what reads its two weights through the reference.


def _data(module: nn.Module) -> Reader:
    kept = [p.data for p in module.parameters()]
    return lambda: kept


def _detached(module: nn.Module) -> Reader:
    kept = [p.detach() for p in module.parameters()]
    return lambda: kept


def _views(module: nn.Module) -> Reader:
    kept = [p.detach().t() for p in module.parameters()]
    return lambda: [v.t() for v in kept]


def _rows(module: nn.Module) -> Reader:
    kept = [list(p.detach().unbind()) for p in module.parameters()]
    return lambda: [torch.stack(rows) for rows in kept]


def _graph_views(module: nn.Module) -> Reader:
    kept = [p.view_as(p) for p in module.parameters()]
    return lambda: kept


def _arrays(module: nn.Module) -> Reader:
    kept = [p.detach().numpy() for p in module.parameters()]
    return lambda: [torch.from_numpy(a.copy()) for a in kept]


def _dlpack(module: nn.Module) -> Reader:
    kept = [np.from_dlpack(p.detach()) for p in module.parameters()]
    return lambda: [torch.tensor(a) for a in kept]


def _memory_view(module: nn.Module) -> Reader:
    kept = [memoryview(cast(Any, p.detach().numpy())) for p in module.parameters()]
    return lambda: [torch.tensor(np.asarray(v)) for v in kept]


def _storages(module: nn.Module) -> Reader:
    kept = [(p.untyped_storage(), p.shape, p.stride()) for p in module.parameters()]

    def read() -> Tensors:
        empty = torch.empty(0, dtype=torch.float64)
        return [empty.set_(s, 0, shape, stride).clone() for s, shape, stride in kept]

    return read


def _state_dict(module: nn.Module) -> Reader:
    kept = module.state_dict()
    return lambda: list(kept.values())


def _state_dict_of_parameters(module: nn.Module) -> Reader:
    kept = module.state_dict(keep_vars=True)
    return lambda: [v + 0 for v in kept.values()]


def _parameters(module: nn.Module) -> Reader:
    kept = list(module.parameters())
    return lambda: [p * 1 for p in kept]


def _tied_teacher(module: nn.Module) -> Reader:
    teacher = Net()
    teacher.load_state_dict(module.state_dict(), assign=True)
    return lambda: [p.detach() for p in teacher.parameters()]


def _parameter_of_data(module: nn.Module) -> Reader:
    kept = [nn.Parameter(p.data) for p in module.parameters()]
    return lambda: [p.detach() for p in kept]


def _shallow_copy(module: nn.Module) -> Reader:
    kept = copy.copy(module)
    return lambda: [p * 1 for p in kept.parameters()]


def _product(run: Callable[[torch.Tensor], torch.Tensor], module: nn.Module) -> Reader:
    """Reads the product of both weights off what a twin computes; the other reader's order."""
    eye = torch.eye(WIDTH, dtype=torch.float64)
    with torch.no_grad():
        run(eye)

    def read() -> Tensors:
        with torch.no_grad():
            return [run(eye)]

    return read


def _scripted_twin(module: nn.Module) -> Reader:
    return _product(torch.jit.script(module), module)


def _traced_twin(module: nn.Module) -> Reader:
    return _product(torch.jit.trace(module, torch.eye(WIDTH, dtype=torch.float64)), module)


def _fx_twin(module: nn.Module) -> Reader:
    return _product(torch.fx.symbolic_trace(module), module)


def _exported_twin(module: nn.Module) -> Reader:
    return _product(torch.export.export(module, (torch.eye(WIDTH, dtype=torch.float64),)).module(), module)


def _compiled_twin(module: nn.Module) -> Reader:
    return _product(torch.compile(module, backend="aot_eager"), module)


def _functional(module: nn.Module) -> Reader:
    kept: dict[str, torch.Tensor] = dict(module.named_parameters())
    return _product(lambda t: torch.func.functional_call(module, kept, (t,)), module)


def _shared(module: nn.Module) -> Reader:
    """Another mapping of the same memory, as another process has it."""
    module.share_memory()
    kept = []
    for p in module.parameters():
        storage = p.untyped_storage()
        handle = storage._share_filename_cpu_()
        kept.append((torch.UntypedStorage._new_shared_filename_cpu(*handle), p.shape, p.stride()))

    def read() -> Tensors:
        empty = torch.empty(0, dtype=torch.float64)
        return [empty.set_(s, 0, shape, stride).clone() for s, shape, stride in kept]

    return read


KEPT: dict[str, Callable[[nn.Module], Reader]] = {
    way.__name__.strip("_").replace("_", " "): way
    for way in (
        *(_data, _detached, _views, _rows, _graph_views, _arrays, _dlpack, _memory_view, _storages, _state_dict),
        *(_state_dict_of_parameters, _parameters, _tied_teacher, _parameter_of_data, _shallow_copy, _scripted_twin),
        *(_traced_twin, _fx_twin, _exported_twin, _compiled_twin, _functional, _shared),
    )
}


def worst(found: Tensors, values: list[torch.Tensor]) -> float:
    """The largest difference; a single tensor is what a twin makes of the unit matrix."""
    if len(found) == 1:
        values = [values[0].t() @ values[1].t()]
    return max(float((a.detach() - b).abs().max()) for a, b in zip(found, values, strict=True))


def kept_reference(way: str, when: str) -> dict[str, Any]:
    """Differences after two steps with a new bucketing in between, through a reference taken `when` it says."""
    module, after = Net(), expected(2)
    read = KEPT[way](module) if when == "before wrapping" else None
    model, optimizer = wrapped(module)
    read = read or KEPT[way](module)
    found = []
    for number in range(2):
        step(model, optimizer, number)
        found.append(worst(read(), after[number]))
        optimizer.move(*of_kinds(model, "s", every=1 if number else 2))
        found.append(worst(read(), after[number]))
    return {"differences": found, "explained": model.explain()}


# Ways to read a Parameter that a script holds, right after the step.


def _dual(p: Any) -> torch.Tensor:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(p, torch.zeros_like(p))
        return torch.autograd.forward_ad.unpack_dual(dual).primal + 0  # type: ignore[no-any-return]


def _saved(p: Any) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(p, buffer)
    buffer.seek(0)
    return torch.load(buffer)  # type: ignore[no-any-return]


@torch.jit.script
def _twice(t: torch.Tensor) -> torch.Tensor:
    return t * 2


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, p: torch.Tensor) -> torch.Tensor:
        return p.clone()


def _sent(p: Any) -> torch.Tensor:
    """Rank 1's values, which rank 0 gets."""
    got = torch.empty_like(p) if dist.get_rank() == 0 else p
    dist.broadcast(got, src=1)
    return got


def _collected(p: Any) -> torch.Tensor:
    got = [torch.empty_like(p.data).contiguous() for _ in range(dist.get_world_size())]
    dist.all_gather(got, p if p.is_contiguous() else p.contiguous())
    return got[1]


LOOKS: dict[str, Callable[[Any], Any]] = {
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "arithmetic": lambda p: p * 1,
    "torch function": lambda p: torch.add(p, 0),
    "aten": lambda p: torch.ops.aten.add(p, 0),
    "item": lambda p: torch.tensor([q.item() for q in p.flatten()], dtype=torch.float64).view(p.shape),
    "list": lambda p: torch.tensor(p.tolist(), dtype=torch.float64),
    "rows": lambda p: torch.stack(list(p)),
    "numpy": lambda p: torch.tensor(p.detach().numpy()),
    "array protocol": lambda p: torch.tensor(np.asarray(p.data)),
    "dlpack": lambda p: torch.utils.dlpack.from_dlpack(p.detach()).clone(),
    "storage": lambda p: torch.empty(0).double().set_(p.untyped_storage(), 0, p.shape, p.stride()).clone(),
    "saved": _saved,
    "deepcopy": copy.deepcopy,
    "cat": lambda p: torch.cat([p]),
    "stack": lambda p: torch.stack([p])[0],
    "copy": lambda p: torch.empty(WIDTH, WIDTH, dtype=torch.float64).copy_(p),
    "foreach": lambda p: torch._foreach_add([p], 0.0)[0],
    "new Parameter": lambda p: nn.Parameter(p),
    "tensor of it": lambda p: torch.as_tensor(p),
    "autograd function": lambda p: _Copies.apply(p),  # type: ignore[no-untyped-call]
    "scripted function": lambda p: _twice(p) / 2,
    "vmap": lambda p: torch.vmap(lambda row: row * 1)(p),
    "grad": lambda p: torch.func.grad(lambda q: (q * q).sum() / 2)(p),
    "vjp": lambda p: torch.func.vjp(lambda q: q * 1, p)[0],
    "dual": _dual,
    "broadcast": _sent,
    "all-gather": _collected,
    "raw": lambda p: torch.from_numpy(
        np.ctypeslib.as_array((ctypes.c_double * p.numel()).from_address(p.data_ptr())).copy()
    ).as_strided(p.shape, p.stride()),
}


def looks() -> dict[str, Any]:
    """Differences by way of reading, and what shows that the readers had to wait."""
    after = expected(len(LOOKS))
    model, optimizer = wrapped(Net())
    parameters = list(model.parameters())
    found: dict[str, Any] = {"held up": True, "read elsewhere": 0}
    for number, (name, look) in enumerate(LOOKS.items()):
        addresses = [p.data_ptr() for p in parameters]
        step(model, optimizer, number)
        found["held up"] &= all(type(p) is Arriving for p in parameters)
        found["read elsewhere"] += len(model.exchange.read_elsewhere)
        if number == 0:  # an address is no reference: whoever keeps one reads what is there
            raw = (ctypes.c_double * (WIDTH * WIDTH)).from_address(addresses[0])
            now = torch.from_numpy(np.ctypeslib.as_array(raw).copy()).as_strided((WIDTH, WIDTH), (WIDTH, 1))
            found["old at the address"] = not torch.equal(now, after[0][0])
        with torch.no_grad() if name not in ("grad", "vjp") else torch.enable_grad():
            found[name] = worst([look(p) for p in parameters], after[number])
    return found


def refused() -> dict[str, str]:
    """Parameters that have no dense memory of their own."""

    def holding(*parameters: nn.Parameter) -> nn.Module:
        return nn.ParameterList(parameters)

    def wrap(module: nn.Module) -> Any:
        return dovetail.DistributedDataParallel(module, overlap="forward")

    base = torch.zeros(4, 4)
    return {
        "gaps": refusal(lambda: wrap(holding(nn.Parameter(base[:, ::2])))),
        "twice": refusal(lambda: wrap(holding(nn.Parameter(base[0]), nn.Parameter(base[:2])))),
        "flat": refusal(lambda: wrap(holding(nn.Parameter(base[0]), nn.Parameter(base[1])))),
    }


def converted() -> dict[str, Any]:
    """What moves or converts a model after it was wrapped, in the middle of an iteration."""
    model, optimizer = wrapped(Net())
    step(model, optimizer, 0)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    model(x(1)).square().mean().backward()
    said = refusal(lambda: model.to(torch.bfloat16))
    same = all(p.dtype == torch.float64 for p in model.parameters())
    same &= all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    model.to("cpu").to(torch.float64)  # changes nothing
    model.share_memory()
    optimizer.step()
    after = expected(2)
    return {
        "said": said,
        "same": same,
        "difference": worst([p.detach() for p in model.parameters()], after[1]),
        "shared": all(p.is_shared() for p in model.parameters()),
    }
