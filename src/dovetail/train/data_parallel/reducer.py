"""Gives a DDP module a new reducer in place: the one file that changes torch below its public surface.

torch fixes a module's bucket caps when the module is wrapped. Unpickling a wrapped module, however, builds its reducer
anew, and `replace` does the same with other buckets: the hooks of the old reducer are removed, and a new C++ reducer
takes over the same parameters. It takes about a millisecond; gradients, optimiser state and the user's hooks are
untouched. A communication hook that the user has registered is registered again with the new reducer (see
comm_hooks.py).

A plan reaches the new reducer in one of two ways:

* As a list of caps, one for each bucket, wherever that says all: the reducer's one-time rebuild puts gradients into
  ready order in the second iteration that follows, and applies the caps.
* As lists of parameters, where caps do not say enough. With `find_unused_parameters` torch never rebuilds, so it keeps
  the buckets that the reducer was built with. With several dtypes or devices the caps start again for each of them,
  sparse gradients have buckets of their own, and a static graph may have unused parameters, which have no place in
  ready order; there the rebuild is made at once, and is handed the lists (`_Handed`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from dovetail.core.errors import Error
from dovetail.core.plan import Plan
from dovetail.train.integrations import check_environment

from .replaceable import REBUILT

HookCall = Callable[[Any, Any], "torch.futures.Future[torch.Tensor]"]
"""A communication hook: from its state and a bucket of gradients to a future of the reduced bucket."""

Members = tuple[tuple[int, ...], ...]
"""Indices of the parameters of every bucket, among those of the reducer; buckets in the order of their reduction."""

OLDEST = "2.11"
"""The first torch whose DDP takes a cap for each bucket."""


@dataclass(frozen=True)
class CommHook:
    """What torch calls in place of an all-reduce: a function with its state, or one of torch's own in C++."""

    name: str
    call: HookCall | None
    """None for a built-in hook."""
    state: Any = None
    builtin: Any = None
    """torch's constant for a built-in hook."""


@dataclass(frozen=True)
class ReducerBuckets:
    """What a reducer makes its buckets from."""

    config: Any
    """torch's own description of bucket caps."""
    members: Members | None = None
    """The parameters of every bucket, where caps do not say enough."""


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
    if "bucket_cap_mb_list" not in inspect.signature(TorchDDP.__init__).parameters:
        return (
            f"torch {torch.__version__} takes one cap for all buckets; a cap for each, as in torch {OLDEST}, is needed"
        )
    try:
        from torch.nn.parallel.distributed import _BucketCapacityConfig  # noqa: F401

        check_environment()
    except ImportError:
        return f"torch {torch.__version__} builds its reducer in a way this dovetail does not know"
    except Error as e:
        return str(e)
    return None


def parameter_name(name: str) -> str:
    """A parameter's name without what torch.compile puts before those of a compiled module."""
    return name.replace("_orig_mod.", "")


def reduced(ddp: TorchDDP) -> list[tuple[str, nn.Parameter]]:
    """The parameters whose gradients the reducer reduces, by name, in its own order."""
    names = {id(p): parameter_name(n) for n, p in ddp.module.named_parameters()}
    return [(names[id(p)], p) for p in ddp._build_params_for_reducer()[0]]


def kinds(ddp: TorchDDP) -> list[str]:
    """One word for each parameter of the reducer: gradients of the same kind may share a bucket.

    torch packs every dtype and device apart. A sparse gradient has a bucket of its own.
    """
    parameters, sparse = ddp._build_params_for_reducer()
    several = len({p.device for p in parameters}) > 1
    found = []
    for index, (parameter, is_sparse) in enumerate(zip(parameters, sparse, strict=True)):
        kind = str(parameter.dtype).removeprefix("torch.")
        kind += f" on {parameter.device}" if several else ""
        found.append(f"{kind}, sparse {index}" if is_sparse else kind)
    return found


def rebuilds(ddp: TorchDDP) -> bool:
    """Whether torch puts buckets into the order in which gradients become ready: not where some may be unused."""
    return bool(ddp.static_graph) or not ddp.find_unused_parameters


