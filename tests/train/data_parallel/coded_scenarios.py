"""What the tests of fewer bytes run on every rank: transfers against the arithmetic in one process, and training."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dovetail
from dovetail.core.network import Precision
from dovetail.core.plan import Bucket
from dovetail.train.data_parallel.wire import backends, coded, ring
from dovetail.train.data_parallel.wire.codec import CODECS
from tests.paths import BENCHMARKS


def transfers(precision: Precision, elements: int) -> dict[str, bool]:
    """Three rounds of each collective, with feedback, bit for bit against what one process computes for all ranks."""
    sys.path.insert(0, str(BENCHMARKS))
    import precision_arithmetic as reference

    ranks, rank = dist.get_world_size(), dist.get_rank()
    codec, coder, group = CODECS[precision], coded.Coder(CODECS[precision]), backends.twin(None, torch.device("cpu"))
    size = ring.padded(elements, ranks)
    width = size // ranks
    draw = torch.Generator().manual_seed(7)
    everyones = [torch.zeros(size) for _ in range(ranks)]
    owners = [torch.zeros(width) for _ in range(ranks)]
    scattered, summed, gathered = torch.zeros(size), torch.zeros(size), torch.zeros(width)
    public, mine = torch.randn(size, generator=draw), torch.zeros(size)
    mine.copy_(public)
    found = {"scattered": True, "reduced": True, "gathered": True}
    whole_errors = [torch.zeros(size) for _ in range(ranks)]
    for number in range(3):
        given = [torch.randn(size, generator=draw) * 10.0 ** -(number + k % 3) for k in range(ranks)]
        flat = given[rank].clone()
        ring.finish(coded.reduce_scatter(flat, scattered, coder, group, tag=1000 * number))
        expected = reference.reduce_in(codec, given, everyones)
        found["scattered"] &= torch.equal(flat.view(ranks, -1)[rank], expected.view(ranks, -1)[rank])

        flat = given[rank].clone()
        ring.finish(coded.all_reduce(flat, summed, gathered, coder, group, tag=1000 * number))
        sums = reference.reduce_in(codec, given, whole_errors).view(ranks, -1)
        found["reduced"] &= torch.equal(flat, reference.gather_sums(codec, list(sums), owners))

        masters = [torch.randn(width, generator=draw) for _ in range(ranks)]
        lost = torch.zeros(width)
        difference = masters[rank] - mine.view(ranks, -1)[rank]
        ring.finish(coded.all_gather(size, difference, lost, coder, group, arrived=adding_to(mine), tag=1000 * number))
        reference.gather_differences(codec, masters, public)
        found["gathered"] &= torch.equal(mine, public)
        left = masters[rank] - public.view(ranks, -1)[rank]
        found["gathered"] &= bool(torch.allclose(lost, left, atol=1e-6))
    found["counted"] = coder.seconds > 0
    return found


def adding_to(values: torch.Tensor) -> Callable[[int, torch.Tensor], None]:
    """What adds the differences that a gather brings."""

    def arrived(start: int, differences: torch.Tensor) -> None:
        values[start : start + differences.numel()].add_(differences)

    return arrived


def trains(precision: Precision) -> dict[str, Any]:
    """A small net in fewer bytes, with new buckets in the middle, beside torch's; a digest of the parameters."""

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))

    theirs, ours = TorchDDP(net()), dovetail.DistributedDataParallel(net(), plan=None, precision=precision)
    a = torch.optim.Adam(theirs.parameters(), lr=0.01)
    b = dovetail.optimizer(torch.optim.Adam(ours.parameters(), lr=0.01), ours)
    assert ours.exchange is not None
    order = list(reversed(range(len(ours.exchange.slots))))
    layouts = {
        0: [("split", precision), ("whole", precision), ("split", "full")],
        30: [("whole", precision), ("split", precision), ("whole", "full")],
    }
    cuts, losses, equal = [0, 2, 4, len(order)], [], []
    for step in range(60):
        if step in layouts:
            b.move(
                order,
                [
                    Bucket(start=cuts[k], stop=cuts[k + 1], bytes=0, kind=kind, precision=what)  # type: ignore[arg-type]
                    for k, (kind, what) in enumerate(layouts[step])
                ],
            )
        x = torch.randn(16, 20, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        target = x[:, :4].sin() + x[:, 4:8] * 0.1
        for model, optimizer in ((theirs, a), (ours, b)):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), target)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        values = torch.cat([p.detach().flatten() for p in ours.parameters()])
        equal.append(hashlib.sha256(values.numpy().tobytes()).hexdigest())
    torches, mine = losses[0::2], losses[1::2]
    return {
        "bits": equal,
        "first": torches[0],
        "torch's": sum(torches[-10:]) / 10,
        "ours": sum(mine[-10:]) / 10,
        "codec": ours.exchange.codec_seconds > 0,
    }
