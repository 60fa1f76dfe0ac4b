"""The demonstration runs from start to end and says what is emulated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dovetail import demo
from dovetail.simulate.shaped import available
from dovetail.view.example import profile as example_profile


@pytest.mark.parametrize("root", [True, False], ids=["limited links", "loopback"])
def test_the_demo_shows_the_gain_the_losses_and_what_is_emulated(
    root: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if root and (reason := available()):
        pytest.skip(reason)
    if not root:
        monkeypatch.setattr(demo, "available", lambda: "needs root")
        # The lesson does not depend on links; the other case runs it for real.
        lesson = demo.Lesson({"torch": [2.0] * 50, "dovetail": [2.0] * 49 + [1.0]}, identical=False, explained="")
        monkeypatch.setattr(demo, "_lesson", lambda steps: lesson)
    # The same story with a small model, so that it takes seconds.
    small = example_profile().scaled(forward=0.01, backward=0.02)
    monkeypatch.setattr(demo, "_profile", lambda rate: small)
    demo.main(quick=True, json=tmp_path / "demo.json", rate="500mbit")
    told = capsys.readouterr().out
    for words in ("torch's DDP", "dovetail", "difference", "emulated devices"):
        assert words in told
    # What it says of the parameters is what it saw.
    assert ("bit for bit the same parameters" in told) == root
    assert ("Links are not limited" in told) == (not root)
    stored = json.loads((tmp_path / "demo.json").read_text())
    assert stored["emulated"] and stored["lesson"]["identical"] == root
    assert stored["setting"]["rate"] == ("500mbit" if root else "loopback")
    losses = stored["lesson"]["losses"]
    if root:
        assert losses["torch"] == losses["dovetail"] and losses["torch"][-1] < losses["torch"][0]
