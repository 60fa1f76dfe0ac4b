"""Burst parallelism (after DeepPool): how many devices each layer gets at a fixed global batch.

Pure functions; may import `core` and `planning.merge`.
Begin with `cost.py` (what a layer costs on so many devices), then `planner.py`.
"""
