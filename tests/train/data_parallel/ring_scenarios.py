"""What the tests of rings run on every rank: collectives over parts of any sizes, against plain sums."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from dovetail.core.network import Precision
from dovetail.train.data_parallel.wire import backends, coded, ring
from dovetail.train.data_parallel.wire.codec import CODECS
from dovetail.train.data_parallel.wire.lane import CommunicationLane
from tests.train.data_parallel.coded_scenarios import adding_to


def cuts(draw: random.Random, elements: int, ranks: int) -> list[int]:
    """Borders: any at all, equal parts, everything for one rank, or empty parts among others."""
    kind = draw.choice(["any", "any", "equal", "one owner", "some empty"])
    if kind == "equal":
        return ring.equal_borders(ring.padded(elements, ranks), ranks)
    if kind == "one owner":
        owner = draw.randrange(ranks)
        return [0 if r <= owner else elements for r in range(ranks + 1)]
    inner = [draw.randrange(elements + 1) for _ in range(ranks - 1)]
    if kind == "some empty":
        inner = [draw.choice(inner) for _ in inner]
    return [0, *sorted(inner), elements]


def any_borders(seed: int, cases: int) -> dict[str, Any]:
    """The three collectives over random parts, all on their way at once as on the lane, against plain sums."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    draw = random.Random(seed)  # the same on all ranks
    lane = CommunicationLane(torch.device("cpu"), group := backends.twin(None, torch.device("cpu")), 60.0)
    wrong: list[str] = []
    real = ring.PIECE, ring.LEAST_PIECE
    try:
        for case in range(cases):
            borders = cuts(draw, draw.choice([0, 1, 5, 1000, 20_000]), ranks)
            ring.PIECE = draw.choice([8, 256, 4096, 2**20])
            ring.LEAST_PIECE = min(ring.PIECE, draw.choice([64, 2**17]))
            if borders[-1] * 8 // ring.PIECE > 2000:
                ring.PIECE = 4096
            whole, (start, stop) = borders[-1], (borders[rank], borders[rank + 1])
            inputs = [torch.arange(whole, dtype=torch.float64) * (r + 1) + r for r in range(ranks)]
            expected = torch.stack(inputs).sum(0)
            scattered, reduced, gathered = inputs[rank].clone(), inputs[rank].clone(), torch.zeros(whole).double()
            gathered[start:stop] = expected[start:stop]
            seen = torch.zeros(whole)
            seen[start:stop] = 1
            works = [
                lane.submit("a test", run)
                for run in (
                    lambda f=scattered, b=borders: ring.reduce_scatter(f, group, tag=1, borders=b),
                    lambda f=gathered, b=borders, n=seen: ring.all_gather(
                        f, group, tag=100_001, borders=b, arrived=lambda low, high: n[low:high].add_(1)
                    ),
                    lambda f=reduced, b=borders: ring.all_reduce(f, group, tag=200_001, borders=b),
                )
            ]
            for work in works:
                work.wait()
            for name, right in (
                ("scattered", torch.equal(scattered[start:stop], expected[start:stop])),
                ("gathered", torch.equal(gathered, expected)),
                ("said to be there", ranks == 1 or bool((seen == 1).all())),
                ("reduced", torch.equal(reduced, expected)),
            ):
                if not right:
                    wrong.append(f"case {case}: {name} over {borders}, pieces of {ring.PIECE}")
    finally:
        ring.PIECE, ring.LEAST_PIECE = real
    return {"wrong": wrong, "cases": cases}


def any_borders_coded(seed: int, cases: int, precision: Precision) -> dict[str, Any]:
    """The same in fewer bytes, bit for bit against what one process computes for all ranks, with feedback."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    draw, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    codec, coder, group = CODECS[precision], coded.Coder(CODECS[precision]), backends.twin(None, torch.device("cpu"))
    wrong: list[str] = []
    real, coded.PIECE = coded.PIECE, 1024
    try:
        for case in range(cases):
            borders = cuts(draw, draw.choice([0, 3, 5000, 30_000]), ranks)
            whole, mine = borders[-1], slice(borders[rank], borders[rank + 1])
            errors = [torch.randn(whole, generator=numbers) * 1e-3 for _ in range(ranks)]
            sum_errors = torch.randn(whole, generator=numbers) * 1e-3
            given = [torch.randn(whole, generator=numbers) for _ in range(ranks)]
            public, masters = torch.randn(whole, generator=numbers), torch.randn(whole, generator=numbers)
            sums = _sums(codec, given, [e.clone() for e in errors], borders)

            flat, lost = given[rank].clone(), errors[rank].clone()
            ring.finish(coded.reduce_scatter(flat, lost, coder, group, tag=1, borders=borders))
            if not torch.equal(flat[mine], sums[mine]):
                wrong.append(f"case {case}: scattered over {borders}")

            flat, lost, lost_sums = given[rank].clone(), errors[rank].clone(), sum_errors[mine].clone()
            ring.finish(coded.all_reduce(flat, lost, lost_sums, coder, group, tag=1, borders=borders))
            if not torch.equal(flat, _sent_back(codec, sums, sum_errors.clone(), borders)):
                wrong.append(f"case {case}: reduced over {borders}")

            values, lost_values = public.clone(), torch.zeros(mine.stop - mine.start)
            new = masters[mine] - public[mine]
            ring.finish(
                coded.all_gather(
                    whole, new, lost_values, coder, group, arrived=adding_to(values), tag=1, borders=borders
                )
            )
            expected = public + _sent_back(codec, masters - public, torch.zeros(whole), borders)
            if not torch.equal(values, expected):
                wrong.append(f"case {case}: gathered over {borders}")
    finally:
        coded.PIECE = real
    return {"wrong": wrong, "cases": cases}


def _pieces(borders: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """(owner, slice) of all messages."""
    for owner, (start, stop) in enumerate(pairwise(borders)):
        for at in range(start, stop, coded.PIECE):
            yield owner, slice(at, min(at + coded.PIECE, stop))


def _sums(codec: Any, given: list[torch.Tensor], errors: list[torch.Tensor], borders: Sequence[int]) -> torch.Tensor:
    """What the owners add up; their own contributions are exact."""
    total = torch.zeros_like(given[0])
    for owner, piece in _pieces(borders):
        total[piece] = given[owner][piece]
        for k in range(1, len(given)):  # the order in which they add
            sender = (owner - k) % len(given)
            codec.decode_add(_encoded(codec, given[sender][piece], errors[sender][piece]), total[piece])
    return total


def _sent_back(codec: Any, values: torch.Tensor, errors: torch.Tensor, borders: Sequence[int]) -> torch.Tensor:
    """What all ranks decode of what owners have."""
    out = torch.zeros_like(values)
    for _, piece in _pieces(borders):
        codec.decode(_encoded(codec, values[piece], errors[piece]), out[piece])
    return out


def _encoded(codec: Any, values: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    wire = torch.empty(codec.wire_bytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, error, wire)
    return wire
