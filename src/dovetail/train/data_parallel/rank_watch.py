"""Looks from time to time, once planning is over, whether a rank has become slow, and says so in one line.

Every `EVERY` iterations a few are watched as in planning, with hooks that are gone afterwards. Then each rank leaves
its figures in the store of the process group, and the first rank reads them when all are there. No collective and no
wait is involved: ranks whose looks are apart, or that are not there any more, hold nobody up.
"""

from __future__ import annotations

import itertools
import json
import logging
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from dovetail.train import rank_times, stragglers
from dovetail.train.rank_times import RankIteration
from dovetail.train.stragglers import RankComparison, SlowRank

from .observe import ObservedIteration
from .tuning.reducer_target import ReducerTarget
from .tuning.targets import ExchangeTarget

log = logging.getLogger("dovetail")

EVERY = 500
"""Iterations from one look to the next."""
LOOK = 6
"""Iterations that are watched in a look."""
READ = 10
"""Iterations from one try of the first rank to read the others' figures to the next."""
WARN = 0.1
"""Share of an iteration that a rank must cost the others before it is named."""
WORSE = 1.5
"""Factor by which a rank that was named must have become slower to be named again."""

_numbers = itertools.count()


class RankWatch:
    """The looks at one model. What is planned is left alone."""

    def __init__(self, ddp: Any) -> None:
        self._ddp = weakref.ref(ddp)
        self.last: RankComparison | None = None
        """The newest comparison, on the first rank."""
        self._board = FigureBoard(ddp.process_group, next(_numbers))
        self._count = self._looks = 0
        self._target: ReducerTarget | ExchangeTarget | None = None
        self._seen: list[RankIteration] = []
        self._awaited = False
        self._named: SlowRank | None = None

    def due(self) -> bool:
        """Called before every forward pass. True while its iteration is to be watched."""
        self._count += 1
        if self._target is None:
            if self._awaited and self._count % READ == 0:
                self._read()
            if self._count % EVERY == 0:
                self._begin()
        return self._target is not None

    def before_forward(self) -> None:
        if self._target is not None:
            self._target.before_forward()

    def after_forward(self) -> None:
        if self._target is not None:
            self._target.after_forward()

    def after_step(self) -> None:
        """Called at the end of `optimizer.step()` of dovetail's while the exchange is in charge."""
        if self._target is not None:
            self._target.after_step()

    def close(self) -> None:
        """Ends a look that is going on."""
        if self._target is not None:
            self._target.close()
            self._target = None

    def _begin(self) -> None:
        ddp = self._ddp()
        assert ddp is not None, "it calls"
        exchanged = ddp.exchange is not None and ddp.exchange.active
        # Ranks count their own forward passes, and one may evaluate alone: their looks need not be at the same time.
        self._target = ExchangeTarget(ddp) if exchanged else ReducerTarget(ddp, together=False)
        self._seen, self._awaited = [], False
        self._looks += 1
        self._target.begin(self._on_iteration)
        self._target.watch(every_gradient=True)

    def _on_iteration(self, iteration: ObservedIteration) -> None:
        if iteration.alone is not None:
            self._seen.append(iteration.alone)
        if len(self._seen) > LOOK:
            self.close()
            # The first one began before the look did.
            self._board.post(self._looks, self._seen[1:])
            self._awaited = self._board.rank == 0

    def _read(self) -> None:
        figures = self._board.read(self._looks)
        if figures is None:
            return
        self._awaited = False
        columns = rank_times.columns_of(itertools.chain.from_iterable(figures))
        self.last = stragglers.compare(columns, np.asarray([rank_times.table_of(f, columns) for f in figures]))
        found = costly(self.last)
        named, self._named = self._named, found
        if found is not None and not _known(found, named):
            log.warning("dovetail: %s", found)


def costly(comparison: RankComparison) -> SlowRank | None:
    """The largest loss of the rank that costs the others most, if that is more than `WARN` of an iteration."""
    shares: dict[int, float] = {}
    for found in comparison.slow:
        shares[found.rank] = shares.get(found.rank, 0.0) + found.share
    worst = max(shares, key=lambda rank: shares[rank], default=-1)
    if worst < 0 or shares[worst] <= WARN:
        return None
    return next(found for found in comparison.slow if found.rank == worst)


def _known(found: SlowRank, named: SlowRank | None) -> bool:
    """Whether this was said before and has not become much worse."""
    return (
        named is not None
        and (found.rank, found.phase, found.layer) == (named.rank, named.phase, named.layer)
        and found.seconds < WORSE * named.seconds
    )


@dataclass
class FigureBoard:
    """Where the ranks of a group leave their figures of a look: the store that the group was made with."""

    group: dist.ProcessGroup
    number: int
    """The same on all ranks: that of the watch in its process."""
    rank: int = field(init=False)
    _store: Any = field(init=False)

    def __post_init__(self) -> None:
        self.rank = dist.get_rank(self.group)
        prefix = f"dovetail/ranks/{self.group.group_name}/{self.number}"
        self._store = PrefixStore(prefix, dist.distributed_c10d._get_default_store())

    def post(self, look: int, seen: list[RankIteration]) -> None:
        """Replaces what this rank has left before. A store that is gone is no reason to stop training."""
        columns = rank_times.columns_of(seen)
        micros = [[round(seconds * 1e6) for seconds in row] for row in rank_times.table_of(seen, columns)]
        try:
            self._store.set(str(self.rank), json.dumps({"look": look, "columns": columns, "micros": micros}))
        except RuntimeError:
            log.debug("dovetail: the store of the process group is gone", exc_info=True)

    def read(self, look: int) -> list[list[RankIteration]] | None:
        """The figures of all ranks in this look, or None while some are missing."""
        keys = [str(rank) for rank in range(dist.get_world_size(self.group))]
        try:
            if not self._store.check(keys):
                return None
            given = [json.loads(value) for value in self._store.multi_get(keys)]
        except RuntimeError:
            return None
        if any(one["look"] != look for one in given):
            return None
        return [_iterations(one["columns"], one["micros"]) for one in given]


def _iterations(columns: list[list[str]], micros: list[list[int]]) -> list[RankIteration]:
    found = []
    for row in micros:
        at = {(phase, layer): n / 1e6 for (phase, layer), n in zip(columns, row, strict=True)}
        found.append(
            RankIteration(
                input=at[("input", "")],
                forward={layer: s for (phase, layer), s in at.items() if phase == "forward"},
                backward={layer: s for (phase, layer), s in at.items() if phase == "backward"},
                network=at[("network", "")],
                optimizer=at[("optimizer", "")],
                waiting=at[(rank_times.WAITING, "")],
            )
        )
    return found
