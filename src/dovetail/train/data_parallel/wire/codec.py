"""Numbers in fewer bytes: what travels in place of fp32 where a bucket's precision is "bf16" or "int8".

bf16 keeps the upper half of every fp32 number, rounded to the nearest: 2 bytes. int8 cuts a tensor into blocks of 128
numbers and sends, for each block, one fp32 scale (its largest magnitude / 127) and every number as a multiple of it,
rounded to the nearest: 1.031 bytes.

Error feedback: the sender keeps in fp32 what rounding lost and adds it to what it sends next. So what was sent up to
any time differs from what was to be sent by the rounding of one message, not of all.

On a CPU with a C compiler at hand the arithmetic is `codec.c`, in one pass over memory. Elsewhere it is the same
arithmetic, bit for bit, in plain torch operators on pieces that stay in a core's cache, through buffers that are used
again: fresh memory is several times slower. A multiplication and the addition behind it are two operators on purpose.
One fused operator may round once or twice, depending on how torch divides the work, and ranks would get different bits.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from dovetail.core.network import Precision
from dovetail.train import device_streams

from . import kernels

BLOCK = 128
"""Numbers that share one scale in int8."""

ALIGNMENT = 16
"""Bytes: encoded forms are multiples of this, so that some laid end to end are all aligned for their scales."""

PIECE = 2**18
"""Numbers that are encoded at a time on a CPU, 1 MiB of them: operators cost little to start, caches still help."""

ACCELERATOR_PIECE = 2**24
"""The same on other devices, where starting an operator costs more than leaving the cache."""

_STEPS = 127
_SMALLEST_SCALE = 2.0**-126
"""The smallest normal fp32 number: its reciprocal is finite, and a block of zeros needs no case of its own."""


class Codec(Protocol):
    """A way to encode flat, contiguous fp32 tensors. Equal input gives equal bits; any number of threads may use it.

    What is not finite is not finite after decoding either (in int8, together with the other numbers of its block), and
    leaves nothing in `error`: one bad iteration does not spoil those that follow.
    """

    name: Precision

    def wire_bytes(self, elements: int) -> int:
        """Bytes of the encoded form of so many numbers."""

    def encode(self, values: Tensor, error: Tensor | None, wire: Tensor) -> None:
        """Writes the encoded form of `values` to `wire`, a tensor of `wire_bytes` bytes (uint8).

        With `error`, a tensor like `values`, it encodes values + error, and leaves in `error` what was lost.
        """

    def decode(self, wire: Tensor, out: Tensor) -> None:
        """Writes the decoded numbers to `out`."""

    def decode_add(self, wire: Tensor, out: Tensor) -> None:
        """Adds the decoded numbers to `out`."""


class Bf16Codec:
    """The upper 16 bits of each number, rounded to the nearest; relative error at most 2⁻⁸."""

    name: Precision = "bf16"

    def wire_bytes(self, elements: int) -> int:
        return _aligned(2 * elements)

    def encode(self, values: Tensor, error: Tensor | None, wire: Tensor) -> None:
        short = self._numbers(wire, values)
        if error is None:
            short.copy_(values)
            return
        if (fast := _kernels(values)) is not None:
            fast.bf16_encode(values.data_ptr(), error.data_ptr(), short.data_ptr(), values.numel())
            return
        scratch = _scratch.of(values)
        for piece in _pieces(values):
            kept, sent = error[piece], short[piece]
            decoded = scratch[: kept.numel()]
            sent.copy_(kept.add_(values[piece]))
            _keep_loss(kept, decoded.copy_(sent), kept)

    def decode(self, wire: Tensor, out: Tensor) -> None:
        out.copy_(self._numbers(wire, out))

    def decode_add(self, wire: Tensor, out: Tensor) -> None:
        short = self._numbers(wire, out)
        if (fast := _kernels(out)) is not None:
            fast.bf16_decode_add(short.data_ptr(), out.data_ptr(), out.numel())
            return
        scratch = _scratch.of(out)
        for piece in _pieces(out):
            received = short[piece]
            out[piece].add_(scratch[: received.numel()].copy_(received))

    def _numbers(self, wire: Tensor, values: Tensor) -> Tensor:
        _check(values, wire, self.wire_bytes(values.numel()))
        return wire[: 2 * values.numel()].view(torch.bfloat16)


class Int8Codec:
    """Multiples of a scale for each block; the error of a number is at most half its block's scale.

    The scales stand first, then the numbers. A last block that is not full has its own scale as well.
    """

    name: Precision = "int8"

    def wire_bytes(self, elements: int) -> int:
        return _aligned(4 * _blocks(elements) + elements)

    def encode(self, values: Tensor, error: Tensor | None, wire: Tensor) -> None:
        scales, steps = self._parts(wire, values)
        if (fast := _kernels(values)) is not None:
            kept = None if error is None else error.data_ptr()
            fast.int8_encode(values.data_ptr(), kept, scales.data_ptr(), steps.data_ptr(), values.numel())
            return
        scratch = _scratch.of(values)
        for piece, blocks, width in _block_pieces(values):
            exact = values[piece] if error is None else error[piece].add_(values[piece])
            exact = exact.view(-1, width)
            rounded, scale = scratch[: exact.numel()].view(-1, width), scales[blocks].view(-1, 1)
            torch.abs(exact, out=rounded)
            torch.amax(rounded, 1, keepdim=True, out=scale)
            scale.div_(_STEPS).clamp_(min=_SMALLEST_SCALE)
            torch.mul(exact, scale.reciprocal(), out=rounded)
            steps[piece].view(-1, width).copy_(rounded.round_())
            if error is not None:
                _keep_loss(exact, rounded.mul_(scale), scale)

    def decode(self, wire: Tensor, out: Tensor) -> None:
        scales, steps = self._parts(wire, out)
        if (fast := _kernels(out)) is not None:
            fast.int8_decode(scales.data_ptr(), steps.data_ptr(), out.data_ptr(), out.numel())
            return
        for piece, blocks, width in _block_pieces(out):
            out[piece].copy_(steps[piece]).view(-1, width).mul_(scales[blocks].view(-1, 1))

    def decode_add(self, wire: Tensor, out: Tensor) -> None:
        scales, steps = self._parts(wire, out)
        if (fast := _kernels(out)) is not None:
            fast.int8_decode_add(scales.data_ptr(), steps.data_ptr(), out.data_ptr(), out.numel())
            return
        scratch = _scratch.of(out)
        for piece, blocks, width in _block_pieces(out):
            received = steps[piece]
            decoded = scratch[: received.numel()].copy_(received)
            decoded.view(-1, width).mul_(scales[blocks].view(-1, 1))
            out[piece].add_(decoded)

    def _parts(self, wire: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        elements = values.numel()
        _check(values, wire, self.wire_bytes(elements))
        scales = 4 * _blocks(elements)
        return wire[:scales].view(torch.float32), wire[scales : scales + elements].view(torch.int8)


CODECS: dict[Precision, Codec] = {"bf16": Bf16Codec(), "int8": Int8Codec()}
"""By what travels; "full" needs none."""


class _Scratch(threading.local):
    """A buffer for one piece, for each thread and device, and for each of an accelerator's streams."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[torch.device, torch.Stream | None], Tensor] = {}

    def of(self, values: Tensor) -> Tensor:
        """At least as many numbers as one piece of `values`."""
        needed, place = min(values.numel(), _piece(values)), (values.device, device_streams.current(values.device))
        found = self.buffers.get(place)
        if found is None or found.numel() < needed:
            found = self.buffers[place] = torch.empty(needed, dtype=torch.float32, device=values.device)
        return found


