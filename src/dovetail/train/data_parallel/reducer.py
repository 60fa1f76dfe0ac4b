"""Gives a DDP module a new reducer in place: the one file that changes torch below its public surface.

torch fixes a module's bucket caps when the module is wrapped. Unpickling a wrapped module, however, builds its reducer
anew, and `replace` does the same with other caps: the hooks of the old reducer are removed, a new C++ reducer takes
over the same parameters, and its one-time rebuild puts the buckets into gradient-ready order in the second iteration
that follows. It takes about a millisecond; gradients, optimiser state and the user's hooks are untouched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from dovetail.core.errors import Error
from dovetail.train.integrations import check_environment


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


def replace(ddp: TorchDDP, config: Any, *, comm_hook: Callable[..., Any] | None = None) -> None:
    """Gives the module a new reducer between two iterations. All ranks do it at the same point with the same caps."""
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
    if ddp.static_graph:
        # A new reducer learns the graph in its first step, as at construction.
        ddp._static_graph_delay_allreduce_enqueued = False
        ddp.reducer._set_static_graph()
        assert ddp.logger is not None
        ddp.logger._set_static_graph()
    if comm_hook is not None:
        torch.distributed._register_comm_hook(ddp.reducer, None, comm_hook)  # type: ignore[attr-defined]
