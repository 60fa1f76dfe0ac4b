"""What the page is made of, without a browser: columns, first sentence, answers of commands, file and server."""

from __future__ import annotations

import base64
import http.client
import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core import files
from dovetail.core.errors import Error
from dovetail.core.job import Schedule
from dovetail.core.timeline import Span, SpanKind, Timeline
from dovetail.planning.depth.planner import plan as depth_plan
from dovetail.simulate.depth import simulate_depth
from dovetail.view import example, palette, tracks, units
from dovetail.view.page import (
    Contents,
    Given,
    Several,
    build,
    document,
    export,
    html,
    page,
    reports,
    serving,
    sort,
)
from dovetail.view.page.columns import drawn, shared
from dovetail.view.page.document import DrawnTimeline, encode
from dovetail.view.page.fabric import places, split
from dovetail.view.page.lead import bar
from tests.cli.command import run, shell
from tests.planning.merge.oracle import made_network, made_profile

from . import samples

needs_bundle = pytest.mark.skipif(not (html.BUNDLE / "app.js").exists(), reason="the page is not built (make page)")


def column(made: DrawnTimeline, name: str, dtype: str) -> list[float]:
    values: list[float] = np.frombuffer(base64.b64decode(getattr(made.columns, name)), dtype=dtype).tolist()
    return values


def cells(made: DrawnTimeline) -> list[tuple[str, str, str, float, float]]:
    """(row, look, name, start, stop) as a browser reads them."""
    start, long = column(made, "start", "<f8"), column(made, "duration", "<f4")
    look, name = column(made, "look", "<u1"), column(made, "name", "<u4")
    return [
        (row.label, made.looks[int(look[i])].label, made.names[int(name[i])], start[i], start[i] + long[i])
        for row in made.rows
        for i in range(row.first, row.stop)
    ]


def test_columns_hold_every_span_with_communication_split_where_it_is_exposed() -> None:
    spans = (
        Span(track="rank 0/compute", name="f", kind="forward", start=5.0, stop=7.0),
        Span(track="rank 0/network", name="b", kind="communication", start=6.0, stop=9.0, bytes=12),
    )
    made = drawn(Timeline(name="t", source="measured", spans=spans))
    assert cells(made) == [
        ("rank 0/compute", "forward", "f", 0.0, 2.0),
        ("rank 0/network", "communication, hidden", "b", 1.0, 2.0),
        ("rank 0/network", "communication, exposed", "b", 2.0, 4.0),
    ]
    assert column(made, "bytes", "<f8") == [0.0, 12.0, 12.0]


def test_an_empty_timeline_is_no_error() -> None:
    made = drawn(Timeline(name="t", source="predicted", spans=()))
    assert made.columns.count == 0 and made.rows == ()
    assert encode(document(sort([Timeline(name="t", source="predicted", spans=())])))


intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=12)


@given(compute=intervals, network=intervals)
def test_rows_are_sorted_never_overlap_and_lose_no_time(
    compute: list[tuple[int, int]], network: list[tuple[int, int]]
) -> None:
    tracks: tuple[tuple[str, SpanKind, list[tuple[int, int]]], ...] = (
        ("compute", "backward", compute),
        ("network", "communication", network),
    )
    spans = [
        Span(track=f"rank 0/{track}", name=track, kind=kind, start=float(a), stop=float(a + d))
        for track, kind, found in tracks
        for a, d in found
    ]
    made = drawn(Timeline(name="t", source="predicted", spans=tuple(spans)))
    all_cells = cells(made)
    for row in made.rows:
        mine = [c for c in all_cells if c[0] == row.label]
        assert all(a[4] <= b[3] + 1e-6 for a, b in pairwise(mine))
    assert sum(c[4] - c[3] for c in all_cells) == pytest.approx(sum(s.duration for s in spans), abs=1e-3)


def test_a_schedule_shows_who_ran_where_the_largest_jobs_in_colours() -> None:
    made = shared(samples.schedule())
    assert [row.label for row in made.drawn.rows] == ["device 0", "device 1"]
    assert {c[1] for c in cells(made.drawn)} == {"job 0", "job 1"}
    assert [j.color for j in made.jobs] == list(palette.SERIES[:2])
    assert made.jobs[0].device_time == pytest.approx(9.0) and made.jobs[0].tasks == 10
    assert "90.9 %" in made.sentence  # 18 device-seconds of tasks in 9.9 s on two devices


def test_leases_that_share_a_device_get_rows_of_their_own() -> None:
    made = shared(Schedule(policy="p", source="measured", devices=2, leases=samples.schedule().leases))
    assert [row.label for row in made.drawn.rows] == ["device 0", "device 0 (2)", "device 1", "device 1 (2)"]


def test_the_three_numbers_agree_with_the_timeline() -> None:
    predicted, _ = example.timelines()
    found = bar(predicted, "x")
    assert found is not None
    assert found.exposed == pytest.approx(tracks.exposed(predicted)) == pytest.approx(0.020)
    assert found.hidden == pytest.approx(0.022)
    assert found.compute == pytest.approx(0.030 + 0.060 + 0.005)


