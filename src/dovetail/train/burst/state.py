"""Parameters and optimiser state exist only on the ranks that run their layer.

Elsewhere a tensor stays in the model as a shape without data (torch's meta device), so that every rank's optimiser has
the same parameters in the same order; it skips those that never get a gradient. When the plan changes, data goes from
the lowest rank that has it to the ranks that need it. A checkpoint is that of the plain model, whatever the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import swap_tensors

from dovetail.core.errors import Error
from dovetail.train.device_streams import hold_here

from .communicator import Communicator

Ranks: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class LayerTensor:
    """A parameter or buffer and the layer it belongs to. The tensor object stays; its data comes and goes."""

    name: str
    tensor: Tensor
    layer: int

    def allocate(self, device: torch.device) -> None:
        """Gives the tensor uninitialised data on `device`, if it has none."""
        if self.tensor.is_meta:
            self._become(torch.empty_like(self.tensor, device=device))

    def drop(self) -> None:
        """Frees the data and the gradient; the shape stays."""
        if not self.tensor.is_meta:
            hold_here([self.tensor.detach(), self.tensor.grad])
            self.tensor.grad = None
            self._become(torch.empty_like(self.tensor, device="meta"))

    def _become(self, data: Tensor) -> None:
        keeps = self.tensor.requires_grad
        fresh = nn.Parameter(data, requires_grad=keeps) if isinstance(self.tensor, nn.Parameter) else data.detach()
        swap_tensors(self.tensor, fresh)


def layer_tensors(whole: nn.Module, layers: Sequence[nn.Module]) -> list[LayerTensor]:
    """All parameters and buffers of the layers, in the model's order. A tensor that no layer uses is not among them."""
    layer_of: dict[int, int] = {}
    for i, layer in enumerate(layers):
        for t in (*layer.parameters(), *layer.buffers()):
            if layer_of.setdefault(id(t), i) != i:
                raise Error(f"layers: a buffer is used by layers {layer_of[id(t)]} and {i}; it belongs to one layer")
    named = [*whole.named_parameters(), *whole.named_buffers()]
    return [LayerTensor(name, t, layer_of[id(t)]) for name, t in named if id(t) in layer_of]


def distribute(comm: Communicator, tensors: Sequence[LayerTensor], ranks: Sequence[Ranks]) -> None:
    """At the start: every rank gets the tensors of rank 0 and keeps those of the layers that it runs."""
    everyone = tuple(range(comm.size))
    for entry in tensors:
        entry.allocate(comm.device)
        comm.broadcast(entry.tensor.detach(), 0, everyone, f"{entry.name} from rank 0")
        if comm.rank not in ranks[entry.layer]:
            entry.drop()


def redistribute(
    comm: Communicator,
    tensors: Sequence[LayerTensor],
    old: Sequence[Ranks],
    new: Sequence[Ranks],
    optimizers: Sequence[Optimizer],
) -> None:
    """Moves data from one plan's ranks to another's, with gradients and optimiser state. Every rank calls it."""
    comm.prepare({_both(a, b) for a, b in zip(old, new, strict=True)})
    growing = [h for h in tensors if set(new[h.layer]) - set(old[h.layer])]
    notes = _notes(comm, growing, old, optimizers)
    for entry in growing:
        before, after = old[entry.layer], new[entry.layer]
        among = _both(before, after)
        if comm.rank not in among:
            continue
        comes = comm.rank in after and comm.rank not in before
        if comes:
            entry.allocate(comm.device)
        comm.broadcast(entry.tensor.detach(), before[0], among, entry.name)
        for where, key, note in notes.get(entry.name, []):
            what = f"{entry.name}: {key}"
            held = _read(entry.tensor, where, key, optimizers) if not comes else None
            value = _carry(comm, held, note, before[0], among, what)
            if comes:
                _write(entry.tensor, where, key, value, optimizers)
    for entry in tensors:
        if comm.rank not in new[entry.layer]:
            for optimizer in optimizers:
                held = optimizer.state.pop(entry.tensor, {})
                hold_here(value for value in held.values() if isinstance(value, Tensor))
            entry.drop()


def model_state(
    comm: Communicator, whole: nn.Module, tensors: Sequence[LayerTensor], ranks: Sequence[Ranks]
) -> dict[str, Any]:
    """The whole model's `state_dict` on rank 0, on the CPU; empty on the other ranks."""
    by_id = {id(h.tensor): h for h in tensors}
    comm.prepare({_both((0,), (r[0],)) for r in ranks})
    state: dict[str, Any] = {}
    for key, value in whole.state_dict(keep_vars=True).items():
        entry = by_id.get(id(value))
        if entry is not None:
            value = _to_first(comm, entry.tensor, ranks[entry.layer], key)
        if comm.rank == 0:
            state[key] = value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
    return state


