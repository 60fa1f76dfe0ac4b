"""Which models can have planned buckets, which can be exchanged (the second line), and the buckets these begin with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from dovetail.core import files
from dovetail.core.errors import Error
from dovetail.core.plan import MIB, Bucket, BucketKind, Plan
from dovetail.train.integrations import check_environment

from . import reducer
from .sharded.shard_layout import check_memory
from .tuning.trials import Tuning

FIRST_BUCKET, BUCKET = 1 * MIB, 25 * MIB
"""Sizes of buckets in bytes before anything was measured: torch's own."""

PLAN_VARIABLE = "DOVETAIL_PLAN"
"""Environment variable that replaces `plan="auto"`: the path of a stored plan, or "off"."""

WORDS: dict[str, tuple[str | None, ...]] = {
    "overlap": ("forward", None),
    "memory": ("time", "shard"),
    "precision": ("full", "bf16", "int8", "auto"),
}
"""What the wrapper's own arguments may say."""

REFUSED = {
    "mixed_precision": "DDP's own mixed precision (autocast works)",
    "delay_all_reduce_named_params": "delayed all-reduces",
    "bucket_cap_mb_list": "a list of bucket caps",
    "device_mesh": "a device mesh",
}
"""Arguments of torch's wrapper that the exchange cannot work with."""
ARGUMENTS = (*REFUSED, "bucket_cap_mb")
"""Arguments of torch's wrapper that the second line must know."""

NamedParameters = Sequence[tuple[str, nn.Parameter]]


def check_words(**given: object) -> None:
    """Refuses words that the wrapper does not know."""
    for argument, word in given.items():
        if word not in WORDS[argument]:
            raise Error(f"{argument}: expected one of {', '.join(map(repr, WORDS[argument]))}, got {word!r}")


def plan_to_use(plan: Plan | Literal["auto"] | None) -> Plan | Literal["auto"] | None:
    """The plan that was given, or what the environment names in place of "auto"."""
    named = os.environ.get(PLAN_VARIABLE, "")
    if plan != "auto" or not named:
        return plan
    return None if named == "off" else files.read(named, Plan)


def by_size(named: NamedParameters, order: Sequence[int], cap: int, kind: BucketKind) -> list[Bucket]:
    """Buckets of about `cap` bytes each; the first is smaller, so that communication starts early."""
    sizes = [_size(named[i][1]) for i in order]
    cuts, held, limit = [0], 0, min(FIRST_BUCKET, cap)
    for end, size in enumerate(sizes, 1):
        held += size
        if held >= limit or end == len(sizes):
            cuts.append(end)
            held, limit = 0, cap
    prefix = list(accumulate(sizes, initial=0))
    return [Bucket(start=a, stop=b, bytes=prefix[b] - prefix[a], kind=kind) for a, b in pairwise(cuts)]


def first_buckets(named: NamedParameters, plan: object, cap: int) -> tuple[list[int], Sequence[Bucket]]:
    """(indices of the parameters in gradient-ready order, buckets): a stored plan's, or torch's sizes, all split."""
    if isinstance(plan, Plan) and plan.overlap == "forward":
        index = {name: i for i, (name, _) in enumerate(named)}
        return [index[name] for name in plan.tensors], plan.buckets
    order = list(reversed(range(len(named))))  # as torch assumes until backward has shown its order
    kind: BucketKind = "whole" if isinstance(plan, Plan) else "split"
    return order, by_size(named, order, cap, kind)


def cap_of(arguments: dict[str, Any]) -> int:
    """Bytes of a bucket by the keyword arguments of the wrapper."""
    given = arguments.get("bucket_cap_mb")
    return BUCKET if given is None else max(1, int(given * MIB))


def check_fit(plan: Plan, trained: dict[str, nn.Parameter]) -> None:
    """Refuses a stored plan whose tensors are not those of the model."""
    if set(trained) != set(plan.tensors):
        odd = sorted(set(trained) ^ set(plan.tensors))[0]
        where = "the model" if odd in trained else "the plan"
        raise Error(f"plan for {plan.profile!r} does not fit this model: parameter {odd!r} is only in {where}")
    size = sum(_size(p) for p in trained.values())
    if size != plan.bytes:
        raise Error(
            f"plan for {plan.profile!r} does not fit this model: expected {plan.bytes} bytes of gradients, got {size}"
        )


def check_arguments(module: nn.Module, arguments: dict[str, Any]) -> None:
    """Refuses what cannot be exchanged: arguments of the wrapper, and optimisers inside backward."""
    for keyword, what in REFUSED.items():
        if arguments.get(keyword) is not None:
            raise Error(f"overlap: {keyword}: {what} cannot be combined with overlap='forward' or dovetail.optimizer")
    if any(hasattr(p, "_in_backward_optimizers") for p in module.parameters()):
        raise Error("overlap: optimisers that run inside backward need whole gradients")


