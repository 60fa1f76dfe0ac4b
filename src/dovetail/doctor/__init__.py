"""`dovetail doctor`: every way to train, a few steps each, on somebody's devices, and a report to send.

May import everything below `cli`; only `cli` imports it.
Begin with `examination.py`, the caller's side; `rank_checks.py` runs in each rank, and `checks.py` has what it checks.
"""
