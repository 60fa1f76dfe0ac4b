"""Counts the cost of a model's layers instead of measuring it: the result is the same on every machine.

One forward pass runs with every operation intercepted. Floating-point operations, by torch's own formulas, and bytes
read and written are converted to seconds at a nominal speed and counted for the layer that was entered last. Backward
is taken as twice forward. Only the proportions matter: they decide where a model is cut into segments of equal backward
time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from dovetail.core.profile import Layer, LayerTime, ParameterTensor, Profile, exactly
from dovetail.measure.passes import ModelLayers, find_layers, tensors_in

OPERATIONS = 5e10
"""Floating-point operations per second of the nominal device."""
BYTES = 1e10
"""Bytes per second that the nominal device reads and writes."""
BACKWARD = 2.0
"""Backward time over forward time: the gradients of inputs and of weights cost a forward pass each."""


def counted(model: nn.Module, run: Callable[[], Any], samples: int) -> Profile:
    """A profile of nominal times. `run` runs the model forward on `samples` samples."""
    layers = find_layers(model, run)
    counter = _Counter()
    handles = [
        module.register_forward_pre_hook(counter.entering(name))
        for name, module in layers.modules.items()
        if name in layers.called
    ]
    handles += [
        module.register_forward_hook(counter.leaving(name))
        for name, module in layers.modules.items()
        if name in layers.called
    ]
    try:
        with counter:
            run()
    finally:
        for handle in handles:
            handle.remove()
    return _profile(model, layers, counter, samples)


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = {}
        self.outputs: dict[str, int] = {}
        self._layer = ""

    def entering(self, name: str) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._layer = name

        return enter

    def leaving(self, name: str) -> Callable[..., None]:
        def leave(_: nn.Module, __: Any, output: Any) -> None:
            self.outputs[name] = self.outputs.get(name, 0) + sum(t.nbytes for t in tensors_in(output))

        return leave

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        formula = flop_registry.get(getattr(func, "overloadpacket", func))
        operations = formula(*args, **kwargs, out_val=output) if formula is not None else 0
        moved = sum(t.nbytes for t in tensors_in((args, kwargs, output)))
        spent = operations / OPERATIONS + moved / BYTES
        self.seconds[self._layer] = self.seconds.get(self._layer, 0.0) + spent
        return output


def _profile(model: nn.Module, layers: ModelLayers, counter: _Counter, samples: int) -> Profile:
    names = list(layers.modules)
    spent = [counter.seconds.get(name, 0.0) for name in names]
    if names:
        spent[0] += counter.seconds.get("", 0.0)  # before the first layer
    home: dict[int, int] = {}
    for index, module in enumerate(layers.modules.values()):
        for parameter in module.parameters(recurse=False):
            home.setdefault(id(parameter), index)
    after = [BACKWARD * sum(spent[i:]) for i in range(len(names))]
    trained = [(n, p, home[id(p)]) for n, p in model.named_parameters() if p.requires_grad and id(p) in home]
    return Profile(
        name=type(model).__name__,
        device="nominal",
        emulated=True,
        source="operations and bytes counted, not measured",
        batch=samples,
        layers=tuple(
            Layer(
                name=name,
                type=type(module).__name__,
                parameter_bytes=sum(p.nbytes for p in module.parameters(recurse=False)),
                activation_bytes=counter.outputs.get(name, 0) // samples,
                times=(LayerTime(batch=samples, forward=exactly(s), backward=exactly(BACKWARD * s)),),
            )
            for (name, module), s in zip(layers.modules.items(), spent, strict=True)
        ),
        tensors=tuple(
            ParameterTensor(
                name=name,
                layer=layer,
                bytes=parameter.nbytes,
                dtype=str(parameter.dtype).removeprefix("torch."),
                ready=after[layer],
            )
            for name, parameter, layer in sorted(trained, key=lambda entry: -entry[2])
        ),
    )
