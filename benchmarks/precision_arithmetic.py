"""What n ranks compute when a bucket travels in fewer bytes, in one process: the arithmetic that the exchange follows.

Every number is rounded once on its way. A rank encodes the n-ths of its gradients that others own and sends each
straight to its owner, who adds them up in fp32, its own part exact. A ring, which adds while it passes on, would have
to encode partial sums again at every hop; benchmarks/precision_error.py measures both.

From there it depends on the bucket's kind. Of a split bucket the owner updates its n-th of the parameters in fp32, the
master, and sends the encoded difference to what everybody has, the public values. All ranks add the same decoded
difference, the owner too, so all have the same bits. What rounding lost remains in master − public, and is part of the
next difference. Of a whole bucket the owner encodes the sum, with its own error feedback, and all ranks, the owner too,
update with the decoded sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dovetail.train.data_parallel.wire.codec import Codec


def reduce_in(codec: Codec, contributions: Sequence[Tensor], errors: Sequence[Tensor] | None) -> Tensor:
    """The sum of the ranks' contributions as their owners compute it, a new tensor: rank r owns the r-th of n parts.

    Contributions have equal lengths, multiples of n, and stay as they are. `errors` are the ranks' feedback, as long as
    the contributions; None is no feedback. A rank's own part of its error is not used.
    """
    ranks = len(contributions)
    parts = [c.view(ranks, -1) for c in contributions]
    kept = None if errors is None else [e.view(ranks, -1) for e in errors]
    total = torch.empty_like(contributions[0])
    wire = _wire(codec, parts[0][0])
    for owner, sums in enumerate(total.view(ranks, -1)):
        sums.copy_(parts[owner][owner])
        for turn in range(1, ranks):  # the order in which the exchange adds
            sender = (owner - turn) % ranks
            codec.encode(parts[sender][owner], None if kept is None else kept[sender][owner], wire)
            codec.decode_add(wire, sums)
    return total


def gather_differences(codec: Codec, masters: Sequence[Tensor], public: Tensor) -> None:
    """Moves the public values of a split bucket towards its masters, rank r's being the r-th of n parts."""
    for master, part in zip(masters, public.view(len(masters), -1), strict=True):
        wire = _wire(codec, part)
        codec.encode(master - part, None, wire)
        codec.decode_add(wire, part)


def gather_sums(codec: Codec, sums: Sequence[Tensor], errors: Sequence[Tensor] | None) -> Tensor:
    """What all ranks get of a whole bucket's sum, a new tensor: of the owners' parts, with the owners' feedback."""
    out = torch.empty(sum(s.numel() for s in sums), dtype=torch.float32, device=sums[0].device)
    for owner, part in enumerate(out.view(len(sums), -1)):
        wire = _wire(codec, part)
        codec.encode(sums[owner], None if errors is None else errors[owner], wire)
        codec.decode(wire, part)
    return out


def _wire(codec: Codec, values: Tensor) -> Tensor:
    return torch.empty(codec.wire_bytes(values.numel()), dtype=torch.uint8, device=values.device)
