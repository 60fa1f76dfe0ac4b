"""How far off a sum of gradients is that travelled in fewer bytes: straight to its owners, and around a ring.

Gradients are those of a model that is being trained, one micro-batch for each rank. Both ways round what is sent, and
the owner of a part adds in fp32. On the straight way a contribution is rounded once; around a ring every hop rounds the
partial sum that it passes on. Also what the codecs cost. Run: python benchmarks/precision_error.py
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
import torch
from torch import Tensor

from common import arguments
from dovetail.core.network import Precision
from dovetail.train.data_parallel.wire.codec import BLOCK, CODECS, Codec
from pages import show
from partial_oracle import Oracle, loss_of
from partial_tasks import TASKS
from precision_arithmetic import reduce_in

RANKS = (4, 8, 16)
WARM, STEPS = 100, 20
"""Steps of training before the first measured gradients, and steps that are measured."""

Reduction = Callable[[Codec, Sequence[Tensor], Sequence[Tensor] | None], Tensor]


@dataclass(frozen=True)
class SumError:
    """Relative errors ‖got − exact‖ / ‖exact‖ of sums over ranks."""

    task: str
    ranks: int
    precision: Precision
    straight: float
    """Of one step without feedback, the median."""
    ring: float
    straight_fed: float
    """Of the sum over all steps, with feedback."""
    ring_fed: float
    straight_unfed: float
    """Of the sum over all steps, without feedback."""
    ring_unfed: float


def reduce_around_ring(codec: Codec, contributions: Sequence[Tensor], errors: Sequence[Tensor] | None) -> Tensor:
    """As `reduce_in`, but a part travels through all ranks: each adds its own to what it receives and passes it on."""
    ranks = len(contributions)
    parts = [c.view(ranks, -1) for c in contributions]
    kept = None if errors is None else [e.view(ranks, -1) for e in errors]
    total = torch.empty_like(contributions[0])
    wire = torch.empty(codec.wire_bytes(parts[0][0].numel()), dtype=torch.uint8)
    for owner, sums in enumerate(total.view(ranks, -1)):
        sums.copy_(parts[(owner + 1) % ranks][owner])
        for turn in range(1, ranks):
            sender, receiver = (owner + turn) % ranks, (owner + turn + 1) % ranks
            codec.encode(sums, None if kept is None else kept[sender][owner], wire)
            sums.copy_(parts[receiver][owner])
            codec.decode_add(wire, sums)
    return total


def gradients(task_name: str, ranks: int) -> Iterator[list[Tensor]]:
    """The ranks' flat gradients in each step of a training after its first ones, padded so that parts are blocks."""
    task = TASKS[task_name]()
    torch.manual_seed(0)
    net = task.build()
    oracle, parameters = Oracle(net, task.test[0][:4]), list(net.parameters())
    optimiser = task.optimiser(parameters)
    generator = torch.Generator().manual_seed(1)
    used = sum(p.numel() for p in parameters)
    padded = -(-used // (ranks * BLOCK)) * ranks * BLOCK
    for step in range(WARM + STEPS):
        workers = ranks if step >= WARM else 4
        found = []
        for _ in range(workers):
            x, y = task.sample(task.batch, generator)
            own = torch.autograd.grad(loss_of(oracle.forward(x), y), parameters)
            found.append(torch.cat([*(g.flatten() for g in own), torch.zeros(padded - used)]))
        mean = torch.stack(found).mean(0)
        for p, g in zip(parameters, mean.split([*(p.numel() for p in parameters), padded - used]), strict=False):
            p.grad = g.view_as(p)
        optimiser.step()
        if step >= WARM:
            yield found


def errors_of(task: str, ranks: int) -> list[SumError]:
    """Both ways and all precisions on the same gradients."""
    ways: tuple[Reduction, ...] = (reduce_in, reduce_around_ring)
    cells = list(product(CODECS.values(), ways, (True, False)))
    seen = list(gradients(task, ranks))
    size = seen[0][0].numel()
    exact_all = torch.zeros(size, dtype=torch.float64)
    sums = [torch.zeros(size, dtype=torch.float64) for _ in cells]
    kept = [[torch.zeros(size) for _ in range(ranks)] if fed else None for _, _, fed in cells]
    single: list[list[float]] = [[] for _ in cells]
    for contributions in seen:
        exact = torch.stack(contributions).double().sum(0)
        exact_all += exact
        for i, (codec, way, _) in enumerate(cells):
            got = way(codec, contributions, kept[i]).double()
            sums[i] += got
            single[i].append(_relative(got, exact))
    found = {
        (codec.name, way, fed): (float(np.median(single[i])), _relative(sums[i], exact_all))
        for i, (codec, way, fed) in enumerate(cells)
    }
    return [
        SumError(
            task,
            ranks,
            name,
            straight=found[name, reduce_in, False][0],
            ring=found[name, reduce_around_ring, False][0],
            straight_fed=found[name, reduce_in, True][1],
            ring_fed=found[name, reduce_around_ring, True][1],
            straight_unfed=found[name, reduce_in, False][1],
            ring_unfed=found[name, reduce_around_ring, False][1],
        )
        for name in CODECS
    ]


def _relative(got: Tensor, exact: Tensor) -> float:
    return float((got - exact).norm() / exact.norm())


def measure(tasks: Sequence[str] = ("text", "digits"), ranks: Sequence[int] = RANKS) -> list[SumError]:
    """Shows the table, and returns its rows."""
    rows = [row for task in tasks for n in ranks for row in errors_of(task, n)]
    show(
        "errors",
        f"relative error of the sum over ranks: of one step, and of {STEPS} steps together",
        rows,
        {
            "gradients of": lambda r: r.task,
            "ranks": lambda r: str(r.ranks),
            "sent as": lambda r: r.precision,
            "one step, straight": lambda r: f"{r.straight:.2e}",
            "ring": lambda r: f"{r.ring:.2e}",
            "ring / straight": lambda r: f"{r.ring / r.straight:.1f}",
            f"{STEPS} steps, straight, feedback": lambda r: f"{r.straight_fed:.2e}",
            "ring, feedback": lambda r: f"{r.ring_fed:.2e}",
            "straight, none": lambda r: f"{r.straight_unfed:.2e}",
            "ring, none": lambda r: f"{r.ring_unfed:.2e}",
        },
    )
    return rows


@dataclass(frozen=True)
class CodecSpeed:
    """What a codec costs one core, in fp32 megabytes (10⁶ bytes) per second, the best of some rounds."""

    precision: Precision
    bytes_per_number: float
    encode: float
    """With error feedback."""
    decode: float
    decode_add: float


def speeds(elements: int = 2**23, rounds: int = 8) -> list[CodecSpeed]:
    """Shows the table, and returns its rows."""
    rows = []
    values, error, out = torch.randn(elements), torch.zeros(elements), torch.zeros(elements)
    for codec in CODECS.values():
        wire = torch.empty(codec.wire_bytes(elements), dtype=torch.uint8)
        rows.append(
            CodecSpeed(
                codec.name,
                wire.numel() / elements,
                encode=_speed(partial(codec.encode, values, error, wire), elements, rounds),
                decode=_speed(partial(codec.decode, wire, out), elements, rounds),
                decode_add=_speed(partial(codec.decode_add, wire, out), elements, rounds),
            )
        )
    show(
        "codec",
        "what a codec costs one core",
        rows,
        {
            "sent as": lambda r: r.precision,
            "bytes per number": lambda r: f"{r.bytes_per_number:.3f}",
            "encode with feedback, MB/s of fp32": lambda r: f"{r.encode:,.0f}",
            "decode": lambda r: f"{r.decode:,.0f}",
            "decode and add": lambda r: f"{r.decode_add:,.0f}",
            "split bucket of 100 MB, 4 ranks: ms of a core": lambda r: f"{split_milliseconds(r):.0f}",
        },
    )
    return rows


def split_milliseconds(speed: CodecSpeed, megabytes: float = 100, ranks: int = 4) -> float:
    """What one rank's codec takes for a split bucket.

    It encodes the n-ths of the gradients that others own, and its own n-th of the differences. It adds the n − 1
    contributions to its own n-th, and every n-th of the differences to the public values.
    """
    encoded = (ranks - 1) / ranks + 1 / ranks
    added = (ranks - 1) / ranks + 1
    return 1e3 * megabytes * (encoded / speed.encode + added / speed.decode_add)


def _speed(work: Callable[[], None], elements: int, rounds: int) -> float:
    work()
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return 4e-6 * elements / min(seconds)


if __name__ == "__main__":
    given = arguments(__doc__ or "")
    torch.set_num_threads(1)
    speeds()
    measure(ranks=RANKS[:1] if given.quick else RANKS)
