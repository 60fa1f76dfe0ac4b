"""Communication hooks (`register_comm_hook`) under planned buckets: what they cost, and what becomes of their state.

A hook is the user's own code, perhaps with a memory: nobody but torch's reducer ever calls it, with real gradients.
`TimedHook` takes the time of those calls while training goes on, from which follows what a bucket of a size costs.

What a hook remembers may belong to a bucket. torch asks every hook to bear one change of buckets, before the second
iteration; planning changes them again later:

    state                         what happens
    none, a process group         nothing to keep: planning goes on
    PostLocalSGDState             nothing of a bucket's in it: planning goes on once its second phase has begun
    an optimiser in the hook      torch's own (`_register_fused_optim`) keeps its state by parameter: planning goes on
    PowerSGDState                 planning goes on once compression has begun. `CarriedErrors` takes the errors, which
                                  PowerSGD keeps by bucket, along to the new buckets, so that error feedback loses
                                  nothing. Low-rank factors are drawn anew, as at PowerSGD's own start. Not on gloo:
                                  PowerSGD waits for messages in gloo's two threads and hangs with several buckets
    anything else                 planning goes on if no tensor is found in it after the first iterations
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dovetail.core.errors import Error
from dovetail.core.network import Collective, CostSample, Network
from dovetail.measure.clock import Clock
from dovetail.measure.collective_timer import backend_of
from dovetail.measure.collectives import fit
from dovetail.measure.stats import quantiles
from dovetail.train import agree

from .reducer import CommHook, HookCall

DEPTH = 4
"""Levels of attributes and containers in which tensors are looked for."""


class TimedHook:
    """Calls a hook and takes the time of every bucket, until its future is complete."""

    def __init__(self, call: HookCall, device: torch.device) -> None:
        self._call, self._clock, self._open = call, Clock(device), True
        self._sent: list[tuple[int, Any]] = []
        self._done: dict[int, Any] = {}
        self.iterations: list[list[tuple[int, float]]] = []
        """(bytes, seconds) of the buckets of every iteration, in the order in which they were sent."""

    def __call__(self, state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        if not self._open:
            return self._call(state, bucket)
        if bucket.index() == 0:
            self._sent, self._done = [], {}
        buffer, done, number = bucket.buffer(), self._done, len(self._sent)
        self._sent.append((buffer.numel() * buffer.element_size(), self._clock.stamp()))
        clock = self._clock

        def stamp(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            done[number] = clock.stamp()
            return future.value()

        # The reducer gets a future that is complete after the stamp: torch wakes up who waits before it calls back.
        return self._call(state, bucket).then(stamp)

    def close(self) -> None:
        """Takes no more times. The hook itself goes on."""
        self._open = False

    def end_iteration(self) -> None:
        """Notes the iteration that has just ended. A bucket's time begins when the one before it is through."""
        sent, done = self._sent, dict(self._done)
        if not sent:
            return
        at = self._clock.seconds([t for pair in ((s, done[k]) for k, (_, s) in enumerate(sent)) for t in pair])
        free, spent = 0.0, []
        for (nbytes, _), begin, end in zip(sent, at[::2], at[1::2], strict=True):
            spent.append((nbytes, max(0.0, end - max(begin, free))))
            free = max(free, end)
        self.iterations.append(spent)

    def network(self, name: str, group: dist.ProcessGroup, device: torch.device) -> Network:
        """What the hook costs by the size of a bucket, from the iterations that were noted. A collective."""
        # A table for each bucketing; ranks may have missed different iterations, and compare as many as all have.
        tables: dict[tuple[int, ...], list[list[float]]] = {}
        for iteration in self.iterations:
            tables.setdefault(tuple(b for b, _ in iteration), []).append([s for _, s in iteration])
        keys = agree.from_first(sorted(tables), group, device)
        times: dict[int, list[float]] = {}
        for sizes in keys:
            rows = tables.get(sizes, [])
            count = int(agree.smallest([float(len(rows))], group, device)[0])
            if count:
                typical = np.quantile(rows[-count:], 0.25, axis=0)
                # The rank that sent last saw the shortest time, which has no waiting for others in it.
                for size, seconds in zip(sizes, agree.smallest(typical.tolist(), group, device), strict=True):
                    times.setdefault(size, []).append(seconds)
        if not times:
            raise Error(f"no bucket of the communication hook {name} could be timed")
        samples = tuple(CostSample(bytes=size, seconds=quantiles(times[size])) for size in sorted(times))
        ranks = dist.get_world_size(group)
        return Network(
            name=f"{backend_of(group, device)}-{ranks}",
            ranks=ranks,
            source=f"buckets of the communication hook {name}, timed in {len(self.iterations)} training iterations",
            measured=True,
            collectives={"all_reduce": Collective(fit=fit(samples), samples=samples)},
        )


