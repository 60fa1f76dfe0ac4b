"""What computing and communicating cost each other, measured on a live process group.

Five things are timed in every round, the slowest rank counts, and all ranks get the same figures:

    singles     k collectives, each begun after the one before has ended everywhere
    computing   some computing, alone
    queued      k collectives, each queued behind the one before
    computing and queued again, both at once

What queued collectives take beyond single ones lies between them: the gap. What each of the two takes longer when both
run at once, over the work that it did meanwhile, is its share.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.core.errors import Error
from dovetail.core.network import CollectiveName, Contention

from .collective_timer import CollectiveTimer, place
from .message_rounds import round_up
from .stats import NORMAL_90, RESAMPLES, FloatArray, typical

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from .collective_timer import Functions

MIDDLING = 2**20
"""Bytes of a message that is neither all latency nor all bandwidth."""
FEWEST_QUEUED, MOST_QUEUED = 4, 64
LEAST_ROUNDS, MOST_ROUNDS = 5, 25
LONGER = 1.5
"""The collectives take so much longer than the computing beside them, so that computing never runs alone."""
MOST_SHARE = 3.0
"""Beyond four times as long, others disturb: two that share one processor take twice as long each."""
NEAR_ROUNDS = 0.25
"""Rounds are undisturbed up to so much above the low quantile: small differences between large times are at stake."""


@dataclass(frozen=True)
class ContentionRound:
    """Seconds of one round, on the slowest rank."""

    singles: float
    """The sum of single collectives."""
    computing: float
    queued: float
    """As many queued ones."""
    computing_beside: float
    """Computing while the collectives run."""
    queued_beside: float
    """The collectives while computing goes on."""


def contention(
    group: ProcessGroup | None,
    compute: Callable[[], object],
    *,
    collective: CollectiveName = "all_reduce",
    nbytes: int = MIDDLING,
    budget: float = 5.0,
    device: torch.device | str | None = None,
    via: Functions | None = None,
) -> Contention:
    """Measures what `compute` and a collective of `nbytes` cost each other; call it on every rank at the same time.

    `compute` keeps this rank's device busy, best for about as long as the collective takes; it is repeated, and so many
    collectives are queued, that both last about as long. torch's own collectives are queued as DDP queues them; one
    that `via` replaces runs on a thread, one call after the other. It measures 5 to 25 rounds, for about `budget`
    seconds. A share or a gap within the noise of the rounds is 0.
    """
    ranks, _, where = place(group, device)
    if nbytes < 1:
        raise Error(f"nbytes: expected at least 1, got {nbytes}")
    via = via or {}
    timer = CollectiveTimer(group, ranks, where, round_up(nbytes, ranks), {"full": via})
    both = _Both(timer, compute, collective, nbytes, given=collective in via, device=where)
    both.balance()
    rounds: list[ContentionRound] = []
    while len(rounds) < LEAST_ROUNDS or (len(rounds) < MOST_ROUNDS and timer.elapsed() < budget):
        rounds.append(both.round())
    return from_rounds(rounds, queued=both.count)


def from_rounds(rounds: Sequence[ContentionRound], *, queued: int) -> Contention:
    """The contention that some rounds show, in which so many collectives were queued.

    Each of the five times is that of the undisturbed rounds. A figure that is not above the error which the rounds
    leave in it (the bootstrap, as in `stats.noise`) is 0.
    """
    columns = np.array([astuple(r) for r in rounds], dtype=np.float64).T
    found = _figures(columns, queued)
    rng = np.random.default_rng(len(rounds))  # the same figures for the same rounds, on every rank
    drawn = [_figures(columns[:, rng.integers(0, len(rounds), len(rounds))], queued) for _ in range(RESAMPLES)]
    errors = NORMAL_90 * np.std(drawn, axis=0)
    gap, collective, compute = (float(f) if f > error else 0.0 for f, error in zip(found, errors, strict=True))
    return Contention(gap=gap, collective=_slowdown(collective), compute=_slowdown(compute))


def _figures(columns: FloatArray, queued: int) -> tuple[float, float, float]:
    """(gap in seconds, what collectives and what computing lost of the time in which both ran), below 0 by chance."""
    singles, computing, queue, computing_beside, queue_beside = (float(t) for t in typical(columns, near=NEAR_ROUNDS))
    overlap = max(min(computing_beside, queue_beside), 1e-9)
    gap = (queue - singles) / max(1, queued - 1)
    return gap, (queue_beside - queue) / overlap, (computing_beside - computing) / overlap


def _slowdown(lost: float) -> float:
    """Share by which something takes longer that loses a part of its time: in the rest it does all its work."""
    return lost / (1 - lost) if lost < MOST_SHARE / (1 + MOST_SHARE) else MOST_SHARE


def busy_device(device: torch.device | str = "cpu", *, size: int = 256) -> Callable[[], object]:
    """Computing for `contention` where no model is at hand: a product of two square matrices."""
    import torch

    a, b = torch.ones(size, size, device=device), torch.ones(size, size, device=device)
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


class _Both:
    """Runs computing and collectives, alone and at once."""

    def __init__(
        self,
        timer: CollectiveTimer,
        compute: Callable[[], object],
        collective: CollectiveName,
        nbytes: int,
        *,
        given: bool,
        device: torch.device,
    ) -> None:
        from .clock import Clock

        self._timer, self._once, self._given = timer, compute, given
        self._single = timer.call(("full", collective), nbytes)
        self._queue = timer.call(("full", collective), nbytes, queued=not given)
        self._clock = Clock(device)
        self._on_host = device.type == "cpu"
        self.count, self._repeats = FEWEST_QUEUED, 1

    def balance(self) -> None:
        """Chooses how many collectives are queued beside how much computing, after a warm-up of both."""
        singles, computings = zip(
            *[(self._alone(self._single), self._alone(self._once)) for _ in range(4)], strict=True
        )
        single, computing = min(singles[1:]), min(computings[1:])
        if single <= 0 or computing <= 0:
            return
        self.count = max(FEWEST_QUEUED, min(MOST_QUEUED, math.ceil(LONGER * computing / single)))
        self._repeats = max(1, int(self.count * single / LONGER / computing))

    def round(self) -> ContentionRound:
        singles = sum(self._alone(self._single) for _ in range(self.count))
        computing = self._alone(self._compute)
        _, queued = self._timer.slowest(self._together(lambda: None))
        computing_beside, queued_beside = self._timer.slowest(self._together(self._compute))
        return ContentionRound(singles, computing, queued, computing_beside, queued_beside)

    def _compute(self) -> None:
        for _ in range(self._repeats):
            self._once()

    def _alone(self, run: Callable[[], object]) -> float:
        self._timer.line_up()
        stamps = [self._clock.stamp()]
        run()
        stamps.append(self._clock.stamp())
        return self._timer.slowest([self._clock.seconds(stamps)[1]])[0]

    def _together(self, compute: Callable[[], object]) -> list[float]:
        """[seconds of computing, seconds of the queued collectives] on this rank, both at once."""
        self._timer.line_up()
        if not self._on_host:
            # Not tested on the hardware at hand: what is queued runs beside the current stream, which waits at the end.
            start = self._clock.stamp()
            works = self._begin()
            compute()
            computed = self._clock.stamp()
            self._wait(works)
            return self._clock.seconds([start, computed, self._clock.stamp()])[1:]
        spent: list[float] = []
        failed: list[BaseException] = []

        def collectives() -> None:
            # A thread of its own takes the time at which the last collective ends, whatever computing does meanwhile.
            try:
                begin = self._clock.stamp()
                self._wait(self._begin())
                spent.append(self._clock.seconds([begin, self._clock.stamp()])[1])
            except BaseException as e:
                failed.append(e)

        thread = threading.Thread(target=collectives, name="dovetail-contention")
        thread.start()
        start = self._clock.stamp()
        compute()
        computed = self._clock.stamp()
        thread.join()
        if failed:
            raise failed[0]
        return [self._clock.seconds([start, computed])[1], spent[0]]

    def _begin(self) -> list[Any]:
        """Queues the collectives; those that `via` gave run here and now, one after the other."""
        return [self._queue() for _ in range(self.count)]

    def _wait(self, works: list[Any]) -> None:
        for work in [] if self._given else works:
            work.wait()
