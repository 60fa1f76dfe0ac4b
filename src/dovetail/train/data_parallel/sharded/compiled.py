"""Compiled code and parameters that are on their way.

torch.compile guards the class of every parameter, and what it has made reads their memory without asking. So a module
that was compiled waits for all of its parameters before it is entered, outside of the compiled region: inside it they
are plain Parameters in every iteration, and nothing is compiled anew. Modules around and behind it wait as always.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .arriving import settle

if TYPE_CHECKING:
    from .exchange import GradientExchange


def wait_outside(module: nn.Module) -> int:
    """Lets every compiled module in this one wait before it is entered; returns how many parameters these have.

    What was given this before is left as it is.
    """
    found: set[nn.Parameter] = set()
    for block in compiled_modules(module):
        parameters = list(block.parameters())
        found.update(parameters)
        if hasattr(block, "_orig_mod"):  # from torch.compile(module): its own hooks run outside of what was compiled
            if not any(isinstance(hook, WaitsForParameters) for hook in block._forward_pre_hooks.values()):
                block.register_forward_pre_hook(WaitsForParameters(parameters))
        elif not isinstance(block._compiled_call_impl, WaitsForParameters):  # from module.compile()
            block._compiled_call_impl = WaitsForParameters(parameters, block._compiled_call_impl)
    return len(found)


def compiled_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that went through torch.compile, each once."""
    seen: set[nn.Module] = set()

    def walk(inner: nn.Module) -> Iterator[nn.Module]:
        if inner in seen:
            return
        seen.add(inner)
        if hasattr(inner, "_orig_mod") or inner._compiled_call_impl is not None:
            yield inner
            return
        for child in inner.children():
            yield from walk(child)

    return walk(module)


@torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
def being_compiled() -> bool:
    """Whether whatever is called now would be compiled: the wrapper itself went through torch.compile."""
    return callable(torch._C._dynamo.eval_frame.get_eval_frame_callback())


@torch.compiler.disable  # type: ignore[untyped-decorator]
def begin_pass(
    exchange: GradientExchange, module: nn.Module, synchronises: bool, whole: bool, then: Callable[[], object]
) -> None:
    """Prepares the exchange for a forward pass of the module, and calls `then` if backward will synchronise.

    `whole`: what comes is compiled, so all parameters must be whole. Nothing in here is compiled itself.
    """
    if exchange.passes == 0:
        exchange.compiled = wait_outside(module)
    if whole:
        exchange.settle()
    if synchronises:
        exchange.arm()
        then()


class WaitsForParameters:
    """Waits for these parameters, and then calls what it was given, if anything."""

    def __init__(self, parameters: list[nn.Parameter], then: Any = None) -> None:
        self._parameters, self._then = parameters, then

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for parameter in self._parameters:
            settle(parameter, last=True)
        return None if self._then is None else self._then(*args, **kwargs)
