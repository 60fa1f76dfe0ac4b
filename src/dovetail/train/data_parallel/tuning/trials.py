"""The contest of plans in real iterations: how much effort it takes, and who wins.

`compete` is one phase of the tuner: a generator that is handed one finished training iteration at a time. All ranks run
it over the same plans and leave it with the same verdict. It has two parts:

1. The heats: every plan but the first runs for a few iterations. They only choose the challenger: the plan that looks
   fastest by its prediction and by its heats, each weighed by how far it can be off.
2. The duel, which confirms it or not: the challenger against the first plan, in pairs of turns right after each other.
   A coin decides which of the two begins a pair. Only the duel decides, and only the duel says how much is gained.

So what chooses the challenger is not what judges it: a plan that was lucky in the heats starts anew, and it makes no
difference to the error how many plans there were. After every pair of turns the duel may end (see verdict.py). The
chance of keeping a plan that is no faster than the first is at most ERROR, whatever the noise, and at most DOUBTED for
a plan that is predicted to be slower.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from dovetail.core.errors import Error
from dovetail.core.plan import Plan
from dovetail.measure import stats
from dovetail.train import agree

from .verdict import DOUBTED, ERROR, LEAST_PAIRS, LONGEST, Verdict, chance, estimated, judged, spending, turn_time

Seen = TypeVar("Seen")
"""What a tuner knows of one iteration."""

HOPELESS = 3
"""Pairs after which a challenger that is not ahead of the first plan has lost."""
PREDICTED = 0.05
"""How far predictions of two plans' times are typically off against each other, as a share."""
NEAR = 0.2
"""An iteration counts as undisturbed up to so much above the fast ones of its like."""


@dataclass(frozen=True)
class Tuning:
    """How much effort goes into finding a plan. With the defaults it takes about 110 training iterations."""

    warmup: int = 10
    """Iterations that are not looked at: the first ones allocate, compile and fill caches."""
    measure: int = 10
    """Iterations whose gradient-ready times are taken."""
    candidates: int = 4
    """Bucketings to try, torch's own among them; one more with dovetail's optimiser."""
    settle: int = 1
    """Iterations after each change of buckets that are not timed: torch has the new ones in ready order from the second
    on. Of those that are timed the slowest does not count."""
    steps: int = 9
    """Iterations that are timed, per candidate and heat."""
    rounds: int = 1
    """Heats, in alternating order."""
    duel: int = 7
    """Pairs of turns in which the fastest candidate is compared with torch's own buckets; fewer where it is clear, in
    much noise up to twice as many."""
    duel_steps: int = 4
    """Iterations that are timed, per turn of the duel."""
    network_seconds: float = 3.0
    """Time budget for measuring the network, in seconds, spent once."""
    margin: float = 0.01
    """A plan must be faster than torch's own buckets by this share to replace them."""
    drop: float = 0.08
    """A candidate slower than the best so far by this share does not run in the next heat."""
    look_back: int = 4000
    """Iterations after which a kept plan is compared with torch's own buckets again; 0 for never."""

    def __post_init__(self) -> None:
        for name, least in (
            ("warmup", 0),
            ("measure", 1),
            ("candidates", 2),
            ("settle", 1),
            ("steps", 1),
            ("rounds", 1),
            ("duel", LEAST_PAIRS),
            ("duel_steps", 1),
            ("look_back", 0),
        ):
            if getattr(self, name) < least:
                raise Error(f"Tuning.{name}: expected at least {least}, got {getattr(self, name)}")

    @property
    def most(self) -> int:
        """Iterations that planning takes at most, from the first to the one after which the kept plan is in force."""
        heats = self.candidates * self.rounds * (self.settle + self.steps)
        duel = LONGEST * 2 * self.duel * (self.settle + self.duel_steps)
        return self.warmup + 2 * self.measure + 2 + self.settle + heats + duel + 1


@dataclass(frozen=True)
class TrialPlan:
    """A plan that enters the contest."""

    plan: Plan
    label: str
    """What it is called in `explain()`."""
    predicted: float
    """Seconds per iteration, of what the contest measures."""


@dataclass(frozen=True)
class Trial:
    """A plan that ran for some real iterations; times in seconds per iteration, as `compete` was handed them."""

    plan: Plan
    label: str
    predicted: float
    baseline: bool
    median: float
    low: float
    """The tenth percentile."""
    high: float
    """The ninetieth percentile."""
    steps: int
    """Iterations that were timed, those of the duel included; 0 if it has not run yet, and its times are 0 too."""
    lost: float = 0.0
    """Share of these iterations' time that the disturbed ones took beyond a typical one."""
    dropped: bool = False
    """It was clearly slower in one heat and did not run in the next."""


