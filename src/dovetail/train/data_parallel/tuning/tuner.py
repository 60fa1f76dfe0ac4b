"""Finds the best buckets for a model while it trains.

`Tuner._phases` is the whole course of it, a generator that is handed one finished iteration at a time: watch a few
iterations, measure the network, plan, let the candidates compete, keep the winner. `Tuner._look` is a look back at a
kept plan, long after that. Every iteration they look at is a real training iteration with the same gradients as any
other. What is tuned stands behind `TuningTarget`, of which targets.py has two: a model whose gradients torch's reducer
carries, and one with an optimiser of dovetail's, whose buckets may be torch's or the exchange's. What must be the same
on all ranks is agreed at the end of an iteration, where all of them are at the same point of the same program.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from dovetail import planning
from dovetail.core.errors import Error
from dovetail.core.network import Contention, Network
from dovetail.core.plan import Plan
from dovetail.core.profile import Profile
from dovetail.train import agree

from ..layer_watch import compare_ranks
from ..observe import SETTLE, ObservedIteration
from .look_back import GLANCE_STEPS, LookBack, still_faster
from .reducer_target import ReducerTarget
from .targets import ExchangeTarget
from .trials import Trial, TrialPlan, Tuning, Turns, compete
from .tuning_report import MOST_CONTENTION, Review, TuningReport
from .tuning_target import TuningTarget
from .watched_profile import as_one_layer, by_parameter, size_of

log = logging.getLogger("dovetail")

LARGEST = 32 * 2**20
"""Bytes of the largest message that is measured: beyond it bandwidth alone decides, the last slope of the table."""
TELLING = 0.02
"""Share of an iteration that must be exposed communication, or its length says nothing of communication."""


class Tuner:
    """Drives one model from its first iteration to the buckets it keeps."""

    def __init__(
        self, ddp: TorchDDP, tuning: Tuning, look_back: LookBack | None = None, report: TuningReport | None = None
    ) -> None:
        """`ddp` must call around every forward pass, or with an attached optimiser after every step of that.

        With a plan to look back at, and the report of when it was kept, that is all there is to do.
        """
        attached = getattr(ddp, "exchange", None) is not None
        own = look_back.own if look_back is not None else None
        target: TuningTarget = ExchangeTarget(ddp) if attached else ReducerTarget(ddp, own)
        self._target, self._tuning = target, tuning
        self.report = report or self._fresh()
        self.look_back = look_back
        """What is to be looked at again later; None while planning, and where the first plan is in force."""
        self._begin(self._phases() if look_back is None else self._look(look_back))

    def _begin(self, course: Generator[None, ObservedIteration, None]) -> None:
        self._course, self._going = course, True
        self._target.begin(self._on_iteration)
        next(course)

    def _fresh(self) -> TuningReport:
        parameters = [p for _, p in self._target.parameters]
        return TuningReport(
            state="measuring",
            overlap=self._target.overlap,
            workers=dist.get_world_size(self._target.group),
            tensors=len(parameters),
            bytes=sum(size_of(p) for p in parameters),
        )

    @property
    def active(self) -> bool:
        return self._going or self._target.changing()

    @property
    def looks_back(self) -> bool:
        """Whether planning is over, and what goes on is a look back."""
        return self._going and self.report.state == "done"

    def before_forward(self) -> None:
        self._target.before_forward()

    def after_forward(self) -> None:
        self._target.after_forward()

    def after_step(self) -> None:
        """Called at the end of every `optimizer.step()` of dovetail's, on all ranks."""
        if self._going:
            self._target.after_step()
        elif self.look_back is not None and self.look_back.tick():
            self._begin(self._look(self.look_back))

    def hooked(self) -> None:
        """Called on all ranks when a communication hook was registered: planning begins anew, with the hook's costs."""
        if not self._going or self.looks_back:
            self.leave_be()
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

        Without a reason nothing is logged: something else takes over. A plan that was kept before stays.
        """
        if self.report.state == "done":
            self.leave_be()
        else:
            self._stop(reason, now=True)

    def withdraw(self) -> None:
        """Ends planning without a word: another tuner takes over."""
        self._target.close()
        self._target.restore(now=True)

    def leave_be(self, *, later: bool = False) -> None:
        """Ends looking back, for good or until later; the kept plan is in force at once. Not inside backward."""
        look = self.look_back
        self.look_back = look if later else None
        if look is not None and self._going:
            self._going = False
            self._course.close()
            self._target.close()
            self._target.use(look.order, look.kept.plan)
            self._target.enforce()

    def _stop(self, reason: str, *, now: bool = False) -> None:
        self._going, self.look_back = False, None
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
            self._going = False
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
        if (probe := target.probe(profile)) is not None:
            target.use(order, probe)
            for _ in range(max(SETTLE, tuning.settle)):
                yield
            yield from self._watch(tuning.measure)
        network = target.network(max(1024, min(profile.parameter_bytes, LARGEST)), tuning.network_seconds)
        # Not earlier: with dovetail's optimiser the iteration before has left its all-gathers on the links.
        alone = [s.alone for s in seen if s.alone is not None]
        ranks = compare_ranks(alone, profile.parameter_bytes, target.group, target.device)
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
        if verdict.kept and tuning.look_back:
            trial = self.report.trials[verdict.kept]
            self.look_back = LookBack(
                order=order,
                first=plans[0],
                kept=plans[verdict.kept],
                own=target.own,
                spread=(trial.high - trial.low) / 2 / trial.median,
                every=tuning.look_back,
            )
        if dist.get_rank(target.group) == 0:
            log.info("%s", self.report)

    def _look(self, look: LookBack) -> Generator[None, ObservedIteration, None]:
        """A glance at a kept plan, and if it is time, a comparison with the first one."""
        target, tuning = self._target, self._tuning
        self.report = replace(self.report, steps=self.report.steps + look.rested)
        seen = []
        for _ in range(GLANCE_STEPS):
            seen.append((yield).period)
        now = float(np.median(agree.smallest(seen, target.group, target.device)))
        compare, drifted = look.glanced(now)
        if not compare:
            return

        def use(plan: int) -> None:
            target.use(look.order, (look.first, look.kept)[plan].plan, baseline=not plan)

        turns: Turns[ObservedIteration] = Turns(
            tuning, target.group, target.device, use=use, seconds=lambda iteration: iteration.period
        )
        duel, stays = yield from still_faster(turns, tuning.margin)
        use(int(stays))
        review = Review(
            step=self.report.steps,
            against=look.first.label,
            before=look.seconds or now,
            now=now,
            drifted=drifted,
            duel=duel,
            stays=stays,
        )
        self.report = replace(self.report, reviews=(*self.report.reviews, review))
        if stays:
            look.found_faster()
        else:
            self.look_back = None
            plan = look.first.plan if look.first.plan.overlap == "forward" else None
            self.report = replace(self.report, kept=self.report.trials[0], plan=plan)
        if dist.get_rank(target.group) == 0:
            log.log(logging.INFO if stays else logging.WARNING, "dovetail: %s", review)

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
