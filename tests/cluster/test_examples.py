"""Every example of docs/cluster.md runs on a real cluster of two CPU devices, and finishes."""

from __future__ import annotations

import importlib.util
import json

import pytest

from dovetail.cluster.client import Client
from tests.paths import EXAMPLES

from .trial import trial

FOLDER = EXAMPLES / "cluster"
JOBS = {"digits": "sklearn", "cnn": "sklearn", "characters": "", "gpt2": "transformers", "emulated": ""}
GANGS = ("gang_ddp", "gang_burst")


def test_every_example_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {*JOBS, *GANGS}


def test_every_example_runs_and_its_loss_falls() -> None:
    here = [name for name, package in JOBS.items() if not package or importlib.util.find_spec(package)]
    if len(here) < 2:
        pytest.skip("neither scikit-learn nor transformers is installed: pip install 'dovetail-train[examples]'")
    with trial.cluster(devices=2, device_bytes=4 * 2**30) as client:
        home = trial.home_of(client)
        jobs = {name: trial.submit(client, text(name), name=name, steps=12) for name in here}
        gangs = {name: gang(client, name) for name in GANGS}
        ended = trial.wait(client, [*jobs.values(), *gangs.values()], limit=1200.0)
        states = {ended[n]["name"]: (ended[n]["state"], ended[n]["reason"]) for n in ended}
        assert {state for state, _ in states.values()} == {"finished"}, states
        for name, number in jobs.items():
            losses = [json.loads(line)["loss"] for line in trial.curve(home, number).splitlines()]
            assert len(losses) == 12
            assert name == "emulated" or min(losses[-3:]) < losses[0], f"{name}: {losses}"
        for number in gangs.values():
            assert "step 10: loss" in client.logs(number)["text"]


def text(name: str) -> str:
    return (FOLDER / f"{name}.py").read_text(encoding="utf-8")


def gang(client: Client, name: str) -> int:
    share = "foreground" if name == "gang_burst" else "normal"
    body = {"text": text(name), "name": name, "kind": "gang", "gang": 2, "arguments": ["--steps", "10"], "share": share}
    return int(client.submit(body)["job"])
