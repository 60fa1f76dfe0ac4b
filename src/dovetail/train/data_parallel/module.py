"""DistributedDataParallel that plans its own gradient merging."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from dovetail.core import files
from dovetail.core.errors import Error
from dovetail.core.plan import Plan
from dovetail.train.integrations import check_environment, keep
from dovetail.train.recording import Recording

from . import reducer
from .observe import BucketRecorder
from .trials import Tuning, TuningReport
from .tuner import Tuner

log = logging.getLogger("dovetail")

PLAN_VARIABLE = "DOVETAIL_PLAN"
"""Environment variable that replaces `plan="auto"`: the path of a stored plan, or "off"."""

_overlapping: dict[str, type[DistributedDataParallel]] = {}
"""The class for each value of `overlap`, entered by the class itself when its module is imported."""


class DistributedDataParallel(TorchDDP):
    """torch's DistributedDataParallel, with buckets that fit the model and the network.

    In the first iterations it runs as torch's does and takes the time at which each gradient becomes ready. Then, once,
    it measures what an all-reduce costs on this process group, plans where to cut the stream of gradients into buckets,
    tries the most promising bucketings for a few real iterations each beside torch's own, and keeps the fastest. From
    then on it is torch's reducer with other bucket caps: no hook and no thread of dovetail's is left on the path of an
    iteration, only one `if`. Gradients are those of torch's DDP throughout, `state_dict` too. `explain()` reports what
    was measured, tried and kept.

    Where planning cannot work (comm hooks, unused parameters, several dtypes, compiled modules, …) the module behaves
    as torch's does and logs the reason in one line.

    Args:
        module: as for torch's DistributedDataParallel.
        *args: as for torch's.
        **kwargs: as for torch's.
        plan: "auto" to plan while training; a stored Plan to use it from the first iteration on; None for torch's
            own buckets. "auto" is replaced by the plan file that the environment variable DOVETAIL_PLAN names, if set.
        tuning: how many iterations planning may take.
        overlap: "forward" hides communication behind the next forward pass too, as far as it does not fit behind
            backward; needs `dovetail.optimizer` around the optimiser. See forward_overlap.py.
    """

    def __new__(cls, *_: Any, overlap: Literal["forward"] | None = None, **__: Any) -> DistributedDataParallel:
        if overlap is None:
            return super().__new__(cls)
        if not isinstance(overlap, str) or overlap not in _overlapping:
            raise Error(f"overlap: expected 'forward' or None, got {overlap!r}")
        kind = _overlapping[overlap]
        if issubclass(cls, kind):
            return super().__new__(cls)
        if not issubclass(kind, cls):  # Python would not call __init__ of an object that is no instance of `cls`
            raise Error(
                f"overlap: expected dovetail.DistributedDataParallel itself, got its subclass {cls.__qualname__}"
            )
        return super().__new__(kind)

    def __init_subclass__(cls, overlap: str | None = None, **kwargs: Any) -> None:
        """`class X(DistributedDataParallel, overlap="…")` is the class that this value of `overlap` makes."""
        super().__init_subclass__(**kwargs)
        if overlap is not None:
            _overlapping[overlap] = cls

    def __init__(
        self,
        module: nn.Module,
        *args: Any,
        plan: Plan | Literal["auto"] | None = "auto",
        tuning: Tuning | None = None,
        overlap: Literal["forward"] | None = None,
        **kwargs: Any,
    ) -> None:
        plan = plan_to_use(plan)
        if isinstance(plan, Plan):
            kwargs |= _keywords(plan, module, kwargs)
        elif plan not in ("auto", None):
            raise Error(f"plan: expected 'auto', a Plan or None, got {plan!r}")
        # Set before torch's constructor, which asks for the parameters to reduce.
        self._tuner: Tuner | None = None
        self._recorder: BucketRecorder | None = None
        self._reduced: tuple[list[nn.Parameter], list[bool]] | None = None
        self._reduced_names: dict[int, str] | None = None
        super().__init__(module, *args, **kwargs)
        keep(self.process_group)
        kept = plan if isinstance(plan, Plan) else None
        self._report = TuningReport(state="off", reason="planning was switched off", plan=kept)
        reason = _agreed_reason(self, plan, tuning or Tuning())
        if plan == "auto":
            if reason is None:
                self._tuner = Tuner(self, tuning or Tuning())
            else:
                self._give_up(reason)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._tuner is None and self._recorder is None:
            return super().forward(*inputs, **kwargs)
        return self._watched_forward(*inputs, **kwargs)

    def explain(self) -> str:
        """A few lines on what was measured, what was tried and what was kept."""
        return str(self.report)

    @property
    def report(self) -> TuningReport:
        """What `explain()` prints, as data."""
        return self._tuner.report if self._tuner is not None else self._report

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Records the iterations inside the block as a Timeline of this rank: `recording.timeline()`.

        Meanwhile buckets are reduced through a hook that takes their times; gradients stay the same. All ranks must
        record the same iterations. The first two settle and are not in the timeline. Recordings can be nested: an inner
        one has its own iterations, the outer one has all, and only the outermost loses two.
        """
        if self._tuner is not None and self._tuner.active:
            raise Error("record: planning is still going on; record when `report.state` is 'done', or use plan=None")
        if self._recorder is None:
            if self._comm_hooks:
                raise Error("record: needs the module's communication hook, which is in use")
            if reason := _unplannable(self):
                raise Error(f"record: {reason}")
            self._recorder = BucketRecorder(self)
        recorder = self._recorder
        try:
            with recorder.record() as recording:
                yield recording
        finally:
            if not recorder.active:
                self._recorder = None
                recorder.close()

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        self._stop_planning("a communication hook is in charge of the gradients")
        super().register_comm_hook(state, hook)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self._stop_planning("a communication hook is in charge of the gradients")
        super()._register_builtin_comm_hook(comm_hook_type)

    def _register_fused_optim(self, *args: Any, **kwargs: Any) -> None:
        self._stop_planning("an optimiser is fused into the reduction of gradients")
        super()._register_fused_optim(*args, **kwargs)

    def join_hook(self, **kwargs: Any) -> Any:
        # All ranks come here together when they enter `join`; later, one without inputs would never learn of it.
        self._stop_planning("ranks with uneven inputs (`join`) do not iterate together")
        return super().join_hook(**kwargs)

    def _update_process_group(self, new_process_group: Any) -> None:
        self._stop_planning("the process group has changed")
        super()._update_process_group(new_process_group)

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        # torch asks once, when the module is wrapped; parameters frozen or unfrozen later make no difference.
        if self._reduced is None:
            self._reduced = super()._build_params_for_reducer()
        return self._reduced

    def _build_debug_param_to_name_mapping(self, parameters: list[nn.Parameter]) -> dict[int, str]:
        if self._reduced_names is None:
            self._reduced_names = super()._build_debug_param_to_name_mapping(parameters)
        return self._reduced_names

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle is a module without a tuner; it keeps the bucket caps of the moment.
        state: dict[str, Any] = super().__getstate__()
        off = TuningReport(state="off", reason="this is a copy")
        fresh = dict.fromkeys(("_tuner", "_recorder", "_reduced", "_reduced_names"))
        return {**state, **fresh, "_report": off}

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def _watched_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        watcher = self._recorder or self._tuner
        assert watcher is not None
        watcher.before_forward()
        output = super().forward(*inputs, **kwargs)
        watcher.after_forward()
        if self._tuner is not None and not self._tuner.active:
            self._report, self._tuner = self._tuner.report, None
        return output

    def _stop_planning(self, reason: str) -> None:
        if self._tuner is not None:
            self._tuner.stop(reason)
            self._report, self._tuner = self._tuner.report, None

    def _give_up(self, reason: str) -> None:
        self._report = TuningReport(state="off", reason=reason)
        if dist.get_rank(self.process_group) == 0:
            log.warning("dovetail: torch's own buckets stay: %s", reason)


