"""Emulated devices: the profile's tensors, order and times, with gradients that are really averaged."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core.errors import Error
from dovetail.core.profile import Layer, LayerTime, ParameterTensor, Profile, exactly
from dovetail.emulate.channel import leave, register
from dovetail.emulate.device import AHEAD, emulated
from dovetail.emulate.launch import launch, report


def profile_of(
    tensors: list[tuple[str, int, int, str, float]], *, layers: int, forward: float = 0.0, backward: float = 0.0
) -> Profile:
    """`tensors` in ready order as (name, layer, bytes, dtype, ready); times are per layer at batch 8."""
    return Profile(
        name="toy",
        device="none",
        batch=8,
        layers=tuple(
            Layer(
                name=f"layer{i}",
                type="Linear",
                parameter_bytes=sum(t[2] for t in tensors if t[1] == i),
                activation_bytes=4,
                times=(LayerTime(batch=8, forward=exactly(forward), backward=exactly(backward)),),
            )
            for i in range(layers)
        ),
        tensors=tuple(
            ParameterTensor(name=name, layer=layer, bytes=size, dtype=dtype, ready=ready)
            for name, layer, size, dtype, ready in tensors
        ),
    )


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Any layers, owners and ready order; no waiting."""
    layers = draw(st.integers(1, 6))
    tensors = [
        (f"block{i // 2}.layer{i}.{leaf}", i, draw(st.integers(0, 9)) * 8, draw(st.sampled_from(DTYPES)), 0.0)
        for i in range(layers)
        for leaf in ("weight", "bias", "type")[: draw(st.integers(0, 3))]
    ]
    tensors.append(("scale", 0, 8, "float32", 0.0))
    return profile_of(draw(st.permutations(tensors)), layers=layers)


DTYPES = ["float32", "torch.float32", "float16", "bfloat16", "float64"]


@given(profiles())
def test_parameters_are_the_profile_s_by_layer_and_gradients_come_in_its_order(profile: Profile) -> None:
    model = emulated(profile)
    named = dict(model.named_parameters())
    by_name = {t.name: t for t in profile.tensors}
    assert named.keys() == by_name.keys()
    owned = [by_name[name].layer for name in named if "." in name]
    assert owned == sorted(owned)
    for name, parameter in named.items():
        assert parameter.nbytes == by_name[name].bytes
        assert str(parameter.dtype).removeprefix("torch.") == by_name[name].dtype.removeprefix("torch.")

    seen: list[str] = []
    for name, parameter in named.items():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.append(name))
    model(torch.tensor([1.0, 3.0])).backward()
    assert seen == [t.name for t in profile.tensors]
    for parameter in named.values():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, 2 * parameter.detach(), rtol=0, atol=0)


@given(st.lists(st.sampled_from(["accumulate", "to none", "to zero"]), min_size=1, max_size=6))
def test_gradients_add_up_as_in_any_model(iterations: list[str]) -> None:
    model = emulated(profile_of([("a.w", 0, 64, "float32", 0.0), ("b", 0, 4, "float32", 0.0)], layers=1))
    expected = 0.0
    for i, before in enumerate(iterations):
        if before != "accumulate":
            model.zero_grad(set_to_none=before == "to none")
            expected = 0.0
        (0.5 * model(torch.tensor(float(2**i)))).backward()
        expected += 0.5 * 2**i
    for parameter in model.parameters():
        torch.testing.assert_close(parameter.grad, expected * parameter.detach())


def test_nothing_is_ready_before_its_time_and_a_larger_batch_takes_longer() -> None:
    tensors = [("b.w", 1, 8, "float32", 0.005), ("a.w", 0, 8, "float32", 0.02)]
    profile = profile_of(tensors, layers=2, forward=0.01, backward=0.015)
    for batch, factor in ((None, 1), (16, 2)):
        model = emulated(profile, batch=batch)
        model(torch.ones(1)).backward()
        (f0, f1), (b0, b1) = model.forward_span, model.backward_span
        assert f1 - f0 >= factor * 0.02
        assert f1 <= b0
        first, second = (stamp - b0 for stamp in model.ready_stamps)
        assert first >= factor * 0.005 and second >= factor * 0.02
        assert b1 - b0 >= factor * 0.03
        forward, backward = model.spans(track="rank 1/compute")
        assert (forward.start, forward.kind, backward.kind) == (0.0, "forward", "backward")
        assert backward.stop == pytest.approx(b1 - f0)


