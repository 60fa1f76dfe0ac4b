"""Lets a script that was written for CUDA devices train on the emulated accelerator, unchanged, in this process only.

Whatever names a CUDA device names an emulated one of the same number instead: strings, `torch.device`, `.cuda()`, the
functions and classes of `torch.cuda`, autocast and gradient scalers, checkpoints that are loaded to a device, and the
process groups `nccl` and `gloo`. The script sees devices of type "emu": code that compares a device's type with "cuda"
takes its other branch, and `is_cuda` is False. What `torch.cuda` has beyond the names below (graphs, for instance)
fails as it does without CUDA. Threads that the script starts itself get the functions of `torch.cuda`, but must name
the device by what the main thread has made.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

DEVICE = "emu"
GROUP = "eccl"

DELEGATED = (
    *("is_available", "is_initialized", "init", "device_count", "current_device", "set_device", "device", "device_of"),
    *("get_device_name", "get_device_capability", "get_device_properties", "is_bf16_supported", "synchronize"),
    *("current_stream", "default_stream", "set_stream"),
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "reset_peak_memory_stats"),
    *("memory_stats", "mem_get_info", "empty_cache", "ipc_collect"),
    *("manual_seed", "manual_seed_all", "seed", "seed_all", "initial_seed", "get_rng_state", "set_rng_state"),
    *("get_rng_state_all", "set_rng_state_all", "default_generators"),
)
"""Names of `torch.cuda` that the emulated accelerator's module has too."""

_installed: list[TorchFunctionMode] = []


def install() -> None:
    """From now on, in this process, CUDA devices are emulated ones. The accelerator must be loaded."""
    if _installed:
        return
    cuda: Any = torch.cuda
    module: Any = torch.get_device_module(DEVICE)
    for name in DELEGATED:
        setattr(cuda, name, getattr(module, name))
    cuda._lazy_init = lambda: None
    cuda.Stream, cuda.Event, cuda.stream = StandInStream, StandInEvent, _stream
    cuda.is_current_stream_capturing = lambda: False
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, lambda *_, **__: 0)
    given: Any = torch
    given.Generator = StandInGenerator
    _mapping_arguments(torch.autocast, "__init__", "device_type")
    _mapping_arguments(torch.amp.GradScaler, "__init__", "device")
    _mapping_arguments(torch, "load", "map_location")
    for place in (dist, dist.distributed_c10d):
        # Where no backend is named, torch takes the accelerator's own and forgets its name, which DDP asks for.
        _mapping_arguments(place, "init_process_group", "device_id", {"backend": GROUP})
        _mapping_arguments(place, "new_group", "device_id", {"backend": None})
        place.is_nccl_available = lambda: True  # type: ignore[attr-defined]
    mode: Any = StandInMode()
    mode.__enter__()
    _installed.append(mode)


def stand_in(device: Any) -> Any:
    """The emulated device in place of a CUDA device; anything else as it is. Mappings of devices are mapped."""
    if isinstance(device, str):
        name, colon, index = device.partition(":")
        return f"{DEVICE}{colon}{index}" if name == "cuda" else device
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device(DEVICE) if device.index is None else torch.device(DEVICE, device.index)
    if isinstance(device, dict):
        return {stand_in(key): stand_in(value) for key, value in device.items()}
    return device


def group_in_place_of(backend: Any) -> Any:
    """The backend in place of a script's: NCCL is the accelerator's own group, and gloo serves CUDA devices too."""
    if not isinstance(backend, str):
        return backend
    lower = backend.lower()
    if lower == "nccl":
        return GROUP
    if lower == "gloo":
        return f"cpu:gloo,{DEVICE}:{GROUP}"
    parts = [part.partition(":") for part in lower.split(",")]
    if any(device == "cuda" for device, colon, _ in parts if colon):
        return ",".join(f"{DEVICE}:{GROUP}" if device == "cuda" else f"{device}:{name}" for device, _, name in parts)
    return backend


class StandInMode(TorchFunctionMode):
    """While it is entered, functions of torch that are given a CUDA device get the emulated one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return _moved(*args, **(kwargs or {}))
        if func in _TAKE_A_DEVICE_BY_PLACE:
            args = tuple(map(stand_in, args))
        if kwargs and ("device" in kwargs or "type" in kwargs):
            kwargs = {k: stand_in(v) if k in ("device", "type") else v for k, v in kwargs.items()}
        return func(*args, **(kwargs or {}))


_TAKE_A_DEVICE_BY_PLACE = frozenset({torch.device, torch.Tensor.to, torch._C._nn._parse_to})


def _moved(tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **rest: Any) -> torch.Tensor:
    """What `tensor.cuda()` is here."""
    where = torch.device(DEVICE, device) if isinstance(device, int) else stand_in(device)
    if where is None:
        where = (
            tensor.device
            if tensor.device.type == DEVICE
            else torch.device(DEVICE, torch.accelerator.current_device_index())
        )
    return tensor.to(where, non_blocking=non_blocking, **rest)


class StandInStream(torch.Stream):
    """In place of `torch.cuda.Stream`: constructs a stream of the emulated accelerator."""

    def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> Any:
        return torch.Stream(device=DEVICE if device is None else _device(device), priority=priority)


class StandInEvent(torch.Event):
    """In place of `torch.cuda.Event`: constructs an event of the emulated accelerator."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, **_: Any) -> Any:
        return torch.Event(device=DEVICE, enable_timing=enable_timing, blocking=blocking)


_Generator = torch.Generator


class _AnyGenerator(type(_Generator)):  # type: ignore[misc]
    """Lets every generator count as an instance, also those that torch made itself."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Generator)


class StandInGenerator(_Generator, metaclass=_AnyGenerator):
    """In place of `torch.Generator`: constructs one for the emulated accelerator where CUDA is named."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return _Generator(device=stand_in(device))


def _device(device: Any) -> torch.device:
    return torch.device(DEVICE, device) if isinstance(device, int) else torch.device(stand_in(device))


def _stream(stream: torch.Stream | None) -> Any:
    """`torch.cuda.stream`: a context in which `stream` is the current one."""
    return contextlib.nullcontext() if stream is None else stream


def _mapping_arguments(owner: Any, name: str, device: str, group: Mapping[str, Any] | None = None) -> None:
    """Replaces a function by one that maps its argument `device`, and those of `group`, which have defaults here."""
    original: Callable[..., Any] = getattr(owner, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        if device in given.arguments:
            given.arguments[device] = stand_in(given.arguments[device])
        for argument, default in (group or {}).items():
            asked = given.arguments.get(argument)
            given.arguments[argument] = default if asked is None else group_in_place_of(asked)
        return original(*given.args, **given.kwargs)

    setattr(owner, name, mapped)
