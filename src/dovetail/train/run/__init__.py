"""`dovetail train`: an unchanged DistributedDataParallel script, planned, under torchrun.

May import `core`, `planning` and the other rooms of `train`.
Begin with `launcher.py`; `__main__.py` is what runs in each rank.
"""