def check_parameters(named: NamedParameters, sparse: Sequence[bool], precision: str) -> None:
    """Refuses parameters that do not fit into flat buckets."""
    first = named[0][1]
    for (name, parameter), is_sparse in zip(named, sparse, strict=True):
        if is_sparse:
            raise Error(f"overlap: the gradient of {name!r} is sparse, and buckets are dense")
        if parameter.device != first.device:
            raise Error(f"overlap: expected one device, got {first.device} and {parameter.device} ({name!r})")
        if type(parameter) is not nn.Parameter:
            raise Error(f"overlap: {name!r} is a {type(parameter).__qualname__}; expected a plain torch.nn.Parameter")
        if precision != "full" and parameter.dtype != torch.float32:
            raise Error(
                f"precision: {precision!r} is for parameters of torch.float32, got {parameter.dtype} ({name!r})"
            )
    check_memory(named)


def check_agreement(mine: object, group: dist.ProcessGroup) -> None:
    """Refuses arguments that differ among ranks: these would wait for each other for ever."""
    given: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(given, mine, group=group)
    for rank, theirs in enumerate(given):
        if theirs != given[0]:
            raise Error(
                "plan, tuning, memory, precision, bucket_cap_mb, find_unused_parameters: expected the same on all "
                f"ranks, but rank {rank} was given others than rank 0"
            )


def compiled(module: nn.Module) -> bool:
    """Whether the module or one inside it went through torch.compile."""
    return any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None for m in module.modules())


def _size(parameter: nn.Parameter) -> int:
    return parameter.numel() * parameter.element_size()


def ddp_keywords(plan: Plan, module: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    """torch's keyword arguments for the buckets of a stored plan, as far as these can say what its buckets are."""
    for keyword in ("bucket_cap_mb", "bucket_cap_mb_list"):
        if given.get(keyword) is not None:
            raise Error(f"{keyword}: the plan already says how large buckets are; give one or the other")
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    named = ((n, p) for n, p in module.named_parameters() if p.requires_grad and n not in ignored)
    check_fit(plan, {reducer.parameter_name(n): p for n, p in named})
    if plan.overlap == "forward" or len(plan.dtypes) > 1:
        return {}  # followed from `dovetail.optimizer` on, or from the second reducer on
    check_environment()
    return plan.ddp_kwargs()


def agreed_reason(ddp: TorchDDP, plan: Plan | str | None, tuning: Tuning) -> str | None:
    """The reason why no rank plans, or None if all do: ranks with different arguments would wait for each other."""
    asked = (plan.tensors, tuple(plan.caps_mib())) if isinstance(plan, Plan) else None
    reason = unplannable(ddp)
    if plan != "auto":
        reason = "planning is switched off on another rank"
    elif ddp._bucket_config.has_custom_per_bucket_caps:
        reason = "bucket_cap_mb_list already says where to cut"
    given: list[Any] = [None] * dist.get_world_size(ddp.process_group)
    dist.all_gather_object(given, (asked, tuning, reason), group=ddp.process_group)
    for rank, (their_plan, their_tuning, _) in enumerate(given):
        if (their_plan, their_tuning) != given[0][:2]:
            raise Error(f"plan, tuning: expected the same on all ranks, but rank {rank} was given others than rank 0")
    return next((r for _, _, r in given if r is not None), None)


def unplannable(ddp: TorchDDP) -> str | None:
    """The reason why there are no buckets of this module to plan, or None."""
    if reason := reducer.unsupported():
        return reason
    checks: list[tuple[bool, str]] = [
        (dist.get_world_size(ddp.process_group) < 2, "one rank has nobody to communicate with"),
        (
            ddp._use_python_reducer,
            "with torch._dynamo.config.optimize_ddp='python_reducer' the compiler makes the all-reduces, not a reducer",
        ),
        (
            ddp._delay_all_reduce_all_params,
            "delay_all_reduce_named_params has every gradient travel in one all-reduce, which leaves nothing to cut",
        ),
        (
            ddp.mixed_precision is not None,
            "DDP's own mixed precision casts parameters under the reducer, which only an accelerator can show to work "
            "with other buckets (autocast and parameters of fewer bits are planned with)",
        ),
    ]
    return next((reason for holds, reason in checks if holds), None)


def unrecordable(ddp: TorchDDP) -> str | None:
    """The reason why times of this module's buckets cannot be taken, or None."""
    if any(ddp._build_params_for_reducer()[1]):
        return "some gradients are sparse, and the hook that takes times knows dense buckets only"
    return unplannable(ddp)
