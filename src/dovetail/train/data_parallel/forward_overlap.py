"""overlap="forward": DistributedDataParallel whose communication hides behind the next forward pass too."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from dovetail.core.errors import Error
from dovetail.core.plan import MIB, Plan
from dovetail.train.integrations import keep
from dovetail.train.recording import Recording

from .exchange import GradientExchange
from .forward_tuner import ForwardTuner
from .module import DistributedDataParallel, check_fit, compiled, plan_to_use
from .trials import Tuning, TuningReport

if TYPE_CHECKING:
    from .optimizer import ShardedOptimizer

FIRST_BUCKET, BUCKET = 1 * MIB, 25 * MIB
"""Sizes of buckets in bytes before anything was measured: torch's own."""


class ForwardOverlap(DistributedDataParallel, overlap="forward"):
    """What `dovetail.DistributedDataParallel(model, overlap="forward")` makes.

    Instead of one all-reduce per bucket there are two halves: a reduce-scatter in backward as soon as the bucket's
    gradients are there, and, after each rank has updated its share of the parameters, an all-gather that goes on while
    the next forward pass runs. Needs `dovetail.optimizer`. torch's reducer is not built; names in `state_dict` are
    those of torch's DistributedDataParallel.
    """

    def __init__(
        self,
        module: nn.Module,
        *args: Any,
        plan: Plan | Literal["auto"] | None = "auto",
        tuning: Tuning | None = None,
        overlap: Literal["forward"] | None = "forward",
        **kwargs: Any,
    ) -> None:
        plan = plan_to_use(plan)
        _check_arguments(module, plan, kwargs)
        kwargs.pop("static_graph", None)  # a promise to torch's reducer, which is not built here
        self._reduced, self._reduced_names = None, None
        TorchDDP.__init__(self, module, *args, **kwargs)
        keep(self.process_group)
        self._tuner, self._recorder = None, None
        self._optimizer: weakref.ref[ShardedOptimizer] | None = None
        parameters, sparse = self._build_params_for_reducer()
        names = {id(p): n for n, p in module.named_parameters()}
        named = [(names[id(p)], p) for p in parameters]
        _check_parameters(named, sparse)
        _check_agreement(
            (plan, tuning or Tuning(), _cap(kwargs), bool(self.find_unused_parameters)), self.process_group
        )
        order = list(reversed(range(len(named))))  # as torch assumes until backward has shown its order
        cuts = by_size([_size(named[i][1]) for i in order], _cap(kwargs))
        if isinstance(plan, Plan):
            order, cuts = _stored(plan, named)
        self.exchange = GradientExchange(
            named,
            self.process_group,
            name=type(module).__name__,
            find_unused=bool(self.find_unused_parameters),
            order=order,
            cuts=cuts,
        )
        self._plans = plan == "auto" and self.exchange.ranks > 1
        self._tuning = tuning or Tuning()
        reason = "the optimiser is not wrapped with dovetail.optimizer yet" if self._plans else "planning is off"
        stored = plan if isinstance(plan, Plan) else None
        self._report = TuningReport(state="off", overlap="forward", reason=reason, plan=stored)

    @property
    def optimizer(self) -> ShardedOptimizer | None:
        """The optimiser that updates this model, once it was wrapped with `dovetail.optimizer`."""
        return self._optimizer() if self._optimizer is not None else None

    def attach(self, optimizer: ShardedOptimizer) -> None:
        """Called by `dovetail.optimizer`; planning begins with the next iteration."""
        self._optimizer = weakref.ref(optimizer)
        if self._plans:
            name = type(self.module).__name__
            self.exchange.tuner = ForwardTuner(self.exchange, optimizer, self.process_group, name, self._tuning)

    @property
    def report(self) -> TuningReport:
        return self.exchange.tuner.report if self.exchange.tuner is not None else self._report

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        synchronises = torch.is_grad_enabled() and bool(self.require_backward_grad_sync)
        if synchronises:
            self.exchange.arm()
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        if self.device_ids:  # not tested on the hardware at hand
            moved, named = self.to_kwargs(inputs, kwargs, self.device_ids[0])
            inputs, kwargs = moved[0], named[0]
        began = time.perf_counter()
        output = self._run_ddp_forward(*inputs, **kwargs)
        if synchronises:
            self.exchange.forward_span = (began, time.perf_counter())
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        self.require_forward_param_sync = synchronises
        return output

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        raise Error("overlap: a communication hook reduces whole gradients, which overlap='forward' never has")

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self.register_comm_hook(None, lambda *_: None)

    def join(self, *_: Any, **__: Any) -> Any:
        raise Error(
            "overlap: ranks with uneven inputs (`join`) do not iterate together; give every rank as many batches"
        )

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Records the iterations inside the block as a Timeline of this rank: `recording.timeline()`.

        Each iteration gives spans of its forward pass and its waits for parameters, its backward pass and the
        optimiser, and one span for each reduce-scatter and all-gather. Recordings can be nested: an inner one has its
        own iterations, the outer one has all.
        """
        tuner = self.exchange.tuner
        if tuner is not None and tuner.active:
            raise Error("record: planning is still going on; record when `report.state` is 'done', or use plan=None")
        with self.exchange.recorder.record() as recording:
            yield recording

    def __getstate__(self) -> dict[str, Any]:
        raise Error(
            "overlap: copy or store `model.module` or `model.state_dict()`; the wrapper itself cannot be copied"
        )

    def _ddp_init_helper(self, *_: Any) -> None:
        """Takes the place of the method that builds torch's reducer: there is none here."""
        self.reducer = None  # type: ignore[assignment]
        self._passing_sync_batchnorm_handle(self.module)


