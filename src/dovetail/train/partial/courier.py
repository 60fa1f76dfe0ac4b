"""Carries gradients from the ranks that computed them to all: reduces among the contributors, delivers to every rank.

One thread per rank takes the buckets of a step in the plan's order, the last segments first, each once its gradients
are ready, and finishes one before the next: a communication stream, in the same order on all ranks. For a bucket of n
bytes with c contributors among k ranks the links carry (c − 1)n + (k − 1)n bytes: every contributor gets a c-th part of
the sum from all others (an all-to-all in which the other ranks send nothing) and sends it to all. With c = k that
is an all-reduce; with c = 1 a broadcast. Every rank receives the very same bits, so replicas stay identical. Behind the
gradients of a bucket travels one number for each of them that says how many contributors had it: a parameter that no
rank used, or that the user has frozen, keeps its `.grad` as in one process, and no optimiser moves it.

Before the first bucket all ranks exchange a RankReport: how many samples they have, how long they took for the last
step, and whether they have failed. When a rank has failed, the others end instead of waiting for it.

On an accelerator the thread queues its work in a device stream of its own: a bucket's comes after the streams in which
its gradients were computed, and the end of backward lets the current stream come after all of it. What the hosts tell
each other travels between hosts, by gloo: no host reads anything from its device to learn it. So a host does not know
yet whether a gradient was used by anybody when that is delivered: what is not used is told apart on the device, and at
the end of the step the hosts tell each other too.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dovetail.core.errors import Error, first_line
from dovetail.train import device_streams

from .noise_monitor import NoiseMeasurement
from .segment_buckets import SegmentBucket
from .segments import Leaf, contributors

T = TypeVar("T")
Metric = Callable[[Leaf], torch.Tensor | None]
Job = tuple[Callable[["Delivery"], None], "Delivery"]


@dataclass(frozen=True)
class RankReport:
    """What a rank tells the others at the beginning of a step."""

    step: int
    samples: float
    seconds: float
    """Time of its own computation in the step before, per sample."""
    metric: bool
    """Whether it knows the optimiser's metric."""
    rate: float = 0.0
    """The optimiser's learning rate at the last step."""
    failed: bool = False

    def numbers(self) -> list[float]:
        return [float(self.step), self.samples, self.seconds, float(self.metric), self.rate, float(self.failed)]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> RankReport:
        return cls(int(numbers[0]), numbers[1], numbers[2], bool(numbers[3]), numbers[4], bool(numbers[5]))


@dataclass(eq=False)
class Delivery:
    """The exchange of one step."""

    report: RankReport
    """This rank's own."""
    depths: tuple[int, ...]
    """How deep each rank goes, in segments."""
    segments: int
    """How many segments the model has."""
    buckets: list[SegmentBucket]
    used: set[Leaf] = field(default_factory=set)
    """Leaves that got a gradient on this rank. The set grows while backward runs; those of a ready bucket are in it."""
    metric: Metric | None = None
    """The optimiser's metric, on a step that the guard measures; None on others."""
    buffers: list[torch.Tensor] = field(default_factory=list)
    """Buffers that every rank takes over from the first one at the end."""
    ready: list[threading.Event] = field(default_factory=list)
    """One for each bucket: this rank has all of its gradients, or contributes none."""
    computed: list[torch.Event | None] = field(default_factory=list)
    """One for each bucket; on an accelerator, when what it is made of is there: set before `ready`."""
    done: threading.Event = field(default_factory=threading.Event)
    delivered: torch.Event | None = None
    """On an accelerator: when all gradients have arrived; set before `done`."""
    fresh: dict[Leaf, torch.Tensor] = field(default_factory=dict)
    """On an accelerator: what arrived for leaves without a gradient here, which get it if any rank used them."""
    error: BaseException | None = None
    abandoned: bool = False
    """The backward pass raised: buckets that are not ready will never be."""
    reports: list[RankReport] = field(default_factory=list)
    squares: list[list[float]] = field(default_factory=list)
    """On a measured step, of every rank: |g|² per segment (0 where it did not contribute), then |mean|² per segment."""
    in_metric: bool = False
    """Whether norms are taken in the optimiser's metric, because all ranks know it."""

    def contributors(self, segment: int) -> list[int]:
        return contributors(self.depths, self.segments, segment)

    def measurement(self) -> NoiseMeasurement:
        """What a measured step, at its end, tells the guard."""
        return NoiseMeasurement(
            step=self.report.step,
            depths=self.depths,
            samples=[report.samples for report in self.reports],
            squares=[squares[: self.segments] for squares in self.squares],
            mean_squares=self.squares[0][self.segments :],
            in_metric=self.in_metric,
        )


