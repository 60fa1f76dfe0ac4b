"""`dovetail.Burst`: stages with device counts of their own; samples are re-sharded between them.

May import `core`, `measure` and `planning`.
Begin with `module.py`, then `step.py`.
"""
