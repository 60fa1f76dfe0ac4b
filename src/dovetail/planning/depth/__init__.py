"""Partial backpropagation (after SPB): how deep each worker backpropagates, and the guard that limits it.

Pure functions; may import `core` and `planning.merge`.
Begin with `planner.py`.
"""
