"""How the demonstration ends: three lines that anybody understands, and a page to look into."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.table import Table

from dovetail import planning
from dovetail.core.errors import Error
from dovetail.core.network import Network
from dovetail.core.plan import Plan
from dovetail.core.profile import Profile
from dovetail.core.timeline import Timeline
from dovetail.simulate.contest import DOVETAIL, Outcome
from dovetail.simulate.iteration import simulate
from dovetail.view import units

PAGE = Path("out") / "demo.html"
THEIRS, OURS = "torch's DDP", "dovetail"


@dataclass(frozen=True)
class Line:
    """One way to train, and what it takes."""

    name: str
    seconds: float
    """Of an iteration: the median, where it ran."""
    spread: tuple[float, float] | None
    """10 and 90 per cent; None where it did not run."""
    what: str


@dataclass(frozen=True)
class Story:
    """What was measured, with what follows from it."""

    profile: Profile
    outcome: Outcome
    kept: Plan
    """dovetail's buckets as this profile and this network see them; torch's where it kept those."""
    predicted: Timeline
    forward: Plan
    """What communication behind forward too is predicted to give, on `halves`."""
    halves: Network


def story(profile: Profile, outcome: Outcome) -> Story:
    from dovetail.train.hint import halved

    network = outcome.network
    kept = outcome.kept or planning.plan(profile, network, policy="ddp")
    kept = planning.predict(kept, profile, network)
    halves = msgspec.structs.replace(halved(network), name=f"{network.name}, each all-reduce in two halves")
    return Story(
        profile=profile,
        outcome=outcome,
        kept=kept,
        predicted=msgspec.structs.replace(simulate(kept, profile, network), name=OURS),
        forward=planning.plan(profile, halves, overlap="forward"),
        halves=halves,
    )


def lines(s: Story) -> list[Line]:
    """torch's DDP, dovetail, and dovetail with communication behind forward too, which is predicted."""

    def measured(policy: str) -> tuple[float, tuple[float, float]]:
        middle, low, high = np.quantile(s.outcome.entry(policy).seconds, [0.5, 0.1, 0.9]).tolist()
        return middle, (low, high)

    theirs, ours = s.outcome.entry("ddp"), s.outcome.entry(DOVETAIL)
    changed = f"the same gradients in {_messages(ours.buckets)}, cut where they hide best: one changed line"
    if s.outcome.kept is None:
        changed = "nothing: torch's own messages were the best here, so dovetail kept them"
    return [
        Line(THEIRS, *measured("ddp"), f"gradients travel in {_messages(theirs.buckets)}, torch's default"),
        Line(OURS, *measured(DOVETAIL), changed),
        Line(
            f'{OURS}, overlap="forward"',
            s.forward.prediction.iteration,
            None,
            "they travel behind the next forward pass too: two changed lines",
        ),
    ]


def _messages(count: int) -> str:
    return units.count(count, "message")


def table(found: list[Line], title: str) -> Table:
    shown = Table(title=title, title_justify="left")
    for name in ("", "seconds a step", "time saved", "what changed"):
        shown.add_column(name, justify="left" if name in ("", "what changed") else "right")
    first = found[0].seconds
    for i, line in enumerate(found):
        how = f"{line.spread[0]:.3f}–{line.spread[1]:.3f}" if line.spread else "predicted"
        saved = "" if not i else _saved(1 - line.seconds / first)
        shown.add_row(line.name, f"{line.seconds:.3f} ({how})", saved, line.what)
    return shown


def _saved(share: float) -> str:
    """Differences of less than half a per cent are none."""
    return f"{share:+.1%}" if abs(share) >= 0.005 else "none"


def export(s: Story, path: Path | None = None) -> tuple[Path | None, str]:
    """The page of this very run as one file: where it is, or None and one line that says why there is none.

    Without a name it goes to out/ in the current folder, or else to a temporary place.
    """
    from dovetail.view.page import export as write

    for name in [path] if path else [PAGE, Path(tempfile.gettempdir()) / "dovetail-demo.html"]:
        try:
            name.parent.mkdir(parents=True, exist_ok=True)
            write(_contents(s), name)
            return name, ""
        except (Error, OSError) as e:
            why = str(e)
            if "not built" in why:
                break
    return None, why


def _contents(s: Story) -> Any:
    from dovetail.view.page import sort

    called = {"ddp": THEIRS, DOVETAIL: OURS}
    ran = [msgspec.structs.replace(s.outcome.timelines[k], name=name) for k, name in called.items()]
    things = [s.profile, s.outcome.network, s.kept, s.forward, *ran, s.predicted]
    shown = ("timelines", "plans", "profiles", "networks", "scaling")
    return sort(things, files=["a run of dovetail demo"], beside=[s.halves], only=shown)


def as_json(found: list[Line]) -> list[dict[str, Any]]:
    return [
        {"name": x.name, "seconds": x.seconds, "spread": x.spread, "predicted": x.spread is None, "changed": x.what}
        for x in found
    ]
