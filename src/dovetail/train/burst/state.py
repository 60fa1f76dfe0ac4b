"""Where parameters and optimiser state live: only on the ranks that run their layer.

Elsewhere a tensor stays in the model as a shape without data (torch's meta device), so that every rank's optimiser has
the same parameters in the same order; it passes over those that never get a gradient. When a plan changes, data goes
from the lowest rank that has it to those that need it. A checkpoint is the plain model's, whatever the plan.
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

from .wire import Wire

Ranks: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Home:
    """One tensor of the model and the layer it belongs to. The object stays; its data comes and goes."""

    name: str
    tensor: Tensor
    layer: int

    def place(self, device: torch.device) -> None:
        """Gives it room for data on `device`, uninitialised."""
        if self.tensor.is_meta:
            self._become(torch.empty_like(self.tensor, device=device))

    def drop(self) -> None:
        if not self.tensor.is_meta:
            self.tensor.grad = None
            self._become(torch.empty_like(self.tensor, device="meta"))

    def _become(self, data: Tensor) -> None:
        keeps = self.tensor.requires_grad
        fresh = nn.Parameter(data, requires_grad=keeps) if isinstance(self.tensor, nn.Parameter) else data.detach()
        swap_tensors(self.tensor, fresh)


def homes(whole: nn.Module, layers: Sequence[nn.Module]) -> list[Home]:
    """All parameters and buffers of the layers, in the model's order. What no layer uses stays where it is."""
    layer_of: dict[int, int] = {}
    for i, layer in enumerate(layers):
        for t in (*layer.parameters(), *layer.buffers()):
            if layer_of.setdefault(id(t), i) != i:
                raise Error(f"layers: a buffer is used by layers {layer_of[id(t)]} and {i}; it belongs to one layer")
    named = [*whole.named_parameters(), *whole.named_buffers()]
    return [Home(name, t, layer_of[id(t)]) for name, t in named if id(t) in layer_of]


def settle(wire: Wire, found: Sequence[Home], ranks: Sequence[Ranks]) -> None:
    """At the start: everybody gets what rank 0 was given, and keeps what its layers need."""
    everyone = tuple(range(wire.size))
    for home in found:
        home.place(wire.device)
        wire.broadcast(home.tensor.detach(), 0, everyone, f"{home.name} from rank 0")
        if wire.rank not in ranks[home.layer]:
            home.drop()


def resettle(
    wire: Wire, found: Sequence[Home], old: Sequence[Ranks], new: Sequence[Ranks], optimizers: Sequence[Optimizer]
) -> None:
    """From one plan to another, with gradients and optimiser state. Every rank calls it at the same point."""
    wire.prepare({_both(a, b) for a, b in zip(old, new, strict=True)})
    growing = [h for h in found if set(new[h.layer]) - set(old[h.layer])]
    notes = _notes(wire, growing, old, optimizers)
    for home in growing:
        before, after = old[home.layer], new[home.layer]
        among = _both(before, after)
        if wire.rank not in among:
            continue
        comes = wire.rank in after and wire.rank not in before
        if comes:
            home.place(wire.device)
        wire.broadcast(home.tensor.detach(), before[0], among, home.name)
        for where, key, note in notes.get(home.name, []):
            what = f"{home.name}: {key}"
            held = _read(home.tensor, where, key, optimizers) if not comes else None
            value = _carry(wire, held, note, before[0], among, what)
            if comes:
                _write(home.tensor, where, key, value, optimizers)
    for home in found:
        if wire.rank not in new[home.layer]:
            for optimizer in optimizers:
                optimizer.state.pop(home.tensor, None)
            home.drop()


def model_state(wire: Wire, whole: nn.Module, found: Sequence[Home], ranks: Sequence[Ranks]) -> dict[str, Any]:
    """The whole model's `state_dict` on rank 0, on the processor; empty on the others."""
    by_id = {id(h.tensor): h for h in found}
    wire.prepare({_both((0,), (r[0],)) for r in ranks})
    state: dict[str, Any] = {}
    for key, value in whole.state_dict(keep_vars=True).items():
        home = by_id.get(id(value))
        if home is not None:
            value = _to_first(wire, home.tensor, ranks[home.layer], key)
        if wire.rank == 0:
            state[key] = value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
    return state


