"""The packages of the extra `fabric`, or one line that says how to get them."""

from dovetail.core.errors import MissingExtra

try:
    import networkx as nx  # type: ignore[import-untyped]
    import pyroute2  # type: ignore[import-untyped]
    import yaml  # type: ignore[import-untyped]
except ImportError:
    raise MissingExtra("the fabric", "fabric") from None

__all__ = ["nx", "pyroute2", "yaml"]
