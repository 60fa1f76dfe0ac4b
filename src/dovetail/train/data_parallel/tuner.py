"""Finds the best buckets for a DDP module while it trains.

`Tuner._phases` is the whole course of it, a generator that is handed one finished iteration at a time: watch a few
iterations, measure the network, plan, try the candidates in turn, keep the fastest. Every iteration it looks at is a
real training iteration with the same gradients as any other. What must be the same on all ranks is agreed at the end of
an iteration (see observe.py).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from dovetail import measure, planning
from dovetail.core.errors import Error
from dovetail.core.network import Network
from dovetail.core.plan import Plan
from dovetail.core.profile import Layer, LayerTime, ParameterTensor, Profile, exactly
from dovetail.train import agree

from . import reducer
from .observe import ObservedIteration, Observer
from .trials import Trial, Tuning, TuningReport, compete, forward_gain, ready_gaps

log = logging.getLogger("dovetail")


class Tuner:
    """Drives one DDP module from its first iteration to the buckets it keeps."""

    def __init__(self, ddp: TorchDDP, tuning: Tuning) -> None:
        self._ddp, self._tuning = ddp, tuning
        self._group: dist.ProcessGroup = ddp.process_group
        self._device = ddp.device
        ignored = ddp.parameters_to_ignore
        named = [(n, p) for n, p in ddp.module.named_parameters() if p.requires_grad and n not in ignored]
        self._names = [n for n, _ in named]
        self._parameters: list[nn.Parameter] = [p for _, p in named]
        self._baseline = ddp._bucket_config
        self._next: Any = None
        self._observer = Observer(ddp, self._parameters, self._on_iteration)
        self._course = self._phases()
        next(self._course)
        self.report = TuningReport(
            state="measuring",
            workers=dist.get_world_size(self._group),
            tensors=len(named),
            bytes=sum(p.numel() * p.element_size() for p in self._parameters),
        )

    @property
    def active(self) -> bool:
        return self.report.state in ("measuring", "trying") or self._next is not None

    def before_forward(self) -> None:
        if self._next is not None and self._ddp.require_backward_grad_sync and torch.is_grad_enabled():
            # Here and not at the end of backward: the autograd engine still holds the old reducer's callbacks there.
            # torch complains of an unfinished backward pass; a new reducer would hide it.
            self._ddp._check_reducer_finalized()
            self._replace_reducer()
        self._observer.before_forward()

    def after_forward(self) -> None:
        self._observer.after_forward()

    def stop(self, reason: str) -> None:
        """Ends planning; the module goes on with torch's own buckets at once. Not to be called inside backward."""
        self._stop(reason)
        if self._next is not None:
            self._replace_reducer()

    def _replace_reducer(self) -> None:
        reducer.replace(self._ddp, self._next)
        self._next = None

    def _stop(self, reason: str) -> None:
        self._observer.close()
        self._next = self._baseline if self._ddp._bucket_config is not self._baseline else None
        self.report = replace(self.report, state="off", reason=reason, plan=None)
        if dist.get_rank(self._group) == 0:
            log.warning("dovetail: planning is off: %s", reason)

    def _on_iteration(self, iteration: ObservedIteration) -> None:
        self.report = replace(self.report, steps=self.report.steps + 1)
        try:
            self._course.send(iteration)
        except StopIteration:
            self._observer.close()
        except Error as e:
            self._stop(str(e))
        except BaseException as e:  # Ctrl-C, a lost rank: the user gets it and may go on without a plan
            self._stop(f"it was interrupted by {type(e).__name__}")
            raise

    def _phases(self) -> Generator[None, ObservedIteration, None]:
        tuning = self._tuning
        for _ in range(tuning.warmup):
            yield
        self._observer.watch(every_gradient=True)
        seen = []
        for _ in range(tuning.measure):
            seen.append((yield))
        self._observer.watch(every_gradient=False)
        profile = self._profile(seen)
        network = self._network(profile)
        plans = self._plans(profile, network)
        self.report = replace(
            self.report,
            state="trying",
            forward=profile.forward_time(),
            backward=profile.backward_time(),
            network=network,
            notes=self._hint(profile, network),
        )
        kept = yield from compete(
            plans,
            tuning,
            self._group,
            self._device,
            use=lambda i: self._use(plans, i),
            seconds=lambda iteration: iteration.total,
            tell=self._tried,
        )
        self._use(plans, kept)
        trial = self.report.trials[kept]
        self.report = replace(self.report, state="done", kept=trial, plan=plans[kept] if kept else None)
        if dist.get_rank(self._group) == 0:
            log.info("%s", self.report)

    def _tried(self, trials: tuple[Trial, ...]) -> None:
        self.report = replace(self.report, trials=trials)

    def _use(self, plans: list[Plan], which: int) -> None:
        self._next = reducer.bucket_config(plans[which].caps_mib()) if which else self._baseline

    def _profile(self, seen: list[ObservedIteration]) -> Profile:
        """Ready times that all ranks agree on: the first rank's order, as in torch, and the slowest rank's times."""
        ready_times = [dict(s.ready) for s in seen]
        order, usable, gaps = ready_gaps(ready_times, len(self._names), self._group, self._device)
        forward = float(np.quantile([s.forward for s in seen], 0.25))
        forward, *gaps_agreed = agree.largest([forward, *gaps], self._group, self._device)
        ready = np.cumsum(gaps_agreed)
        return Profile(
            name=type(self._ddp.module).__name__,
            device=str(self._device),
            source=f"{len(usable)} training iterations; the layers are taken as one, the tensors apart",
            batch=1,
            layers=(
                Layer(
                    name="model",
                    type=type(self._ddp.module).__name__,
                    parameter_bytes=self.report.bytes,
                    activation_bytes=0,
                    times=(LayerTime(batch=1, forward=exactly(forward), backward=exactly(float(ready[-1]))),),
                ),
            ),
            tensors=tuple(
                ParameterTensor(
                    name=self._names[i],
                    layer=0,
                    bytes=self._parameters[i].numel() * self._parameters[i].element_size(),
                    dtype=str(self._parameters[i].dtype).removeprefix("torch."),
                    ready=float(t),
                )
                for i, t in zip(order, ready, strict=True)
            ),
        )

    def _network(self, profile: Profile) -> Network:
        return measure.network(
            self._group,
            # Beyond 32 MiB bandwidth alone decides, and the last slope of the table gives the rest.
            max_bytes=max(1024, min(profile.parameter_bytes, 32 * 2**20)),
            collectives=("all_reduce",),
            budget=self._tuning.network_seconds,
            device=self._device,
        )

    def _plans(self, profile: Profile, network: Network) -> list[Plan]:
        """The bucketings to try, torch's own first; made by the first rank, lest rounding makes ranks differ."""
        answer: list[Plan] | str = ""
        if dist.get_rank(self._group) == 0:
            try:
                own = _own_policy(self._baseline)
                first = planning.plan(profile, network, policy=own)
                rest = planning.candidates(profile, network, count=self._tuning.candidates)
                answer = [first, *(p for p in rest if p.buckets != first.buckets)][: self._tuning.candidates]
            except Exception as e:  # whatever it is, all ranks must learn of it
                answer = f"no plan could be made: {e}"
        answer = agree.from_first(answer, self._group, self._device)
        if isinstance(answer, str):
            raise Error(answer)
        return answer

    def _hint(self, profile: Profile, network: Network) -> tuple[str, ...]:
        """A note on what wrapping the optimiser too is predicted to gain."""
        notes: tuple[str, ...] = ()
        if dist.get_rank(self._group) == 0:
            with contextlib.suppress(Exception):  # a failed note must not cost the plan
                notes = (forward_gain(profile, network),)
        return agree.from_first(notes, self._group, self._device)


def _own_policy(config: Any) -> str:
    """The name, in planning.policies, of the rule by which torch would make buckets."""
    if config.first_bucket_bytes_cap < config.bucket_bytes_cap:
        return "ddp"
    return f"threshold:{config.bucket_bytes_cap / 2**20:g}"
