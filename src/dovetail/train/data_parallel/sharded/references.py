"""Who can read a parameter's values without asking for the Parameter.

Code that uses the Parameter itself waits for values that are still on their way (`arriving.py`). A tensor that shares
its memory does not: a kept `.data`, a view, an array, a `state_dict()` taken earlier, a teacher tied to the same
memory; nor does C++ code that holds the tensor, as a scripted or traced module does; nor does another process that maps
the memory. torch counts how many tensors share a memory and how many owners a tensor has. Where it counts more than
this model has made, somebody else holds one, and `optimizer.step()` waits until that parameter is whole.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from dovetail.core.errors import Error

from .arriving import Arriving
from .shard_layout import ShardedBucket


class KnownReferences:
    """The references to parameters that the exchange and torch's autograd have: whoever has another is noticed."""

    def __init__(self, buckets: Sequence[ShardedBucket], names: Sequence[str]) -> None:
        self._names = names
        self._parameters: dict[int, Any] = {i: p for bucket in buckets for i, p in bucket.parameters.items()}
        self._memory = {i: m for bucket in buckets for i, m in bucket.memory.items()}
        self._split = [i for bucket in buckets if bucket.kind == "split" for i in bucket.members]
        self._pointers = {i: m.data_ptr() for i, m in self._memory.items()}
        # torch calls all memory of accelerators shared.
        self._shared = {i for i, m in self._memory.items() if m.device.type == "cpu" and m.is_shared()}
        self._storages = {i: m.untyped_storage() for i, m in self._memory.items()}
        self._addresses = {i: storage._cdata for i, storage in self._storages.items()}
        """Address of torch's object for each memory."""
        holders = Counter(dict.fromkeys(self._addresses.values(), 1))  # Python's object for the storage
        for bucket in buckets:
            for i in bucket.members:
                holders[self._addresses[i]] += 2  # the parameter, and the bucket's view of all of it
            for piece in bucket.pieces if bucket.master is None else ():
                holders[self._addresses[piece.index]] += 1
        self._holders = {i: holders[address] for i, address in self._addresses.items()}
        self._owners, self._handles = _counts_of_a_parameter()

    def check_places(self) -> None:
        """Refuses parameters that no longer are where they were when the buckets were made."""
        with torch._C.DisableTorchFunctionSubclass():  # some may be on their way
            moved = {i: p.data_ptr() for i, p in self._parameters.items() if p.data_ptr() != self._pointers[i]}
        for i, pointer in moved.items():
            if pointer != self._memory[i].data_ptr():
                raise Error(
                    f"overlap: {self._names[i]!r} has new memory since the model was wrapped; move or convert a model "
                    "before it is wrapped, and change values in place (p.data.copy_(…))"
                )
            self._pointers[i] = pointer  # share_memory_() moves all tensors that share a memory at once
            self._shared.add(i)

    def read_elsewhere(self) -> list[int]:
        """The parameters of split buckets that can be read through other references at the moment."""
        counted = torch._C._storage_Use_Count
        with torch._C.DisableTorchFunctionSubclass():
            return [
                i
                for i in self._split
                if not isinstance(self._parameters[i], Arriving)  # another optimiser's step has looked at these
                if i in self._shared
                or counted(self._addresses[i]) > self._holders[i]
                or sys.getrefcount(self._storages[i]) > self._handles
                or self._parameters[i]._use_count() > self._owners
            ]


def _counts_of_a_parameter() -> tuple[int, int]:
    """(torch's count of its owners, Python's of references to its storage object) where nobody else has any.

    As here, Python has the parameter, autograd's node that adds to `.grad` is held, and a dictionary has the storage.
    """
    parameter: Any = nn.Parameter(torch.empty(1))
    node = get_gradient_edge(parameter).node
    storages = {0: parameter.untyped_storage()}
    counts = int(parameter._use_count()), sys.getrefcount(storages[0])
    del node
    return counts
