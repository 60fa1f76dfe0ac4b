"""A foreground job's promised slow-down on one device: which background tasks may start, and what they have cost.

A background task may start if its predicted time, times a margin, passes before the job wants the device again.
Predictions err, so the margin adapts. A background task that made the job wait doubles it; a gap that was filled
without delay shrinks it by a twentieth. It also decays with time, since no gap would be filled, and nothing learnt,
under a margin that lets no task start. A margin that would grow beyond its limit stops background tasks for a while,
each time for longer. Beside the margin there is an account in seconds of delay: the promised bound fills it as time
passes, every delay is taken from it, and below zero no background task starts. So over any stretch of time the delay
is at most the bound's share of it, plus what the account can hold, plus one background task, however wrong the
predictions are. A job on several devices is late when one of them is, so each device has its share of the bound.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_MARGIN, MOST_MARGIN = 1.05, 16.0
"""Real task times spread by 3.5–9 % around their mean; the least margin is about one such spread."""
SHRINK = 0.95
HALF_LIFE = 10.0
"""Seconds in which a margin loses half of what it is above the least."""
TOLERANCE = 0.001
"""Seconds of delay that are charged but do not raise the margin: a message and a switch of jobs take that long."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds without background tasks after the margin has reached its limit."""
WINDOW = 10.0
"""Seconds for which an unused account goes on filling."""
PATIENCE = 0.25
"""A job that is late by t seconds may stay late for long: a background task of up to this share of t may start."""


class Promise:
    """The promise to one foreground job on one device. All times are of one clock that the caller reads."""

    __slots__ = ("_at", "_credit", "_margin", "_margin_at", "_pause", "bound", "delay", "paused_until", "since")

    def __init__(self, bound: float, now: float) -> None:
        self.bound = bound
        self.delay = 0.0
        """Seconds for which the job has waited for background tasks here, since `since`."""
        self.since = now
        self.paused_until = now
        self._pause = FIRST_PAUSE
        self._credit, self._at = 0.0, now
        self._margin, self._margin_at = LEAST_MARGIN, now

    def margin(self, now: float) -> float:
        """The factor by which a gap must exceed a background task's predicted seconds."""
        above = self._margin - LEAST_MARGIN
        return LEAST_MARGIN + above * 0.5 ** ((now - self._margin_at) / HALF_LIFE) if above else LEAST_MARGIN

    def credit(self, now: float) -> float:
        """Seconds of delay that are within the bound now; below zero if the job has had too much."""
        self._credit = min(self.bound * WINDOW, self._credit + self.bound * (now - self._at))
        self._at = now
        return self._credit

    def allows(self, now: float, seconds: float, room: float) -> bool:
        """Whether a background task of `seconds` (predicted) may start, `room` seconds before the job's turn."""
        return seconds * self.margin(now) <= room and now >= self.paused_until and self.credit(now) >= 0.0

    def delayed(self, now: float, seconds: float) -> None:
        """A background task made the job wait for `seconds`."""
        self.delay += seconds
        self._credit = self.credit(now) - seconds
        if seconds <= TOLERANCE:
            return
        doubled = 2 * self.margin(now)
        self._margin, self._margin_at = min(doubled, MOST_MARGIN), now
        if doubled > MOST_MARGIN:
            self.paused_until = now + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def clean(self, now: float) -> None:
        """A gap was filled without delay."""
        self._margin, self._margin_at = max(LEAST_MARGIN, self.margin(now) * SHRINK), now
        if self._margin == LEAST_MARGIN:
            self._pause = FIRST_PAUSE

    def slowdown(self, now: float) -> float:
        """The delay as a share of the time that the job would have spent here without it."""
        rest = now - self.since - self.delay
        return self.delay / rest if rest > 0 else 0.0


@dataclass
class LastBackgroundTask:
    """The device's last background task, and the number of them so far."""

    start: float = 0.0
    stop: float = 0.0
    count: int = 0

    def overlap(self, since: float, until: float) -> float:
        """Seconds of that task between `since` and `until`."""
        return max(0.0, min(until, self.stop) - max(since, self.start))
