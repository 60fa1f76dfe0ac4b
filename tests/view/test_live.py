"""The page of a running cluster, in a real browser: a real cluster on this machine, with a job that runs and one that
waits. One cluster for all tests of the file, which come in order; the last one ends it.
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dovetail.cluster import up_down
from dovetail.cluster.client import Client
from dovetail.view import palette
from tests.cli.command import run

from .pages import Seen, chromium, opened_file, watched

pytest.importorskip("fastapi", reason="the cluster needs dovetail-train[cluster]")

JOB = """
import torch
from torch import nn
from dovetail import TrainingJob

def data():
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

job = TrainingJob(
    model=lambda: nn.Linear(8, 1), data=data, loss=lambda model, batch: ((model(batch[0]) - batch[1]) ** 2).mean(),
    optimizer=lambda p: torch.optim.SGD(p, lr=0.01), steps=100_000, batch=8, workers=WORKERS,
    task_seconds=(0.05, 0.05), off_device=0.02,
)
"""
TOKEN = "0123456789abcdef"


def until(true: Callable[[], Any], timeout: float = 60.0) -> None:
    limit = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    where = tmp_path_factory.mktemp("live") / "home"
    try:
        up_down.up(where, devices=2, emulated=True, timeout=180)
        yield where
    finally:
        up_down.down(where, grace=0.0)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def live(browser: Any, home: Path) -> Iterator[Seen]:
    """One page that stays open: it is never loaded again."""
    with watched(browser) as seen:
        seen.page.set_default_timeout(60_000)  # of two cores, the cluster has its share
        seen.page.goto(f"{Client(home).url}/")
        seen.page.evaluate("document.documentElement.dataset.same = 'yes'")
        yield seen
        assert seen.page.evaluate("document.documentElement.dataset.same") == "yes"
        seen.errors.clear()  # of the end: the browser says that nobody answers


def submit(client: Client, name: str, workers: int, **more: Any) -> int:
    text = JOB.replace("WORKERS", str(workers))
    return int(client.submit({"text": text, "name": name, **more})["job"])


def test_before_the_first_job_it_says_so_and_how_to_hand_one_in(live: Seen) -> None:
    assert live.page.locator("h1").inner_text().startswith("Nothing has been submitted to this cluster yet.")
    assert "dovetail cluster submit" in live.page.locator("#cluster .empty").inner_text()
    assert live.page.locator("main section").count() == 2, "the first screen and the cluster; nothing about files"


def devices_drawn(page: Any) -> set[str]:
    """The devices that have rows in the picture; one whose newest tasks overlap by their clocks has two rows."""
    return {label.partition(" (")[0] for label in page.locator(".timeline .label").all_inner_texts()}


def test_who_runs_where_is_drawn_and_who_waits_says_why(live: Seen, home: Path) -> None:
    client = Client(home)
    first = submit(client, "promised", 2, share="foreground", bound=0.05)
    until(lambda: client.job(first)["iteration"] > 3)
    second = submit(client, "later", 1)
    page = live.page
    page.wait_for_selector("#cluster .timeline")
    page.wait_for_selector(f"#job-{second} .wrapped:has-text('promise:')")
    # A lane for each device, with bars in the colour of the job.
    assert devices_drawn(page) == {"device 0", "device 1"}
    live.settle()
    for lane in (0, 1):
        assert palette.SERIES[first - 1] in lane_colours(live, lane)
        assert palette.SERIES[second - 1] not in lane_colours(live, lane)
    running, waiting = (page.locator(f"#job-{n}").inner_text() for n in (first, second))
    assert "foreground" in running and "running" in running
    assert re.search(r"[1-9]\d* of 100,000", running)
    assert re.search(r"\d ms", running), "how long an iteration takes"
    assert "promised to be slowed by at most 5.0 % by others" in running
    assert "0 devices are free of jobs of promised speed, it needs 1" in waiting
    assert (
        page.locator(f"#job-{first} progress").get_attribute("aria-label")
        == f"iterations of job {first} (promised), foreground"
    )
    heading = page.locator("h1").inner_text()
    assert heading == "1 job runs on 2 emulated devices and 1 waits."
    assert f"Job {second} (later) waits (promise): 0 devices" in page.locator("#lead").inner_text()
    assert page.locator("#cluster .timeline .head").inner_text().startswith("measured, emulated · the last")


def lane_colours(seen: Seen, lane: int) -> set[str]:
    from_, to = seen.view()
    return {seen.pixel(lane, from_ + (to - from_) * (i + 0.5) / 200) for i in range(200)} - {""}


def test_it_goes_on_by_itself_and_keeps_what_the_keyboard_chose(live: Seen) -> None:
    page = live.page
    page.locator(".timeline .label").first.focus()
    live.press("End", "ArrowLeft")
    said = live.said()
    assert re.match(r"job 1 \(promised\), iteration \d+, worker \d", said)
    done = "() => Number(document.querySelector('#job-1 progress').value)"
    before = page.evaluate(done)
    page.wait_for_function(f"n => ({done})() > n", arg=before)
    live.settle()
    assert page.evaluate("document.activeElement.textContent") == "device 0"
    assert live.said().split(" · ")[0] == said.split(" · ")[0], "the same task, though time 0 has moved"
    wide = live.view()
    live.press("Enter")
    narrow = live.view()
    assert narrow[1] - narrow[0] < 0.5 * (wide[1] - wide[0])
    before = page.evaluate(done)
    page.wait_for_function(f"n => ({done})() > n", arg=before)
    live.settle()
    assert live.view()[1] - live.view()[0] == pytest.approx(narrow[1] - narrow[0]), "who has zoomed in stays there"
    live.press("0", "Escape")


def test_dark_is_legible_and_draws_the_same(browser: Any, home: Path) -> None:
    from .test_page import CONTRAST, UNNAMED

    with watched(browser, color_scheme="dark") as seen:
        seen.page.goto(f"{Client(home).url}/")
        seen.page.wait_for_selector("#cluster .timeline")
        seen.settle()
        assert seen.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 28)"
        assert palette.SERIES[0] in lane_colours(seen, 0)
        assert seen.page.evaluate(CONTRAST) == [] == seen.page.evaluate(UNNAMED)


def test_an_address_points_at_a_job_or_says_that_there_is_none(browser: Any, home: Path) -> None:
    url = run("cluster", "page", "2", "--home", home).stdout.strip()
    assert url.endswith("/#job-2")
    none = run("cluster", "page", "7", "--home", home)
    assert none.exit_code == 1 and "job 7: there is none of that number" in none.stderr
    with watched(browser) as seen:
        seen.page.goto(url)
        assert seen.page.evaluate("document.querySelector(':target').id") == "job-2"
        assert seen.page.locator("[role=alert]").count() == 0
        seen.page.goto(url.replace("#job-2", "#job-7"))
        assert "There is no job 7 among those shown" in seen.page.locator("[role=alert]").inner_text()
    code, body = fetch(url.partition("#")[0] + "jobs/7")
    assert code == 404 and json.loads(body)["detail"] == "job 7: there is none of that number"


def fetch(url: str, **headers: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return int(answer.status), answer.read()
    except urllib.error.HTTPError as e:
        return e.code, e.read()


def test_a_copy_for_sharing_shows_the_same_and_asks_nobody(browser: Any, home: Path, tmp_path: Path) -> None:
    out = tmp_path / "copy.html"
    done = run("view", "--cluster", home, "--html", out)
    assert done.exit_code == 0, done.output
    with opened_file(browser, out) as seen:
        assert seen.page.locator("h1").inner_text() == "1 job runs on 2 emulated devices and 1 waits."
        assert palette.SERIES[0] in lane_colours(seen, 1)
        assert "it needs 1" in seen.page.locator("#job-2").inner_text()
        assert seen.page.locator(".brand .now").count() == 0, "a copy is not live"


def test_when_the_cluster_is_gone_the_page_says_so_and_keeps_the_last(live: Seen, home: Path) -> None:
    up_down.down(home, grace=0.0)
    page = live.page
    page.wait_for_selector("[role=alert]")
    assert "does not answer any more" in page.locator("[role=alert]").inner_text()
    assert "not live" in page.locator(".brand").inner_text()
    assert page.locator("#job-1").count() == 1 and devices_drawn(page) == {"device 0", "device 1"}
    gone = run("view", "--cluster", home, "--html", home / "x.html")
    assert gone.exit_code == 1 and "no cluster runs in" in gone.stderr and not (home / "x.html").exists()
