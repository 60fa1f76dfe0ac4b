"""Device memory is full of NaN, reused by CUDA's rules and limited; pinned memory is copied asynchronously."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from dovetail.emulate import accelerator

from .child import emulated

N = 100_000
"""Elements of a tensor that nobody else has the size of."""


def allocated() -> int:
    return int(torch.accelerator.memory_allocated())


@emulated
def test_fresh_memory_is_nan_also_when_it_is_reused() -> None:
    for _ in range(3):
        x = torch.empty(N, device="emu")
        assert bool(x.isnan().all())
        x.fill_(1.0)
        assert x.sum().item() == N
        half = torch.empty(N, device="emu")
        half[: N // 2] = 0
        assert half.isnan().sum().item() == N // 2
        del x, half
    assert bool(torch.empty(3, 0, device="emu").isnan().all())


@emulated
def test_a_freed_block_is_reused_at_once_by_its_own_stream_only() -> None:
    x = torch.empty(N, device="emu")
    where = x.data_ptr()
    del x
    with torch.Stream("emu"):
        other = torch.empty(N, device="emu")
        assert other.data_ptr() != where
    again = torch.empty(N, device="emu")
    assert again.data_ptr() == where


@emulated
def test_record_stream_delays_the_reuse_until_the_other_stream_is_done() -> None:
    side = torch.Stream("emu")
    x = torch.ones(N, device="emu")
    where = x.data_ptr()
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        accelerator.occupy(0.4)
        y = x * 2
    x.record_stream(side)
    del x
    assert torch.empty(N, device="emu").data_ptr() != where
    torch.accelerator.current_stream().wait_stream(side)
    assert y.sum().item() == 2 * N
    torch.accelerator.synchronize()
    held = [torch.empty(N, device="emu") for _ in range(3)]
    assert where in [t.data_ptr() for t in held]


@emulated
def test_statistics_are_cuda_like() -> None:
    gc.collect()
    torch.accelerator.synchronize()
    before = allocated()
    torch.accelerator.reset_peak_memory_stats()
    x, y = torch.empty(100, device="emu"), torch.empty(1 << 20, device="emu")
    assert allocated() - before == 512 + (4 << 20)
    del y
    assert allocated() - before == 512
    assert torch.accelerator.max_memory_allocated() - before == 512 + (4 << 20)
    assert torch.accelerator.memory_reserved() >= allocated()
    free, total = torch.accelerator.get_memory_info()
    assert total - free == allocated()
    del x
    reserved = torch.accelerator.memory_reserved()
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() < reserved


@emulated
def test_a_limit_raises_torchs_error_and_memory_in_flight_is_waited_for() -> None:
    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    accelerator.set_memory_limit(allocated() + (8 << 20))
    keep = torch.empty(4 << 20, dtype=torch.uint8, device="emu")
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 5\.00 MiB"):
        torch.empty(5 << 20, dtype=torch.uint8, device="emu")
    side = torch.Stream("emu")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        accelerator.occupy(0.1)
        keep.add(1)
    keep.record_stream(side)
    del keep
    assert torch.empty(5 << 20, dtype=torch.uint8, device="emu").numel() == 5 << 20
    assert torch.empty(6 << 20, dtype=torch.uint8, device="emu:1").device.index == 1


@emulated
def test_copies_to_pageable_memory_wait_and_pinned_ones_do_not() -> None:
    x = torch.arange(N, device="emu", dtype=torch.float32)
    torch.accelerator.synchronize()
    pinned = torch.empty(N, pin_memory=True)
    with accelerator.durations(0.3), accelerator.count_syncs() as syncs:
        pinned.copy_(x, non_blocking=True)
        done = torch.accelerator.current_stream().record_event()
        assert not done.query()
    assert syncs.total == 0
    done.synchronize()
    assert pinned[-1].item() == N - 1
    with accelerator.count_syncs() as syncs:
        assert x.cpu()[-1].item() == N - 1
        torch.empty(N).copy_(x, non_blocking=True)  # pageable: CUDA waits as well
    assert [(s.what, s.count) for s in syncs.records] == [("copy to the host", 1), ("copy to the host", 1)]


@emulated
def test_a_copy_to_the_host_without_blocking_is_pinned_and_must_be_waited_for() -> None:
    x = torch.ones(N, device="emu")
    accelerator.occupy(0.2)
    y = x.to("cpu", non_blocking=True)
    assert y.is_pinned()
    assert y[0].item() != 1 or not torch.accelerator.current_stream().query()
    with pytest.raises(accelerator.Race, match=r"the host reads pinned memory .*test_memory.py.* that copy D2H"):
        torch.accelerator.synchronize()


@emulated
def test_a_pinned_source_must_not_be_written_before_its_copy() -> None:
    source = torch.ones(N).pin_memory()
    x = source.to("emu", non_blocking=True)
    assert source[0].item() == 1  # reading is fine
    source[:10] = 2
    with pytest.raises(accelerator.Race, match="the host writes pinned memory"):
        x.add(1)
    y = source.to("emu", non_blocking=True)
    torch.accelerator.current_stream().record_event().synchronize()
    source.fill_(3)
    y.add_(1)
    torch.accelerator.synchronize()


@emulated
def test_a_pinned_source_is_read_when_the_stream_gets_there_and_a_pageable_one_at_the_call() -> None:
    accelerator.set_detector("off")
    pinned, pageable = torch.zeros(N).pin_memory(), torch.zeros(N)
    with accelerator.count_syncs() as syncs:
        accelerator.occupy(0.5)
        late = pinned.to("emu", non_blocking=True)
        early = pageable.to("emu", non_blocking=True)
        pinned.fill_(1)  # what a user must not do
        pageable.fill_(1)
    assert syncs.total == 0
    assert (late.mean().item(), early.mean().item()) == (1.0, 0.0)


@emulated
def test_pinned_memory_that_is_freed_is_not_reused_before_its_copy_is_done() -> None:
    pinned = torch.ones(N).pin_memory()
    where = pinned.data_ptr()
    accelerator.occupy(0.4)
    x = pinned.to("emu", non_blocking=True)
    del pinned
    other = torch.zeros(N).pin_memory()
    assert other.data_ptr() != where
    assert x.mean().item() == 1
    torch.accelerator.synchronize()
    assert where in [t.data_ptr() for t in [torch.empty(N, pin_memory=True) for _ in range(3)]]


@emulated
def test_what_is_pinned_says_so() -> None:
    assert torch.ones(3).pin_memory().is_pinned()
    assert torch.empty(3, pin_memory=True)[1:].is_pinned()
    assert not torch.ones(3).is_pinned()
    assert not torch.ones(3, device="emu").is_pinned()
    torch.accelerator.empty_host_cache()


@emulated
@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_loader_pins(workers: int) -> None:
    data = TensorDataset(torch.arange(10.0))
    total = 0.0
    for (batch,) in DataLoader(data, batch_size=4, pin_memory=True, num_workers=workers):
        assert batch.is_pinned()
        total += batch.to("emu", non_blocking=True).sum().item()
    assert total == 45


@emulated
def test_copies_between_devices_are_ordered_with_both() -> None:
    x = torch.ones(N, device="emu:0")
    with accelerator.durations(0.02):
        y = (x * 2).to("emu:1")
        z = (y + 1).to("emu:0")
        x.zero_()
    assert (y.mean().item(), z.mean().item(), x.sum().item()) == (2.0, 3.0, 0.0)


@emulated
def test_tensors_of_two_devices_do_not_mix() -> None:
    x = torch.ones(3, device="emu")
    for other in (torch.ones(3), torch.ones(3, device="emu:1")):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            x + other
    assert (x * torch.tensor(2.0)).tolist() == [2.0] * 3  # a number on the host is one
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.add(x, x, out=torch.empty(3))
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()


@emulated
def test_storages_grow_and_views_share() -> None:
    x = torch.arange(6.0, device="emu")
    x.resize_(12)
    assert x[:6].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    view = x[:6].view(2, 3).t()
    view[0, 0] = 9
    assert x[0].item() == 9
    assert view.is_set_to(view)
    y = torch.empty(0, device="emu").set_(x.untyped_storage(), 2, (2,), (1,))
    assert y.tolist() == [2.0, 3.0]
