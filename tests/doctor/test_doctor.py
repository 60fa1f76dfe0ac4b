"""`dovetail doctor`: what works passes, what is wrong gets one line, and whatever breaks, the rest goes on."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
import pytest

from dovetail.core import files
from dovetail.core.errors import Error
from dovetail.doctor.checklist import CHECKLIST
from dovetail.doctor.diagnosis import Diagnosis, Machine
from dovetail.doctor.examination import examine
from tests.cli.command import run, shell
from tests.paths import ROOT

BROKEN = "tests.doctor.broken_checks"
COMPARED = {name: where for name, where in CHECKLIST.items() if name != "network"}
HERE = Machine(dovetail="1", torch="2", python="3", system="Linux", cores=1, device="cpu", devices=(), backend="gloo")


@pytest.fixture(autouse=True)
def ranks_find_these_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{ROOT}")


@pytest.fixture
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares the process that looks at the machine."""
    monkeypatch.setattr("dovetail.doctor.examination.look", lambda *_: HERE)


def test_every_check_passes_on_this_machine_and_the_report_has_all_of_it(tmp_path: Path) -> None:
    done = shell("doctor", "--device", "cpu", cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = files.read(tmp_path / "doctor.json", Diagnosis)
    assert [check.name for check in found.checks] == list(CHECKLIST) and found.passed
    assert (found.ranks, found.machine.device, found.machine.backend) == (2, "cpu", "gloo")
    assert found.network is not None and found.network.latency > 0 and found.network.bytes_per_second > 1e6
    assert {check.name for check in found.checks if check.tolerance is not None} == set(COMPARED)
    assert "7 of 7 checks passed" in done.stdout and found.machine.torch in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert str(tmp_path) not in (tmp_path / "doctor.json").read_text(), "a report that is sent names no folder"


def test_every_check_passes_on_the_emulated_accelerator_and_a_race_does_not(accelerator: str) -> None:
    found = examine(device=accelerator, checklist={**COMPARED, "races": f"{BROKEN}:races"})
    outcomes = {check.name: (check.outcome, check.line) for check in found.checks}
    *rest, (outcome, line) = outcomes.values()
    assert {outcome for outcome, _ in rest} == {"passed"}, outcomes
    assert outcome == "failed" and "nothing orders the two" in line and "broken_checks.py:" in line
    assert (found.machine.backend, len(found.machine.devices)) == ("eccl", 2)
    syncs = {check.name: check.host_syncs for check in found.checks if check.name in COMPARED}
    # None in a step of data parallelism, at most one in a step of the others.
    assert {name for name, count in syncs.items() if count} <= {"PartialBackprop", "Burst"}, found.checks
    assert all(count is not None and count <= 1 for count in syncs.values()), found.checks


@pytest.mark.usefixtures("known_machine")
def test_what_hangs_or_dies_is_one_line_the_rest_goes_on_and_the_exit_code_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {name: f"{BROKEN}:{name}" for name in ("is_no_number", "hangs", "fine", "dies")}
    real = examine
    monkeypatch.setattr(
        "dovetail.doctor.examination.examine", lambda **options: real(**options, checklist=given, check_limit=6.0)
    )
    result = run("doctor", "--device", "cpu", "--json", "-o", "sent.json")
    assert result.exit_code == 1
    assert result.stderr.endswith(
        "dovetail: doctor: is_no_number, hangs, dies did not pass; send sent.json with your question\n"
    )
    found = files.read("sent.json", Diagnosis)
    assert files.decode(result.stdout, Diagnosis) == found and not found.passed
    outcomes = {check.name: check.outcome for check in found.checks}
    assert outcomes == {"is_no_number": "failed", "hangs": "failed", "fine": "passed", "dies": "failed"}
    said = {check.name: check.line for check in found.checks}
    assert said["is_no_number"].startswith("parameters differ by ")
    assert "rank 0 hung for 0:00:06, at " in said["hangs"] and "threading.py:" in said["hangs"]
    assert said["dies"] == "rank 1 was killed by SIGKILL"
    assert not any("\n" in line for line in said.values())


@pytest.mark.usefixtures("known_machine")
def test_no_check_passes_where_training_is_wrong() -> None:
    """A learning rate that is 1 % too large in what is checked, and right in its reference."""
    wrong = {name: f"{BROKEN}:{where.partition(':')[2]}" for name, where in COMPARED.items()}
    found = examine(device="cpu", checklist=wrong)
    assert {check.name: check.outcome for check in found.checks} == dict.fromkeys(COMPARED, "failed")
    assert all(check.difference is not None and check.difference > 3e-4 for check in found.checks)
    assert all("parameters differ by" in check.line for check in found.checks)


@pytest.mark.usefixtures("known_machine")
def test_ranks_that_cannot_start_are_told_of_once() -> None:
    found = examine(device="cpu", checklist={"absent": f"{BROKEN}:absent", "fine": f"{BROKEN}:fine"})
    assert [check.outcome for check in found.checks] == ["not run", "not run"]
    assert re.search(r"could not start: rank \d: AttributeError", found.checks[0].line)


@pytest.mark.usefixtures("known_machine")
def test_when_the_time_is_over_the_rest_is_not_run() -> None:
    found = examine(device="cpu", checklist={"fine": f"{BROKEN}:fine"}, limit=1.0)
    assert [(check.outcome, check.line) for check in found.checks] == [("not run", "the 1 s for all checks were over")]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--ranks", "1"], 2, "--ranks"),
        (["--ranks", "65"], 1, "dovetail: ranks: expected 2 to 64, got 65\n"),
        (["--device", "warp drive"], 1, "got 'warp drive'\n"),
        (["-o", "no/such/folder/doctor.json"], 1, "dovetail: no/such/folder/doctor.json: cannot be written"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_wrong_use_is_one_line_and_leaves_nothing(
    arguments: list[str], code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("doctor", *arguments)
    assert result.exit_code == code and result.stdout == "" and words in result.stderr
    assert "Traceback" not in result.stderr and not list(tmp_path.iterdir())


def test_more_ranks_than_devices_is_refused_before_any_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    here = msgspec.structs.replace(HERE, device="cuda", devices=("a GPU",))
    monkeypatch.setattr("dovetail.doctor.examination.look", lambda *_: here)
    with pytest.raises(Error, match="2 ranks need 2 devices, found 1 of type 'cuda': `--device cpu` and"):
        examine()
