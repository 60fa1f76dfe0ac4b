"""Gives a DDP module a new reducer in place: the one file that changes torch below its public surface.

torch fixes a module's bucket caps when the module is wrapped. Unpickling a wrapped module, however, builds its reducer
anew, and `replace` does the same with other caps: the hooks of the old reducer are removed, a new C++ reducer takes
over the same parameters, and its one-time rebuild puts the buckets into gradient-ready order in the second iteration
that follows. It takes about a millisecond; gradients, optimiser state and the user's hooks are untouched. A
communication hook that the user has registered is registered again with the new reducer (see comm_hooks.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from dovetail.core.errors import Error
from dovetail.train.integrations import check_environment

HookCall = Callable[[Any, Any], "torch.futures.Future[torch.Tensor]"]
"""A communication hook: from its state and a bucket of gradients to a future of the reduced bucket."""


@dataclass(frozen=True)
class CommHook:
    """What torch calls in place of an all-reduce: a function with its state, or one of torch's own in C++."""

    name: str
    call: HookCall | None
    """None for a built-in hook."""
    state: Any = None
    builtin: Any = None
    """torch's constant for a built-in hook."""


def comm_hook(ddp: TorchDDP) -> CommHook | None:
    """The communication hook that the user has registered, if any.

    torch does not remember built-in hooks: the wrapper leaves theirs in `builtin_comm_hook`.
    """
    if ddp._comm_hooks:
        call, state = ddp._comm_hooks[-1]
        return CommHook(name=getattr(call, "__qualname__", type(call).__qualname__), call=call, state=state)
    builtin = getattr(ddp, "builtin_comm_hook", None)
    return CommHook(name=str(builtin), call=None, builtin=builtin) if builtin is not None else None


def unsupported() -> str | None:
    """The reason why this torch's reducer cannot be replaced, or None."""
    try:
        from torch.nn.parallel.distributed import _BucketCapacityConfig  # noqa: F401

        check_environment()
    except ImportError:
        return f"torch {torch.__version__} builds its reducer in a way this dovetail does not know"
    except Error as e:
        return str(e)
    return None


def bucket_config(caps_mib: list[float]) -> Any:
    """torch's own description of bucket caps, one per bucket."""
    from torch.nn.parallel.distributed import _BucketCapacityConfig

    check_environment()
    return _BucketCapacityConfig.create(None, caps_mib, False)  # type: ignore[arg-type]


def own_policy(config: Any) -> str:
    """The name, in planning.policies, of the rule by which torch makes buckets of this description."""
    if config.first_bucket_bytes_cap < config.bucket_bytes_cap:
        return "ddp"
    return f"threshold:{config.bucket_bytes_cap / 2**20:g}"


def replace(ddp: TorchDDP, config: Any, *, call: HookCall | None = None) -> None:
    """Gives the module a new reducer between two iterations. All ranks do it at the same point with the same caps.

    `call` is registered as the communication hook, with the state of the user's; by default it is the user's own.
    """
    ddp._remove_autograd_hooks()
    ddp._bucket_config = config
    ddp.bucket_bytes_cap = config.bucket_bytes_cap
    ddp.bucket_bytes_cap_list = list(config.per_bucket_bytes_caps)
    parameters, expect_sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    frozen = [
        p for p in parameters if not p.requires_grad
    ]  # only for now, as a discriminator is while its generator learns
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        with torch.inference_mode(False):  # buffers made inside it could never be written to again
            ddp._ddp_init_helper(parameters, expect_sparse, names, ddp.static_graph)
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
    ddp._has_rebuilt_buckets = False
    assert ddp.logger is not None
    if ddp.static_graph:
        # A new reducer learns the graph in its first step, as at construction.
        ddp._static_graph_delay_allreduce_enqueued = False
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    hook = comm_hook(ddp)
    if hook is not None:
        ddp.logger._set_comm_hook_name(hook.name)
    if call is not None or (hook is not None and hook.call is not None):
        state = hook.state if hook is not None else None
        dist._register_comm_hook(ddp.reducer, state, call or hook.call)  # type: ignore[attr-defined,union-attr]
    elif hook is not None:
        dist._register_builtin_comm_hook(ddp.reducer, hook.builtin)  # type: ignore[attr-defined]
