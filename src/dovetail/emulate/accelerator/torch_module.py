"""`torch.emu`: what torch and its libraries ask of a device's module, by the names that `torch.cuda` has."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

import torch

from dovetail.core.errors import Error

native: Any = None
"""The extension; set when the accelerator is loaded."""

PRIVATE_USE: int = torch._C._autograd.DeviceType.PrivateUse1.value
"""The number of the device type, as streams have it."""

DeviceLike = torch.device | str | int | None

Stream = torch.Stream
Event = torch.Event
default_generators: tuple[torch.Generator, ...] = ()
"""One generator per device; filled when the accelerator is loaded."""


def open_with(extension: Any) -> None:
    """Takes the extension, once it has been started."""
    global native, default_generators
    native = extension
    default_generators = tuple(native.default_generator(i) for i in range(native.device_count()))


def loaded() -> Any:
    """The extension; raises one line where the accelerator is not loaded."""
    if native is None:
        raise Error("the emulated accelerator is not loaded: call dovetail.emulate.accelerator.load()")
    return native


def index_of(device: DeviceLike = None) -> int:
    """The index of a device; that of the current one for None and for "emu"."""
    if device is None:
        return int(native.current_device())
    if isinstance(device, int):
        return device
    chosen = torch.device(device)
    if chosen.type != "emu":
        raise ValueError(f"Expected an emu device, but got: {device}")
    return int(native.current_device()) if chosen.index is None else chosen.index


# --- Devices ----------------------------------------------------------------------------------------------------------


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return not _is_in_bad_fork()


def init() -> None:
    """Does nothing: the device is ready once it is loaded."""


def _lazy_init() -> None:
    pass


def _is_in_bad_fork() -> bool:
    return bool(native.forked())


def device_count() -> int:
    return int(native.device_count())


def current_device() -> int:
    return int(native.current_device())


def set_device(device: DeviceLike) -> None:
    native.set_device(index_of(device))


class device:  # the name that torch looks for
    """Makes a device the current one inside a `with` block."""

    def __init__(self, device: DeviceLike) -> None:
        self.index = index_of(device)

    def __enter__(self) -> None:
        self.before = current_device()
        native.set_device(self.index)

    def __exit__(self, *raised: object) -> None:
        native.set_device(self.before)


class device_of(device):
    """Makes the device of a tensor the current one inside a `with` block; of a tensor elsewhere it does nothing."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.device if tensor.device.type == "emu" else None)


def get_device_name(device: DeviceLike = None) -> str:
    return f"dovetail emulated accelerator {index_of(device)}"


def get_device_capability(device: DeviceLike = None) -> tuple[int, int]:
    return (1, 0)


def get_device_properties(device: DeviceLike = None) -> types.SimpleNamespace:
    where = index_of(device)
    return types.SimpleNamespace(name=get_device_name(where), total_memory=native.memory(where)["limit"])


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def is_bf16_supported() -> bool:
    return True


# --- Streams ----------------------------------------------------------------------------------------------------------


def synchronize(device: DeviceLike = None) -> None:
    torch.accelerator.synchronize(index_of(device))


def current_stream(device: DeviceLike = None) -> torch.Stream:
    return torch.accelerator.current_stream(index_of(device))


def default_stream(device: DeviceLike = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=index_of(device), device_type=PRIVATE_USE)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def stream(stream: torch.Stream) -> torch.Stream:
    """A context in which `stream` is the current one: streams of torch are such contexts themselves."""
    return stream


# --- Memory -----------------------------------------------------------------------------------------------------------


def memory_allocated(device: DeviceLike = None) -> int:
    return int(native.memory(index_of(device))["allocated"])


def max_memory_allocated(device: DeviceLike = None) -> int:
    return int(native.memory(index_of(device))["allocated_peak"])


def memory_reserved(device: DeviceLike = None) -> int:
    return int(native.memory(index_of(device))["reserved"])


def max_memory_reserved(device: DeviceLike = None) -> int:
    return int(native.memory(index_of(device))["reserved_peak"])


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    native.reset_peak_memory(index_of(device))


def memory_stats(device: DeviceLike = None) -> dict[str, int]:
    return dict(torch.accelerator.memory_stats(index_of(device)))


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """Free and total memory of the device, in bytes."""
    now = native.memory(index_of(device))
    return max(0, now["limit"] - now["allocated"]), now["limit"]


def empty_cache() -> None:
    native.empty_cache()


def ipc_collect() -> None:
    """Does nothing: memory of an emulated device stays in its process."""


# --- Random numbers ---------------------------------------------------------------------------------------------------


def manual_seed(seed: int) -> None:
    default_generators[current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(seed)


def seed() -> int:
    return default_generators[current_device()].seed()


def seed_all() -> None:
    manual_seed_all(seed())


def initial_seed() -> int:
    return default_generators[current_device()].initial_seed()


def get_rng_state(device: DeviceLike = "emu") -> torch.Tensor:
    return default_generators[index_of(device)].get_state()


def set_rng_state(new_state: torch.Tensor, device: DeviceLike = "emu") -> None:
    default_generators[index_of(device)].set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [generator.get_state() for generator in default_generators]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for generator, state in zip(default_generators, new_states, strict=True):
        generator.set_state(state)
