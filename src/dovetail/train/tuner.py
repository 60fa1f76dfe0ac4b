"""Finds the best buckets for a DDP module while it trains.

The whole story is `Tuner._tell`, a generator that is handed one finished step at a time: watch a few steps, measure the
network, plan, try the candidates in turn, keep the fastest. Every step it looks at is a real training step with the
same gradients as any other. Whatever must be the same on all ranks is agreed at the end of a step (see observe.py).
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from dovetail.core.errors import Error
from dovetail.core.network import Network
from dovetail.core.plan import Plan
from dovetail.core.profile import Layer, LayerTime, ParameterTensor, Profile, Quantiles

from . import agree, reducer
from .observe import Observer, Step
from .report import Report, Trial

log = logging.getLogger("dovetail")

Story = Generator[None, Step, None]


@dataclass(frozen=True)
class Tuning:
    """How much effort goes into finding a plan. With the defaults it takes about fifty training steps."""

    warmup: int = 3
    """Steps not looked at: the first ones allocate, compile and fill caches."""
    measure: int = 10
    """Steps whose gradient-ready times are taken."""
    candidates: int = 4
    """Bucketings to try, torch's own among them."""
    settle: int = 2
    """Steps after each exchange that do not count: torch puts buckets into ready order on the second."""
    steps: int = 4
    """Steps that count, per candidate and round."""
    rounds: int = 2
    """Rounds over the candidates, in alternating order, so that drift hits all alike."""
    network_seconds: float = 3.0
    """Time budget for measuring the network, spent once."""
    margin: float = 0.01
    """A plan must be this much faster than torch's own buckets to replace them."""
    drop: float = 0.08
    """A candidate this much slower than the best of the first round does not run in the second."""

    def __post_init__(self) -> None:
        for name, least in (
            ("warmup", 0),
            ("measure", 1),
            ("candidates", 2),
            ("settle", 2),
            ("steps", 1),
            ("rounds", 1),
        ):
            if getattr(self, name) < least:
                raise Error(f"Tuning.{name}: expected at least {least}, got {getattr(self, name)}")


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
        times: list[list[float]] = [[] for _ in plans]
        dropped: set[int] = set()
        for turn in range(tuning.rounds):
            order = [i for i in range(len(plans)) if i not in dropped]
            for i in reversed(order) if turn % 2 else order:
                times[i] += yield from self._try(plans, i)
            best = min(float(np.median(t)) for t in times if t)
            dropped |= {i for i in order if i and np.median(times[i]) > best * (1 + tuning.drop)}
            self.report = replace(self.report, trials=trials(plans, times, dropped))
        self._keep(plans)

    def _try(self, plans: list[Plan], which: int) -> Generator[None, Step, list[float]]:
        """Seconds that steps take with one candidate, the same on all ranks."""
        self._use(plans, which)
        for _ in range(self._tuning.settle):
            yield
        mine = []
        for _ in range(self._tuning.steps):
            mine.append((yield).total)
        # A rank that came late to the step saw the shortest version of it, the one without waiting for itself.
        return agree.smallest(mine, self._group, self._device)

    def _use(self, plans: list[Plan], which: int) -> None:
        self._next = reducer.bucket_config(plans[which].caps_mib()) if which else self._baseline

    def _keep(self, plans: list[Plan]) -> None:
        trials = self.report.trials
        fastest = min(range(len(trials)), key=lambda i: (trials[i].dropped, trials[i].median))
        gain = trials[0].median - trials[fastest].median
        if gain < trials[0].median * self._tuning.margin or gain < noise(trials[0], trials[fastest]):
            fastest = 0
        fastest = agree.from_first(fastest, self._group, self._device)
        self._use(plans, fastest)
        self.report = replace(self.report, state="done", kept=trials[fastest], plan=plans[fastest] if fastest else None)
        if dist.get_rank(self._group) == 0:
            log.info("%s", self.report)

    def _profile(self, steps: list[Step]) -> Profile:
        """Ready times all ranks agree on: the first rank's order, as in torch; the slowest rank's times."""
        order = Counter(tuple(i for i, _ in s.ready) for s in steps).most_common(1)[0][0]
        order = agree.from_first(order, self._group, self._device)
        usable = [dict(s.ready) for s in steps if {i for i, _ in s.ready} == set(order)]
        missing = agree.largest([float(not usable or len(order) != len(self._names))], self._group, self._device)[0]
        if missing:
            raise Error("not every parameter got a gradient in every step: buckets cannot be planned from such steps")
        # Gap by gap, a low quantile: what the machine did besides must not look like computation, or the plan splits
        # too finely. Low quantiles add up to less than any step took, so they only share out a low total.
        stamps = np.maximum.accumulate([[ready[i] for i in order] for ready in usable], axis=1)
        gaps = np.quantile(np.diff(stamps, axis=1, prepend=0.0), 0.25, axis=0)
        gaps *= np.quantile(stamps[:, -1], 0.25) / max(gaps.sum(), 1e-9)
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


def trials(plans: list[Plan], times: list[list[float]], dropped: set[int]) -> tuple[Trial, ...]:
    trials = []
    for i, (plan, seconds) in enumerate(zip(plans, times, strict=True)):
        low, median, high = (float(q) for q in np.quantile(seconds, [0.1, 0.5, 0.9]))
        trials.append(
            Trial(
                plan=plan, baseline=i == 0, median=median, low=low, high=high, steps=len(seconds), dropped=i in dropped
            )
        )
    return tuple(trials)


def noise(one: Trial, other: Trial) -> float:
    """The standard error of the difference of two medians, in seconds.

    For normal noise a tenth and a ninetieth percentile are 2.56 σ apart, and a median varies by 1.25 σ/√n.
    """
    return math.hypot(*(1.25 * (t.high - t.low) / 2.56 / math.sqrt(t.steps) for t in (one, other)))


def exactly(seconds: float) -> Quantiles:
    return Quantiles(median=seconds, low=seconds, high=seconds, samples=1)
