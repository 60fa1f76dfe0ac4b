"""`dovetail.Burst`: stages with device counts of their own, and samples that move between them.

May import `core`, `measure` and `planning`.
Begin with `module.py`, then `step.py`.
"""
