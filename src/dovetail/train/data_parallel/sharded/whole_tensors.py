"""Optimisers that need whole parameters: which ones they are, whether they can be shared out, and who owns what.

An optimiser that is not known to work element by element gets whole parameters in their own shapes, each on one rank.
That is right for every optimiser that updates each parameter by itself, whatever it does with it: Muon orthogonalises,
Adafactor keeps factors of rows and columns, Shampoo's preconditioners are matrices. It is wrong where parameters are
mixed: a norm over all of them, an estimate that a group shares, one flat tensor. Nobody can see that from outside, so
an unknown optimiser is tried on a few small tensors: together, and each alone as ranks would.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from dovetail.core.errors import Error, first_line
from dovetail.planning.merge import owners

from .exchange import GradientExchange

BY_TENSOR = ("Muon", "Adafactor")
"""Optimisers of torch.optim that update each parameter by itself, but need it whole."""

BY_ELEMENT_COST = ("Adafactor",)
"""Those among them whose updates multiply no matrices."""

STEPS = 3
"""Steps of a trial: optimisers often do something else in the first."""
TOLERANCE = 1e-6
"""Largest difference of a trial's parameters, relative to their largest change: sums may be taken in another order."""

HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def options(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {k: v for k, v in group.items() if k != "params"}


def shell(
    inner: Optimizer, groups: Sequence[Sequence[torch.Tensor]], state: defaultdict[torch.Tensor, Any]
) -> Optimizer:
    """An optimiser of the same class with the same options, but other tensors in its groups and no hooks."""
    made = object.__new__(type(inner))
    made.__dict__.update({k: v for k, v in inner.__dict__.items() if k != "step"})
    made.__dict__.update({name: OrderedDict() for name in HOOKS})
    made.state = state
    made.param_groups = [
        {**options(group), "params": list(tensors)} for group, tensors in zip(inner.param_groups, groups, strict=True)
    ]
    return made


def claim(exchange: GradientExchange, optimizer: Optimizer, number: int, by_element: bool) -> bool:
    """Says in the exchange who updates the parameters of this optimiser; whether its buckets must be laid out anew.

    An optimiser that does not work by element gets owners for its parameters: updates and state are shared out evenly.
    All ranks find the same.
    """
    owned, used = exchange.owners, exchange.users
    held = [exchange.index[id(p)] for g in optimizer.param_groups for p in g["params"] if id(p) in exchange.index]
    exchange.users = {**exchange.users, **dict.fromkeys(held, number)}
    exchange.owners = {i: rank for i, rank in exchange.owners.items() if i not in held}
    if not by_element:
        parameters = [exchange.slots[i].parameter for i in held]
        matrices = type(optimizer).__name__ not in BY_ELEMENT_COST
        costs = [owners.update_cost(p.shape, matrices=matrices) for p in parameters]
        sizes = [p.numel() * p.element_size() for p in parameters]
        exchange.owners |= dict(zip(held, owners.own(costs, sizes, exchange.ranks).owners, strict=True))
    apart = len({exchange.users.get(i) for i in range(len(exchange.slots))}) > 1
    return exchange.owners != owned or (apart and exchange.users != used)


def check(optimizer: Optimizer) -> None:
    """Refuses an optimiser that does not update each parameter by itself."""
    kind = type(optimizer)
    known = kind.__module__.startswith("torch.optim")
    if known and kind.__name__ in BY_TENSOR:
        return
    if known:
        raise Error(
            f"optimizer: {kind.__qualname__} cannot be shared out by parameters; keep it as it is, with "
            "DistributedDataParallel(model) alone"
        )
    why = _mixes(optimizer)
    if why is not None:
        raise Error(
            f"optimizer: {kind.__qualname__} cannot be shared out by parameters: {why}; keep it as it is, with "
            "DistributedDataParallel(model) alone, or give elementwise=True if it works element by element"
        )


def _mixes(optimizer: Optimizer) -> str | None:
    """Why parameters of this optimiser cannot be updated apart from each other; None if they can."""
    failed = ""
    for dtype in (torch.float64, torch.float32):
        try:
            with torch.random.fork_rng(devices=[]):
                return _SmallUpdate(optimizer, dtype).difference()
        except Exception as e:
            failed = f"a trial with small tensors failed ({first_line(e)})"
    return failed


class _SmallUpdate:
    """A few small tensors in the groups of an optimiser, to be updated together and apart."""

    def __init__(self, optimizer: Optimizer, dtype: torch.dtype) -> None:
        draw = torch.Generator().manual_seed(0)

        def some(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
            return torch.randn(tuple(shape), generator=draw, dtype=dtype).to(like.device)

        self._tensors: list[list[torch.Tensor]] = []
        """By group: two of the shapes that the group has, but small."""
        for group in optimizer.param_groups:
            chosen = [p for p in group["params"] if p.numel()][:2]
            self._tensors.append([some([min(size, 4) for size in p.shape], p) for p in chosen])
        self._gradients = [[[some(t.shape, t) for t in group] for group in self._tensors] for _ in range(STEPS)]
        kept = {k: v for k, v in optimizer.__dict__.items() if k not in ("state", "param_groups", "step", *HOOKS)}
        # What the optimiser keeps of its parameters besides its groups is not touched: it gets something small there.
        memo: dict[int, Any] = {id(p): torch.zeros(()) for group in optimizer.param_groups for p in group["params"]}
        self._inner = object.__new__(type(optimizer))
        self._inner.__dict__.update(copy.deepcopy(kept, memo))
        self._inner.param_groups = [copy.deepcopy(options(g)) | {"params": []} for g in optimizer.param_groups]
        for group in self._inner.param_groups:
            if isinstance(group.get("lr"), (int, float)) and not group["lr"]:
                group["lr"] = 1e-3  # a scheduler that warms up begins with 0

    def difference(self) -> str | None:
        """What is wrong when the tensors are updated apart from each other; None if nothing is."""
        together, learnt = self._updated([self._tensors])
        if learnt:
            return "it keeps in its parameter groups what it learns from step to step"
        alone, _ = self._updated(
            [
                [[tensor] if g == k else [] for k in range(len(self._tensors))]
                for g, group in enumerate(self._tensors)
                for tensor in group
            ]
        )
        before = [t for group in self._tensors for t in group]
        for start, one, other in zip(before, together, alone, strict=True):
            change = float((one - start).abs().max())
            rounding = 8 * torch.finfo(start.dtype).eps * float(start.abs().max())
            if not change > 0:
                return "it did not change small tensors in its parameter groups"
            if not float((one - other).abs().max()) <= TOLERANCE * change + rounding:
                return "the update of one parameter depends on others"
        return None

    def _updated(self, parts: Sequence[Sequence[Sequence[torch.Tensor]]]) -> tuple[list[torch.Tensor], bool]:
        """(the tensors after some steps of one optimiser for each part, whether a group's options have changed)."""
        copies = {id(t): t.clone() for group in self._tensors for t in group}
        learnt = False
        for part in parts:
            made = shell(self._inner, [[copies[id(t)] for t in group] for group in part], defaultdict(dict))
            shared = ("state", "param_groups", "defaults", *HOOKS)
            made.__dict__.update(copy.deepcopy({k: v for k, v in made.__dict__.items() if k not in shared}))
            before = copy.deepcopy([options(group) for group in made.param_groups])
            for gradients in self._gradients:
                for group, theirs in zip(self._tensors, gradients, strict=True):
                    for tensor, gradient in zip(group, theirs, strict=True):
                        copies[id(tensor)].grad = gradient.clone()
                with torch.no_grad():
                    made.step()
            learnt |= str(before) != str([options(group) for group in made.param_groups])
        return [copies[id(t)] for group in self._tensors for t in group], learnt
