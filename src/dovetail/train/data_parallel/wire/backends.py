"""Process groups: the backend that carries a device's tensors, its time-out, its own collectives, and a second group.

A group has a backend for each kind of device (`cpu:gloo,cuda:nccl`; so has one made without a name), and its own name
then says nothing. So the backend is always asked for by the device of the tensors that it is to carry. Backends of
accelerators have collectives that are rings or better, and messages between two ranks that run one after the other:
there the backend's own collectives are used. gloo's move more bytes than they need, and are replaced by `ring.py`.

Collectives are called on the group object and never through torch's registry of groups. `destroy_process_group()`
empties the registry at once, while the backend works on for as long as somebody holds the group, and other ranks may
still need what this one sends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore
from torch.distributed.constants import default_pg_timeout

from dovetail.core.errors import Error
from dovetail.measure.collective_timer import backend_of
from dovetail.train.device_streams import is_queued
from dovetail.train.integrations import keep

CPU_OWN = ("ucc",)
"""Backends for the CPU's tensors whose own collectives are rings or better."""


def has_own(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the backend that carries this device's tensors has collectives that are rings or better."""
    return is_queued(device) or backend_of(group, device) in CPU_OWN


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long a collective of this group may take; None (torch's default) where no backend of it tells."""
    for device in sorted(group._device_types, key=lambda device: device.type == "cpu"):
        with contextlib.suppress(AttributeError, RuntimeError):
            found = group._get_backend(device).options._timeout
            assert isinstance(found, timedelta)
            return found
    return None


def patience(group: dist.ProcessGroup) -> float:
    """Seconds after which a message in this group counts as lost."""
    return (timeout_of(group) or default_pg_timeout).total_seconds()


def twin(group: dist.ProcessGroup | None, device: torch.device) -> dist.ProcessGroup:
    """A second group of the same ranks, backends and time-out, so that its messages never mix with other collectives.

    All ranks of `group` call it together; it carries tensors of this device. A gloo group made here is not in torch's
    registry, so its threads and sockets are gone when nobody holds it any more. (gloo's threads need Python's lock for
    torch's collectives only, and here are only messages: see `integrations.keep` for what else could happen.)
    """
    group = group or dist.group.WORLD
    assert group is not None, "there is a process group"
    backend = backend_of(group, device)
    if is_queued(device) and backend in ("", "gloo"):
        raise Error(
            f"overlap: expected a process group with a backend of {device.type}'s own, got one with "
            f"{backend or 'none for it'}: call init_process_group() without a name, or with one for each device"
        )
    if backend != "gloo" or type(group) is not dist.ProcessGroup:
        made = dist.new_group(
            ranks=dist.get_process_group_ranks(group),
            timeout=timeout_of(group),
            backend=dist.get_backend_config(group),
            use_local_synchronization=True,
        )
        assert isinstance(made, dist.ProcessGroup)
        keep(made)
        return made
    shared, rank, ranks = group.get_group_store(), group.rank(), group.size()
    # Every rank counts its own, in the same order: so all come to the same name, and to a new one each time.
    store = PrefixStore(f"dovetail/{shared.add(f'dovetail/{rank}', 1)}", shared)
    alone = dist.ProcessGroup(store, rank, ranks)
    kind = dist.ProcessGroup.BackendType.GLOO
    alone._set_default_backend(kind)
    messages = dist.ProcessGroupGloo(store, rank, ranks, timeout=timeout_of(group) or default_pg_timeout)
    alone._register_backend(torch.device("cpu"), kind, messages)
    return alone


def own_reduce_scatter(group: dist.ProcessGroup, parts: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """Adds up `flat` over the ranks; afterwards this rank's of its n `parts`, which cover it, is the sum."""
    mine, options = parts[group.rank()], dist.ReduceScatterOptions()
    options.asyncOp = False
    if not flat.numel():
        return
    if _even(parts):
        _finish(group._reduce_scatter_base(mine, flat, options))
    else:
        _finish(group.reduce_scatter([mine], [list(parts)], options))


def own_all_gather(group: dist.ProcessGroup, parts: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """Gives every rank all n `parts` of `flat`, of which rank r has the r-th."""
    mine, options = parts[group.rank()], AllgatherOptions()
    options.asyncOp = False
    if not flat.numel():
        return
    if _even(parts):
        _finish(group._allgather_base(flat, mine, options))
    else:
        _finish(group.allgather([list(parts)], [mine], options))


def own_all_reduce(group: dist.ProcessGroup, flat: torch.Tensor) -> None:
    """Adds up `flat` over the ranks, on every rank."""
    options = dist.AllreduceOptions()
    options.asyncOp = False
    _finish(group.allreduce([flat], options))


def own_all_to_all(
    group: dist.ProcessGroup, out: torch.Tensor, given: torch.Tensor, taken: Sequence[int], sent: Sequence[int]
) -> None:
    """Sends the next `sent[r]` elements of `given` to rank r, and gets the next `taken[r]` of `out` from it."""
    options = dist.AllToAllOptions()
    options.asyncOp = False
    _finish(group.alltoall_base(out, given, list(taken), list(sent), options))


def _even(parts: Sequence[torch.Tensor]) -> bool:
    return len({part.numel() for part in parts}) == 1


def _finish(work: dist.Work | None) -> None:
    """What is not asynchronous runs in the device's current stream, and some backends return nothing to wait for."""
    if work is not None:
        work.wait()
