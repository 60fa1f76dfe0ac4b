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

from dovetail.planning.guard import Decision, Guard, Moments, decide, moments, smoothed

from .contributors import Delivery
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
        self.counts: tuple[int, ...] = (workers,) * segments
        """What the guard asks for now: full depth until it has seen enough."""
        self.decisions: list[Decision] = []

    def due(self, step: int) -> bool:
        return step % self.guard.every == self.guard.every - 1

    def take(self, delivery: Delivery, order: Sequence[int], least: Sequence[int]) -> None:
        """One measured step: `order` is the one in which workers go deep, `least` the plan's own counts."""
        metric = "optimiser's" if delivery.in_metric else "plain"
        if metric != self._metric:  # norms in two metrics have nothing in common
            self._metric, self._measured = metric, 0
            self._moments = [None] * len(self._moments)
        segments = delivery.segments
        for segment in range(segments):
            ranks = delivery.contributors(segment)
            samples = [delivery.words[r].samples for r in ranks]
            if len(ranks) < 2 or min(samples) <= 0:
                continue
            squares = [delivery.squares[r][segment] for r in ranks]
            new = moments(squares, samples, delivery.squares[0][segments + segment])
            if new.variance == new.variance and abs(new.variance) != float("inf"):  # an overflow of AMP's says nothing
                self._moments[segment] = smoothed(self._moments[segment], new, self.guard.smoothing)
        self._measured += 1
        known = [m for m in self._moments if m is not None]
        if self._measured < self.guard.patience or len(known) < segments:
            return
        decision = decide(
            self.guard,
            known,
            [delivery.words[worker].samples for worker in order],
            step=delivery.word.step,
            before=self.counts,
            least=least,
            forward=self._forward,
            backward=self._backward,
            metric=metric,
        )
        self.counts = decision.counts
        self.decisions.append(decision)
        if self._speak:
            log.log(logging.INFO if decision.counts != decision.before else logging.DEBUG, "guard: %s", decision)


class OptimiserMetric:
    """Finds the optimiser that trains these parameters, when it steps, and reads its second moments."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._ids = {id(p) for p in parameters}
        self._state: dict[int, dict[str, Any]] = {}

    def seen(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in self._ids:
                    self._state[id(parameter)] = optimizer.state[parameter]

    def known(self, leaves: Sequence[Leaf]) -> bool:
        return bool(leaves) and all(self._second_moment(leaf) is not None for leaf in leaves)

    def __call__(self, leaf: Leaf) -> torch.Tensor | None:
        """1/√v. An element that never had a gradient (v = 0) has no scale yet and does not count."""
        v = self._second_moment(leaf)
        return None if v is None else torch.where(v > 0, v.rsqrt(), 0.0)

    def _second_moment(self, leaf: Leaf) -> torch.Tensor | None:
        state = self._state.get(id(leaf.parameter), {})
        v = next((state[key] for key in SECOND_MOMENTS if isinstance(state.get(key), torch.Tensor)), None)
        return v if v is not None and v.shape == leaf.parameter.shape else None
