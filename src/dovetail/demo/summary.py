"""The end of the demonstration: a table of three lines, its footnotes, and a page of the run."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.table import Table

from dovetail import planning
from dovetail.core import files
from dovetail.core.errors import Error
from dovetail.core.network import Network
from dovetail.core.plan import Plan
from dovetail.core.profile import Profile
from dovetail.core.timeline import Timeline
from dovetail.emulate.contest import DOVETAIL, ContestOutcome
from dovetail.simulate.iteration import simulate
from dovetail.view import units

PAGE = Path("out") / "demo.html"
THEIRS, OURS = "torch's DDP", "dovetail"
NOTHING = "nothing: torch's were the best here"


@dataclass(frozen=True)
class Line:
    """One way to train, and the time of its iteration."""

    name: str
    seconds: float
    """Seconds of an iteration: the median if it ran, else predicted."""
    spread: tuple[float, float] | None
    """The 10th and 90th percentile; None if it did not run."""
    what: str


@dataclass(frozen=True)
class DemoRun:
    """What the contest measured, and what is predicted from it."""

    profile: Profile
    outcome: ContestOutcome
    network: Network
    """The measured network, under the name that the page shows."""
    kept: Plan
    """dovetail's buckets as this profile and this network see them; torch's where it kept those."""
    predicted: Timeline
    forward: Plan
    """The plan that hides communication behind forward too, on `halves`."""
    halves: Network


def demo_run(profile: Profile, outcome: ContestOutcome, *, network: str = "") -> DemoRun:
    from dovetail.train.data_parallel.tuning.tuning_report import halved

    links = msgspec.structs.replace(outcome.network, name=network or outcome.network.name)
    kept = planning.predict(outcome.kept or planning.plan(profile, links, policy="ddp"), profile, links)
    halves = msgspec.structs.replace(halved(links), name=f"{links.name}, each all-reduce in two halves")
    return DemoRun(
        profile=profile,
        outcome=outcome,
        network=links,
        kept=kept,
        predicted=msgspec.structs.replace(simulate(kept, profile, links), name=OURS),
        forward=planning.plan(profile, halves, overlap="forward"),
        halves=halves,
    )


def lines(s: DemoRun) -> list[Line]:
    """torch's DDP, dovetail, and dovetail with communication behind forward too.

    The third did not run. Its prediction is scaled by measured / predicted of the first, so that the lines compare.
    """

    def measured(policy: str) -> tuple[float, tuple[float, float]]:
        middle, low, high = np.quantile(s.outcome.entry(policy).seconds, [0.5, 0.1, 0.9]).tolist()
        return middle, (low, high)

    theirs, ours = s.outcome.entry("ddp"), s.outcome.entry(DOVETAIL)
    changed = f"in {ours.buckets}, cut so that more of them hide"
    if s.outcome.kept is None:
        changed = NOTHING
    first = Line(THEIRS, *measured("ddp"), f"gradients travel in {units.count(theirs.buckets, 'message')}")
    second = Line(OURS, *measured(DOVETAIL), changed)
    forward = s.forward.prediction.iteration * first.seconds / theirs.predicted
    gains = "hidden behind forward too" if forward < second.seconds else "no gain beyond that here"
    return [first, second, Line(f"{OURS} + forward", forward, None, f"predicted: {gains}")]


def table(found: list[Line], title: str) -> Table:
    shown = Table(title=title, title_justify="left")
    for name in ("", "time", "saved", "what changed"):  # 80 columns suffice
        shown.add_column(name, justify="left" if name in ("", "what changed") else "right")
    for i, line in enumerate(found):
        saved = _saved(1 - line.seconds / found[0].seconds) if i else ""
        shown.add_row(line.name, f"{line.seconds:.3f} s", saved, line.what)
    return shown


def _saved(share: float) -> str:
    """The share saved; a difference of less than half a per cent counts as none."""
    return f"{share:.1%}" if abs(share) >= 0.005 else "none"


def footnotes(s: DemoRun, found: list[Line]) -> list[str]:
    """What the table leaves out."""
    spreads = [f"{x.name} {x.spread[0]:.3f}–{x.spread[1]:.3f} s" for x in found if x.spread]
    off = s.outcome.entry(DOVETAIL).predicted / found[1].seconds - 1
    error = "right" if abs(off) < 0.005 else f"{abs(off):.0%} too {'high' if off > 0 else 'low'}"
    return [
        f"Four iterations of five took: {', '.join(spreads)}. dovetail's prediction for the second line was {error}.",
        "The third line did not run; it takes a second line in the script, dovetail.optimizer.",
    ]


def write_timelines(outcome: ContestOutcome, folder: Path) -> None:
    """One recorded iteration of torch's DDP and one of dovetail: ddp.json and dovetail.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for policy, name in (("ddp", THEIRS), (DOVETAIL, OURS)):
        files.write(folder / f"{policy}.json", msgspec.structs.replace(outcome.timelines[policy], name=name))


def export(s: DemoRun, path: Path | None = None) -> tuple[Path | None, str]:
    """Writes the page of this run as one file: its path, or None and one line that says why there is none.

    Without `path` it goes to out/ in the current folder, or else to the temporary folder.
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


def _contents(s: DemoRun) -> Any:
    from dovetail.view.page import sort

    ran = [msgspec.structs.replace(s.outcome.timelines["ddp"], name=THEIRS)]
    if s.outcome.kept is not None:
        ran.append(msgspec.structs.replace(s.outcome.timelines[DOVETAIL], name=OURS))
    else:  # both ran the same program: one picture
        ran[0] = msgspec.structs.replace(ran[0], name=f"{THEIRS}, which {OURS} kept")
    shown = ("timelines", "plans", "profiles", "networks", "scaling")
    found = sort(
        [s.profile, s.network, s.kept, s.forward, *ran, s.predicted],
        files=["a run of dovetail demo"],
        beside=[s.halves],
        only=shown,
    )
    return replace(found, notes=(_over_all(s),))


def _over_all(s: DemoRun) -> str:
    """The result over all iterations of the contest; one of each is drawn."""
    if s.outcome.kept is None:
        return f"{OURS} tried its plans in real iterations, found none that is faster, and kept torch's own buckets."
    theirs, ours, _ = lines(s)
    count, saved = len(s.outcome.entry(DOVETAIL).seconds), 1 - ours.seconds / theirs.seconds
    took = f"{THEIRS} took {units.seconds(theirs.seconds)} and {OURS} {units.seconds(ours.seconds)}"
    difference = f"{units.percent(abs(saved))} {'less' if saved >= 0 else 'more'}"
    return f"Drawn is one iteration of each. Over {count} iterations each, in turns, {took} (median): {difference}."


def as_json(found: list[Line]) -> list[dict[str, Any]]:
    return [
        {"name": x.name, "seconds": x.seconds, "spread": x.spread, "predicted": x.spread is None, "changed": x.what}
        for x in found
    ]
