"""The command line: exit codes, one line for every error, results on stdout only, nothing half-written."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import dovetail
from dovetail.cli.inputs import counts
from dovetail.core import files
from dovetail.core.network import Network
from dovetail.core.plan import Plan
from dovetail.core.timeline import Timeline
from dovetail.planning import plan
from dovetail.view import example

from .command import COMMAND, run, shell


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a profile, a network, a plan and two timelines."""
    profile, network = example.profile(), example.network()
    files.write(tmp_path / "job.json", profile)
    files.write(tmp_path / "net.json", network)
    files.write(tmp_path / "plan.json", plan(profile, network, policy="optimal"))
    for timeline in example.timelines():
        files.write(tmp_path / f"{timeline.source}.json", timeline)
    return tmp_path


# What a newcomer types first.


def test_help_lists_every_command_and_loads_no_heavy_package() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "dovetail", "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    commands = "demo profile network plan simulate scale train doctor schedule view cluster fabric"
    for command in commands.split():
        assert f"\n  {command} " in done.stdout
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "typer" in imported  # else the test looks at nothing
    assert not imported & {"torch", "numpy", "matplotlib", "ray", "transformers"}


def test_the_version_is_the_packages() -> None:
    assert run("--version").stdout == f"dovetail {dovetail.__version__}\n"


