"""One line for each training library, and what makes them follow a stored Plan.

`prepare.py` is for Accelerate and the Hugging Face Trainer, `lightning.py` for Lightning and Fabric, `ray_train.py` for
Ray Train; all construct dovetail's wrapper through `substitute.py`. Below is what a stored Plan needs: most libraries
hand keyword arguments through to torch's DistributedDataParallel, so `**plan.ddp_kwargs()` will do; Accelerate and the
Hugging Face Trainer keep a fixed list of arguments instead, and `apply` extends that list.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import sys
import time
import weakref
from functools import lru_cache
from typing import Any

from dovetail.core.errors import Error
from dovetail.core.plan import Plan

# Ways of training that build no DistributedDataParallel, by accelerate's names for them.
WITHOUT_DDP = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA")

PAUSE = 0.1
"""Seconds in which the threads of a process group have released their last collective."""

_kept: list[Any] = []
_owners: weakref.WeakSet[Any] = weakref.WeakSet()


def end_safely(owner: object) -> None:
    """Makes the process groups that `owner` holds, as a wrapped model does, end without a hang when it is dropped.

    When the last reference to a gloo group is dropped, torch joins the group's threads while it holds Python's lock; a
    thread that is just releasing its last collective waits for that lock. A script that ends right after its last step
    then hangs, or aborts where the interpreter is already shutting down (torch's issue 56297). So there is a pause
    without the lock just before the owner drops what it holds, and one when the process ends.
    """
    if owner not in _owners:
        _pause_at_exit()
        _owners.add(owner)
        weakref.finalize(owner, time.sleep, PAUSE).atexit = False


def keep(group: Any) -> None:
    """Keeps a process group that nobody else may hold: until it is destroyed and another one is kept, or to the end.

    See `end_safely` for what would happen otherwise.
    """
    _pause_at_exit()
    _kept[:] = [one for one in _kept if one is not group and _in_use(one)]
    _kept.append(group)


@lru_cache
def _pause_at_exit() -> None:
    atexit.register(time.sleep, PAUSE)


def _in_use(group: Any) -> bool:
    """Whether a process group has not been destroyed."""
    import torch.distributed as dist

    try:
        dist.get_backend(group)
    except (ValueError, RuntimeError):
        return False
    return True


def check_environment() -> None:
    """Refuses the one environment variable that makes torch apply a plan's bucket caps in reverse."""
    if os.environ.get("DDP_SET_LAST_BUCKET_CAP") == "1":  # torch takes no other value for yes
        raise Error("DDP_SET_LAST_BUCKET_CAP=1 makes torch apply bucket caps in reverse: unset it to use a plan")


def agree(plan: Plan) -> Plan:
    """Rank 0's plan, on every rank. A collective: all ranks call it, after the process group exists.

    Ranks that profile for themselves come to slightly different plans, but torch's first iteration takes its buckets
    from each rank's own caps: ranks that differ would wait for each other for ever, or add up the wrong gradients.
    A plan that every rank reads from one file needs no agreement.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return plan
        raise Error(
            "agree: ranks can agree on a plan only once they are connected: call torch.distributed.init_process_group "
            "first, or let every rank read one plan file"
        )
    keep(dist.group.WORLD)
    box: list[Plan] = [plan]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def buckets(model: Any) -> list[int]:
    """Bytes of the buckets that torch uses in a wrapped model, in the order of the gradients.

    Empty before the third step: in the second torch puts them into that order. Finds the DistributedDataParallel inside
    whatever a training library has put around it.
    """
    from torch.nn.parallel import DistributedDataParallel

    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            end_safely(module)
            data = module._get_ddp_logging_data()
            # Where parameters may be unused torch keeps the buckets that it began with.
            kept = module.find_unused_parameters and not module.static_graph
            sizes = data.get("bucket_sizes" if kept else "rebuilt_bucket_sizes", "")
            return [int(size) for size in sizes.split(", ") if size]
    raise Error(f"buckets: found no DistributedDataParallel in a {type(model).__qualname__}")


def apply(plan: Plan, target: Any) -> None:
    """Makes an `accelerate.Accelerator` or a `transformers.Trainer` follow `plan`.

    Called on every rank, before the model is wrapped. First everything that would make torch ignore or misread the
    plan is refused; then the ranks agree on rank 0's plan; then the list of DDP arguments that the accelerator keeps is
    replaced by one that says the same and carries the plan's caps. When the model is wrapped, torch gets them.
    """
    accelerate = sys.modules.get("accelerate")  # a target from accelerate means that it was imported
    accelerator = getattr(target, "accelerator", target)
    if accelerate is None or not isinstance(accelerator, accelerate.Accelerator):
        raise Error(
            "plan.apply: expected an accelerate.Accelerator or a transformers.Trainer, "
            f"got {type(target).__module__}.{type(target).__qualname__}; whatever takes DistributedDataParallel's "
            "arguments (torch, Lightning, Fabric, Ray Train) takes **plan.ddp_kwargs()"
        )
    check_environment()
    plan.ddp_kwargs()  # raises where torch cannot follow the plan
    _check_accelerator(plan, accelerator)
    if target is not accelerator:
        _check_trainer(plan, target)
    accelerator.ddp_handler = with_arguments(accelerator.ddp_handler, bucket_cap_mb_list=agree(plan).caps_mib())


def _check_accelerator(plan: Plan, accelerator: Any) -> None:
    kind = accelerator.distributed_type.value
    if kind in WITHOUT_DDP:
        raise Error(
            f"plan.apply: this accelerator trains with {kind}, which has none of DistributedDataParallel's buckets"
        )
    # Accelerate remembers what it prepared; a plan for a second, different model still comes in time.
    if any(_size(model) == (len(plan.tensors), plan.bytes) for model in accelerator._models):
        raise Error("plan.apply: too late, the model is already prepared; call it before prepare() or train()")
    handler = accelerator.ddp_handler
    if handler is not None and handler.find_unused_parameters and not handler.static_graph:
        raise Error(
            "plan.apply: with find_unused_parameters torch never puts its buckets in the order of the gradients, so it "
            "cannot follow a plan; set ddp_find_unused_parameters=False (Trainer) or find_unused_parameters=False"
        )


def _check_trainer(plan: Plan, trainer: Any) -> None:
    """What only a Trainer can tell: its model, and whether it writes DDP's arguments anew when training starts."""
    tensors, nbytes = _size(trainer.model)
    if (tensors, nbytes) != (len(plan.tensors), plan.bytes):
        raise Error(
            f"plan for {plan.profile!r} does not fit this model: expected {len(plan.tensors)} tensors and {plan.bytes} "
            f"bytes of gradients, got {tensors} and {nbytes}"
        )
    wrap = getattr(type(trainer), "_wrap_model", None)
    if "ddp_handler" in getattr(getattr(wrap, "__code__", None), "co_names", ()):
        import transformers

        raise Error(
            f"plan.apply: transformers {transformers.__version__} sets DistributedDataParallel's arguments again when "
            "training starts, so a plan would be lost; it needs a newer transformers (5 is tested)"
        )


def _size(module: Any) -> tuple[int, int]:
    """(tensors, bytes) that get a gradient."""
    trained = [p for p in module.parameters() if p.requires_grad]
    return len(trained), sum(p.numel() * p.element_size() for p in trained)


def with_arguments(handler: Any, **arguments: Any) -> Any:
    """A kwargs handler of Accelerate's that says what `handler` says, communication hooks included, and `arguments`.

    Accelerate hands on fields that differ from their defaults, so an argument that it does not know becomes a field.
    """
    if handler is None:
        from accelerate.utils import DistributedDataParallelKwargs

        handler = DistributedDataParallelKwargs()
    kind = type(handler)
    known = {f.name for f in dataclasses.fields(handler)}
    if missing := [name for name in arguments if name not in known]:
        fields = [(name, Any, dataclasses.field(default="")) for name in missing]  # None would be an argument
        kind = dataclasses.make_dataclass(kind.__name__, fields, bases=(kind,))
    said = {f.name: getattr(handler, f.name) for f in dataclasses.fields(handler) if f.init}
    return kind(**{**said, **arguments})
