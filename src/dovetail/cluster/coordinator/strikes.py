"""When a job that keeps failing is given up: pure rules over its strikes.

A job that raises, kills a process of the cluster or runs an endless task gets a strike. Strikes count while the job
makes no progress: a new checkpoint clears them, and so does a strike at a later iteration than all before it. Three
full strikes end the job with the last reason. A process killed from outside (SIGKILL: an operator, or the kernel short
of memory) is half a strike, since another job or person may have caused it. Between tries the job waits, longer each
time.
"""

from __future__ import annotations

import signal
from typing import Annotated

import msgspec

LIMIT = 3.0
"""Weight of strikes that ends a job."""
MOST_TRIES = 25
"""Strikes since the last checkpoint, however far the job got in between."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before the next try."""


class Strike(msgspec.Struct, frozen=True):
    """One failure of a job, and the iterations that it had done by then."""

    iteration: int
    reason: str
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0


class StrikeRecord(msgspec.Struct, frozen=True):
    """A job's strikes."""

    strikes: tuple[Strike, ...] = ()
    """Strikes that count now."""
    tries: int = 0
    """Number of all strikes since the last checkpoint."""

    @property
    def weight(self) -> float:
        return sum(s.weight for s in self.strikes)


CLEAN = StrikeRecord()


def with_strike(record: StrikeRecord, strike: Strike) -> StrikeRecord:
    """The record with one more strike; earlier ones are dropped if the job has got further than ever before."""
    further = bool(record.strikes) and strike.iteration > max(s.iteration for s in record.strikes)
    kept = () if further else record.strikes
    return StrikeRecord((*kept, strike), record.tries + 1)


def verdict(record: StrikeRecord) -> str:
    """The reason for which the job has to end; empty if it may try again."""
    if not record.strikes or (record.weight < LIMIT and record.tries < MOST_TRIES):
        return ""
    times = len(record.strikes) if record.weight >= LIMIT else record.tries
    return f"{record.strikes[-1].reason} ({times} times without a new checkpoint)"


def pause(record: StrikeRecord) -> float:
    """Seconds before the next try."""
    if not record.strikes:
        return 0.0
    return min(FIRST_PAUSE * 2.0 ** (len(record.strikes) - 1), LONGEST_PAUSE)


def death(what: str, code: int) -> tuple[str, float]:
    """The reason that a process's exit code gives, and the weight of the strike for the job that ran in it."""
    if code == -signal.SIGKILL:
        return f"{what} was killed (out of memory, or from outside)", 0.5
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"{what} died of {name}", 1.0
    return f"{what} ended with code {code}", 1.0


def encode(record: StrikeRecord) -> str:
    return msgspec.json.encode(record).decode() if record.tries else ""


def decode(text: str) -> StrikeRecord:
    return msgspec.json.decode(text, type=StrikeRecord) if text else CLEAN
