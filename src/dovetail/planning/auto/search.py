"""`plan --auto`: the best combination of techniques and devices for a job, proven to be so where that is possible.

    Search(Question(profile, network, devices=64, batch=2048), score).run()     an AutoPlan

1. Torch's DistributedDataParallel on as many devices as share the batch is planned and scored: the baseline. For
   device-time and throughput it is also the speed that must be reached, since otherwise one device is always best.
2. All other combinations (`options.combinations`) are visited in the order of their lower bounds, simple techniques
   first. One whose bound does not beat the best plan so far is dropped unplanned; any other is planned by the exact
   planner of its technique, which may give up as soon as it sees that it cannot beat the best plan either.
3. `score` predicts what a plan takes: the simulator does (`dovetail.simulate.auto.score`), by one rule for all.
4. `AutoPlan.bound` states what is left to gain: nothing, if every dropped combination was dropped by a bound and every
   other was planned exactly. Burst plans with hidden gradients are not exact: their bound says how much may be left.
5. The parts of the winner are added one after the other, from the baseline to the plan, to see what each contributed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from dovetail.core.burst_plan import BurstPlan
from dovetail.core.errors import Error

from .options import TECHNIQUES, AnyPlan, Combination, Excluded, Question, combinations, reference

ROUNDING = 1e-9
"""Differences below this share are none."""

_CHAINS = {
    "ddp": ("ddp",),
    "merging": ("ddp", "merging"),
    "overlap": ("ddp", "merging", "overlap"),
    "guard": ("ddp", "merging", "guard"),
    "ladder": ("ddp", "merging", "ladder"),
    "balanced": ("ddp", "merging", "ladder", "balanced"),
    "burst": ("ddp", "burst"),
}
"""Which parts a technique is made of, in the order in which they are put in."""


@dataclass(frozen=True)
class Score:
    """What one iteration of a plan takes, and what it leaves to others."""

    iteration: float
    """Seconds."""
    device_time: float
    """Device-seconds in which a device of the job computes or communicates."""
    useful: float
    """Device-seconds that background tasks get, on the cluster's other devices and in the gaps of the job's own."""


@dataclass(frozen=True)
class Candidate:
    """A combination with its best plan."""

    combination: Combination
    plan: AnyPlan
    score: Score

    @property
    def technique(self) -> str:
        return self.combination.technique

    @property
    def devices(self) -> int:
        """The most devices that it uses at once."""
        return max(self.plan.counts) if isinstance(self.plan, BurstPlan) else self.combination.devices


@dataclass(frozen=True)
class Dropped:
    """A combination that was given up before any plan of it was scored."""

    combination: Combination
    reason: str
    """"bound": it cannot be better than what was found; "slow": it cannot be as fast as it must be; "none": none of the
    plans that were made of it is better, but its bound does not prove that there is none."""


@dataclass(frozen=True)
class AutoPlan:
    """The chosen plan, and the evidence for it."""

    question: Question
    within: float
    """Seconds that an iteration may take; infinite where only the time counts."""
    chosen: Candidate
    baseline: Candidate
    steps: tuple[Candidate, ...]
    """From the baseline to what was chosen, a part at a time."""
    scored: tuple[Candidate, ...]
    dropped: tuple[Dropped, ...]
    excluded: tuple[Excluded, ...]
    value: float
    """Value of the objective: seconds, device-seconds, or devices' worth of useful work."""
    bound: float
    """No combination that was considered can be better than that."""
    search: Search = field(repr=False, compare=False)
    """Plans single combinations too: `search.of("burst", 8)`."""

    @property
    def gap(self) -> float:
        """How much better, as a share of the value, some combination might be; 0: this is the best."""
        return abs(self.value - self.bound) / abs(self.value) if self.value else 0.0

    @property
    def considered(self) -> int:
        return len(self.scored) + len(self.dropped)