def test_evaluation_waits_but_builds_no_graph() -> None:
    model = emulated(profile_of([("a.w", 0, 8, "float32", 0.0)], layers=1, forward=0.01))
    with torch.no_grad():
        assert not model(torch.ones(1)).requires_grad
    assert model.forward_span[1] - model.forward_span[0] >= 0.01


def test_a_hook_that_waits_for_the_network_delays_the_layers_behind_it() -> None:
    tensors = [("b.w", 1, 8, "float32", 0.0), ("a.w", 0, 8, "float32", 0.0)]
    model = emulated(profile_of(tensors, layers=2, forward=0.02))
    model.get_submodule("b").register_forward_pre_hook(lambda module, args: time.sleep(0.1))
    model(torch.ones(1))
    start, stop = model.forward_span
    assert stop - start >= 0.02 - AHEAD + 0.1 + 0.02


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([("a", 0, 8, "int32", 0.0)], r"tensors\[0\]\.dtype: expected a floating-point dtype, got 'int32'"),
        ([("a", 0, 8, "nonsense", 0.0)], r"tensors\[0\]\.dtype: expected a floating-point dtype, got 'nonsense'"),
        ([("a", 0, 7, "float32", 0.0)], r"tensors\[0\]\.bytes: expected a multiple of 4 for float32, got 7"),
        ([("a", 0, 8, "float32", 0.0), ("a.b", 0, 8, "float32", 0.0)], "cannot be a parameter too"),
        ([("a.b", 0, 8, "float32", 0.0), ("a", 0, 8, "float32", 0.0)], "cannot be a module too"),
    ],
)
def test_a_profile_that_cannot_be_built_is_one_line(tensors: list[Any], message: str) -> None:
    with pytest.raises(Error, match=message):
        emulated(profile_of(tensors, layers=1))


# Ready in another order than that of the layers, every size once.
SHUFFLED = [
    ("c.w", 2, 4000, "float32", 0.001),
    ("a.w", 0, 1000, "float32", 0.002),
    ("b.w", 1, 2000, "float32", 0.002),
    ("c.b", 2, 400, "float32", 0.004),
    ("a.b", 0, 80, "float32", 0.005),
]


def test_ddp_averages_to_the_closed_form_in_the_profile_s_ready_order() -> None:
    for result in launch([__file__], ranks=3, timeout=600):
        assert len(result.report) == 4
        for got in result.report:
            assert got["sizes"] == [size for _, _, size, _, _ in SHUFFLED]
            assert got["worst"] < 1e-6


def rank_main() -> None:
    """On gloo and on the emulated channel, with gradients of their own and as views of buckets: three iterations of SGD
    in DDP, each tensor a bucket. Reports how far gradients are from the mean over ranks of mean(x), times p."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group(register(latency=0.001))
    groups = [None, dist.new_group(backend="gloo")]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = []
    for group, view in itertools.product(groups, (False, True)):
        model = emulated(profile_of(SHUFFLED, layers=3, forward=0.001, backward=0.002))
        wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=1e-5, gradient_as_bucket_view=view)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worst = 0.0
        for iteration in range(3):
            optimizer.zero_grad()
            wrapped(torch.tensor([float(rank), float(rank + 2 * iteration)])).backward()
            scale = sum(r + iteration for r in range(ranks)) / ranks
            for parameter in model.parameters():
                assert parameter.grad is not None
                error = (parameter.grad - scale * parameter.detach()).abs().max()
                worst = max(worst, float(error))
            optimizer.step()
        sizes = wrapped._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        found.append({"worst": worst, "sizes": [int(s) for s in sizes.split(", ")]})
    report(found)
    leave()


if __name__ == "__main__":
    rank_main()
