"""DistributedDataParallel that plans its own gradient merging."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from dovetail.core.errors import Error
from dovetail.core.network import Precision
from dovetail.core.plan import Bucket, Plan
from dovetail.train.integrations import end_safely
from dovetail.train.recording import Recording

from . import eligibility, reducer
from .observe import BucketRecorder
from .rank_watch import RankWatch
from .replaceable import ReplaceableDDP
from .sharded.compiled import begin_pass, being_compiled
from .sharded.exchange import GradientExchange
from .sharded.reducer_surface import ExchangeAfterJoin, convert, explained, stand_ins
from .sharded.shard_layout import plan_of
from .tuning.look_back import LookBack
from .tuning.trials import Tuning
from .tuning.tuner import Tuner
from .tuning.tuning_report import TuningReport

if TYPE_CHECKING:
    from .sharded.optimizer import ShardedOptimizer

log = logging.getLogger("dovetail")


class DistributedDataParallel(ReplaceableDDP):
    """torch's DistributedDataParallel, with buckets that fit the model and the network.

    In the first iterations it runs as torch's does and takes the time at which each gradient becomes ready. Then, once,
    it measures what an all-reduce costs on this process group, plans where to cut the stream of gradients into buckets,
    tries the most promising bucketings for a few real iterations each beside torch's own, and keeps the fastest. From
    then on it is torch's reducer with other bucket caps: no hook and no thread of dovetail's is left on the path of an
    iteration, only one `if`, and from time to time a look for slow ranks. Gradients are those of torch's DDP
    throughout, `state_dict` too. `explain()` reports what was measured, tried and kept, and which ranks are slow.

    Communication hooks stay in charge of what travels, in planned buckets whose cost is the hook's own. Unused
    parameters, several dtypes or devices, sparse gradients and compiled modules are planned with as well. Where there
    is nothing to plan (one rank; bucket caps that were given; …) the module behaves as torch's does and logs the reason
    in one line.

    Args:
        module: as for torch's DistributedDataParallel.
        *args: as for torch's.
        **kwargs: as for torch's.
        plan: "auto" to plan while training; a stored Plan to use it from the first iteration on; None for torch's
            own buckets. "auto" is replaced by the plan file that the environment variable DOVETAIL_PLAN names, if set.
        tuning: how many iterations planning may take.
        memory: with `dovetail.optimizer`: "time" takes the fastest plan; "shard" prefers buckets of which every rank
            updates 1/n, so that the optimiser's state takes 1/n of the memory, and never keeps it whole.
        precision: what may travel in place of full gradients: "bf16", "int8", or "auto" for either, wherever it is
            measured to be faster; "full" for nothing else. Needs `dovetail.optimizer`. See docs/precision.md.
        overlap: "forward" says that `dovetail.optimizer` will follow, which is what hides communication behind the
            next forward pass too; what that cannot work with is then refused here.
    """

    def __init__(
        self,
        module: nn.Module,
        *args: Any,
        plan: Plan | Literal["auto"] | None = "auto",
        tuning: Tuning | None = None,
        memory: Literal["time", "shard"] = "time",
        precision: Precision | Literal["auto"] = "full",
        overlap: Literal["forward"] | None = None,
        **kwargs: Any,
    ) -> None:
        eligibility.check_words(overlap=overlap, memory=memory, precision=precision)
        self._arguments = {k: v for k, v in kwargs.items() if k in eligibility.ARGUMENTS}
        plan = eligibility.plan_to_use(plan)
        if isinstance(plan, Plan):
            kwargs |= eligibility.ddp_keywords(plan, module, kwargs)
        elif plan not in ("auto", None):
            raise Error(f"plan: expected 'auto', a Plan or None, got {plan!r}")
        if overlap is not None:
            eligibility.check_arguments(module, self._arguments)
        self.memory, self.precision = memory, precision
        self._plan, self._tuning = plan, tuning or Tuning()
        # Set before torch's constructor, which asks for the parameters to reduce.
        self._tuner: Tuner | None = None
        self._look_back: LookBack | None = None
        self._recorder: BucketRecorder | None = None
        self._rank_watch: RankWatch | None = None
        self.exchange: GradientExchange | None = None
        """What moves gradients and parameters once `dovetail.optimizer` was called; None before."""
        self.builtin_comm_hook: Any = None
        """torch's constant for a built-in communication hook that was registered."""
        self._optimizer: weakref.ref[ShardedOptimizer] | None = None
        self.bucket_members: reducer.Members | None = None
        """Indices of the parameters of every bucket, where caps do not say which they are."""
        super().__init__(module, *args, **kwargs)
        self._own_buckets = reducer.current(self)
        if isinstance(plan, Plan) and plan.overlap == "backward":
            self.bucket_bytes_cap = eligibility.BUCKET  # torch.compile cuts graphs by it, and takes no less than 1 MiB
            if not reducer.capped(self):
                reducer.replace(self, reducer.planned(self, plan))
        end_safely(self)
        kept = plan if isinstance(plan, Plan) else None
        why = "planning was switched off"
        if kept is not None and kept.overlap == "forward":
            kept, why = None, "the given plan takes effect with dovetail.optimizer"
        self._report = TuningReport(state="off", reason=why, plan=kept)
        reason = eligibility.agreed_reason(self, plan, self._tuning)
        if overlap is not None:
            named = self.reduced_parameters()
            eligibility.check_parameters(named, self._build_params_for_reducer()[1], precision)
            waiting = "the optimiser is not wrapped with dovetail.optimizer yet"
            self._report = TuningReport(state="off", reason=waiting, plan=kept)
        elif plan == "auto":
            if reason is None:
                self._tuner = Tuner(self, self._tuning)
            else:
                self._give_up(reason)

    @property
    def optimizer(self) -> ShardedOptimizer | None:
        """The optimiser that updates this model, or the first of several, once `dovetail.optimizer` was called."""
        return self._optimizer() if self._optimizer is not None else None

    def open_exchange(self) -> GradientExchange:
        """Called by `dovetail.optimizer`: from now on gradients travel in buckets each of its own kind."""
        eligibility.check_arguments(self.module, self._arguments)
        if reducer.comm_hook(self) is not None:
            raise Error("overlap: a communication hook reduces whole gradients; use one or the other")
        # With a static graph torch finds out by itself which parameters are not used.
        named, find_unused = self.reduced_parameters(), bool(self.find_unused_parameters or self.static_graph)
        eligibility.check_parameters(named, self._build_params_for_reducer()[1], self.precision)
        cap = eligibility.cap_of(self._arguments)
        eligibility.check_agreement(
            (self._plan, self._tuning, self.memory, self.precision, cap, find_unused), self.process_group
        )
        if self._tuner is not None:
            self._tuner.withdraw()
        self._tuner = self._look_back = None
        order, buckets = eligibility.first_buckets(named, self._plan, cap)
        self.exchange = GradientExchange(
            named,
            self.process_group,
            name=type(self.module).__name__,
            find_unused=find_unused,
            order=order,
            buckets=buckets,
        )
        if isinstance(self._plan, Plan) and self._plan.overlap == "backward":
            self.exchange.active = False
        else:
            self._drop_reducer()
        return self.exchange

    def attach(self, optimizer: ShardedOptimizer) -> None:
        """Called by `dovetail.optimizer` at its end; planning begins with the next iteration."""
        assert self.exchange is not None
        if self.optimizer is not None:
            return  # another one of the same model
        self._optimizer = weakref.ref(optimizer)
        plan = self._plan if isinstance(self._plan, Plan) else None
        self._report = TuningReport(state="off", overlap="forward", reason="planning is off", plan=plan)
        if self._plan == "auto" and self.exchange.ranks > 1:
            self._tuner = Tuner(self, self._tuning)
            self.exchange.on_step = self._after_step

    def use_reducer(self, buckets: reducer.ReducerBuckets | None) -> None:
        """Puts torch's reducer in charge, with these buckets or with its own. All ranks call it together.

        Called between two iterations of a model with an attached optimiser, whose state becomes whole on every rank.
        """
        exchange, optimizer = self.exchange, self.optimizer
        assert exchange is not None and optimizer is not None
        if exchange.active:
            order = [i for bucket in exchange.buckets for i in bucket.members]
            named = [(slot.name, slot.parameter) for slot in exchange.slots]
            whole = eligibility.by_size(named, order, eligibility.BUCKET, "whole")
            optimizer.move(order, whole, active=False)
        reducer.replace(self, buckets or self._own_buckets)

    def use_exchange(self, order: list[int], buckets: Sequence[Bucket]) -> None:
        """Puts the exchange in charge, with these buckets. All ranks call it together, between two iterations."""
        exchange, optimizer = self.exchange, self.optimizer
        assert exchange is not None and optimizer is not None
        if not exchange.active:
            self._drop_reducer()
        optimizer.move(order, buckets)

    def _drop_reducer(self) -> None:
        """Takes torch's reducer, its hooks and its buckets away; what others ask of it is answered in its place."""
        assert self.exchange is not None and self.logger is not None
        self._remove_autograd_hooks()
        self.reducer, self.logger = stand_ins(self.exchange, self.logger._get_ddp_logging_data())  # type: ignore[assignment]

    # torch.compile skips the frames of torch's own wrapper and compiles the module inside; so it must be with this one.
    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.exchange is not None and self.exchange.active:
            return self._exchanged_forward(*inputs, **kwargs)
        watched = self._recorder is not None or (self._tuner is not None and self.exchange is None)
        if not watched and not self._looks_back() and not self._looks_at_ranks():
            return super().forward(*inputs, **kwargs)
        return self._watched_forward(*inputs, **kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _looks_back(self) -> bool:
        """Begins a look back at the kept plan if it is time."""
        if self._look_back is None or not self._look_back.due(self.reducer):
            return False
        self._tuner, self._look_back = Tuner(self, self._tuning, self._look_back, self._report), None
        return True

    def explain(self) -> str:
        """A few lines on what was measured, what was tried and what was kept."""
        lines = [str(self.report), *(explained(self.exchange) if self.exchange is not None else ())]
        return "\n".join(lines)

    @property
    def report(self) -> TuningReport:
        """What `explain()` prints, as data."""
        report = self._tuner.report if self._tuner is not None else self._report
        newest = self._rank_watch.last if self._rank_watch is not None else None
        return report if newest is None else replace(report, ranks=newest)

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Records the iterations inside the block as a Timeline of this rank: `recording.timeline()`.

        Where torch's reducer is in charge, buckets are meanwhile reduced through a hook that takes their times;
        gradients stay the same. All ranks must record the same iterations. The first two settle and are not in the
        timeline. With `dovetail.optimizer` there is one span for each all-reduce, reduce-scatter and all-gather, and
        waits for parameters have spans of their own. Recordings can be nested: an inner one has its own iterations, the
        outer one has all, and only the outermost loses any.
        """
        if self._tuner is not None and self._tuner.looks_back:
            self._tuner.leave_be(later=True)  # what is recorded are the buckets that are kept
        if self._tuner is not None and self._tuner.active:
            raise Error("record: planning is still going on; record when `report.state` is 'done', or use plan=None")
        if self.exchange is not None and self.exchange.active:
            with self.exchange.recorder.record() as recording:
                yield recording
            return
        if self._recorder is None:
            if reducer.comm_hook(self) is not None:
                raise Error("record: needs the module's communication hook, which is in use")
            if reason := eligibility.unrecordable(self):
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
        self._refuse_with_exchange("a communication hook reduces whole gradients; use one or the other")
        super().register_comm_hook(state, hook)
        self._hooked()

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self._refuse_with_exchange("a communication hook reduces whole gradients; use one or the other")
        super()._register_builtin_comm_hook(comm_hook_type)
        self.builtin_comm_hook = comm_hook_type
        self._hooked()

    def _hooked(self) -> None:
        self._look_back = None  # what the plan has gained, it has gained without the hook
        if self._tuner is not None:
            self._tuner.hooked()

    def join(self, divide_by_initial_world_size: bool = True, enable: bool = True, *args: Any, **kwargs: Any) -> Any:
        if not enable and self.exchange is not None:
            return nullcontext()  # torch's does nothing either
        return super().join(divide_by_initial_world_size, enable, *args, **kwargs)

    def _refuse_with_exchange(self, why: str) -> None:
        if self.exchange is not None:
            raise Error(f"overlap: {why}")

    def join_hook(self, **kwargs: Any) -> Any:
        # All ranks come here together when they enter `join`; later, one without inputs would never learn of it.
        self._stop_planning("ranks with uneven inputs (`join`) do not iterate together")
        exchange = self.exchange
        if exchange is None or not exchange.active:
            return super().join_hook(**kwargs)
        order, buckets = plan_of(exchange.buckets)
        self.use_reducer(None)
        return ExchangeAfterJoin(super().join_hook(**kwargs), lambda: self.use_exchange(order, buckets))

    def _update_process_group(self, new_process_group: Any) -> None:
        self._refuse_with_exchange("its process group cannot change; wrap the model anew in the new one")
        self._stop_planning("the process group has changed")
        super()._update_process_group(new_process_group)

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle is a module without a tuner and without an optimiser: torch's reducer is in charge of it,
        # with the bucket caps of the moment.
        state: dict[str, Any] = super().__getstate__()
        off = TuningReport(state="off", reason="this is a copy")
        own = ("_tuner", "_look_back", "_recorder", "_rank_watch", "bucket_members", "exchange", "_optimizer")
        return {**state, **dict.fromkeys(own), "_report": off}

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        # What `to`, `half`, `cuda`, `share_memory`, … do.
        return super()._apply(fn, recurse) if self.exchange is None else convert(self, self.exchange, fn)

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def _exchanged_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        exchange = self.exchange
        assert exchange is not None
        synchronises = torch.is_grad_enabled() and bool(self.require_backward_grad_sync)
        stamp = exchange.clock.stamp if synchronises and exchange.timed else lambda: None
        called = stamp()
        begin_pass(exchange, self.module, synchronises, being_compiled(), self._looks_at_ranks)
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        if self.device_ids:
            moved, named = self.to_kwargs(inputs, kwargs, self.device_ids[0])
            inputs, kwargs = moved[0], named[0]
        began = stamp()
        output = self._run_ddp_forward(*inputs, **kwargs)
        if called is not None:
            exchange.stamps.called, exchange.stamps.forward = called, (began, stamp())
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        self.require_forward_param_sync = synchronises
        return output

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def _watched_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self._before_forward()
        output = super().forward(*inputs, **kwargs)
        self._after_forward()
        return output

    @property
    def _watcher(self) -> BucketRecorder | Tuner | RankWatch | None:
        # With an attached optimiser a tuner has nothing to do around a forward pass.
        return self._recorder or (self._tuner if self.exchange is None else None) or self._rank_watch

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_forward(self) -> None:
        if (watcher := self._watcher) is not None:
            watcher.before_forward()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after_forward(self) -> None:
        if (watcher := self._watcher) is not None:
            watcher.after_forward()
        if self._tuner is not None and not self._tuner.active and self.exchange is None:
            self._report, self._look_back, self._tuner = self._tuner.report, self._tuner.look_back, None
            self._watch_ranks()

    def _after_step(self) -> None:
        """Called at the end of every `optimizer.step()` of dovetail's, on all ranks."""
        if self._tuner is not None:
            self._tuner.after_step()
        if self._rank_watch is not None:
            self._rank_watch.after_step()
        self._watch_ranks()

    def _watch_ranks(self) -> None:
        """Once planning is over, begins to look for slow ranks from time to time."""
        if self._rank_watch is None and self.report.state == "done":
            self._rank_watch = RankWatch(self)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _looks_at_ranks(self) -> bool:
        return self._rank_watch is not None and self._rank_watch.due()

    def _stop_planning(self, reason: str) -> None:
        self._look_back = None
        if self._rank_watch is not None:
            self._rank_watch.close()
            self._rank_watch = None
        if self._tuner is not None:
            self._tuner.stop(reason)
            self._report, self._tuner = self._tuner.report, None

    def _give_up(self, reason: str) -> None:
        self._report = TuningReport(state="off", reason=reason)
        if dist.get_rank(self.process_group) == 0:
            log.warning("dovetail: torch's own buckets stay: %s", reason)
