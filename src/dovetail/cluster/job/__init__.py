"""A job as its processes share it: its file, how it was submitted, its tensors in shared memory.

May import `core`, `planning` and `train.partial`.
Begin with `spec.py`.
"""
