"""Profiles of small models: what counts as a layer and a tensor, what is restored, what is said."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from dovetail.core.errors import Error
from dovetail.measure import load, profile
from dovetail.measure.clock import Clock
from dovetail.measure.profiler import ready_times

from .fakes import FakeClock, Work, measured, times


def test_tied_weights_count_once_at_the_first_layer_that_runs() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 7, bias=False)  # defined first, runs last
            self.embed = nn.Embedding(7, 4)
            self.embed.weight = self.head.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(x))  # type: ignore[no-any-return]

    found = measured(Tied(), torch.zeros(4, 3, dtype=torch.long))
    assert [(layer.name, layer.parameter_bytes) for layer in found.layers] == [("embed", 7 * 4 * 4), ("head", 0)]
    assert [(t.name, t.layer, t.bytes) for t in found.tensors] == [("head.weight", 0, 112)]


def test_in_place_relu_and_batch_norm_work_and_buffers_are_restored() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 2))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    found = measured(model, torch.randn(4, 3, 8, 8))
    assert [layer.type for layer in found.layers] == ["Conv2d", "BatchNorm2d", "ReLU", "Flatten", "Linear"]
    assert len(found.tensors) == 6
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert [layer.activation_bytes for layer in found.layers] == [576, 576, 576, 576, 8]


def test_attention_keeps_its_uncalled_projection_as_a_layer_without_time_beside_it() -> None:
    found = measured(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(4, 5, 8))
    names = [layer.name for layer in found.layers]
    at = names.index("self_attn.out_proj")
    assert names[at - 1] == "self_attn"
    assert all(q.high == 0 for t in found.layers[at].times for q in (t.forward, t.backward))
    assert found.layers[at].parameter_bytes == (8 * 8 + 8) * 4
    assert {t.name for t in found.tensors if t.layer == at} == {"self_attn.out_proj.weight", "self_attn.out_proj.bias"}


def test_a_single_module_and_nested_outputs_and_keyword_batches_work() -> None:
    class Net(nn.Linear):
        def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> Any:  # type: ignore[override]
            y = super().forward(x) * scale
            return {"out": (y, [y.sum(1)]), "count": torch.ones(2, dtype=torch.long), "note": "text"}

    found = measured(Net(3, 2), {"x": torch.randn(6, 3), "scale": torch.ones(6, 1)})
    assert [(layer.name, layer.parameter_bytes) for layer in found.layers] == [("Net", 32)]
    assert [t.batch for t in found.layers[0].times] == [1, 3, 6]


def test_frozen_and_unused_parameters_are_not_among_the_tensors() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
            self.frozen.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(self.frozen(x))  # type: ignore[no-any-return]

    found = measured(Net(), torch.randn(2, 2))
    assert {t.name for t in found.tensors} == {"used.weight", "used.bias"}
    assert {layer.name: layer.parameter_bytes for layer in found.layers}["frozen"] == 24
    assert times(found)["frozen"][1] == 0.0


def test_the_model_is_left_as_it_was() -> None:
    first = nn.Linear(4, 4)
    model = nn.Sequential(first, nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model.eval()
    model[3].train()
    kept = torch.full_like(first.weight, 3.0)
    first.weight.grad = kept
    weights = [p.clone() for p in model.parameters()]
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    threads = torch.get_num_threads()
    measured(model, torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.rand(3), expected)
    assert [m.training for m in model] == [False, False, False, True]
    assert first.weight.grad is kept
    assert torch.equal(kept, torch.full_like(kept, 3.0))
    assert all(p.grad is None for p in list(model.parameters())[1:])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    assert torch.get_num_threads() == threads


def test_the_model_is_left_as_it_was_when_it_fails_in_the_middle() -> None:
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(norm, nn.Linear(5, 1)).eval()
    assert norm.running_mean is not None
    mean = norm.running_mean.clone()
    with pytest.raises(Error, match=r"model Sequential fails on a batch of 8: RuntimeError: mat1"):
        profile(model, torch.ones(8, 4))
    assert torch.equal(norm.running_mean, mean)
    assert not model.training
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_a_size_nobody_asked_for_is_left_out_where_the_model_refuses_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    found = measured(model, torch.randn(4, 4))
    assert [t.batch for t in found.layers[0].times] == [2, 4]
    assert "left out batch 1" in found.source
    with pytest.raises(Error, match="batch of 1"):
        profile(model, torch.randn(4, 4), batches=[1, 4], steps=1)


class Counted(nn.Linear):
    """Notes the size of every batch that it gets; a clock of its own says what passes take."""

    def __init__(self, clock: FakeClock, seconds: Callable[[int], float]) -> None:
        super().__init__(1, 1)
        self.clock, self.seconds, self.sizes = clock, seconds, list[int]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(x))
        return Work.apply(super().forward(x), self.clock, self.seconds(len(self.sizes)), 0.0)  # type: ignore[no-any-return, no-untyped-call]


def test_a_round_has_one_pass_of_every_batch_size() -> None:
    model = Counted(clock := FakeClock(), lambda _: 1.0)
    profile(model, torch.ones(4, 1), steps=3, warmup=1, clock=clock)
    assert model.sizes == [4] + 4 * [4, 2, 1]  # one pass finds the layers


def test_measuring_goes_on_until_the_times_have_settled() -> None:
    steady = Counted(clock := FakeClock(), lambda _: 1.0)
    found = profile(steady, torch.ones(1, 1), steps=4, warmup=0, clock=clock)
    assert (len(steady.sizes), found.noise) == (1 + 4, 0.0)
    settling = Counted(clock := FakeClock(), lambda count: 3.0 if count in (3, 5) else 1.0)
    found = profile(settling, torch.ones(1, 1), steps=4, warmup=0, clock=clock)
    assert 1 + 4 < len(settling.sizes) < 1 + 3 * 4 and found.noise < 0.03
    never = Counted(clock := FakeClock(), lambda count: 1.0 + 0.1 * (count % 4))
    told: list[str] = []
    found = profile(never, torch.ones(1, 1), steps=4, warmup=0, clock=clock, progress=told.append)
    assert len(never.sizes) == 1 + 3 * 4 and found.noise > 0.03
    assert told[1:] == ["Counted: not settled yet, up to 8 steps more"]


def test_batches_beyond_the_example_repeat_its_samples() -> None:
    seen: list[list[float]] = []

    class Look(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x[:, 0].tolist())
            return super().forward(x)

    found = measured(Look(1, 1), torch.arange(2.0)[:, None], batches=[5])
    assert seen[-1] == [0, 1, 0, 1, 0]
    assert found.batch == 5


def test_the_outputs_own_loss_is_used_and_a_given_one_before_it() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.a(x).mean(), "other": self.b(x)}

    own = measured(Net(), torch.ones(2, 1))
    given_loss = measured(Net(), torch.ones(2, 1), loss=lambda out: out["other"].sum())
    assert [t.name for t in own.tensors] == ["a.weight"]
    assert [t.name for t in given_loss.tensors] == ["b.weight"]


def test_an_unsteady_order_of_gradients_is_said_and_the_most_common_is_taken() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.calls = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            layers = (self.b, self.a) if self.calls == 4 else (self.a, self.b)
            return layers[1](layers[0](x))  # type: ignore[no-any-return]

    found = measured(Net(), torch.ones(1, 1), steps=5)
    assert [t.name for t in found.tensors] == ["b.weight", "a.weight"]
    assert "another order in 1 of 5 steps" in found.source


@given(
    gaps=st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=8),
    noise=st.lists(st.integers(0, 7), min_size=0, max_size=10),
    tail=st.floats(0, 1),
)
def test_interruptions_of_single_runs_do_not_reach_the_ready_times(
    gaps: list[float], noise: Sequence[int], tail: float
) -> None:
    runs, totals = [], []
    for i in range(20):
        at, run = 0.0, {}
        for k, gap in enumerate(gaps):
            at += gap + (10.0 if i < len(noise) and noise[i] == k else 0.0)
            run[f"p{k}"] = at
        runs.append(run)
        totals.append(at + tail)
    backward = sum(gaps) + tail
    order, ready, unstable = ready_times(runs, backward=backward, totals=totals)
    assert (order, unstable) == ([f"p{k}" for k in range(len(gaps))], 0)
    assert ready == sorted(ready)
    assert ready[-1] <= backward
    if len(noise) < 10:
        assert ready[-1] == pytest.approx(sum(gaps))
    proportions = [t / ready[-1] for t in ready]
    exact = [sum(gaps[: k + 1]) / sum(gaps) for k in range(len(gaps))]
    assert proportions == pytest.approx(exact)


def test_data_parallel_wrappers_are_looked_into() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        found = measured(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), torch.ones(2, 2))
    finally:
        dist.destroy_process_group()
    assert {t.name for t in found.tensors} == {"weight", "bias"}
    assert found.name == "Linear"


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_an_accelerators_stamps_become_ascending_seconds() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    clock, x = Clock(device), torch.ones(512, 512, device=device)
    stamps = [clock.stamp()]
    for _ in range(3):
        x = x @ x
        stamps.append(clock.stamp())
    seconds = clock.seconds(stamps)
    assert seconds[0] == 0
    assert seconds == sorted(seconds)


@pytest.mark.parametrize(("spec", "size"), [("mlp", 4), ("cnn", 4), ("gpt", 2)])
def test_built_in_models_profile_on_the_real_clock(spec: str, size: int) -> None:
    work = load(spec)
    told: list[str] = []
    found = measured(work.model, work.make_batch(size), loss=work.loss, name=work.name, steps=2, progress=told.append)
    trained = {name for name, p in work.model.named_parameters() if p.requires_grad}
    assert {t.name for t in found.tensors} == trained
    assert found.parameter_bytes == sum(p.nbytes for p in work.model.parameters())
    assert found.parameter_bytes == sum(layer.parameter_bytes for layer in found.layers)
    assert found.forward_time() > 0
    assert told == [
        f"{spec}: local batches {', '.join(str(size >> k) for k in range(size.bit_length()))}, 3 steps each"
    ]


def test_profiling_computes_the_gradients_that_training_would() -> None:
    """The hooks only look: the same loss and the same gradients with and without them."""
    from dovetail.measure.passes import find_layers, recording

    model, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 1)), torch.randn(5, 3)

    def forward() -> torch.Tensor:
        return F.mse_loss(model(x), torch.ones(5, 1))

    forward().backward()
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    layers = find_layers(model, forward)
    with recording(model, layers, Clock(torch.device("cpu"))) as recorder:
        done = recorder.run(forward)
    assert next(iter(done.ready)).startswith("2.")
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def compiled() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].compile(backend="eager")
    return module


X = torch.ones(2, 2)


@pytest.mark.parametrize(
    ("model", "batch", "options", "expected"),
    [
        (lambda: nn.ReLU(), X, {}, "model ReLU: expected parameters that require gradients"),
        (lambda: nn.Linear(2, 2).requires_grad_(False), X, {}, "expected parameters that require gradients"),
        (lambda: torch.compile(nn.Linear(2, 2), backend="eager"), X, {}, "profile the module before torch.compile"),
        (compiled, X, {}, "part 0: compiled modules run no hooks"),
        (lambda: nn.LazyLinear(2), X, {}, "lazy parameters"),
        (lambda: "model", X, {}, "expected a torch.nn.Module, got str"),
        (lambda: nn.Linear(2, 2), "text", {}, "batch: expected a tensor, a tuple of tensors or a dict"),
        (lambda: nn.Linear(2, 2), (X, 3), {}, r"batch\[1\]: expected a tensor, got int"),
        (lambda: nn.Linear(2, 2), (), {}, "at least one tensor"),
        (lambda: nn.Linear(2, 2), torch.ones(()), {}, r"batch\[0\]: expected samples"),
        (lambda: nn.Linear(2, 2), {"a": X, "b": X[:1]}, {}, "a has 2, b has 1"),
        (lambda: nn.Linear(2, 2), X, {"loss": lambda y: y}, r"loss: expected a scalar tensor, got shape \(2, 2\)"),
        (lambda: nn.Linear(2, 2), X, {"loss": lambda y: 3.0}, "loss: expected a scalar tensor, got float"),
        (lambda: nn.Linear(2, 2), X, {"loss": lambda y: y.detach().sum()}, "requires no gradient"),
        (lambda: nn.Linear(2, 2), X, {"loss": lambda y: sys.exit()}, "fails on a batch of 2: SystemExit: no reason"),
        (lambda: nn.Linear(2, 2), X, {"loss": lambda y: 1 / 0}, "fails on a batch of 2: ZeroDivisionError: division"),
        (lambda: nn.Linear(2, 2), X, {"batches": []}, "batches: expected at least one size"),
        (lambda: nn.Linear(2, 2), X, {"batches": [0, 2]}, "batches: expected at least one size"),
        (lambda: nn.Linear(2, 2), X, {"steps": 0}, "steps and warmup"),
    ],
)
def test_what_cannot_be_profiled_gets_one_clear_line(model: Any, batch: Any, options: Any, expected: str) -> None:
    with pytest.raises(Error, match=expected) as caught:
        profile(model(), batch, **options)
    assert "\n" not in str(caught.value)
