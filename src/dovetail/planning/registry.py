"""Policies by name: one registry for every technique.

    POLICIES: Registry[Choose] = Registry("policy")
    POLICIES.add("single", "one bucket after backward", choose)                       "single"
    POLICIES.family("threshold", "MB", "a bucket closes at so many MiB", read)        "threshold:10"
    POLICIES.parse("threshold:10").value

As a mapping it holds the policies without an argument, in the order in which they were added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from dovetail.core.errors import Error

T = TypeVar("T")


@dataclass(frozen=True)
class Named(Generic[T]):
    """A policy as `parse` finds it."""

    name: str
    """As people write it, with the argument: "ddp", "threshold:10"."""
    description: str
    """One line for `--help`."""
    value: T


@dataclass(frozen=True)
class _Family(Generic[T]):
    argument: str
    """What stands after the colon, as `--help` shows it."""
    description: str
    read: Callable[[str], T]


class Registry(Mapping[str, T]):
    """Policies of one kind; `kind` is the word for one of them in error messages."""

    def __init__(self, kind: str = "policy") -> None:
        self._kind = kind
        self._fixed: dict[str, Named[T]] = {}
        self._families: dict[str, _Family[T]] = {}

    def add(self, name: str, description: str, value: T) -> None:
        assert name not in self._fixed, f"{name} is registered twice"
        self._fixed[name] = Named(name, description, value)

    def family(self, name: str, argument: str, description: str, read: Callable[[str], T]) -> None:
        """Adds `name:ARGUMENT`. `read` raises ValueError("what was expected, got …") for an argument that is wrong."""
        assert name not in self._families, f"{name}:{argument} is registered twice"
        self._families[name] = _Family(argument, description, read)

    def parse(self, text: str) -> Named[T]:
        """The policy that `text` names; an Error of one line that lists what exists if there is none."""
        if text in self._fixed:
            return self._fixed[text]
        name, colon, argument = text.partition(":")
        if not colon or name not in self._families:
            known = ", ".join(name for name, _ in self.described())
            raise Error(f"no {self._kind} {text!r}: expected one of {known}")
        family = self._families[name]
        try:
            return Named(text, family.description, family.read(argument))
        except ValueError as e:
            raise Error(f"{self._kind} {text!r}: expected {e}") from None

    def described(self) -> list[tuple[str, str]]:
        """(name, description) of every policy, for `--help`."""
        families = [(f"{name}:{f.argument}", f.description) for name, f in self._families.items()]
        return [(p.name, p.description) for p in self._fixed.values()] + families

    def __getitem__(self, name: str) -> T:
        return self._fixed[name].value

    def __iter__(self) -> Iterator[str]:
        return iter(self._fixed)

    def __len__(self) -> int:
        return len(self._fixed)
