"""The page in a real browser: what is drawn, what keys do, what is said, and that nobody is asked for anything."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dovetail.core.timeline import Span, Timeline
from dovetail.view import example
from dovetail.view.page import Contents, serving, sort
from dovetail.view.palette import LOOKS

from . import samples
from .pages import Seen, chromium, opened, watched

COLOR = {kind: look.color for kind, look in LOOKS.items()}
TOP, FLOOR = 4, 20
"""Pixels below a row's top: what is hidden is drawn in the lower half only."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def two(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """The example's predicted and measured timelines. Tracks: ranks 0 and 1, compute and network, of each."""
    with opened(browser, sort(example.timelines()), tmp_path_factory.mktemp("two")) as seen:
        yield seen


@pytest.fixture
def fresh(two: Seen) -> Seen:
    """The same page as it was at first."""
    two.page.evaluate("document.activeElement.blur()")
    two.page.locator(".timeline .label").first.focus()
    two.press("Escape", "0")
    return two


def test_spans_are_drawn_at_their_time_in_the_colour_of_their_kind(fresh: Seen) -> None:
    compute, network = 0, 1
    assert fresh.pixel(compute, 0.015, down=TOP) == COLOR["forward"]
    assert fresh.pixel(compute, 0.041, down=TOP) == COLOR["backward"]
    assert fresh.pixel(compute, 0.1155, down=TOP) == COLOR["optimizer"]
    assert fresh.pixel(compute, 0.0910) == ""  # nothing happens between backward and the wait
    assert fresh.pixel(network, 0.071) == COLOR["communication"]
    assert fresh.pixel(network, 0.103) == COLOR["exposed"]
    assert fresh.pixel(network, 0.013) == ""


def test_kinds_can_be_told_apart_without_colour(fresh: Seen) -> None:
    compute, network = 0, 1
    assert fresh.pixel(network, 0.071, down=TOP) == "", "hidden communication fills the lower half only"
    assert fresh.pixel(network, 0.103, down=TOP) == COLOR["exposed"]
    assert fresh.pixel(compute, 0.103, down=TOP) == "" == fresh.pixel(compute, 0.103, down=FLOOR)
    assert fresh.pixel(compute, 0.103, down=12) == COLOR["wait"], "waiting is a line through the middle"


def test_predicted_and_measured_stand_on_one_axis(fresh: Seen) -> None:
    """The measured one takes 1.08 times as long: where the predicted one has ended, it still optimises."""
    predicted, measured = 0, 4
    assert fresh.pixel(predicted, 0.125, down=TOP) == ""
    assert fresh.pixel(measured, 0.125, down=TOP) == COLOR["optimizer"]
    heads = fresh.page.locator(".timeline .head").all_inner_texts()
    assert [h.split(" ·")[0] for h in heads] == ["predicted", "measured, emulated"]
    assert "below what was measured" in fresh.page.locator("#timelines").inner_text()


def test_zooming_changes_what_is_drawn_and_fit_brings_it_back(fresh: Seen) -> None:
    picture = "() => document.querySelector('.timeline .body canvas').toDataURL()"
    fresh.press("Escape")
    before, whole = fresh.page.evaluate(picture), fresh.view()
    fresh.press("ArrowRight", "ArrowRight", "+", "+", "+")
    near, close = fresh.page.evaluate(picture), fresh.view()
    assert close[1] - close[0] == pytest.approx((whole[1] - whole[0]) / 8)
    assert close[0] < 0.039 < close[1], "zooms around the span that is selected"
    assert near != before
    assert fresh.pixel(0, (close[0] + close[1]) / 2, down=TOP + 2) == COLOR["backward"]
    fresh.press("-")
    assert fresh.view()[1] - fresh.view()[0] == pytest.approx((whole[1] - whole[0]) / 4)
    fresh.press("0", "Escape")
    assert fresh.view() == pytest.approx(whole)
    assert fresh.page.evaluate(picture) == before


def test_wheel_buttons_and_dragging_zoom_and_move(fresh: Seen) -> None:
    canvas = fresh.page.locator(".timeline .body canvas").first
    box, (from_, to) = canvas.bounding_box(), fresh.view()
    x, y = box["x"] + box["width"] * 0.25, box["y"] + 50
    under = from_ + (to - from_) * 0.25
    fresh.page.mouse.move(x, y)
    fresh.page.keyboard.down("Control")
    fresh.page.mouse.wheel(0, -300)
    fresh.page.keyboard.up("Control")
    narrower = "w => { const d = document.querySelector('.timeline .body canvas').dataset; return d.to - d.from < w }"
    fresh.page.wait_for_function(narrower, arg=(to - from_) * 0.9)
    a, b = fresh.view()
    assert a + (b - a) * 0.25 == pytest.approx(under, rel=0.02), "the time under the pointer stays there"
    fresh.page.mouse.down()
    fresh.page.mouse.move(x - 100, y, steps=4)
    fresh.page.mouse.up()
    fresh.settle()
    assert fresh.view()[0] > a, "dragging to the left goes on in time"
    fresh.page.get_by_role("button", name="Zoom in").first.click()
    fresh.settle()
    assert fresh.view()[1] - fresh.view()[0] == pytest.approx((b - a) / 2)
    fresh.page.get_by_role("button", name="Fit").first.click()
    fresh.settle()
    assert fresh.view() == pytest.approx((from_, to))


def test_the_keyboard_reaches_every_track_and_span(fresh: Seen) -> None:
    focused = "() => document.activeElement.textContent"
    assert fresh.page.evaluate(focused) == "rank 0/compute"
    fresh.press("ArrowRight")
    assert fresh.said().startswith("forward · 30.0 ms · from 0 s to 30.0 ms · rank 0/compute, predicted")
    fresh.press("ArrowRight")
    assert fresh.said().startswith("layer 4 · backward")
    fresh.press("End")
    assert fresh.said().startswith("step · optimizer")
    fresh.press("Home")
    assert fresh.said().startswith("forward")
    fresh.press("Tab", "ArrowRight", "ArrowRight")
    assert fresh.page.evaluate(focused) == "rank 0/network"
    assert re.match(r"bucket 1 · communication, exposed · 20\.0 ms · .* · 9\.00 MiB", fresh.said())
    fresh.press("ArrowDown")
    assert fresh.page.evaluate(focused) == "rank 1/compute"
    fresh.press("ArrowUp", "ArrowUp")
    assert fresh.page.evaluate(focused) == "rank 0/compute"
    assert fresh.page.locator(".timeline .detail").first.get_attribute("aria-live") == "polite"


def test_a_span_that_is_pointed_at_is_described(fresh: Seen) -> None:
    box = fresh.page.locator(".timeline .body canvas").first.bounding_box()
    top = fresh.page.locator(".timeline .label").nth(1).evaluate("l => l.offsetTop")
    from_, to = fresh.view()
    fresh.page.mouse.move(box["x"] + box["width"] * (0.103 - from_) / (to - from_), box["y"] + top + 12)
    fresh.settle()
    assert fresh.said().startswith("bucket 1 · communication, exposed")


def test_thousands_of_spans_become_their_share_of_the_picture(browser: Any, tmp_path: Path) -> None:
    """A third is forward: so is a third of the pixels, at any zoom; and one lonely span does not vanish."""
    lonely = Span(track="rank 9/network", name="alone", kind="communication", start=1.03, stop=1.03001)
    crowd = samples.many(20_000)
    contents = sort([msgspec.structs.replace(crowd, spans=(*crowd.spans, lonely))])
    with opened(browser, contents, tmp_path) as seen:
        for time in (0.13, 0.83, 1.53):
            assert seen.pixel(0, time, down=TOP) == COLOR["forward"]
        for time in (1.83, 3.03, 4.93):
            assert seen.pixel(3, time, down=TOP) == COLOR["backward"]
        assert 1 <= seen.page.evaluate(ORANGE, 4) <= 3, "one short all-reduce in an empty row"
        seen.page.locator(".timeline .label").nth(4).focus()
        seen.press("ArrowRight", "Enter")
        from_, to = seen.view()
        assert to - from_ == pytest.approx(2e-5, rel=0.1)
        assert seen.pixel(4, (from_ + to) / 2) == COLOR["communication"]
        assert seen.pixel(0, (from_ + to) / 2, down=TOP) == COLOR["forward"]


def test_every_section_draws_and_every_picture_has_its_table(browser: Any, tmp_path: Path) -> None:
    with opened(browser, samples.everything(), tmp_path) as seen:
        names = seen.page.locator("main section:not(.nothing) h2").all_inner_texts()
        assert names == ["Timeline", "Plan", "Profile", "Network", "Scaling", "Burst", "Cluster", "Fabric"]
        drawn = "c => { const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; let n = 0;" \
                " for (let i = 3; i < d.length; i += 4) n += d[i] > 200; return n / (d.length / 4) }"  # fmt: skip
        shares = seen.page.locator(".timeline .body canvas").evaluate_all(f"all => all.map({drawn})")
        assert len(shares) == 3 and min(shares) > 0.05
        for section in ("profile", "network", "scaling", "burst", "cluster", "fabric"):
            marks = seen.page.locator(f"#{section} svg").locator("rect[fill], path, circle")
            assert marks.count() >= 3, section
        pictures = seen.page.locator("main svg[role=img], .timeline").count()
        seen.page.locator("main details").evaluate_all("all => all.forEach(d => d.open = true)")
        seen.page.wait_for_function(
            "() => [...document.querySelectorAll('main details')].every(d => d.querySelector('td'))"
        )
        assert pictures >= 9
        for section in ("timelines", "plan", "profile", "network", "scaling", "burst", "cluster", "fabric"):
            assert seen.page.locator(f"#{section} tbody tr").count() >= 2, section


def test_the_plan_is_drawn_against_torchs_default(browser: Any, tmp_path: Path) -> None:
    with opened(browser, sort([example.profile(), example.network()]), tmp_path) as seen:
        heads = seen.page.locator("#plan .head").all_inner_texts()
        assert len(heads) == 2 and "ddp" in heads[0] and "auto" in heads[1]
        assert seen.pixel(0, 0.005, down=TOP) == COLOR["forward"]
        assert seen.pixel(0, 0.031, down=TOP) == COLOR["backward"]
        lead = seen.page.locator("h1").inner_text()
        assert re.match(r"Of every .* that example trains \(predicted, emulated\), 48\.0 ms go into computing", lead)
        figures = seen.page.locator(".figure").all_inner_texts()
        assert [f.split("\n")[0] for f in figures] == ["Computing", "Communication, hidden", "Communication, exposed"]
        assert figures[0].split("\n")[1] == "48.0 ms"


def test_a_broken_link_looks_broken_and_a_path_is_marked(browser: Any, tmp_path: Path) -> None:
    with opened(browser, sort([samples.fabric(), samples.path()]), tmp_path) as seen:
        lines = seen.page.locator("#fabric svg line").evaluate_all(
            "all => Object.fromEntries(all.map(l => [l.querySelector('title').textContent,"
            " [l.getAttribute('stroke'), l.getAttribute('stroke-dasharray')]]))"
        )
        assert lines["b-c: down"] == ["#d55e00", "2 5"]
        assert lines["d-a: silent"][1] is not None and lines["d-a: silent"] != lines["b-c: down"]
        assert lines["c-d: up"] == [None, None]
        assert lines["a-c: up"][0] == COLOR["backward"]
        assert "2 links out of service" in seen.page.locator("#fabric").inner_text()


def test_nothing_is_ever_blank(browser: Any, tmp_path: Path) -> None:
    with opened(browser, Contents(), tmp_path) as seen:
        told = seen.page.locator("section.nothing .empty").all_inner_texts()
        assert len(told) == 8 and all(len(text) > 40 for text in told)
        assert seen.page.locator("section.nothing code").count() >= 8, "each names the command that fills it"
        assert seen.page.locator("h1").inner_text()


def test_a_timeline_without_spans_says_so(browser: Any, tmp_path: Path) -> None:
    bare = Timeline(name="bare", source="measured", spans=())
    with opened(browser, sort([bare]), tmp_path) as seen:
        assert "measured · bare: 0 s. It has no spans" in seen.page.locator("#timelines .empty").inner_text()


def test_dark_and_light_follow_the_system_and_the_switch(browser: Any, tmp_path: Path) -> None:
    light, dark = "rgb(255, 255, 255)", "rgb(20, 23, 28)"
    paper = "color => getComputedStyle(document.body).backgroundColor === color"
    with opened(browser, sort(example.timelines()), tmp_path, color_scheme="dark") as seen:
        seen.page.wait_for_function(paper, arg=dark)
        assert seen.pixel(0, 0.015, down=TOP) == COLOR["forward"], "kinds keep their colours"
        seen.page.get_by_label("Colours").select_option("light")
        seen.page.wait_for_function(paper, arg=light)
        seen.page.get_by_label("Colours").select_option("auto")
        seen.page.wait_for_function(paper, arg=dark)
        seen.page.emulate_media(color_scheme="light")
        seen.page.wait_for_function(paper, arg=light)
        assert seen.pixel(0, 0.015, down=TOP) == COLOR["forward"]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_is_legible(browser: Any, tmp_path: Path, theme: str) -> None:
    """WCAG AA: 4.5 to 1 for every text there is, on whatever is behind it."""
    with opened(browser, samples.everything(), tmp_path, color_scheme=theme) as seen:
        assert seen.page.evaluate(CONTRAST) == []


def test_a_narrow_screen_needs_no_scrolling_sideways(browser: Any, tmp_path: Path) -> None:
    with opened(browser, samples.everything(), tmp_path, viewport={"width": 360, "height": 740}) as seen:
        assert seen.page.evaluate("() => document.documentElement.scrollWidth") == 360
        assert seen.pixel(0, 0.015, down=TOP) == COLOR["forward"]


def test_a_screen_reader_finds_landmarks_names_and_words(browser: Any, tmp_path: Path) -> None:
    with opened(browser, samples.everything(), tmp_path) as seen:
        for role in ("banner", "navigation", "main", "contentinfo"):
            assert seen.page.get_by_role(role).count() == 1, role
        assert seen.page.locator("h1").count() == 1
        unnamed = seen.page.evaluate(UNNAMED)
        assert unnamed == []
        assert seen.page.locator("main section").evaluate_all(
            "all => all.every(s => s.getAttribute('aria-labelledby'))"
        )


def test_names_from_files_are_text_and_never_code(browser: Any, tmp_path: Path) -> None:
    bad = "</script><script>document.title='broken in'</script><img src=x onerror=\"document.title='broken in'\">"
    span = Span(track=f"{bad}/compute", name=bad, kind="forward", start=0.0, stop=1.0)
    with opened(browser, sort([Timeline(name=bad, source="measured", spans=(span,))]), tmp_path) as seen:
        assert bad in seen.page.locator("h1").inner_text()
        assert seen.page.title() == f"{bad} · dovetail"
        assert seen.page.locator("#app img").count() == 0


def test_a_page_cannot_be_made_to_ask_anybody(browser: Any, tmp_path: Path) -> None:
    """Even code that ran in it could not send what it shows anywhere."""
    with serving(_Fixed(Contents())) as server, opened(browser, Contents(), tmp_path) as seen:
        seen.page.context.set_offline(False)
        assert seen.page.evaluate("u => fetch(u).then(() => 'sent', () => 'refused')", server.url) == "refused"
        seen.errors.clear()  # the browser says why
        seen.requests[:] = [r for r in seen.requests if not r.startswith(server.url)]


class _Fixed:
    live = False

    def __init__(self, contents: Contents) -> None:
        self.now = contents

    def contents(self) -> Contents:
        return self.now


class _Live(_Fixed):
    """A source whose contents change, as a cluster's do."""

    live = True


