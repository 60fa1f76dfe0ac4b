"""`dovetail schedule`: from a CSV to an answer, and one line for wrong use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from dovetail.cli.schedule import ScheduleCommand, numbers, schedule
from dovetail.core.errors import Error

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
app.command(cls=ScheduleCommand)(schedule)
ROWS = "arrival,workers,duration\n" + "".join(f"{i * 4},{1 + 3 * (i % 3)},{20 + i % 7 * 10}\n" for i in range(30))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "mine.csv"
    path.write_text(ROWS)
    return path


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False, env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_csv_of_one_s_own_is_answered_in_80_columns(trace: Path) -> None:
    out = run(trace, "--devices", "16", "--spb", "ladder")
    assert "predicted: mine.csv (dovetail), 30 jobs on 16 devices" in out
    assert "not in the trace, assumed: iterations of 0.4 s" in out
    assert "jigsaw:ladder against gang-fifo-backfill: mean completion" in out
    assert "no schedule ends before" in out
    assert all(len(line) <= 80 for line in out.splitlines())


def test_where_sharing_gives_nothing_the_answer_says_so(trace: Path) -> None:
    out = run(trace, "--devices", "400")
    assert "mean completion the same, makespan the same; no gain for jobs of 1 worker, 2-4, 5-8" in " ".join(
        out.split()
    )


def test_json_has_every_figure_and_nothing_else_is_on_stdout(trace: Path) -> None:
    data = json.loads(run(trace, "--devices", "16", "--load", "0.5..0.7", "--json", "--policy", "jigsaw,gang-fifo"))
    assert [c["load"] for c in data["cells"]] == [0.5, 0.5, 0.6, 0.6, 0.7, 0.7]
    figures = data["cells"][0]["samples"][0]
    assert {"makespan", "busy", "throughput", "bound", "groups"} <= set(figures)
    assert {"mean", "median", "p99", "queueing", "worst_fairness"} <= set(figures["groups"][0])


def test_load_curves_and_the_schedule_are_written(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png, gantt = tmp_path / "curves.png", tmp_path / "gantt.json"
    run(trace, "--devices", "16", "--load", "0.5,1.0", "--png", png, "--perfetto", gantt)
    assert png.read_bytes().startswith(b"\x89PNG")
    events = json.loads(gantt.read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert {"device 0 · jigsaw at load 0.5 (predicted)", "device 0 · jigsaw at load 1 (predicted)"} <= names
    assert any(e.get("cat") == "task" for e in events)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--load", "many"], "--load: expected loads such as 0.5..1.2 or 0.5,0.9, got 'many'"),
        (["--load", "1.2..0.5"], "--load: expected loads such as"),
        (["--load", "0.5..1e9"], "--load: expected loads such as"),
        (["--load", "0.5..inf"], "--load: expected loads such as"),
        (["--memory", "inf"], "--memory: expected a finite number, got inf"),
        (["--restart", "inf"], "--restart: expected a finite number, got inf"),
        (["--window", "0.501..0.502"], "window 0.501..0.502: expected a part of the arrivals with jobs"),
        (["--window", "0.8..0.2"], "--window: expected a range within 0..1"),
        (["--policy", "magic"], "policy 'magic': expected one of jigsaw"),
        (["--devices", "4"], "needs 7 devices, the cluster has 4: see --clip"),
        (["--samples", "2"], "several samples need a load"),
        (["--shape", "round"], "shape 'round': expected one of gpu-bound"),
        (["--perfetto", "/nowhere/gantt.json"], "/nowhere"),
        (["--png", "x.png"], "--png draws load curves: give --load"),
    ],
)
def test_wrong_use_gets_one_line(trace: Path, arguments: list[str], line: str) -> None:
    with pytest.raises(Error) as e:
        run(trace, *arguments)
    assert line in str(e.value) and "\n" not in str(e.value)


def test_a_missing_file_beside_a_trace_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line for the file, none for the rows that need it."""
    trace = tmp_path / "pollux.csv"
    rows = "".join(f"bert-{i},10,bert,8,256\n" for i in range(5))
    trace.write_text("name,time,application,num_replicas,batch_size\n" + rows)
    with pytest.raises(Error) as e:
        schedule(trace)
    assert str(e.value) == f"{tmp_path / 'bert-scalability.csv'}: cannot be read: no such file or directory"
    assert not capsys.readouterr().err


def test_every_bad_row_gets_its_line(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace.write_text("arrival,workers,duration\n1,0,5\n2,1,5\n3,1,x\n")
    with pytest.raises(Error, match="line 2, workers"):
        schedule(trace)
    assert "line 4, duration: expected a number above 0, got 'x'" in " ".join(capsys.readouterr().err.split())


def test_jobs_wider_than_the_cluster_can_be_narrowed(trace: Path) -> None:
    assert "30 jobs on 4 devices" in run(trace, "--devices", "4", "--clip")


def test_help_lists_the_policies() -> None:
    assert "gandiva-timeslice" in run("--help")


def test_a_load_is_a_range_in_steps_of_a_tenth_or_a_list() -> None:
    assert numbers("--load", "0.5..0.75") == [0.5, 0.6, 0.7, 0.75]
    assert numbers("--load", "0.5..0.77") == [0.5, 0.6, 0.7, 0.77]
    assert numbers("--load", "0.5..1.2") == [0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2]
