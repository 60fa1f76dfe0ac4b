"""A fabric that is up, on the page: what breaks is drawn as broken, and paths are those that packets take now."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dovetail.core.errors import Error
from dovetail.fabric import emulation
from dovetail.fabric.page_source import FabricSource
from dovetail.fabric.routing import shapes
from dovetail.view.page import serving
from tests.cli.command import run
from tests.view.pages import chromium, watched

pytestmark = pytest.mark.root


@pytest.fixture
def fabric() -> Iterator[emulation.Fabric]:
    """A ring of four switches, a host at each."""
    with emulation.temporary(shapes.ring(4)) as made:
        yield made


def test_the_page_follows_links_and_packets(fabric: emulation.Fabric) -> None:
    source = FabricSource(fabric.name)
    found = source.contents()
    assert {p.target: len(p.walk) for p in found.paths} == {"h1": 2, "h2": 3, "h3": 2}
    assert set(found.fabrics[0].links.values()) == {"up"} and found.only == ("fabrics",)
    link = "line:has(title:text-is('s0-s1: {}'))"
    with chromium() as browser, serving(source) as server, watched(browser) as seen:
        seen.page.goto(server.url)
        seen.page.get_by_label("Path").select_option(label="h0 → h1")
        assert "s0 → s1" in seen.page.locator(".paths").inner_text()
        assert seen.page.locator(link.format("up")).get_attribute("stroke") == "#0072b2", "the path is on it"
        fabric.fail(fabric.topology.find_link("s0-s1"))
        seen.page.wait_for_selector(link.format("down"), state="attached")
        assert seen.page.locator(link.format("down")).get_attribute("stroke-dasharray")
        assert "s0 → s3 → s2 → s1" in seen.page.locator(".paths").inner_text(), "the way around, without a reload"
        assert (
            seen.page.locator("h1").inner_text().startswith("4 switches and 4 links, emulated; 1 link out of service")
        )


def test_a_fabric_that_is_not_there_is_one_line() -> None:
    with pytest.raises(Error, match="no fabric 'nobody' is up"):
        FabricSource("nobody").contents()
    done = run("view", "--fabric", "nobody", "--serve")
    assert done.exit_code == 1 and done.stderr.count("\n") == 1 and "no fabric 'nobody' is up" in done.stderr
