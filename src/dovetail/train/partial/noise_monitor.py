"""The guard while training runs: collects measurements of gradient noise, smooths them, decides, and logs decisions.

Every few steps all workers go to full depth, and each takes the squared norm of its own gradient, segment by segment,
before the gradients are averaged. These norms and that of the mean are all that `planning.depth.guard` needs. The
optimiser is recognised when it steps; from then on norms are taken in its metric, if it has one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dovetail.planning.depth.guard import Decision, Guard, Moments, RelativeRate, decide, fewest, moments, smoothed

from .segments import Leaf, contributors

log = logging.getLogger("dovetail")

# Where torch's optimisers keep their running mean of squared gradients.
SECOND_MOMENTS = ("max_exp_avg_sq", "exp_avg_sq", "square_avg", "sum")


@dataclass(frozen=True)
class NoiseMeasurement:
    """Squared norms of gradients, from one step at full depth."""

    step: int
    depths: tuple[int, ...]
    """Depth of every worker, in segments. A straggler's limit can hold a worker back even in a measured step."""
    samples: list[float]
    """Number of samples of every worker."""
    squares: list[list[float]]
    """|g|² of every worker's own gradient, by segment."""
    mean_squares: list[float]
    """|mean|² of the averaged gradient, by segment."""
    in_metric: bool
    """Whether the norms are taken in the optimiser's metric."""


class NoiseMonitor:
    """Moments of every segment's gradient, and the decisions made from them. The same on all ranks."""

    def __init__(
        self, guard: Guard, *, segments: int, workers: int, forward: float, backward: Sequence[float], speak: bool
    ) -> None:
        self.guard = guard
        self._forward, self._backward, self._speak = forward, list(backward), speak
        self._moments: list[Moments | None] = [None] * segments
        self._measured = 0
        self._metric = ""
        self._rate, self._relative_rate = RelativeRate(), 1.0
        self.counts: tuple[int, ...] = (workers,) * segments
        """Contributors to every segment that the guard asks for now: all until it has measured enough."""
        self.decisions: list[Decision] = []

    def due(self, step: int) -> bool:
        """Whether the step is measured."""
        return step % self.guard.every == self.guard.every - 1

    def follow(self, learning_rate: float) -> None:
        """Takes the first rank's learning rate, at every step; later rates are compared with the highest so far."""
        self._relative_rate = self._rate(learning_rate)

    def state(self) -> dict[str, Any]:
        """Everything on which later decisions depend, in plain values, for a checkpoint."""
        return {
            "moments": [None if m is None else [m.variance, m.signal] for m in self._moments],
            "measured": self._measured,
            "metric": self._metric,
            "peak": self._rate.peak,
            "rate": self._relative_rate,
            "counts": list(self.counts),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from a `state`."""
        self._moments = [None if m is None else Moments(variance=m[0], signal=m[1]) for m in state["moments"]]
        self._measured, self._metric = state["measured"], state["metric"]
        self._rate.peak, self._relative_rate = state["peak"], state["rate"]
        self.counts = tuple(state["counts"])

    def take(self, measured: NoiseMeasurement, order: Sequence[int], least: Sequence[int]) -> None:
        """Takes a measurement and decides: `order` lists workers, the deepest first; `least` has the plan's counts."""
        if min(measured.samples) <= 0:  # the gradient of a worker without samples says nothing about noise
            return
        metric = "optimiser's" if measured.in_metric else "plain"
        if metric != self._metric:  # norms in two metrics cannot be compared
            self._metric, self._measured = metric, 0
            self._moments = [None] * len(self._moments)
        segments = len(self._moments)
        for segment in range(segments):
            workers = contributors(measured.depths, segments, segment)
            samples = [measured.samples[worker] for worker in workers]
            if len(workers) < 2:
                continue
            squares = [measured.squares[worker][segment] for worker in workers]
            new = moments(squares, samples, measured.mean_squares[segment])
            if math.isfinite(new.variance):  # it is not after an overflow under AMP
                self._moments[segment] = smoothed(self._moments[segment], new, self.guard.smoothing)
        self._measured += 1
        known = [m for m in self._moments if m is not None]
        if self._measured < self.guard.patience or len(known) < segments:
            return
        batches = [measured.samples[worker] for worker in order]
        annealed: dict[str, Any] = {}
        if self.guard.annealed:
            rate = self._relative_rate
            counts = fewest(known, batches, epsilon=self.guard.epsilon, rate=rate, least=least)
            annealed = {"counts": counts, "rate": rate}
        decision = decide(
            self.guard,
            known,
            batches,
            step=measured.step,
            before=self.counts,
            least=least,
            forward=self._forward,
            backward=self._backward,
            metric=metric,
            **annealed,
        )
        self.counts = decision.counts
        advised = bool(self.decisions) and self.decisions[-1].fewer == decision.fewer
        self.decisions.append(decision)
        if self._speak:
            news = decision.counts != decision.before or (decision.fewer is not None and not advised)
            log.log(logging.INFO if news else logging.DEBUG, "guard: %s", decision)


class OptimiserMetric:
    """Finds the optimiser that trains these parameters, when it steps, and reads its second moments."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._ids = {id(p) for p in parameters}
        self._state: dict[int, dict[str, Any]] = {}
        self._never: set[int] = set()
        """Parameters that never had a gradient, of an optimiser that keeps second moments of others."""
        self.learning_rate = 0.0
        """Learning rate of the last step, the largest among the groups of parameters; 0 while unknown."""

    def seen(self, optimizer: torch.optim.Optimizer) -> None:
        """After an optimiser's step: remembers its state if it trains our parameters."""
        rates = []
        for group in optimizer.param_groups:
            ours = [parameter for parameter in group["params"] if id(parameter) in self._ids]
            # With `get`: the optimiser keeps its state in a defaultdict, which would make an entry for us.
            states = {id(parameter): optimizer.state.get(parameter) or {} for parameter in ours}
            self._state.update(states)
            empty = {i for i, state in states.items() if not state}
            self._never -= set(states)
            if any(isinstance(state.get(key), torch.Tensor) for state in states.values() for key in SECOND_MOMENTS):
                self._never |= empty
            rates += [float(group.get("lr", 0.0))] if ours else []
        self.learning_rate = max(rates, default=self.learning_rate)

    def known(self, leaves: Sequence[Leaf]) -> bool:
        """Whether every leaf has a scale, and at least one of them from second moments."""
        ids = {id(leaf.parameter) for leaf in leaves}
        return not ids <= self._never and all(self(leaf) is not None for leaf in leaves)

    def __call__(self, leaf: Leaf) -> torch.Tensor | None:
        """1/√v for every element, or None if unknown. Elements that never had a gradient (v = 0) get 0."""
        if id(leaf.parameter) in self._never:
            return torch.zeros_like(leaf.parameter)
        v = self._second_moment(leaf)
        return None if v is None else torch.where(v > 0, v.rsqrt(), 0.0)

    def _second_moment(self, leaf: Leaf) -> torch.Tensor | None:
        state = self._state.get(id(leaf.parameter), {})
        v = next((state[key] for key in SECOND_MOMENTS if isinstance(state.get(key), torch.Tensor)), None)
        return v if v is not None and v.shape == leaf.parameter.shape else None
