"""`dovetail train`: an unchanged DistributedDataParallel script, planned, under torchrun.

May import `core`, `planning` and the other rooms of `train`.
Begin with `launcher.py`.
"""
