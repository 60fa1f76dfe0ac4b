"""What the fabric needs beyond dovetail itself, or one line that says how to get it."""

from dovetail.core.errors import MissingExtra

try:
    import networkx as nx  # type: ignore[import-untyped]
    import yaml  # type: ignore[import-untyped]
except ImportError:
    raise MissingExtra("the fabric", "fabric") from None

__all__ = ["nx", "yaml"]
