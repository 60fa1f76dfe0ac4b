"""A model as a list of layers: one callable per layer of the plan; every cut passes on all tensors still needed later.

A list of modules, or an nn.Sequential with one child per layer, is such a list already. Any other model is traced with
torch.fx and cut where each of the plan's layers is called; what happens between two layers belongs to the earlier one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx, nn

from dovetail.core.errors import Error, first_line

from .norm import GroupBatchNorm, SampleDropout, convert


def split(
    model: nn.Module | Sequence[nn.Module], names: Sequence[str] | None, count: int
) -> tuple[nn.Module, list[nn.Module]]:
    """(the whole model, its layers), with BatchNorm and Dropout converted. `names` are the plan's layer names, if it
    has any.

    A list becomes an nn.Sequential, so that parameters have names and a checkpoint has keys.
    """
    whole = model if isinstance(model, nn.Module) else nn.Sequential(*model)
    whole = convert(whole)
    if isinstance(whole, nn.Sequential) and len(whole) == count:
        layers = list(whole)
    elif isinstance(model, nn.Module) and names is not None:
        layers = trace(whole, names)
    else:
        have = f"{len(whole)} layers" if isinstance(whole, nn.Sequential) else f"a {type(model).__name__}"
        raise Error(
            f"layers: expected one for each of the plan's {count}, got {have}; give a list of layers, "
            "or a plan that names the model's modules"
        )
    _refuse_shared(whole, layers)
    return whole, layers


def trace(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """One graph per name: from where that module is first called to where the next one is."""
    graph = _graph(model, set(names))
    nodes = list(graph.nodes)
    cuts = [_first_call(nodes, name) for name in names]
    for name, a, b in zip(names[1:], cuts, cuts[1:], strict=False):
        if b <= a:
            raise Error(f"plan: layers: expected the order in which the model calls them, but {name!r} comes too early")
    bounds = [0, *cuts[1:], len(nodes)]
    inputs = [n for n in nodes if n.op == "placeholder"]
    live = [inputs, *(_live(nodes, cut) for cut in cuts[1:])]
    layers: list[nn.Module] = []
    for i in range(len(names)):
        body = [n for n in nodes[bounds[i] : bounds[i + 1]] if n.op not in ("placeholder", "output")]
        layers.append(_layer(model, body, live[i], live[i + 1] if i + 1 < len(names) else None, nodes[-1]))
    return layers


class _LeafTracer(fx.Tracer):
    """Does not trace into the plan's layers, nor into the modules that `convert` has put in."""

    def __init__(self, leaves: set[str]) -> None:
        super().__init__()
        self._leaves = leaves

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        ours = isinstance(m, (GroupBatchNorm, SampleDropout))
        return ours or module_qualified_name in self._leaves or super().is_leaf_module(m, module_qualified_name)


def _graph(model: nn.Module, leaves: set[str]) -> fx.Graph:
    try:
        return _LeafTracer(leaves).trace(model)
    except Exception as e:
        raise Error(
            f"layers: {type(model).__name__} cannot be traced by torch.fx ({first_line(e)}); give a list of layers "
            "instead, cut where the plan cuts"
        ) from None


def _first_call(nodes: list[fx.Node], name: str) -> int:
    for i, node in enumerate(nodes):
        if node.op == "call_module" and (node.target == name or str(node.target).startswith(f"{name}.")):
            return i
    raise Error(f"plan: layers: expected modules of the model, but it never calls {name!r}")


def _live(nodes: list[fx.Node], cut: int) -> list[fx.Node]:
    """Nodes computed before the cut and used at or after it, in order; parameters are fetched where they are used."""
    place = {node: i for i, node in enumerate(nodes)}
    before = [n for n in nodes[:cut] if n.op != "get_attr"]
    return [n for n in before if any(place[user] >= cut for user in n.users)]


def _layer(
    model: nn.Module, body: list[fx.Node], takes: list[fx.Node], gives: list[fx.Node] | None, output: fx.Node
) -> nn.Module:
    """The nodes between two cuts as a module; the last one (`gives` is None) returns the model's output."""
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {n: graph.placeholder(n.name) for n in takes}

    def mapped(node: fx.Node) -> fx.Node:
        if node not in copied and node.op == "get_attr":
            copied[node] = graph.node_copy(node, mapped)
        return copied[node]

    for node in body:
        if node.op != "get_attr":
            copied[node] = graph.node_copy(node, mapped)
    if gives is None:
        graph.output(fx.map_arg(output.args[0], mapped))
    else:
        graph.output(mapped(gives[0]) if len(gives) == 1 else tuple(mapped(n) for n in gives))
    return fx.GraphModule(model, graph)


def _refuse_shared(whole: nn.Module, layers: list[nn.Module]) -> None:
    """Refuses a parameter that two layers use."""
    names = {id(p): n for n, p in whole.named_parameters()}
    seen: dict[int, int] = {}
    for i, layer in enumerate(layers):
        for p in layer.parameters():
            if seen.setdefault(id(p), i) != i:
                raise Error(
                    f"layers: {names.get(id(p), 'a parameter')!r} is used by layers {seen[id(p)]} and {i}; a parameter "
                    "belongs to one layer: merge the layers, or untie the parameter"
                )


def tensors(value: object, what: str) -> list[torch.Tensor]:
    """The tensors of a boundary as a list: one tensor or several, each with the sample as its first dimension."""
    found: list[torch.Tensor] = []
    for t in value if isinstance(value, (tuple, list)) else [value]:
        if not isinstance(t, torch.Tensor) or t.dim() == 0:
            got = "a scalar" if isinstance(t, torch.Tensor) else type(t).__name__
            raise Error(f"{what}: expected tensors with one row per sample, got {got}")
        found.append(t)
    return found