def test_what_was_measured_twice_is_compared_and_a_prediction_stands_beside_its_namesake() -> None:
    predicted, slow = example.timelines()
    quick = Timeline(name="ours", source="measured", spans=predicted.spans)
    slow, guess = (msgspec.structs.replace(t, name=n) for t, n in ((slow, "theirs"), (predicted, "ours")))
    made = document(sort([example.profile(), example.network(), slow, quick, guess]))
    assert [b.label for b in made.lead.bars] == ["theirs", "ours"], "what ran needs no prediction of itself"
    assert made.lead.more[0] == (
        "ours is measured at 119 ms, theirs at 128 ms: 1.08 times as fast, because less of the communication is "
        "exposed."
    )
    assert made.compared is not None and made.compared.sentence == "The prediction and the measurement agree."
    back = document(sort([quick, slow])).lead.more[0]
    assert back == "theirs is measured at 128 ms, ours at 119 ms: slower, so keep ours."


def test_sources_stand_side_by_side_and_explain_no_more_than_they_are_about() -> None:
    class Live:
        live = True

        def contents(self) -> Contents:
            return sort([samples.fabric()], files=["a"], only=["fabrics"])

    live, given = Live(), Given(sort([samples.schedule()], files=["b"]))
    both = Several([live, given])
    assert both.live and not Several([given]).live
    assert document(both.contents()).files == ("a", "b")
    assert len(both.contents().fabrics) == len(both.contents().schedules) == 1
    assert set(document(both.contents()).empty) == set(build.EMPTY)
    assert set(document(Several([live]).contents()).empty) == {"fabrics"}


def test_the_first_sentence_says_where_the_time_goes_and_what_would_change() -> None:
    lead = document(sort([example.profile(), example.network()])).lead
    assert re.match(
        r"Of every \S+ ms that example trains \(predicted, emulated\), 48.0 ms go into computing", lead.sentence
    )
    assert [b.label for b in lead.bars] == ["torch's default", "dovetail's plan (auto)"]
    assert re.search(
        r"dovetail's plan \(auto\) is predicted at .*, torch's default at .*: .* times as fast", lead.more[0]
    )


def test_a_step_of_partial_depth_waits_for_the_network_that_all_ranks_share() -> None:
    profile, network = made_profile([1000] * 8, [2.0] * 8, forward=[1.0] * 8), made_network(0.1, 4e-3)
    chosen = depth_plan(profile, network, workers=4, policy="ladder")
    timeline = simulate_depth(chosen, profile, network)
    found, iteration = bar(timeline, "x"), chosen.phases[-1].iteration
    assert found is not None
    assert found.compute == pytest.approx(24.0), "of the deepest worker"
    assert found.exposed == pytest.approx(tracks.exposed(timeline)) == pytest.approx(iteration - 24.0)
    assert (found.hidden or 0.0) + (found.exposed or 0.0) == pytest.approx(timeline.busy("communication"))
    waited = units.seconds(iteration - 24.0)
    assert f"24.0 s go into computing and {waited}, " in document(sort([timeline])).lead.sentence
    seen = [c for c in cells(drawn(timeline)) if c[1] == "communication, exposed"]
    assert {c[0] for c in seen} == {"all ranks/network"}
    assert sum(c[4] - c[3] for c in seen) == pytest.approx(iteration - 24.0, rel=1e-4)


def test_a_prediction_is_never_compared_with_a_measurement_of_something_else() -> None:
    """The measured timeline comes first, the plan is still judged against the default's prediction."""
    lead = document(sort([example.profile(), example.network(), example.timelines()[1]])).lead
    assert [b.source for b in lead.bars] == ["measured", "predicted", "predicted"]
    assert "128 ms" in lead.sentence and "128 ms" not in lead.more[0]


def test_with_a_profile_alone_communication_is_not_known() -> None:
    lead = document(sort([example.profile()])).lead
    assert lead.bars[0].exposed is None and "not known yet" in lead.sentence


def test_a_plan_is_predicted_again_from_what_lies_beside_it(tmp_path: Path) -> None:
    for name, noun in (("job.json", example.profile()), ("net.json", example.network())):
        files.write(tmp_path / name, noun)
    plan = tmp_path / "plan.json"
    assert run("plan", tmp_path / "job.json", tmp_path / "net.json", "-o", plan).exit_code == 0
    from dovetail.cli.page import read

    found = document(read([plan]))
    assert [d.source for d in found.plans[0].drawn] == ["predicted", "predicted"]
    assert found.profiles == () and found.scaling, "what lies beside is used, and not shown for itself"
    alone = document(sort([files.read(plan, type(read([plan]).plans[0]))]))
    assert alone.plans[0].drawn == () and "are not here" in alone.plans[0].missing