def capped(ddp: TorchDDP) -> bool:
    """Whether a cap for each bucket says all about the buckets: every gradient comes, and all are of one kind."""
    all_come = not ddp.static_graph and not ddp.find_unused_parameters
    return all_come and not any(ddp._build_params_for_reducer()[1]) and len(set(kinds(ddp))) == 1


def current(ddp: TorchDDP) -> ReducerBuckets:
    """What the module's reducer was made from."""
    return ReducerBuckets(ddp._bucket_config, getattr(ddp, "bucket_members", None))


def by_caps(caps_mib: list[float]) -> ReducerBuckets:
    """Buckets in ready order that close at these caps."""
    from torch.nn.parallel.distributed import _BucketCapacityConfig

    check_environment()
    return ReducerBuckets(_BucketCapacityConfig.create(None, caps_mib, False))  # type: ignore[arg-type]


def planned(ddp: TorchDDP, plan: Plan) -> ReducerBuckets:
    """What makes a reducer follow a plan."""
    if capped(ddp):
        return by_caps(plan.caps_mib())
    index = {name: i for i, (name, _) in enumerate(reduced(ddp))}
    members = tuple(tuple(index[name] for name in plan.tensors[b.start : b.stop]) for b in plan.buckets)
    return ReducerBuckets(ddp._bucket_config, members)


def own_members(ddp: TorchDDP, config: Any, order: Sequence[int]) -> Members:
    """The buckets that torch makes by itself of parameters that become ready in this order."""
    parameters, sparse = ddp._build_params_for_reducer()
    caps = list(config.per_bucket_bytes_caps) or [config.first_bucket_bytes_cap, config.bucket_bytes_cap]
    pack: Any = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
    if rebuilds(ddp):
        found, _ = pack([parameters[i] for i in order], caps, sparse, list(order))
    else:
        found, _ = pack(parameters, caps, sparse)
        found.reverse()
    return tuple(tuple(bucket) for bucket in found)


def own_policy(config: Any) -> str:
    """The name, in planning.policies, of the rule by which torch makes buckets of this description."""
    if config.first_bucket_bytes_cap < config.bucket_bytes_cap:
        return "ddp"
    return f"threshold:{config.bucket_bytes_cap / 2**20:g}"


def iterations(ddp: TorchDDP) -> int:
    """Iterations that the module's reducer has begun; none if it has no reducer. Only for one that is to be replaced.

    torch tells the number of the last iteration that was sampled for its log: afterwards every one is.
    """
    if ddp.reducer is None or ddp.logger is None:
        return 0
    ddp.reducer._set_ddp_runtime_logging_sample_rate(1)
    ddp.logger.set_runtime_stats_and_log()
    return int(ddp.logger._get_ddp_logging_data().ints_map.get("iteration", 0))


def replace(ddp: TorchDDP, buckets: ReducerBuckets, *, call: HookCall | None = None) -> None:
    """Gives the module a new reducer between two iterations. All ranks do it at the same point with the same buckets.

    `call` is registered as the communication hook, with the state of the user's; by default it is the user's own.
    A new reducer counts iterations from one on: what the old ones had counted is left in `iterations_before`.
    """
    ddp.iterations_before = getattr(ddp, "iterations_before", 0) + iterations(ddp)  # type: ignore[assignment]
    if ddp.logger is not None:
        ints = ddp.logger._get_ddp_logging_data().ints_map
        logged = {name: n for name, n in ints.items() if name.endswith("_time") or name == REBUILT}
        ddp.logged_before = logged  # type: ignore[assignment]
    ddp._remove_autograd_hooks()
    # `bucket_bytes_cap` stays: torch.compile cuts graphs by it, and the plan was made for graphs that are cut so.
    ddp._bucket_config = buckets.config
    ddp.bucket_bytes_cap_list = list(buckets.config.per_bucket_bytes_caps)
    ddp.bucket_members = buckets.members  # type: ignore[assignment]
    parameters, expect_sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    frozen = [
        p for p in parameters if not p.requires_grad
    ]  # only for now, as a discriminator is while its generator learns
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        with torch.inference_mode(False):  # buffers made inside it could never be written to again
            if buckets.members is None:
                ddp._ddp_init_helper(parameters, expect_sparse, names, ddp.static_graph)
            else:
                _build(ddp, buckets, parameters, expect_sparse, names)
            _restore(ddp)
            if buckets.members is not None and rebuilds(ddp):
                _hand(ddp, buckets.members)
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
    hook = comm_hook(ddp)
    if hook is not None:
        assert ddp.logger is not None
        ddp.logger._set_comm_hook_name(hook.name)
    if call is not None or (hook is not None and hook.call is not None):
        state = hook.state if hook is not None else None
        dist._register_comm_hook(ddp.reducer, state, call or hook.call)  # type: ignore[attr-defined,union-attr]
    elif hook is not None:
        dist._register_builtin_comm_hook(ddp.reducer, hook.builtin)  # type: ignore[attr-defined]


