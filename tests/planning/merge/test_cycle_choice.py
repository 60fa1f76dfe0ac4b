"""What is chosen among good bucketings: memory, precision, contention; how long that takes; and what files hold."""

from __future__ import annotations

import json
import random
import time

import msgspec
import pytest

from dovetail.core import files
from dovetail.core.errors import InputError
from dovetail.core.network import Collective, CollectiveName, Contention, Fit, Network, Precision
from dovetail.core.plan import Plan
from dovetail.core.profile import Profile
from dovetail.planning import candidates, compare, plan, predict
from dovetail.planning.merge.setting import OverlapSetting
from dovetail.simulate import simulate

from . import oracle
from .oracle import made_profile

COMMUNICATION = 1.0
"""Seconds of one all-reduce of everything."""


def resnet() -> list[int]:
    """Bytes of ResNet-50's 161 tensors in forward order."""
    sizes = [3 * 64 * 49, 64, 64]
    wide = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            sizes += [wide * width, width, width, width * width * 9, width, width, width * width * 4]
            sizes += [4 * width, 4 * width]
            if block == 0:
                sizes += [wide * width * 4, 4 * width, 4 * width]
            wide = 4 * width
    return [4 * size for size in [*sizes, 2048 * 1000, 1000]]


def job(ratio: float, sizes: list[int], *, seed: int = 0) -> Profile:
    """Communication takes `ratio` times as long as computing; backward twice as long as forward."""
    rng = random.Random(seed)
    weights = [rng.uniform(0.5, 1.5) * (0.02 if size < 20_000 else 1) for size in reversed(sizes)]
    each = [COMMUNICATION / ratio * w / sum(weights) for w in weights]
    return made_profile(sizes[::-1], [t * 2 / 3 for t in each], forward=[t / 3 for t in each])


def ring(sizes: list[int], *, reduced: dict[Precision, float] | None = None, latency: float = 5e-3) -> Network:
    """A ring that moves everything in a second; `reduced`: what travels of it in fewer bits, codec included."""

    def every(share: float) -> dict[CollectiveName, Collective]:
        fits: dict[CollectiveName, tuple[float, float]] = {
            "all_reduce": (latency, 1.0),
            "reduce_scatter": (0.3 * latency, 0.53),
            "all_gather": (0.3 * latency, 0.5),
        }
        return {
            name: Collective(fit=Fit(latency=a, seconds_per_byte=b * share / sum(sizes), error=0.0))
            for name, (a, b) in fits.items()
        }

    fewer = {precision: every(share) for precision, share in (reduced or {}).items()}
    return Network(name="ring", ranks=4, source="a test", measured=False, collectives=every(1.0), reduced=fewer)


def split_bytes(made: Plan) -> int:
    return sum(b.bytes for b in made.buckets if b.kind == "split")


RESNET = resnet()


@pytest.mark.parametrize(("ratio", "most"), [(0.6, 1.01), (0.8, 1.02), (1.0, 1.06), (1.2, 1.05), (2.5, 1.03)])
def test_both_kinds_come_near_the_longer_of_computing_and_communicating(ratio: float, most: float) -> None:
    profile, net = job(ratio, RESNET), ring(RESNET)
    made = plan(profile, net, policy="optimal", overlap="forward")
    assert made.prediction.iteration <= most * max(COMMUNICATION, COMMUNICATION / ratio) + 0.01
    merged = plan(profile, net, policy="optimal").prediction.iteration
    split = plan(profile, net, policy="optimal", overlap="forward", kinds=("split",)).prediction.iteration
    assert made.prediction.iteration <= min(merged, split) * (1 + 1e-9)
    if ratio == 1.0:
        assert made.prediction.iteration < 0.93 * min(merged, split)
        assert {b.kind for b in made.buckets} == {"whole", "split"}


@pytest.mark.parametrize("policy", ["auto", "optimal"])
@pytest.mark.parametrize(("sizes", "seconds"), [(RESNET, 0.3), ([3000, 3000, 2_359_296, 9_437_184, 12288] * 80, 1.0)])
def test_planning_takes_no_time_that_anybody_would_notice(policy: str, sizes: list[int], seconds: float) -> None:
    assert len(sizes) in (161, 400)
    net = ring(sizes)
    for ratio in (0.8, 1.2):
        profile = job(ratio, sizes)
        began = time.process_time()
        plan(profile, net, policy=policy, overlap="forward", optimizer=0.01)
        assert time.process_time() - began < 3 * seconds  # a margin for machines that are busy


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
def test_sharding_prefers_split_buckets_where_that_costs_at_most_two_per_cent(ratio: float) -> None:
    profile, net = job(ratio, RESNET), ring(RESNET)
    for policy in ("auto", "optimal"):
        fast, small = (
            plan(profile, net, policy=policy, overlap="forward", optimizer=0.005, memory=memory)
            for memory in ("time", "shard")
        )
        best = plan(profile, net, policy="optimal", overlap="forward", optimizer=0.005).prediction.iteration
        assert split_bytes(small) >= split_bytes(fast)
        assert small.prediction.iteration <= 1.0201 * best
    if ratio != 1.0:
        assert split_bytes(small) == small.bytes


