"""What a tuner has measured, tried and kept, as data and as the lines of `explain()`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import msgspec
import numpy as np

from dovetail import planning
from dovetail.core.errors import Error
from dovetail.core.network import Collective, CostSample, Fit, Network
from dovetail.core.plan import Plan
from dovetail.core.profile import Layer, LayerTime, Profile, exactly
from dovetail.simulate.node import NodePrediction, with_node
from dovetail.train.stragglers import RankComparison

from .trials import Trial
from .verdict import DOUBTED, PairedGain, Verdict

State = Literal["measuring", "trying", "done", "off"]

MOST_CONTENTION = 0.5
"""Share, at most, that watched iterations may add to the cost of communication; what is beyond has other reasons."""


@dataclass(frozen=True)
class Review:
    """One look back at a plan that was kept; times in seconds per iteration."""

    step: int
    """Iterations up to its end."""
    against: str
    """What the first plan is called."""
    before: float
    """What an iteration took soon after the plan was last found to be the faster one."""
    now: float
    drifted: bool
    """These two differ so much that the plan was compared with the first one earlier than it was due."""
    duel: PairedGain
    stays: bool
    """The plan is still the faster one; otherwise the first one is in force again."""

    def __str__(self) -> str:
        drift = f"a step takes {_ms(self.now)}, which was {_ms(self.before)}; " if self.drifted else ""
        if self.stays:
            found = f"still {_percent(self.duel.gain)} less time a step than {self.against} ({_interval(self.duel)})"
        else:
            found = f"no longer a gain over {self.against} ({_interval(self.duel)}), which are in force again"
        return f"step {self.step}: {drift}{found}"


@dataclass(frozen=True)
class TuningReport:
    """What was measured, tried and kept; times in seconds."""

    state: State
    overlap: Literal["backward", "forward"] = "backward"
    """What communication can hide behind; with "forward" it is the backward and the next forward pass."""
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
    """What communication costs, as the plans were made with it; `contention` is what training has shown."""
    profile: Profile | None = None
    """Times of the slowest rank, as the plans were made with them."""
    ranks: RankComparison | None = None
    """Where each rank's time goes, and which of them are slow."""
    trials: tuple[Trial, ...] = ()
    verdict: Verdict | None = None
    kept: Trial | None = None
    plan: Plan | None = None
    """The plan in force; None for torch's own buckets."""
    notes: tuple[str, ...] = field(default=())
    reviews: tuple[Review, ...] = ()
    """Looks back at the kept plan, the latest last."""

    @property
    def gain(self) -> float:
        """Share of an iteration's time that is saved against the first plan of the contest: 0.1 is 10 %."""
        if self.kept is None or self.kept.baseline or self.verdict is None or self.verdict.duel is None:
            return 0.0
        return self.reviews[-1].duel.gain if self.reviews else self.verdict.duel.gain

    @property
    def spread(self) -> float:
        """How far iterations with the same buckets lie apart: half of what holds eight of ten, as a share."""
        shares = [(t.high - t.low) / 2 / t.median for t in self.trials if t.median]
        return float(np.median(shares)) if shares else 0.0

    @property
    def lost(self) -> float:
        """Share of the trials' time that disturbed iterations took beyond typical ones."""
        steps = sum(t.steps for t in self.trials)
        return sum(t.lost * t.steps for t in self.trials) / steps if steps else 0.0

    def with_node(self, rate: str, *, workers: int = 1) -> NodePrediction:
        """Predicts an iteration with one more node, joined by a link of this rate ("1gbit"), from what was measured."""
        if self.profile is None or self.network is None:
            raise Error("with_node: nothing was measured yet; ask when `report.state` is 'done'")
        kept = self.kept.plan if self.kept is not None else None
        overlap = kept.overlap if kept is not None else self.overlap
        optimizer = kept.prediction.optimizer if kept is not None else 0.0
        return with_node(self.profile, self.network, rate=rate, workers=workers, overlap=overlap, optimizer=optimizer)

    def __str__(self) -> str:
        return "\n".join(_off(self) if self.state == "off" else _lines(self))


def _off(r: TuningReport) -> list[str]:
    if r.plan is not None:
        what = f"a given plan ({r.plan.policy}, {_buckets(r.plan)})"
    else:
        what = "every bucket in two halves, split among the ranks" if r.overlap == "forward" else "torch's own buckets"
    return [f"dovetail: {what}; {r.reason}", *r.notes]


