"""What the tests of overlap run on every rank: state that is stored, loaded and moved to other buckets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dovetail
from dovetail.train.data_parallel import reducer

from .overlap_scenarios import CAP, OPTIMIZERS, Bag, both, difference, loss, of_kinds


def stored(folder: str) -> dict[str, Any]:
    """Trains both, stores ours, and what torch's looks like two steps later."""
    pairs = both(OPTIMIZERS["adam"])
    for step in range(3):
        for model, opt in pairs:
            opt.zero_grad()
            loss(model, step).backward()
            opt.step()
    (theirs, a), (ours, b) = pairs
    kept, expected = b.state_dict(), a.state_dict()
    worst = max(
        float((torch.as_tensor(kept["state"][i][k]) - torch.as_tensor(v)).abs().max())
        for i, s in expected["state"].items()
        for k, v in s.items()
    )
    if dist.get_rank() == 0:
        torch.save({"model": ours.state_dict(), "optimizer": kept}, Path(folder, "kept.pt"))
    same_form = kept["param_groups"] == expected["param_groups"] and list(kept["state"]) == list(expected["state"])
    # From here on every number of ranks does the same, so that what they come to can be compared.
    for step in range(2):
        a.zero_grad()
        _same_everywhere(theirs, step).backward()
        a.step()
    if dist.get_rank() == 0:
        torch.save(theirs.module.state_dict(), Path(folder, "later.pt"))
    dist.barrier()
    return {"state": worst, "same form": same_form}


def _same_everywhere(model: nn.Module, step: int) -> torch.Tensor:
    batch = torch.randint(16, (4, 8), generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.roll(1).flatten())


def resumed(folder: str) -> dict[str, float]:
    """Goes on from the stored state on however many ranks there are, and with plain torch."""
    kept = torch.load(Path(folder, "kept.pt"))
    later = torch.load(Path(folder, "later.pt"))
    ours = dovetail.DistributedDataParallel(Bag(), overlap="forward", bucket_cap_mb=2 * CAP)
    optimizer = dovetail.optimizer(OPTIMIZERS["adam"](ours.parameters()), ours)
    ours.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    plain = Bag()
    plain_optimizer = OPTIMIZERS["adam"](plain.parameters())
    plain.load_state_dict({k.removeprefix("module."): v for k, v in kept["model"].items()})
    plain_optimizer.load_state_dict(kept["optimizer"])
    found = {}
    for name, model, opt in (("ours", ours, optimizer), ("plain", plain, plain_optimizer)):
        for step in range(2):
            opt.zero_grad()
            _same_everywhere(model, step).backward()
            opt.step()
        inner = ours.module if model is ours else plain
        found[name] = max(float((v.double() - later[k].double()).abs().max()) for k, v in inner.state_dict().items())
    return found


def rebucketed() -> dict[str, Any]:
    """New buckets of other kinds in the middle of training, gradients standing, state and all; torch's reducer too."""
    (theirs, a), (ours, b) = both(OPTIMIZERS["adam"])
    count = len(ours.exchange.slots)
    charge: list[Callable[[], None]] = [
        lambda: ours.use_exchange(*of_kinds(ours, "s", every=count)),
        lambda: ours.use_reducer(None),
        lambda: ours.use_reducer(reducer.by_caps([0.001, 1.0])),
        lambda: ours.use_exchange(*of_kinds(ours, "w", every=3)),
        lambda: ours.use_exchange(*of_kinds(ours, "sw", every=1)),
    ]
    for step in range(12):
        for model, opt in ((theirs, a), (ours, b)):
            loss(model, step).backward()
            opt.step()
            if step in (4, 5, 8):
                opt.zero_grad()
        if step % 2:
            charge[step // 2 % 5]()
    charge[4]()
    return {"difference": difference(ours, theirs), "buckets": len(ours.exchange.buckets), "count": count}
