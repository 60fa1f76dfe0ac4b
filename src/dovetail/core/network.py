"""Network: what collectives cost among a number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from .errors import Error
from .files import MOST_COUNT, Bytes, Count, Name, Noun, Record, Seconds
from .profile import Quantiles

CollectiveName = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]
COLLECTIVES: tuple[CollectiveName, ...] = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")

FloatArray = npt.NDArray[np.float64]


class Cost(Protocol):
    """Seconds that one collective takes, by its bytes. Takes and returns arrays, so that planners stay fast."""

    def __call__(self, nbytes: npt.ArrayLike, /) -> FloatArray: ...


@dataclass(frozen=True)
class AffineCost:
    """T(M) = latency + seconds_per_byte · M."""

    latency: float
    seconds_per_byte: float

    def __call__(self, nbytes: npt.ArrayLike, /) -> FloatArray:
        return self.latency + self.seconds_per_byte * np.asarray(nbytes, dtype=np.float64)


@dataclass(frozen=True)
class TableCost:
    """Linear between measured points (at least two), constant below the first, along the last slope above the last."""

    nbytes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __call__(self, nbytes: npt.ArrayLike, /) -> FloatArray:
        x = np.asarray(nbytes, dtype=np.float64)
        inside = np.interp(x, self.nbytes, self.seconds)
        (x0, x1), (y0, y1) = self.nbytes[-2:], self.seconds[-2:]
        # The tail is bandwidth: never cheaper per byte than zero, even where two noisy points say so.
        slope = max((y1 - y0) / (x1 - x0), 0.0)
        return inside + slope * np.maximum(0.0, x - x1)


class CostSample(Record, frozen=True, kw_only=True):
    """One point of a measured table."""

    bytes: Bytes
    seconds: Quantiles


class Fit(Record, frozen=True, kw_only=True):
    """The affine law through a table, and its error."""

    latency: Seconds
    seconds_per_byte: Seconds
    error: Seconds
    """Median relative error over the table's points."""


class Collective(Record, frozen=True, kw_only=True):
    """What one collective costs at the network's own number of ranks; `samples` is empty for a preset."""

    fit: Fit
    samples: tuple[CostSample, ...] = ()

    def cost(self) -> Cost:
        if len(self.samples) < 2:
            return AffineCost(self.fit.latency, self.fit.seconds_per_byte)
        # A larger message that measured faster is noise: take the running maximum.
        medians = np.maximum.accumulate([s.seconds.median for s in self.samples])
        return TableCost(tuple(float(s.bytes) for s in self.samples), tuple(float(m) for m in medians))


class Network(Noun, frozen=True, kw_only=True):
    """Costs of collectives among `ranks` ranks; other counts follow the ring law.

    Ring law: a collective among n ranks is made of (n−1) steps (all-reduce: 2(n−1)), each of which moves 1/n of the
    data. So latency grows as (n−1) and time per byte as (n−1)/n.
    """

    kind: ClassVar[str] = "network"

    name: Name
    ranks: Annotated[int, msgspec.Meta(ge=2, le=MOST_COUNT)]
    source: str
    """Where it comes from: the command and backend that measured it, or where a preset's figures come from."""
    measured: bool
    emulated: bool = False
    """True where latency was added or links were rate-limited on purpose."""
    collectives: Annotated[dict[CollectiveName, Collective], msgspec.Meta(min_length=1)]

    def check(self) -> None:
        for name, collective in self.collectives.items():
            sizes = [s.bytes for s in collective.samples]
            if sizes != sorted(set(sizes)):
                raise ValueError(f"collectives.{name}.samples: expected ascending bytes, got {sizes}")

    def cost(self, collective: CollectiveName = "all_reduce", *, ranks: Count | None = None) -> Cost:
        """The measured table where there is one, the affine law otherwise."""
        found = self._find(collective)
        base = found.cost()
        if ranks is None or ranks == self.ranks:
            return base
        if isinstance(base, AffineCost):
            return self.affine(collective, ranks=ranks)
        latency_factor, byte_factor = self._factors(ranks)
        nbytes = base.nbytes if isinstance(base, TableCost) else ()
        seconds = tuple(
            latency_factor * min(float(t), found.fit.latency) + byte_factor * max(0.0, float(t) - found.fit.latency)
            for t in base(nbytes)
        )
        return TableCost(nbytes, seconds)

    def affine(self, collective: CollectiveName = "all_reduce", *, ranks: Count | None = None) -> AffineCost:
        fit = self._find(collective).fit
        latency_factor, byte_factor = self._factors(ranks or self.ranks)
        return AffineCost(fit.latency * latency_factor, fit.seconds_per_byte * byte_factor)

    def _find(self, collective: CollectiveName) -> Collective:
        if collective not in self.collectives:
            have = ", ".join(self.collectives)
            raise Error(
                f"network {self.name!r} has no {collective} (it has {have}): measure it with `dovetail network`"
            )
        return self.collectives[collective]

    def _factors(self, ranks: int) -> tuple[float, float]:
        if ranks < 2:
            return 0.0, 0.0  # alone: nothing to communicate
        n, m = self.ranks, ranks
        return (m - 1) / (n - 1), ((m - 1) / m) / ((n - 1) / n)