_scratch = _Scratch()


def _kernels(values: Tensor) -> ctypes.CDLL | None:
    """The compiled functions, where they can be used for these numbers."""
    return kernels.library() if values.device.type == "cpu" else None


def _keep_loss(exact: Tensor, decoded: Tensor, witness: Tensor) -> None:
    """Leaves in `exact` what decoding does not give back; nothing for what is not finite, as `witness` then is not."""
    exact.sub_(decoded)
    # A sum reads less than the repair; on other devices asking for it would wait for the device.
    if exact.device.type != "cpu" or not math.isfinite(witness.sum().item()):
        exact.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _piece(values: Tensor) -> int:
    return PIECE if values.device.type == "cpu" else ACCELERATOR_PIECE


def _pieces(values: Tensor) -> Iterator[slice]:
    elements, size = values.numel(), _piece(values)
    for start in range(0, elements, size):
        yield slice(start, min(start + size, elements))


def _block_pieces(values: Tensor) -> Iterator[tuple[slice, slice, int]]:
    """Slices of numbers that are whole blocks, with the slices of their scales and the numbers in a block.

    What does not fill a block comes last, as one shorter block.
    """
    elements, size = values.numel(), _piece(values)
    whole = elements // BLOCK * BLOCK
    for start in range(0, whole, size):
        stop = min(start + size, whole)
        yield slice(start, stop), slice(start // BLOCK, stop // BLOCK), BLOCK
    if whole < elements:
        yield slice(whole, elements), slice(whole // BLOCK, whole // BLOCK + 1), elements - whole


def _blocks(elements: int) -> int:
    return -(-elements // BLOCK)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _check(values: Tensor, wire: Tensor, nbytes: int) -> None:
    assert values.dtype == torch.float32 and values.dim() == 1 and values.is_contiguous(), "flat fp32 numbers"
    assert wire.dtype == torch.uint8 and wire.numel() == nbytes, f"{nbytes} bytes, got {wire.numel()}"
