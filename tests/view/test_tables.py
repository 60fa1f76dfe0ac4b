"""Tables say what matters, fit in 80 columns, and need no colour."""

from __future__ import annotations

import io
import itertools
from typing import Any

import msgspec
import pytest
from rich.console import Console

from dovetail.core.timeline import compare
from dovetail.measure.presets import preset
from dovetail.planning import compare as compare_policies
from dovetail.planning import plan
from dovetail.simulate import scale
from dovetail.view import example, explain, tables


def text(thing: Any, *, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(thing)
    return out.getvalue()


def row(printed: str, start: str) -> list[str]:
    line = next(x for x in printed.splitlines() if x.strip().startswith(start))
    return line.split()


def test_a_profile_shows_every_layer_when_they_are_few() -> None:
    printed = text(tables.profile(example.profile(layers=8)))
    assert "8 layers, 16 tensors, 8.03 MiB of gradients" in printed
    assert "emulated on a made-up device" in printed
    assert all(f"block{i}" in printed for i in range(8))
    assert row(printed, "all layers")[2:6] == ["16.0", "ms", "32.0", "ms"]
    assert row(printed, "16 ")[:3] == ["16", "8.00", "ms"]  # the other measured batch: half the time


def test_hundreds_of_layers_become_the_slowest_and_a_rest_that_adds_up() -> None:
    printed = text(tables.profile(example.profile(layers=300)))
    assert printed.count("\n") < 30
    assert "(288 more layers)" in printed
    assert row(printed, "(288 more")[3:5] == ["576", "ms"]
    assert row(printed, "all layers")[2:6] == ["600", "ms", "1.20", "s"]


def test_a_network_shows_sizes_spread_law_and_its_error() -> None:
    printed = text(tables.network(example.network()))
    assert "network made-up: 4 ranks, measured, emulated" in printed
    assert "all_reduce: 500 us + bytes / 1.00 GB/s, median error 2.0 %" in printed
    assert row(printed, "16.0 MiB")[:8] == ["16.0", "MiB", "17.9", "ms", "16.2", "ms", "21.5", "ms"]
    assert row(printed, "16.0 MiB")[-2:] == ["-3.7", "%"]


def test_the_chosen_plan_is_marked_and_distances_are_relative() -> None:
    profile, network = example.profile(), example.network()
    plans = compare_policies(profile, network, policies=["ddp", "optimal", "single"])
    printed = text(tables.plans(plans, chosen=next(p for p in plans if p.policy == "optimal")))
    assert printed.count("->") == 1 and row(printed, "->")[1] == "optimal"
    single = next(p for p in plans if p.policy == "single")
    assert row(printed, "single")[1] == "1"
    assert row(printed, "single")[-4:-2] == [
        f"{100 * (single.prediction.iteration / single.prediction.lower_bound - 1):+.1f}",
        "%",
    ]
    assert row(printed, "ddp")[-2:] == ["0.0", "%"]


def test_among_equals_the_plan_with_fewer_buckets_comes_first() -> None:
    plans = compare_policies(example.profile(), example.network())
    ordered = tables.by_promise(plans)
    assert sorted(p.policy for p in ordered) == sorted(p.policy for p in plans)
    best = ordered[0].prediction.iteration
    for a, b in itertools.pairwise(ordered):
        assert a.prediction.iteration <= b.prediction.iteration + 0.001 * best
        if a.prediction.iteration == b.prediction.iteration:
            assert len(a.buckets) <= len(b.buckets)


def test_buckets_show_sizes_and_the_tensors_at_their_ends() -> None:
    chosen = plan(example.profile(), example.network(), policy="threshold:2")
    printed = text(tables.buckets(chosen))
    assert f"{len(chosen.buckets)} buckets" in printed
    assert chosen.tensors[0] in printed and chosen.tensors[-1] in printed
    many = plan(example.profile(layers=100), example.network(), policy="per-tensor")
    assert "and 184 more buckets" in text(tables.buckets(many))


def test_a_comparison_shows_the_error_of_the_prediction() -> None:
    predicted, measured = example.timelines()
    printed = text(tables.comparison(compare(predicted, measured)))
    assert row(printed, "iteration")[-2:] == [f"{100 * (119 / 128.44 - 1):.1f}", "%"]
    assert row(printed, "communication")[1:5] == ["42.0", "ms", "45.4", "ms"]


def test_the_scale_table_has_every_policy_and_every_number_of_workers() -> None:
    points = scale(example.profile(), example.network(), workers=[2**k for k in range(12)], policies=["ddp", "single"])
    printed = text(tables.scale(points))
    assert "2,048" in printed and printed.count("ddp") == printed.count("single") == 2
    ddp = {p.workers: p.speedup for p in points if p.policy == "ddp"}
    assert f"{ddp[4]:.1f}" in row(printed, "ddp")


def test_a_narrow_terminal_folds_names_but_shows_them() -> None:
    profile, network = example.profile(layers=3), example.network()
    plans = compare_policies(profile, network, policies=["ddp", "single"])
    for table, names in ((tables.plans(plans), ["ddp", "single"]), (tables.profile(profile), ["block0", "block2"])):
        lines = text(table, width=40).splitlines()
        first = "".join(line.split()[0] for line in lines if line.strip())
        assert all(name in first for name in names)


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_wider_than_the_terminal_and_nothing_is_coloured(width: int) -> None:
    profile, network = example.profile(layers=40, name="a-model-with-a-rather-long-name"), example.network()
    plans = compare_policies(profile, network)
    things = [
        tables.profile(profile),
        tables.network(network),
        tables.plans(plans, chosen=plans[0]),
        tables.buckets(plans[-1]),
        tables.comparison(compare(*example.timelines())),
        tables.scale(scale(profile, network, workers=[4, 8, 16, 32, 64, 128, 256, 2048])),
    ]
    for thing in things:
        printed = text(thing, width=width)
        assert "\x1b" not in printed
        assert all(len(line) <= width for line in printed.splitlines())
        assert "accumulate-while-busy" in printed or "accumulate" not in printed  # names stay whole


def test_the_explanation_names_choice_gain_bound_and_that_nothing_ran() -> None:
    profile, network = example.profile(), example.network()
    plans = compare_policies(profile, network)
    chosen = next(p for p in plans if p.policy == "optimal")
    words = " ".join(explain.explain(chosen, plans, network))
    assert "Chosen: optimal" in words and "nothing ran" in words
    assert "times as fast" in words or "a tie" in words
    ddp = next(p for p in plans if p.policy == "ddp")
    gain = ddp.prediction.iteration / chosen.prediction.iteration
    assert gain > 1.02 and f"this plan is {gain:.2f} times as fast" in words
    assert "nothing to plan" in " ".join(explain.explain(plan(profile, network, workers=1), [], network))


def test_the_explanation_says_so_when_torchs_default_is_as_good_or_better() -> None:
    profile, network = example.profile(), example.network()
    ddp, worst = (plan(profile, network, policy=p) for p in ("ddp", "single"))
    assert "use it instead" in " ".join(explain.explain(worst, [ddp, worst], network))
    twin = plan(profile, network, policy="threshold:999")  # one bucket as well
    assert "the same buckets as single" in " ".join(explain.explain(twin, [worst, twin], network))


def test_where_buckets_are_whole_or_split_tables_and_sentences_say_how_many_and_which() -> None:
    job, network = example.profile(layers=40), preset("10gbe-16")
    compared = compare_policies(job, network, overlap="forward", optimizer=0.001)
    chosen = compared[0]
    split = sum(b.kind == "split" for b in chosen.buckets)
    whole = len(chosen.buckets) - split
    printed = text(tables.plans(compared, chosen=chosen))
    assert "whole+split" in printed and f"{whole}+{split}" in printed
    assert max(map(len, printed.splitlines())) <= 80
    sentences = " ".join(explain.explain(chosen, compared, network))
    assert f"({whole} whole, {split} split with" in sentences and "the link is idle for" in sentences
    coded = msgspec.structs.replace(chosen.buckets[0], kind="split", precision="int8")
    mixed = msgspec.structs.replace(chosen, buckets=(coded, *chosen.buckets[1:]))
    assert "split, int8" in text(tables.buckets(mixed))