def plan_to_use(plan: Plan | Literal["auto"] | None) -> Plan | Literal["auto"] | None:
    """The plan that was given, or what the environment names in place of "auto"."""
    named = os.environ.get(PLAN_VARIABLE, "")
    if plan != "auto" or not named:
        return plan
    return None if named == "off" else files.read(named, Plan)


def check_fit(plan: Plan, trained: dict[str, nn.Parameter]) -> None:
    """Refuses a stored plan whose tensors are not those of the model."""
    if set(trained) != set(plan.tensors):
        odd = sorted(set(trained) ^ set(plan.tensors))[0]
        where = "the model" if odd in trained else "the plan"
        raise Error(f"plan for {plan.profile!r} does not fit this model: parameter {odd!r} is only in {where}")
    size = sum(p.numel() * p.element_size() for p in trained.values())
    if size != plan.bytes:
        raise Error(
            f"plan for {plan.profile!r} does not fit this model: expected {plan.bytes} bytes of gradients, got {size}"
        )


def _keywords(plan: Plan, module: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    """torch's keyword arguments for the buckets of a stored plan."""
    for keyword in ("bucket_cap_mb", "bucket_cap_mb_list"):
        if given.get(keyword) is not None:
            raise Error(f"{keyword}: the plan already says how large buckets are; give one or the other")
    check_environment()
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    check_fit(plan, {n: p for n, p in module.named_parameters() if p.requires_grad and n not in ignored})
    return plan.ddp_kwargs()


def _agreed_reason(ddp: TorchDDP, plan: Plan | str | None, tuning: Tuning) -> str | None:
    """The reason why no rank plans, or None if all do: ranks with different arguments would wait for each other."""
    caps = tuple(plan.caps_mib()) if isinstance(plan, Plan) else None
    reason = _unplannable(ddp)
    if plan != "auto":
        reason = "planning is switched off on another rank"
    elif ddp._bucket_config.has_custom_per_bucket_caps:
        reason = "bucket_cap_mb_list already says where to cut"
    given: list[Any] = [None] * dist.get_world_size(ddp.process_group)
    dist.all_gather_object(given, (caps, tuning, reason), group=ddp.process_group)
    for rank, (their_caps, their_tuning, _) in enumerate(given):
        if (their_caps, their_tuning) != given[0][:2]:
            raise Error(f"plan, tuning: expected the same on all ranks, but rank {rank} was given others than rank 0")
    return next((r for _, _, r in given if r is not None), None)


def _unplannable(ddp: TorchDDP) -> str | None:
    """The reason why buckets of this module cannot be planned, or None."""
    if reason := reducer.unsupported():
        return reason
    trained = [p for p in ddp._module_parameters if p.requires_grad]
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in trained})
    checks: list[tuple[bool, str]] = [
        (dist.get_world_size(ddp.process_group) < 2, "one rank has nobody to communicate with"),
        (ddp._use_python_reducer, "compiled autograd brings its own reducer"),
        (
            ddp._delay_all_reduce_all_params or bool(ddp._delay_all_reduce_params),
            "some all-reduces are delayed by request",
        ),
        (ddp.mixed_precision is not None, "DDP's own mixed precision reduces through a hook"),
        (
            bool(ddp.find_unused_parameters) and not ddp.static_graph,
            "with find_unused_parameters torch never puts buckets into ready order (with static_graph=True it does)",
        ),
        (len(dtypes) > 1, f"the parameters have several dtypes ({', '.join(dtypes)}), and torch packs each apart"),
        (len({p.device for p in trained}) > 1, "the parameters are on several devices"),
        (any(ddp._build_params_for_reducer()[1]), "some gradients are sparse"),
        (any(hasattr(p, "_in_backward_optimizers") for p in trained), "optimisers run inside backward"),
        (compiled(ddp.module), "the module is compiled, and torch.compile cuts its graphs at torch's own buckets"),
    ]
    return next((reason for holds, reason in checks if holds), None)


def compiled(module: nn.Module) -> bool:
    """Whether the module or one inside it went through torch.compile."""
    return any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None for m in module.modules())
