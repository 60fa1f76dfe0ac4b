"""Which parameters belong to which segment of a model, and how a worker leaves the first segments out of backward.

A worker of depth d takes the parameters of all but the last d segments out of autograd for a step: autograd then
records nothing there, keeps no activation, and ends backward where no earlier parameter needs a gradient. The forward
pass is the model's own, so skip connections across a cut work, and batch norms see every batch.

A parameter that layers of several segments share (tied embeddings) is a *leaf* of its own in each of them: during
forward the later ones use an alias with the same memory, so that each use has its own gradient and contributors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn

from dovetail.core.depth_plan import DepthPhase, DepthPlan, Segment, WorkerPrediction
from dovetail.core.errors import Error
from dovetail.measure.batches import Batch, resized, size
from dovetail.measure.passes import find_layers, untouched


@dataclass(eq=False)
class Leaf:
    """A parameter as one segment uses it."""

    name: str
    segment: int
    tensor: nn.Parameter
    """What autograd sees: the parameter itself or its alias."""
    parameter: nn.Parameter
    """What the user's optimiser sees."""
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    """Where the alias goes during forward."""

    @property
    def alias(self) -> bool:
        return self.tensor is not self.parameter

    def gradient_inside(self) -> str:
        """The error line for a gradient from a backward pass inside another: it may not be complete."""
        return (
            f"parameter {self.name!r} got a gradient in a backward pass inside another, as in reentrant checkpointing: "
            "such a model cannot be cut; pass use_reentrant=False to torch.utils.checkpoint"
        )


def contributors(depths: Sequence[int], segments: int, segment: int) -> list[int]:
    """Workers that compute gradients of a segment, by their depths; segments count from the input."""
    return [worker for worker, depth in enumerate(depths) if depth >= segments - segment]


class Segments:
    """The trained parameters of a model, by segment from the input to the output."""

    def __init__(self, model: nn.Module, plan: DepthPlan) -> None:
        self.count = len(plan.segments)
        self.leaves = _leaves(model, plan)
        self._frozen: list[nn.Parameter] = []
        self._held: dict[Leaf, int] = {}
        trained = {leaf.segment for leaf in self.leaves}
        last = max(trained)
        if last < self.count - 1:
            raise Error(
                f"plan for {plan.profile!r}: its last segment, from layer {plan.layers[plan.segments[-1].start]!r} on, "
                "has no parameter to train: a worker of depth 1 would have nothing to do"
            )

    def contributed(self, depth: int) -> list[Leaf]:
        """Leaves for which a worker of this depth computes gradients."""
        return [leaf for leaf in self.leaves if leaf.segment >= self.count - depth]

    def freeze(self, depth: int) -> None:
        """From now on autograd does not see the segments before the last `depth` ones."""
        self.thaw()
        for leaf in self.leaves:
            if leaf.alias:  # the user may have frozen the parameter, but cannot see its alias
                leaf.tensor.requires_grad_(leaf.parameter.requires_grad)
        for leaf in self.leaves:
            if leaf.segment < self.count - depth and leaf.tensor.requires_grad:
                leaf.tensor.requires_grad_(False)
                self._frozen.append(leaf.tensor)

    def thaw(self) -> None:
        """Undoes `freeze`. Parameters that the user has frozen meanwhile stay frozen."""
        for tensor in self._frozen:
            tensor.requires_grad_(True)
        self._frozen.clear()

    def hold(self, leaf: Leaf) -> None:
        """After a gradient that stays on this rank until the next exchange: remembers its version (torch counts the
        changes of a tensor in place).
        """
        if not leaf.alias and leaf.tensor.grad is not None:
            self._held[leaf] = leaf.tensor.grad._version

    def thrown_away(self) -> bool:
        """Before a forward pass: whether the user has dropped the held gradients, with `zero_grad`.

        Gradients of aliases, which no optimiser sees, are dropped with them. A worker that holds gradients of aliases
        only cannot tell, and keeps them.
        """
        if not self._held or not all(_dropped(leaf, version) for leaf, version in self._held.items()):
            return False  # `_held` stays: no backward pass may follow
        self._held = {}
        for leaf in self.leaves:
            if leaf.alias:
                leaf.tensor.grad = None
        return True

    def join_aliases(self) -> None:
        """A shared parameter's gradient is the sum of those of its uses, each a mean over its own contributors."""
        self._held = {}
        for leaf in self.leaves:
            if leaf.alias and leaf.tensor.grad is not None:
                if leaf.parameter.grad is None:
                    leaf.parameter.grad = leaf.tensor.grad
                else:
                    leaf.parameter.grad += leaf.tensor.grad
                leaf.tensor.grad = None

    def uneven(self, seen: Sequence[set[int]], depths: Sequence[int]) -> str | None:
        """An error line if a contributor got no gradient where another did. `seen`: indices of leaves, by rank."""
        for index, leaf in enumerate(self.leaves):
            expected = contributors(depths, self.count, leaf.segment)
            have = [rank for rank in expected if index in seen[rank]]
            without = [rank for rank in expected if index not in seen[rank]]
            if have and without:
                return (
                    f"parameter {leaf.name!r} got a gradient on rank {have[0]} (depth {depths[have[0]]}) but none on "
                    f"rank {without[0]} (depth {depths[without[0]]}): the cut breaks this model (reentrant "
                    "checkpointing does so); where a layer is used for some inputs only, pass uneven_use=True"
                )
        return None

    @contextmanager
    def aliases(self) -> Iterator[None]:
        """Inside, shared parameters are leaves of their own in each segment."""
        swapped = []
        try:
            for leaf in self.leaves:
                if leaf.alias:
                    if leaf.tensor.data_ptr() != leaf.parameter.data_ptr():  # the user has given it other memory
                        leaf.tensor.data = leaf.parameter.data
                    for module, name in leaf.places:
                        module._parameters[name] = leaf.tensor
                        swapped.append((module, name, leaf.parameter))
            yield
        finally:
            for module, name, parameter in swapped:
                module._parameters[name] = parameter


