"""One rank of benchmarks/overlap.py: all contestants in this process, on models of their own, turn by turn.

`contest` lets DDP's default, dovetail's merging, dovetail's overlap with forward and FSDP2 train the same emulated
model; `training` trains a small transformer on Python's own library once with DDP and once with overlap.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dovetail
from dovetail import measure, planning
from dovetail.core.files import Record
from dovetail.core.network import Network
from dovetail.core.plan import Plan
from dovetail.core.profile import Profile
from dovetail.emulate.channel import leave
from dovetail.emulate.launch import report
from dovetail.emulate.layered import LayeredModel, blocks, layered
from dovetail.train import agree
from dovetail.train.data_parallel import ring
from dovetail.train.data_parallel.ring import halves

SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
"""Bytes that this rank's interface has sent, in its own namespace."""
PREFETCH = 2
"""Blocks whose all-gathers FSDP2 starts ahead: what its documentation advises for more overlap."""
NAMES = ("ddp", "merge", "overlap", "fsdp2")


class Spec(Record, frozen=True, kw_only=True):
    """The contest that the ranks run."""

    profile: Profile
    """In layer order."""
    rounds: int
    settle: int
    steps: int
    budget: float
    """Seconds for measuring the network."""
    tuning: dict[str, int | float]
    """Arguments of `dovetail.Tuning` that are not the defaults."""


class Entry(Record, frozen=True, kw_only=True):
    """The result of one contestant."""

    name: str
    buckets: int
    seconds: tuple[float, ...]
    """Iteration times of the slowest rank."""
    sent: float
    """Bytes that this rank's interface has sent per iteration, with all headers."""
    predicted: float | None = None
    lower_bound: float | None = None


class Outcome(Record, frozen=True, kw_only=True):
    """A contest as one rank saw it."""

    network: Network
    optimizer: float
    """Seconds of the optimiser on this rank's shards, as measured while planning."""
    entries: tuple[Entry, ...]


@dataclass
class Contestant:
    """A model and what one iteration does with it."""

    iterate: Callable[[], None]
    drain: Callable[[], None]
    """Waits for the communication that an iteration has left running."""
    plan: Plan | None = None
    blocks: int = 0
    """Groups of modules, where there is no plan."""


def contest(spec: Spec) -> Any:
    group = dist.group.WORLD
    assert group is not None
    network = measure.network(
        group,
        max_bytes=min(32 * 2**20, spec.profile.parameter_bytes),
        collectives=("all_reduce", "reduce_scatter", "all_gather"),
        budget=spec.budget,
        name="emulated",
        emulated=True,
        via=halves(ring.twin(group)),
    )
    x = torch.full((1,), 1.0 + dist.get_rank())
    default = planning.plan(spec.profile, network, policy="ddp")
    made = {
        "ddp": Contestant(plain(TorchDDP(layered(spec.profile)), x), lambda: None, default),
        "merge": _merge(spec, network, x, default),
        "overlap": _overlap(spec, network, x),
        "fsdp2": _fsdp2(spec.profile, x),
    }
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    sent: dict[str, list[float]] = {name: [] for name in NAMES}
    turns = random.Random(0)  # the same on all ranks
    for number in range(spec.rounds):
        for name in turns.sample(NAMES, len(NAMES)):
            seconds, nbytes = _turn(made[name], spec)
            times[name] += agree.largest(seconds, group, torch.device("cpu"))
            sent[name].append(nbytes)
        print(f"round {number + 1} of {spec.rounds}", flush=True)
    entries = [
        Entry(
            name=name,
            buckets=len(c.plan.buckets) if c.plan else c.blocks,
            seconds=tuple(times[name]),
            sent=statistics.median(sent[name]),
            predicted=c.plan.prediction.iteration if c.plan else None,
            lower_bound=c.plan.prediction.lower_bound if c.plan else None,
        )
        for name, c in made.items()
    ]
    updating = made["overlap"].plan.prediction.optimizer if made["overlap"].plan else 0.0
    return msgspec.to_builtins(Outcome(network=network, optimizer=updating, entries=tuple(entries)))


def _turn(c: Contestant, spec: Spec) -> tuple[list[float], float]:
    """Times of the iterations after the first `settle`, and bytes per iteration over all of them."""
    dist.barrier()
    before = _sent()
    stamps = []
    for _ in range(spec.settle + spec.steps):
        stamps.append(time.perf_counter())
        c.iterate()
    stamps.append(time.perf_counter())
    c.drain()
    seconds = [b - a for a, b in itertools.pairwise(stamps)][spec.settle :]
    return seconds, (_sent() - before) / (spec.settle + spec.steps)