def test_a_live_source_changes_the_page_without_reloading(browser: Any) -> None:
    source = _Live(Contents())
    with serving(source) as server, watched(browser) as seen:
        seen.page.goto(server.url)
        seen.page.evaluate("document.documentElement.dataset.same = 'yes'")
        assert seen.page.locator("#cluster.nothing").count() == 1
        source.now = sort([samples.schedule()])
        seen.page.wait_for_selector("#cluster .timeline")
        seen.settle()
        assert seen.pixel(0, 0.45) == LOOKS["backward"].color, "the first of the jobs' colours"
        assert seen.page.evaluate("document.documentElement.dataset.same") == "yes"
        assert {r.removeprefix(server.url) for r in seen.requests} == {"", "data.json"}
    assert not [t for t in threading.enumerate() if t.name == "dovetail-page"]


CONTRAST = """() => {
  const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(Number).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b };
  const behind = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    if (!c.startsWith('rgba') || c.endsWith(', 1)')) return c } return 'rgb(255, 255, 255)' };
  const opacity = e => { let o = 1; for (; e; e = e.parentElement) o *= getComputedStyle(e).opacity; return o };
  const bad = [];
  for (const e of document.querySelectorAll('body *')) {
    if (![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()) || !e.getClientRects().length) continue;
    if (e.closest('noscript, script, title, .skip')) continue;
    const style = getComputedStyle(e), color = e instanceof SVGElement ? style.fill : style.color;
    const [a, b] = [light(color), light(behind(e))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05) * opacity(e);
    if (ratio < 4.5) bad.push(`${e.textContent.slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  return bad;
}"""

ORANGE = """track => {
  const canvas = document.querySelector('.timeline .body canvas');
  const top = document.querySelectorAll('.label')[track].offsetTop;
  const {data} = canvas.getContext('2d').getImageData(0, top + 20, canvas.width, 1);
  let count = 0;
  for (let i = 0; i < data.length; i += 4) count += data[i] > 200 && data[i + 2] < 60 && data[i + 3] > 60;
  return count;
}"""

UNNAMED = """() => [...document.querySelectorAll('button, select, canvas, svg, a, summary, figure')].filter(e =>
  e.getAttribute('aria-hidden') !== 'true' && !e.getAttribute('aria-label') && !e.getAttribute('aria-labelledby')
  && !e.textContent.trim() && !e.closest('label')).map(e => e.outerHTML.slice(0, 80))"""