def by_size(sizes: list[int], cap: int) -> list[int]:
    """Ends of buckets of about `cap` bytes each; the first is smaller, so that communication starts early."""
    cuts, held, limit = [], 0, min(FIRST_BUCKET, cap)
    for end, size in enumerate(sizes, 1):
        held += size
        if held >= limit or end == len(sizes):
            cuts.append(end)
            held, limit = 0, cap
    return cuts


def _cap(kwargs: dict[str, Any]) -> int:
    given = kwargs.get("bucket_cap_mb")
    return BUCKET if given is None else max(1, int(given * MIB))


def _size(parameter: nn.Parameter) -> int:
    return parameter.numel() * parameter.element_size()


def _stored(plan: Plan, named: list[tuple[str, nn.Parameter]]) -> tuple[list[int], list[int]]:
    """(indices of the parameters in the order of a stored plan, ends of its buckets)."""
    check_fit(plan, dict(named))
    index = {name: i for i, (name, _) in enumerate(named)}
    return [index[name] for name in plan.tensors], [b.stop for b in plan.buckets]


def _check_arguments(module: nn.Module, plan: object, kwargs: dict[str, Any]) -> None:
    if isinstance(plan, Plan):
        if plan.overlap != "forward":
            raise Error(f"plan for {plan.profile!r}: expected one from `dovetail plan --overlap forward`")
        if kwargs.get("bucket_cap_mb") is not None:
            raise Error("bucket_cap_mb: the plan already says how large buckets are; give one or the other")
    elif plan not in ("auto", None):
        raise Error(f"plan: expected 'auto', a Plan or None, got {plan!r}")
    refused = {
        "mixed_precision": "DDP's own mixed precision (autocast works)",
        "delay_all_reduce_named_params": "delayed all-reduces",
        "bucket_cap_mb_list": "a list of bucket caps",
        "device_mesh": "a device mesh",
    }
    for keyword, what in refused.items():
        if kwargs.get(keyword) is not None:
            raise Error(f"overlap: {keyword}: {what} cannot be combined with overlap='forward'")
    if compiled(module):
        raise Error("overlap: the module is compiled, and compiled code does not wait for parameters on their way")
    if any(isinstance(m, torch.jit.ScriptModule) for m in module.modules()):
        raise Error("overlap: the module is scripted, and scripted code does not wait for parameters on their way")
    if any(hasattr(p, "_in_backward_optimizers") for p in module.parameters()):
        raise Error("overlap: optimisers that run inside backward need whole gradients")


def _check_agreement(mine: object, group: dist.ProcessGroup) -> None:
    """Refuses arguments that differ among ranks: these would wait for each other for ever."""
    given: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(given, mine, group=group)
    for rank, theirs in enumerate(given):
        if theirs != given[0]:
            raise Error(
                "plan, tuning, bucket_cap_mb, find_unused_parameters: expected the same on all ranks, but rank "
                f"{rank} was given others than rank 0"
            )


def _check_parameters(named: list[tuple[str, nn.Parameter]], sparse: list[bool]) -> None:
    first = named[0][1]
    for (name, parameter), is_sparse in zip(named, sparse, strict=True):
        if is_sparse:
            raise Error(f"overlap: the gradient of {name!r} is sparse, and buckets are dense")
        if parameter.dtype != first.dtype:
            raise Error(f"overlap: expected one dtype, got {first.dtype} and {parameter.dtype} ({name!r})")
        if parameter.device != first.device:
            raise Error(f"overlap: expected one device, got {first.device} and {parameter.device} ({name!r})")
        if type(parameter) is not nn.Parameter:
            raise Error(f"overlap: {name!r} is a {type(parameter).__qualname__}; expected a plain torch.nn.Parameter")
