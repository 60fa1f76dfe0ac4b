"""Finds the best buckets for a model with overlap="forward" while it trains.

As tuner.py for merging behind backward, with both passes in view: `ForwardTuner._phases` is handed one finished
iteration at a time. It watches when gradients become ready and when forward first uses each parameter, measures what
the two halves of an all-reduce cost, plans, tries the candidates in turn and keeps the fastest. Everything that ranks
must do together happens at the end of `optimizer.step()`, where all of them are at the same point of the same program.
A new plan moves the parameters, and the optimiser's state with them, to new buckets.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch.distributed as dist

from dovetail import measure, planning
from dovetail.core.errors import Error
from dovetail.core.network import Network
from dovetail.core.plan import Plan
from dovetail.core.profile import Layer, LayerTime, ParameterTensor, Profile, exactly
from dovetail.train import agree

from .exchange import GradientExchange
from .ring import halves
from .trials import Trial, Tuning, TuningReport, compete, ready_gaps

if TYPE_CHECKING:
    from .optimizer import ShardedOptimizer

log = logging.getLogger("dovetail")


@dataclass(frozen=True)
class OverlappedIteration:
    """One iteration as this rank saw it; times in seconds."""

    period: float
    """From the end of one `optimizer.step()` to the end of the next."""
    forward: float
    """Duration of the forward pass that synchronises, without its waits for parameters."""
    ready: dict[int, float]
    """Seconds from the end of forward until each gradient was ready, by index of the parameter, in that order."""
    used: dict[int, float]
    """Seconds from the start of forward to the first use of each parameter, without the waits before it."""
    update: float
    """Duration of the optimiser on this rank's pieces."""


