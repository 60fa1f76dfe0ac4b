"""What the integrations share: constructing torch's DistributedDataParallel makes dovetail's, and its optimiser.

The class itself stays where it is and only learns to make its subclass. So code that imported it earlier is served too,
and every `isinstance(model, DistributedDataParallel)`, torch's own included, is as true as before; swapping the name in
torch's modules would break torch's own bookkeeping for torch.compile and uneven inputs. Subclasses that others derived
from it are left alone, and so is an object that is being unpickled (it has no arguments).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from dovetail.core.errors import Error

_here: ContextVar[bool] = ContextVar("torch's DistributedDataParallel makes dovetail's", default=False)


@contextmanager
def substituted() -> Iterator[None]:
    """Inside the block, constructing torch's DistributedDataParallel makes dovetail's, in this thread."""
    from torch.nn.parallel import DistributedDataParallel

    if "__new__" not in vars(DistributedDataParallel):
        substitute(DistributedDataParallel, wanted=_here.get)
    token = _here.set(True)
    try:
        yield
    finally:
        _here.reset(token)


def substitute(
    torchs: type[Any],
    *,
    wanted: Callable[[], bool] = lambda: True,
    left_alone: Callable[[type[Any]], None] = lambda _: None,
) -> None:
    """From now on, constructing `torchs`, torch's class, makes dovetail's whenever `wanted` says so.

    `left_alone` is told of classes of others that are derived from it, when one is constructed.
    """

    def new(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        if not (args or kwargs) or not wanted():
            return object.__new__(cls)
        from dovetail.train.data_parallel.module import DistributedDataParallel  # not before torch is imported whole

        if cls is not torchs and not issubclass(cls, DistributedDataParallel):
            left_alone(cls)
        return object.__new__(DistributedDataParallel if cls is torchs else cls)

    # Not to be taken off again: Python would then refuse arguments to the constructor.
    torchs.__new__ = staticmethod(new)  # type: ignore[assignment]


def wrap_optimizer(optimizer: Any, wrappers: list[Any]) -> Any:
    """`dovetail.optimizer` with the one of the wrapped models whose parameters the optimiser updates."""
    from dovetail.train.data_parallel.sharded.optimizer import optimizer as wrap

    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for wrapper in wrappers:
        if any(id(p) in updated for p in wrapper.parameters()):
            return wrap(optimizer, wrapper)
    raise Error("overlap: expected the model to be prepared before its optimiser, or together with it")
