"""Optimiser state in two forms: this rank's pieces, and whole parameters as torch stores them.

State that is zero-dimensional (such as the number of steps) belongs to the parameter and is the same in all of its
pieces; every other tensor has one element for each element of the parameter. State of a parameter that one rank updates
whole may have any form: tensors of any shapes, numbers, lists and dicts of these.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.serialization import default_restore_location as default_restore

from dovetail.core.errors import Error

from ..wire import ring
from .exchange import GradientExchange
from .shard_layout import ShardedBucket, in_memory_order, in_shape

State = dict[int, dict[str, Any]]
"""Optimiser state by index of the parameter."""

TAG = 2**30
"""First tag of messages about state: if one rank alone asks for state, it must not receive another's gradients."""

WHAT = "gathering optimiser state from all ranks"


def of_pieces(exchange: GradientExchange, get: Callable[[torch.Tensor], dict[str, Any]]) -> State:
    """The state that this rank has; `get` gives the state of a piece's values."""
    return {piece.index: get(piece.values) for bucket in exchange.buckets for piece in bucket.pieces}


def whole(exchange: GradientExchange, mine: State, *, keep: bool = True) -> State:
    """The state of whole parameters, in their shapes, from the pieces of all ranks. All ranks call it together.

    One that does not `keep` it gets what travels, bucket by bucket, and drops it. Where no bucket is split, each rank
    has everything, and needs no other.
    """
    counts, kinds = _describe(exchange, {i: state for i, state in mine.items() if i not in exchange.owners})
    found: State = {index: dict(values) for index, values in counts.items()}
    for bucket in exchange.buckets:
        keys = sorted({key for i in bucket.members for key in kinds.get(i, {})})
        for key in keys:
            flat = _gather(exchange, bucket, key, mine, {kinds[i][key] for i in bucket.members if key in kinds[i]})
            for i in bucket.members if keep else ():
                if key in kinds.get(i, {}):
                    parameter, at = exchange.slots[i].parameter, bucket.offsets[i]
                    found[i][key] = in_shape(flat[at : at + parameter.numel()], parameter)
    found |= _of_owners(exchange, mine)
    return found if keep else {}


def like(parameter: torch.Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """A copy of one parameter's state, on its device and, but for the number of steps, in its dtype."""
    copied: dict[str, Any] = _copied(state, parameter)
    return copied


def share_out(exchange: GradientExchange, state: State, put: Callable[[torch.Tensor, dict[str, Any]], object]) -> None:
    """Gives every piece of this rank its part of the state of whole parameters. Needs no other rank."""
    for bucket in exchange.buckets:
        for piece in bucket.pieces:
            if piece.index not in state:
                continue
            slot = exchange.slots[piece.index]
            if piece.index in exchange.owners:
                put(piece.values, like(slot.parameter, state[piece.index]))
                continue
            part = {}
            for key, value in state[piece.index].items():
                if not isinstance(value, torch.Tensor):
                    part[key] = copy.deepcopy(value)
                elif value.dim() == 0 and (slot.parameter.dim() > 0 or key == "step"):
                    part[key] = value.clone()
                else:
                    if value.shape != slot.parameter.shape:
                        raise Error(
                            f"state of {slot.name!r}: expected {key!r} of shape {list(slot.parameter.shape)}, "
                            f"got {list(value.shape)}"
                        )
                    whole = in_memory_order(value.to(exchange.device), slot.parameter)
                    dtype = slot.parameter.dtype if value.is_floating_point() else value.dtype
                    part[key] = whole[piece.start : piece.stop].to(dtype, copy=True)
            put(piece.values, part)


def _describe(exchange: GradientExchange, mine: State) -> tuple[State, dict[int, dict[str, torch.dtype]]]:
    """(state of whole parameters, names and dtypes of state by element), the same on all ranks."""
    counts: State = {}
    kinds: dict[int, dict[str, torch.dtype]] = {}
    for index, values in mine.items():
        counts[index], kinds[index] = {}, {}
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                kinds[index][key] = value.dtype
            else:
                counts[index][key] = value
    merged_counts: State = {}
    merged_kinds: dict[int, dict[str, torch.dtype]] = {}
    split = any(bucket.kind == "split" for bucket in exchange.buckets)
    everyone = _gather_objects(exchange, (counts, kinds)) if split else [(counts, kinds)]
    for their_counts, their_kinds in everyone:
        for index, values in their_counts.items():
            merged_counts.setdefault(index, {}).update(values)
        for index, dtypes in their_kinds.items():
            merged_kinds.setdefault(index, {}).update(dtypes)
    return merged_counts, merged_kinds


def _gather(
    exchange: GradientExchange, bucket: ShardedBucket, key: str, mine: State, dtypes: set[torch.dtype]
) -> torch.Tensor:
    """One kind of state of a whole bucket; zero where a parameter has none."""
    assert len(dtypes) == 1, "one kind of state has one dtype"
    out = torch.zeros(bucket.elements, dtype=dtypes.pop(), device=exchange.device)
    for piece in bucket.pieces:
        if key in mine.get(piece.index, {}):
            at = bucket.offsets[piece.index] + piece.start
            out[at : at + piece.stop - piece.start].copy_(mine[piece.index][key])
    if bucket.kind == "split":
        exchange.communicate(WHAT, lambda: ring.all_gather(out, exchange.group, tag=TAG))
    return out


def _gather_objects(exchange: GradientExchange, value: Any) -> list[Any]:
    """One object from each rank, sent as messages about state. Tensors come to this rank's own device."""
    here = str(exchange.device)
    buffer = io.BytesIO()
    torch.save(value, buffer)
    data = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    sizes = torch.zeros(exchange.ranks, dtype=torch.int64)
    sizes[exchange.rank] = data.numel()
    _all_gather_on(exchange, sizes)
    longest = int(sizes.max())
    everything = torch.zeros(exchange.ranks * longest, dtype=torch.uint8)
    everything[exchange.rank * longest : exchange.rank * longest + data.numel()] = data
    everything = _all_gather_on(exchange, everything)
    return [
        torch.load(
            io.BytesIO(everything[r * longest : r * longest + int(size)].numpy().tobytes()),
            map_location=lambda storage, place: storage if place == "cpu" else default_restore(storage, here),
            weights_only=False,
        )
        for r, size in enumerate(sizes)
    ]


def _all_gather_on(exchange: GradientExchange, out: torch.Tensor) -> torch.Tensor:
    there = out.to(exchange.device)
    exchange.communicate(WHAT, lambda: ring.all_gather(there, exchange.group, tag=TAG))
    out.copy_(there)
    return out


@dataclass(frozen=True)
class StoredTensor:
    """A tensor whose values travel apart."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool
    """It stays in the memory of the host, whatever device the parameter is on, as numbers of steps do."""

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def _described(state: Any) -> Any:
    """State with a description in place of every tensor."""
    return _mapped(state, lambda t: StoredTensor(tuple(t.shape), t.dtype, t.device.type == "cpu"))


def _filled(description: Any, values: Iterator[torch.Tensor]) -> Any:
    """The reverse of `_described`, with tensors from `values` in the order of the descriptions."""
    return _mapped(description, lambda _: next(values))


def _copied(value: Any, parameter: torch.Tensor, key: Any = None) -> Any:
    """A copy of one parameter's state with its dtype, as torch loads state: all but the number of steps."""
    if isinstance(value, torch.Tensor):
        if key == "step" or not value.is_floating_point():
            return value.clone()
        return value.to(parameter.device, parameter.dtype, copy=True)
    if isinstance(value, dict):
        return {k: _copied(v, parameter, k) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_copied(v, parameter, key) for v in value])
    return copy.deepcopy(value)