class ForwardTuner:
    """Drives one model from its first iteration to the buckets it keeps."""

    def __init__(
        self,
        exchange: GradientExchange,
        optimizer: ShardedOptimizer,
        group: dist.ProcessGroup,
        name: str,
        tuning: Tuning,
    ) -> None:
        self._exchange, self._group, self._name, self._tuning = exchange, group, name, tuning
        self._optimizer = weakref.ref(optimizer)
        parameters = [s.parameter for s in exchange.slots]
        self.report = TuningReport(
            state="measuring",
            overlap="forward",
            workers=exchange.ranks,
            tensors=len(parameters),
            bytes=sum(p.numel() * p.element_size() for p in parameters),
        )
        self._last = time.perf_counter()
        exchange.watching = True
        self._course = self._phases()
        next(self._course)

    @property
    def active(self) -> bool:
        return self.report.state in ("measuring", "trying")

    def after_step(self) -> None:
        """Called at the end of every `optimizer.step()`, on all ranks."""
        if not self.active:
            return
        self.report = replace(self.report, steps=self.report.steps + 1)
        try:
            self._course.send(self._seen())
        except StopIteration:
            pass
        except Error as e:
            self._stop(str(e))
        except BaseException as e:  # Ctrl-C, a lost rank: the user gets it
            self._stop(f"it was interrupted by {type(e).__name__}")
            raise
        self._exchange.watching = self.report.state == "measuring"
        self._last = time.perf_counter()

    def _seen(self) -> OverlappedIteration:
        exchange = self._exchange
        began, ended = exchange.forward_span
        used, waited = {}, 0.0
        for index, before, after in exchange.uses:
            if began <= before <= ended:
                used[index] = before - began - waited
                waited += after - before
        return OverlappedIteration(
            period=time.perf_counter() - self._last,
            forward=ended - began - waited,
            ready={i: t - ended for i, t in exchange.stamps if t >= ended},
            used=used,
            update=exchange.updating,
        )

    def _stop(self, reason: str) -> None:
        self.report = replace(self.report, state="off", reason=reason)
        if self._exchange.rank == 0:
            log.warning("dovetail: planning is off: %s", reason)

    def _phases(self) -> Generator[None, OverlappedIteration, None]:
        tuning = self._tuning
        for _ in range(tuning.warmup):
            yield
        seen = []
        for _ in range(tuning.measure):
            seen.append((yield))
        order, profile = self._profile(seen)
        device = self._exchange.device
        updating = agree.largest([float(np.median([s.update for s in seen]))], self._group, device)[0]
        network = self._network(profile)
        plans, alternative = self._plans(profile, network, updating)
        self.report = replace(
            self.report,
            state="trying",
            forward=profile.forward_time(),
            backward=profile.backward_time(),
            network=network,
            notes=(f"one all-reduce per bucket, without the second line, is predicted to take {alternative:.3f} s",),
        )
        kept = yield from compete(
            plans,
            tuning,
            self._group,
            device,
            use=lambda i: self._use(order, plans[i]),
            seconds=lambda iteration: iteration.period,
            tell=self._tried,
        )
        self._use(order, plans[kept])
        self.report = replace(self.report, state="done", kept=self.report.trials[kept], plan=plans[kept])
        if self._exchange.rank == 0:
            log.info("%s", self.report)

    def _tried(self, trials: tuple[Trial, ...]) -> None:
        self.report = replace(self.report, trials=trials)

    def _use(self, order: list[int], plan: Plan) -> None:
        optimizer = self._optimizer()
        assert optimizer is not None, "its step() is running"
        cuts = [b.stop for b in plan.buckets]
        now = self._exchange.buckets
        members = [order[b.start : b.stop] for b in plan.buckets]
        if [list(b.members) for b in now] != members:
            optimizer.move(order, cuts)

    def _profile(self, seen: list[OverlappedIteration]) -> tuple[list[int], Profile]:
        """Times that all ranks agree on: the first rank's order, the slowest rank's times."""
        group, exchange = self._group, self._exchange
        order, usable, gaps = ready_gaps([s.ready for s in seen], len(exchange.slots), group, exchange.device)
        seen = [seen[n] for n in usable]
        forward = float(np.quantile([s.forward for s in seen], 0.25))
        # A parameter whose use was not seen counts as used at once, the earliest possible time.
        used = [min(forward, float(np.median([s.used.get(i, 0.0) for s in seen]))) for i in order]
        forward, *rest = agree.largest([forward, *gaps, *used], group, exchange.device)
        ready, used = np.cumsum(rest[: len(order)]), rest[len(order) :]
        turn = sorted(range(len(order)), key=lambda k: used[k])
        starts = [0.0, *(used[k] for k in turn), forward]
        names = [exchange.slots[i].name for i in order]
        layer_names = ["before the first parameter", *(names[k] for k in turn)]
        layers = tuple(
            Layer(
                name=name,
                type="parameter",
                parameter_bytes=0 if not position else self._bytes(order[turn[position - 1]]),
                activation_bytes=0,
                times=(LayerTime(batch=1, forward=exactly(max(0.0, stop - start)), backward=exactly(0.0)),),
            )
            for position, (name, start, stop) in enumerate(zip(layer_names, starts[:-1], starts[1:], strict=True))
        )
        tensors = tuple(
            ParameterTensor(
                name=names[k],
                layer=turn.index(k) + 1,
                bytes=self._bytes(i),
                dtype=str(exchange.slots[i].parameter.dtype).removeprefix("torch."),
                ready=float(ready[k]),
            )
            for k, i in enumerate(order)
        )
        source = f"{len(seen)} training iterations; one layer for each parameter, from its first use on"
        device = str(exchange.device)
        return order, Profile(name=self._name, device=device, source=source, batch=1, layers=layers, tensors=tensors)

    def _bytes(self, index: int) -> int:
        parameter = self._exchange.slots[index].parameter
        return parameter.numel() * parameter.element_size()

    def _network(self, profile: Profile) -> Network:
        exchange = self._exchange
        exchange.settle()  # so the lane is idle on every rank once the first collective below is over
        return measure.network(
            self._group,
            max_bytes=max(1024, min(profile.parameter_bytes, 32 * 2**20)),
            collectives=("all_reduce", "reduce_scatter", "all_gather"),
            budget=self._tuning.network_seconds,
            device=exchange.device,
            via=halves(exchange.group),
        )

    def _plans(self, profile: Profile, network: Network, updating: float) -> tuple[list[Plan], float]:
        """(the bucketings to try, torch's sizes first; predicted iteration of plain merging in seconds)."""
        answer: tuple[list[Plan], float] | str = ""
        if self._exchange.rank == 0:
            try:
                count = self._tuning.candidates
                found = planning.candidates(profile, network, count=count, overlap="forward", optimizer=updating)
                plain = planning.plan(profile, network).prediction.iteration + updating * self._exchange.ranks
                answer = (found, plain)
            except Exception as e:  # whatever it is, all ranks must learn of it
                answer = f"no plan could be made: {e}"
        answer = agree.from_first(answer, self._group, self._exchange.device)
        if isinstance(answer, str):
            raise Error(answer)
        return answer
