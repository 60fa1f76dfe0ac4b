"""A job's tensors in shared memory: the same for all processes, without overlap, and removed at the end."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dovetail.cluster.job.arena import FOLDER, Arena
from dovetail.cluster.job.tensor_layout import ALIGNMENT, flat_layout
from dovetail.core.errors import Error


class Mixed(nn.Module):
    """Several dtypes, an empty parameter, a scalar one, one that is not trained, shared ones, buffers of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(3, 5))
        self.small = nn.Parameter(torch.randn(7).to(torch.bfloat16))
        self.none = nn.Parameter(torch.randn(0, 4))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.fixed = nn.Parameter(torch.randn(4, dtype=torch.float64), requires_grad=False)
        self.norm = nn.BatchNorm1d(3)
        self.again = self.norm
        self.register_buffer("seen", torch.tensor(True), persistent=False)


@pytest.fixture
def name() -> Iterator[str]:
    name = f"dovetail-test-{os.getpid()}"
    yield name
    assert not (FOLDER / name).exists(), "no memory is left"


def test_parameters_and_buffers_are_the_same_memory_for_all_who_attach(name: str) -> None:
    torch.manual_seed(0)
    ours, theirs = Mixed(), Mixed()
    before = {n: p.detach().clone() for n, p in ours.named_parameters()}
    arena = Arena.create(name, ours, 3)
    try:
        arena.publish()
        arena.bind(ours)
        other = Arena.attach(name, theirs)
        other.bind(theirs)
    finally:
        arena.unlink()
    assert all(torch.equal(p, before[n]) for n, p in theirs.named_parameters())
    with torch.no_grad():
        ours.a.add_(1.0)
        ours.small.fill_(3.0)
    assert torch.equal(theirs.a, before["a"] + 1) and theirs.small.tolist() == [3.0] * 7
    assert all(p.data_ptr() % 64 == 0 for p in theirs.parameters() if p.numel())
    assert len({p.data_ptr() for p in theirs.parameters() if p.numel()}) == 6
    assert [b.dtype for b in other.buffers.values()] == [b.dtype for b in arena.buffers.values()]


def test_every_worker_has_gradients_of_its_own_and_nothing_overlaps(name: str) -> None:
    model = Mixed()
    arena = Arena.create(name, model, 3)
    arena.unlink()
    assert [leaf.name for leaf in arena.leaves] == ["a", "small", "none", "scalar", "norm.weight", "norm.bias"]
    for worker in range(3):
        for i, view in enumerate(arena.gradients(worker).views):
            view.fill_(10 * worker + i)
        arena.gradients(worker).flags.fill_(worker)
    arena.publish()
    for worker in range(3):
        for i, (view, leaf) in enumerate(zip(arena.gradients(worker).views, arena.leaves, strict=True)):
            assert view.shape == leaf.parameter.shape and view.dtype == leaf.parameter.dtype
            assert torch.all(view == 10 * worker + i)
        assert arena.flags[worker].tolist() == [worker] * 6


def test_another_model_and_missing_or_foreign_memory_are_refused_in_one_line(name: str) -> None:
    with pytest.raises(Error, match="not found: its aggregator has ended"):
        Arena.attach(name, nn.Linear(3, 2))
    arena = Arena.create(name, nn.Linear(3, 2), 1)
    try:
        with pytest.raises(Error, match="expected the same shapes in every process"):
            Arena.attach(name, nn.Linear(3, 3))
        with pytest.raises(Error, match="expected the same shapes"):
            Arena.apart(arena.described, nn.Linear(3, 2, bias=False))
        (FOLDER / name).write_bytes(b"something else")
        with pytest.raises(Error, match="expected a dovetail arena"):
            Arena.attach(name, nn.Linear(3, 2))
    finally:
        arena.unlink()


def test_a_model_larger_than_the_free_memory_is_refused_in_one_line_and_leaves_nothing(name: str) -> None:
    huge = nn.Linear(2**22, 2**20, device="meta")
    with pytest.raises(Error, match=r"shared memory: expected [\d,.]+ MiB free .* got [\d,.]+ MiB") as caught:
        Arena.create(name, huge, 4)
    assert "\n" not in str(caught.value)


def test_a_private_arena_has_the_same_layout_as_the_aggregators(name: str) -> None:
    arena = Arena.create(name, Mixed(), 2)
    arena.unlink()
    apart = Arena.apart(arena.described, Mixed())
    for worker in range(2):
        mine, theirs = arena.incoming(worker), apart.incoming(worker)
        assert [(t.shape, t.dtype) for t in mine] == [(t.shape, t.dtype) for t in theirs]
    assert [t.shape for t in arena.outgoing()] == [t.shape for t in apart.outgoing()]
    assert len(arena.incoming(0)) > len(arena.incoming(1)), "worker 0's buffers are the job's"
    assert {p.data_ptr() for p in arena.outgoing()}.isdisjoint({p.data_ptr() for p in apart.outgoing()})


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from([1, 2, 4, 8]), st.integers(0, 3)), max_size=12))
def test_slots_are_aligned_in_order_of_segment_and_never_overlap(tensors: list[tuple[int, int, int]]) -> None:
    kinds = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
    ordered = sorted(tensors, key=lambda t: t[2])
    run = flat_layout(((str(i), torch.empty(n, dtype=kinds[w]), s) for i, (n, w, s) in enumerate(ordered)), segments=4)
    for dtype, size in run.sizes.items():
        slots = [s for s in run.slots if s.dtype == dtype]
        assert all(s.start * dtype.itemsize % ALIGNMENT == 0 for s in slots)
        assert all(a.stop <= b.start for a, b in itertools.pairwise(slots)) and slots[-1].stop <= size
        bounds = run.bounds[dtype]
        assert len(bounds) == 5 and list(bounds) == sorted(bounds)
        assert all(bounds[s.segment] <= s.start and s.stop <= bounds[s.segment + 1] for s in slots)
