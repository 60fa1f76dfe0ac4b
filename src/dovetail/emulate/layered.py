"""An emulated device whose layers are modules through which the iteration passes one by one.

`device.EmulatedModel` builds the whole graph of an iteration at the start of forward, which is all that reducing
gradients needs. Here a layer's module looks at its parameters when its turn comes and adds its own nodes to the graph.
So parameters that are still being gathered are waited for where they are needed, and FSDP's groups of modules work.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any, cast

import msgspec
import torch
from torch import Tensor, nn

from dovetail.core.profile import Profile

from .device import BackwardEnd, EmulatedModel, GradientReady, ParameterOwner


def layered(profile: Profile, *, batch: int | None = None) -> LayeredModel:
    """As `device.emulated`, for a profile whose gradients come layer by layer (`in_layer_order`)."""
    return LayeredModel(in_layer_order(profile), batch=batch)


def in_layer_order(profile: Profile) -> Profile:
    """The same tensors, the last layer's first, and no ready time before that of a tensor that comes earlier.

    Branches may finish in another order; modules in a row cannot. The n-th tensor gets the n-th ready time.
    """
    order = sorted(enumerate(profile.tensors), key=lambda item: (-item[1].layer, item[0]))
    times = [t.ready for t in profile.tensors]
    return msgspec.structs.replace(
        profile,
        tensors=tuple(msgspec.structs.replace(t, ready=at) for (_, t), at in zip(order, times, strict=True)),
    )


class LayeredModel(EmulatedModel):
    """See `layered`. Every parameter belongs to a module of its own path; the root holds none."""

    def __init__(self, profile: Profile, *, batch: int | None = None) -> None:
        super().__init__(profile, batch=batch)
        by_name = {t.name: g for t, g in zip(profile.tensors, self._ready, strict=True)}
        passes: list[tuple[tuple[nn.Module, ...], float]] = []
        for layer, (_, seconds) in enumerate(self.passes):
            names = [t.name for t in reversed(profile.tensors) if t.layer == layer]
            modules = []
            for path, members in groupby(names, key=lambda n: n.rpartition(".")[0]):
                assert path, "every parameter belongs to a module below the root"
                owner = cast(ParameterOwner, self.get_submodule(path))
                leaves = [(n.rpartition(".")[2], by_name[n]) for n in members]
                owner.graph = _ModuleGraph(owner, leaves, self)
                modules.append(owner)
            passes.append((tuple(modules), seconds))
        self.passes = passes

    def _graph(self) -> Tensor:
        return cast(Tensor, BackwardEnd.apply(self._root, self))  # type: ignore[no-untyped-call]

    def _enter(self, modules: tuple[nn.Module, ...], x: Tensor, chain: Tensor) -> Tensor:
        for module in modules:
            chain = module(chain)
        return chain


class _ModuleGraph:
    """What one module adds to the graph: a node for each of its parameters, the last ready first."""

    def __init__(self, owner: nn.Module, leaves: list[tuple[str, Any]], model: EmulatedModel) -> None:
        self._owner, self._leaves, self._model = owner, leaves, model

    def __call__(self, chain: Tensor) -> Tensor:
        for leaf, gradient in self._leaves:
            parameter = self._owner._parameters[leaf]
            assert parameter is not None
            parameter.detach()  # reads the values: waits for them if they are still being gathered
            if torch.is_grad_enabled():
                chain = GradientReady.apply(chain, parameter, gradient, self._model)  # type: ignore[no-untyped-call]
        return chain.clone()  # FSDP warns of views


def blocks(model: LayeredModel) -> list[list[nn.Module]]:
    """Modules with parameters in groups, as people wrap them for FSDP: each numbered block, and what lies between.

    "layer1.0.conv1" and "layer1.0.bn1" are of the block "layer1.0", "encoder.layer.3.output.dense" of
    "encoder.layer.3"; neighbours without a number ("conv1", "bn1") form a group.
    """
    paths = {module: path for path, module in model.named_modules()}
    owners = [module for modules, _ in model.passes for module in modules]
    return [list(group) for _, group in groupby(owners, key=lambda m: _block(paths[m]))]


def _block(path: str) -> str:
    parts = path.split(".")
    last = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return "" if last is None else ".".join(parts[: last + 1])
