"""One training pass of a model, stamped at every layer: when each layer computed, and when each gradient was ready.

A *layer* is a module that directly owns parameters, or a leaf module, or the module that uses the parameters of a
child without calling it (as `nn.MultiheadAttention` does with its `out_proj`; such a child stays as a layer without
time).

Forward: entering a layer stamps it, and the time until the next stamp is its own. Leaving a layer that is nested in
another hands the clock back to that one; otherwise the clock stays with the layer that was just left, so functional
operations between two layers count to the earlier one, and the layers' times add up to the pass.

Backward: the node of the autograd graph that made a tensor runs first of all when the gradient flows back through
that tensor. So a layer's outputs carry a stamp of that layer on their node, and what enters a layer, if no layer
claimed it before, one of the layer that held the clock: functional operations count to the same layer in both
directions. These are hooks on nodes, not on modules: module hooks wrap the outputs, which in-place ReLUs forbid.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .clock import Clock


@dataclass(frozen=True)
class Pass:
    """One pass in seconds; layers and parameters by name."""

    forward: dict[str, float]
    backward: dict[str, float]
    ready: dict[str, float]
    """Seconds from the start of backward, in the order in which the gradients became ready."""
    outputs: dict[str, int]
    """Bytes of each layer's outputs."""


@dataclass(frozen=True)
class ModelLayers:
    """The layers of a model by name, in execution order."""

    modules: dict[str, nn.Module]
    called: frozenset[str]
    """Names of all modules that the forward pass called."""


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor of a nested output: tuples, mappings (Hugging Face's outputs are), dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def find_layers(model: nn.Module, run: Callable[[], torch.Tensor]) -> ModelLayers:
    """Calls `run`, which runs the model forward once, and finds the modules that it calls, in their order."""
    names = {module: name or type(model).__name__ for name, module in model.named_modules()}
    order: dict[nn.Module, None] = {}

    def enter(module: nn.Module, *_: Any) -> None:
        order.setdefault(module)

    handles = [module.register_forward_pre_hook(enter) for module in names]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    owners = [module for module in names if next(module.parameters(recurse=False), None) is not None]
    beside: dict[nn.Module, list[nn.Module]] = {}
    for module in owners:
        if module not in order:
            beside.setdefault(_caller(model, module, order), []).append(module)
    layers: dict[str, nn.Module] = {}
    for module in order:
        if module in beside or module in owners or next(module.children(), None) is None:
            layers[names[module]] = module
            layers.update({names[child]: child for child in beside.get(module, ())})
    return ModelLayers(modules=layers, called=frozenset(names[module] for module in order))


def _caller(model: nn.Module, module: nn.Module, called: Mapping[nn.Module, None]) -> nn.Module:
    """The innermost called module that holds one which is never called itself. The model itself always is called."""
    path = next(name for name, found in model.named_modules() if found is module)
    while path:
        path = path.rpartition(".")[0]
        holder = model.get_submodule(path)
        if holder in called:
            break
    return holder


class PassRecorder:
    """Runs passes of a model and stamps them. Use `recording`, which leaves no hook behind."""

    def __init__(self, model: nn.Module, layers: ModelLayers, clock: Clock) -> None:
        self._clock = clock
        self._stamps: list[tuple[str, Any]] = []
        self._ready: dict[str, Any] = {}
        self._inside: list[str] = []
        self._last = ""
        self._claimed: set[Any] = set()
        self._outputs: dict[str, int] = {}
        self.handles: list[Any] = []
        for name, module in layers.modules.items():
            if name in layers.called:
                enter, leave = self._hooks(name)
                # Always left again: recomputing a checkpoint stops in the middle, with an exception.
                self.handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
                self.handles.append(module.register_forward_hook(leave, always_call=True))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self.handles.append(parameter.register_post_accumulate_grad_hook(self._gradient(name)))

    def run(self, forward: Callable[[], torch.Tensor]) -> Pass:
        """`forward` gives the loss; its backward follows at once."""
        self._ready, self._outputs, self._last = {}, {}, ""
        self._inside.clear()
        try:
            self._stamps = forward_stamps = [("", self._clock.stamp())]
            loss = forward()
            middle = self._clock.stamp()
            self._stamps = backward_stamps = [("", middle)]
            loss.backward()
            end = self._clock.stamp()
        finally:
            self._claimed.clear()  # lets the graph go
        first, second = self._intervals(forward_stamps, middle), self._intervals(backward_stamps, end)
        ready = self._clock.seconds([middle, *self._ready.values()])[1:]
        return Pass(
            forward=first, backward=second, ready=dict(zip(self._ready, ready, strict=True)), outputs=self._outputs
        )

    def _intervals(self, stamps: list[tuple[str, Any]], end: Any) -> dict[str, float]:
        """Seconds per layer. Time before the first layer counts to it."""
        at = self._clock.seconds([stamp for _, stamp in stamps] + [end])
        names = [name for name, _ in stamps]
        if len(names) > 1:
            names[0] = names[1]
        spent: dict[str, float] = {}
        for name, start, stop in zip(names, at, at[1:], strict=False):
            spent[name] = spent.get(name, 0.0) + max(0.0, stop - start)
        return spent

    def _stamp(self, name: str) -> None:
        self._stamps.append((name, self._clock.stamp()))

    def _hooks(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            if self._last:
                self._claim((args, kwargs), self._last)
            self._inside.append(name)
            self._last = name
            self._stamp(name)

        def leave(_: nn.Module, __: Any, output: Any) -> None:
            self._claim(output, name)
            self._outputs[name] = self._outputs.get(name, 0) + sum(t.nbytes for t in tensors_in(output))
            self._inside.pop()
            if self._inside:
                self._last = self._inside[-1]
                self._stamp(self._last)

        return enter, leave

    def _claim(self, value: Any, name: str) -> None:
        """The nodes that made these tensors belong to this layer, unless they belong to one already."""
        for tensor in tensors_in(value):
            node = tensor.grad_fn
            if node is not None and node not in self._claimed:
                self._claimed.add(node)
                node.register_prehook(lambda _: self._stamp(name))

    def _gradient(self, name: str) -> Callable[[torch.Tensor], None]:
        def ready(_: torch.Tensor) -> None:
            self._ready.pop(name, None)  # accumulated in parts: ready when the last one is in
            self._ready[name] = self._clock.stamp()

        return ready


@contextmanager
def recording(model: nn.Module, layers: ModelLayers, clock: Clock) -> Iterator[PassRecorder]:
    recorder = PassRecorder(model, layers, clock)
    try:
        yield recorder
    finally:
        for handle in recorder.handles:
            handle.remove()


@contextmanager
def untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Whatever happens inside: gradients, buffers, modes and random state are as before afterwards.

    A model in evaluation mode is put into training mode; one in training mode keeps the modes of its parts, since
    somebody may have frozen some on purpose.
    """
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    modes = [(module, module.training) for module in model.modules()]
    devices = [] if device.type == "cpu" else [device]
    with (
        torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type),
        torch.enable_grad(),
    ):
        try:
            if not model.training:
                model.train()
            yield
        finally:
            with torch.no_grad():
                for parameter, gradient in gradients:
                    parameter.grad = gradient
                for module, name, buffer, content in buffers:
                    buffer.copy_(content)
                    setattr(module, name, buffer)
                for module, training in modes:
                    module.training = training