def _of_owners(exchange: GradientExchange, mine: State) -> State:
    """The state of parameters that are updated whole: of a whole bucket every rank's own, else their owners'.

    Nothing is known of its form, so it travels as it is. The ranks first tell each other what they have, with a
    description in place of every tensor; then the bytes of the tensors are gathered, bucket after bucket, where each
    rank's part is as long as what it owns.
    """
    have = {i: state for i, state in mine.items() if i in exchange.owners}
    owned = [bucket for bucket in exchange.buckets if bucket.members[0] in exchange.owners]
    split = {i for bucket in owned if bucket.kind == "split" for i in bucket.members}
    descriptions: list[State] = []
    if split:
        descriptions = _gather_objects(exchange, _described({i: s for i, s in have.items() if i in split}))
    found: State = {}
    for bucket in owned:
        if bucket.kind == "split":
            found |= _of_owned_bucket(exchange, bucket, descriptions, have)
        else:
            found |= copy.deepcopy({i: have[i] for i in bucket.members if i in have})
    return found


def _of_owned_bucket(
    exchange: GradientExchange, bucket: ShardedBucket, descriptions: Sequence[State], mine: State
) -> State:
    held = [{i: d[i] for i in bucket.members if i in d} for d in descriptions]
    sizes = [[t.bytes for t in _leaves(list(d.values()), StoredTensor)] for d in held]
    borders = [0, *accumulate(sum(s) for s in sizes)]
    flat = torch.empty(borders[-1], dtype=torch.uint8, device=exchange.device)
    at = borders[exchange.rank]
    for tensor in _leaves([mine[i] for i in held[exchange.rank]], torch.Tensor):
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        flat[at : at + data.numel()].copy_(data)
        at += data.numel()
    exchange.communicate(WHAT, lambda: ring.all_gather(flat, exchange.group, tag=TAG, borders=borders))
    found: State = {}
    for owner, description in enumerate(held):
        values = flat[borders[owner] : borders[owner + 1]].split(sizes[owner]) if sizes[owner] else ()
        stored = _leaves(list(description.values()), StoredTensor)
        found |= _filled(description, (_read(v, s) for v, s in zip(values, stored, strict=True)))
    return found


def _read(data: torch.Tensor, stored: StoredTensor) -> torch.Tensor:
    # A copy first: where the data begins need not be a multiple of the size of an element.
    read = data.clone().view(stored.dtype).view(stored.shape)
    return read.cpu() if stored.on_host else read


def tensors_of(state: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists and dicts."""
    return _leaves(state, torch.Tensor)


def _leaves(value: Any, kind: type[Any]) -> Iterator[Any]:
    """What is of this kind in nested lists and dicts, in their order."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, dict):
        for v in value.values():
            yield from _leaves(v, kind)
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _leaves(v, kind)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Nested lists and dicts with every tensor, or description of one, changed."""
    if isinstance(value, (torch.Tensor, StoredTensor)):
        return change(value)
    if isinstance(value, dict):
        return {k: _mapped(v, change) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(v, change) for v in value])
    return value
