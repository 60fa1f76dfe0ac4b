"""Finds the best buckets for a model while it trains.

`Tuner._phases` is the whole course of it, a generator that is handed one finished iteration at a time: watch a few
iterations, measure the network, plan, let the candidates compete, keep the winner. Every iteration it looks at is a
real training iteration with the same gradients as any other. What is tuned stands behind `TuningTarget`, of which
targets.py has two: a model whose gradients torch's reducer carries, and one with an optimiser of dovetail's, whose
buckets may be torch's or the exchange's. What must be the same on all ranks is agreed at the end of an iteration, where
all of them are at the same point of the same program.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Protocol

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from dovetail import planning
from dovetail.core.errors import Error
from dovetail.core.network import Contention, Network
from dovetail.core.plan import Overlap, Plan
from dovetail.core.profile import Layer, LayerTime, ParameterTensor, Profile, exactly
from dovetail.train import agree

from ..layer_watch import compare_ranks
from ..observe import ObservedIteration
from .reducer_target import ReducerTarget
from .targets import ExchangeTarget
from .trials import Trial, TrialPlan, Tuning, compete
from .tuning_report import MOST_CONTENTION, TuningReport

log = logging.getLogger("dovetail")

LARGEST = 32 * 2**20
"""Bytes of the largest message that is measured: beyond it bandwidth alone decides, the last slope of the table."""
TELLING = 0.02
"""Share of an iteration that must be exposed communication, or its length says nothing of communication."""


class TuningTarget(Protocol):
    """A model in training whose buckets can change between two iterations. Calls marked * are collectives."""

    name: str
    group: dist.ProcessGroup
    device: torch.device
    overlap: Overlap
    """What communication can hide behind."""
    parameters: list[tuple[str, nn.Parameter]]

    def begin(self, on_iteration: Callable[[ObservedIteration], None]) -> None:
        """Calls `on_iteration` at the end of every iteration from now on."""
        ...

    def before_forward(self) -> None: ...
    def after_forward(self) -> None: ...
    def after_step(self) -> None: ...

    def unready(self) -> bool:
        """Whether iterations still differ from those that are to come, so that planning had better wait."""
        ...

    def watch(self, *, every_gradient: bool) -> None:
        """Chooses between stamping everything that a plan is made from and just the length of an iteration."""
        ...

    def probe(self, profile: Profile) -> Plan | None:
        """* A bucketing that must run for a while before `network` is called, if any."""
        ...

    def network(self, max_bytes: int, budget: float) -> Network:
        """* What communication costs."""
        ...

    def watched(self, profile: Profile, network: Network, optimizer: float) -> tuple[Plan, Profile] | None:
        """The buckets while watching, the profile in their order; None where `network` has what training adds."""
        ...

    def contenders(self, profile: Profile, network: Network, optimizer: float, count: int) -> list[TrialPlan]:
        """Plans to try, the one to beat first. `optimizer` is the seconds of the optimiser while watching."""
        ...

    def notes(self, profile: Profile, network: Network) -> tuple[str, ...]: ...

    def use(self, order: list[int], plan: Plan, *, baseline: bool = False) -> None:
        """* Puts a plan in force from the next iteration on; `order` has the indices of the plan's tensors.

        `baseline` says that it is the first contender.
        """
        ...

    def changing(self) -> bool:
        """Whether a plan waits to be put in force."""
        ...

    def hooked(self, late: bool) -> str | None:
        """A communication hook was registered; the reason why buckets must not change under it, or None."""
        ...

    def restore(self, *, now: bool) -> None:
        """Goes back to the buckets from before, at once or before the next iteration."""
        ...

    def close(self) -> None: ...


class Tuner:
    """Drives one model from its first iteration to the buckets it keeps."""

    def __init__(self, ddp: TorchDDP, tuning: Tuning) -> None:
        """`ddp` must call around every forward pass, or with an attached optimiser after every step of that."""
        attached = getattr(ddp, "exchange", None) is not None
        target: TuningTarget = ExchangeTarget(ddp) if attached else ReducerTarget(ddp)
        self._target, self._tuning = target, tuning
        self.report = self._fresh()
        self._course = self._phases()
        target.begin(self._on_iteration)
        next(self._course)

    def _fresh(self) -> TuningReport:
        parameters = [p for _, p in self._target.parameters]
        return TuningReport(
            state="measuring",
            overlap=self._target.overlap,
            workers=dist.get_world_size(self._target.group),
            tensors=len(parameters),
            bytes=sum(_bytes(p) for p in parameters),
        )

    @property
    def active(self) -> bool:
        return self.report.state in ("measuring", "trying") or self._target.changing()

    def before_forward(self) -> None:
        self._target.before_forward()

    def after_forward(self) -> None:
        self._target.after_forward()

    def after_step(self) -> None:
        """Called at the end of every `optimizer.step()` of dovetail's, on all ranks."""
        if self.report.state in ("measuring", "trying"):
            self._target.after_step()

    def hooked(self) -> None:
        """Called on all ranks when a communication hook was registered: planning begins anew, with the hook's costs."""
        if self.report.state not in ("measuring", "trying"):
            return
        if reason := self._target.hooked(late=self.report.steps > 0):
            self.stop(reason)
            return
        self._course.close()
        self.report = self._fresh()
        self._course = self._phases()
        next(self._course)

    def stop(self, reason: str) -> None:
        """Ends planning; the model goes on with the buckets from before at once. Not to be called inside backward.

        Without a reason nothing is logged: something else takes over.
        """
        self._stop(reason, now=True)

    def withdraw(self) -> None:
        """Ends planning without a word: another tuner takes over."""
        self._target.close()
        self._target.restore(now=True)

    def _stop(self, reason: str, *, now: bool = False) -> None:
        self._target.close()
        self._target.restore(now=now)
        self.report = replace(self.report, state="off", reason=reason, plan=None)
        if reason and dist.get_rank(self._target.group) == 0:
            log.warning("dovetail: planning is off: %s", reason)

    def _on_iteration(self, iteration: ObservedIteration) -> None:
        self.report = replace(self.report, steps=self.report.steps + 1)
        try:
            self._course.send(iteration)
        except StopIteration:
            self._target.close()
        except Error as e:
            self._stop(str(e))
        except BaseException as e:  # Ctrl-C, a lost rank: the user gets it and may go on without a plan
            self._stop(f"it was interrupted by {type(e).__name__}")
            raise

    def _phases(self) -> Generator[None, ObservedIteration, None]:
        target, tuning = self._target, self._tuning
        for _ in range(tuning.warmup):
            yield
        while target.unready():
            yield
        seen = yield from self._watch(tuning.measure)
        order, profile, optimizer = self._profile(seen)
        alone = [s.alone for s in seen if s.alone is not None]
        ranks = compare_ranks(alone, profile.parameter_bytes, target.group, target.device)
        if (probe := target.probe(profile)) is not None:
            target.use(order, probe)
            for _ in range(tuning.settle):
                yield
            yield from self._watch(tuning.measure)
        network = target.network(max(1024, min(profile.parameter_bytes, LARGEST)), tuning.network_seconds)
        # The rank that arrived last saw the shortest time, which has no waiting for others in it.
        totals = agree.smallest([s.total for s in seen], target.group, target.device)
        network, plans, notes = self._plans(profile, network, float(np.quantile(totals, 0.25)), optimizer)
        self.report = replace(
            self.report,
            state="trying",
            forward=profile.forward_time(),
            backward=profile.backward_time(),
            network=network,
            profile=profile,
            ranks=ranks,
            notes=notes,
        )
        verdict = yield from compete(
            plans,
            tuning,
            target.group,
            target.device,
            use=lambda i: target.use(order, plans[i].plan, baseline=not i),
            seconds=lambda iteration: iteration.period,
            tell=self._tried,
        )
        kept = plans[verdict.kept].plan
        target.use(order, kept, baseline=not verdict.kept)
        self.report = replace(
            self.report,
            state="done",
            verdict=verdict,
            kept=self.report.trials[verdict.kept],
            plan=None if not verdict.kept and kept.overlap == "backward" else kept,
        )
        if dist.get_rank(target.group) == 0:
            log.info("%s", self.report)

    def _watch(self, iterations: int) -> Generator[None, ObservedIteration, list[ObservedIteration]]:
        self._target.watch(every_gradient=True)
        seen = []
        for _ in range(iterations):
            seen.append((yield))
        self._target.watch(every_gradient=False)
        return seen

    def _tried(self, trials: tuple[Trial, ...]) -> None:
        self.report = replace(self.report, trials=trials)

    def _profile(self, seen: list[ObservedIteration]) -> tuple[list[int], Profile, float]:
        """(indices in ready order, times that all ranks agree on, seconds of the optimiser).

        The order is the first rank's, as in torch; the times are the slowest rank's.
        """
        target = self._target
        ready = [dict(s.ready) for s in seen]
        order, usable, gaps = ready_gaps(ready, len(target.parameters), target.group, target.device)
        seen = [seen[n] for n in usable]
        forward = float(np.quantile([s.forward for s in seen], 0.25))
        # A parameter whose use was not seen counts as used at once, the earliest possible time.
        used = [min(forward, float(np.median([s.used.get(i, 0.0) for s in seen]))) for i in order]
        optimizer = float(np.median([s.update for s in seen]))
        forward, optimizer, *rest = agree.largest([forward, optimizer, *gaps, *used], target.group, target.device)
        at = np.cumsum(rest[: len(order)]).tolist()
        tensors = [target.parameters[i] for i in order]
        name, device, count = target.name, str(target.device), len(usable)
        if target.overlap == "forward":
            return order, by_parameter(name, device, tensors, forward, at, rest[len(order) :], count), optimizer
        return order, as_one_layer(name, device, tensors, forward, at, count), optimizer

    def _plans(
        self, profile: Profile, network: Network, measured: float, optimizer: float
    ) -> tuple[Network, list[TrialPlan], tuple[str, ...]]:
        """Made by the first rank, lest rounding makes ranks differ."""
        target = self._target
        answer: tuple[Network, list[TrialPlan], tuple[str, ...]] | str = ""
        if dist.get_rank(target.group) == 0:
            try:
                watched = target.watched(profile, network, optimizer)
                network = network if watched is None else calibrated(network, *watched, measured)
                plans = target.contenders(profile, network, optimizer, self._tuning.candidates)
                answer = network, plans, target.notes(profile, network)
            except Exception as e:  # whatever it is, all ranks must learn of it
                answer = f"no plan could be made: {e}"
        answer = agree.from_first(answer, target.group, target.device)
        if isinstance(answer, str):
            raise Error(answer)
        return answer


