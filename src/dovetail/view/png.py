"""Pictures of timelines, plans and scaling, drawn with matplotlib (the extra `view`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dovetail.core.errors import Error, MissingExtra
from dovetail.core.files import replacing
from dovetail.core.network import Network
from dovetail.core.plan import Plan
from dovetail.core.profile import Profile
from dovetail.core.timeline import Timeline

from . import tracks, units
from .palette import LOOKS, MARKERS, SERIES
from .tables import by_promise

if TYPE_CHECKING:
    from dovetail.simulate.scale import ScalePoint

DPI = 150
WIDTH = 10.0  # inches
MAX_TRACKS = 16

Theme = Literal["light", "dark"]
INKS: dict[Theme, tuple[str, str, str, str]] = {
    "light": ("#ffffff", "#000000", "#444444", "#dddddd"),
    "dark": ("#0d1117", "#e6edf3", "#9da7b1", "#30363d"),
}
"""Colours of the background, of text, of lines that mark something, and of the grid."""


def timeline_png(timelines: Sequence[Timeline], path: str | Path, *, theme: Theme = "light") -> None:
    """Timelines below each other on one time axis in milliseconds, exposed communication in a colour of its own."""
    with _inks(theme):
        _timelines(timelines, path)


def _timelines(timelines: Sequence[Timeline], path: str | Path) -> None:
    shown = [list(tracks.by_track(t).items())[:MAX_TRACKS] for t in timelines]
    if not any(shown):
        raise Error(f"{path}: nothing to draw: the timelines have no spans")
    heights = [0.36 * max(len(rows), 1) + 0.55 for rows in shown]
    figure = new_figure(WIDTH, sum(heights) + 0.9)
    axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    longest = max(t.duration for t in timelines) * 1e3
    used: set[str] = set()
    for axis, timeline, rows in zip(axes, timelines, shown, strict=True):
        axis.set_xlim(0, longest * 1.01)
        _draw_tracks(axis, timeline, rows, used)
        end = timeline.duration * 1e3
        axis.axvline(end, color=_ink("lines.color"), linewidth=0.8, linestyle="--")
        axis.set_title(_timeline_title(timeline, len(tracks.by_track(timeline)) - len(rows)), loc="left", fontsize=11.5)
    axes[-1].set_xlabel("time (ms)")
    _legend(figure, used)
    save_png(figure, path)


def _draw_tracks(axis: Any, timeline: Timeline, rows: list[tuple[str, list[Any]]], used: set[str]) -> None:
    origin = min((s.start for s in timeline.spans), default=0.0)
    computing = tracks.computing(timeline)
    for row, (track, spans) in enumerate(rows):
        lanes = tracks.lanes(spans)
        height = 0.8 / len(lanes)
        for i, lane in enumerate(lanes):
            drawn = tracks.pieces(lane, computing.get(tracks.group(track)))
            used |= {p.look for p in drawn}
            _bars(axis, drawn, origin, row - 0.4 + i * height, height)
            if len(lanes) == 1:
                for p in drawn:
                    _label(axis, p, origin, row)
    axis.set_yticks(range(len(rows)), [track for track, _ in rows], fontsize=10)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    hide_frame(axis)
    axis.grid(axis="x", linewidth=0.6)
    axis.set_axisbelow(True)


def _bars(axis: Any, drawn: Sequence[tracks.Piece], origin: float, bottom: float, height: float) -> None:
    """One bar per piece. Edges part wide neighbours; they would hide a narrow bar, which keeps its own colour."""
    left, right = axis.get_xlim()
    for look in dict.fromkeys(p.look for p in drawn):
        bars = [((p.start - origin) * 1e3, (p.stop - p.start) * 1e3) for p in drawn if p.look == look]
        color = LOOKS[look].color
        edges = [_ink("axes.facecolor") if width > 0.006 * (right - left) else color for _, width in bars]
        axis.broken_barh(bars, (bottom, height), facecolors=color, edgecolors=edges, linewidth=0.5)


def _label(axis: Any, piece: tracks.Piece, origin: float, row: int) -> None:
    """Writes a span's name into its bar where there is room: 0.09 inch per letter, on 3/4 of the picture's width."""
    left, right = axis.get_xlim()
    inches = (piece.stop - piece.start) * 1e3 / (right - left) * WIDTH * 0.75
    name = next((n for n in tracks.short(piece.name) if inches > 0.09 * (len(n) + 1)), None)
    if name:
        color = "white" if piece.look in ("backward", "exposed", "optimizer") else "black"
        middle = ((piece.start + piece.stop) / 2 - origin) * 1e3
        axis.text(middle, row, name, ha="center", va="center", fontsize=9, color=color, clip_on=True)


def _timeline_title(t: Timeline, left_out: int) -> str:
    title = f"{t.source}{', emulated' if t.emulated else ''}: {t.name}, {units.seconds(t.duration)}, "
    title += f"{units.seconds(tracks.exposed(t))} of communication exposed"
    return title + (f" ({units.count(left_out, 'more track')} not shown)" if left_out else "")


def plan_png(
    profile: Profile, network: Network, plans: Sequence[Plan], path: str | Path, *, theme: Theme = "light"
) -> None:
    """Every policy's predicted iteration on one time axis: above, computing; below, its all-reduces, one per bucket."""
    with _inks(theme):
        _plans(profile, network, plans, path)


