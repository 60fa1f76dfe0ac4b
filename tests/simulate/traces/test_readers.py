"""Trace readers: every format from a small file, and one clear line for every bad row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dovetail.cli.schedule import SHIPPED
from dovetail.core.errors import Error, InputError
from dovetail.simulate.traces import Assumed, TraceError, read_trace

PHILLY = "timestamp,duration,num_gpus,gpu_time,cluster\n"
MURI = (
    "job_id,num_gpu,submit_time,iterations,model_name,batch_size,duration,interval,iteration_time,"
    "resource_time_0,resource_time_1,resource_time_2,priority\n"
)


def write(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_philly_rows_become_jobs_of_their_duration_in_order_of_arrival(tmp_path: Path) -> None:
    text = PHILLY + "2017-10-09 07:01:55,66.0,1,66.0,11cb48\n2017-10-09 06:00:55,400.0,8,3200.0,6214e9\n\n"
    trace = read_trace(write(tmp_path, text), assumed=Assumed("gpu-bound"))
    assert trace.format == "philly" and "0.4 s" in trace.assumed
    first, second = trace.jobs
    assert (first.arrival, first.workers, first.tenant, second.arrival) == (0.0, 8, "6214e9", 3660.0)
    assert first.alone() == pytest.approx(400.0) and second.alone() == pytest.approx(66.0)
    assert first.shape().duty == pytest.approx(0.95)


def test_muri_rows_keep_their_measured_iterations(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, MURI + "7,4,2000,50,bert,4,9500,0,190,0.5,163,18,0\n"))
    (job,) = trace.jobs
    assert (job.workers, job.iterations, job.arrival) == (4, 50, 0.0)
    assert job.gang_period == pytest.approx(0.190) and job.forward + job.backward == pytest.approx(0.163)


def test_gavel_rows_take_their_rate_from_the_throughputs(tmp_path: Path) -> None:
    rates = {"v100": {"('LM', 1)": {"null": 10.0}, "('LM', 2)": {"null": 16.0}}}
    write(tmp_path, json.dumps(rates), "simulation_throughputs.json")
    rows = 'LM\tpython "x" -n\t-n\t1\t1000\t0.0\t1\nLM\tpython\t-n\t1\t1600\t5.0\t2\n'
    one, two = read_trace(write(tmp_path, rows, "a.trace")).jobs
    assert (one.iterations, one.gang_period) == pytest.approx((1000, 0.1))
    assert (two.iterations, two.gang_period, two.alone()) == pytest.approx((800, 0.125, 100.0))
    bad = write(tmp_path, "GAN\tpython\t-n\t1\t10\t0.0\t1\n", "b.trace")
    with pytest.raises(Error, match=r"b.trace: line 1, job_type: expected a type with a throughput"):
        read_trace(bad)
    with pytest.raises(InputError, match="k80"):
        read_trace(tmp_path / "a.trace", device="k80")


def test_pollux_rows_take_their_iteration_from_the_tightest_measured_placement(tmp_path: Path) -> None:
    write(
        tmp_path,
        "placement,local_bsz,step_time,sync_time\n44,32,0.5,0.1\n1111,32,9,9\n1,32,0.2,0.0\n",
        "bert-placements.csv",
    )
    write(tmp_path, "num_nodes,num_replicas,local_bsz,step_time,sync_time\n8,8,32,0.8,0.4\n", "bert-scalability.csv")
    path = write(tmp_path, "name,time,application,num_replicas,batch_size\nbert-0,10,bert,8,256\n")
    (job,) = read_trace(path).jobs
    assert (job.gang_period, job.off_device) == pytest.approx((0.5, 0.1))
    assert job.gang_work == pytest.approx(3 * 3600, rel=0.01)
    path.write_text("name,time,application,num_replicas,batch_size\nx,10,chess,8,256\n")
    with pytest.raises(Error, match=r"line 2, application: expected one of cifar10"):
        read_trace(path)


def test_bad_files_beside_a_trace_get_one_line_too(tmp_path: Path) -> None:
    path = write(tmp_path, "name,time,application,num_replicas,batch_size\nbert-0,10,bert,8,256\n")
    scaled = "num_nodes,num_replicas,local_bsz,step_time,sync_time\n8,8,32,0.8,0.4\n"
    placed = "placement,local_bsz,step_time,sync_time\n4x,32,0.5,0.1\n"
    write(tmp_path, scaled, "bert-scalability.csv")
    write(tmp_path, placed, "bert-placements.csv")
    with pytest.raises(Error, match=r"bert-placements.csv: line 2, placement: expected one digit for each node"):
        read_trace(path)
    write(tmp_path, scaled.replace("step_time", "seconds"), "bert-scalability.csv")
    with pytest.raises(Error, match=r"bert-scalability.csv: line 1: expected a column step_time"):
        read_trace(path)
    write(tmp_path, "[1, 2]", "simulation_throughputs.json")
    with pytest.raises(Error, match="expected throughputs of this device, got list"):
        read_trace(write(tmp_path, "GAN\tpython\t-n\t1\t10\t0.0\t1\n", "b.trace"))


def test_a_missing_file_beside_a_pollux_trace_is_told_once(tmp_path: Path) -> None:
    """Not once for every row that needs it: what is wrong is one file, not the rows."""
    rows = "".join(f"bert-{i},10,bert,8,256\n" for i in range(5))
    path = write(tmp_path, "name,time,application,num_replicas,batch_size\n" + rows)
    with pytest.raises(InputError) as e:
        read_trace(path)
    assert str(e.value) == f"{tmp_path / 'bert-scalability.csv'}: cannot be read: no such file or directory"


def test_a_byte_order_mark_is_not_part_of_the_first_column_s_name(tmp_path: Path) -> None:
    path = tmp_path / "excel.csv"
    path.write_text("arrival,workers,duration\n3,2,100\n", encoding="utf-8-sig")
    assert len(read_trace(path).jobs) == 1


def test_arrival_workers_and_duration_are_enough(tmp_path: Path) -> None:
    (job,) = read_trace(write(tmp_path, "arrival,workers,duration\n3,2,100\n")).jobs
    assert (job.arrival, job.workers) == (0.0, 2) and job.alone() == pytest.approx(100.0)


def test_the_trace_says_what_was_assumed(tmp_path: Path) -> None:
    short = read_trace(write(tmp_path, "arrival,workers,duration\n3,2,100\n")).assumed
    assert "iterations of 0.4 s, 85% of it on the device" in short and "4 GiB more while a task runs" in short
    known = "arrival,workers,iterations,forward,backward"
    assert read_trace(write(tmp_path, known + "\n0,1,9,1,2\n")).assumed.startswith("no time off the device; 1.5 GiB")
    whole = known + ",off_device,persistent_bytes,ephemeral_bytes\n0,1,9,1,2,0,1,1\n"
    assert not read_trace(write(tmp_path, whole)).assumed


def test_our_own_format_can_set_every_attribute_of_a_job(tmp_path: Path) -> None:
    header = "name,arrival,workers,iterations,forward,backward,off_device,persistent_bytes,ephemeral_bytes,"
    header += "min_workers,background,tenant\n"
    (job,) = read_trace(write(tmp_path, header + "a,0,4,10,1,2,0.5,7,8,2,yes,lab\n")).jobs
    assert (job.forward, job.backward, job.off_device, job.persistent_bytes, job.ephemeral_bytes) == (1, 2, 0.5, 7, 8)
    assert (job.phases[0].min_workers, job.background, job.tenant) == (2, True, "lab")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (PHILLY + "yesterday,66,1,66,a\n", "line 2, timestamp: expected a date and time such as"),
        (PHILLY + "2017-10-09 07:01:55,0,1,0,a\n", "line 2, duration: expected a number above 0, got '0'"),
        (PHILLY + "2017-10-09 07:01:55,66,1.5,99,a\n", "line 2, num_gpus: expected a whole number of at least 1"),
        (PHILLY + "2017-10-09 07:01:55,66,2,66,a\n", "line 2, gpu_time: expected duration × num_gpus = 132, got '66'"),
        (PHILLY + "2017-10-09 07:01:55,nan,1,66,a\n", "line 2, duration: expected a number above 0, got 'nan'"),
        (PHILLY + "2017-10-09 07:01:55,66,1\n", "line 2: expected 5 fields, got 3"),
        (PHILLY + "\n2017-10-09 07:01:55,66,1,66,a\n", "line 2: expected a row, got an empty line"),
        (MURI + "7,4,2000,many,bert,4,9500,0,190,0.5,163,18,0\n", "line 2, iterations: expected a whole number"),
        ("arrival,workers,duration\n-1,2,5\n", "line 2, arrival: expected a number of at least 0, got '-1'"),
        ("arrival,workers,duration\n1,2,1e308\n", "line 2, duration: expected a number of at most 1e+12"),
        ("arrival,workers,duration\n1,99999999999,5\n", "line 2, workers: expected a whole number of at most"),
        ("arrival,workers,duration\n" + "9" * 5000 + ",1,5\n", "line 2, arrival: expected a number of at least 0"),
        ("x" * 200_000 + "\n", "line 1: expected comma-separated values"),
        ("arrival,workers,duration,min_workers\n1,2,5,3\n", "line 2, min_workers: expected at most workers = 2"),
        ("arrival,workers,duration,background\n1,2,5,maybe\n", "line 2, background: expected yes or no, got 'maybe'"),
        ("arrival,workers,gpu,duration\n1,2,5,3\n", "line 1, gpu: unknown column"),
        ("arrival,workers\n1,2\n", "line 1: expected a column duration, or iterations, forward and backward"),
        ("arrival,workers,workers,duration\n1,2,2,5\n", "line 1: expected every column once, got 'workers' twice"),
        ("a,b\n1,2\n", "line 1: expected a header with arrival and workers"),
        ("arrival,workers,duration\n", "expected at least one row below the header, got none"),
        ("", "line 1: expected a header, got an empty line"),
    ],
)  # fmt: skip
def test_a_bad_row_gets_one_line_with_its_number_and_field(tmp_path: Path, text: str, line: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(Error) as e:
        read_trace(path)
    assert str(e.value).startswith(f"{path}: {line}")
    assert "\n" not in str(e.value)


def test_every_bad_row_is_reported(tmp_path: Path) -> None:
    path = write(tmp_path, "arrival,workers,duration\n1,0,5\n2,1,5\n3,1,x\n")
    with pytest.raises(TraceError, match="1 more bad row") as e:
        read_trace(path)
    assert [str(r).split(": ")[1] for r in e.value.rows] == ["line 2, workers", "line 4, duration"]


def test_a_missing_or_binary_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_trace(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="UTF-8"):
        read_trace(tmp_path / "binary.csv")


def test_the_shipped_trace_is_read_without_assumptions() -> None:
    trace = read_trace(SHIPPED)
    assert trace.format == "dovetail" and not trace.assumed
    assert len(trace.jobs) == 240 and len({j.tenant for j in trace.jobs}) == 3
