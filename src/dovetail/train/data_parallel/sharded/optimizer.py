"""An optimiser of which every rank runs its share: the second line.

    model = dovetail.DistributedDataParallel(model)
    optimizer = dovetail.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model)

The torch optimiser keeps its parameter groups, and changes to them (by a learning-rate scheduler) take effect. Its
arithmetic runs on this rank's pieces of the parameters: of a split bucket 1/n, so that state takes 1/n of the memory,
of a whole bucket all.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from dovetail.core.errors import Error
from dovetail.core.plan import Bucket

from ..module import DistributedDataParallel
from . import optimizer_state as states
from .exchange import GradientExchange
from .shard_layout import ShardedBucket, ShardPiece, in_memory_order

ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
"""Optimisers of torch.optim in which an element's new value depends on that element's gradients only."""

_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
GRADIENT = "dovetail gradient"
PATIENCE = 20.0
"""Seconds after which a rank that waits in state_dict() logs what it waits for."""

log = logging.getLogger("dovetail")


def optimizer(optimizer: Optimizer, model: Any, *, elementwise: bool = False) -> ShardedOptimizer:
    """Lets communication hide behind the next forward pass too. All ranks call it at the same point.

    From here on gradients travel in buckets each of its own kind. `step()` waits for the reduced gradients bucket by
    bucket, and the torch optimiser's own code updates what this rank has of each. The new values of split buckets are
    then sent, in the order in which forward needs them. `step()` returns while they are on their way; code that uses a
    parameter before it has arrived waits for it.

    Args:
        optimizer: any optimiser of torch.optim that works element by element; use what is returned in its place.
        model: wrapped with `dovetail.DistributedDataParallel(model)`.
        elementwise: promises that an optimiser from outside torch.optim works element by element.
    """
    if not isinstance(model, DistributedDataParallel):
        raise Error("optimizer: expected a model wrapped with dovetail.DistributedDataParallel")
    if not isinstance(optimizer, Optimizer):
        raise Error(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__qualname__}")
    _check(optimizer, model, elementwise)
    made = ShardedOptimizer(optimizer, model, model.open_exchange())
    model.attach(made)
    return made


class ShardedOptimizer(Optimizer):
    """What `dovetail.optimizer` returns, used in place of the optimiser it was made from."""

    def __init__(self, inner: Optimizer, model: DistributedDataParallel, exchange: GradientExchange) -> None:
        # Not Optimizer.__init__, which would make new groups: schedulers change these.
        groups = inner.param_groups
        super().__setstate__({"defaults": inner.defaults, "state": defaultdict(dict), "param_groups": groups})
        self._inner = inner
        self._exchange = exchange
        self._group: dist.ProcessGroup = model.process_group
        self._of = {id(p): g for g, group in enumerate(groups) for p in group["params"]}
        self._shells: list[Optimizer] = []
        self._build()
        given = {self._exchange.index[id(p)]: s for p, s in inner.state.items() if id(p) in self._exchange.index}
        states.share_out(self._exchange, given, self.state.__setitem__)
        inner.state.clear()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        exchange, start = self._exchange, time.perf_counter()
        exchange.settle()
        reduced = exchange.reduced()
        self._refuse_lone_gradients()
        self._inner._opt_called = True  # type: ignore[attr-defined]  # a scheduler made for the inner optimiser looks here
        exchange.updating = 0.0
        whole = []
        for bucket in reduced:
            if bucket.kind == "whole":
                whole.append(bucket)
            else:
                self._update(bucket)
        exchange.gather()
        # While the first new values are on their way: nobody waits for what every rank updates for itself.
        for bucket in whole:
            self._update(bucket)
        exchange.after_step(start)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not set_to_none:
                    parameter.grad.requires_grad_(False)
                    parameter.grad.zero_()
                elif parameter.grad is not None:
                    parameter.grad = None

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """torch.nn.utils.clip_grad_norm_ over the gradients of the whole model. All ranks call it together."""
        exchange = self._exchange
        if not exchange.active:
            parameters = [s.parameter for s in exchange.slots]
            return torch.nn.utils.clip_grad_norm_(
                parameters, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
            )
        buckets = list(exchange.reduced())
        pieces = [p for b in buckets for p in b.pieces if exchange.has_gradient(p.index)]
        # What every rank has whole counts once.
        counted = [b for b in buckets if b.kind == "split" or exchange.rank == 0]
        norms = [
            torch.linalg.vector_norm(p.gradient, norm_type)
            for b in counted
            for p in b.pieces
            if exchange.has_gradient(p.index)
        ]
        zero = torch.zeros((), dtype=buckets[0].share.dtype, device=exchange.device)
        # The norm of a vector of norms, rank after rank, is the norm of the whole.
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack([zero, *norms]), norm_type)
        if norm_type == float("inf"):
            dist.all_reduce(total, op=dist.ReduceOp.MAX, group=self._group)
        else:
            total = total.pow(norm_type)
            dist.all_reduce(total, group=self._group)
            total = total.pow(1 / norm_type)
        if error_if_nonfinite and not torch.isfinite(total):
            raise Error(f"clip_grad_norm_: the norm of the gradients is {total.item()}")
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for piece in pieces:
            piece.gradient.mul_(factor)
        return total

    def state_dict(self) -> dict[str, Any]:
        """The whole optimiser's state in torch's own format. Every rank must call it: each has only its share."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        waiting = threading.Timer(
            PATIENCE,
            log.warning,
            ["dovetail: optimizer.state_dict() waits for the other ranks: every rank must call it"],
        )
        waiting.daemon = True
        waiting.start()
        try:
            whole = states.whole(self._exchange, self._mine())
        finally:
            waiting.cancel()
        numbers: dict[int, int] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                numbers.setdefault(id(parameter), len(numbers))
        stored = {
            "state": {
                numbers[id(slot.parameter)]: whole[i]
                for i, slot in enumerate(self._exchange.slots)
                if id(slot.parameter) in numbers and whole.get(i)
            },
            "param_groups": [
                {**_options(group), "params": [numbers[id(p)] for p in group["params"]]} for group in self.param_groups
            ],
        }
        stored["state"] = dict(sorted(stored["state"].items()))  # type: ignore[attr-defined]
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, stored)
            stored = stored if changed is None else changed
        return stored

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what an optimiser of this kind has stored on any number of ranks. Needs no other rank."""
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        saved = state_dict["param_groups"]
        sizes = [len(g["params"]) for g in saved]
        if sizes != [len(g["params"]) for g in self.param_groups]:
            expected = ", ".join(str(len(g["params"])) for g in self.param_groups)
            raise Error(f"load_state_dict: expected groups of {expected} parameters, got {sizes}")
        given: states.State = {}
        for theirs, ours in zip(saved, self.param_groups, strict=True):
            for number, parameter in zip(theirs["params"], ours["params"], strict=True):
                if number in state_dict["state"] and id(parameter) in self._exchange.index:
                    given[self._exchange.index[id(parameter)]] = state_dict["state"][number]
        fresh: dict[torch.Tensor, Any] = {}
        states.share_out(self._exchange, given, fresh.__setitem__)
        for theirs, ours in zip(saved, self.param_groups, strict=True):
            ours.update(_options(theirs))
        self.state.clear()
        self.state.update(fresh)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise Error("add_param_group: expected before dovetail.optimizer, which shares the parameters out")

    def move(self, order: Sequence[int], buckets: Sequence[Bucket], *, active: bool = True) -> None:
        """Changes to new buckets: the state of every element moves to where it is updated from now on.

        All ranks call it at the same point. `active`: the exchange is in charge from now on, else torch's reducer is,
        and gradients are whole in `.grad`.
        """
        exchange = self._exchange
        exchange.settle()
        mine, had = self._mine(), exchange.active
        for bucket in exchange.buckets if had else ():
            for piece in bucket.pieces:
                if exchange.has_gradient(piece.index):
                    mine[piece.index] = {**mine[piece.index], GRADIENT: piece.gradient}
        whole = states.whole(exchange, mine)
        gradients = {i: {GRADIENT: s.pop(GRADIENT)} for i, s in whole.items() if GRADIENT in s}
        exchange.lay_out(order, buckets)
        self.state.clear()
        self._build()
        states.share_out(exchange, {i: s for i, s in whole.items() if s}, self.state.__setitem__)
        exchange.active = active
        if not active:
            for i, gradient in gradients.items():
                exchange.slots[i].parameter.grad = gradient[GRADIENT]
        else:
            places = {p.values: p.gradient for b in exchange.buckets for p in b.pieces}
            states.share_out(exchange, gradients, lambda values, part: places[values].copy_(part[GRADIENT]))

    def _mine(self) -> states.State:
        return states.of_pieces(self._exchange, lambda values: self.state.get(values, {}))

    def _build(self) -> None:
        """Makes one optimiser per bucket, of the user's class, with the pieces of that bucket in the user's groups."""
        self._shells = []
        for bucket in self._exchange.buckets:
            shell = object.__new__(type(self._inner))
            shell.__dict__.update({k: v for k, v in self._inner.__dict__.items() if k != "step"})
            shell.__dict__.update({name: OrderedDict() for name in _HOOKS})
            shell.state = self.state
            shell.param_groups = []
            for g, group in enumerate(self.param_groups):
                pieces = [p.values for p in bucket.pieces if self._group_of(p.index) == g]
                shell.param_groups.append({**_options(group), "params": pieces})
            self._shells.append(shell)

    def _group_of(self, index: int) -> int | None:
        return self._of.get(id(self._exchange.slots[index].parameter))

    def _update(self, bucket: ShardedBucket) -> None:
        began, shell = time.perf_counter(), self._shells[bucket.number]
        for ours, theirs in zip(shell.param_groups, self.param_groups, strict=True):
            ours.update(_options(theirs))
        if bucket.master is not None and bucket.lost is not None:
            torch.add(bucket.mine, bucket.lost.owned, out=bucket.master)
        for piece in bucket.pieces:
            piece.values.grad = self._gradient(piece) if self._exchange.has_gradient(piece.index) else None
        shell.step()
        self._exchange.updating += time.perf_counter() - began

    def _gradient(self, piece: ShardPiece) -> torch.Tensor:
        if self._exchange.active:
            return piece.gradient
        parameter = self._exchange.slots[piece.index].parameter
        assert parameter.grad is not None, "the caller has looked"
        return in_memory_order(parameter.grad, parameter)[piece.start : piece.stop]

    def _refuse_lone_gradients(self) -> None:
        """Refuses gradients that were never sent to the other ranks."""
        if not self._exchange.active:
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                index = self._exchange.index.get(id(parameter))
                if index is None:
                    raise Error("step: a parameter that was frozen when the model was wrapped has a gradient now")
                if not self._exchange.has_gradient(index):
                    raise Error(
                        f"step: the gradient of {self._exchange.slots[index].name!r} is this rank's own: the last "
                        "backward pass ran inside no_sync(), or was the second of one forward pass"
                    )


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {k: v for k, v in group.items() if k != "params"}


def _check(optimizer: Optimizer, model: DistributedDataParallel, elementwise: bool) -> None:
    kind = type(optimizer)
    known = kind.__module__.startswith("torch.optim") and kind.__name__ in ELEMENTWISE
    if not known and (not elementwise or kind.__module__.startswith("torch.optim")):
        raise Error(
            f"optimizer: {kind.__qualname__} may need whole parameters; expected one that works element by element "
            f"({', '.join(ELEMENTWISE)}, or another with elementwise=True)"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise Error("optimizer: differentiable=True needs whole parameters in one graph")
    if model.optimizer is not None:
        raise Error("optimizer: this model has one already; put all its parameters into the groups of one optimiser")
    reduced = {id(p) for _, p in model.reduced_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and id(parameter) not in reduced:
                raise Error(
                    "optimizer: it holds a parameter that is not one of the model's, or was frozen when wrapped"
                )
