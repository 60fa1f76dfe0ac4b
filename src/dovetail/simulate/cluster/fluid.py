"""Fluid level: between two changes every job runs at a constant rate, so ten million iterations cost one event.

The same calls as the task level. A rate is looked up when the group of jobs that share devices with a job changes. As
long as a group stays together it is looked at again: when it has been there for as long as it was played, it is played
longer, and when a job has run so much more than another that their order changes, they change places.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from dovetail.core.job import Shape
from dovetail.planning.sharing.policies import Policy
from dovetail.planning.sharing.priority import Standing

from .rates import Group, Play, alone, together
from .standings import CHANGING, overtaken, ranked
from .tasks import Costs

NEVER = float("inf")
DOUBLINGS = 4
"""How often the play of a group that stays together is made twice as long."""
AFFORDED = 60_000
"""Tasks that one simulation spends on longer plays. Where there are few groups one rate may decide which job ends
last; where there are many, errors of single rates cancel out."""


class Spell:
    """The time for which a group has been together."""

    __slots__ = ("doublings", "group", "since")

    def __init__(self, group: Group, since: float, doublings: int) -> None:
        self.group, self.since, self.doublings = group, since, doublings


class Flow:
    """One admitted job."""

    __slots__ = ("devices", "here", "look", "paused", "rate", "shape", "since", "spell", "standing", "until", "version")

    def __init__(self, standing: Standing, shape: Shape, devices: Sequence[int], until: float) -> None:
        self.standing, self.shape, self.devices, self.until = standing, shape, tuple(devices), until
        self.rate = 0.0  # iterations per second
        self.since = 0.0
        self.version = self.look = 0  # which events of the queue are still true: its boundary, its group's next look
        self.here = False  # on its devices; not while its weights travel
        self.paused = False  # handed back, not yet resumed
        self.spell: Spell | None = None


class FluidEngine:
    """Flows, who shares what with whom, and a queue of predicted boundaries."""

    def __init__(
        self, devices: int, policy: Policy, costs: Costs, *, window: tuple[float, float] | None = None
    ) -> None:
        self.policy, self.costs, self.now = policy, costs, 0.0
        self.flows: dict[int, Flow] = {}
        self.residents: list[list[int]] = [[] for _ in range(devices)]
        self.busy, self.window, self.window_busy = 0.0, window or (0.0, NEVER), 0.0
        self._queue: list[tuple[float, int, int]] = []  # when, version, job; ~job for a look at its group
        self._serial = 0
        self._dirty: set[int] = set()
        self._back: list[int] = []
        self._afforded = AFFORDED
        self._doublings: dict[Group, int] = {}

    # -- what the controller calls --

    def start(
        self, standing: Standing, shape: Shape, devices: Sequence[int], *, until: float, delay: float = 0.0
    ) -> None:
        f = self.flows[standing.serial] = Flow(standing, shape, devices, until)
        self._settle(standing.serial, f, delay)

    def interrupt(self, key: int) -> None:
        """Hand control back at the end of the iteration under way; one that begins now is under way."""
        f = self.flows[key]
        if not f.paused:
            self.sync(key)
            rounds = f.standing.done / f.shape.progress
            f.until = min(f.until, (math.floor(rounds + 1e-9) + 1) * f.shape.progress)
            self._predict(key, f)

    def resume(self, key: int, shape: Shape, devices: Sequence[int], *, until: float, delay: float = 0.0) -> None:
        f = self.flows[key]
        f.paused, f.until = False, until
        if delay or shape is not f.shape or tuple(devices) != f.devices:
            self._leave(key, f)
            f.shape, f.devices = shape, tuple(devices)
            self._settle(key, f, delay)
            return
        f.since = self.now
        self._predict(key, f)

    def remove(self, key: int) -> None:
        self.sync(key)
        self._leave(key, self.flows.pop(key))

    def sync(self, key: int) -> None:
        """Brings the job's standing up to now."""
        f = self.flows[key]
        if self.now > f.since and f.rate and not f.paused:
            done = f.rate * (self.now - f.since)
            f.standing.done = min(f.standing.done + done, f.until)
            rounds = done / f.shape.progress
            used = rounds * f.shape.work
            f.standing.attained += used if self.policy.shares else rounds * f.shape.held
            self.busy += used
            overlap = min(self.now, self.window[1]) - max(f.since, self.window[0])
            if overlap > 0:
                self.window_busy += used * overlap / (self.now - f.since)
        f.since = self.now

    def run(self, limit: float) -> list[int]:
        while not self._back:
            time = self._next()
            if time > limit or time == NEVER:
                self.now = max(self.now, limit) if limit < NEVER else self.now
                return []
            self.now = max(self.now, time)
            while self._next() <= self.now:
                self._happen(heapq.heappop(self._queue)[2])
        back, self._back = self._back, []
        return back

    # -- inside --

    def _next(self) -> float:
        self._rerate()
        while self._queue:
            time, version, key = self._queue[0]
            f = self.flows.get(key if key >= 0 else ~key)
            if f is not None and (version == f.version and not f.paused if key >= 0 else version == f.look):
                return time
            heapq.heappop(self._queue)
        return NEVER

    def _happen(self, key: int) -> None:
        if key < 0:
            self._dirty.add(self.flows[~key].devices[0])
            return
        f = self.flows[key]
        if not f.here:
            self._enter(key, f)
            return
        self.sync(key)
        f.standing.done = f.until
        f.paused = True
        self._back.append(key)

    def _settle(self, key: int, f: Flow, delay: float) -> None:
        """On its devices, after the delay; until then its neighbours have them to themselves."""
        if delay:
            f.version = self._push(self.now + delay, key)
        else:
            self._enter(key, f)

    def _enter(self, key: int, f: Flow) -> None:
        f.since, f.here = self.now, True
        for d in f.devices:
            self.residents[d].append(key)
            self._dirty.add(d)

    def _leave(self, key: int, f: Flow) -> None:
        if f.here:
            for d in f.devices:
                self.residents[d].remove(key)
                if self.residents[d]:
                    self._dirty.add(d)
        f.here, f.rate, f.spell = False, 0.0, None
        f.version = f.look = -1

    def _push(self, time: float, key: int) -> int:
        """The event's version: never used before, not even by an earlier lease of the same job."""
        self._serial += 1
        heapq.heappush(self._queue, (time, self._serial, key))
        return self._serial

    def _predict(self, key: int, f: Flow) -> None:
        if not f.here:
            return  # it comes first
        f.version = -1
        if f.rate and not f.paused:
            f.version = self._push(self.now + (f.until - f.standing.done) / f.rate, key)

    def _set(self, key: int, value: float) -> None:
        f = self.flows[key]
        f.rate, f.look = value, -1
        self._predict(key, f)

    def _rerate(self) -> None:
        while self._dirty:
            group = self._group(self._dirty.pop())
            for key in group:
                self.sync(key)
            if len(group) == 1:
                f = self.flows[group[0]]
                if len(f.devices) >= f.shape.width:
                    f.spell = None
                    self._set(group[0], f.shape.progress / alone(f.shape, self.costs.jitter))
                    continue
            if group:
                self._share(group)

    def _group(self, device: int) -> list[int]:
        """The jobs that share devices with this device's residents, directly or through others."""
        keys, found, todo = set(self.residents[device]), [], list(self.residents[device])
        seen = {device}
        while todo:
            key = todo.pop()
            found.append(key)
            for d in self.flows[key].devices:
                if d not in seen:
                    seen.add(d)
                    for other in self.residents[d]:
                        if other not in keys:
                            keys.add(other)
                            todo.append(other)
        self._dirty -= seen
        return found

    def _share(self, keys: list[int]) -> None:
        standings, ties = ranked(self.policy.order, [self.flows[k].standing for k in keys])
        flows = [self.flows[s.serial] for s in standings]
        patterns: dict[int, list[tuple[int, int]]] = {}
        for i, f in enumerate(flows):
            for place, d in enumerate(f.devices):
                patterns.setdefault(d, []).append((i, place if f.shape.pinned else -1))
        # Devices with the same residents are alike, so only how many there are matters: number them in sorted order.
        alike = sorted(tuple(p) for p in patterns.values())
        count: dict[int, int] = {}
        numbered = []
        for pattern in alike:
            row = []
            for i, place in pattern:
                if place < 0:
                    place = count[i] = count.get(i, -1) + 1
                row.append((i, place))
            numbered.append(tuple(row))
        group = Group(
            tuple([f.shape for f in flows]), tuple([f.standing.background for f in flows]), ties, tuple(numbered)
        )
        play = together(group, self.policy, self.costs)
        spell = self._spell(flows, group, play)
        measured = play.after(spell.doublings)
        for f, rate in zip(flows, measured.rates, strict=True):
            f.spell = spell
            self._set(f.standing.serial, rate)
        look = NEVER
        if spell.doublings < DOUBLINGS and self._afforded > 0:
            look = spell.since + measured.seconds
        if self.policy.order in CHANGING:
            sharing = [[i for i, _ in pattern] for pattern in alike]
            look = min(look, self.now + overtaken(self.policy.order, standings, ties, measured.rates, sharing))
        if look < NEVER:
            flows[0].look = self._push(look, ~standings[0].serial)

    def _spell(self, flows: list[Flow], group: Group, play: Play) -> Spell:
        """The group's, played for as long as it has been there, as far as that can be afforded."""
        spell = flows[0].spell
        if spell is None or spell.group != group or any(f.spell is not spell for f in flows):
            return Spell(group, self.now, self._doublings.get(group, 0))
        while spell.doublings < DOUBLINGS and self._afforded > 0:
            if self.now < spell.since + play.after(spell.doublings).seconds - 1e-9:
                break
            spell.doublings += 1
            self._doublings[group] = max(spell.doublings, self._doublings.get(group, 0))
            self._afforded -= play.after(spell.doublings).tasks // 2  # it goes on where it stopped
        return spell