@dataclass(frozen=True)
class Aim:
    """The objective as a cost: the smaller the better."""

    question: Question
    within: float = math.inf

    def cost(self, score: Score) -> float:
        if self.question.objective == "time":
            return score.iteration
        if self.question.objective == "device-time":
            return score.device_time
        return -throughput(self.question, score)

    def least(self, c: Combination) -> float:
        """What no plan of a combination can go below."""
        q, t = self.question, c.bound
        if q.objective == "time":
            return t
        if t > self.within * (1 + ROUNDING):
            return math.inf  # none is as fast as it must be
        work = c.work(self.within)
        if q.objective == "device-time":
            return max(work, c.held * t)
        if t <= 0:
            return -math.inf
        # Per second: what one device would need for the iteration, and all devices without those that the job holds.
        # Work beyond that of one device weighs least in the longest iteration.
        extra = (q.one_device - work) / (t if work < q.one_device else self.within)
        return -(q.devices + min(q.one_device / t - c.held, extra))

    def longest(self, c: Combination, best: float) -> float:
        """Seconds beyond which a plan of a combination is of no interest, where `best` is the least cost so far."""
        q, limit = self.question, self.within
        if q.objective == "time":
            limit = min(limit, best)
        elif q.objective == "device-time" and c.held:
            limit = min(limit, best / c.held)
        elif q.objective == "throughput" and c.held and -best > q.devices - c.held:
            limit = min(limit, q.one_device / (-best - q.devices + c.held))
        return limit * (1 + ROUNDING)

    def reached(self, score: Score) -> bool:
        return score.iteration <= self.within * (1 + ROUNDING)


def throughput(q: Question, score: Score) -> float:
    """Devices' worth of useful work: what one device would need for the iteration and what background tasks get."""
    if not score.iteration:
        return float(q.devices)
    return (q.one_device + score.useful) / score.iteration


def _scored(c: Combination, plan: AnyPlan, score: Score) -> Candidate:
    """A burst plan gets the simulator's prediction in place of its cost model's, which hides no communication."""
    if isinstance(plan, BurstPlan):
        predicted = msgspec.structs.replace(plan.prediction, iteration=score.iteration, device_time=score.device_time)
        plan = msgspec.structs.replace(plan, prediction=predicted)
    return Candidate(c, plan, score)