def test_answers_of_commands_are_known_by_their_fields(tmp_path: Path) -> None:
    files.write(tmp_path / "job.json", example.profile())
    files.write(tmp_path / "net.json", example.network())
    for command in (
        ["scale", tmp_path / "job.json", "--network", tmp_path / "net.json", "--workers", "2..8"],
        ["plan", tmp_path / "job.json", "--burst", "--devices", "4", "-o", tmp_path / "burst-plan.json"],
        ["schedule", "--devices", "64", "--jobs", "12"],
    ):
        result = run(*command, "--json")
        assert result.exit_code == 0, result.output
        (tmp_path / f"{command[0]}.json").write_text(result.stdout)
    kinds = [type(reports.read(tmp_path / f"{name}.json")) for name in ("scale", "plan", "schedule")]
    assert kinds == [reports.ScaleReport, reports.BurstReport, reports.StudyReport]
    found = document(sort(reports.read(tmp_path / f"{name}.json") for name in ("scale", "plan", "schedule")))
    assert {p.family for p in found.bursts[0].points} >= {"burst", "data-parallel"}
    assert [p.chosen for p in found.bursts[0].points].count(True) == 1
    assert found.studies[0].outcomes[0].mean > 0
    assert found.scaling[0].series[0].workers == (2, 4, 8)


def test_a_wrong_answer_gets_one_line(tmp_path: Path) -> None:
    bad = tmp_path / "scale.json"
    bad.write_text(json.dumps({"profile": "p", "network": "n", "batch": 0, "points": []}))
    with pytest.raises(Error, match=r"scale\.json: batch: expected .* in what `dovetail scale --json` prints"):
        reports.read(bad)
    result = run("view", bad, "--html", tmp_path / "x.html")
    assert result.exit_code == 1 and len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("link", "others", "ends"),
    [
        ("a-b", [], ("a", "b")),
        ("core-1-leaf-2", ["core-1-leaf-3", "core-2-leaf-2"], ("core-1", "leaf-2")),
        ("x-1-y", ["x-1-z", "y-z"], ("x-1", "y")),
    ],
)
def test_the_ends_of_a_link_are_found_in_its_name(link: str, others: list[str], ends: tuple[str, str]) -> None:
    assert split(link, [link, *others]) == ends


def test_switches_stand_apart_and_linked_ones_near() -> None:
    ring = [(i, (i + 1) % 8) for i in range(8)]
    at = places(8, ring)
    apart = np.linalg.norm(at[:, None] - at[None], axis=2)
    assert apart[~np.eye(8, dtype=bool)].min() > 0.2
    assert all(apart[a, b] < apart[a, (a + 4) % 8] for a, b in ring)
    assert at.min() >= 0 and at.max() <= 1


@needs_bundle
def test_the_exported_file_has_everything_inside(tmp_path: Path) -> None:
    export(samples.everything(), tmp_path / "out.html")
    text = (tmp_path / "out.html").read_text()
    head = text[: text.index("<script")]
    assert "connect-src 'none'" in head and "default-src 'none'" in head
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//", text.split('id="data"')[0])
    assert [p.name for p in tmp_path.iterdir()] == ["out.html"]


@needs_bundle
def test_data_cannot_end_its_element() -> None:
    bad = Timeline(name="</script><b>", source="measured", spans=())
    text = page(document(sort([bad])))
    assert "</script><b>" not in text
    assert text.count("</script>") == 2


@needs_bundle
def test_the_server_answers_its_own_name_only() -> None:
    with serving(Given(Contents())) as server:
        asked = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)

        def status(path: str, host: str) -> int:
            asked.request("GET", path, headers={"Host": host})
            answer = asked.getresponse()
            answer.read()
            return answer.status

        here = f"127.0.0.1:{server.server_port}"
        assert status("/", here) == status("/", f"localhost:{server.server_port}") == 200
        assert status("/", f"attacker.example:{server.server_port}") == status("/", "127.0.0.1") == 403
        assert status("/../../etc/passwd", here) == status("/data.json", here) == 404
        assert server.server_address[0] == "127.0.0.1"
        asked.close()


@needs_bundle
def test_serve_prints_the_address_and_ends_with_an_interrupt(tmp_path: Path) -> None:
    import os
    import signal

    files.write(tmp_path / "t.json", example.timelines()[0])
    command = [sys.executable, "-m", "dovetail", "view", str(tmp_path / "t.json"), "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/", address)
        assert found, address
        asked = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=10)
        asked.request("GET", "/")
        assert asked.getresponse().status == 200
        asked.close()
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(timeout=20) == 0


def test_a_page_that_is_not_built_says_how_to_build_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "BUNDLE", tmp_path)
    files.write(tmp_path / "t.json", example.timelines()[0])
    result = run("view", tmp_path / "t.json", "--html", tmp_path / "out.html")
    assert result.exit_code == 1
    assert result.stderr.strip().splitlines() == [f"dovetail: {html.HOW}"]
    assert not (tmp_path / "out.html").exists()


def test_the_terminal_shows_what_it_always_did(tmp_path: Path) -> None:
    files.write(tmp_path / "t.json", example.timelines()[0])
    files.write(tmp_path / "s.json", samples.schedule())
    assert "predicted · example: 119 ms" in run("view", tmp_path / "t.json").stdout
    assert "device 1/tasks" in run("view", tmp_path / "s.json").stdout
    assert shell("view", tmp_path / "t.json", "--html", tmp_path / "x.txt").returncode == 2
