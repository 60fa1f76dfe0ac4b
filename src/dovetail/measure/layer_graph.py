"""Which layer feeds which: the edges of a profile, from a symbolic trace of the model by torch.fx.

The trace runs the model's code on stand-ins and writes down every call. Modules that the profile calls layers are kept
whole. Everything between them (additions, concatenations, views) is followed: a layer is fed by every layer whose
output reaches it without passing through another.

Work between layers counts to the layer before it, so an addition of two branches belongs to the later of the two layers
that it adds, and the other branch feeds that layer: the profile's layers stay in execution order.

A layer without parameters that runs again (one ReLU for many places) is a layer where it runs first, and work between
layers after that.

A model whose code depends on its data (an `if` on a tensor, a loop over a length) cannot be traced: an Error of one
line says so. Its layers are then taken as a chain, or the edges are given by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from dovetail.core.errors import Error, typed_line
from dovetail.core.profile import Profile

if TYPE_CHECKING:
    from torch import fx, nn

    from .batches import Batch

Edges = tuple[tuple[int, int], ...]


def layer_graph(model: nn.Module, layers: Sequence[str], *, inputs: Sequence[str] = ()) -> Edges:
    """Edges (from, to) between the named layers, given in execution order.

    `inputs` are the names of the arguments that the model is called with; other arguments keep their defaults.
    """
    graph = _trace(model, set(layers), inputs)
    at = {name: i for i, name in enumerate(layers)}
    sources: dict[Any, frozenset[int]] = {}
    edges: set[tuple[int, int]] = set()
    seen = set[str]()
    for node in graph.nodes:
        fed = frozenset[int]().union(*(sources.get(n, frozenset()) for n in node.all_input_nodes))
        target = str(node.target)
        if node.op == "call_module" and target in seen and [*model.get_submodule(target).parameters()]:
            raise Error(
                f"layer {target!r} runs more than once in an iteration: a burst plan needs layers that run once"
            )
        if node.op == "call_module" and target in at and target not in seen:
            here = at[target]
            seen.add(target)
            edges |= {(u, here) for u in fed if u != here}
            sources[node] = frozenset({here})
        elif len(fed) > 1 and node.op != "output":
            # A join without a layer of its own belongs to the last of its layers; the other branches feed that one.
            home = max(fed)
            edges |= {(u, home) for u in fed if u != home}
            sources[node] = frozenset({home})
        else:
            sources[node] = fed
    if backwards := [(u, v) for u, v in edges if u >= v]:
        u, v = backwards[0]
        raise Error(f"layer {layers[u]!r} feeds {layers[v]!r}, which the profile has before it")
    return tuple(sorted(edges))


def with_graph(profile: Profile, model: nn.Module, *, inputs: Sequence[str] = ()) -> Profile:
    """The profile with the edges of its model; without any where the model is a chain."""
    names = [layer.name for layer in profile.layers]
    edges = layer_graph(model, names, inputs=inputs)
    chain = tuple((i, i + 1) for i in range(len(names) - 1))
    return msgspec.structs.replace(profile, edges=() if edges == chain else edges)


def input_names(model: nn.Module, batch: Batch) -> list[str]:
    """The arguments of the model that a batch fills."""
    import inspect

    from .batches import parts

    args, kwargs = parts(batch)
    return [*list(inspect.signature(model.forward).parameters)[: len(args)], *kwargs]


def _trace(model: nn.Module, layers: set[str], inputs: Sequence[str]) -> fx.Graph:
    import inspect

    from torch import fx

    class LayerTracer(fx.Tracer):
        def is_leaf_module(self, module: nn.Module, qualified_name: str) -> bool:
            return qualified_name in layers or super().is_leaf_module(module, qualified_name)

    concrete = None
    if inputs:
        parameters = inspect.signature(model.forward).parameters.values()
        concrete = {p.name: p.default for p in parameters if p.name not in inputs and p.default is not p.empty}
    try:
        return LayerTracer().trace(model, concrete_args=concrete)
    except Exception as e:
        raise Error(
            f"model {type(model).__name__} cannot be traced ({typed_line(e)}): its layers are taken as a "
            f"chain; where it branches, give `edges`, or profile it cut at modules whose code does not depend on data"
        ) from e
