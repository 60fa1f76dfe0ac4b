"""This rank's shares of the gradients, as code between backward and `optimizer.step()` uses them through `.grad`.

A norm needs the shares of all ranks. Scripts ask for one norm after the other, so the first request takes those of all
gradients with one all-reduce, and the others are looked up until a gradient changes. A whole gradient is gathered when
it is asked for, and kept until the next pass or step: what was written into it, or into a view of it, is then copied to
the shares. These collectives run in the user's process group, in the order of the user's own.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dovetail.core.errors import Error
from dovetail.train import device_streams

from .shard_layout import ShardedBucket, ShardPiece, in_memory_order, in_shape
from .slot import GradientState, SlotEvent

if TYPE_CHECKING:
    from .exchange import GradientExchange

ALL_RANKS = "every rank has only its share of a gradient, so all ranks must read it at the same point"


class GradientShares:
    """The shares of one model's gradients on one rank; `group` is the user's."""

    def __init__(self, exchange: GradientExchange, group: dist.ProcessGroup) -> None:
        self._exchange = weakref.ref(exchange)
        self._group = group
        self._norms: dict[float, dict[int, torch.Tensor]] = {}
        """By order, then by gradient."""
        self._wholes: dict[int, tuple[torch.Tensor, int]] = {}
        """Whole gradients with their versions when they were read or last written back."""
        self._waited: list[torch.Stream | None] = []
        """An accelerator's streams (on the CPU, None) for which all buckets are reduced; no pass has begun since."""
        self._laid_out: list[ShardedBucket] = []
        self._piece: dict[int, ShardPiece] = {}
        """This rank's piece of each gradient of which it has one, in the buckets as laid out."""
        self.reads = 0
        """Number of gradients that were gathered so far."""
        self.read_bytes = 0
        """Their bytes."""

    def zero(self, index: int) -> None:
        """Sets a gradient to zero."""
        exchange = self._of()
        slot, bucket = exchange.slots[index], exchange.bucket_of[index]
        if slot.look() not in (GradientState.REDUCED, GradientState.MIXED):
            return
        if bucket.reducing is not None:
            bucket.reducing.wait()
        self._drop(index)
        for piece in self._pieces(exchange, index):
            piece.gradient.zero_()
        slot.on(SlotEvent.ZERO)

    def pieces(self, index: int) -> list[torch.Tensor]:
        """What this rank has of a gradient, to be changed in place."""
        exchange = self._settled(index)
        if exchange.slots[index].look() is GradientState.MIXED:
            raise Error(
                f"overlap: the gradient of {exchange.slots[index].name!r} is this rank's own in part, after a backward "
                "pass inside no_sync(): change gradients after the pass that synchronises"
            )
        self._drop(index)
        return [piece.gradient for piece in self._pieces(exchange, index)]

    def norms(self, indices: Sequence[int], order: float) -> list[torch.Tensor]:
        """Norms of whole gradients. All ranks call it together."""
        found = []
        for index in indices:
            exchange = self._settled(index)
            if exchange.slots[index].look() is GradientState.MIXED:
                found.append(torch.linalg.vector_norm(self.whole(index), order))
                continue
            if index not in self._norms.get(order, {}):
                self._take_norms(exchange, order)
            found.append(self._norms[order][index].clone())
        return found

    def whole(self, index: int) -> torch.Tensor:
        """A whole gradient; changes of it are written back. All ranks call it together."""
        exchange = self._settled(index)
        if index in self._wholes:
            return self._wholes[index][0]
        slot, bucket = exchange.slots[index], exchange.bucket_of[index]
        if bucket.kind == "whole":
            found = bucket.place(index)
        else:
            exchange.meeting.all_call(f"the gradient of {slot.name!r}", ALL_RANKS)
            flat = torch.zeros(slot.parameter.numel(), dtype=slot.parameter.dtype, device=slot.parameter.device)
            for piece in self._pieces(exchange, index):
                flat[piece.start : piece.stop].copy_(piece.gradient)
            # Each element is on one rank, and zero on the others: sums of bytes are exact, whatever the dtype.
            if flat.numel():
                dist.all_reduce(flat.view(torch.uint8), group=self._group)
            found = in_shape(flat, slot.parameter)
            self.reads += 1
            self.read_bytes += flat.numel() * flat.element_size()
        if slot.look() is GradientState.MIXED:
            assert slot.own is not None
            return found + slot.own
        self._wholes[index] = (found, found._version)
        return found

    def write(self, index: int, values: torch.Tensor) -> None:
        """Puts this rank's part of new values into its share."""
        exchange = self._settled(index)
        self.pieces(index)  # refuses what is this rank's own in part
        self._write(exchange, index, values)

    def unscale(self, indices: Sequence[int], found: torch.Tensor, inverse: torch.Tensor) -> None:
        """What GradScaler does: multiplies gradients by `inverse`; `found` becomes 1 if an element is not finite.

        All ranks call it together, and agree on `found`.
        """
        exchange = self._settled(indices[0])
        exchange.meeting.all_call("GradScaler.unscale_", ALL_RANKS, often=True)
        if here := [piece for index in indices for piece in self.pieces(index)]:
            torch._amp_foreach_non_finite_check_and_unscale_(here, found, inverse)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)

    def flush(self) -> None:
        """Writes changes of whole gradients back to the shares."""
        for index in list(self._wholes):
            self._write_back(index)

    def forget(self) -> None:
        """Called before gradients change by a pass or move to other buckets: nothing read so far is valid then."""
        if self._waited:
            self.flush()
            self._norms, self._wholes, self._waited = {}, {}, []

    def __str__(self) -> str:
        return f"{self.reads} read whole, {self.read_bytes / 2**20:.1f} MiB gathered from all ranks"

    def _of(self) -> GradientExchange:
        exchange = self._exchange()
        if exchange is None:
            raise Error("overlap: these gradients are gone with their model")
        return exchange

    def _settled(self, index: int) -> GradientExchange:
        """The exchange, with everything reduced."""
        exchange = self._of()
        name = exchange.slots[index].name
        if exchange.slots[index].look() not in (GradientState.REDUCED, GradientState.MIXED):
            raise Error(f"overlap: {name!r} has no gradient now that its ranks share")
        if torch._C._current_graph_task_id() != -1:
            raise Error(
                f"overlap: the gradient of {name!r} is used inside backward, when no rank has it yet: use gradients "
                "when backward is over, or take this rank's own in parameter.register_hook"
            )
        if (here := device_streams.current(exchange.device)) not in self._waited:
            for _ in exchange.reduced():
                pass
            self._waited.append(here)
        self._write_back(index)
        return exchange

    def _pieces(self, exchange: GradientExchange, index: int) -> list[ShardPiece]:
        if self._laid_out is not exchange.buckets:
            self._laid_out = exchange.buckets
            self._piece = {piece.index: piece for bucket in exchange.buckets for piece in bucket.pieces}
        return [self._piece[index]] if index in self._piece else []

    def _drop(self, index: int) -> None:
        """Forgets what was read of a gradient that is about to change."""
        self._wholes.pop(index, None)
        for norms in self._norms.values():
            norms.pop(index, None)

    def _write_back(self, index: int) -> None:
        """Puts a whole gradient that was changed since it was read into the share."""
        whole, version = self._wholes.get(index, (None, 0))
        if whole is not None and whole._version != version:
            exchange = self._of()
            if exchange.bucket_of[index].kind == "split":
                self._write(exchange, index, whole)
            self._drop(index)
            self._wholes[index] = (whole, whole._version)

    def _write(self, exchange: GradientExchange, index: int, values: torch.Tensor) -> None:
        parameter = exchange.slots[index].parameter
        with torch.no_grad():
            flat = in_memory_order(values.detach().expand(parameter.shape), parameter)
            for piece in self._pieces(exchange, index):
                piece.gradient.copy_(flat[piece.start : piece.stop])

    def _take_norms(self, exchange: GradientExchange, order: float) -> None:
        """Takes the norms of all gradients with one all-reduce."""
        self.flush()
        exchange.meeting.all_call(f"a norm of gradients (order {order:g})", ALL_RANKS, often=True)
        count = len(exchange.slots)
        there = [i for i, slot in enumerate(exchange.slots) if slot.look() is GradientState.REDUCED]
        reduced, nothing = set(there), math.inf if order == -math.inf else 0.0
        total = torch.full((count,), nothing, dtype=torch.float64, device=exchange.device)
        for bucket in exchange.buckets:
            if bucket.kind == "whole" and exchange.rank > 0:
                continue  # what every rank has whole counts once
            pieces = [p for p in bucket.pieces if p.index in reduced and p.gradient.numel()]
            narrow = bucket.share.dtype.itemsize < 4
            if pieces:
                found = torch._foreach_norm([p.gradient for p in pieces], order, torch.float32 if narrow else None)
                places = device_streams.to_device([p.index for p in pieces], torch.int64, exchange.device)
                total.index_copy_(0, places, torch.stack(found).double())
        if math.isinf(order):
            # A maximum over ranks may drop NaN, so that travels beside the values.
            missing = total.isnan()
            sign = math.copysign(1.0, order)
            both = torch.cat([total.masked_fill(missing, 0.0) * sign, missing.double()])
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._group)
            total = (both[:count] * sign).masked_fill(both[count:] > 0, math.nan)
        else:
            if order != 0:
                total = total.pow(order)
            dist.all_reduce(total, group=self._group)
            if order != 0:
                total = total.pow(1 / order)
        self._norms[order] = {i: total[i].to(exchange.slots[i].parameter.dtype.to_real()) for i in there}