class Search:
    """One search; it remembers every combination that it has planned."""

    def __init__(self, question: Question, score: Callable[[AnyPlan], Score]) -> None:
        self.question, self._score = question, score
        self.combinations, excluded = combinations(question)
        self.excluded = list(excluded)
        self._seen: dict[tuple[str, int], Candidate | None] = {}
        self._impossible: set[tuple[str, int]] = set()

    @cached_property
    def baseline(self) -> Candidate:
        """Torch's DistributedDataParallel on as many devices as there are, or as share the batch.

        Where its memory is not enough on any number of devices it is there to compare with only.
        """
        ddp = [c for c in self.combinations if c.technique == "ddp"]
        widest = max(ddp, key=lambda c: c.devices) if ddp else reference(self.question)
        found = self.candidate(widest)
        assert found is not None, "it is planned without a limit"
        return found

    @property
    def fits(self) -> bool:
        """Whether the baseline could be chosen."""
        return any(c.technique == "ddp" for c in self.combinations)

    @cached_property
    def aim(self) -> Aim:
        q = self.question
        if q.objective == "time" and q.within is None:
            return Aim(q)
        return Aim(q, self.baseline.score.iteration if q.within is None else q.within)

    def of(self, technique: str, devices: int) -> Candidate | None:
        """The best plan of a combination, if there is such a combination and such a plan."""
        among = [c for c in self.combinations if (c.technique, c.devices) == (technique, devices)]
        return self.candidate(among[0]) if among else None

    def candidate(self, c: Combination, limit: float = math.inf) -> Candidate | None:
        """The best plan of a combination; None where it has none, or none within `limit` seconds."""
        key = c.technique, c.devices
        if self._seen.get(key) is not None:
            return self._seen[key]
        if key in self._impossible:
            return None  # already among the excluded
        aim = Aim(self.question) if limit == math.inf else self.aim
        best: Candidate | None = None
        try:
            for plan in c.make(limit):
                made = _scored(c, plan, self._score(plan))
                if aim.reached(made.score) and (best is None or aim.cost(made.score) < aim.cost(best.score)):
                    best = made
        except Error as e:
            if c.technique == "ddp":
                raise
            self._impossible.add(key)
            self.excluded.append(Excluded(c.technique, f"on {c.devices} devices: {e}"))
        self._seen[key] = best
        return best

    def run(self) -> AutoPlan:
        aim = self.aim
        best = self.baseline if self.fits and aim.reached(self.baseline.score) else None
        scored, dropped = [self.baseline] if self.fits else [], list[Dropped]()
        first = {name: i for i, name in enumerate(TECHNIQUES)}
        todo = [c for c in self.combinations if c is not self.baseline.combination]
        todo.sort(key=lambda c: (c.technique not in ("ddp", "merging"), aim.least(c), first[c.technique], c.devices))
        for c in todo:
            if c.bound > aim.within * (1 + ROUNDING):
                dropped.append(Dropped(c, "slow"))
                continue
            cost = math.inf if best is None else aim.cost(best.score)
            if best is not None and aim.least(c) >= cost - ROUNDING * abs(cost):
                dropped.append(Dropped(c, "bound"))
                continue
            out = len(self.excluded)
            found = self.candidate(c, aim.longest(c, cost))
            if found is None and len(self.excluded) == out:
                proven = "bound" if best is not None else "slow"
                dropped.append(Dropped(c, proven if c.exact else "none"))
            elif found is not None:
                scored.append(found)
                if best is None or self._better(found, best):
                    best = found
        if best is None and not (scored or self.fits) and (not dropped or aim.within == math.inf):
            raise self._no_memory()
        if best is None:
            fastest = min(c.bound for c in self.combinations)
            raise Error(
                f"within: no plan for {self.question.profile.name!r} takes at most {aim.within:g} s on up to "
                f"{self.question.devices:,} devices; nothing can take less than {fastest:g} s"
            )
        value = aim.cost(best.score)
        open_ends = [aim.least(c) for c in self.combinations if not c.exact and c.bound <= aim.within * (1 + ROUNDING)]
        sign = -1.0 if self.question.objective == "throughput" else 1.0
        return AutoPlan(
            question=self.question,
            within=aim.within,
            chosen=best,
            baseline=self.baseline,
            steps=tuple(self._steps(best)),
            scored=tuple(scored),
            dropped=tuple(dropped),
            excluded=tuple(self.excluded),
            value=sign * value,
            bound=sign * min([value, *open_ends]),
            search=self,
        )

    def _no_memory(self) -> Error:
        q, g = self.question, self.question.shares[-1]
        return Error(
            f"no plan for {q.profile.name!r} at a global batch of {q.batch:,} on up to {q.devices:,} devices fits: for "
            f"data parallelism {g:,} need {q.needed(g):,} bytes each, expected at most {q.memory:,}"
        )

    def _better(self, a: Candidate, b: Candidate) -> bool:
        """Of equals the simpler, then the one with fewer devices."""
        mine, theirs = self.aim.cost(a.score), self.aim.cost(b.score)
        if abs(mine - theirs) > ROUNDING * abs(theirs):
            return mine < theirs
        order = TECHNIQUES.index
        return (order(a.technique), a.devices) < (order(b.technique), b.devices)

    def _steps(self, chosen: Candidate) -> list[Candidate]:
        """The number of devices first, since for that nothing but the number changes; then technique by technique."""
        steps = [self.baseline]
        devices = chosen.combination.devices
        if chosen.technique == "burst":
            devices = self._best_number()
        for technique in _CHAINS[chosen.technique]:
            found = chosen if technique == chosen.technique else self.of(technique, devices)
            if found is not None and found is not self.baseline:
                steps.append(found)
        return steps

    def _best_number(self) -> int:
        """The number of devices on which torch's DDP is best."""
        ddp = [c for c in self.combinations if c.technique == "ddp"]
        found = [f for f in map(self.candidate, ddp) if f is not None and self.aim.reached(f.score)]
        best = min(found, key=lambda f: self.aim.cost(f.score), default=self.baseline)
        return best.combination.devices