def optimizer_state(
    comm: Communicator, optimizer: Optimizer, tensors: Sequence[LayerTensor], ranks: Sequence[Ranks]
) -> dict[str, Any]:
    """The optimiser's `state_dict` as one process would have it, on rank 0; empty on the other ranks."""
    comm.prepare({_both((0,), (r[0],)) for r in ranks})
    by_id = {id(h.tensor): h for h in tensors}
    notes = _notes(comm, tensors, ranks, [optimizer], grads=False)
    result = optimizer.state_dict()
    state: dict[int, dict[str, Any]] = {}
    for index, p in enumerate(p for g in optimizer.param_groups for p in g["params"]):
        entry = by_id.get(id(p))
        if entry is None:
            if p in optimizer.state:
                state[index] = dict(optimizer.state[p])
            continue
        for where, key, note in notes.get(entry.name, []):
            owners = ranks[entry.layer]
            held = _read(p, where, key, [optimizer]) if comm.rank in owners else None
            if comm.rank in (0, owners[0]):
                among = _both((0,), (owners[0],))
                if 0 not in owners:
                    held = _carry(comm, held, note, owners[0], among, f"{entry.name}: {key}")
                state.setdefault(index, {})[key] = held
    if comm.rank != 0:
        return {}
    return {**result, "state": torch.utils._pytree.tree_map(_on_cpu, state)}


def load_model(whole: nn.Module, state: dict[str, Any]) -> None:
    """Takes this rank's part of a whole model's `state_dict`."""
    own = whole.state_dict(keep_vars=True)
    for key in sorted(own.keys() ^ state.keys()):
        where = "the model" if key in own else "the checkpoint"
        raise Error(f"checkpoint does not fit this model: {key!r} is only in {where}")
    for key, value in own.items():
        if isinstance(value, Tensor):
            if value.shape != state[key].shape:
                raise Error(
                    f"checkpoint does not fit this model: {key!r}: expected shape {tuple(value.shape)}, "
                    f"got {tuple(state[key].shape)}"
                )
            if not value.is_meta:
                value.detach().copy_(state[key])


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Takes this rank's part of a whole optimiser's `state_dict`."""
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    there = sum(len(g["params"]) for g in state["param_groups"])
    if there != len(parameters):
        raise Error(f"checkpoint does not fit this optimiser: {there} parameters against {len(parameters)}")
    mine = {i: s for i, s in state["state"].items() if not parameters[i].is_meta}
    optimizer.load_state_dict({**state, "state": mine})


GRAD = -1
"""In place of an optimiser's number: the parameter's gradient."""

_Note: TypeAlias = tuple[int, str, Any]
"""(number of the optimiser or GRAD, key, content): a `_TensorSpec` of a tensor that follows, a number or the value."""


@dataclass(frozen=True)
class _TensorSpec:
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _SingleNumber:
    value: Tensor
    """On the host: every rank has a device of its own."""
    on_host: bool


def _notes(
    comm: Communicator,
    tensors: Sequence[LayerTensor],
    owners: Sequence[Ranks],
    optimizers: Sequence[Optimizer],
    grads: bool = True,
) -> dict[str, list[_Note]]:
    """Notes on each parameter's gradient and optimiser state, as its lowest owner has them; the same on all ranks."""
    mine: dict[str, list[_Note]] = {}
    for entry in tensors:
        if owners[entry.layer][0] != comm.rank or not isinstance(entry.tensor, nn.Parameter):
            continue
        notes: list[_Note] = []
        if grads and entry.tensor.grad is not None:
            notes.append((GRAD, "grad", _describe(entry.tensor.grad)))
        for i, optimizer in enumerate(optimizers):
            held = optimizer.state.get(entry.tensor, {})
            notes += [(i, key, _describe(value)) for key, value in held.items()]
        mine[entry.name] = notes
    merged: dict[str, list[_Note]] = {}
    for theirs in comm.collect(mine, "optimiser state"):
        merged.update(theirs)
    return merged


def _describe(value: Any) -> Any:
    """The content of a note. Single numbers, such as the number of steps, are in the note itself."""
    if not isinstance(value, Tensor):
        return value
    if value.numel() > 1:
        return _TensorSpec(tuple(value.shape), value.dtype)
    return _SingleNumber(value.detach().to("cpu", copy=True), on_host=value.device.type == "cpu")


def _carry(comm: Communicator, held: Any, note: Any, source: int, among: Ranks, what: str) -> Any:
    """The value that a note describes: broadcast from `source`, or the note's own."""
    if isinstance(note, _SingleNumber):
        return note.value.to("cpu" if note.on_host else comm.device, copy=True)
    if not isinstance(note, _TensorSpec):
        return note
    tensor = torch.empty(note.shape, dtype=note.dtype, device=comm.device) if held is None else held.contiguous()
    comm.broadcast(tensor, source, among, what)
    return tensor


def _read(p: Tensor, where: int, key: str, optimizers: Sequence[Optimizer]) -> Any:
    return p.grad if where == GRAD else optimizers[where].state[p][key]


def _write(p: Tensor, where: int, key: str, value: Any, optimizers: Sequence[Optimizer]) -> None:
    if where == GRAD:
        p.grad = value if isinstance(value, Tensor) else None
    else:
        optimizers[where].state[p][key] = value


def _to_first(comm: Communicator, tensor: Tensor, owners: Ranks, what: str) -> Tensor:
    """The tensor's data on rank 0; on other ranks the result does not matter."""
    if 0 in owners or comm.rank not in (0, owners[0]):
        return tensor
    data = torch.empty_like(tensor, device=comm.device) if comm.rank == 0 else tensor.detach().contiguous()
    comm.broadcast(data, owners[0], _both((0,), (owners[0],)), what)
    return data


def _both(a: Ranks, b: Ranks) -> Ranks:
    return tuple(sorted({*a, *b}))


_on_cpu: Callable[[Any], Any] = lambda v: v.detach().to("cpu", copy=True) if isinstance(v, Tensor) else v  # noqa: E731