def _build(
    ddp: TorchDDP, buckets: ReducerBuckets, parameters: list[nn.Parameter], sparse: list[bool], names: dict[int, str]
) -> None:
    """A reducer that begins with these members of its buckets, with all else as torch has it."""
    assert buckets.members is not None
    ddp.reducer = dist.Reducer(  # type: ignore[attr-defined]
        [*parameters],
        [list(bucket) for bucket in buckets.members],
        [sum(parameters[i].nbytes for i in bucket) for bucket in buckets.members],
        ddp.process_group,
        sparse,
        ddp.bucket_bytes_cap,
        ddp.find_unused_parameters,
        ddp.gradient_as_bucket_view,
        names,
        buckets.config.first_bucket_bytes_cap,
        ddp.skip_all_reduce_unused_params,
        ddp._use_python_reducer,
        [],
        *([ddp.batched_grad_copy] if hasattr(ddp, "batched_grad_copy") else []),  # newer than what is required
    )
    ddp.logger = dist.Logger(ddp.reducer)  # type: ignore[attr-defined]
    ddp.reducer.set_logger(ddp.logger)
    ddp.logger.set_construction_data_and_log(
        type(ddp.module).__name__,
        ddp.device_ids or [],
        -1 if ddp.output_device is None else ddp.output_device,
        ddp.broadcast_buffers,
        any(isinstance(m, nn.SyncBatchNorm) for m in ddp.module.modules()),
        ddp.static_graph,
    )


def _restore(ddp: TorchDDP) -> None:
    """Tells a new reducer what torch told the one before it after it was built."""
    ddp._has_rebuilt_buckets = False
    assert ddp.logger is not None
    if (rate := getattr(ddp, "logging_sample_rate", None)) is not None:
        ddp.reducer._set_ddp_runtime_logging_sample_rate(rate)
    if ddp.static_graph:
        # A new reducer learns the graph in its first step, as at construction.
        ddp._static_graph_delay_allreduce_enqueued = False
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    if ddp._lazy_init_ran and any(hasattr(p, "_in_backward_optimizers") for p in ddp._module_parameters):
        ddp.reducer._set_optimizer_in_backward()  # type: ignore[attr-defined]
    if (metadata := getattr(ddp, "sparse_metadata", None)) is not None:
        ddp.reducer._set_sparse_metadata(metadata)


class _Handed(dist.ProcessGroup):
    """Stands in for the process group while a reducer rebuilds its buckets, and hands it lists of parameters.

    A reducer rebuilds once. It packs parameters by its caps, the first rank broadcasts the result, and all take over
    what they receive: the parameters of all buckets in a row and the number of buckets, then the length of each. Every
    rank has the same plan, so every rank receives it from here and nothing is sent.
    """

    def __init__(self, group: dist.ProcessGroup, members: Members) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        rows = [[*(i for bucket in members for i in bucket), len(members)], [len(bucket) for bucket in members]]
        self._rows = iter(rows)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        (tensor,) = tensors
        tensor.copy_(torch.tensor(next(self._rows), dtype=tensor.dtype))
        done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        done.set_result(tensors)
        return _distributed_c10d._create_work_from_future(done)  # type: ignore[attr-defined]


def _hand(ddp: TorchDDP, members: Members) -> None:
    """Makes the reducer's one rebuild now, so that it keeps these buckets."""
    handed = _Handed(ddp.process_group, members)
    ddp.reducer._update_process_group(handed)
    try:
        ddp.reducer._push_all_rebuilt_params()
        ddp._has_rebuilt_buckets = ddp.reducer._rebuild_buckets()
    finally:
        ddp.reducer._update_process_group(ddp.process_group)