class Turns(Generic[Seen]):
    """Lets plans run in turns and keeps what their iterations took, the same on all ranks."""

    def __init__(
        self,
        tuning: Tuning,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        use: Callable[[int], None],
        seconds: Callable[[Seen], float],
    ) -> None:
        """`use(i)` puts the i-th plan in force, `seconds` gives the time of an iteration."""
        self._tuning, self._group, self._device = tuning, group, device
        self._use, self._seconds = use, seconds
        self._now = -1
        self._coin = Random(agree.from_first(secrets.randbits(32), group, device))
        self.times: dict[int, list[float]] = {}

    def turn(self, plan: int, steps: int) -> Generator[None, Seen, list[float]]:
        """Runs one plan for some iterations and returns their seconds."""
        if plan != self._now:
            self._use(plan)
            self._now = plan
        # Also where the plan stays: which iterations are timed must not depend on the coin.
        for _ in range(self._tuning.settle):
            yield
        mine = []
        for _ in range(steps):
            mine.append(self._seconds((yield)))
        # The rank that arrived last saw the shortest time, which has no waiting for others in it.
        agreed = agree.smallest(mine, self._group, self._device)
        self.times.setdefault(plan, []).extend(agreed)
        return agreed

    def pair(self, challenger: int) -> Generator[None, Seen, float]:
        """Runs the first plan and the challenger; returns the logarithm of how many times as long the first took."""
        took = {}
        for plan in (0, challenger) if self._coin.random() < 0.5 else (challenger, 0):
            took[plan] = turn_time((yield from self.turn(plan, self._tuning.duel_steps)))
        return took[0] - took[challenger]


def compete(
    plans: Sequence[TrialPlan],
    tuning: Tuning,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    use: Callable[[int], None],
    seconds: Callable[[Seen], float],
    tell: Callable[[tuple[Trial, ...]], None],
) -> Generator[None, Seen, Verdict]:
    """Lets the plans run and returns which one to keep, the same on all ranks.

    The first plan is the one to beat. `use(i)` puts the i-th plan in force, `seconds` gives the time of an iteration,
    and `tell` gets the results so far, after every heat and during the duel.
    """
    turns = Turns(tuning, group, device, use=use, seconds=seconds)
    if len(plans) == 1:
        tell(_trials(plans, turns.times, set()))
        return Verdict(kept=0)
    challenger, dropped = 1, set[int]()
    if len(plans) > 2:
        for heat in range(tuning.rounds):
            among = [i for i in range(1, len(plans)) if i not in dropped]
            for i in reversed(among) if heat % 2 else among:
                yield from turns.turn(i, tuning.steps)
            typical = {i: _typical(turns.times[i]) for i in among}
            if heat < tuning.rounds - 1:  # after the last heat there is no next one to leave out of
                dropped |= {i for i in among if typical[i] > min(typical.values()) * (1 + tuning.drop)}
            tell(_trials(plans, turns.times, dropped))
        challenger = most_promising(plans, {i: turns.times[i] for i in among})

    error = ERROR if plans[challenger].predicted <= plans[0].predicted else DOUBTED
    spent, differences = spending(tuning.duel, error), list[float]()
    while True:
        differences.append((yield from turns.pair(challenger)))
        tell(_trials(plans, turns.times, dropped))
        pairs, gain = len(differences), estimated(differences)
        proven = pairs >= LEAST_PAIRS and chance(differences, spent) <= spent(pairs)
        hopeless = (pairs >= HOPELESS and gain <= 0) or (pairs >= tuning.duel and gain < tuning.margin)
        if proven or hopeless or pairs >= LONGEST * tuning.duel:
            kept = challenger if proven and gain >= tuning.margin else 0
            duel = judged(differences, tuning.duel, error)
            return Verdict(kept=kept, challenger=challenger, duel=duel, error=error)


def most_promising(plans: Sequence[TrialPlan], times: dict[int, list[float]]) -> int:
    """The plan that meets the first one in the duel, by the iterations that some plans took in the heats.

    A plan's time is estimated from what was measured and from what was predicted, each weighed by its variance. Both
    weights are the same for all plans, so it makes no difference if predictions are off by a factor that all share.
    """
    measured = {i: turn_time(seconds) for i, seconds in times.items()}
    varied = [float(np.var(np.log(seconds), ddof=1)) for seconds in times.values() if len(seconds) > 1]
    of_means = (float(np.median(varied)) if varied else PREDICTED**2) / min(len(t) for t in times.values())
    trust = PREDICTED**2 / (PREDICTED**2 + of_means)

    def estimate(plan: int) -> float:
        return trust * measured[plan] + (1 - trust) * float(np.log(max(plans[plan].predicted, 1e-9)))

    return min(times, key=estimate)


def _typical(seconds: Sequence[float]) -> float:
    return float(stats.typical(seconds, near=NEAR))


def _trials(plans: Sequence[TrialPlan], times: dict[int, list[float]], dropped: set[int]) -> tuple[Trial, ...]:
    return tuple(_trial(plan, times.get(i, []), i, i in dropped) for i, plan in enumerate(plans))


def _trial(contender: TrialPlan, seconds: list[float], position: int, dropped: bool) -> Trial:
    low, median, high = (float(q) for q in np.quantile(seconds, [0.1, 0.5, 0.9])) if seconds else (0.0, 0.0, 0.0)
    return Trial(
        plan=contender.plan,
        label=contender.label,
        predicted=contender.predicted,
        baseline=not position,
        median=median,
        low=low,
        high=high,
        steps=len(seconds),
        lost=stats.lost_of_all([seconds], near=NEAR) if seconds else 0.0,
        dropped=dropped,
    )
