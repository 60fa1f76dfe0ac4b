"""Finds the best buckets for a DDP module while it trains.

The whole story is `Tuner._tell`, a generator that is handed one finished step at a time: watch a few steps, measure the
network, plan, try the candidates in turn, keep the fastest. Every step it looks at is a real training step with the
same gradients as any other. Whatever must be the same on all ranks is agreed at the end of a step (see observe.py).
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

from dovetail.core.errors import Error
from dovetail.core.network import Network
from dovetail.core.plan import Plan
from dovetail.core.profile import Layer, LayerTime, ParameterTensor, Profile
from dovetail.train import agree

from . import reducer
from .observe import Observer, Step
from .trial_report import Report, Trial
from .trials import Tuning, compete, exactly, ready_gaps

log = logging.getLogger("dovetail")

Story = Generator[None, Step, None]


class Tuner:
    """Drives one DDP module from its first step to the buckets it keeps."""

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
        self._observer = Observer(ddp, self._parameters, self._on_step)
        self._story = self._tell()
        next(self._story)
        self.report = Report(
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
            self._ddp._check_reducer_finalized()  # an unfinished backward is torch's to complain of, not ours to forget
            self._exchange()
        self._observer.before_forward()

    def after_forward(self) -> None:
        self._observer.after_forward()

    def stop(self, reason: str) -> None:
        """Ends planning; the module goes on with torch's own buckets, at once. Not from inside backward."""
        self._stop(reason)
        if self._next is not None:
            self._exchange()

    def _exchange(self) -> None:
        reducer.exchange(self._ddp, self._next)
        self._next = None

    def _stop(self, reason: str) -> None:
        self._observer.close()
        self._next = self._baseline if self._ddp._bucket_config is not self._baseline else None
        self.report = replace(self.report, state="off", reason=reason, plan=None)
        if dist.get_rank(self._group) == 0:
            log.warning("dovetail: planning is off: %s", reason)

    def _on_step(self, step: Step) -> None:
        self.report = replace(self.report, steps=self.report.steps + 1)
        try:
            self._story.send(step)
        except StopIteration:
            self._observer.close()
        except Error as e:
            self._stop(str(e))
        except BaseException as e:  # Ctrl-C, a lost rank: it goes on to the user, who may go on without a plan
            self._stop(f"it was interrupted by {type(e).__name__}")
            raise

    def _tell(self) -> Story:
        tuning = self._tuning
        for _ in range(tuning.warmup):
            yield
        self._observer.watch(every_gradient=True)
        steps = []
        for _ in range(tuning.measure):
            steps.append((yield))
        self._observer.watch(every_gradient=False)
        profile = self._profile(steps)
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
            seconds=lambda step: step.total,
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

    def _profile(self, steps: list[Step]) -> Profile:
        """Ready times all ranks agree on: the first rank's order, as in torch; the slowest rank's times."""
        seen = [dict(s.ready) for s in steps]
        order, usable, gaps = ready_gaps(seen, len(self._names), self._group, self._device)
        forward = float(np.quantile([s.forward for s in steps], 0.25))
        forward, *gaps_agreed = agree.largest([forward, *gaps], self._group, self._device)
        ready = np.cumsum(gaps_agreed)
        return Profile(
            name=type(self._ddp.module).__name__,
            device=str(self._device),
            source=f"{len(usable)} training steps; the layers are taken as one, the tensors apart",
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
        from dovetail import measure

        return measure.network(
            self._group,
            # Beyond 32 MiB time is bandwidth: the last slope of the table says the rest.
            max_bytes=max(1024, min(profile.parameter_bytes, 32 * 2**20)),
            collectives=("all_reduce",),
            budget=self._tuning.network_seconds,
            device=self._device,
        )

    def _plans(self, profile: Profile, network: Network) -> list[Plan]:
        """The bucketings to try, torch's own first; made by the first rank, so that no rounding can part the ranks."""
        from dovetail import planning

        answer: list[Plan] | str = ""
        if dist.get_rank(self._group) == 0:
            try:
                own = _own_policy(self._baseline)
                first = planning.plan(profile, network, policy=own)
                rest = planning.candidates(profile, network, count=self._tuning.candidates)
                answer = [first, *(p for p in rest if p.buckets != first.buckets)][: self._tuning.candidates]
            except Exception as e:  # whatever it is, all ranks must hear of it
                answer = f"no plan could be made: {e}"
        answer = agree.from_first(answer, self._group, self._device)
        if isinstance(answer, str):
            raise Error(answer)
        return answer

    def _hint(self, profile: Profile, network: Network) -> tuple[str, ...]:
        """What wrapping the optimiser too would gain, as far as can be predicted from here."""
        from .hint import forward_gain

        said: tuple[str, ...] = ()
        if dist.get_rank(self._group) == 0:
            with contextlib.suppress(Exception):  # a remark must not cost anybody the plan
                said = (forward_gain(profile, network),)
        return agree.from_first(said, self._group, self._device)


def _own_policy(config: Any) -> str:
    """The name, in planning.policies, of the rule by which torch would make buckets."""
    if config.first_bucket_bytes_cap < config.bucket_bytes_cap:
        return "ddp"
    return f"threshold:{config.bucket_bytes_cap / 2**20:g}"
