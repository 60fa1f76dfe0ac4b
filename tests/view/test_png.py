"""Pictures: of the size they should be, with every kind of work in its colour."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dovetail.core.errors import Error, MissingExtra
from dovetail.core.timeline import Span, Timeline
from dovetail.planning import compare
from dovetail.simulate import scale
from dovetail.view import example
from dovetail.view.palette import LOOKS, SERIES

pytest.importorskip("matplotlib", reason="pictures need the extra `view`")

from matplotlib import image

from dovetail.view.png import Theme, plan_png, scale_png, timeline_png


def share(path: Path, color: str) -> float:
    """The fraction of a picture's pixels that have a colour."""
    pixels = np.rint(image.imread(path)[:, :, :3] * 255)
    wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return float((np.abs(pixels - wanted).max(axis=2) <= 2).mean())


def size(path: Path) -> tuple[int, int]:
    height, width, _ = image.imread(path).shape
    return width, height


def test_a_timeline_shows_every_kind_in_its_colour(tmp_path: Path) -> None:
    timeline_png(example.timelines(), tmp_path / "t.png")
    width, height = size(tmp_path / "t.png")
    assert width == 1500 and 500 < height < 1000
    shares = {look: share(tmp_path / "t.png", LOOKS[look].color) for look in LOOKS}
    # Of the rows' area: backward takes 60 of 119 ms on half of the tracks, the optimizer 5.
    assert all(s > 0.002 for s in shares.values()), shares
    assert shares["backward"] > shares["forward"] > shares["optimizer"]
    assert shares["exposed"] == pytest.approx(shares["communication"], rel=0.35)


def test_communication_hidden_by_computing_has_no_exposed_colour(tmp_path: Path) -> None:
    spans = (
        Span(track="rank 0/compute", name="b", kind="backward", start=0, stop=1),
        Span(track="rank 0/network", name="x", kind="communication", start=0.2, stop=0.9),
    )
    timeline_png([Timeline(name="t", source="predicted", spans=spans)], tmp_path / "t.png")
    assert share(tmp_path / "t.png", LOOKS["exposed"].color) == 0
    assert share(tmp_path / "t.png", LOOKS["communication"].color) > 0.02


@pytest.mark.parametrize(("theme", "paper"), [("light", "#ffffff"), ("dark", "#0d1117")])
def test_a_theme_changes_the_paper_and_leaves_the_kinds_their_colours(theme: Theme, paper: str, tmp_path: Path) -> None:
    timeline_png(example.timelines(), tmp_path / "t.png", theme=theme)
    plan_png(
        example.profile(),
        example.network(),
        compare(example.profile(), example.network()),
        tmp_path / "p.png",
        theme=theme,
    )
    for name in ("t.png", "p.png"):
        assert share(tmp_path / name, paper) > 0.4 and share(tmp_path / name, LOOKS["backward"].color) > 0.02
    timeline_png(example.timelines(), tmp_path / "after.png")
    assert share(tmp_path / "after.png", "#ffffff") > 0.4, "a theme lasts for one picture"


def test_thousands_of_thin_spans_keep_their_colour(tmp_path: Path) -> None:
    spans = [Span(track="rank 0/compute", name=f"l{i}", kind="backward", start=i, stop=i + 1) for i in range(3000)]
    timeline_png([Timeline(name="t", source="measured", spans=tuple(spans))], tmp_path / "t.png")
    assert share(tmp_path / "t.png", LOOKS["backward"].color) > 0.1


def test_a_plan_picture_shows_computing_and_communication_of_every_policy(tmp_path: Path) -> None:
    profile, network = example.profile(), example.network()
    few, many = (compare(profile, network, policies=p) for p in (["ddp"], ["ddp", "optimal", "single", "per-tensor"]))
    plan_png(profile, network, few, tmp_path / "few.png")
    plan_png(profile, network, many, tmp_path / "many.png")
    assert size(tmp_path / "many.png")[1] > size(tmp_path / "few.png")[1]
    for look in ("forward", "backward", "communication", "exposed"):
        assert share(tmp_path / "many.png", LOOKS[look].color) > 0.004, look


def test_a_scale_picture_has_a_line_for_every_policy(tmp_path: Path) -> None:
    policies = ["optimal", "ddp", "single"]
    points = scale(example.profile(), example.network(), workers=[4, 16, 64, 256], policies=policies)
    scale_png(points, tmp_path / "s.png", title="example")
    assert size(tmp_path / "s.png") == (1650, 840)
    for color in SERIES[:3]:
        assert share(tmp_path / "s.png", color) > 0.0003, color
    assert share(tmp_path / "s.png", SERIES[3]) == 0


@pytest.mark.parametrize("draw", [lambda p: timeline_png([], p), lambda p: scale_png([], p)], ids=["timeline", "scale"])
def test_nothing_to_draw_is_one_line_and_leaves_no_file(draw: object, tmp_path: Path) -> None:
    with pytest.raises(Error, match="nothing to draw"):
        draw(tmp_path / "x.png")  # type: ignore[operator]
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match=r"dovetail-train\[view\]"):
        timeline_png(example.timelines(), tmp_path / "t.png")


def test_tables_and_drawings_do_not_load_matplotlib_or_torch() -> None:
    code = "import sys, dovetail.view.tables, dovetail.view.timeline, dovetail.view.png, dovetail.view.perfetto\n"
    code += "assert not {'torch', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