def _lines(r: TuningReport) -> Iterator[str]:
    yield f"dovetail: {r.workers} workers, {r.tensors} tensors, {_size(r.bytes)} of gradients a step"
    if r.forward:
        yield f"  measured  forward {_ms(r.forward)}, backward {_ms(r.backward)}"
    if r.network is not None:
        yield from _network(r.network)
    if r.ranks is not None:
        yield from (f"  ranks     {line}" for line in r.ranks.lines())
    for trial in r.trials:
        took = f"{_ms(trial.median)} a step ({_ms(trial.low)} to {_ms(trial.high)})"
        yield (
            f"  {'kept ' if trial is r.kept else 'tried'}     {trial.label}: {_buckets(trial.plan)}, "
            f"{took if trial.steps else 'not run'}, "
            f"predicted {_ms(trial.predicted)}{', dropped early' if trial.dropped else ''}"
        )
    if any(t.steps for t in r.trials):
        yield (
            f"  noise     steps with the same buckets vary by {r.spread:.1%}; "
            f"disturbed ones cost {r.lost:.1%} of the trials' time"
        )
    if r.state == "done":
        yield f"  result    {_result(r)}"
    else:
        yield f"  now       {r.state}, after {r.steps} steps; ask again later"
    yield from (f"  look back {review}" for review in r.reviews[-1:])
    yield from (f"  note      {n}" for n in r.notes)


def _network(network: Network) -> Iterator[str]:
    tables = [("", network.collectives), *((f" in {p}", found) for p, found in network.reduced.items())]
    for suffix, collectives in tables:
        for collective, measured in collectives.items():
            fit, name = measured.fit, collective.replace("_", "-") + suffix
            rate = 1 / fit.seconds_per_byte / 1e6 if fit.seconds_per_byte else float("inf")
            yield f"  network   {name}: {_ms(fit.latency)} to start, then {rate:.0f} MB/s (fit within {fit.error:.0%})"
    if network.contention is not None and network.contention.collective:
        share = network.contention.collective
        more = ", and steps take longer than that explains" if share >= MOST_CONTENTION else ""
        yield f"  network   communication takes {share:.0%} longer beside computing{more}"


def _result(r: TuningReport) -> str:
    baseline, verdict = r.trials[0].label, r.verdict
    tie = f"no plan was faster than {baseline}, so those stay: a tie, not a gain"
    if verdict is None or verdict.duel is None:
        return tie
    duel, challenger = verdict.duel, r.trials[verdict.challenger].label
    if verdict.kept and r.reviews and not r.reviews[-1].stays:
        return f"{challenger} no longer gains, so {baseline} are in force again since step {r.reviews[-1].step}"
    found = f"{_percent(duel.gain)} less time a step ({_interval(duel)})"
    pairs = f"{duel.pairs} pairs of turns with {baseline}"
    if verdict.kept:
        return f"{found}; would be kept by chance in 1 of {int(1 / duel.chance)} runs; by {pairs}"
    if duel.gain <= 0:
        return tie
    if verdict.error <= DOUBTED and duel.low > 0:
        return (
            f"{challenger} was predicted to be slower, and {pairs} do not prove enough that it is not "
            f"({found}), so those stay: no gain is claimed"
        )
    if duel.low <= 0:
        return (
            f"steps vary too much to tell {challenger} from {baseline} ({_interval(duel)} less time a step, "
            f"by {duel.pairs} pairs of turns), so those stay: no gain is claimed"
        )
    return f"{challenger} gains too little over {baseline} ({_interval(duel)}), so those stay: a tie, not a gain"


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def _interval(duel: PairedGain) -> str:
    return f"{duel.low * 100:.1f} to {duel.high * 100:.1f} %"


def _buckets(plan: Plan) -> str:
    return f"{len(plan.buckets)} bucket{'s' if len(plan.buckets) > 1 else ''}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.1f} KiB"


def forward_gain(profile: Profile, network: Network) -> str:
    """A note for `explain()`: what wrapping the optimiser too is predicted to gain, from iterations without it.

    Two things are not measured there and are assumed: forward passes through the layers in the reverse order of
    backward, with times in proportion; and each half of an all-reduce takes half its time.
    """
    now = planning.plan(profile, network, policy="optimal").prediction.iteration
    then = planning.plan(mirrored(profile), halved(network), policy="optimal", overlap="forward").prediction.iteration
    gain = 1 - then / now
    what = "a second line, dovetail.optimizer: communication would hide behind the next forward pass too"
    if gain < 0.01:
        return f"{what}, which is predicted to gain nothing here"
    return (
        f"{what}; predicted {_ms(then)} a step, {gain:.0%} less than the {_ms(now)} predicted for the best buckets "
        "without"
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
