"""The contest of plans in real iterations: how much effort it takes, who wins, and what `explain()` says of it.

Both tuners share this. `compete` is one phase of a tuner: a generator that is handed one finished training iteration at
a time. All ranks run it over the same plans and leave it with the same winner.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from dovetail import planning
from dovetail.core.errors import Error
from dovetail.core.network import Collective, CostSample, Fit, Network
from dovetail.core.plan import Plan
from dovetail.core.profile import Layer, LayerTime, Profile, exactly
from dovetail.train import agree

Seen = TypeVar("Seen")
"""What a tuner knows of one iteration."""
State = Literal["measuring", "trying", "done", "off"]


@dataclass(frozen=True)
class Tuning:
    """How much effort goes into finding a plan. With the defaults it takes about fifty training iterations."""

    warmup: int = 3
    """Iterations that are not looked at: the first ones allocate, compile and fill caches."""
    measure: int = 10
    """Iterations whose gradient-ready times are taken."""
    candidates: int = 4
    """Bucketings to try, torch's own among them."""
    settle: int = 2
    """Iterations after each change of buckets that do not count: torch puts buckets into ready order on the second."""
    steps: int = 4
    """Iterations that count, per candidate and round."""
    rounds: int = 2
    """Rounds over the candidates, in alternating order, so that drift hits all alike."""
    network_seconds: float = 3.0
    """Time budget for measuring the network, in seconds, spent once."""
    margin: float = 0.01
    """A plan must be faster than torch's own buckets by this share to replace them."""
    drop: float = 0.08
    """A candidate slower than the best so far by this share does not run in the next round."""

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


@dataclass(frozen=True)
class Trial:
    """A bucketing that ran for some real iterations; times in seconds per iteration, as `compete` was handed them."""

    plan: Plan
    baseline: bool
    median: float
    low: float
    """The tenth percentile."""
    high: float
    """The ninetieth percentile."""
    steps: int
    """Iterations that counted."""
    dropped: bool = False
    """It was clearly slower in one round and did not run in the next."""

    @property
    def label(self) -> str:
        own = "torch's own buckets" if self.plan.overlap == "backward" else "buckets of torch's sizes"
        return own if self.baseline else f"plan {self.plan.policy}"


@dataclass(frozen=True)
class TuningReport:
    """What was measured, tried and kept; times in seconds."""

    state: State
    overlap: Literal["backward", "forward"] = "backward"
    """What communication hides behind; with "forward" it is the backward and the next forward pass."""
    reason: str = ""
    """The reason why planning is off."""
    steps: int = 0
    """Iterations seen so far."""
    workers: int = 0
    tensors: int = 0
    bytes: int = 0
    """Gradients of one iteration."""
    forward: float = 0.0
    backward: float = 0.0
    network: Network | None = None
    trials: tuple[Trial, ...] = ()
    kept: Trial | None = None
    plan: Plan | None = None
    """The plan in force; None for torch's own buckets."""
    notes: tuple[str, ...] = field(default=())

    @property
    def gain(self) -> float:
        """Share of an iteration's time that is saved against torch's own buckets: 0.1 is 10 %."""
        baseline = next((t for t in self.trials if t.baseline), None)
        if self.kept is None or baseline is None:
            return 0.0
        return 1 - self.kept.median / baseline.median

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(r: TuningReport) -> list[str]:
    if r.state == "off":
        if r.overlap == "forward":
            return [f"dovetail: reduce-scatter behind backward, all-gather behind forward; {r.reason}", *r.notes]
        what = f"a given plan ({r.plan.policy}, {len(r.plan.buckets)} buckets)" if r.plan else "torch's own buckets"
        return [f"dovetail: {what}; {r.reason}", *r.notes]
    lines = [f"dovetail: {r.workers} workers, {r.tensors} tensors, {_size(r.bytes)} of gradients a step"]
    if r.forward:
        lines.append(f"  measured  forward {_ms(r.forward)}, backward {_ms(r.backward)}")
    for collective, measured in r.network.collectives.items() if r.network is not None else ():
        fit, name = measured.fit, collective.replace("_", "-")
        rate = 1 / fit.seconds_per_byte / 1e6 if fit.seconds_per_byte else float("inf")
        lines.append(
            f"  network   {name}: {_ms(fit.latency)} to start, then {rate:.0f} MB/s (fit within {fit.error:.0%})"
        )
    for trial in r.trials:
        lines.append(
            f"  {'kept ' if trial is r.kept else 'tried'}     {trial.label}: {len(trial.plan.buckets)} buckets, "
            f"{_ms(trial.median)} a step ({_ms(trial.low)} to {_ms(trial.high)}), "
            f"predicted {_ms(trial.plan.prediction.iteration)}{', dropped early' if trial.dropped else ''}"
        )
    if r.state == "done" and r.kept is not None:
        if r.kept.baseline:
            lines.append(f"  result    no plan was faster than {r.kept.label}, so those stay: a tie, not a gain")
        else:
            lines.append(f"  result    {r.gain:.1%} less time a step than {r.trials[0].label}")
    elif r.state in ("measuring", "trying"):
        lines.append(f"  now       {r.state}, after {r.steps} steps; ask again later")
    return [*lines, *(f"  note      {n}" for n in r.notes)]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.1f} KiB"


