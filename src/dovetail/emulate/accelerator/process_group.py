"""A process group with NCCL's semantics for the emulated accelerator: torch's backend "eccl".

`load()` registers it, and with it `init_process_group("eccl")`, `init_process_group("cpu:gloo,emu:eccl")` and a bare
`init_process_group()` work. As with NCCL,

* a collective runs on a stream of the group's own, behind what the current stream has at its launch; with
  `async_op=False` it runs on the current stream. `work.wait()` orders the current stream behind it and returns at once;
  only a barrier, and a wait with a time-out, block the host.
* tensors of an asynchronous operation live until somebody waits for it, or until it is over.
* sends and receives between two ranks have one stream per pair, in the order in which they are posted, whatever their
  tags: two ranks that both receive first wait until the time-out. `batch_isend_irecv` does not.
* an operation that takes longer than the group's time-out ends the group: every later call and wait raises one line
  that says why, here and on the other ranks. The process lives on, and may make another group.

Unlike with NCCL, ranks compare what they call before anything is sent. Where they differ in the operation, the type or
the number of elements, all of them raise a line that names each rank's call and its number. So every collective waits
for all ranks to begin, and every send for its receive, however small.

The bytes are carried by gloo, over the network that its environment variables choose. bfloat16 and half precision are
reduced by gloo in their own type; AVG is a sum and a division, PREMUL_SUM a product and a sum; a reduce-scatter sends
every rank its part and adds up in the order of ranks.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from . import sync_batch_norm

BACKEND = "eccl"
DEVICE = "emu"


def register(native: Any) -> None:
    """Makes the backend known to torch. `native` is the extension, as the accelerator has loaded it."""
    native.set_gloo_factory(_gloo)

    def create(asked: Any, options: Any) -> Any:
        # A time-out that the caller gave beside the options has been put into `asked` by torch, and counts.
        chosen = options if isinstance(options, native.GroupOptions) else native.GroupOptions()
        chosen._timeout = asked.timeout
        chosen.group_name = asked.group_id
        chosen.global_ranks_in_group = asked.global_ranks_in_group
        store = PrefixStore(BACKEND, asked.store)
        gloo = _gloo(store, asked.group_rank, asked.group_size, asked.timeout)
        return native.Group(store, gloo, asked.group_rank, asked.group_size, chosen)

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=[DEVICE])
    sync_batch_norm.register()


def _gloo(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)
