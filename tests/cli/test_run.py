"""Commands that measure and train for real, small."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from dovetail.core import files
from dovetail.core.network import Network
from dovetail.core.profile import Profile
from dovetail.view import example

from .command import run, shell


def test_profile_measures_a_users_file(tmp_path: Path) -> None:
    script = tmp_path / "tiny.py"
    script.write_text(
        "import torch\n"
        "print('words of the script')\n"
        "def model():\n    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))\n"
        "def batch(size):\n    return torch.randn(size, 8)\n"
    )
    out = tmp_path / "job.json"
    done = shell("profile", script, "-o", out, "--batch", "4", "--batches", "2", "--steps", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert "repeated passes leave an error of" in done.stderr and "of the time was lost to others" in done.stderr
    profile = files.read(out, Profile)
    assert files.decode(done.stdout, Profile) == profile
    assert profile.name == "tiny" and profile.batch == 4 and len(profile.tensors) == 4
    assert [t.batch for t in profile.layers[0].times] == [2, 4]


def test_network_starts_ranks_and_measures_them(tmp_path: Path) -> None:
    out = tmp_path / "net.json"
    options = ("--workers", "2", "--seconds", "10", "--max-mib", "0.05", "--collectives", "all_reduce")
    done = shell("network", *options, "--max-noise", "1", "-o", out, "--json", timeout=200)
    assert done.returncode == 0, done.stderr
    network = files.read(out, Network)
    assert files.decode(done.stdout, Network) == network
    assert (network.ranks, network.measured, network.emulated) == (2, True, False)
    assert list(network.collectives) == ["all_reduce"] and len(network.collectives["all_reduce"].samples) > 2
    assert network.contention is not None and "longer beside a collective" in done.stderr
    assert "repeated collectives leave an error of" in done.stderr


@pytest.mark.parametrize(
    ("noise", "options", "code", "words"),
    [
        (0.04, (), 0, "repeated passes leave an error of 4.0 %; 30.0 % of the time was lost to others\n"),
        (0.2, (), 0, "lost to others; warning: gains below that error are not to be believed, measure again"),
        (0.6, (), 1, "worthless: repeated passes leave an error of 60.0 %"),
        (0.6, ("--max-noise", "1"), 0, "warning: gains below that error"),
        (0.04, ("--max-noise", "0.03"), 1, "measure again on a quiet machine, or accept it with --max-noise 1"),
    ],
)
def test_a_noisy_measurement_is_flagged_and_a_worthless_one_refused(
    noise: float, options: tuple[str, ...], code: int, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = msgspec.structs.replace(example.profile(), noise=noise, lost=0.3)
    monkeypatch.setattr("dovetail.measure.profile", lambda *_, **__: found)
    out = tmp_path / "job.json"
    result = run("profile", "mlp", "-o", out, *options)
    assert (result.exit_code, out.exists()) == (code, code == 0)
    assert words in result.stderr


def test_train_runs_a_script_and_keeps_its_words_out_of_json(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint('words of the script', sys.argv[1:])\n")
    done = shell("train", script, "--workers", "1", "--json", "--", "--epochs", "3", timeout=200)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["workers"] == 1
    assert "words of the script ['--epochs', '3']" in done.stderr


@pytest.mark.parametrize(
    ("ended", "code", "words"),
    [(3, 1, "dovetail: script.py: training failed with exit code 3"), (130, 130, "interrupted"), (143, 143, "")],
)
def test_how_training_ended_becomes_the_exit_code(
    ended: int, code: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dovetail.train.run.launcher.train", lambda *_, **__: ended)
    result = run("train", "script.py")
    assert result.exit_code == code and result.stderr.startswith(words)
