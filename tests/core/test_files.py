"""A stored noun is read back as it was, or refused in one line that names the file and the field."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core import files
from dovetail.core.errors import Error, InputError
from dovetail.core.network import Collective, CostSample, Fit, Network
from dovetail.core.plan import Bucket, Plan, Prediction
from dovetail.core.profile import Layer, LayerTime, ParameterTensor, Profile, Quantiles
from dovetail.core.timeline import Span, Timeline

Q = Quantiles(median=0.002, low=0.001, high=0.004, samples=20)
PROFILE = Profile(
    name="net",
    device="cpu",
    batch=8,
    layers=(
        Layer(
            name="conv",
            type="Conv2d",
            parameter_bytes=400,
            activation_bytes=64,
            times=(
                LayerTime(batch=4, forward=Q, backward=Q),
                LayerTime(batch=8, forward=Q.scaled(2), backward=Q.scaled(2)),
            ),
        ),
        Layer(
            name="fc",
            type="Linear",
            parameter_bytes=800,
            activation_bytes=32,
            times=(LayerTime(batch=8, forward=Q, backward=Q),),
        ),
    ),
    tensors=(
        ParameterTensor(name="fc.weight", layer=1, bytes=800, dtype="float32", ready=0.001),
        ParameterTensor(name="conv.weight", layer=0, bytes=400, dtype="float32", ready=0.003),
    ),
    edges=((0, 1),),
)
NETWORK = Network(
    name="test",
    ranks=4,
    source="made up",
    measured=True,
    collectives={
        "all_reduce": Collective(
            fit=Fit(latency=1e-3, seconds_per_byte=1e-8, error=0.02),
            samples=(CostSample(bytes=1024, seconds=Q), CostSample(bytes=4096, seconds=Q)),
        )
    },
)
PLAN = Plan(
    policy="optimal",
    profile="net",
    network="test",
    workers=4,
    batch=8,
    tensors=("fc.weight", "conv.weight"),
    dtypes=("float32",),
    buckets=(Bucket(start=0, stop=1, bytes=800), Bucket(start=1, stop=2, bytes=400)),
    prediction=Prediction(iteration=0.01, forward=0.004, backward=0.005, exposed=0.001, lower_bound=0.0099),
)
TIMELINE = Timeline(
    name="t",
    source="predicted",
    spans=(Span(track="rank 0/compute", name="forward", kind="forward", start=0.0, stop=0.004),),
)
NOUNS: list[files.Noun] = [PROFILE, NETWORK, PLAN, TIMELINE]


@pytest.mark.parametrize("noun", NOUNS, ids=lambda n: n.kind)
def test_a_noun_comes_back_as_it_was_stored(noun: files.Noun, tmp_path: Path) -> None:
    files.write(tmp_path / "x.json", noun)
    assert files.read(tmp_path / "x.json", type(noun)) == noun
    assert list(tmp_path.iterdir()) == [tmp_path / "x.json"]
    head = list(json.loads((tmp_path / "x.json").read_text()))[:2]
    assert head == ["kind", "version"]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=6), st.integers(1, 10**12))
def test_any_spans_survive_storage(times: list[float], nbytes: int) -> None:
    spans = tuple(
        Span(track="rank 0/network", name=f"b{i}", kind="communication", start=t, stop=t + 1, bytes=nbytes)
        for i, t in enumerate(times)
    )
    timeline = Timeline(name="x", source="measured", spans=spans)
    assert files.decode(files.encode(timeline), Timeline) == timeline


def edited(change: Callable[[Any], None], noun: files.Noun = PROFILE) -> str:
    data = json.loads(files.encode(noun))
    change(data)
    return json.dumps(data)


BAD: list[tuple[str, str, str, str]] = [
    ("an unknown version", edited(lambda d: d.update(version=2)), "version", "expected 1, got 2"),
    ("a version that is true", edited(lambda d: d.update(version=True)), "version", "expected 1"),
    ("no version", edited(lambda d: d.pop("version")), "version", "missing"),
    ("no kind", edited(lambda d: d.pop("kind")), "kind", "missing, expected 'profile'"),
    ("another noun", files.encode(PLAN), "kind", "expected 'profile', got 'plan'"),
    ("a missing field", edited(lambda d: d.pop("batch")), "batch", "missing"),
    ("a missing inner field", edited(lambda d: d["layers"][1].pop("type")), "layers[1].type", "missing"),
    ("an unknown field", edited(lambda d: d.update(colour="red")), "colour", "unknown field"),
    ("a negative size", edited(lambda d: d["tensors"][0].update(bytes=-1)), "tensors[0].bytes", ">= 0"),
    ("a negative time", edited(lambda d: d["tensors"][0].update(ready=-0.1)), "tensors[0].ready", ">= 0"),
    ("a NaN", edited(lambda d: d["tensors"][1].update(ready=float("nan"))), "tensors[1].ready", "finite"),
    ("an infinity", edited(lambda d: d["tensors"][1].update(ready=float("inf"))), "tensors[1].ready", "finite"),
    ("an endless time", edited(lambda d: d["tensors"][1].update(ready=1e308)), "tensors[1].ready", "<= 1"),
    ("more bytes than exist", edited(lambda d: d["tensors"][0].update(bytes=2**63)), "tensors[0].bytes", "<= 2"),
    ("a batch beyond counting", edited(lambda d: d.update(batch=10**400)), "batch", "<= 2"),
    (
        "a number without end",
        edited(lambda d: d.update(batch=8)).replace('"batch": 8', '"batch": ' + "9" * 5000),
        "",
        "digits",
    ),
    ("a word for a number", edited(lambda d: d.update(batch="8")), "batch", "expected int, got str"),
    ("no layers", edited(lambda d: d.update(layers=[])), "layers", "not empty"),
    ("no tensors", edited(lambda d: d.update(tensors=[])), "tensors", "not empty"),
    ("a tensor of no layer", edited(lambda d: d["tensors"][0].update(layer=7)), "tensors[0].layer", "below 2"),
    ("a tensor twice", edited(lambda d: d["tensors"][0].update(name="conv.weight")), "tensors", "twice"),
    ("ready times that go back", edited(lambda d: d["tensors"][0].update(ready=9)), "tensors[1].ready", "ascending"),
    ("an edge into nothing", edited(lambda d: d.update(edges=[[0, 5]])), "edges[0]", "below 2"),
    ("batches out of order", edited(lambda d: d["layers"][0]["times"].reverse()), "layers[0].times", "ascending"),
    ("a list", "[1, 2]", "", "expected a JSON object"),
    ("half a file", files.encode(PROFILE)[:500], "line ", "truncated"),
    ("not JSON", "hello", "line 1", "valid JSON"),
    ("nothing", "", "line 1", "truncated"),
]


@pytest.mark.parametrize(("text", "field", "expected"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_a_bad_profile_is_refused_in_one_line_that_names_file_and_field(
    text: str, field: str, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "job.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        files.read(path, Profile)
    message = str(caught.value)
    assert message.startswith(str(path)) and "\n" not in message
    assert caught.value.field.startswith(field) and expected in message


def test_a_file_that_is_absent_or_binary_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.json: cannot be read: no such file"):
        files.read(tmp_path / "nowhere.json", Profile)
    (tmp_path / "x.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="UTF-8"):
        files.read(tmp_path / "x.json", Profile)
    with pytest.raises(InputError, match="is a directory"):
        files.read(tmp_path, Profile)


@pytest.mark.parametrize(
    ("noun", "text", "field"),
    [
        (Plan, edited(lambda d: d["buckets"].pop(), PLAN), "buckets"),
        (Plan, edited(lambda d: d["buckets"][1].update(start=0), PLAN), "buckets[1]"),
        (Timeline, edited(lambda d: d["spans"][0].update(start=1.0), TIMELINE), "spans[0].stop"),
        (Network, edited(lambda d: d["collectives"]["all_reduce"]["samples"].reverse(), NETWORK), "collectives"),
        (Network, edited(lambda d: d.update(ranks=1), NETWORK), "ranks"),
        (Network, edited(lambda d: d["collectives"].update(gossip={}), NETWORK), "collectives"),
    ],
)
def test_other_nouns_are_checked_too(noun: type[files.Noun], text: str, field: str) -> None:
    with pytest.raises(InputError) as caught:
        files.decode(text, noun, "x.json")
    assert caught.value.field.startswith(field)


class Parcel(files.Noun, frozen=True, kw_only=True):
    """A noun whose stored form changed twice: `weight` was in grams, then `label` came in."""

    kind = "parcel"
    version = 3

    kilograms: float
    label: str


def test_an_older_version_is_read_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(files.UPGRADES, ("parcel", 1), lambda old: {"kilograms": old["weight"] / 1000})
    monkeypatch.setitem(files.UPGRADES, ("parcel", 2), lambda old: {**old, "label": "none"})
    first, second = {"weight": 2500}, {"kilograms": 2.5}
    for version, fields in ((1, first), (2, second), (3, second | {"label": "none"})):
        text = json.dumps({"kind": "parcel", "version": version, **fields})
        assert files.decode(text, Parcel) == Parcel(kilograms=2.5, label="none")


def test_an_upgrade_that_misses_something_names_file_and_field(monkeypatch: pytest.MonkeyPatch) -> None:
    def upgrade(old: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("weight: missing")

    monkeypatch.setitem(files.UPGRADES, ("parcel", 2), upgrade)
    with pytest.raises(InputError, match=r"^old\.json: weight: missing$"):
        files.decode('{"kind": "parcel", "version": 2}', Parcel, "old.json")


@pytest.mark.parametrize(
    ("version", "told"),
    [
        (4, "got 4: a newer dovetail has written this file; upgrade with `pip install -U dovetail-train`"),
        (2, "got 2, which this dovetail cannot read; write the file again with the command that made it"),
        (0, "got 0, which this dovetail cannot read; write the file again with the command that made it"),
        (-1, "got -1, which this dovetail cannot read; write the file again with the command that made it"),
        ("3", "got '3'; is this a file that dovetail has written?"),
    ],
)
def test_a_version_that_cannot_be_read_is_refused_with_what_to_do(version: object, told: str) -> None:
    text = json.dumps({"kind": "parcel", "version": version, "kilograms": 1.0, "label": "x"})
    with pytest.raises(InputError) as refused:
        files.decode(text, Parcel, "other.json")
    assert str(refused.value) == f"other.json: version: expected 3, {told}"


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    files.write(path, PLAN)
    before = path.read_bytes()
    with pytest.raises(RuntimeError), files.replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    broken = msgspec.structs.replace(TIMELINE, spans=(msgspec.structs.replace(TIMELINE.spans[0], stop=float("nan")),))
    with pytest.raises(ValueError, match="Out of range"):
        files.write(path, broken)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(Error, match="cannot be written: no such file"):
        files.write(tmp_path / "nowhere" / "plan.json", PLAN)
    (tmp_path / "folder").mkdir()
    with pytest.raises(Error, match="is a directory"):
        files.write(tmp_path / "folder", PLAN)
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


def test_a_device_or_a_pipe_keeps_its_place_and_is_written_to(tmp_path: Path) -> None:
    pipe, got = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()), daemon=True)
    reader.start()
    files.write_text(pipe, "whole")
    reader.join(timeout=10)
    assert got == ["whole"] and pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]


def test_a_symbolic_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    for text in ("first", "second"):
        files.write_text(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == text


def test_a_written_file_has_the_permissions_of_any_other(tmp_path: Path) -> None:
    files.write(tmp_path / "a.json", PLAN)
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_private_file_stays_its_owners_and_a_durable_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with files.replacing(path, durable=True, private=True) as temporary:
        temporary.write_text("secret")
    assert path.read_text() == "secret" and path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["key"]


def test_compiled_programs_are_kept_where_only_their_user_can_put_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # as some `sudo` leaves it
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert tmp_path not in files.cache_folder("bpf").parents
    foreign = tmp_path / "dovetail" / "bpf"
    foreign.mkdir(parents=True)
    if os.geteuid():
        pytest.skip("only root can give a folder away")
    os.chown(foreign, 1000, 1000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(Error, match="belongs to another user"):
        files.cache_folder("bpf")
