"""Gradient merging (after MG-WFBP): where to cut the stream of gradients into buckets.

Pure functions; may import `core`.
Begin with `stream.py` (what a partition costs), then `exact.py`; where buckets are whole or split, `cycle.py` and
`cycle_labels.py`. `planner.py` is what callers use.
"""
