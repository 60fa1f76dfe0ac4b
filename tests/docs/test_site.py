"""The site builds with every link and every name resolved, knows every page, and asks nobody for anything."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

import dovetail
from tests.paths import ROOT

from ..view.pages import chromium

DOCS = ROOT / "docs"
CONFIGURATION = ROOT / "zensical.toml"


def pages(entry: Any) -> Iterator[str]:
    """The files that a navigation names."""
    if isinstance(entry, str):
        yield entry
    else:
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from pages(part)


def test_the_navigation_shows_every_page_once() -> None:
    named = list(pages(tomllib.loads(CONFIGURATION.read_text(encoding="utf-8"))["project"]["nav"]))
    assert sorted(named) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_the_reference_has_every_public_name() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md"))
    documented = re.findall(r"^::: dovetail\.([\w.]+)$", text, re.MULTILINE)
    assert {name.partition(".")[0] for name in documented} == set(dovetail.__all__)
    assert {name.partition(".")[2] for name in documented if "." in name} >= {"profile", "network", "preset", "load"}


def test_the_readme_leads_to_files_that_are_there() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert links and [link for link in links if not (ROOT / link).exists()] == []


def test_lists_and_tables_begin_after_a_blank_line() -> None:
    """Else the site shows them as part of the paragraph before."""
    fenced = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    glued = re.compile(r"^(?!\* |\||\d+\. |\s)[^\n]+\n(?:\* |\||\d+\. )", re.MULTILINE)
    for path in DOCS.rglob("*.md"):
        found = glued.search(fenced.sub("```", path.read_text(encoding="utf-8")))
        assert found is None, f"{path.name}: {found[0]!r}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it, in another folder; a link or a name that leads nowhere would have ended it."""
    pytest.importorskip("zensical", reason="the site is built with dovetail-train[docs]")
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(DOCS, folder / "docs")
    shutil.copy(CONFIGURATION, folder)
    for part in ("src", "examples"):
        (folder / part).symlink_to(ROOT / part)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "griffe:" not in said, said  # griffe: a docstring that names no parameter
    return folder / "out" / "site"


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    """Links that a reader may follow can lead anywhere; what a browser fetches by itself may not."""
    fetched = re.compile(r'<(?:script|img|iframe|source)[^>]+src="(?:https?:)?//|<link[^>]+href="(?:https?:)?//')
    html = list(site.rglob("*.html"))
    assert len(html) > 15
    assert [path.name for path in html if fetched.search(path.read_text(encoding="utf-8"))] == []
    outside = re.compile(r"(?:url\(|@import )['\"]?(?:https?:)?//")
    assert [path.name for path in site.rglob("*.css") if outside.search(path.read_text(encoding="utf-8"))] == []


def test_pictures_and_files_that_pages_name_are_there(site: Path) -> None:
    """The builder looks at links to pages only."""
    lost = []
    for path in site.rglob("*.html"):
        for link in re.findall(r'(?:src|href)="([^"#?]+)', path.read_text(encoding="utf-8")):
            if path.name != "404.html" and "://" not in link and not (path.parent / unquote(link)).exists():
                lost.append(f"{path.name}: {link}")
    assert lost == []


def test_the_search_works_from_files_and_asks_nobody(site: Path) -> None:
    with chromium() as browser:
        page, asked = browser.new_page(), []
        page.on("request", lambda request: asked.append(request.url))
        page.goto((site / "index.html").as_uri())
        page.keyboard.press("Control+k")
        page.keyboard.type("gained overlap", delay=20)
        page.get_by_text("What can be gained").wait_for()
        assert page.get_by_text(re.compile(r"^\d+ results?$")).count() == 1
        assert asked and [url for url in asked if not url.startswith(("file:", "data:", "about:"))] == []


def test_the_reference_shows_signatures_and_docstrings(site: Path) -> None:
    text = (site / "reference" / "train.html").read_text(encoding="utf-8")
    assert 'id="dovetail.DistributedDataParallel"' in text
    assert "buckets that fit the model and the network" in text