def _dropped(leaf: Leaf, version: int) -> bool:
    """Whether the user dropped a held gradient. A zero gradient that was not changed is that of a masked loss."""
    gradient = leaf.tensor.grad
    return gradient is None or (gradient._version != version and not bool(gradient.any()))


def _leaves(model: nn.Module, plan: DepthPlan) -> list[Leaf]:
    modules = dict(model.named_modules())
    modules.setdefault(type(model).__name__, model)
    found: dict[tuple[int, int], Leaf] = {}
    names = {id(p): name for name, p in model.named_parameters()}
    home: dict[int, nn.Parameter] = {}
    for index, segment in enumerate(plan.segments):
        for layer in plan.layers[segment.start : segment.stop]:
            if layer not in modules:
                raise Error(f"plan for {plan.profile!r} does not fit this model: it has no layer {layer!r}")
            for name, parameter in modules[layer].named_parameters(recurse=False):
                if not parameter.requires_grad:
                    continue
                key = (id(parameter), index)
                if key not in found:
                    again = id(parameter) in home
                    tensor = nn.Parameter(parameter.detach()) if again else parameter
                    found[key] = Leaf(names[id(parameter)], index, tensor, parameter)
                    home[id(parameter)] = parameter
                if found[key].alias:
                    found[key].places.append((modules[layer], name))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in home:
            raise Error(f"plan for {plan.profile!r} does not fit this model: parameter {name!r} is in no layer of it")
    if not found:
        raise Error(f"plan for {plan.profile!r}: expected a model with parameters to train, got none")
    return list(found.values())


def cut(
    model: nn.Module,
    batch: Batch,
    *,
    at: Sequence[str],
    depths: Sequence[int],
    batches: Sequence[int] | None = None,
    policy: str = "by hand",
) -> DepthPlan:
    """A plan from cut points given by hand: a segment begins with each module that `at` names.

    The order of layers is found in one forward pass on `batch`. Nothing is predicted: the plan's times are zero.
    `batches` defaults to the samples in `batch` on every worker.
    """
    device = next(model.parameters()).device
    own = size(batch)
    args, kwargs = resized(batch, own, device)
    with untouched(model, device):
        layers = list(find_layers(model, lambda: model(*args, **kwargs)).modules)
    starts = [0]
    for name in at:
        within = [i for i, layer in enumerate(layers) if layer == name or layer.startswith(f"{name}.")]
        if not within:
            raise Error(f"at: {name!r}: expected the name of a module that runs in forward, got none of that name")
        if within[0] <= starts[-1]:
            raise Error(f"at: {name!r}: expected cut points in execution order, each after the one before")
        starts.append(within[0])
    segments = tuple(Segment(start=a, stop=b) for a, b in zip(starts, [*starts[1:], len(layers)], strict=True))
    nothing = WorkerPrediction(forward=0.0, backward=0.0, activations=0, sent=0)
    local = tuple(batches) if batches is not None else (own,) * len(depths)

    def phase(d: Sequence[int]) -> DepthPhase:
        return DepthPhase(begins=0.0, depths=tuple(d), batches=local, workers=(nothing,) * len(depths), iteration=0.0)

    plan = DepthPlan(
        policy=policy,
        profile=type(model).__name__,
        network="none",
        layers=tuple(layers),
        segments=segments,
        phases=(phase(depths),),
        full=phase([len(segments)] * len(depths)),
    )
    try:
        plan.check()
    except ValueError as e:
        raise Error(f"cut: {e}") from None
    return plan
