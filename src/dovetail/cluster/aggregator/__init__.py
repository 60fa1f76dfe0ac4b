"""The process of one job: it offers an iteration's tasks, averages gradients, updates, and writes checkpoints.

May import `cluster.job`, `cluster.transport` and `train.partial`.
Begin with `main.py`, then `offers.py`.
"""