@pytest.mark.parametrize(
    "command", ["demo", "profile", "network", "plan", "simulate", "scale", "train", "doctor", "schedule", "view"]
)
def test_every_command_takes_json_and_explains_itself(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0 and "--json" in result.stdout


def test_the_help_of_plan_lists_the_policies() -> None:
    printed = run("plan", "--help").stdout
    assert "mgwfbp-greedy" in printed and "threshold:MB" in printed


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["plan"],
        ["plan", "job.json", "net.json", "--workers", "0"],
        ["plan", "job.json", "net.json", "--png", "picture.svg"],
        ["plan", "job.json", "net.json", "-o", "."],
        ["plan", "job.json", "net.json", "-o", "job.json"],
        ["plan", "job.json", "net.json", "--auto", "-o", "net.json"],
        ["plan", "job.json", "net.json", "--memory", "0"],
        ["plan", "job.json", "net.json", "--task", "7"],
        ["plan", "job.json", "net.json", "--burst", "--policy", "ddp"],
        ["plan", "job.json", "net.json", "--burst", "--memory", "inf"],
        ["plan", "job.json", "net.json", "--spb", "ladder", "--png", "d.png"],
        ["plan", "job.json", "net.json", "--auto", "--memory", "inf"],
        ["scale", "job.json", "--network", "10gbe-16", "--workers", "8..4"],
        ["network", "--preset", "10gbe-16", "--rate", "1gbit"],
        ["network", "--collectives", "gossip"],
        ["view"],
        ["view", "job.json", "--port", "99"],
        ["view", "measured.json", "--perfetto", "measured.json"],
        ["train", "script.py", "--workers", "none"],
    ],
    ids=lambda a: " ".join(a),
)
def test_wrong_use_ends_with_two_and_leaves_nothing(
    arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    before = sorted(folder.iterdir())
    result = run(*arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert "Traceback" not in result.stderr
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4..32", [4, 8, 16, 32]), ("4,8,12", [4, 8, 12]), ("7", [7]), ("4..20", [4, 8, 16, 20]), ("1, 4..8", [1, 4, 8])],
)
def test_counts_double_or_list(text: str, expected: list[int]) -> None:
    assert counts(text) == expected


# The way through: plan, simulate, scale, view.


def test_plan_writes_the_plan_and_tells_why(folder: Path) -> None:
    done = shell("plan", "job.json", "net.json", "--workers", "8", "-o", "new.json", cwd=folder)
    assert done.returncode == 0
    written = files.read(folder / "new.json", Plan)
    assert (written.workers, written.policy, written.profile) == (8, "auto", "example")
    assert "-> auto" in done.stdout and "nothing ran" in done.stdout and "\x1b" not in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert done.stderr == "wrote new.json\n"


def test_plan_follows_policy_batch_and_preset(folder: Path) -> None:
    out = folder / "p.json"
    result = run("plan", folder / "job.json", "10gbe-16", "--policy", "threshold:2", "--batch", "16", "-o", out)
    assert result.exit_code == 0, result.stderr
    written = files.read(out, Plan)
    assert (written.policy, written.batch, written.workers, written.network) == ("threshold:2", 16, 16, "10gbe-16")
    assert "-> threshold:2" in result.stdout


def test_plan_as_json_is_nothing_but_json(folder: Path) -> None:
    done = shell("plan", folder / "job.json", folder / "net.json", "-o", folder / "p.json", "--json")
    result = json.loads(done.stdout)
    chosen = files.read(folder / "p.json", Plan)
    assert result["chosen"] == chosen.policy == "auto"
    entry = next(p for p in result["plans"] if p["policy"] == "auto")
    assert files.decode(json.dumps(entry), Plan) == chosen
    assert {"ddp", "optimal", "single", "per-tensor"} <= {p["policy"] for p in result["plans"]}
    assert result["explanation"]


def test_simulate_finds_profile_and_network_beside_the_plan(folder: Path) -> None:
    result = run("simulate", folder / "plan.json", "-o", folder / "t.json", "--json")
    assert result.exit_code == 0, result.stderr
    timeline = files.read(folder / "t.json", Timeline)
    assert files.decode(result.stdout, Timeline) == timeline
    predicted = files.read(folder / "plan.json", Plan).prediction.iteration
    assert timeline.duration == pytest.approx(predicted, rel=1e-9)
    assert "predicted" in run("simulate", folder / "plan.json").stdout


def test_simulate_takes_a_preset_that_the_plan_names(folder: Path) -> None:
    assert run("plan", folder / "job.json", "10gbe-16", "-o", folder / "p.json").exit_code == 0
    assert run("simulate", folder / "p.json").exit_code == 0


def test_simulate_asks_when_it_cannot_know(folder: Path) -> None:
    (folder / "net.json").unlink()
    result = run("simulate", folder / "plan.json")
    assert result.exit_code == 1 and "say where it is with --network" in result.stderr
    files.write(folder / "net.json", example.network())
    files.write(folder / "job2.json", example.profile(layers=9))
    result = run("simulate", folder / "plan.json")
    assert (
        result.exit_code == 1 and "several profiles named 'example'" in result.stderr and "job2.json" in result.stderr
    )
    result = run("simulate", folder / "plan.json", "--profile", folder / "job2.json")
    assert result.exit_code == 1 and "plan does not match profile" in result.stderr
    assert run("simulate", folder / "plan.json", "--profile", folder / "job.json").exit_code == 0


def test_scale_predicts_every_number_of_workers_for_every_policy(folder: Path) -> None:
    common = ("scale", folder / "job.json", "--network", folder / "net.json", "--workers", "4..16")
    result = run(*common, "--json")
    points = json.loads(result.stdout)["points"]
    assert {p["workers"] for p in points} == {4, 8, 16} and len({p["policy"] for p in points}) >= 6
    printed = run(*common, "--policies", "ddp,single").stdout
    assert "predicted speed-up" in printed and "ddp" in printed and "optimal" not in printed


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("job.json", "8 layers"),
        ("net.json", "all_reduce"),
        ("plan.json", "first ready"),
        ("measured.json", "measured, emulated"),
    ],
)
def test_view_shows_any_file(file: str, words: str, folder: Path) -> None:
    result = run("view", folder / file)
    assert result.exit_code == 0 and words in result.stdout


