"""Command-line arguments as values: counts of workers, and nouns from files, presets or the folder of a plan."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

if TYPE_CHECKING:
    from dovetail.core.burst_plan import BurstPlan
    from dovetail.core.depth_plan import DepthPlan
    from dovetail.core.files import Noun
    from dovetail.core.network import CollectiveName, Network
    from dovetail.core.plan import Plan
    from dovetail.core.profile import Profile

P = TypeVar("P", "Profile", "Network")

# `files.encode` writes kind, version and (profiles, networks, timelines) name first: enough to know a file by.
_HEAD = re.compile(r'\s*\{\s*"kind":\s*"([\w-]+)"')


def counts(text: str) -> list[int]:
    """ "4,8,12" lists, "4..2048" doubles from the first to the last; ascending, each once."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})\s*(?:\.\.\s*(\d{1,9})\s*)?", part)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= low <= high:
            raise typer.BadParameter(f'expected counts such as "4..2048" (doubling) or "4,8,12", got {text!r}')
        found.add(high)
        while low < high:
            found.add(low)
            low *= 2
    return sorted(found)


def collectives(text: str) -> list[CollectiveName]:
    from dovetail.core.network import COLLECTIVES

    wanted = [name.strip() for name in text.split(",")]
    if unknown := [name for name in wanted if name not in COLLECTIVES]:
        raise typer.BadParameter(f"expected some of {', '.join(COLLECTIVES)}, got {unknown[0]!r}")
    return [name for name in COLLECTIVES if name in wanted]


def memory_bytes(gib: float) -> int:
    if not math.isfinite(gib * 2**30):
        raise typer.BadParameter(f"--memory: expected GiB, got {gib}")
    return int(gib * 2**30)


def not_an_input(output: Path | None, *given: str | Path | None) -> None:
    """Refuses an output path that is also an input: the input would be overwritten."""
    if output is not None and any(_same(output, name) for name in given if name is not None):
        raise typer.BadParameter(f"{output}: it would be written over what it is made from; name another file")


