"""What ranks do in tests of the emulated accelerator's process group: results of collectives, beside gloo's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _make_nccl_premul_sum

from .group_scenarios import Group, device, fresh_group


def values(dtype: torch.dtype, shape: tuple[int, ...], seed: int, whole: bool) -> torch.Tensor:
    """Numbers of this rank; `whole`: small integers, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if whole or not dtype.is_floating_point:
        return torch.randint(1, 4, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)


def every_collective(group: Group, on: torch.device, dtype: torch.dtype, whole: bool) -> dict[str, list[torch.Tensor]]:
    """Results of all of torch's collectives, by name, on the CPU. Where gloo lacks one, what it would be."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    emulated = on.type == "emu"
    out: dict[str, list[torch.Tensor]] = {}

    def made(seed: int, *shape: int) -> torch.Tensor:
        return values(dtype, shape, seed, whole).to(on)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=on)

    def keep(name: str, *tensors: torch.Tensor) -> None:
        out[name] = [t.cpu() for t in tensors]

    ops = {"SUM": dist.ReduceOp.SUM}
    if dtype != torch.bool:
        ops |= {"MIN": dist.ReduceOp.MIN, "MAX": dist.ReduceOp.MAX, "PRODUCT": dist.ReduceOp.PRODUCT}
    if dtype == torch.bool and not emulated:  # gloo adds up bytes, where NCCL takes "or"
        ops = {}
    for name, op in ops.items():
        x = made(1, 3, 5)
        dist.all_reduce(x, op=op, group=group)
        keep(f"all_reduce {name}", x)
        x = made(2, 7)
        dist.reduce(x, group_dst=size - 1, op=op, group=group)
        keep(f"reduce {name}", *([x] if rank == size - 1 else []))
        x, y = made(3, size * 4), empty(4)
        dist.reduce_scatter_single(y, x, op=op, group=group)
        keep(f"reduce_scatter_single {name}", y)
        y = empty(2, 3)
        dist.reduce_scatter(y, [made(4 + r, 2, 3) for r in range(size)], op=op, group=group)
        keep(f"reduce_scatter {name}", y)
    if dtype != torch.bool:
        x = made(20, 9)
        dist.all_reduce(x, op=dist.ReduceOp.AVG if emulated else dist.ReduceOp.SUM, group=group)
        if not emulated:
            x = torch.div(x, size, rounding_mode="trunc") if not dtype.is_floating_point else x / size
        keep("all_reduce AVG", x)
    if dtype.is_floating_point:
        for factor in (0.5, torch.tensor([0.25], dtype=dtype, device=on)):
            x = made(21, 9)
            if emulated:
                dist.all_reduce(x, op=_make_nccl_premul_sum(factor), group=group)
            else:
                dist.all_reduce(x.mul_(factor), group=group)
            keep(f"all_reduce PREMUL_SUM {type(factor).__name__}", x)

    x = made(30, 4, 4)
    dist.broadcast(x, group_src=size - 1, group=group)
    keep("broadcast", x)
    images = made(31, 2, 3, 4, 4).to(memory_format=torch.channels_last)
    dist.broadcast(images, group_src=0, group=group)
    keep("broadcast channels_last", images)
    parts = [empty(2, 3) for _ in range(size)]
    dist.all_gather(parts, made(32, 2, 3), group=group)
    keep("all_gather", *parts)
    x = empty(size * 6)
    dist.all_gather_single(x, made(33, 6), group=group)
    keep("all_gather_single", x)
    parts = [empty(5) for _ in range(size)] if rank == 0 else []
    dist.gather(made(34, 5), parts or None, group_dst=0, group=group)
    keep("gather", *parts)
    x = empty(5)
    dist.scatter(x, [made(35 + r, 5) for r in range(size)] if rank == 0 else None, group_src=0, group=group)
    keep("scatter", x)
    x = empty(size * 2, 3)
    dist.all_to_all_single(x, made(40, size * 2, 3), group=group)
    keep("all_to_all_single", x)
    sent = [(rank + r) % 3 for r in range(size)]
    x = empty(sum(sent), 2)  # what rank r sends to this one is as long as what this one sends to it
    dist.all_to_all_single(x, made(41, sum(sent), 2), sent, sent, group=group)
    keep("all_to_all_single with splits", x)
    parts = [empty(2, 2) for _ in range(size)]
    dist.all_to_all(parts, [made(50 + r, 2, 2) for r in range(size)], group=group)
    keep("all_to_all", *parts)
    x = empty(6)
    if rank == 0:
        dist.send(made(60, 6), group_dst=1, group=group)
    elif rank == 1:
        dist.recv(x, group_src=0, group=group)
        keep("recv", x)
    return out


def collectives_equal_gloos(dtype: str, whole: bool) -> list[str]:
    """Names of the collectives whose results differ from gloo's on the CPU in a single bit, and how many there were."""
    kind: torch.dtype = getattr(torch, dtype)
    with fresh_group() as group:
        ours = every_collective(group, device(), kind, whole)
    known = dist.new_group(backend="gloo")
    theirs = every_collective(known, torch.device("cpu"), kind, whole)
    dist.destroy_process_group(known)
    bad = [name for name in ours if name in theirs and not all(map(same_bits, ours[name], theirs[name]))]
    return [*bad, f"{len(ours)} compared"]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    return a.shape == b.shape and bool((a == b).all())


