"""A job as its processes share it: its file, its submission, its objects, and its tensors in shared memory.

May import `core`, `planning` and `train.partial`.
Begin with `spec.py`, then `objects.py` and `arena.py`.
"""
