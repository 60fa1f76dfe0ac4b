"""Profiles from the times at which the gradients of watched iterations were ready."""

from __future__ import annotations

from torch import nn

from dovetail.core.profile import Layer, LayerTime, ParameterTensor, Profile, exactly


def as_one_layer(
    name: str,
    device: str,
    tensors: list[tuple[str, nn.Parameter]],
    forward: float,
    ready: list[float],
    iterations: int,
) -> Profile:
    """A profile of which only the time of the whole forward pass is known; `tensors` and `ready` are in ready order."""
    layer = Layer(
        name="model",
        type=name,
        parameter_bytes=sum(size_of(p) for _, p in tensors),
        activation_bytes=0,
        times=(LayerTime(batch=1, forward=exactly(forward), backward=exactly(ready[-1])),),
    )
    source = f"{iterations} training iterations; the layers are taken as one, the tensors apart"
    found = tuple(_tensor(n, p, 0, t) for (n, p), t in zip(tensors, ready, strict=True))
    return Profile(name=name, device=device, source=source, batch=1, layers=(layer,), tensors=found)


def by_parameter(
    name: str,
    device: str,
    tensors: list[tuple[str, nn.Parameter]],
    forward: float,
    ready: list[float],
    used: list[float],
    iterations: int,
) -> Profile:
    """A profile with a layer for each parameter, from its first use on; all lists are in ready order."""
    turn = sorted(range(len(tensors)), key=lambda k: used[k])
    place = {k: position for position, k in enumerate(turn, 1)}
    starts = [0.0, *(used[k] for k in turn), forward]
    of_layer = [("before the first parameter", 0), *((tensors[k][0], size_of(tensors[k][1])) for k in turn)]
    layers = tuple(
        Layer(
            name=layer_name,
            type="parameter",
            parameter_bytes=nbytes,
            activation_bytes=0,
            times=(LayerTime(batch=1, forward=exactly(max(0.0, stop - start)), backward=exactly(0.0)),),
        )
        for (layer_name, nbytes), start, stop in zip(of_layer, starts[:-1], starts[1:], strict=True)
    )
    source = f"{iterations} training iterations; one layer for each parameter, from its first use on"
    found = tuple(_tensor(n, p, place[k], ready[k]) for k, (n, p) in enumerate(tensors))
    return Profile(name=name, device=device, source=source, batch=1, layers=layers, tensors=found)


def _tensor(name: str, parameter: nn.Parameter, layer: int, ready: float) -> ParameterTensor:
    dtype = str(parameter.dtype).removeprefix("torch.")
    return ParameterTensor(name=name, layer=layer, bytes=size_of(parameter), dtype=dtype, ready=ready)


def size_of(parameter: nn.Parameter) -> int:
    """Bytes of a parameter, which are those of its gradient."""
    return parameter.numel() * parameter.element_size()