def _merge(spec: Spec, network: Network, x: Tensor, default: Plan) -> Contestant:
    """What `dovetail.DistributedDataParallel(model)` keeps on its own."""
    tuning = dovetail.Tuning(**spec.tuning)  # type: ignore[arg-type]
    model: Any = dovetail.DistributedDataParallel(layered(spec.profile), tuning=tuning)
    iterate = plain(model, x)
    return Contestant(iterate, lambda: None, _predicted(_tuned(model, iterate), default, spec.profile, network))


def _tuned(model: Any, iterate: Callable[[], None]) -> Plan | None:
    """Iterates until dovetail has decided; the plan that it keeps, as the first rank has it."""
    while model.report.state in ("measuring", "trying"):
        iterate()
    if dist.get_rank() == 0:
        print(model.explain(), flush=True)
    group = dist.group.WORLD
    assert group is not None
    plan: Plan | None = agree.from_first(model.report.plan, group, torch.device("cpu"))
    return plan


def _predicted(kept: Plan | None, default: Plan, profile: Profile, network: Network) -> Plan:
    """What is kept (torch's own sizes, where nothing is) with what the emulated profile says of it."""
    if kept is None:
        return default
    same = kept.tensors == tuple(t.name for t in profile.tensors)
    return planning.predict(kept, profile, network) if same else kept


def plain(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """Without an optimiser: it would compute on two shared cores what takes an emulated device next to nothing."""

    def iterate() -> None:
        model.zero_grad(set_to_none=True)
        model(x).backward()

    return iterate


def two_lines(model: Any, x: Tensor) -> tuple[Callable[[], None], Callable[[], None]]:
    """(one iteration of a model with overlap="forward", a wait for the parameters of the last iteration)."""
    optimizer: Any = dovetail.optimizer(torch.optim.SGD(model.parameters(), lr=1e-6), model)

    def iterate() -> None:
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()

    def drain() -> None:
        for parameter in model.parameters():
            parameter.detach()

    return iterate, drain


def _overlap(spec: Spec, network: Network, x: Tensor) -> Contestant:
    """What dovetail keeps on its own with overlap="forward". The optimiser is needed: it sends the parameters."""
    tuning = dovetail.Tuning(**spec.tuning)  # type: ignore[arg-type]
    model: Any = dovetail.DistributedDataParallel(layered(spec.profile), overlap="forward", tuning=tuning)
    iterate, drain = two_lines(model, x)
    kept = _tuned(model, iterate)
    drain()
    default = planning.plan(spec.profile, network, policy="ddp", overlap="forward")
    return Contestant(iterate, drain, _predicted(kept, default, spec.profile, network))


def _fsdp2(profile: Profile, x: Tensor) -> Contestant:
    model: LayeredModel = layered(profile)
    groups = blocks(model)
    for modules in groups:
        fully_shard(modules if len(modules) > 1 else modules[0], reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)
    heads: list[Any] = [modules[0] for modules in groups]
    for i, head in enumerate(heads):
        head.set_modules_to_forward_prefetch(heads[i + 1 : i + 1 + PREFETCH])
    # On a processor there are no streams: without this every all-gather would be waited for where it starts.
    model._set_unshard_async_op(True)  # type: ignore[operator]
    return Contestant(plain(model, x), lambda: None, blocks=len(groups))


def _sent() -> int:
    return int(SENT.read_text()) if SENT.exists() else 0


def training(steps: int) -> Any:
    """Losses of a small transformer on the sources of Python's library, with DDP and with overlap, mean over ranks."""
    text = _library()
    curves = {}
    for name in ("ddp", "overlap"):
        torch.manual_seed(0)
        net = _Transformer()
        if name == "ddp":
            model: nn.Module = TorchDDP(net)
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        else:
            model = dovetail.DistributedDataParallel(net, overlap="forward")
            optimizer = dovetail.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model)
        draw = torch.Generator().manual_seed(1 + dist.get_rank())
        losses = []
        for _ in range(steps):
            at = torch.randint(0, len(text) - 33, (8,), generator=draw)
            rows = torch.stack([text[i : i + 33] for i in at.tolist()])
            optimizer.zero_grad()
            logits = model(rows[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        mean = torch.stack(losses)
        dist.all_reduce(mean)
        curves[name] = (mean / dist.get_world_size()).tolist()
    return curves


class _Transformer(nn.Module):
    """Two blocks that predict the next byte."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(32, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        h = self.token(tokens) + self.place(torch.arange(length))
        return self.head(self.blocks(h, mask=mask, is_causal=True))  # type: ignore[no-any-return]


def _library() -> Tensor:
    """A few hundred kilobytes of source text that every Python has."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join((folder / f"{name}.py").read_bytes() for name in ("argparse", "typing", "inspect", "subprocess"))
    return torch.tensor(list(text), dtype=torch.int64)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    if sys.argv[1] == "training":
        result = training(int(sys.argv[2]))
    else:
        result = contest(msgspec.json.decode(Path(sys.argv[2]).read_bytes(), type=Spec))
    report(result)
    leave()


if __name__ == "__main__":
    main()