def what_gloo_cannot_do() -> dict[str, Any]:
    """all_gather and all_to_all of parts that differ in size, sums of bool, and coalesced collectives, other types."""
    here, rank = device(), dist.get_rank()
    with fresh_group() as group:
        size = dist.get_world_size(group)
        parts = [torch.empty(r + 1, device=here) for r in range(size)]
        dist.all_gather(parts, torch.full((rank + 1,), float(rank), device=here), group=group)
        letters = [torch.empty(10 * rank + r, device=here) for r in range(size)]
        sent = [torch.full((10 * r + rank,), float(rank), device=here) for r in range(size)]
        dist.all_to_all(letters, sent, group=group)
        flags = torch.tensor([rank == 0, False, True], device=here)
        dist.all_reduce(flags, group=group)
        sums = [torch.full((n,), float(rank + n), device=here) for n in (1, 2, 3)]
        with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as work:
            for x in sums:
                dist.all_reduce(x, group=group)
        work.wait()
        gathered = [torch.empty(size * n, device=here) for n in (1, 2)]
        with dist.distributed_c10d._coalescing_manager(group):
            for n, x in zip((1, 2), gathered, strict=True):
                dist.all_gather_single(x, torch.full((n,), float(rank), device=here), group=group)
        shares = [torch.empty(n, device=here) for n in (1, 2)]
        with dist.distributed_c10d._coalescing_manager(group):
            for n, x in zip((1, 2), shares, strict=True):
                dist.reduce_scatter_single(x, torch.arange(float(n * size), device=here), group=group)
        roots = [torch.full((2,), float(rank), device=here) for _ in range(size)]
        with dist.distributed_c10d._coalescing_manager(group, here, async_ops=True) as work:
            for r, x in enumerate(roots):
                dist.broadcast(x, group_src=r, group=group)
        work.wait()
        eighth = torch.full((3,), 1.5 + rank, device=here).to(torch.float8_e4m3fn)
        dist.broadcast(eighth, group_src=1, group=group)
        turned = torch.full((2,), 1.0 + rank * 1j, device=here)
        dist.all_reduce(turned, group=group)
        dist.all_reduce(torch.empty(0, device=here), group=group)
        named = {"flags": [flags], "eighth": [eighth.float()], "turned": [torch.view_as_real(turned)], "uneven": parts}
        named |= {"letters": letters, "sums": sums, "gathered": gathered, "shares": shares, "roots": roots}
        return {name: [x.tolist() for x in xs] for name, xs in named.items()}