def compete(
    plans: Sequence[Plan],
    tuning: Tuning,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    use: Callable[[int], None],
    seconds: Callable[[Seen], float],
    tell: Callable[[tuple[Trial, ...]], None],
) -> Generator[None, Seen, int]:
    """Runs the plans in turn and returns the index of the one to keep, the same on all ranks.

    The first plan is the one to beat. `use(i)` puts the i-th plan in force, `seconds` gives the time of an iteration,
    and `tell` gets the results of each round.
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
            # The rank that arrived last saw the shortest time, which has no waiting for others in it.
            times[i] += agree.smallest(mine, group, device)
        best = min(float(np.median(t)) for t in times if t)
        if turn < tuning.rounds - 1:  # after the last round there is no next one to leave out of
            dropped |= {i for i in among if i and np.median(times[i]) > best * (1 + tuning.drop)}
        trials = tuple(_trial(p, t, i, i in dropped) for i, (p, t) in enumerate(zip(plans, times, strict=True)))
        tell(trials)
    return agree.from_first(fastest(trials, tuning.margin), group, device)


def fastest(trials: Sequence[Trial], margin: float) -> int:
    """Index of the first trial, unless another is faster by the margin and by more than noise."""
    best = min(range(len(trials)), key=lambda i: (trials[i].dropped, trials[i].median))
    gain = trials[0].median - trials[best].median
    return 0 if gain < trials[0].median * margin or gain < _noise(trials[0], trials[best]) else best


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


def forward_gain(profile: Profile, network: Network) -> str:
    """A note for `explain()`: what overlap="forward" is predicted to gain, from iterations without it.

    Two things are not measured there and are assumed: forward passes through the layers in the reverse order of
    backward, with times in proportion; and each half of an all-reduce takes half its time.
    """
    now = planning.plan(profile, network, policy="optimal").prediction.iteration
    then = planning.plan(mirrored(profile), halved(network), policy="optimal", overlap="forward").prediction.iteration
    gain = 1 - then / now
    what = "communication would hide behind the next forward pass too"
    if gain < 0.01:
        return f"overlap='forward' with dovetail.optimizer: {what}, which is predicted to gain nothing here"
    return (
        f"overlap='forward' with dovetail.optimizer: {what}; predicted {then * 1e3:.1f} ms a step, {gain:.0%} less "
        f"than the {now * 1e3:.1f} ms predicted for the best buckets without"
    )


def mirrored(profile: Profile) -> Profile:
    """The same tensors, each in a layer of its own whose share of forward is its share of backward."""
    forward, ready = profile.forward_time(), [0.0, *profile.ready_times()]
    gaps = [max(0.0, b - a) for a, b in pairwise(ready)]
    whole, count = sum(gaps), len(gaps)
    shares = [gap / whole if whole else 1 / count for gap in gaps]
    layers = tuple(
        Layer(
            name=tensor.name,
            type="parameter",
            parameter_bytes=tensor.bytes,
            activation_bytes=0,
            times=(LayerTime(batch=profile.batch, forward=exactly(forward * share), backward=exactly(gap)),),
        )
        for tensor, share, gap in reversed(list(zip(profile.tensors, shares, gaps, strict=True)))
    )
    tensors = tuple(msgspec.structs.replace(t, layer=count - 1 - k) for k, t in enumerate(profile.tensors))
    return msgspec.structs.replace(profile, layers=layers, tensors=tensors, edges=())


def halved(network: Network) -> Network:
    """The network with a reduce-scatter and an all-gather that each take half of the measured all-reduce."""
    whole = network.collectives["all_reduce"]
    fit = Fit(latency=whole.fit.latency / 2, seconds_per_byte=whole.fit.seconds_per_byte / 2, error=whole.fit.error)
    samples = tuple(CostSample(bytes=s.bytes, seconds=s.seconds.scaled(0.5)) for s in whole.samples)
    half = Collective(fit=fit, samples=samples)
    return msgspec.structs.replace(
        network, collectives={**network.collectives, "reduce_scatter": half, "all_gather": half}
    )