def calibrated(network: Network, plan: Plan, profile: Profile, measured: float) -> Network:
    """The network with the contention by which `plan` is predicted to take what it took in training, in seconds.

    Times of computing were taken in training and have in them what communication costs computing. What a collective
    costs was measured while nothing was computed: the share that it takes longer beside computing makes up for the
    rest. Where computing hides nearly all communication an iteration's length does not tell that share.
    """
    known = network.contention or Contention()

    def with_share(share: float) -> Network:
        return msgspec.structs.replace(network, contention=msgspec.structs.replace(known, collective=share))

    def missing(share: float) -> float:
        return measured - planning.predict(plan, profile, with_share(share)).prediction.iteration

    alone = planning.predict(plan, profile, with_share(0.0)).prediction
    if alone.exposed < TELLING * alone.iteration:
        return network
    low, high = 0.0, MOST_CONTENTION
    if missing(low) <= 0 or missing(high) >= 0:
        return with_share(low if missing(low) <= 0 else high)
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if missing(middle) > 0 else (low, middle)
    return with_share(high)


def ready_gaps(
    seen: Sequence[dict[int, float]], parameters: int, group: dist.ProcessGroup, device: torch.device
) -> tuple[list[int], list[int], list[float]]:
    """(first rank's order of the gradients, iterations that have them all, seconds from each gradient to the next).

    `seen` has, for each iteration, when each gradient was ready on this rank. Of every gap a low quantile is taken:
    other work of the machine must not look like computation, or the plan splits too finely. Low quantiles add up to
    less than any iteration took, so they are scaled to a low quantile of the total.
    """
    order = Counter(tuple(ready) for ready in seen).most_common(1)[0][0]
    order = agree.from_first(order, group, device)
    usable = [n for n, ready in enumerate(seen) if set(ready) == set(order)]
    if agree.largest([float(not usable or len(order) != parameters)], group, device)[0]:
        raise Error("not every parameter got a gradient in every step: buckets cannot be planned from such steps")
    stamps = np.maximum.accumulate([[seen[n][i] for i in order] for n in usable], axis=1)
    gaps = np.quantile(np.diff(stamps, axis=1, prepend=0.0), 0.25, axis=0)
    gaps *= np.quantile(stamps[:, -1], 0.25) / max(gaps.sum(), 1e-9)
    return list(order), usable, gaps.tolist()