class Courier:
    """The communication thread, and the process groups that only it uses: no collective of the user's comes between."""

    def __init__(
        self, group: dist.ProcessGroup, hosts: dist.ProcessGroup, *, device: torch.device, timeout: float
    ) -> None:
        """`group` carries tensors of the device, `hosts` those of the CPU, among the same ranks."""
        self._group, self._hosts, self._device, self._timeout = group, hosts, device, timeout
        self.stream = device_streams.new(device)
        """On an accelerator: where the thread queues its work."""
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._ranks = dist.get_process_group_ranks(group)
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        # Between steps the thread holds nothing but the queue, so that it never keeps a module alive.
        threading.Thread(target=_serve, args=(self._queue,), name="dovetail-courier", daemon=True).start()

    def begin(self, delivery: Delivery) -> None:
        """Starts a step. Buckets to which this rank does not contribute are ready at once."""
        delivery.ready = [threading.Event() for _ in delivery.buckets]
        # Behind the last step's update, which may have read what this step's gradients replace.
        delivery.computed = [device_streams.mark(self._device)] * len(delivery.buckets)
        for bucket, event in zip(delivery.buckets, delivery.ready, strict=True):
            if self.rank not in delivery.contributors(bucket.segment):
                event.set()
        self._queue.put((self._carry, delivery))

    def have(self, delivery: Delivery, bucket: int) -> None:
        """This rank has all gradients of a bucket, in the device's current stream."""
        delivery.computed[bucket] = device_streams.mark(self._device)
        delivery.ready[bucket].set()

    def finish(self, delivery: Delivery) -> None:
        """Waits until every gradient has arrived: on an accelerator, the device's current stream does."""
        for bucket, event in enumerate(delivery.ready):
            if not event.is_set():  # it has parameters that got no gradient in this step
                self.have(delivery, bucket)
        if not delivery.done.wait(self._timeout * (len(delivery.buckets) + 2)):
            raise Error(f"step {delivery.report.step}: no answer from the other ranks within {self._timeout:g} s")
        if isinstance(delivery.error, Error):
            raise delivery.error
        if delivery.error is not None:
            reason = first_line(delivery.error)
            raise Error(f"step {delivery.report.step}: a rank was lost while gradients were on their way: {reason}")
        device_streams.follow(delivery.delivered, self._device)
        device_streams.hold_here(delivery.fresh.values())

    def abandon(self, delivery: Delivery) -> None:
        """Ends the thread's wait for gradients of a backward pass that has raised."""
        delivery.abandoned = True
        for event in delivery.ready:
            event.set()

    def tell_failure(self, step: int, *, wait: bool = True) -> None:
        """Tells the other ranks, when they begin `step`, that this one has failed.

        A rank that exits right afterwards must `wait` until they have received it; an interrupted one must not.
        """
        report = RankReport(step=step, samples=0, seconds=0, metric=False, failed=True)
        with contextlib.suppress(Exception):  # the failure itself is what the user must see
            if wait:
                self._gather(report.numbers())
            else:
                self._send(report.numbers())

    def close(self) -> None:
        self._queue.put(None)

    def gather_objects(self, value: T) -> list[T]:
        """The value of every rank. A collective, for use while no delivery is under way."""
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self._hosts)
        return gathered

    def _carry(self, delivery: Delivery) -> None:
        with torch.no_grad(), self.stream or contextlib.nullcontext():
            delivery.reports = [RankReport.of(numbers) for numbers in self._gather(delivery.report.numbers())]
            self._check(delivery)
            delivery.in_metric = all(report.metric for report in delivery.reports)
            squares = torch.zeros(2, delivery.segments, dtype=torch.float64, device=self._device)
            for number, bucket in enumerate(delivery.buckets):
                delivery.ready[number].wait()
                if delivery.abandoned:
                    return
                device_streams.follow(delivery.computed[number], self._device)
                self._reduce(delivery, bucket, squares)
            if delivery.buffers:
                self.share(delivery.buffers)
                device_streams.hold_for(self.stream, delivery.buffers)
            delivery.delivered = device_streams.mark(self._device)
            if device_streams.is_queued(self._device):
                self._settle_fresh(delivery)
            if delivery.metric is not None:
                delivery.squares = self._gather(squares.flatten().tolist())

    def _check(self, delivery: Delivery) -> None:
        for rank, report in enumerate(delivery.reports):
            if report.failed:
                raise Error(f"step {delivery.report.step}: rank {rank} has failed; its own message says why")
            if report.step != delivery.report.step:
                raise Error(f"rank {rank} is at step {report.step}, this one at step {delivery.report.step}")

    def _reduce(self, delivery: Delivery, bucket: SegmentBucket, squares: torch.Tensor) -> None:
        contributors = delivery.contributors(bucket.segment)
        mine = self.rank in contributors
        metric = self._metric_of(delivery, bucket)
        if mine:
            for leaf, view in zip(bucket.leaves, bucket.views, strict=True):
                gradient = leaf.tensor.grad
                view.zero_() if gradient is None else view.copy_(gradient)
                device_streams.hold_for(self.stream, [gradient])
            if delivery.metric is not None:
                squares[0, bucket.segment] += _square(bucket.gradients, metric)
            total = sum(delivery.reports[rank].samples for rank in contributors)
            bucket.gradients.mul_(delivery.report.samples / total if total else 1 / len(contributors))
            used = [float(leaf in delivery.used) for leaf in bucket.leaves]
            bucket.used.copy_(device_streams.to_device(used, bucket.used.dtype, self._device))
        self._exchange(bucket.flat, contributors)
        self._deliver(delivery, bucket)
        if delivery.metric is not None and self.rank == 0:
            squares[1, bucket.segment] += _square(bucket.gradients, metric)

    def _deliver(self, delivery: Delivery, bucket: SegmentBucket) -> None:
        """Puts what has arrived into `.grad`, but for the leaves that no rank used."""
        known = None if device_streams.is_queued(self._device) else bucket.used.tolist()
        for i, (leaf, view) in enumerate(zip(bucket.leaves, bucket.views, strict=True)):
            gradient = leaf.tensor.grad
            if known is not None and not known[i]:
                continue
            if gradient is None:
                arrived = view.to(leaf.tensor.dtype, copy=True)
                if known is None:
                    delivery.fresh[leaf] = arrived
                else:
                    leaf.tensor.grad = arrived
            elif known is None:
                gradient.copy_(torch.where(bucket.used[i] > 0, view, gradient))
                device_streams.hold_for(self.stream, [gradient])
            else:
                gradient.copy_(view)

    def _settle_fresh(self, delivery: Delivery) -> None:
        """Gives leaves without a gradient on this rank what has arrived, if any rank used them."""
        leaves = [leaf for bucket in delivery.buckets for leaf in bucket.leaves]
        used = torch.tensor([leaf in delivery.used for leaf in leaves], dtype=torch.int32)
        dist.all_reduce(used, group=self._hosts)
        for leaf, count in zip(leaves, used.tolist(), strict=True):
            if count and leaf in delivery.fresh:
                leaf.tensor.grad = delivery.fresh[leaf]

    def _exchange(self, flat: torch.Tensor, contributors: list[int]) -> None:
        """From weighted gradients on the contributors to their sum on all ranks."""
        if len(contributors) == self.size:
            dist.all_reduce(flat, group=self._group)
            return
        shards = self._scatter(flat, contributors) if len(contributors) > 1 else [flat]
        sent = [
            dist.broadcast(shard, src=self._ranks[rank], group=self._group, async_op=True)
            for shard, rank in zip(shards, contributors, strict=True)
            if shard.numel()
        ]
        for work in sent:
            assert work is not None
            work.wait()

    def _scatter(self, flat: torch.Tensor, contributors: list[int]) -> list[torch.Tensor]:
        """Afterwards each contributor's own part of `flat` holds the sum. Added in the order of the ranks."""
        shards = list(torch.tensor_split(flat, len(contributors)))
        sizes = {rank: shard.numel() for rank, shard in zip(contributors, shards, strict=True)}
        if self.rank in contributors:
            own = sizes[self.rank]
            outgoing, incoming = flat, flat.new_empty(own * len(contributors))
            send = [sizes.get(rank, 0) for rank in range(self.size)]
            receive = [own if rank in sizes else 0 for rank in range(self.size)]
        else:
            outgoing, incoming = flat.new_empty(0), flat.new_empty(0)
            send = receive = [0] * self.size
        dist.all_to_all_single(incoming, outgoing, receive, send, group=self._group)
        if self.rank in contributors:
            torch.sum(incoming.view(len(contributors), own), dim=0, out=shards[contributors.index(self.rank)])
        return shards

    def share(self, buffers: list[torch.Tensor]) -> None:
        """Copies the first rank's tensors to all ranks, as DDP does with buffers. A collective."""
        for dtype in dict.fromkeys(b.dtype for b in buffers):
            same = [b for b in buffers if b.dtype == dtype and b.numel()]
            if not same:
                continue
            flat = torch.cat([b.detach().flatten() for b in same])
            # As bytes: gloo does not know every dtype.
            dist.broadcast(flat.view(torch.uint8), src=self._ranks[0], group=self._group)
            for buffer, part in zip(same, flat.split([b.numel() for b in same]), strict=True):
                buffer.copy_(part.view_as(buffer))

    def _gather(self, numbers: list[float]) -> list[list[float]]:
        everyone, work = self._send(numbers)
        work.wait()
        return [theirs.tolist() for theirs in everyone]

    def _send(self, numbers: list[float]) -> tuple[list[torch.Tensor], dist.Work]:
        mine = torch.tensor(numbers, dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        work = dist.all_gather(everyone, mine, group=self._hosts, async_op=True)
        assert work is not None
        return everyone, work

    def _metric_of(self, delivery: Delivery, bucket: SegmentBucket) -> torch.Tensor | None:
        """1/√v for every element of the bucket, or None for the plain metric."""
        if delivery.metric is None or not delivery.in_metric:
            return None
        scales = [delivery.metric(leaf) for leaf in bucket.leaves]
        assert all(scale is not None for scale in scales)
        return torch.cat([scale.flatten().to(bucket.flat.dtype) for scale in scales if scale is not None])


def _square(flat: torch.Tensor, metric: torch.Tensor | None) -> torch.Tensor:
    squares = flat.square() if metric is None else flat.square().mul_(metric)
    return squares.sum(dtype=torch.float64)


def _serve(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        carry, delivery = job
        try:
            carry(delivery)
        except BaseException as e:  # whatever it is, `finish` raises it where the user stands
            delivery.error = e
        delivery.done.set()
        del job, carry, delivery
