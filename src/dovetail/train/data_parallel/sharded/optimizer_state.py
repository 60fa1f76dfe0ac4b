"""Optimiser state in two forms: this rank's pieces, and whole parameters as torch stores them.

State that is zero-dimensional (such as the number of steps) belongs to the parameter and is the same in all of its
pieces; every other tensor has one element for each element of the parameter.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch

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
    counts, kinds = _describe(exchange, mine)
    found: State = {index: dict(values) for index, values in counts.items()}
    for bucket in exchange.buckets:
        keys = sorted({key for i in bucket.members for key in kinds.get(i, {})})
        for key in keys:
            flat = _gather(exchange, bucket, key, mine, {kinds[i][key] for i in bucket.members if key in kinds[i]})
            for i in bucket.members if keep else ():
                if key in kinds.get(i, {}):
                    parameter, at = exchange.slots[i].parameter, bucket.offsets[i]
                    found[i][key] = in_shape(flat[at : at + parameter.numel()], parameter)
    return found if keep else {}


def like(parameter: torch.Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """A copy of one parameter's state, on its device and, but for the number of steps, in its dtype."""
    copied = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and key != "step":
            dtype = parameter.dtype if value.is_floating_point() else value.dtype
            copied[key] = value.to(device=parameter.device, dtype=dtype, copy=True)
        else:
            copied[key] = copy.deepcopy(value)
    return copied


def share_out(exchange: GradientExchange, state: State, put: Callable[[torch.Tensor, dict[str, Any]], object]) -> None:
    """Gives every piece of this rank its part of the state of whole parameters. Needs no other rank."""
    for bucket in exchange.buckets:
        for piece in bucket.pieces:
            if piece.index not in state:
                continue
            slot = exchange.slots[piece.index]
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
    """One object from each rank, sent as messages about state."""
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
        torch.load(io.BytesIO(everything[r * longest : r * longest + int(size)].numpy().tobytes()), weights_only=False)
        for r, size in enumerate(sizes)
    ]


def _all_gather_on(exchange: GradientExchange, out: torch.Tensor) -> torch.Tensor:
    there = out.to(exchange.device)
    exchange.communicate(WHAT, lambda: ring.all_gather(there, exchange.group, tag=TAG))
    out.copy_(there)
    return out
