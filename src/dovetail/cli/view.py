"""`dovetail view`: look at any file that dovetail writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from . import console, inputs

if TYPE_CHECKING:
    from dovetail.core.files import Noun
    from dovetail.core.plan import Plan
    from dovetail.core.timeline import Comparison, Timeline


def view(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE...", help="Profiles, networks, plans, timelines, schedules.")
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(metavar="out.json", dir_okay=False, help="Also write the timelines for ui.perfetto.dev."),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(metavar="out.png", callback=inputs.png_path, help="Also draw the timelines, or else the plans."),
    ] = None,
    theme: Annotated[
        Literal["light", "dark"], typer.Option(help="--png: the colours of background and text.")
    ] = "light",
    html: Annotated[
        Path | None,
        typer.Option(metavar="out.html", callback=inputs.html_path, help="Write the page as one file, for sharing."),
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Serve the page on this machine until interrupted.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="--serve: the port; default: a free one.")] = 0,
    open_: Annotated[bool, typer.Option("--open", help="Serve the page and open it in a browser.")] = False,
    cluster: Annotated[
        Path | None, typer.Option(metavar="HOME", help="The page also shows the cluster that runs in this folder.")
    ] = None,
    fabric: Annotated[
        str | None, typer.Option(metavar="NAME", help="The page also shows this running fabric (needs root).")
    ] = None,
    json: console.Json = False,
) -> None:
    """Look at files: tables for profiles, networks and plans, timelines drawn together on one axis.

    A predicted and a measured timeline are compared. --html, --serve and --open show the page instead: where the time
    goes, with pictures to zoom into. The page also takes what `dovetail scale`, `schedule`, `fabric status`,
    `fabric trace` and `plan --burst` print with --json, and what runs now: --cluster, --fabric.
    """
    if not (files or cluster or fabric):
        raise typer.BadParameter("expected at least one FILE, or --cluster or --fabric")
    if port and not (serve or open_):
        raise typer.BadParameter("--port goes with --serve and --open only")
    for output in (perfetto, png, html):
        inputs.not_an_input(output, *(files or []))
    if html or serve or open_:
        if perfetto or png or json:
            raise typer.BadParameter("--html, --serve and --open go without --perfetto, --png and --json")
        from . import page

        page.show(
            files or [], cluster=cluster, fabric=fabric, html=html, serve=serve or open_, port=port, browser=open_
        )
        return
    if cluster or fabric:
        raise typer.BadParameter("--cluster and --fabric are shown on the page: add --html, --serve or --open")
    from dovetail.core import timeline as core
    from dovetail.core.burst_plan import BurstPlan
    from dovetail.core.depth_plan import DepthPlan
    from dovetail.core.errors import Error
    from dovetail.core.job import Schedule
    from dovetail.core.plan import Plan
    from dovetail.core.timeline import Timeline

    files = files or []
    nouns = [inputs.read_any(path) for path in files]
    shown = [n.timeline() if isinstance(n, Schedule) else n for n in nouns]
    timelines = [n for n in shown if isinstance(n, Timeline)]
    plans = [(path, n) for path, n in zip(files, nouns, strict=True) if isinstance(n, Plan)]
    if perfetto and not timelines:
        raise Error(f"--perfetto {perfetto}: expected at least one timeline among the files")
    if png and not (timelines or plans):
        for path, noun in zip(files, nouns, strict=True):
            if isinstance(noun, (BurstPlan, DepthPlan)):
                what = "burst" if isinstance(noun, BurstPlan) else "depth"
                raise Error(
                    f"--png {png}: expected at least one timeline, or a plan of buckets, but {path} is a {what} plan: "
                    f"`dovetail simulate {path} --png {png}` draws its iteration"
                )
        raise Error(f"--png {png}: expected at least one timeline or plan among the files")
    if perfetto:
        from dovetail.view import perfetto as trace

        trace.write(timelines, perfetto)
        console.wrote(perfetto)
    if png:
        _draw(png, timelines, plans, theme)
        console.wrote(png)
    predicted, measured = (next((t for t in timelines if t.source == s), None) for s in ("predicted", "measured"))
    compared = core.compare(predicted, measured) if predicted and measured else None
    if json:
        console.emit(_as_json(nouns, compared))
    else:
        _show(nouns, timelines, compared)


def _draw(
    png: Path, timelines: Sequence[Timeline], plans: Sequence[tuple[Path, Plan]], theme: Literal["light", "dark"]
) -> None:
    from dovetail.core.errors import Error
    from dovetail.view.png import plan_png, timeline_png

    if timelines:
        timeline_png(timelines, png, theme=theme)
        return
    settings = [(inputs.profile_of(*p), inputs.network_of(*p), p[1].workers, p[1].batch) for p in plans]
    for (path, _), setting in zip(plans, settings, strict=True):
        # The picture has one axis, one lower bound and one title: they would be wrong for a plan of something else.
        pairs = zip(("profile", "network", "number of workers", "batch"), settings[0], setting, strict=True)
        if differs := [what for what, ours, theirs in pairs if ours != theirs]:
            raise Error(
                f"--png {png}: expected plans for one profile, network, number of workers and batch, but {path} has "
                f"another {' and '.join(differs)} than {plans[0][0]}: draw each by itself"
            )
    plan_png(settings[0][0], settings[0][1], [plan for _, plan in plans], png, theme=theme)


def _show(nouns: Sequence[Noun], timelines: Sequence[Timeline], compared: Comparison | None) -> None:
    from dovetail.core.burst_plan import BurstPlan
    from dovetail.core.depth_plan import DepthPlan
    from dovetail.core.network import Network
    from dovetail.core.plan import Plan
    from dovetail.core.profile import Profile
    from dovetail.view import burst, depth, tables
    from dovetail.view.timeline import TimelineView

    parts: list[Any] = []
    for noun in nouns:
        if isinstance(noun, Profile):
            parts.append(tables.profile(noun))
        elif isinstance(noun, Network):
            parts.append(tables.network(noun))
        elif isinstance(noun, Plan):
            parts.append(tables.buckets(noun))
        elif isinstance(noun, BurstPlan):
            parts.append(burst.stages(noun))
        elif isinstance(noun, DepthPlan):
            parts += [depth.depths(noun), depth.savings([noun])]
    if timelines:
        parts.append(TimelineView(timelines))
    if compared:
        parts.append(tables.comparison(compared))
    for i, part in enumerate(parts):
        console.show(*([""] if i else []), part)


def _as_json(nouns: Sequence[Noun], compared: Comparison | None) -> dict[str, Any]:
    import msgspec

    result: dict[str, Any] = {"files": [console.builtins(n) for n in nouns]}
    if compared:
        result["comparison"] = msgspec.to_builtins(compared)
    return result
