"""`dovetail train --emulate`: somebody's unchanged script on emulated accelerators, with real collectives.

May import the rest of `emulate` and what that may; `cli` imports it.
Begin with `emulated_run.py`, the caller's side; `emulated_rank.py` is what runs in each rank. `cuda_stand_in.py` makes
the emulated accelerator the script's CUDA device, `layer_times.py` gives its layers the times of a profile.
"""