def test_view_draws_timelines_together_and_compares_them(folder: Path) -> None:
    result = run("view", folder / "predicted.json", folder / "measured.json", "--perfetto", folder / "trace.json")
    assert result.exit_code == 0
    assert "predicted · example" in result.stdout and "measured, emulated · example" in result.stdout
    assert "error" in result.stdout and "-7.3 %" in result.stdout
    assert len([e for e in json.loads((folder / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]) == 36
    as_json = json.loads(run("view", folder / "predicted.json", folder / "measured.json", "--json").stdout)
    assert as_json["comparison"]["error"] == pytest.approx(119 / 128.44 - 1, abs=1e-3)
    assert [f["kind"] for f in as_json["files"]] == ["timeline", "timeline"]


def test_pictures_are_written_where_asked(folder: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra `view`")
    job, net = folder / "job.json", folder / "net.json"
    for arguments in (
        ("plan", job, net, "-o", folder / "p.json"),
        ("simulate", folder / "plan.json"),
        ("scale", job, "--network", net, "--workers", "4,8"),
        ("view", folder / "measured.json"),
        ("view", folder / "plan.json"),
    ):
        picture = folder / "picture.png"
        result = run(*arguments, "--png", picture)
        assert result.exit_code == 0, result.stderr
        assert picture.read_bytes().startswith(b"\x89PNG")
        picture.unlink()


def test_a_picture_of_plans_for_different_things_is_refused_in_one_line(folder: Path) -> None:
    profile, network = example.profile(), example.network()
    other = msgspec.structs.replace(profile, name="other")
    files.write(folder / "other.json", other)
    for name, made in (
        ("same", plan(profile, network, policy="ddp")),
        ("job", plan(other, network, policy="ddp")),
        ("more", plan(profile, network, workers=network.ranks // 2, policy="ddp")),
    ):
        files.write(folder / f"p-{name}.json", made)
    for name, what in (("job", "another profile than"), ("more", "another number of workers than")):
        result = run("view", folder / "plan.json", folder / f"p-{name}.json", "--png", folder / "x.png")
        assert result.exit_code == 1 and result.stderr.count("\n") == 1
        assert what in result.stderr and f"p-{name}.json has" in result.stderr
        assert not (folder / "x.png").exists()
    pytest.importorskip("matplotlib", reason="pictures need the extra `view`")
    result = run("view", folder / "plan.json", folder / "p-same.json", "--png", folder / "x.png")
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize(
    ("kind", "options"), [("depth", ["net.json", "--spb", "ladder"]), ("burst", ["--burst", "--devices", "4"])]
)
def test_a_plan_that_is_not_of_buckets_is_told_what_draws_it(kind: str, options: list[str], folder: Path) -> None:
    chosen = folder / "chosen.json"
    made = run("plan", folder / "job.json", *(folder / o if o == "net.json" else o for o in options), "-o", chosen)
    assert made.exit_code == 0, made.stderr
    result = run("view", chosen, "--png", folder / "x.png")
    assert result.exit_code == 1 and result.stderr.count("\n") == 1
    assert f"chosen.json is a {kind} plan" in result.stderr
    assert f"`dovetail simulate {chosen} --png {folder / 'x.png'}`" in result.stderr


def test_a_preset_becomes_a_network_file(tmp_path: Path) -> None:
    result = run("network", "--preset", "10gbe-16", "--name", "ours", "-o", tmp_path / "n.json", "--json")
    assert result.exit_code == 0
    network = files.read(tmp_path / "n.json", Network)
    assert (network.name, network.ranks, network.measured) == ("ours", 16, False)
    assert files.decode(result.stdout, Network) == network


# When something is wrong.


def truncated(text: str) -> str:
    return text[: len(text) // 2]


def with_nan(text: str) -> str:
    return text.replace('"median": 0.002,', '"median": NaN,', 1)


def with_version(text: str) -> str:
    return text.replace('"version": 1', '"version": 99', 1)


def with_kind(text: str) -> str:
    return text.replace('"kind": "profile"', '"kind": "recipe"', 1)


def with_a_stray_field(text: str) -> str:
    return text.replace('"name": "example"', '"name": "example", "colour": 1', 1)


BAD: list[tuple[Callable[[str], str | bytes | None], str]] = [
    (lambda _: None, "cannot be read: no such file"),
    (truncated, "truncated"),
    (with_nan, "layers[0].times[0].backward.median: expected a finite number, got nan"),
    (with_version, "version: expected 1, got 99"),
    (with_kind, "kind: expected"),
    (with_a_stray_field, "colour: unknown field"),
    (lambda _: "", "truncated"),
    (lambda _: "[1, 2]", "expected a JSON object"),
    (lambda _: b"\xff\xfe\x00", "expected JSON text in UTF-8"),
]


@pytest.mark.parametrize(("spoil", "words"), BAD, ids=[words[:30] for _, words in BAD])
@pytest.mark.parametrize("command", ["plan", "scale", "simulate", "view"])
def test_a_bad_file_gets_one_line_and_no_output(
    command: str, spoil: Callable[[str], str | bytes | None], words: str, folder: Path
) -> None:
    job, out = folder / "job.json", folder / "out.json"
    spoiled = spoil(job.read_text())
    if spoiled is None:
        job.unlink()
    else:
        job.write_bytes(spoiled if isinstance(spoiled, bytes) else spoiled.encode())
    arguments: dict[str, list[str | Path]] = {
        "plan": [job, folder / "net.json", "-o", out],
        "scale": [job, "--network", folder / "net.json", "--png", folder / "out.png"],
        "simulate": [folder / "plan.json", "--profile", job, "-o", out],
        "view": [job, folder / "measured.json", "--perfetto", out],
    }
    before = sorted(folder.iterdir())
    result = run(command, *arguments[command], "--json")
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.startswith("dovetail: ") and result.stderr.count("\n") == 1
    assert str(job) in result.stderr and words in result.stderr
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "job.json", "net.json", "--policy", "wise"], "no policy 'wise'"),
        (["plan", "job.json", "carrier-pigeon"], "no network preset 'carrier-pigeon'"),
        (["plan", "net.json", "job.json"], "kind: expected 'profile', got 'network'"),
        (["plan", "job.json", "net.json", "-o", "no/such/folder/plan.json"], "cannot be written"),
        (["network", "--preset", "10gbe-1"], "no network preset"),
        (["view", "job.json", "--perfetto", "t.json"], "expected at least one timeline"),
        (["view", "job.json", "--png", "t.png"], "expected at least one timeline or plan"),
        (["profile", "no-such-model"], "no model 'no-such-model'"),
        (["profile", "missing.py"], "missing.py: cannot be read"),
        (["profile", "quits.py"], "quits.py: fails when imported, with SystemExit: 0"),
        (["profile", "missing.py", "-o", "no/such/job.json"], "no/such/job.json: cannot be written"),
        (["network", "-o", "no/such/net.json"], "no/such/net.json: cannot be written"),
        (["train", "missing.py"], "expected a Python script"),
        (["train", "job.json", "--plan", "net.json"], "kind: expected 'plan'"),
    ],
    ids=lambda a: " ".join(a) if isinstance(a, list) else "",
)
def test_what_fails_says_so_in_one_line(arguments: list[str], words: str, folder: Path) -> None:
    (folder / "quits.py").write_text("raise SystemExit(0)\n")
    before = sorted(folder.iterdir())
    done = shell(*arguments, cwd=folder)
    assert done.returncode == 1 and done.stdout == ""
    said = [line for line in done.stderr.splitlines() if not line.endswith("…")]  # progress
    assert len(said) == 1 and said[0].startswith("dovetail: ") and words in said[0]
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(("number", "code", "said"), [(signal.SIGINT, 130, ["interrupted"]), (signal.SIGTERM, 143, [])])
def test_an_interrupt_is_one_line_at_most_and_leaves_nothing(
    number: signal.Signals, code: int, said: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "slow.py"
    script.write_text("import pathlib, time\npathlib.Path('started').touch()\ntime.sleep(100)\n")
    command = [*COMMAND, "profile", "slow.py", "-o", "out.json", "--json"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 100
        while not (tmp_path / "started").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code and out == ""
    assert err.splitlines() == ["loading slow.py …", *said]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["slow.py", "started"]


@pytest.mark.parametrize("extra", [[], ["--json"]], ids=["text", "json"])
def test_a_reader_that_has_seen_enough_is_no_error(extra: list[str], folder: Path) -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)  # so that the command must wait for its reader
    command = [*COMMAND, "view", *[str(folder / "job.json")] * 10, *extra]
    process = subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    os.read(reader, 10)
    os.close(reader)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0 and said == ""
