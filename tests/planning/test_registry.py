"""One registry for the policies of every technique: found by name, described for --help, refused in one line."""

from __future__ import annotations

import pytest

from dovetail.core.errors import Error
from dovetail.planning.burst.rules import POLICIES as BURST
from dovetail.planning.depth.planner import POLICIES as DEPTH
from dovetail.planning.merge.policies import POLICIES as MERGE
from dovetail.planning.registry import Registry
from dovetail.planning.sharing.policies import POLICIES as SHARING
from dovetail.planning.sharing.policies import SchedulingPolicy, policy, register


def numbers() -> Registry[int]:
    made: Registry[int] = Registry("number")

    def read(argument: str) -> int:
        if not argument.isdecimal():
            raise ValueError(f"times:N with N a whole number, got {argument!r}")
        return int(argument)

    made.add("one", "the first", 1)
    made.add("two", "the second", 2)
    made.family("times", "N", "so many", read)
    return made


def test_a_policy_is_found_by_its_name_with_or_without_an_argument() -> None:
    found = numbers().parse("times:12")
    assert (found.name, found.description, found.value) == ("times:12", "so many", 12)
    assert numbers().parse("two").value == numbers()["two"] == 2


def test_help_lists_policies_in_their_order_and_families_with_their_argument() -> None:
    assert numbers().described() == [("one", "the first"), ("two", "the second"), ("times:N", "so many")]
    assert list(numbers()) == ["one", "two"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("three", "no number 'three': expected one of one, two, times:N"),
        ("times", "no number 'times': expected one of one, two, times:N"),
        ("one:2", "no number 'one:2': expected one of one, two, times:N"),
        ("times:x", "number 'times:x': expected times:N with N a whole number, got 'x'"),
    ],
)
def test_what_does_not_exist_is_one_line_that_lists_what_does(text: str, line: str) -> None:
    with pytest.raises(Error) as e:
        numbers().parse(text)
    assert str(e.value) == line


@pytest.mark.parametrize("registry", [MERGE, DEPTH, BURST, SHARING], ids=["merge", "depth", "burst", "sharing"])
def test_every_policy_of_every_technique_has_one_line_for_help(registry: Registry[object]) -> None:
    described = registry.described()
    assert len({name for name, _ in described}) == len(described) > 0
    assert all(text and "\n" not in text for _, text in described)
    assert all(registry.parse(name).name == name for name in registry)


def test_a_scheduling_policy_is_added_by_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SHARING, "_fixed", dict(SHARING._fixed))
    register(SchedulingPolicy("gang-las", order="las"), "exclusive devices, least attained service first")
    assert policy("gang-las").order == "las"
    assert ("gang-las", "exclusive devices, least attained service first") in SHARING.described()