def _plans(profile: Profile, network: Network, plans: Sequence[Plan], path: str | Path) -> None:
    from dovetail.simulate.iteration import simulate

    ordered = by_promise(plans)
    if not ordered:
        raise Error(f"{path}: nothing to draw: there is no plan")
    figure = new_figure(WIDTH, 0.5 * len(ordered) + 1.6)
    axis = figure.subplots()
    longest = max(p.prediction.iteration for p in ordered) * 1e3
    axis.set_xlim(0, (longest or 1.0) * 1.2)
    for row, plan in enumerate(ordered):
        _draw_plan(axis, row, plan, simulate(plan, profile, network))
        text = f" {units.seconds(plan.prediction.iteration)}, {units.count(len(plan.buckets), 'bucket')}"
        axis.text(plan.prediction.iteration * 1e3, row, text, va="center", fontsize=8)
    bound = min(p.prediction.lower_bound for p in ordered) * 1e3
    axis.axvline(bound, color=_ink("lines.color"), linestyle="--", linewidth=0.9)
    axis.text(bound, -0.62, "lower bound ", ha="right", va="bottom", fontsize=8, color=_ink("lines.color"))
    axis.set_ylim(len(ordered) - 0.4, -1.0)
    axis.set_yticks(range(len(ordered)), [p.policy for p in ordered], fontsize=9)
    axis.set_xlabel("time since the start of the iteration (ms)")
    hide_frame(axis)
    first = ordered[0]
    setting = f"{profile.name} on {network.name}, {units.count(first.workers, 'worker')}, local batch {first.batch}"
    axis.set_title(f"predicted: {setting}", loc="left", fontsize=10.5)
    _legend(figure, {"forward", "backward", "communication", "exposed"})
    save_png(figure, path)


def _draw_plan(axis: Any, row: int, plan: Plan, timeline: Timeline) -> None:
    r = plan.prediction
    computing: list[tuple[str, float, float]] = [("forward", 0.0, r.forward), ("backward", r.forward, r.backward)]
    if plan.overlap == "forward":  # there are waits in between
        computing = [(s.kind, s.start, s.duration) for s in timeline.spans if s.kind in tracks.COMPUTE]
    for look, start, duration in computing:
        axis.barh(row - 0.2, duration * 1e3, left=start * 1e3, height=0.34, color=LOOKS[look].color)
    spans = [s for s in timeline.spans if s.kind == "communication"]
    drawn = tracks.pieces(spans, tracks.computing(timeline).get("rank 0"))
    _bars(axis, drawn, 0.0, row + 0.01, 0.34)


def scale_png(points: Sequence[ScalePoint], path: str | Path, *, title: str = "") -> None:
    """Left: predicted speed-up over one worker, both axes logarithmic. Right: its share of the ideal."""
    if not points:
        raise Error(f"{path}: nothing to draw: there is no point")
    figure = new_figure(WIDTH + 1, 5.6)
    speed, share = figure.subplots(1, 2)
    workers = sorted({p.workers for p in points})
    speed.plot(workers, workers, color="#444444", linestyle="--", linewidth=1, label="ideal")
    share.axhline(100, color="#444444", linestyle="--", linewidth=1)
    lines: dict[str, list[ScalePoint]] = {}
    for p in sorted(points, key=lambda p: p.workers):
        lines.setdefault(p.policy, []).append(p)
    # The legend lists the policies in the order in which their lines end, so that the eye finds them.
    by_end = sorted(lines.items(), key=lambda item: -item[1][-1].speedup)
    for i, (policy, line) in enumerate(by_end):
        look = {"color": SERIES[i % len(SERIES)], "marker": MARKERS[i % len(MARKERS)], "markersize": 4.5}
        x = [p.workers for p in line]
        speed.plot(x, [p.speedup for p in line], linewidth=1.5, label=policy, **look)
        share.plot(x, [100 * p.speedup / p.workers for p in line], linewidth=1.5, **look)
    for axis in (speed, share):
        axis.set_xscale("log", base=2)
        axis.set_xticks(workers[:: -(-len(workers) // 7)])
        axis.set_xlabel("workers")
        axis.grid(color="#dddddd", linewidth=0.6)
        _plain_numbers(axis.xaxis)
        hide_frame(axis)
    speed.set_yscale("log", base=2)
    _plain_numbers(speed.yaxis)
    speed.set_ylabel("speed-up over one worker")
    share.set_ylim(0, 105)
    share.set_ylabel("share of the ideal speed-up (%)")
    figure.suptitle(f"predicted: {title}" if title else "predicted", x=0.01, ha="left", fontsize=11)
    figure.legend(loc="outside lower center", ncols=min(5, len(lines) + 1), frameon=False, fontsize=8.5)
    save_png(figure, path)


def _plain_numbers(axis: Any) -> None:
    """1,024 instead of 2¹⁰, and no ticks in between."""
    from matplotlib.ticker import NullLocator

    axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:.3g}")
    axis.set_minor_locator(NullLocator())


@contextmanager
def _inks(theme: Theme) -> Iterator[None]:
    """matplotlib draws in the colours of a theme while this lasts."""
    try:
        from matplotlib import rc_context
    except ImportError:
        raise MissingExtra("drawing a picture", "view") from None
    paper, text, line, grid = INKS[theme]
    papers = dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), paper)
    texts = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), text)
    colors: dict[Any, str] = {**papers, **texts, "lines.color": line, "grid.color": grid}
    with rc_context(colors):
        yield


def _ink(name: str) -> Any:
    from matplotlib import rcParams

    settings: Any = rcParams
    return settings[name]


def new_figure(width: float, height: float) -> Any:
    """Makes a matplotlib figure of so many inches."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("drawing a picture", "view") from None
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)  # no pyplot: no window system, no state left behind
    return figure


def hide_frame(axis: Any) -> None:
    """Hides the lines at the top and on the right of a plot."""
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _legend(figure: Any, used: set[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=look.color, label=look.label) for key, look in LOOKS.items() if key in used]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=10)


def save_png(figure: Any, path: str | Path) -> None:
    """Writes a figure as a PNG file, in one step."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")
