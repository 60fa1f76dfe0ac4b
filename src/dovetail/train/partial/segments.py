"""Which parameters belong to which segment of a model, and how a worker stays out of the first ones.

A worker of depth d takes the gradients of the parameters of the first segments away for a step: autograd then records
nothing there, keeps no activation and stops by itself where no parameter before wants a gradient. The forward pass is
the model's own, so skip connections across a cut work, and batch norms see every batch.

A parameter that layers of several segments share (tied embeddings) is a *leaf* of its own in each of them: during
forward the later ones use an alias with the same memory, so that each use has its own gradient and contributors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn

from dovetail.core.depth_plan import DepthPlan, Phase, Segment, WorkerPrediction
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
        """What is wrong if a backward pass inside another one gave it a gradient: there may be more to come."""
        return (
            f"parameter {self.name!r} got a gradient in a backward pass inside another, as in reentrant checkpointing: "
            "such a model cannot be cut; pass use_reentrant=False to torch.utils.checkpoint"
        )


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
        """What a worker of this depth computes gradients for."""
        return [leaf for leaf in self.leaves if leaf.segment >= self.count - depth]

    def freeze(self, depth: int) -> None:
        """From now on autograd does not see the segments before the last `depth` ones."""
        self.thaw()
        for leaf in self.leaves:
            if leaf.alias:  # the user freezes the parameter and knows of no alias
                leaf.tensor.requires_grad_(leaf.parameter.requires_grad)
        for leaf in self.leaves:
            if leaf.segment < self.count - depth and leaf.tensor.requires_grad:
                leaf.tensor.requires_grad_(False)
                self._frozen.append(leaf.tensor)

    def thaw(self) -> None:
        """Undoes `freeze`. What the user has frozen meanwhile stays so."""
        for tensor in self._frozen:
            tensor.requires_grad_(True)
        self._frozen.clear()

    def hold(self, seen: Iterable[Leaf]) -> None:
        """After an unsynchronised pass: what waits for the next one. Torch counts a tensor's changes in place."""
        self._held = {
            leaf: leaf.tensor.grad._version for leaf in seen if not leaf.alias and leaf.tensor.grad is not None
        }

    def thrown_away(self) -> bool:
        """Before a pass: whether the user has dropped what was held, with `zero_grad`. Aliases', which no optimiser
        knows of, go too. A worker that held gradients of aliases alone cannot tell, and keeps them.
        """
        held, self._held = self._held, {}
        if not held or not all(_dropped(leaf, version) for leaf, version in held.items()):
            return False
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
        """What is wrong if a contributor got no gradient where another did. `seen`: the leaves of every rank."""
        for index, leaf in enumerate(self.leaves):
            expected = [rank for rank, depth in enumerate(depths) if depth >= self.count - leaf.segment]
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
                    if leaf.tensor.data_ptr() != leaf.parameter.data_ptr():  # somebody has given it other memory
                        leaf.tensor.data = leaf.parameter.data
                    for module, name in leaf.places:
                        module._parameters[name] = leaf.tensor
                        swapped.append((module, name, leaf.parameter))
            yield
        finally:
            for module, name, parameter in swapped:
                module._parameters[name] = parameter


def _dropped(leaf: Leaf, version: int) -> bool:
    """Zeros alone do not tell: a batch whose loss is masked out has such gradients, and counts."""
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

    def phase(d: Sequence[int]) -> Phase:
        return Phase(begins=0.0, depths=tuple(d), batches=local, workers=(nothing,) * len(depths), iteration=0.0)

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
