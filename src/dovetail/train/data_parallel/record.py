"""Records real steps of a DDP module as a Timeline, to lay beside the predicted one."""

from __future__ import annotations

import contextlib
import heapq
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from dovetail.core.timeline import Span, Timeline

from . import reducer
from .observe import Observer, Step

SETTLE = 2  # steps until torch has put the buckets of a new reducer into ready order


class Recorder:
    """Takes the time of every bucket through a communication hook that reduces just as torch does without one.

    Stamps are taken on the host: on a GPU they say when work was handed over, not when it ran (untested there).
    """

    def __init__(self, ddp: TorchDDP) -> None:
        self._ddp, self._world = ddp, dist.get_world_size(ddp.process_group)
        self._rank = dist.get_rank(ddp.process_group)
        parameters = [p for p in ddp._module_parameters if p.requires_grad]
        self._observer = Observer(ddp, parameters, self._end_of_step)
        self._at_once = _at_once(ddp.process_group)
        self._start = self._forward_end = 0.0
        self._sent: list[tuple[int, float]] = []
        self._done: dict[int, float] = {}
        self._steps = 0
        self._spans: list[Span] = []
        self._origin: float | None = None
        reducer.exchange(ddp, ddp._bucket_config, comm_hook=self._reduce)

    def before_forward(self) -> None:
        self._start = time.perf_counter()
        self._observer.before_forward()

    def after_forward(self) -> None:
        self._observer.after_forward()
        self._forward_end = time.perf_counter()
        self._sent, self._done = [], {}

    def close(self) -> None:
        self._observer.close()
        reducer.exchange(self._ddp, self._ddp._bucket_config)

    def timeline(self, *, emulated: bool = False) -> Timeline:
        """The recorded steps on end; the first one starts at zero."""
        return Timeline(
            name=type(self._ddp.module).__name__, source="measured", emulated=emulated, spans=tuple(self._spans)
        )

    def _reduce(self, _: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        done, number, buffer = self._done, len(self._sent), bucket.buffer()
        self._sent.append((buffer.numel() * buffer.element_size(), time.perf_counter()))
        work = dist.all_reduce(buffer.mul_(1.0 / self._world), group=self._ddp.process_group, async_op=True)

        def stamp(future: torch.futures.Future[Any]) -> torch.Tensor:
            done[number] = time.perf_counter()
            value: list[torch.Tensor] | torch.Tensor = future.value()
            return value[0] if isinstance(value, list) else value

        return work.get_future().then(stamp)  # type: ignore[no-any-return]

    def _end_of_step(self, _: Step) -> None:
        self._steps += 1
        if self._steps <= SETTLE or not self._sent:
            return
        if self._origin is None:
            self._origin = self._start
        compute, network = f"rank {self._rank}/compute", f"rank {self._rank}/network"
        self._span(compute, "forward", "forward", self._start, self._forward_end)
        at, free = self._forward_end, [0.0] * self._at_once
        for number, (nbytes, sent) in enumerate(self._sent):
            self._span(compute, f"backward to bucket {number}", "backward", at, sent)
            # A bucket waits until one of those before it is done, and counts from then.
            done = self._done.get(number, sent)
            begin = min(max(sent, heapq.heappop(free)), done)
            heapq.heappush(free, done)
            self._span(network, f"bucket {number}", "communication", begin, done, nbytes)
            at = sent

    def _span(self, track: str, name: str, kind: Any, start: float, stop: float, nbytes: int = 0) -> None:
        assert self._origin is not None
        self._spans.append(
            Span(track=track, name=name, kind=kind, start=start - self._origin, stop=stop - self._origin, bytes=nbytes)
        )


def _at_once(group: dist.ProcessGroup) -> int:
    """How many all-reduces of a group go on at a time: gloo has several threads, two by default."""
    if dist.get_backend(group) == "gloo":
        with contextlib.suppress(AttributeError, RuntimeError):
            options: Any = group._get_backend(torch.device("cpu")).options
            return int(options._threads)
    return 1
