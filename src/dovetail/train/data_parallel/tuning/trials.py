"""The contest of plans in real iterations: how much effort it takes, and who wins.

`compete` is one phase of the tuner: a generator that is handed one finished training iteration at a time. All ranks run
it over the same plans and leave it with the same verdict. It has two parts:

1. The heats: every plan runs for a few iterations. They only choose the challenger, the plan that looked fastest.
2. The duel: the challenger against the first plan, in pairs of turns right after each other. A coin decides which of
   the two begins a pair. Only the duel decides, and only the duel says how much is gained.

So what chooses the challenger is not what judges it: a plan that was lucky in the heats starts anew. And where both are
equally fast, a coin alone decides which of two turns counts for whom; then whatever the machine does meanwhile (drift,
bursts, another job that starts) makes a difference in favour of the challenger as likely as one against it. Wilcoxon's
signed-rank test counts how likely the differences seen would be. The chance of keeping a plan that is no faster than
the first is at most ERROR, whatever the noise and however many plans there are.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from random import Random
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from dovetail.core.errors import Error
from dovetail.core.plan import Plan
from dovetail.measure import stats
from dovetail.train import agree

Seen = TypeVar("Seen")
"""What a tuner knows of one iteration."""

ERROR = 0.05
"""Chance, at most, of keeping a plan that is no faster than the first one."""
FIRST_LOOK = 1 / 32
"""The part of it that is spent when the duel is half over; the rest is left for its end."""
LEAST_PAIRS = 5
"""With fewer even a plan that wins every pair could have been lucky."""
ALIKE = 0.03
"""Share by which times in heats are not told apart."""
NEAR = 0.2
"""An iteration counts as undisturbed up to so much above the fast ones of its like."""


@dataclass(frozen=True)
class Tuning:
    """How much effort goes into finding a plan. With the defaults it takes about 75 training iterations."""

    warmup: int = 3
    """Iterations that are not looked at: the first ones allocate, compile and fill caches."""
    measure: int = 10
    """Iterations whose gradient-ready times are taken."""
    candidates: int = 4
    """Bucketings to try, torch's own among them."""
    settle: int = 2
    """Iterations after each change of buckets that do not count: torch puts buckets into ready order on the second."""
    steps: int = 3
    """Iterations that count, per candidate and heat."""
    rounds: int = 1
    """Heats, in alternating order."""
    duel: int = 6
    """Pairs of turns in which the fastest candidate is compared with torch's own buckets; in much noise up to three
    times as many."""
    duel_steps: int = 2
    """Iterations that count, per turn of the duel."""
    network_seconds: float = 3.0
    """Time budget for measuring the network, in seconds, spent once."""
    margin: float = 0.01
    """A plan must be faster than torch's own buckets by this share to replace them."""
    drop: float = 0.08
    """A candidate slower than the best so far by this share does not run in the next heat."""

    def __post_init__(self) -> None:
        for name, least in (
            ("warmup", 0),
            ("measure", 1),
            ("candidates", 2),
            ("settle", 2),
            ("steps", 1),
            ("rounds", 1),
            ("duel", LEAST_PAIRS),
            ("duel_steps", 1),
        ):
            if getattr(self, name) < least:
                raise Error(f"Tuning.{name}: expected at least {least}, got {getattr(self, name)}")

    @property
    def most(self) -> int:
        """Iterations that planning takes at most, from the first to the one after which the kept plan is in force."""
        heats = self.candidates * self.rounds * (self.settle + self.steps)
        duel = 3 * 2 * self.duel * (self.settle + self.duel_steps)
        return self.warmup + 2 * self.measure + self.settle + heats + duel + 1


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
    """Iterations that counted, those of the duel included."""
    lost: float = 0.0
    """Share of these iterations' time that the disturbed ones took beyond a typical one."""
    dropped: bool = False
    """It was clearly slower in one heat and did not run in the next."""


@dataclass(frozen=True)
class PairedGain:
    """How much faster one plan is than another, from pairs of turns; shares of the slower one's time: 0.1 is 10 %."""

    gain: float
    low: float
    high: float
    """Ends of the interval that holds the true gain in at least nine of ten duels."""
    chance: float
    """Chance of differences as good as these or better, if there were nothing to gain."""
    pairs: int