def _same(one: Path, other: str | Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False  # one of them is not there, or no path at all but a preset or a model


def png_path(path: Path | None) -> Path | None:
    if path is not None and path.suffix.lower() != ".png":
        raise typer.BadParameter(f"expected a name that ends in .png, got {str(path)!r}")
    return path


def html_path(path: Path | None) -> Path | None:
    if path is not None and path.suffix.lower() not in (".html", ".htm"):
        raise typer.BadParameter(f"expected a name that ends in .html, got {str(path)!r}")
    return path


def read_profile(path: Path) -> Profile:
    from dovetail.core import files
    from dovetail.core.profile import Profile

    return files.read(path, Profile)


def read_plan(path: Path) -> Plan | DepthPlan | BurstPlan:
    """Reads a plan of any kind; any other file is refused with a line that says what a plan looks like."""
    from dovetail.core import files
    from dovetail.core.burst_plan import BurstPlan
    from dovetail.core.depth_plan import DepthPlan
    from dovetail.core.plan import Plan

    kind = _kind(path)
    if kind == BurstPlan.kind:
        return files.read(path, BurstPlan)
    return files.read(path, DepthPlan) if kind == DepthPlan.kind else files.read(path, Plan)


def read_network(name: str) -> Network:
    """A network from a file, or else a preset of that name."""
    from dovetail.core import files
    from dovetail.core.errors import Error
    from dovetail.core.network import Network

    if Path(name).exists() or name.endswith(".json") or "/" in name:
        return files.read(name, Network)
    from dovetail.measure.presets import preset

    try:
        return preset(name)
    except Error as e:
        raise Error(f"{name}: no such file, and {e}") from None


def profile_of(path: Path, plan: Plan | DepthPlan | BurstPlan) -> Profile:
    """The profile that a plan was made from."""
    from dovetail.core.errors import Error
    from dovetail.core.profile import Profile

    found = _beside(path, Profile, plan.profile)
    if found is None:
        raise Error(f"no profile named {plan.profile!r} beside {path}: say where it is with --profile")
    return found


def network_of(path: Path, plan: Plan | DepthPlan | BurstPlan) -> Network:
    """The network that a plan was made for: a file beside it, or else a preset."""
    from dovetail.core.errors import Error
    from dovetail.core.network import Network
    from dovetail.measure.presets import preset

    found = _beside(path, Network, plan.network)
    if found is not None:
        return found
    try:
        return preset(plan.network)
    except Error:
        raise Error(f"no network named {plan.network!r} beside {path}: say where it is with --network") from None


def sources(path: Path, plan: Plan | DepthPlan | BurstPlan) -> list[Path]:
    """The files beside a plan that it was made from."""
    from dovetail.core.network import Network
    from dovetail.core.profile import Profile

    found = [file for file, _ in _named(path, Profile, plan.profile)]
    return found + [file for file, _ in _named(path, Network, plan.network)]


def read_any(path: Path) -> Noun:
    """Reads the noun in a file, whatever its kind."""
    from dovetail.core import files
    from dovetail.core.burst_plan import BurstPlan
    from dovetail.core.depth_plan import DepthPlan
    from dovetail.core.errors import InputError
    from dovetail.core.job import Schedule
    from dovetail.core.network import Network
    from dovetail.core.plan import Plan
    from dovetail.core.profile import Profile
    from dovetail.core.timeline import Timeline

    known = (Profile, Network, Plan, BurstPlan, DepthPlan, Schedule, Timeline)
    nouns: dict[str, type[Noun]] = {n.kind: n for n in known}
    kind = _kind(path)
    if kind is None:
        # Reading it as any noun says what is wrong with a file that is missing, cut off or no JSON object.
        return files.read(path, Profile)
    if kind not in nouns:
        got = f"got {kind!r}" if kind else "missing"
        kinds = ", ".join(repr(k) for k in list(nouns)[:-1])
        raise InputError(path, "kind", f"expected {kinds} or 'timeline', {got}")
    return files.read(path, nouns[kind])


def _beside(plan: Path, noun: type[P], name: str) -> P | None:
    """The profile or network of that name among the files beside a plan.

    A plan names what it was made from but not where that is stored, so that a folder can move as a whole.
    """
    from dovetail.core import files
    from dovetail.core.errors import Error

    named = _named(plan, noun, name)
    found = {files.encode(value): value for _, value in named}
    if len(found) > 1:
        listed = ", ".join(path.name for path, _ in named)
        raise Error(f"several {noun.kind}s named {name!r} beside {plan} ({listed}): choose with --{noun.kind}")
    return next(iter(found.values()), None)


def _named(plan: Path, noun: type[P], name: str) -> list[tuple[Path, P]]:
    from dovetail.core import files
    from dovetail.core.errors import InputError

    found = []
    for path in sorted(plan.parent.glob("*.json")):
        if _head(path) == noun.kind:
            try:
                value = files.read(path, noun)
            except InputError:
                continue  # a broken file that nobody named is not this command's business
            if value.name == name:
                found.append((path, value))
    return found


def _head(path: Path) -> str | None:
    """Returns a file's kind if the file begins as our own writer begins it; reads a few bytes only."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            match = _HEAD.match(file.read(200))
    except OSError:
        return None
    return match[1] if match else None


def _kind(path: Path) -> str | None:
    """Returns the `kind` of a file; "" for a JSON object without one, None for anything else."""
    if head := _head(path):
        return head
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(data, dict):
        return None
    kind = data.get("kind", "")
    return kind if isinstance(kind, str) else ""


def doubts(job: Profile, net: Network, *, before: float, after: float) -> list[str]:
    """A line if going from `before` to `after` seconds is predicted from measurements too noisy to tell; else none."""
    from dovetail.core.profile import doubt

    line = doubt(1 - after / before if before else 0.0, job.noise, net.noise)
    return [] if line is None else [f"Doubtful: {line}."]
