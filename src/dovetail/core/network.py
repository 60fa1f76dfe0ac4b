"""Network: what collectives cost among a number of ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from .errors import Error
from .files import MOST_COUNT, Bytes, Count, Name, Noun, Record, Seconds
from .profile import Precision as Precision
from .profile import Quantiles, Share

CollectiveName = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]
COLLECTIVES: tuple[CollectiveName, ...] = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")

FloatArray = npt.NDArray[np.float64]

_RATE = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>kbit|mbit|gbit)", re.IGNORECASE)
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def bits_per_second(rate: str) -> float:
    """The rate that "1gbit" or "300mbit" stands for; an Error for anything else."""
    match = _RATE.fullmatch(rate.strip())
    if match is None or float(match["number"]) == 0:
        raise Error(f"rate: expected a number with kbit, mbit or gbit such as '1gbit' or '300mbit', got {rate!r}")
    return float(match["number"]) * _UNITS[match["unit"].lower()]


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

    def cost(self) -> AffineCost | TableCost:
        if len(self.samples) < 2:
            return AffineCost(self.fit.latency, self.fit.seconds_per_byte)
        # A larger message that measured faster is noise: take the running maximum.
        medians = np.maximum.accumulate([s.seconds.median for s in self.samples])
        return TableCost(tuple(float(s.bytes) for s in self.samples), tuple(float(m) for m in medians))


class Contention(Record, frozen=True, kw_only=True):
    """What computing and communicating cost each other when they run at the same time."""

    gap: Seconds = 0.0
    """Seconds between the end of one collective and the start of the next that was queued behind it."""
    collective: Share = 0.0
    """Share by which a collective takes longer while the devices compute: 0.05 is 5 %."""
    compute: Share = 0.0
    """Share by which computing takes longer while a collective is in flight."""


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
    reduced: dict[Precision, dict[CollectiveName, Collective]] = msgspec.field(default_factory=dict)
    """Collectives that carry fewer bytes, codec included, by what travels; sizes are those of the tensors in memory."""
    contention: Contention | None = None
    """None where it was not measured; planners then take it as nothing."""
    noise: Share = 0.0
    """Relative error that repeated measurements leave in the time of a collective, at the noisiest collective."""
    lost: Share = 0.0
    """Share of the measuring time that disturbed repeats took beyond the undisturbed ones."""

    def check(self) -> None:
        tables = {f"collectives.{name}": found for name, found in self.collectives.items()}
        for precision, among in self.reduced.items():
            tables |= {f"reduced.{precision}.{name}": found for name, found in among.items()}
        for field, collective in tables.items():
            sizes = [s.bytes for s in collective.samples]
            if sizes != sorted(set(sizes)):
                raise ValueError(f"{field}.samples: expected ascending bytes, got {sizes}")

    def cost(
        self,
        collective: CollectiveName = "all_reduce",
        *,
        ranks: Count | None = None,
        precision: Precision = "full",
    ) -> Cost:
        """What one of many collectives takes while the devices compute: what it takes alone, and the contention.

        Alone it takes what the measured table says where there is one, the affine law otherwise.
        """
        alone = self._alone(collective, self.ranks if ranks is None else ranks, precision)
        if isinstance(alone, AffineCost):
            return self._contended(alone, ranks)
        gap, factor = self._contention(ranks)
        return TableCost(alone.nbytes, tuple(t * factor + gap for t in alone.seconds))

    def _contended(self, alone: AffineCost, ranks: int | None) -> AffineCost:
        gap, factor = self._contention(ranks)
        return AffineCost(alone.latency * factor + gap, alone.seconds_per_byte * factor)

    def _contention(self, ranks: int | None) -> tuple[float, float]:
        """(seconds that each collective takes in addition, factor on the rest)."""
        if self.contention is None or (ranks is not None and ranks < 2):
            return 0.0, 1.0
        return self.contention.gap, 1 + self.contention.collective

    def _alone(self, collective: CollectiveName, ranks: int, precision: Precision) -> AffineCost | TableCost:
        found = self._find(collective, precision)
        base = found.cost()
        if ranks == self.ranks:
            return base
        latency_factor, byte_factor = self._factors(ranks)
        if isinstance(base, AffineCost):
            return AffineCost(base.latency * latency_factor, base.seconds_per_byte * byte_factor)
        seconds = tuple(
            latency_factor * min(t, found.fit.latency) + byte_factor * max(0.0, t - found.fit.latency)
            for t in base.seconds
        )
        return TableCost(base.nbytes, seconds)

    def affine(self, collective: CollectiveName = "all_reduce", *, ranks: Count | None = None) -> AffineCost:
        """The affine law of `cost`."""
        fit = self._find(collective, "full").fit
        latency_factor, byte_factor = self._factors(ranks or self.ranks)
        law = AffineCost(fit.latency * latency_factor, fit.seconds_per_byte * byte_factor)
        return self._contended(law, ranks)

    def _find(self, collective: CollectiveName, precision: Precision) -> Collective:
        among = self.collectives if precision == "full" else self.reduced.get(precision, {})
        if collective not in among:
            what = collective if precision == "full" else f"{collective} in {precision}"
            have = ", ".join([*self.collectives, *(f"{c} in {p}" for p, found in self.reduced.items() for c in found)])
            raise Error(f"network {self.name!r} has no {what} (it has {have}): measure it with `dovetail network`")
        return among[collective]

    def _factors(self, ranks: int) -> tuple[float, float]:
        if ranks < 2:
            return 0.0, 0.0  # alone: nothing to communicate
        n, m = self.ranks, ranks
        return (m - 1) / (n - 1), ((m - 1) / m) / ((n - 1) / n)
