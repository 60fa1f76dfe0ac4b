"""Diagnosis: the report of `dovetail doctor`, as it is stored and sent."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from dovetail.core.files import Count, Index, Name, Noun, Record, Seconds

Outcome = Literal["passed", "failed", "not run"]

EMULATED = "emu"
"""The type of the emulated accelerator's devices."""


class Machine(Record, frozen=True, kw_only=True):
    """What the checks ran on. It names no host, user or path."""

    dovetail: Name
    torch: Name
    python: Name
    system: Name
    cores: Count
    device: Name
    """The type of the devices, as torch calls it: "cpu", "cuda", "emu"."""
    devices: tuple[str, ...]
    """One line for each that torch sees; none for "cpu"."""
    backend: Name
    """torch's own choice of a process group for that type of device."""
    runtime: dict[str, str] = msgspec.field(default_factory=dict)
    """Versions of what lies between torch and the device: driver, CUDA, cuDNN, NCCL."""
    settings: dict[str, str] = msgspec.field(default_factory=dict)
    """Environment variables that change how ranks compute or communicate."""


class AllReduceFit(Record, frozen=True, kw_only=True):
    """What an all-reduce among the ranks costs: latency + bytes / bytes_per_second."""

    latency: Seconds
    bytes_per_second: Annotated[float, msgspec.Meta(ge=0.0)]
    """0 where no message was large enough to tell."""
    error: Seconds
    """Median relative error of this law over the measured sizes."""
    largest: Index
    """Bytes of the largest message that was measured."""


class CheckResult(Record, frozen=True, kw_only=True):
    """How one check ended."""

    name: Name
    outcome: Outcome
    line: str
    """What was found in one line, or what failed."""
    seconds: Seconds = 0.0
    difference: Annotated[float, msgspec.Meta(ge=0.0)] | None = None
    """Largest difference of a parameter from the reference, as a share of the largest value in its tensor."""
    tolerance: Annotated[float, msgspec.Meta(ge=0.0)] | None = None
    """The largest difference that passes."""
    host_syncs: Annotated[float, msgspec.Meta(ge=0.0)] | None = None
    """Times that the host waited for the device, per step; None where the device does not count them."""
    sync_places: tuple[str, ...] = ()
    """The lines at which it did."""


class Diagnosis(Noun, frozen=True, kw_only=True):
    """A whole run of `dovetail doctor`."""

    kind: ClassVar[str] = "diagnosis"

    date: Name
    """When it ended, in UTC."""
    machine: Machine
    ranks: Count
    network: AllReduceFit | None
    """None where it could not be measured."""
    checks: Annotated[tuple[CheckResult, ...], msgspec.Meta(min_length=1)]
    seconds: Seconds
    """What all of it took."""

    @property
    def passed(self) -> bool:
        return all(check.outcome == "passed" for check in self.checks)