def test_fewer_bits_are_taken_where_the_link_is_the_limit_and_not_where_they_gain_nothing() -> None:
    net = ring(RESNET, reduced={"bf16": 0.55, "int8": 0.35})
    for policy in ("auto", "optimal", "ddp", "threshold:10"):
        hidden = plan(job(0.3, RESNET), net, policy=policy, overlap="forward", precision="auto")
        if policy in ("auto", "optimal"):
            assert {b.precision for b in hidden.buckets} == {"full"}
        bound = plan(job(4.0, RESNET), net, policy=policy, overlap="forward", precision="int8")
        full = plan(job(4.0, RESNET), net, policy=policy, overlap="forward")
        assert {b.precision for b in bound.buckets} <= {"full", "int8"}
        assert bound.prediction.iteration < 0.55 * full.prediction.iteration
        assert predict(bound, job(4.0, RESNET), net).prediction.iteration == bound.prediction.iteration
    auto, int8, bf16 = (
        plan(job(2.0, RESNET), net, policy="optimal", overlap="forward", precision=p).prediction.iteration
        for p in ("auto", "int8", "bf16")
    )
    assert auto <= min(int8, bf16) * 1.006


def test_a_codec_that_eats_the_gain_is_not_chosen() -> None:
    net = ring(RESNET, reduced={"int8": 1.1})
    made = plan(job(2.0, RESNET), net, overlap="forward", precision="int8")
    assert made.buckets == plan(job(2.0, RESNET), net, overlap="forward").buckets


def test_policies_of_one_phase_keep_their_cuts_and_get_the_best_kinds() -> None:
    profile, net = job(1.0, RESNET), ring(RESNET)
    for made in compare(profile, net, overlap="forward", policies=["ddp", "threshold:10", "single"]):
        alone = plan(profile, net, policy=made.policy)
        assert [b.stop for b in made.buckets] == [b.stop for b in alone.buckets]
        for kind in ("whole", "split"):
            same = plan(profile, net, policy=made.policy, overlap="forward", kinds=(kind,))
            assert made.prediction.iteration <= same.prediction.iteration * (1 + 1e-9)


def test_candidates_are_distinct_in_buckets_or_kinds() -> None:
    found = candidates(job(1.0, RESNET), ring(RESNET), overlap="forward", optimizer=0.01, count=5)
    assert len({p.buckets for p in found}) == 5 and found[0].policy == "ddp"


def contended(net: Network, share: float) -> Network:
    return msgspec.structs.replace(net, contention=Contention(gap=0.0, collective=0.0, compute=share))


@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_computing_is_slowed_down_by_the_share_of_it_in_which_collectives_are_in_flight(overlap: str) -> None:
    net = ring(RESNET)
    for ratio in (0.3, 3.0):
        profile = job(ratio, RESNET)
        free, busy = (plan(profile, n, overlap=overlap, policy="optimal") for n in (net, contended(net, 0.2)))  # type: ignore[arg-type]
        nothing = plan(profile, contended(net, 0.0), overlap=overlap, policy="optimal")  # type: ignore[arg-type]
        assert nothing.prediction == free.prediction
        factor = busy.prediction.backward / free.prediction.backward
        assert factor == pytest.approx(1.2) if ratio == 3.0 else 1.03 < factor < 1.2
        assert busy.prediction.forward / free.prediction.forward == pytest.approx(factor if overlap == "forward" else 1)
        timeline = simulate(busy, profile, contended(net, 0.2))
        assert timeline.duration == pytest.approx(busy.prediction.iteration, rel=1e-9)
        assert predict(busy, profile, contended(net, 0.2)) == busy
    alone = plan(job(1.0, RESNET), contended(net, 0.2), overlap=overlap, workers=1).prediction  # type: ignore[arg-type]
    assert alone.iteration == pytest.approx(COMMUNICATION, rel=1e-9)


def test_whole_buckets_are_updated_on_every_rank() -> None:
    setting = OverlapSetting(job(1.0, RESNET), ring(RESNET), 4, None, optimizer=0.1)
    whole, split = setting.cycle.ways
    assert whole.update is not None and split.update is not None
    assert float(whole.update(sum(RESNET))) == pytest.approx(0.4)
    assert float(split.update(sum(RESNET))) == pytest.approx(0.1)


def test_without_measured_all_reduces_every_bucket_is_split_and_without_halves_all_can_be_whole() -> None:
    net = ring(RESNET)
    halves = msgspec.structs.replace(net, collectives={k: c for k, c in net.collectives.items() if k != "all_reduce"})
    assert {b.kind for b in plan(job(1.0, RESNET), halves, overlap="forward").buckets} == {"split"}
    made = plan(job(1.0, RESNET), oracle.made_network(1e-3, 1e-9), overlap="forward", kinds=("whole",))
    assert {b.kind for b in made.buckets} == {"whole"}


def test_old_plans_that_overlap_with_forward_are_all_split_and_torchs_reducer_takes_whole_buckets_only() -> None:
    profile, net = made_profile([4, 4], [1.0, 1.0]), ring([4, 4])
    made = plan(profile, net, overlap="forward", kinds=("split",))
    old = json.loads(files.encode(made))
    assert old["version"] == 2
    old["version"] = 1
    for bucket in old["buckets"]:
        del bucket["kind"], bucket["precision"]
    assert files.decode(json.dumps(old), Plan) == made
    old["overlap"] = "backward"
    assert {b.kind for b in files.decode(json.dumps(old), Plan).buckets} == {"whole"}
    wrong = json.loads(files.encode(made)) | {"overlap": "backward"}
    with pytest.raises(InputError, match='expected "whole" in "full" precision where the overlap is "backward"'):
        files.decode(json.dumps(wrong), Plan)