class CarriedErrors:
    """Calls a hook of PowerSGD's; where a bucket has other parameters than before, takes their errors along.

    Buckets are called in order, from number 0 on. What an earlier bucket of the same iteration has remembered may still
    be changing, but never has to move: a parameter is in one bucket only.
    """

    def __init__(self, call: HookCall, state: Any) -> None:
        self._call, self._state = call, state
        self._members: dict[int, list[tuple[int, int]]] = {}
        """(id, elements) of the parameters of every bucket, in the order of its buffer."""
        self._errors: dict[int, torch.Tensor] = {}
        """Errors of parameters that are in no bucket yet, by id."""
        self._current: set[int] = set()
        """Numbers of the buckets that this iteration has called."""

    def __call__(self, state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        index = bucket.index()
        members = [(id(p), p.numel()) for p in bucket.parameters()]
        if index == 0:
            self._current.clear()
        if self._members.get(index) != members:
            self._unpack()
            if all(i in self._errors for i, _ in members):
                state.error_dict[index] = torch.cat([self._errors.pop(i) for i, _ in members])
            self._members[index] = members
        self._current.add(index)
        return self._call(state, bucket)

    def _unpack(self) -> None:
        """Divides the errors of the buckets as they were before among their parameters."""
        for number in [n for n in self._members if n not in self._current]:
            members = self._members.pop(number)
            error = self._state.error_dict.pop(number, None)
            if error is not None and error.numel() == sum(n for _, n in members):
                for (i, _), piece in zip(members, error.split([n for _, n in members]), strict=True):
                    self._errors[i] = piece
            self._state.p_memory_dict.pop(number, None)
            self._state.q_memory_dict.pop(number, None)


def carried(hook: CommHook | None) -> HookCall | None:
    """What to register in place of the hook wherever buckets may change; None for the hook itself."""
    if hook is not None and hook.call is not None and _is(hook.state, "PowerSGDState"):
        return CarriedErrors(hook.call, hook.state)
    return None


def waits(hook: CommHook | None) -> bool:
    """Whether the hook is still in a first phase of its own, in which it costs other than later on."""
    for kind, start in (("PowerSGDState", "start_powerSGD_iter"), ("PostLocalSGDState", "start_localSGD_iter")):
        if hook is not None and _is(hook.state, kind):
            return bool(hook.state.iter < getattr(hook.state, start))
    return False


def hangs(hook: CommHook, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the hook works with one bucket only: it waits inside the threads that carry the messages."""
    return _is(hook.state, "PowerSGDState") and backend_of(group, device) == "gloo"


def stateless(hook: CommHook) -> bool:
    """Whether nothing that the hook remembers can belong to a bucket, or `carried` knows how to move it."""
    known = hook.state is None or isinstance(hook.state, dist.ProcessGroup)
    return (known or _is(hook.state, "PowerSGDState", "PostLocalSGDState")) and not holds_tensors(hook)


def holds_tensors(hook: CommHook) -> bool:
    """Whether tensors are found in the state of a hook that is not one of torch's, or in what its function holds."""
    if _is(hook.state, "PowerSGDState", "PostLocalSGDState"):
        return False
    return any(_has_tensor(thing, DEPTH) for thing in (hook.state, hook.call))


def _is(state: object, *kinds: str) -> bool:
    kind = type(state)
    return kind.__name__ in kinds and kind.__module__.startswith("torch.distributed.algorithms.ddp_comm_hooks")


def _has_tensor(thing: Any, depth: int) -> bool:
    if isinstance(thing, torch.Tensor):
        return True
    if _is(thing, "_OptimizerHookState"):  # tensors of parameters, whatever buckets these are in
        return False
    if not depth or isinstance(thing, (str, bytes, int, float, type, torch.nn.Module, dist.ProcessGroup)):
        return False
    return any(_has_tensor(inner, depth - 1) for inner in _inside(thing))


def _inside(thing: Any) -> Iterator[Any]:
    """What an object holds: items, attributes, what a bound method or a closure is bound to."""
    if isinstance(thing, dict):
        yield from thing.values()
    elif isinstance(thing, (list, tuple, set, frozenset)):
        yield from thing
    elif isinstance(thing, functools.partial):
        yield from (thing.func, thing.args, thing.keywords)
    elif callable(getattr(thing, "__func__", None)) or hasattr(thing, "__closure__"):
        yield getattr(thing, "__self__", None)
        for cell in getattr(thing, "__closure__", None) or ():
            try:
                yield cell.cell_contents
            except ValueError:  # an empty cell
                continue
    else:
        yield from vars(thing).values() if hasattr(thing, "__dict__") else ()
        for slot in getattr(type(thing), "__slots__", ()):
            yield getattr(thing, slot, None)
