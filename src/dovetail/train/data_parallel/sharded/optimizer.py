"""An optimiser of which every rank runs its share: the second line.

    model = dovetail.DistributedDataParallel(model)
    optimizer = dovetail.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model)

The torch optimiser keeps its parameter groups, and changes to them (by a learning-rate scheduler) take effect. Its
arithmetic runs on this rank's pieces of the parameters: of a split bucket 1/n, so that state takes 1/n of the memory,
of a whole bucket all.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from dovetail.core.errors import Error
from dovetail.core.plan import Bucket
from dovetail.train import device_streams

from ..module import DistributedDataParallel
from . import optimizer_state as states
from . import whole_tensors
from .elementwise import PieceState, works_by_element
from .exchange import GradientExchange
from .shard_layout import ShardedBucket, ShardPiece, in_memory_order, plan_of
from .slot import GradientState
from .whole_tensors import options

GRADIENT = "dovetail gradient"
STATE = "the optimiser's state"
INSTEAD = "each has only its share; call state = dovetail.full_state(optimizer) on all ranks and store what rank 0 gets"


def optimizer(optimizer: Optimizer, model: Any, *, elementwise: bool = False) -> ShardedOptimizer:
    """Lets communication hide behind the next forward pass too. All ranks call it at the same point.

    From here on gradients travel in buckets each of its own kind. `step()` waits for the reduced gradients bucket by
    bucket, and the torch optimiser's own code updates what this rank has of each. The new values of split buckets are
    then sent, in the order in which forward needs them. `step()` returns while they are on their way; code that uses a
    parameter before it has arrived waits for it.

    A model may have several optimisers, each with its own parameters: call it once for each. Parameters that are not
    the model's, or that were frozen when it was wrapped, are updated on every rank, as they are without this line.

    Args:
        optimizer: any optimiser of torch.optim but LBFGS and SparseAdam, or one of your own that updates each parameter
            by itself; use what is returned in its place. One that is not known to work element by element (Muon,
            Adafactor, Shampoo) gets whole parameters, each on one rank. See docs/overlap.md.
        model: wrapped with `dovetail.DistributedDataParallel(model)`.
        elementwise: promises that an optimiser from outside torch.optim works element by element.
    """
    if isinstance(model, (list, tuple)):
        raise Error(
            "optimizer: expected one model, got several; make one optimiser for each, or give the largest: parameters "
            "of the others are all-reduced and updated on every rank, as without this line"
        )
    if not isinstance(model, DistributedDataParallel):
        raise Error("optimizer: expected a model wrapped with dovetail.DistributedDataParallel")
    if not isinstance(optimizer, Optimizer):
        raise Error(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__qualname__}")
    by_element = works_by_element(optimizer, elementwise)
    if not by_element:
        whole_tensors.check(optimizer)
    first = model.optimizer
    if first is not None:
        first.check_apart(optimizer)
    made = ShardedOptimizer(optimizer, model, first, by_element=by_element)
    model.attach(made)
    return made


def full_state(optimizer: Optimizer) -> dict[str, Any]:
    """The whole optimiser's state on rank 0, in torch's own format; the other ranks get an empty dictionary.

    All ranks must call it, as in

        state = dovetail.full_state(optimizer)
        if rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": state}, path)

    It takes any optimiser of torch too. `optimizer.state_dict()` gives the same to every rank.
    """
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.full_state()
    return optimizer.state_dict() if not dist.is_initialized() or dist.get_rank() == 0 else {}


class ShardedOptimizer(Optimizer):
    """What `dovetail.optimizer` returns, used in place of the optimiser it was made from."""

    state: PieceState

    def __init__(
        self, inner: Optimizer, model: DistributedDataParallel, first: ShardedOptimizer | None, *, by_element: bool
    ) -> None:
        # Not Optimizer.__init__, which would make new groups: schedulers change these.
        groups = inner.param_groups
        super().__setstate__({"defaults": inner.defaults, "state": PieceState(), "param_groups": groups})
        self._inner = inner
        self._exchange: GradientExchange = model.open_exchange() if first is None else first._exchange
        self._peers: list[weakref.ref[ShardedOptimizer]] = [] if first is None else first._peers
        """All optimisers of the model, in the order in which they were attached."""
        self._peers.append(weakref.ref(self))
        self._number, self._by_element = len(self._peers), by_element
        self._build()
        self._claim()
        index = self._exchange.index
        given = {index[id(p)]: s for p, s in inner.state.items() if id(p) in index}
        states.share_out(self._exchange, given, self.state.__setitem__)
        self.state.update({p: s for p, s in inner.state.items() if id(p) not in index})
        inner.state.clear()
        inner.register_step_pre_hook(_refuse_inner)

    def __getattr__(self, name: str) -> Any:
        """What a subclass of torch's optimiser has besides, methods too, is found here as well."""
        if name.startswith("_") or "_inner" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._inner, name)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        exchange, peers = self._exchange, self._alive()
        start = exchange.clock.stamp() if exchange.timed else None
        exchange.settle([i for i, user in exchange.users.items() if user == self._number])
        exchange.shares.flush()
        reduced = exchange.reduced()
        self._refuse_lone_gradients()
        self._inner._opt_called = True  # type: ignore[attr-defined]  # a scheduler made for the inner optimiser looks here
        if peers[0] is self:
            exchange.stamps.updates.clear()
        whole, touched = [], set()
        for bucket in reduced:
            if not any(self._group_of(i) is not None for i in bucket.members):
                continue  # another optimiser's
            touched.add(bucket.number)
            if bucket.kind == "whole":
                whole.append(bucket)
            else:
                self._update(bucket)
        exchange.gather(touched, first=peers[0] is self)
        # While the first new values are on their way: nobody waits for what every rank updates for itself.
        for bucket in whole:
            self._update(bucket)
        if self._local is not None:
            self._follow(self._local)
            self._local.step()
        exchange.after_step(start, last=peers[-1] is self)
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
        """torch.nn.utils.clip_grad_norm_ over the gradients of this optimiser. All ranks call it together."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        total = torch.nn.utils.get_total_norm(gradients, norm_type)
        if error_if_nonfinite and not torch.isfinite(total):
            raise Error(f"clip_grad_norm_: the norm of the gradients is {total.item()}")
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
        return total

    def state_dict(self) -> dict[str, Any]:
        """The whole optimiser's state in torch's own format. Every rank must call it: each has only its share.

        A rank that calls it alone gets an error that names `dovetail.full_state`.
        """
        return self._stored(everywhere=True)

    def full_state(self) -> dict[str, Any]:
        """See `dovetail.full_state`."""
        return self._stored(everywhere=False)

    def _stored(self, *, everywhere: bool) -> dict[str, Any]:
        """The whole state, on every rank or on rank 0; {} on the others."""
        exchange = self._exchange
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        exchange.settle()
        if any(bucket.kind == "split" for bucket in exchange.buckets):
            exchange.meeting.all_call(STATE, INSTEAD)
        keep = everywhere or exchange.rank == 0
        whole = states.whole(exchange, self._mine(), keep=keep)
        if not keep:
            return {}
        numbers: dict[int, int] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                numbers.setdefault(id(parameter), len(numbers))
        found = {id(slot.parameter): whole[i] for i, slot in enumerate(exchange.slots) if whole.get(i)}
        found |= {id(p): copy.copy(self.state[p]) for p in self._local_parameters() if self.state.get(p)}
        stored = {
            "state": {number: found[key] for key, number in numbers.items() if key in found},
            "param_groups": [
                {**options(group), "params": [numbers[id(p)] for p in group["params"]]} for group in self.param_groups
            ],
        }
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
        fresh: dict[torch.Tensor, Any] = {}
        for theirs, ours in zip(saved, self.param_groups, strict=True):
            for number, parameter in zip(theirs["params"], ours["params"], strict=True):
                if number not in state_dict["state"]:
                    continue
                if id(parameter) in self._exchange.index:
                    given[self._exchange.index[id(parameter)]] = state_dict["state"][number]
                else:
                    fresh[parameter] = states.like(parameter, state_dict["state"][number])
        states.share_out(self._exchange, given, fresh.__setitem__)
        for theirs, ours in zip(saved, self.param_groups, strict=True):
            ours.update(options(theirs))
        self.state.clear()
        self.state.update(fresh)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group as torch does. All ranks call it; the parameters' shares are those that they have already."""
        self._inner.add_param_group(param_group)
        self._build()
        self._claim()

    def _claim(self) -> None:
        """Lets the parameters travel apart from those of other optimisers, with owners if they are needed whole."""
        if whole_tensors.claim(self._exchange, self._inner, self._number, self._by_element):
            self.move(*plan_of(self._exchange.buckets), active=self._exchange.active)

    def check_apart(self, other: Optimizer) -> None:
        """Refuses another optimiser for the model that holds a parameter which one of the model's has already."""
        theirs = {id(p) for group in other.param_groups for p in group["params"]}
        if any(theirs & set(peer._of) for peer in self._alive()):
            raise Error(
                "optimizer: a parameter of this model is in another optimiser already; give each parameter to one, or "
                "delete the other optimiser first"
            )

    def move(self, order: Sequence[int], buckets: Sequence[Bucket], *, active: bool = True) -> None:
        """Changes to new buckets: the state of every element moves to where it is updated from now on.

        All ranks call it at the same point. `active`: the exchange is in charge from now on, else torch's reducer is,
        and gradients are whole in `.grad`.
        """
        exchange, peers = self._exchange, self._alive()
        exchange.settle()
        exchange.shares.forget()
        mine: states.State = {}
        for peer in peers:
            mine |= {i: state for i, state in peer._mine().items() if peer._group_of(i) is not None}
        mine, had = {i: mine.get(i, {}) for i in self._mine()}, exchange.active
        for bucket in exchange.buckets if had else ():
            for piece in bucket.pieces:
                if exchange.has_gradient(piece.index):
                    mine[piece.index] = {**mine[piece.index], GRADIENT: piece.formed(piece.gradient)}
        whole = states.whole(exchange, mine)
        gradients = {i: {GRADIENT: s.pop(GRADIENT)} for i, s in whole.items() if GRADIENT in s}
        exchange.lay_out(order, buckets)
        for peer in peers:
            kept = {p: peer.state[p] for p in peer._local_parameters() if p in peer.state}
            device_streams.hold_here(states.tensors_of(list(peer.state.values())))  # dropped while it may be in use
            peer.state.clear()
            peer.state.update(kept)
            peer._build()
            of_peer = {i: s for i, s in whole.items() if s and peer._group_of(i) is not None}
            states.share_out(exchange, of_peer, peer.state.__setitem__)
        exchange.active = active
        if not active:
            for i, gradient in gradients.items():
                exchange.slots[i].parameter.grad = gradient[GRADIENT]
        else:
            places = {p.values: p.formed(p.gradient) for b in exchange.buckets for p in b.pieces}
            states.share_out(exchange, gradients, lambda values, part: places[values].copy_(part[GRADIENT]))

    def _alive(self) -> list[ShardedOptimizer]:
        """The model's optimisers."""
        return [peer for held in self._peers if (peer := held()) is not None]

    def _mine(self) -> states.State:
        return states.of_pieces(self._exchange, lambda values: self.state.get(values, {}))

    def _local_parameters(self) -> list[torch.Tensor]:
        """Parameters that are not in the exchange: each rank updates them with the gradients that it has of them."""
        return [p for group in self.param_groups for p in group["params"] if id(p) not in self._exchange.index]

    def _build(self) -> None:
        """Makes one optimiser per bucket, of the user's class, with the pieces of that bucket in the user's groups."""
        exchange = self._exchange
        self._of = {id(p): g for g, group in enumerate(self.param_groups) for p in group["params"]}
        pieces = [piece for bucket in exchange.buckets for piece in bucket.pieces]
        self.state.piece_of = {id(exchange.slots[p.index].parameter): p.values for p in pieces}
        self._shells = []
        for bucket in exchange.buckets:
            held: list[list[torch.Tensor]] = [[] for _ in self.param_groups]
            for piece in bucket.pieces:
                if (g := self._group_of(piece.index)) is not None:
                    held[g].append(piece.values)
            self._shells.append(self._shell(held))
        local = {id(p) for p in self._local_parameters()}
        whole = [[p for p in group["params"] if id(p) in local] for group in self.param_groups]
        self._local = self._shell(whole) if local else None

    def _shell(self, held: list[list[torch.Tensor]]) -> Optimizer:
        """An optimiser of the user's class for these tensors of each group."""
        return whole_tensors.shell(self._inner, held, self.state)

    def _follow(self, shell: Optimizer) -> None:
        """Gives an optimiser the options that the user's groups have now."""
        for ours, theirs in zip(shell.param_groups, self.param_groups, strict=True):
            ours.update(options(theirs))

    def _group_of(self, index: int) -> int | None:
        return self._of.get(id(self._exchange.slots[index].parameter))

    def _update(self, bucket: ShardedBucket) -> None:
        clock, timed, shell = self._exchange.clock, self._exchange.timed, self._shells[bucket.number]
        began = clock.stamp() if timed else None
        self._follow(shell)
        if bucket.master is not None:
            bucket.renew_master()
        for piece in bucket.pieces:
            piece.values.grad = self._gradient(piece) if self._group_of(piece.index) is not None else None
        shell.step()
        if timed:
            self._exchange.stamps.updates.append((began, clock.stamp()))

    def _gradient(self, piece: ShardPiece) -> torch.Tensor | None:
        if self._exchange.active and self._exchange.has_gradient(piece.index):
            return piece.formed(piece.gradient)
        parameter = self._exchange.slots[piece.index].parameter
        if parameter.grad is None:
            return None
        # Whole: torch's reducer is in charge, or the user has put it there.
        return piece.formed(in_memory_order(parameter.grad.to(parameter.dtype), parameter)[piece.start : piece.stop])

    def _refuse_lone_gradients(self) -> None:
        """Refuses gradients that were never sent to the other ranks."""
        exchange = self._exchange
        for group in self.param_groups if exchange.active else ():
            for parameter in group["params"]:
                index = exchange.index.get(id(parameter))
                if index is None or parameter.grad is None:
                    continue
                slot = exchange.slots[index]
                if slot.look() in (GradientState.OWN, GradientState.MIXED):
                    raise Error(
                        f"step: the gradient of {slot.name!r} is this rank's own: the last backward pass ran inside "
                        "no_sync(), or was the second of one forward pass"
                    )


def _refuse_inner(*_: Any) -> None:
    raise Error(
        "step: expected a step of the optimiser that dovetail.optimizer has returned, not of the one given to it"
    )
