"""Takes the times of a model's layers in a few iterations, so that what a rank loses can be named by layer.

While open, hooks that torch calls for every module note when a layer is entered and left; each output gets a hook for
the moment at which its gradient is there, and the nodes that add gradients to parameters get one that runs behind the
reducer's. `close` removes all of it, and none of it is part of the module: copies and pickles have no trace of it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from dovetail.measure.clock import Clock
from dovetail.measure.passes import tensors_in
from dovetail.train import agree, rank_times, stragglers
from dovetail.train.rank_times import Column, GradientMark, LayerVisit, RankIteration
from dovetail.train.stragglers import RankComparison

from .eligibility import compiled
from .link_probe import PROBE, link_seconds


class LayerWatch:
    """Watches the layers of one module whose `parameters` are reduced."""

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter], clock: Clock) -> None:
        self._module, self._parameters, self._clock = module, parameters, clock
        named = ((name.replace("_orig_mod.", ""), p) for name, p in module.named_parameters())  # torch.compile's prefix
        owners = {id(p): name.rpartition(".")[0] for name, p in named}
        self.layers = [owners.get(id(p), "") for p in parameters]
        """Name of the module that each parameter belongs to."""
        self._names: dict[int, str] = {}
        self._visits: list[tuple[str, bool, Any]] = []
        self._outputs: list[tuple[str, Any]] = []
        self._handed: list[tuple[str, Any]] = []
        self._marked: tuple[weakref.ref[torch.Tensor], int] | None = None
        self._recording = False
        self._nodes: list[Node] = []
        self._removals: list[Callable[[], object]] = []

    def open(self, *, handing: bool = False) -> None:
        """Begins to watch. `handing`: torch's reducer takes gradients over in a hook of its own, which is timed too."""
        self.close()
        held = weakref.ref(self)
        if not _compiles(self._module):
            self._names = {id(m): name for name, m in self._module.named_modules()}

            def entered(module: nn.Module, _: Any) -> None:
                if (watch := held()) is not None:
                    watch._enter(module)

            def left(module: nn.Module, _: Any, output: Any) -> None:
                if (watch := held()) is not None:
                    watch._leave(module, output)

            self._until_closed(register_module_forward_pre_hook(entered))
            self._until_closed(register_module_forward_hook(left, always_call=True))
        for layer, parameter in zip(self.layers, self._parameters, strict=True) if handing else ():
            if parameter.requires_grad:
                node = get_gradient_edge(parameter).node
                self._nodes.append(node)  # torch makes another one, without this hook, if nobody holds it
                self._until_closed(node.register_hook(_handing(held, layer)))

    def close(self) -> None:
        while self._removals:
            self._removals.pop()()
        self._nodes.clear()
        self._names = {}
        self._recording = False

    def taken(self, zero: Any) -> tuple[list[LayerVisit], list[GradientMark]]:
        """What the last forward and backward pass have shown, in seconds after the stamp `zero`."""
        noted = [*(t for *_, t in self._visits), *(t for _, t in self._outputs), *(t for _, t in self._handed)]
        at = iter(self._clock.seconds([zero, *noted])[1:])
        visits: list[LayerVisit] = [(layer, entered, next(at)) for layer, entered, _ in self._visits]
        marks: list[GradientMark] = [("output", layer, next(at)) for layer, _ in self._outputs]
        return visits, [*marks, *(("handed", layer, next(at)) for layer, _ in self._handed)]

    def _until_closed(self, handle: RemovableHandle) -> None:
        # torch's tables hold these hooks: they must go as well when the module is dropped while it is watched.
        self._removals.append(weakref.finalize(self, handle.remove))

    def _enter(self, module: nn.Module) -> None:
        layer = self._names.get(id(module))
        if layer == "":
            self._visits, self._outputs, self._handed, self._marked = [], [], [], None
            self._recording = torch.is_grad_enabled()
        if layer is not None and self._recording:
            self._visits.append((layer, True, self._clock.stamp()))

    def _leave(self, module: nn.Module, output: Any) -> None:
        layer = self._names.get(id(module))
        if layer is None or not self._recording:
            return
        self._visits.append((layer, False, self._clock.stamp()))
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None and not self._has_hook(tensor):
                tensor.register_hook(self._gradient_there(layer))
                self._marked = weakref.ref(tensor), tensor._version
        if layer == "":
            self._recording = False  # checkpoints run layers again in backward

    def _has_hook(self, tensor: torch.Tensor) -> bool:
        """Whether the last layer left had the same output: that of a container is that of the last layer inside it."""
        return self._marked is not None and self._marked[0]() is tensor and self._marked[1] == tensor._version

    def _gradient_there(self, layer: str) -> Callable[[torch.Tensor], None]:
        held, outputs, clock = weakref.ref(self), self._outputs, self._clock

        def there(_: torch.Tensor) -> None:
            if (watch := held()) is not None and watch._outputs is outputs:
                outputs.append((layer, clock.stamp()))

        return there

    def _after_handing(self, layer: str) -> None:
        self._handed.append((layer, self._clock.stamp()))


def compare_ranks(
    mine: Sequence[RankIteration], gradients: int, group: dist.ProcessGroup, device: torch.device
) -> RankComparison:
    """All ranks beside each other, by as many iterations of each, with so many bytes of gradients.

    All ranks call it together, with nothing on the links.
    """
    if not mine:
        return RankComparison(iteration=0.0, iterations=0)
    columns: list[Column] = agree.from_first(rank_times.columns_of(mine), group, device)
    table = np.asarray(rank_times.table_of(mine, columns), dtype=np.float64).reshape(len(mine), len(columns))
    shared = agree.everyones(table.ravel().tolist(), group, device)
    found = stragglers.compare(columns, np.asarray(shared).reshape(-1, *table.shape))
    links = stragglers.slow_links(found, link_seconds(group, device), PROBE, gradients)
    if links:  # other work of the machine can delay one rank's messages: a second look must say the same
        again = {f.rank for f in stragglers.slow_links(found, link_seconds(group, device), PROBE, gradients)}
        links = tuple(f for f in links if f.rank in again)
    return replace(found, slow=tuple(sorted([*found.slow, *links], key=lambda f: -f.seconds)))


def _handing(held: weakref.ref[LayerWatch], layer: str) -> Callable[[Any, Any], None]:
    def handed(_: Any, __: Any) -> None:
        if (watch := held()) is not None:
            watch._after_handing(layer)

    return handed


def _compiles(module: nn.Module) -> bool:
    """Whether hooks could make compiled code compile again: something in the module, or a function, is compiled."""
    if compiled(module) or any(isinstance(m, torch.jit.ScriptModule) for m in module.modules()):
        return True
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"]["total"])
