"""The demonstration runs from start to end, says what is emulated, and ends with three lines and a page of the run."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from dovetail import demo
from dovetail.core import files
from dovetail.core.timeline import Timeline
from dovetail.demo import summary
from dovetail.emulate.contest import DOVETAIL, ContestEntry, ContestOutcome
from dovetail.emulate.shaped_network import available
from dovetail.planning import plan
from dovetail.view import example
from dovetail.view.example import profile as example_profile
from dovetail.view.page import html


@pytest.mark.parametrize("root", [True, False], ids=["limited links", "loopback"])
def test_the_demo_shows_the_gain_the_losses_and_what_is_emulated(
    root: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if root and (reason := available()):
        pytest.skip(reason)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    if not root:
        monkeypatch.setattr(html, "BUNDLE", tmp_path / "nowhere")  # as in a checkout without `make page`
        monkeypatch.setattr(demo, "available", lambda: "needs root")
        # The training does not depend on links; the other case runs it.
        training = demo.RealTraining(
            {"torch": [2.0] * 50, "dovetail": [2.0] * 49 + [1.0]}, identical=False, explained=""
        )
        monkeypatch.setattr(demo, "_train_for_real", lambda iterations: training)
    # The same demonstration with a small model, so that it takes seconds.
    small = example_profile().scaled(forward=0.01, backward=0.02)
    monkeypatch.setattr(demo, "_profile", lambda rate: small)
    stored = json.loads(json.dumps(demo.main(quick=True, rate="500mbit", timelines=tmp_path / "both")))
    told = capsys.readouterr().out
    for words in ("torch's DDP", "dovetail", "what changed", "emulated devices"):
        assert words in told
    # What it says of the parameters is what it saw.
    assert ("bit for bit the same parameters" in told) == root
    assert ("Links are not limited" in told) == (not root)
    assert stored["emulated"] and stored["lesson"]["identical"] == root
    assert stored["setting"]["rate"] == ("500mbit" if root else "loopback")
    losses = stored["lesson"]["losses"]
    if root:
        assert losses["torch"] == losses["dovetail"] and losses["torch"][-1] < losses["torch"][0]
    _ends_with_three_lines(stored["lines"], told)
    recorded = [files.read(tmp_path / "both" / f"{name}.json", Timeline) for name in ("ddp", "dovetail")]
    assert [(t.name, t.emulated) for t in recorded] == [("torch's DDP", True), ("dovetail", True)]
    page = tmp_path / "out" / "demo.html"
    if root and (html.BUNDLE / "app.js").exists():
        assert told.rstrip().endswith(page.as_uri()) and stored["page"] == str(Path("out/demo.html"))
        kept_theirs = (
            stored["lines"][1]["changed"] == summary.NOTHING
        )  # the contest's result, which a busy machine decides
        _holds_this_run(page.read_text(encoding="utf-8"), kept_theirs)
    else:
        assert told.rstrip().splitlines()[-1].startswith("There is no page of this run to look into: the page is not")
        assert stored["page"] is None and not page.exists()


def _ends_with_three_lines(lines: list[dict[str, Any]], told: str) -> None:
    theirs, ours, forward = lines
    assert (theirs["name"], ours["name"], forward["name"]) == ("torch's DDP", "dovetail", "dovetail + forward")
    assert [x["predicted"] for x in lines] == [False, False, True]
    for line in lines:
        shown = next(row for row in told.splitlines() if f"│ {line['name']} " in row)
        assert f"{line['seconds']:.3f} s" in shown and line["changed"] in shown
        assert ("predicted" in shown) == line["predicted"]


def _holds_this_run(text: str, kept_theirs: bool) -> None:
    """Profile, plans, the measured timelines (one, where dovetail kept torch's buckets) and the predicted one."""
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    ran = ["torch's DDP, which dovetail kept"] if kept_theirs else ["torch's DDP", "dovetail"]
    assert [t["name"] for t in data["timelines"]] == [*ran, "dovetail"]
    sources = [t["title"].split(" · ")[0] for t in data["timelines"]]
    assert sources == ["measured, emulated"] * len(ran) + ["predicted, emulated"]
    assert len(data["profiles"]) == len(data["networks"]) == 1 and len(data["plans"]) == 2
    assert all(p["drawn"] for p in data["plans"])
    bars, more = data["lead"]["bars"], data["lead"]["more"]
    assert bars[0]["label"] == ran[0] and bars[0]["source"] == "measured"
    assert kept_theirs or [b["label"] for b in bars] == ran, "no prediction stands among what was measured"
    assert any(m.startswith('dovetail with overlap="forward" is predicted at') for m in more)
    assert data["compared"]["rows"][0][0] == "iteration"
    said = (
        "dovetail tried its plans in real iterations, found none"
        if kept_theirs
        else "Drawn is one iteration of each. Over "
    )
    assert not data["notes"] and any(m.startswith(said) for m in more)


def test_without_a_folder_for_it_the_page_goes_to_the_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes to a temporary place then; where a name was given, one line says what is wrong with it."""
    if not (html.BUNDLE / "app.js").exists():
        pytest.skip("the page is not built (make page)")
    (tmp_path / "out").write_text("in the way")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "elsewhere"))
    found = summary.demo_run(example_profile(), _outcome())
    assert summary.export(found) == (tmp_path / "elsewhere" / "dovetail-demo.html", "")
    _holds_this_run((tmp_path / "elsewhere" / "dovetail-demo.html").read_text(encoding="utf-8"), kept_theirs=True)
    page, why = summary.export(found, tmp_path / "out" / "x.html")
    assert page is None and "out" in why and "\n" not in why


def test_a_tie_is_shown_as_none_saved() -> None:
    lines = summary.lines(summary.demo_run(example_profile(), _outcome()))
    assert lines[1].what == summary.NOTHING
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as told:
        console.print(summary.table(lines, ""))
    row = next(row for row in told.get().splitlines() if "│ dovetail  " in row)
    assert [cell.strip() for cell in row.split("│")][1:4] == ["dovetail", "0.100 s", "none"]


def _outcome() -> ContestOutcome:
    """A contest that dovetail left as it was."""
    network = example.network()
    default = plan(example_profile(), network, policy="ddp")
    predicted, recorded = default.prediction, example.timelines()[1]
    entries = tuple(
        ContestEntry(
            policy=name,
            buckets=len(default.buckets),
            predicted=predicted.iteration,
            lower_bound=predicted.lower_bound,
            seconds=(0.1, 0.1, 0.1),
        )
        for name in ("ddp", DOVETAIL)
    )
    timelines = {"ddp": recorded, DOVETAIL: recorded}
    return ContestOutcome(
        network=network, entries=entries, kept=None, explained="", tuning_steps=1, timelines=timelines
    )
