"""Accelerate and the Hugging Face Trainer with dovetail's wrapper, in one line: `dovetail.prepare(accelerator)`.

Both construct torch's DistributedDataParallel in `Accelerator.prepare_model`. So that method, of this one accelerator,
constructs dovetail's in its place; with `overlap="forward"` the method for optimisers wraps them first.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from dovetail.core.errors import Error
from dovetail.core.network import Precision
from dovetail.core.plan import Plan

from . import WITHOUT_DDP, with_arguments
from .substitute import substituted, wrap_optimizer

Target = TypeVar("Target")

_DEFAULTS = {"plan": "auto", "tuning": None, "memory": "time", "precision": "full", "overlap": None}


def prepare(
    target: Target,
    *,
    overlap: Literal["forward"] | None = None,
    plan: Plan | Literal["auto"] | None = "auto",
    tuning: Any = None,
    memory: Literal["time", "shard"] = "time",
    precision: Precision | Literal["auto"] = "full",
) -> Target:
    """Makes an accelerate.Accelerator or a transformers.Trainer wrap models with `dovetail.DistributedDataParallel`.

    Called on every rank, before `accelerator.prepare(…)` or `trainer.train()`. The model that these wrap is then
    dovetail's, with the DDP arguments that were given to the library. With `overlap="forward"` its optimiser is
    wrapped with `dovetail.optimizer` as well, and a Trainer's checkpoints hold the optimiser's whole state.

    Args:
        target: the accelerator or the trainer; returned.
        overlap: "forward" for the second line: communication hides behind the next forward pass too.
        plan: as for the wrapper.
        tuning: as for the wrapper.
        memory: as for the wrapper.
        precision: as for the wrapper.
    """
    given = {"plan": plan, "tuning": tuning, "memory": memory, "precision": precision, "overlap": overlap}
    options = {name: value for name, value in given.items() if value != _DEFAULTS[name]}
    accelerate = sys.modules.get("accelerate")  # a target from accelerate means that it was imported
    accelerator = getattr(target, "accelerator", target)
    if accelerate is None or not isinstance(accelerator, accelerate.Accelerator):
        raise Error(
            "prepare: expected an accelerate.Accelerator or a transformers.Trainer, "
            f"got {type(target).__module__}.{type(target).__qualname__}"
        )
    _prepare_accelerator(accelerator, options)
    if target is not accelerator:
        _prepare_trainer(target, options)
    return target


def _prepare_accelerator(accelerator: Any, options: dict[str, Any]) -> None:
    kind = accelerator.distributed_type.value
    if kind in WITHOUT_DDP:
        raise Error(f"prepare: this accelerator trains with {kind}, which constructs no DistributedDataParallel")
    if accelerator._models:
        raise Error("prepare: too late, a model is already prepared; call it before accelerator.prepare() or train()")
    wrappers: weakref.WeakSet[Any] = weakref.WeakSet()

    @_replacing(accelerator, "prepare_model")
    def prepare_model(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        if options:
            accelerator.ddp_handler = with_arguments(accelerator.ddp_handler, **options)
        with substituted():
            made = original(model, *args, **kwargs)
        wrappers.add(getattr(made, "_orig_mod", made))
        return made

    if not options.get("overlap"):
        return

    @_replacing(accelerator, "prepare_optimizer")
    def prepare_optimizer(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(optimizer, "_is_accelerate_prepared", False) and accelerator.num_processes > 1:
            optimizer = wrap_optimizer(optimizer, list(wrappers))
        return original(optimizer, *args, **kwargs)

    @_replacing(accelerator, "prepare")
    def prepare(original: Callable[..., Any], *args: Any, device_placement: list[Any] | None = None) -> Any:
        """Models come first, whatever the order of the arguments: an optimiser needs its wrapped model."""
        import torch

        order = sorted(range(len(args)), key=lambda i: not isinstance(args[i], torch.nn.Module))
        placed = [device_placement[i] for i in order] if device_placement is not None else None
        made = original(*(args[i] for i in order), device_placement=placed)
        if len(args) == 1:
            return made
        return tuple(made[order.index(i)] for i in range(len(args)))


def _prepare_trainer(trainer: Any, options: dict[str, Any]) -> None:
    @_replacing(trainer, "create_accelerator_and_postprocess")  # a search for hyperparameters makes a new one
    def create_accelerator(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        _prepare_accelerator(trainer.accelerator, options)

    if not options.get("overlap"):
        return

    @_replacing(trainer, "_save_optimizer_and_scheduler")
    def save(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """All ranks come here, and one of them stores: so all gather the state first."""
        state = trainer.optimizer.state_dict()
        trainer.optimizer.state_dict = lambda: state
        try:
            original(*args, **kwargs)
        finally:
            del trainer.optimizer.state_dict


def _replacing(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Puts a function in place of a method of one object; the function gets the method as its first argument."""

    def replace(function: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, functools.wraps(original)(functools.partial(function, original)))

    return replace
