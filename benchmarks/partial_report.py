"""Tables, checks and the picture of the quality study, from its lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from common import Check, console
from partial_tasks import TASKS

FIRST_TRIAL = ((0.88, 0.69), (0.94, 0.80))
"""(work, share of the ladder's gap closed) of the policies to beat."""

GUARD, PLAIN = "annealed guard ε=0.03", "guard"
"""The library's default guard, and the one whose bound does not follow the learning rate (ε = 0.2)."""

TWICE = "full, twice the steps"
"""Shows how far from its plateau full backpropagation ends; it is not a contestant."""

Runs = list[dict[str, Any]]


class Row:
    """One contestant of one task over its seeds."""

    def __init__(self, name: str, runs: dict[int, dict[str, Any]]) -> None:
        self.name, self.runs = name, runs

    def values(self, field: str, seeds: list[int] | None = None) -> np.ndarray:
        return np.array([self.runs[s][field] for s in sorted(seeds or self.runs)], dtype=np.float64)

    def mean(self, field: str) -> float:
        return float(self.values(field).mean())

    def spread(self, field: str) -> float:
        values = self.values(field)
        return float(values.std(ddof=1)) if len(values) > 1 else 0.0

    def above(self, other: Row, field: str = "loss") -> np.ndarray:
        """Differences seed by seed: the same seed starts from the same weights."""
        shared = sorted(set(self.runs) & set(other.runs))
        differences: np.ndarray = self.values(field, shared) - other.values(field, shared)
        return differences


def rows(runs: Runs, task: str) -> dict[str, Row]:
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for r in runs:
        if r["task"] == task:
            found.setdefault(r["contestant"], {})[r["seed"]] = r
    return {name: Row(name, by_seed) for name, by_seed in found.items()}


def closed(row: Row, all_rows: dict[str, Row]) -> float | None:
    """Share of the ladder's gap to full backpropagation that a contestant closes, over the seeds that all have."""
    full, ladder = all_rows.get("full"), all_rows.get("ladder")
    if full is None or ladder is None:
        return None
    seeds = sorted(set(row.runs) & set(full.runs) & set(ladder.runs))
    if not seeds:
        return None
    gap = float((ladder.values("loss", seeds) - full.values("loss", seeds)).mean())
    left = float((row.values("loss", seeds) - full.values("loss", seeds)).mean())
    return 1 - left / gap if gap > 0 else None


def gap_shows(all_rows: dict[str, Row]) -> bool:
    """Whether the ladder is worse than full backpropagation by more than two standard errors."""
    full, ladder = all_rows.get("full"), all_rows.get("ladder")
    if full is None or ladder is None:
        return False
    gaps = ladder.above(full)
    error = float(gaps.std(ddof=1)) / len(gaps) ** 0.5 if len(gaps) > 1 else 0.0
    return bool(len(gaps) > 1 and gaps.mean() > 2 * error and gaps.mean() > 0)


def show(runs: Runs) -> None:
    for task in TASKS:
        found = rows(runs, task)
        if not found:
            continue
        table = Table(title=f"{task}: {_about(task)}", title_justify="left")
        for column in (
            "contestant",
            "seeds",
            "steps",
            "work",
            "held",
            "test loss",
            "± sd",
            "to full",
            "right",
            "gap closed",
        ):
            table.add_column(column, justify="left" if column == "contestant" else "right")
        for row in sorted(found.values(), key=lambda r: (round(r.mean("work"), 2), r.mean("loss"))):
            part = closed(row, found) if gap_shows(found) and row.name not in ("full", "ladder") else None
            table.add_row(
                row.name,
                str(len(row.runs)),
                f"{row.mean('steps'):.0f}",
                f"{row.mean('work'):.3f}",
                f"{row.mean('held'):.3f}",
                f"{row.mean('loss'):.4f}",
                f"{row.spread('loss'):.4f}",
                f"{row.above(found['full']).mean():+.4f}" if "full" in found else "",
                f"{row.mean('accuracy'):.2%}",
                "" if part is None else f"{part:.0%}",
            )
        console.print(table)


def markdown(runs: Runs) -> str:
    """The same tables for docs/, with how much full backpropagation still gained in the last eighth of its steps."""
    lines: list[str] = []
    for task in TASKS:
        found = rows(runs, task)
        if not found:
            continue
        lines += [f"**{task}**: {_about(task)}.{_plateau(found)}", ""]
        lines += ["| contestant | seeds | steps | work | held | test loss | to full | right | gap closed |"]
        lines += ["|---|--:|--:|--:|--:|--:|--:|--:|--:|"]
        shown = [row for row in found.values() if row.name != TWICE]
        for row in sorted(shown, key=lambda r: (-round(r.mean("work"), 2), r.mean("loss"))):
            part = closed(row, found) if gap_shows(found) and row.name not in ("full", "ladder") else None
            above = row.above(found["full"]) if "full" in found else np.zeros(0)
            lines.append(
                f"| {row.name} | {len(row.runs)} | {row.mean('steps'):.0f} | {row.mean('work'):.3f} "
                f"| {row.mean('held'):.3f} | {row.mean('loss'):.4f} ± {row.spread('loss'):.4f} "
                f"| {f'{above.mean():+.4f}' if len(above) else ''} | {row.mean('accuracy'):.2%} "
                f"| {'' if part is None else f'{part:.0%}'} |"
            )
        lines.append("")
    return "\n".join(lines)


def _about(task: str) -> str:
    # Without loading the data, which may not be there when only the table is made.
    return {
        "digits": "scikit-learn digits, residual network of 14 convolutions (group norm), SGD",
        "text": "60,000 characters of Python's standard library, transformer of 4 blocks, AdamW",
        "short": "Fashion-MNIST with half the steps",
        "early": "all 4.3 million characters of it and a larger transformer, after 800 steps: the middle of a training",
        "fashion": "Fashion-MNIST, residual network of 14 convolutions (batch norm), SGD",
    }[task]


def _plateau(found: dict[str, Row]) -> str:
    if "full" not in found:
        return ""
    curves = [r["curve"] for r in found["full"].runs.values() if len(r["curve"]) > 1]
    if not curves:
        return ""
    last = float(np.mean([c[-2][2] - c[-1][2] for c in curves]))
    whole = float(np.mean([c[0][2] - c[-1][2] for c in curves]))
    told = f" Full backpropagation gained {last:.4f} of test loss in its last eighth, {whole:.4f} since its first"
    if TWICE in found:
        more = float(found[TWICE].above(found["full"]).mean())
        told += f"; with twice the steps it ends {abs(more):.4f} {'lower' if more < 0 else 'higher'}"
    return f"{told}."


def checks(runs: Runs) -> list[Check]:
    made = []
    for task in TASKS:
        found = rows(runs, task)
        if not {"full", "ladder", GUARD} <= set(found) or len(found["ladder"].above(found["full"])) < 2:
            continue  # one seed shows no spread, and so no gap either
        gap = float(found["ladder"].above(found["full"]).mean())
        if not gap_shows(found):
            made.append(
                Check(
                    name=f"{task}: the guard closes at least two thirds of any gap that the ladder shows",
                    value=f"the ladder shows none ({gap:+.4f} in test loss, within two standard errors)",
                    target="≥ 67 % where there is a gap",
                    holds=True,
                )
            )
            continue
        share = closed(found[GUARD], found)
        assert share is not None
        made.append(
            Check(
                name=f"{task}: the guard closes at least two thirds of any gap that the ladder shows",
                value=f"{share:.0%} of {gap:.4f} at {found[GUARD].mean('work'):.2f} of full's work",
                target="≥ 67 %",
                holds=share >= 2 / 3,
            )
        )
        if PLAIN in found:
            share = closed(found[PLAIN], found)
            assert share is not None
            made.append(
                Check(
                    name=f"{task}: so does the guard whose bound does not follow the learning rate",
                    value=f"{share:.0%} at {found[PLAIN].mean('work'):.2f} of full's work",
                    target="≥ 67 %",
                    holds=share >= 2 / 3,
                )
            )
        for work, wanted in FIRST_TRIAL:
            made.append(_frontier(task, found, work, wanted))
    return made


def _frontier(task: str, found: dict[str, Row], work: float, wanted: float) -> Check:
    """The best partial policy for no more than so much work; controls with fewer workers or steps do not count."""
    partial = [r for r in found.values() if "workers" not in r.name and "steps" not in r.name and r.name != "full"]
    shares = [(closed(r, found) or 0.0, r) for r in partial if r.mean("work") <= work + 0.005]
    best, row = max(shares, key=lambda pair: pair[0])
    return Check(
        name=f"{task}: some policy closes more than {wanted:.0%} of the gap for {work:.2f} of full's work",
        value=f"{best:.0%} at {row.mean('work'):.3f} ({row.name})",
        target=f"> {wanted:.0%}",
        holds=best > wanted,
    )


def plot(runs: Runs, path: Path) -> None:
    """Test loss over work, a panel for each task: points are contestants, bars the spread over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tasks = [t for t in TASKS if rows(runs, t)]
    across = min(2, len(tasks))
    down = -(-len(tasks) // across)
    figure, axes = pyplot.subplots(down, across, figsize=(6.2 * across, 4.6 * down), squeeze=False)
    for axis in axes.flat[len(tasks) :]:
        axis.set_visible(False)
    for axis, task in zip(axes.flat, tasks, strict=False):
        found = rows(runs, task)
        for row in found.values():
            if row.name == TWICE:
                continue
            control = ("workers" in row.name or "steps" in row.name) and not (
                "ladder" in row.name or "guard" in row.name
            )
            colour = "black" if row.name == "full" else "tab:orange" if control else "tab:blue"
            marker = "*" if "guard" in row.name else "s" if control else "o"
            axis.errorbar(
                row.mean("work"),
                row.mean("loss"),
                yerr=row.spread("loss"),
                color=colour,
                fmt=marker,
                capsize=2,
                alpha=0.85,
            )
        _name(axis, [row for row in found.values() if row.name != TWICE])
        axis.set_title(task)
        axis.set_xlabel("work, of full backpropagation's")
        axis.set_ylabel("test loss (mean and standard deviation over seeds)")
        axis.grid(alpha=0.3)
    figure.suptitle("blue: partial backpropagation (stars: guarded); orange: controls of full depth with less work")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _name(axis: Any, shown: list[Row]) -> None:
    """Writes names beside the points, inside the picture; names that would overlap move up."""
    low, high = axis.get_ylim()
    placed: list[tuple[bool, float, float]] = []
    for row in sorted(shown, key=lambda r: r.mean("loss")):
        work, loss = row.mean("work"), row.mean("loss")
        left, at = work > 0.86, loss
        for other, where, taken in sorted(placed, key=lambda p: p[2]):
            if other == left and abs(where - work) < 0.14 and abs(at - taken) < 0.035 * (high - low):
                at = taken + 0.035 * (high - low)
        placed.append((left, work, at))
        side = {"ha": "right", "xytext": (-5, 0)} if left else {"ha": "left", "xytext": (5, 0)}
        axis.annotate(row.name, (work, at), fontsize=6.5, va="center", textcoords="offset points", **side)
