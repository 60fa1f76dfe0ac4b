"""The quality guard while training runs: measures, smooths, decides, and keeps a log that explains itself.

Every few steps all workers go to full depth and each takes the squared norm of its own gradient before it is added to
the others', segment by segment; together with the norm of the mean that is all `planning.guard` needs. The optimiser
is recognised when it steps: norms are taken in its own metric as soon as it has one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dovetail.planning.depth.anneal import Rate, fewest_at
from dovetail.planning.depth.guard import Decision, Guard, Moments, decide, moments, smoothed

from .courier import Delivery
from .segments import Leaf

log = logging.getLogger("dovetail")

# Where torch's optimisers keep their running mean of squared gradients.
SECOND_MOMENTS = ("max_exp_avg_sq", "exp_avg_sq", "square_avg", "sum")


class Watch:
    """Moments of every segment, and the decisions made from them. The same on all ranks."""

    def __init__(
        self, guard: Guard, *, segments: int, workers: int, forward: float, backward: Sequence[float], speak: bool
    ) -> None:
        self.guard = guard
        self._forward, self._backward, self._speak = forward, list(backward), speak
        self._moments: list[Moments | None] = [None] * segments
        self._measured = 0
        self._metric = ""
        self._rate, self._relative_rate = Rate(), 1.0
        self.counts: tuple[int, ...] = (workers,) * segments
        """What the guard asks for now: full depth until it has seen enough."""
        self.decisions: list[Decision] = []

    def due(self, step: int) -> bool:
        return step % self.guard.every == self.guard.every - 1

    def follow(self, learning_rate: float) -> None:
        """The first rank's learning rate, at every step: its peak is what later ones are compared with."""
        self._relative_rate = self._rate(learning_rate)

    def state(self) -> dict[str, Any]:
        """All that later decisions depend on, in plain values, for a checkpoint."""
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

    def take(self, delivery: Delivery, order: Sequence[int], least: Sequence[int]) -> None:
        """One measured step: `order` is the one in which workers go deep, `least` the plan's own counts."""
        if min(word.samples for word in delivery.words) <= 0:  # a worker without samples says nothing about noise
            return
        metric = "optimiser's" if delivery.in_metric else "plain"
        if metric != self._metric:  # norms in two metrics have nothing in common
            self._metric, self._measured = metric, 0
            self._moments = [None] * len(self._moments)
        segments = delivery.segments
        for segment in range(segments):
            ranks = delivery.contributors(segment)
            samples = [delivery.words[r].samples for r in ranks]
            if len(ranks) < 2:
                continue
            squares = [delivery.squares[r][segment] for r in ranks]
            new = moments(squares, samples, delivery.squares[0][segments + segment])
            if new.variance == new.variance and abs(new.variance) != float("inf"):  # an overflow of AMP's says nothing
                self._moments[segment] = smoothed(self._moments[segment], new, self.guard.smoothing)
        self._measured += 1
        known = [m for m in self._moments if m is not None]
        if self._measured < self.guard.patience or len(known) < segments:
            return
        batches = [delivery.words[worker].samples for worker in order]
        annealed: dict[str, Any] = {}
        if self.guard.annealed:
            rate = self._relative_rate
            counts = fewest_at(known, batches, epsilon=self.guard.epsilon, rate=rate, least=least)
            annealed = {"counts": counts, "rate": rate}
        decision = decide(
            self.guard,
            known,
            batches,
            step=delivery.word.step,
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
        """Of the last step; the largest among the groups of parameters. 0 while unknown."""

    def seen(self, optimizer: torch.optim.Optimizer) -> None:
        rates = []
        for group in optimizer.param_groups:
            ours = [parameter for parameter in group["params"] if id(parameter) in self._ids]
            # Not by index: the user's optimiser keeps its state in a dictionary that makes what it is asked for.
            states = {id(parameter): optimizer.state.get(parameter) or {} for parameter in ours}
            self._state.update(states)
            empty = {i for i, state in states.items() if not state}
            self._never -= set(states)
            if any(isinstance(state.get(key), torch.Tensor) for state in states.values() for key in SECOND_MOMENTS):
                self._never |= empty
            rates += [float(group.get("lr", 0.0))] if ours else []
        self.learning_rate = max(rates, default=self.learning_rate)

    def known(self, leaves: Sequence[Leaf]) -> bool:
        ids = {id(leaf.parameter) for leaf in leaves}
        return not ids <= self._never and all(self(leaf) is not None for leaf in leaves)

    def __call__(self, leaf: Leaf) -> torch.Tensor | None:
        """1/√v. An element that never had a gradient (v = 0) has no scale yet and does not count."""
        if id(leaf.parameter) in self._never:
            return torch.zeros_like(leaf.parameter)
        v = self._second_moment(leaf)
        return None if v is None else torch.where(v > 0, v.rsqrt(), 0.0)

    def _second_moment(self, leaf: Leaf) -> torch.Tensor | None:
        state = self._state.get(id(leaf.parameter), {})
        v = next((state[key] for key in SECOND_MOMENTS if isinstance(state.get(key), torch.Tensor)), None)
        return v if v is not None and v.shape == leaf.parameter.shape else None