@dataclass(frozen=True)
class Verdict:
    """What a contest has decided."""

    kept: int
    """Index of the plan to keep."""
    challenger: int = 0
    """Index of the plan that was compared with the first in the duel; 0 if none was."""
    duel: PairedGain | None = None


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
    and `tell` gets the results so far, after every heat and after the duel.
    """
    times: list[list[float]] = [[] for _ in plans]
    dropped: set[int] = set()
    now = -1

    def turn(i: int, steps: int) -> Generator[None, Seen, list[float]]:
        nonlocal now
        if i != now:
            use(i)
            now = i
            for _ in range(tuning.settle):
                yield
        mine = []
        for _ in range(steps):
            mine.append(seconds((yield)))
        # The rank that arrived last saw the shortest time, which has no waiting for others in it.
        agreed = agree.smallest(mine, group, device)
        times[i] += agreed
        return agreed

    for heat in range(tuning.rounds):
        among = [i for i in range(len(plans)) if i not in dropped]
        for i in reversed(among) if heat % 2 else among:
            yield from turn(i, tuning.steps)
        typical = [_typical(t) for t in times]
        if heat < tuning.rounds - 1:  # after the last heat there is no next one to leave out of
            dropped |= {i for i in among if i and typical[i] > min(typical) * (1 + tuning.drop)}
        tell(_trials(plans, times, dropped))
    challenger = _challenger(plans, {i: t for i, t in enumerate(typical) if i not in dropped})
    if not challenger:
        return Verdict(kept=0)

    coin = Random(agree.from_first(secrets.randbits(32), group, device))

    def fight() -> Generator[None, Seen, list[float]]:
        differences = []
        for _ in range(tuning.duel):
            pair = {}
            for i in (0, challenger) if coin.random() < 0.5 else (challenger, 0):
                pair[i] = _fast((yield from turn(i, tuning.duel_steps)))
            differences.append(float(np.log(pair[0] / pair[challenger])))
        tell(_trials(plans, times, dropped))
        return differences

    differences = yield from fight()
    result, allowed = compared(differences), FIRST_LOOK
    if result.gain >= tuning.margin and result.chance > allowed:
        differences += yield from fight()
        result, allowed = compared(differences), ERROR - FIRST_LOOK
    wins = result.gain >= tuning.margin and result.chance <= allowed
    if wins and result.high - result.low > result.gain:
        # In so much noise whoever wins has been lucky as well: what it gains is told by pairs that did not choose it.
        result = compared((yield from fight()))
        wins = result.gain >= tuning.margin
    return Verdict(kept=challenger if wins else 0, challenger=challenger, duel=result)


def _challenger(plans: Sequence[TrialPlan], typical: dict[int, float]) -> int:
    """The plan that meets the first one in the duel; 0 if none was faster in the heats.

    Heats are short: of plans that are alike in them the prediction decides, and of those that are alike in that too,
    the fewer buckets, whose iterations vary least.
    """
    faster = {i: t for i, t in typical.items() if t < typical[0]}
    if not faster:
        return 0
    alike = [i for i, t in faster.items() if t <= min(faster.values()) * (1 + ALIKE)]
    promise = min(plans[i].predicted for i in alike)
    return min(
        (i for i in alike if plans[i].predicted <= promise * (1 + ALIKE / 2)),
        key=lambda i: (len(plans[i].plan.buckets), typical[i]),
    )


def compared(differences: Sequence[float]) -> PairedGain:
    """Judges a duel; `differences` are logarithms of how many times as long the first plan took, one for each pair.

    The estimate is that of Hodges and Lehmann, the median of the means of any two differences, and the interval goes
    with the test: it ends where the test would begin to tell a difference. One pair that was disturbed moves neither.
    """
    means = np.sort([(a + b) / 2 for a, b in combinations_with_replacement(differences, 2)])
    sums = np.cumsum(_rank_sums(range(1, len(differences) + 1)))
    cut = max(0, int(np.searchsorted(sums, ERROR, side="right")) - 1)  # leaves out a twentieth on either side
    return PairedGain(
        gain=_share(float(np.median(means))),
        low=_share(float(means[cut])),
        high=_share(float(means[-1 - cut])),
        chance=signed_rank(differences),
        pairs=len(differences),
    )


def signed_rank(differences: Sequence[float]) -> float:
    """Wilcoxon's one-sided signed-rank test: chance of such differences or more positive ones, if signs were coins."""
    sizes = np.abs(differences)
    # Ranks of the absolute values, doubled so that the mean rank of equal ones is a whole number; zeros count nothing.
    ranks = [int(2 * np.sum(sizes < s) + np.sum(sizes == s) + 1) if s > 0 else 0 for s in sizes]
    seen = sum(r for r, d in zip(ranks, differences, strict=True) if d > 0)
    return float(_rank_sums(ranks)[seen:].sum())


def _rank_sums(ranks: Sequence[int]) -> npt.NDArray[np.float64]:
    """Chance of each sum of ranks, from 0 on, if a fair coin decides whether a rank is in the sum."""
    chances = np.ones(1)
    for rank in ranks:
        chances = np.pad(chances, (0, rank)) / 2 + np.pad(chances, (rank, 0)) / 2
    return chances


def _share(logarithm: float) -> float:
    return float(-np.expm1(-logarithm))


def _fast(seconds: Sequence[float]) -> float:
    """Mean of the faster half of a turn's iterations: what others do to the machine only ever adds time."""
    ordered = sorted(seconds)
    return float(np.mean(ordered[: (len(ordered) + 1) // 2]))


def _typical(seconds: Sequence[float]) -> float:
    return float(stats.typical(seconds, near=NEAR))


def _trials(plans: Sequence[TrialPlan], times: Sequence[list[float]], dropped: set[int]) -> tuple[Trial, ...]:
    return tuple(_trial(plan, times[i], i, i in dropped) for i, plan in enumerate(plans))


def _trial(contender: TrialPlan, seconds: list[float], position: int, dropped: bool) -> Trial:
    low, median, high = (float(q) for q in np.quantile(seconds, [0.1, 0.5, 0.9]))
    return Trial(
        plan=contender.plan,
        label=contender.label,
        predicted=contender.predicted,
        baseline=not position,
        median=median,
        low=low,
        high=high,
        steps=len(seconds),
        lost=stats.lost_of_all([seconds], near=NEAR),
        dropped=dropped,
    )