def optimizer_state(wire: Wire, optimizer: Optimizer, found: Sequence[Home], ranks: Sequence[Ranks]) -> dict[str, Any]:
    """The optimiser's `state_dict` as one process would have it, on rank 0; empty on the others."""
    wire.prepare({_both((0,), (r[0],)) for r in ranks})
    by_id = {id(h.tensor): h for h in found}
    notes = _notes(wire, found, ranks, [optimizer], grads=False)
    result = optimizer.state_dict()
    state: dict[int, dict[str, Any]] = {}
    for index, p in enumerate(p for g in optimizer.param_groups for p in g["params"]):
        home = by_id.get(id(p))
        if home is None:
            if p in optimizer.state:
                state[index] = dict(optimizer.state[p])
            continue
        for where, key, note in notes.get(home.name, []):
            owners = ranks[home.layer]
            held = _read(p, where, key, [optimizer]) if wire.rank in owners else None
            if wire.rank in (0, owners[0]):
                among = _both((0,), (owners[0],))
                if 0 not in owners:
                    held = _carry(wire, held, note, owners[0], among, f"{home.name}: {key}")
                state.setdefault(index, {})[key] = held
    if wire.rank != 0:
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


GRAD = -1  # in place of an optimiser's number: the parameter's gradient

_Note: TypeAlias = tuple[int, str, Any]
"""(number of the optimiser or GRAD, key, what it is): a `_Sketch` of a tensor that follows, or the value itself."""


@dataclass(frozen=True)
class _Sketch:
    shape: tuple[int, ...]
    dtype: torch.dtype


def _notes(
    wire: Wire, found: Sequence[Home], owners: Sequence[Ranks], optimizers: Sequence[Optimizer], grads: bool = True
) -> dict[str, list[_Note]]:
    """What there is beside each parameter, as its lowest owner has it; known to all ranks."""
    mine: dict[str, list[_Note]] = {}
    for home in found:
        if owners[home.layer][0] != wire.rank or not isinstance(home.tensor, nn.Parameter):
            continue
        notes: list[_Note] = []
        if grads and home.tensor.grad is not None:
            notes.append((GRAD, "grad", _describe(home.tensor.grad)))
        for i, optimizer in enumerate(optimizers):
            held = optimizer.state.get(home.tensor, {})
            notes += [(i, key, _describe(value)) for key, value in held.items()]
        mine[home.name] = notes
    merged: dict[str, list[_Note]] = {}
    for theirs in wire.collect(mine, "optimiser state"):
        merged.update(theirs)
    return merged


def _describe(value: Any) -> Any:
    """Single numbers, such as a count of steps, travel with the description."""
    if isinstance(value, Tensor) and value.numel() > 1:
        return _Sketch(tuple(value.shape), value.dtype)
    return value.detach().clone() if isinstance(value, Tensor) else value


def _carry(wire: Wire, held: Any, note: Any, source: int, among: Ranks, what: str) -> Any:
    if not isinstance(note, _Sketch):
        return note.clone() if isinstance(note, Tensor) else note
    tensor = torch.empty(note.shape, dtype=note.dtype, device=wire.device) if held is None else held.contiguous()
    wire.broadcast(tensor, source, among, what)
    return tensor


def _read(p: Tensor, where: int, key: str, optimizers: Sequence[Optimizer]) -> Any:
    return p.grad if where == GRAD else optimizers[where].state[p][key]


def _write(p: Tensor, where: int, key: str, value: Any, optimizers: Sequence[Optimizer]) -> None:
    if where == GRAD:
        p.grad = value if isinstance(value, Tensor) else None
    else:
        optimizers[where].state[p][key] = value


def _to_first(wire: Wire, tensor: Tensor, owners: Ranks, what: str) -> Tensor:
    if 0 in owners or wire.rank not in (0, owners[0]):
        return tensor
    data = torch.empty_like(tensor, device=wire.device) if wire.rank == 0 else tensor.detach().contiguous()
    wire.broadcast(data, owners[0], _both((0,), (owners[0],)), what)
    return data


def _both(a: Ranks, b: Ranks) -> Ranks:
    return tuple(sorted({*a, *b}))


_on_cpu: Callable[[Any], Any] = lambda v: v.detach().to("cpu", copy=True) if isinstance(v, Tensor) else v  # noqa: E731
