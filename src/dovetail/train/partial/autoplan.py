"""Makes a depth plan where none is given: profiles the model on the first batch that it gets.

The first rank profiles while the others wait, so that nothing disturbs its times; then it plans and broadcasts the
plan. Gradients, buffers, modes and random state are afterwards as they were.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dovetail.core.depth_plan import DepthPlan
from dovetail.core.errors import Error
from dovetail.measure.batches import size
from dovetail.planning.depth import planner
from dovetail.train import agree

PROFILED_STEPS = 5


def _policy_of(name: str) -> str:
    """The planning policy behind a name: the guard starts from the ladder, which is its floor."""
    return "ladder" if name == "guard" else name


def first_plan(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, policy: str, group: dist.ProcessGroup
) -> DepthPlan:
    """A plan for this model on batches like this one. A collective: all ranks call it."""
    device = next(module.parameters()).device
    answer: DepthPlan | str = ""
    if dist.get_rank(group) == 0:
        try:
            answer = _plan(module, args, kwargs, policy, dist.get_world_size(group))
        except Exception as e:  # whatever it is, all ranks must hear of it
            answer = f"no depth plan could be made from the first batch: {e}"
    answer = agree.from_first(answer, group, device)
    if isinstance(answer, str):
        raise Error(answer)
    return answer


def _plan(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], policy: str, workers: int) -> DepthPlan:
    from dovetail import measure

    batch: Any = args or kwargs
    if args and kwargs:
        batch = dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
    if isinstance(batch, dict):  # other arguments, such as flags, have no batch dimension
        batch = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    profile = measure.profile(module, batch, steps=PROFILED_STEPS, warmup=1, batches=[size(batch)])
    return planner.plan(profile, workers=workers, policy=_policy_of(policy))
