"""Timelines in the terminal: a row per track, a sign per kind of work. `python -m dovetail.view.timeline` draws one.

Every character cell stands for an equal share of the time axis and shows the kind that fills most of it, so hundreds of
spans fit in a line; a span wide enough to hold its name shows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from dovetail.core.timeline import Timeline

from . import tracks, units
from .palette import LOOKS

MAX_TRACKS = 16
LABEL_WIDTH = 20


@dataclass(frozen=True)
class TimelineView:
    """Timelines below each other on one time axis; print it with rich."""

    timelines: Sequence[Timeline]
    max_tracks: int = MAX_TRACKS

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        longest = max((t.duration for t in self.timelines), default=0.0)
        names = [_label(track) for t in self.timelines for track in tracks.by_track(t)]
        margin = min(LABEL_WIDTH, max((len(n) for n in names), default=0)) + 1
        cells = max(20, min(options.max_width, 160) - margin)
        plain = options.ascii_only
        used: set[str] = set()
        for timeline in self.timelines:
            yield Text(headline(timeline), style="bold")
            yield from self._rows(timeline, longest, margin, cells, plain, used)
        yield Text(" " * margin + axis(longest, cells), style="dim")
        yield _legend(used, plain)

    def _rows(
        self, timeline: Timeline, longest: float, margin: int, cells: int, plain: bool, used: set[str]
    ) -> Iterable[Text]:
        origin = min((s.start for s in timeline.spans), default=0.0)
        computing = tracks.computing(timeline)
        by_track = tracks.by_track(timeline)
        for track, spans in list(by_track.items())[: self.max_tracks]:
            drawn = tracks.pieces(spans, computing.get(tracks.group(track)))
            row = Text(_label(track)[: margin - 1].ljust(margin))
            for look, text in _runs(drawn, origin, longest / cells if longest else 1.0, cells, plain):
                used.add(look)
                row.append(text, style=LOOKS[look].color if look else "")
            row.rstrip()
            yield row
        if len(by_track) > self.max_tracks:
            yield Text(f"… and {units.count(len(by_track) - self.max_tracks, 'more track')}", style="dim")


def headline(timeline: Timeline) -> str:
    """ "predicted, emulated · resnet50: 118 ms, 12.0 ms of communication exposed"."""
    kind = timeline.source + (", emulated" if timeline.emulated else "")
    exposed = units.seconds(tracks.exposed(timeline))
    return f"{kind} · {timeline.name}: {units.seconds(timeline.duration)}, {exposed} of communication exposed"


def bins(drawn: Sequence[tracks.Piece], origin: float, step: float, cells: int) -> list[str]:
    """The look that fills most of each cell of `step` seconds; "" where the track is idle for most of it."""
    filled: list[dict[str, float]] = [{} for _ in range(cells)]
    for p in drawn:
        first, last = (int((t - origin) / step + 1e-9) for t in (p.start, p.stop))
        for i in range(first, min(last, cells - 1) + 1):
            share = min(p.stop, origin + (i + 1) * step) - max(p.start, origin + i * step)
            if share > 1e-9 * step:
                filled[i][p.look] = filled[i].get(p.look, 0.0) + share
    # A cell that is mostly idle but not empty still shows something: short all-reduces must not vanish.
    return [max(f, key=lambda look: f[look]) if sum(f.values()) > 0.1 * step else "" for f in filled]


def _runs(
    drawn: Sequence[tracks.Piece], origin: float, step: float, cells: int, plain: bool
) -> Iterable[tuple[str, str]]:
    """(look, text) for stretches of equal look, with names written where they fit."""
    looks = bins(drawn, origin, step, cells)
    signs = [(LOOKS[k].ascii if plain else LOOKS[k].sign) if k else " " for k in looks]
    named = [False] * cells
    for p in drawn:
        first, last = round((p.start - origin) / step), min(round((p.stop - origin) / step), cells)
        name = next((n for n in tracks.short(p.name) if last - first >= len(n) + 2), None)
        if name and len(set(looks[first:last])) == 1:
            at = first + (last - first - len(name)) // 2
            if not any(named[at : at + len(name)]):  # two spans at a time: one name
                signs[at : at + len(name)] = list(name)
                named[at : at + len(name)] = [True] * len(name)
    at = 0
    while at < cells:
        end = at
        while end < cells and looks[end] == looks[at]:
            end += 1
        yield looks[at], "".join(signs[at:end])
        at = end


def axis(longest: float, cells: int) -> str:
    """Tick marks at round times: "0          50 ms      100 ms"."""
    if not longest:
        return "0"
    wanted = max(1, cells // 14)
    raw = longest / wanted
    power = 10.0 ** _floor_log10(raw)
    tick = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * (1 - 1e-9))
    line = ["0"] + [" "] * (cells - 1)
    factor, unit = next(((f, u) for f, u in ((1.0, "s"), (1e3, "ms"), (1e6, "us")) if longest * f >= 1), (1e9, "ns"))
    i = 1
    while i * tick <= longest * (1 + 1e-9):
        text = f"|{i * tick * factor:.4g} {unit}"
        at = round(i * tick / longest * cells)
        text = text if at + len(text) <= cells else "|"
        if at + len(text) <= cells:
            line[at : at + len(text)] = list(text)
        i += 1
    return "".join(line).rstrip()


def _floor_log10(value: float) -> int:
    return int(f"{value:e}".partition("e")[2])


def _label(track: str) -> str:
    return track if len(track) <= LABEL_WIDTH else f"{track[: LABEL_WIDTH - 9]}~{track[-8:]}"


def _legend(used: set[str], plain: bool) -> Text:
    text = Text()
    for key, look in LOOKS.items():
        if key in used:
            sign = look.ascii if plain else look.sign
            text.append("  " if text else "")
            text.append(sign * 2, style=look.color).append(f" {look.short}")
    return text


if __name__ == "__main__":
    from .example import timelines

    Console().print(TimelineView(timelines()))
