"""An iteration's tasks on their way from the aggregator to executors and back: offered, taken, done, or offered again.

The books are `Iteration`'s, the numbers that decide are in the arena (see there), the news go through the crew. Tasks
are offered as soon as they are known and may start when they are released. Who shares the arena takes them and says so;
who does not, asks. A member that is lost, or gives up, leaves its task to the others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from dovetail.cluster.job.arena import Arena
from dovetail.cluster.transport.messages import Claim, Done, Message, Taken, Task, Took

from .crew import Crew, Member
from .iteration_tasks import Iteration

log = logging.getLogger("dovetail")
DEAF, MOST_DEAF = 0.01, 0.001
"""For how long nobody is listened to after a release: a share of the shortest task, and seconds at most."""


class Offers:
    """Of one job; the same object for all its iterations."""

    def __init__(self, iteration: Iteration, arena: Arena, crew: Crew) -> None:
        self._books, self._arena, self._crew = iteration, arena, crew
        self._workers = tuple(range(arena.workers))
        self._going = self._withdrawn = False
        self._offered_at = 0.0

    def prepare(self, number: int, depths: Sequence[int]) -> None:
        """The next iteration. Who serves nobody else may take one of its tasks before it is released."""
        self._going = False
        self._books.prepare(number, depths)
        self._offer()
        self._arena.forget(self._books.first)

    def release(self, now: float) -> None:
        self._going, self._offered_at = True, now
        self._books.release(now)
        self._crew.say_all(self._books.going())
        self._listen_later()

    def _listen_later(self) -> None:
        """Everybody who takes a task now says so. One look in a while hears them all, and leaves them the cores."""
        if not any(member.peer for member in self._crew.joined):
            time.sleep(min(MOST_DEAF, DEAF * min(map(self._books.predicted, self._workers))))

    def withdraw(self) -> None:
        """Nothing more may be taken: the job is to stop."""
        self._withdrawn = True
        self._arena.withdraw([task.worker for task in self._books.ready])

    # -- what executors say --

    def joined(self, member: Member) -> None:
        self._crew.say(member, *self._news())

    def heard(self, member: Member, message: Message) -> None:
        if isinstance(message, Took):
            self._took(member, message)
        elif isinstance(message, Claim):
            self._claimed(member)
        elif isinstance(message, Done):
            self._done(member, message)

    def lost(self, member: Member) -> None:
        self._books.lose(member)
        self._offer()

    def look(self, now: float, limit: float) -> None:
        """Now and then: whose task has been running for longer than `limit` seconds does not come back."""
        if not self._going:
            return
        for holder in self._books.overdue(now, limit):
            assert isinstance(holder, Member)
            log.warning("device %d did not end its task within %.0f s", holder.device, limit)
            self._crew.drop(holder)
        if now - self._offered_at > limit:  # somebody may have taken one and stand still since
            self._books.lose(None)
            self._offer()

    def _took(self, member: Member, message: Took) -> None:
        self._given_up(member)
        if not self._withdrawn and self._books.took(member, message):
            self._taken(message.at)

    def _claimed(self, member: Member) -> None:
        self._given_up(member)
        if member not in self._crew.members:
            return
        now, task = time.monotonic(), None
        if self._going:
            task = self._books.claim(member, now, lambda task: self._arena.claim(task.worker, task.claim))
        if task is None:
            self._crew.say(member, Task(iteration=self._books.number))
        elif self._crew.say(member, self._crew.prepare(member, task)):
            self._taken(now)

    def _done(self, member: Member, message: Done) -> None:
        if self._books.has(member, message) and self._crew.collect(member, message.worker):
            self._arena.withdraw([message.worker])
            self._books.end(member, message)

    def _given_up(self, member: Member) -> None:
        """Who wants another task, or none, has given up what it had, if anything."""
        if member in self._books.held:
            self.lost(member)

    # -- what they hear --

    def _offer(self) -> None:
        """What is ready may be taken under its present numbers, and under no others."""
        self._offered_at = time.monotonic()
        if self._books.ready and not self._withdrawn:
            self._arena.offer(self._books.ready)
            self._crew.say_all(*self._news())

    def _news(self) -> list[Message]:
        """What an executor must know of the present iteration."""
        return [self._books.offered(), *([self._books.going()] if self._going else [])]

    def _taken(self, at: float) -> None:
        if self._going and not self._books.ready:
            number, until = self._books.number, self._books.until(at)
            self._crew.say_all(Taken(iteration=number, workers=self._workers, until=until, at=at))