def as_one_layer(
    name: str,
    device: str,
    tensors: list[tuple[str, nn.Parameter]],
    forward: float,
    ready: list[float],
    iterations: int,
) -> Profile:
    """A profile of which only the time of the whole forward pass is known; `tensors` and `ready` are in ready order."""
    layer = Layer(
        name="model",
        type=name,
        parameter_bytes=sum(_bytes(p) for _, p in tensors),
        activation_bytes=0,
        times=(LayerTime(batch=1, forward=exactly(forward), backward=exactly(ready[-1])),),
    )
    source = f"{iterations} training iterations; the layers are taken as one, the tensors apart"
    found = tuple(_tensor(n, p, 0, t) for (n, p), t in zip(tensors, ready, strict=True))
    return Profile(name=name, device=device, source=source, batch=1, layers=(layer,), tensors=found)


def by_parameter(
    name: str,
    device: str,
    tensors: list[tuple[str, nn.Parameter]],
    forward: float,
    ready: list[float],
    used: list[float],
    iterations: int,
) -> Profile:
    """A profile with a layer for each parameter, from its first use on; all lists are in ready order."""
    turn = sorted(range(len(tensors)), key=lambda k: used[k])
    place = {k: position for position, k in enumerate(turn, 1)}
    starts = [0.0, *(used[k] for k in turn), forward]
    of_layer = [("before the first parameter", 0), *((tensors[k][0], _bytes(tensors[k][1])) for k in turn)]
    layers = tuple(
        Layer(
            name=layer_name,
            type="parameter",
            parameter_bytes=nbytes,
            activation_bytes=0,
            times=(LayerTime(batch=1, forward=exactly(max(0.0, stop - start)), backward=exactly(0.0)),),
        )
        for (layer_name, nbytes), start, stop in zip(of_layer, starts[:-1], starts[1:], strict=True)
    )
    source = f"{iterations} training iterations; one layer for each parameter, from its first use on"
    found = tuple(_tensor(n, p, place[k], ready[k]) for k, (n, p) in enumerate(tensors))
    return Profile(name=name, device=device, source=source, batch=1, layers=layers, tensors=found)


def _tensor(name: str, parameter: nn.Parameter, layer: int, ready: float) -> ParameterTensor:
    dtype = str(parameter.dtype).removeprefix("torch.")
    return ParameterTensor(name=name, layer=layer, bytes=_bytes(parameter), dtype=dtype, ready=ready)


def _bytes(parameter: nn.Parameter) -> int:
    return parameter.numel() * parameter.element_size()
