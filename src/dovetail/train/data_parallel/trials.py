"""What the planners of both modes share: how much effort planning takes, and the contest of plans in real steps.

`compete` is a part of a planner's story: a generator that is handed one finished training step at a time. All ranks run
it over the same plans and leave it with the same winner.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from dovetail.core.errors import Error
from dovetail.core.plan import Plan
from dovetail.core.profile import Quantiles
from dovetail.train import agree

from .trial_report import Trial

Step = TypeVar("Step")


@dataclass(frozen=True)
class Tuning:
    """How much effort goes into finding a plan. With the defaults it takes about fifty training steps."""

    warmup: int = 3
    """Steps not looked at: the first ones allocate, compile and fill caches."""
    measure: int = 10
    """Steps whose gradient-ready times are taken."""
    candidates: int = 4
    """Bucketings to try, torch's own among them."""
    settle: int = 2
    """Steps after each exchange that do not count: torch puts buckets into ready order on the second."""
    steps: int = 4
    """Steps that count, per candidate and round."""
    rounds: int = 2
    """Rounds over the candidates, in alternating order, so that drift hits all alike."""
    network_seconds: float = 3.0
    """Time budget for measuring the network, spent once."""
    margin: float = 0.01
    """A plan must be this much faster than torch's own buckets to replace them."""
    drop: float = 0.08
    """A candidate this much slower than the best of the first round does not run in the second."""

    def __post_init__(self) -> None:
        for name, least in (
            ("warmup", 0),
            ("measure", 1),
            ("candidates", 2),
            ("settle", 2),
            ("steps", 1),
            ("rounds", 1),
        ):
            if getattr(self, name) < least:
                raise Error(f"Tuning.{name}: expected at least {least}, got {getattr(self, name)}")


def compete(
    plans: Sequence[Plan],
    tuning: Tuning,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    use: Callable[[int], None],
    seconds: Callable[[Step], float],
    tell: Callable[[tuple[Trial, ...]], None],
) -> Generator[None, Step, int]:
    """Runs the plans in turn, `use(i)` bringing in the i-th; returns the one to keep, the same on all ranks.

    The first plan is the one to beat. Each round's results go to `tell`.
    """
    times: list[list[float]] = [[] for _ in plans]
    dropped: set[int] = set()
    trials: tuple[Trial, ...] = ()
    for turn in range(tuning.rounds):
        among = [i for i in range(len(plans)) if i not in dropped]
        for i in reversed(among) if turn % 2 else among:
            use(i)
            for _ in range(tuning.settle):
                yield
            mine = []
            for _ in range(tuning.steps):
                mine.append(seconds((yield)))
            # A rank that came late to the step saw the shortest version of it, the one without waiting for itself.
            times[i] += agree.smallest(mine, group, device)
        best = min(float(np.median(t)) for t in times if t)
        if turn < tuning.rounds - 1:  # after the last round nobody is spared anything
            dropped |= {i for i in among if i and np.median(times[i]) > best * (1 + tuning.drop)}
        trials = tuple(_trial(p, t, i, i in dropped) for i, (p, t) in enumerate(zip(plans, times, strict=True)))
        tell(trials)
    return agree.from_first(fastest(trials, tuning.margin), group, device)


def fastest(trials: Sequence[Trial], margin: float) -> int:
    """The first one, unless another is faster by the margin and by more than chance would have it."""
    best = min(range(len(trials)), key=lambda i: (trials[i].dropped, trials[i].median))
    gain = trials[0].median - trials[best].median
    return 0 if gain < trials[0].median * margin or gain < _noise(trials[0], trials[best]) else best


def ready_gaps(
    steps: Sequence[dict[int, float]], parameters: int, group: dist.ProcessGroup, device: torch.device
) -> tuple[list[int], list[int], list[float]]:
    """From when each gradient was ready in each step: the first rank's order of them, the steps that have them all,
    and the seconds from each gradient to the next as this rank saw them.

    Gap by gap, a low quantile: what the machine did besides must not look like computation, or the plan splits too
    finely. Low quantiles add up to less than any step took, so they only share out a low total.
    """
    order = Counter(tuple(ready) for ready in steps).most_common(1)[0][0]
    order = agree.from_first(order, group, device)
    usable = [n for n, ready in enumerate(steps) if set(ready) == set(order)]
    if agree.largest([float(not usable or len(order) != parameters)], group, device)[0]:
        raise Error("not every parameter got a gradient in every step: buckets cannot be planned from such steps")
    stamps = np.maximum.accumulate([[steps[n][i] for i in order] for n in usable], axis=1)
    gaps = np.quantile(np.diff(stamps, axis=1, prepend=0.0), 0.25, axis=0)
    gaps *= np.quantile(stamps[:, -1], 0.25) / max(gaps.sum(), 1e-9)
    return list(order), usable, gaps.tolist()


def exactly(seconds: float) -> Quantiles:
    return Quantiles(median=seconds, low=seconds, high=seconds, samples=1)


def _trial(plan: Plan, seconds: list[float], position: int, dropped: bool) -> Trial:
    low, median, high = (float(q) for q in np.quantile(seconds, [0.1, 0.5, 0.9]))
    return Trial(
        plan=plan, baseline=not position, median=median, low=low, high=high, steps=len(seconds), dropped=dropped
    )


def _noise(one: Trial, other: Trial) -> float:
    """The standard error of the difference of two medians, in seconds.

    For normal noise a tenth and a ninetieth percentile are 2.56 σ apart, and a median varies by 1.25 σ/√n.
    """
    return math.hypot(*(1.25 * (t.high - t.low) / 2.56 / math.sqrt(t.steps) for t in (one, other)))
